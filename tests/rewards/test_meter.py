"""What rewards say beside their score, and what they cost."""

import math

import pytest
import torch

from stepcredit.rewards import FunctionReward, RewardError, RewardInfo, SelfTest, get
from stepcredit.rewards.base import join, judge
from stepcredit.rewards.cache import Cached
from stepcredit.rewards.composite import Composite
from stepcredit.rewards.meter import Metered, costs, metered

NAN = float("nan")


class Parts:
    """Red as the score, green as a component, and an exact verdict; batches of two."""

    def __init__(self, **other):
        self.other, self.asked = other, 0
        self.info = RewardInfo("parts", (0.0, 1.0), "own", "test", batch_size=2)

    def __call__(self, images, prompts, metadata):
        return self.components(images, prompts, metadata)["score"]

    def components(self, images, prompts, metadata):
        self.asked += len(images)
        red, green = images[:, 0].mean((1, 2)), images[:, 1].mean((1, 2))
        return {"score": red, "green": green, "exact": (red == 1).float(), **self.other}

    def self_test(self):
        return SelfTest(torch.ones(3, 2, 2), torch.zeros(3, 2, 2), "x", {})


def flat(*colours):
    return torch.tensor(colours, dtype=torch.float32)[:, :, None, None].expand(-1, 3, 2, 2).clone()


IMAGES = flat((1, 0.25, 0), (0.5, 0.5, 0), (1, 1, 0))
ASK = (["p"] * 3, [{}] * 3)


def test_one_look_gives_score_components_and_verdict():
    reward = Parts()
    found = judge(reward, IMAGES, *ASK)
    assert found.score.tolist() == [1.0, 0.5, 1.0]
    assert {name: values.tolist() for name, values in found.components.items()} == {"green": [0.25, 0.5, 1.0]}
    assert found.exact.tolist() == [1.0, 0.0, 1.0]
    assert reward.asked == 3
    twice = join([found, found])
    assert twice.components["green"].tolist() == [0.25, 0.5, 1.0] * 2
    assert twice.exact.tolist() == [1.0, 0.0, 1.0] * 2


def test_a_verdict_on_a_sample_that_failed_is_no_verdict():
    found = judge(Parts(score=torch.tensor([NAN, 0.5])), IMAGES[:2], ["p"] * 2, [{}] * 2)
    assert math.isnan(found.exact[0])
    assert found.exact[1] == 0


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"green": torch.zeros(3)}, r"'parts' returned shape \(3,\) for 2 images"),
        ({"green": torch.zeros(2, dtype=torch.long)}, "'parts' returned a torch.int64 tensor"),
        ({"green": torch.tensor([0.0, math.inf])}, "'parts' is infinite for sample 1"),
    ],
)
def test_components_are_held_to_the_contract(other, words):
    with pytest.raises(RewardError, match=words):
        judge(Parts(**other), IMAGES, *ASK)


def test_costs_are_counted_with_and_without_a_cache():
    plain = metered(Parts())
    judge(plain, IMAGES, *ASK)
    (row,) = costs(plain)
    assert (row["name"], row["calls"], row["images"], row["cache_hits"]) == ("parts", 2, 3, None)  # batches 2 + 1
    assert row["seconds"] > 0
    kept = metered(Parts(), cache=10)
    first, second = judge(kept, IMAGES, *ASK), judge(kept, IMAGES, *ASK)
    assert torch.equal(first.score, second.score)
    assert torch.equal(first.components["green"], second.components["green"])
    assert torch.equal(first.exact, second.exact)
    (row,) = costs(kept)
    assert (row["images"], row["cache_hits"]) == (6, 3)
    assert kept.reward.reward.asked == 3
    with pytest.raises(ValueError, match="reward_cache"):
        metered(Parts(), cache=-1)


def test_every_part_of_a_composite_has_its_row_and_groups_are_never_cached():
    whole = metered(Composite({"a": Parts(), "b": get("jpeg_size")}, {"a": 1.0, "b": 1.0}), cache=5)
    judge(whole, IMAGES, *ASK)
    assert [(row["name"], row["images"]) for row in costs(whole)] == [("parts", 3), ("jpeg_size", 3)]
    assert isinstance(whole.parts["a"].reward, Cached)
    groups = Parts()
    groups.per_image = False
    assert metered(groups, cache=5).reward is groups


def test_a_metered_reward_is_the_reward():
    def red(images, prompts, metadata):
        return images[:, 0].mean((1, 2))

    inner = FunctionReward(RewardInfo("red", (0, 1), "own", "test"), red, SelfTest(IMAGES[0], IMAGES[1], "x", {}))
    outer = metered(inner)
    assert isinstance(outer, Metered)
    assert outer.info is inner.info
    assert outer.test is inner.test
    assert not hasattr(outer, "components")
    assert judge(outer, IMAGES, *ASK).exact is None
