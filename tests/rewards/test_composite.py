"""Combining rewards: z-scores worked by hand, groups, NaN, direction."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from stepcredit.rewards import FunctionReward, RewardError, RewardInfo, SelfTest, get, score, selftest
from stepcredit.rewards.composite import Composite, combine

NAN = float("nan")


def _reward(name: str, channel: int, direction: str = "higher", batch_size: int = 64) -> FunctionReward:
    """Mean of one channel; NaN for an image whose first pixel is 1 in all channels."""

    def mean(images: Tensor, prompts: object, metadata: object) -> Tensor:
        return images[:, channel].mean(dim=(1, 2)).masked_fill(images[:, :, 0, 0].amin(1) == 1, NAN)

    good, bad = torch.zeros(3, 4, 4), torch.zeros(3, 4, 4)
    (good if direction == "higher" else bad)[channel] = 1
    info = RewardInfo(name, (0.0, 1.0), "own", name, direction=direction, batch_size=batch_size)  # type: ignore[arg-type]
    return FunctionReward(info, mean, SelfTest(good, bad, "x", {}))


def test_z_scores_by_hand() -> None:
    # Group 1, 2, 3: mean 2, population std sqrt(2/3). Group 5, 5, 5 has no spread.
    a = torch.tensor([[1.0, 2.0, 3.0], [5.0, 5.0, 5.0]])
    b = torch.tensor([[0.0, 0.0, 3.0], [0.0, 1.0, 2.0]])
    found = combine({"a": a, "b": b}, {"a": 2.0, "b": 1.0})
    z = math.sqrt(1.5)
    first = [-2 * z - 1 / math.sqrt(2), -1 / math.sqrt(2), 2 * z + math.sqrt(2)]
    assert torch.allclose(found, torch.tensor([first, [-z, 0.0, z]]))
    assert found.dtype == torch.float32


def test_units_cancel_and_tiny_units_count_in_full() -> None:
    a, b = torch.rand(4, 8, generator=torch.Generator().manual_seed(0)), torch.rand(4, 8)
    weights = {"a": 1.0, "b": 0.5}
    assert torch.allclose(
        combine({"a": a, "b": b}, weights), combine({"a": a * 1e-6 + 3e-6, "b": b * 100 - 7}, weights), atol=1e-4
    )
    # Float noise on equal scores is not a preference.
    noisy = torch.full((1, 4), 21.5) + torch.tensor([0.0, 1e-6, 0.0, 0.0])
    assert combine({"a": noisy}, {"a": 1.0}).abs().max() == 0


def test_nan_takes_the_member_out_of_every_statistic() -> None:
    a = torch.tensor([1.0, 3.0, 1000.0, 2.0])
    b = torch.tensor([0.0, 1.0, NAN, 2.0])
    found = combine({"a": a, "b": b}, {"a": 1.0, "b": 1.0})
    kept = combine({"a": a[[0, 1, 3]], "b": b[[0, 1, 3]]}, {"a": 1.0, "b": 1.0})
    assert found.isnan().tolist() == [False, False, True, False]
    assert torch.allclose(found[[0, 1, 3]], kept)
    summed = combine({"a": a, "b": b}, {"a": 1.0, "b": 10.0}, how="weighted_sum")
    assert torch.equal(summed[[0, 1, 3]], torch.tensor([1.0, 13.0, 22.0]))
    assert bool(summed[2].isnan())
    assert combine({"a": torch.full((3,), NAN)}, {"a": 1.0}).isnan().all()


def test_statistics_over_states_and_members_share_one_scale() -> None:
    r = torch.tensor([[[0.0, 1.0], [0.0, 3.0]]])  # [1, G=2, T+1=2]
    pooled = combine({"a": r}, {"a": 1.0}, dims=(-2, -1))
    assert torch.allclose(pooled, (r - 1) / math.sqrt(1.5))  # mean 1, variance (1+0+1+4)/4
    # Differences between states keep their proportions, which per-state statistics would not.
    assert torch.allclose(pooled[0, 1, 1] - pooled[0, 1, 0], 3 * (pooled[0, 0, 1] - pooled[0, 0, 0]))


@pytest.mark.parametrize(
    ("rewards", "weights", "message"),
    [
        ({"a": torch.zeros(2)}, {"b": 1.0}, "must name the same"),
        ({}, {}, "must name the same"),
        ({"a": torch.zeros(2), "b": torch.zeros(3)}, {"a": 1.0, "b": 1.0}, "differ in shape"),
        ({"a": torch.zeros(2)}, {"a": NAN}, "finite"),
        ({"a": torch.zeros(2)}, {"a": 0.0}, "not all zero"),
    ],
)
def test_bad_combinations(rewards: dict[str, Tensor], weights: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        combine(rewards, weights)


def test_groups_are_prompts_or_runs() -> None:
    images = torch.rand(6, 3, 4, 4, generator=torch.Generator().manual_seed(1))
    parts = {"red": _reward("red", 0, batch_size=2), "blue": _reward("blue", 2, direction="lower", batch_size=4)}
    weights = {"red": 1.0, "blue": 2.0}
    interleaved = ["p", "q"] * 3
    found = Composite(parts, weights).components(images, interleaved, [{}] * 6)
    red, blue = images[:, 0].mean((1, 2)), images[:, 2].mean((1, 2))
    assert torch.allclose(found["red"], red)
    assert torch.allclose(found["blue"], blue)
    for rows in ([0, 2, 4], [1, 3, 5]):
        expected = combine({"red": red[rows], "blue": -blue[rows]}, weights)
        assert torch.allclose(found["score"][rows], expected, atol=1e-5)
    in_runs = Composite(parts, weights, group_size=3)(images, ["p"] * 6, [{}] * 6)
    expected = combine({"red": red.reshape(2, 3), "blue": -blue.reshape(2, 3)}, weights)
    assert torch.allclose(in_runs.reshape(2, 3), expected, atol=1e-5)
    apart = Composite(parts, weights)(images, ["p"] * 6, [{"k": 0}, {"k": 1}] * 3)
    assert torch.allclose(apart, found["score"])
    with pytest.raises(RewardError, match="6 images do not divide into groups of 4"):
        Composite(parts, weights, group_size=4)(images, ["p"] * 6, [{}] * 6)


def test_a_group_is_never_cut_and_nan_propagates() -> None:
    images = torch.rand(130, 3, 2, 2)
    images[5] = 1.0
    reward = Composite({"red": _reward("red", 0, batch_size=7)}, {"red": 1.0})
    found = score(reward, images, ["p"] * 130, [{}] * 130)
    assert found.isnan().nonzero().flatten().tolist() == [5]
    assert abs(float(found.nanmean())) < 1e-5


def test_by_names_with_options_and_bounds() -> None:
    reward = get("composite", rewards={"jpeg_size": {"weight": 0.5, "goal": "large"}}, how="weighted_sum")
    assert isinstance(reward, Composite)
    assert reward.info.range == (0.0, math.inf)
    assert reward.weights == {"jpeg_size": 0.5}
    with pytest.raises(ValueError, match="did you mean 'jpeg_size'"):
        get("composite", rewards={"jpg_size": 1.0})
    with pytest.raises(ValueError, match="group_size must be at least 2"):
        get("composite", rewards={"jpeg_size": 1.0}, group_size=1)


def test_self_tests_run_part_by_part() -> None:
    parts = {"red": _reward("red", 0), "blue": _reward("blue", 2, direction="lower")}
    outcomes = selftest.run(Composite(parts, {"red": 1.0, "blue": 1.0}))
    assert [(o.name, o.passed) for o in outcomes] == [("red", True), ("blue", True)]
    broken = FunctionReward(parts["red"].info, lambda i, p, m: [NAN] * len(i), parts["red"].test)
    (outcome,) = selftest.run(broken)
    assert not outcome.passed
    assert "FAILS" in str(outcome)


def test_parts_say_their_own_components_beside_their_score() -> None:
    class Told(FunctionReward):
        def components(self, images: Tensor, prompts: object, metadata: object) -> dict[str, Tensor]:
            red = images[:, 0].mean(dim=(1, 2))
            return {"score": red, "twice": 2 * red, "exact": (red > 0.5).float()}

    plain = _reward("red", 0)
    told = Told(plain.info, plain.function, plain.test)
    images = torch.rand(4, 3, 4, 4, generator=torch.Generator().manual_seed(1))
    found = Composite({"red": told}, {"red": 1.0}).components(images, ["p"] * 4, [{}] * 4)
    red = images[:, 0].mean(dim=(1, 2))
    assert list(found) == ["score", "red", "red.twice", "red.exact"]
    assert torch.equal(found["red.twice"], 2 * red)
    assert torch.equal(found["red.exact"], (red > 0.5).float())


def test_the_flat_form_of_recipes_is_the_nested_one() -> None:
    reward = get(
        "composite", **{"jpeg_size": 0.5, "jpeg_size.goal": "large", "how": "weighted_sum", "tiny_pickscore": 2}
    )
    assert reward.weights == {"jpeg_size": 0.5, "tiny_pickscore": 2.0}
    assert reward.how == "weighted_sum"
    images = torch.rand(1, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    large = score(get("jpeg_size", goal="large"), images, ["p"], [{}])
    assert torch.equal(reward.components(images, ["p"], [{}])["jpeg_size"], large)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"jpeg_sise": 1.0}, "did you mean 'jpeg_size'"),
        ({"jpeg_size.goal": "large"}, "neither a reward nor an option of one that has a weight"),
        ({"jpeg_size": "much"}, "the weight of 'jpeg_size' must be a number; got 'much'"),
        ({"jpeg_size": True}, "must be a number; got True"),
        ({}, "names no reward"),
        ({"jpeg_size": 1.0, "jpeg_size.gaol": "large"}, "its options are: "),
    ],
)
def test_bad_flat_options(options: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        get("composite", **options)


def test_evaluations_are_in_deviations_of_the_base() -> None:
    reward = Composite({"a": _reward("a", 0), "b": _reward("b", 1, "lower")}, {"a": 1.0, "b": 2.0})
    base = {"a": torch.tensor([1.0, 3.0, NAN]), "b": torch.tensor([10.0, 30.0, 20.0])}  # deviations 1 and sqrt(200/3)
    tuned = {"a": torch.tensor([2.0, 4.0, NAN]), "b": torch.tensor([20.0, 10.0, 0.0])}
    deviation = math.sqrt(200 / 3)
    expected = [0.0 + 2 * 0.0, 2.0 + 2 * 10 / deviation]
    found = reward.standardised(tuned, base)
    assert torch.allclose(found[:2], torch.tensor(expected))
    assert math.isnan(found[2])
    still = {"a": torch.ones(3), "b": base["b"]}  # no spread in the base: no unit to measure in
    assert torch.allclose(reward.standardised({**tuned, "a": torch.zeros(3)}, still)[1], torch.tensor(20 / deviation))
