"""The rehearsals' GenEval: tiny random networks, and behind them the very code of the real reward."""

import pytest
import torch

from stepcredit import rewards, tasks
from stepcredit.rewards import RewardError, geneval, geneval_rules, selftest
from stepcredit.rewards.base import judge
from stepcredit.rewards.geneval import GenEval
from stepcredit.rewards.tiny import DETECTOR_SIDE
from stepcredit.tasks import geneval as task
from stepcredit.training import recipe as recipes
from stepcredit.training import rehearsal

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def tiny():
    return rewards.get("tiny_geneval")


@pytest.fixture(scope="module")
def images():
    """Smooth random pictures of a rehearsal's size, ``[16, 3, 32, 32]``."""
    coarse = torch.rand(16, 3, 4, 4, generator=torch.Generator().manual_seed(1))
    return torch.nn.functional.interpolate(coarse, (32, 32), mode="bilinear").clamp(0, 1)


def asked(tag, *include):
    return {"tag": tag, "include": list(include)}


def test_what_is_behind_the_score_is_the_real_reward(tiny, images):
    inside = tiny._geneval
    assert type(inside) is GenEval
    assert type(inside._detector).__name__ == "Mask2FormerForUniversalSegmentation"
    assert type(inside._colour.model).__name__ == "CLIPModel"
    assert sum(p.numel() for network in tiny.networks for p in network.parameters()) < 300_000
    assert inside.classes == geneval.COCO
    metadata = [asked("single_object", {"class": "cat", "count": 1})] * 16
    told = judge(tiny, images, [""] * 16, metadata)
    parts = inside.components(images, [""] * 16, metadata)
    size = rewards.get("jpeg_size", goal="large", unit="bits_per_pixel")(images, [""] * 16, metadata)
    assert torch.equal(told.score, parts["flow_grpo"] + size)
    assert torch.equal(told.exact, parts["official"])
    assert set(told.components) == {"official", "strict", "flow_grpo"}


def test_random_pictures_show_objects_with_masks_and_colours(tiny, images):
    """Else a rehearsal would prove nothing of what comes after the networks."""
    metadata = [asked("colors", *({"class": name, "count": 1, "color": "red"} for name in geneval.COCO))] * 16
    seen = tiny._geneval.objects(images, metadata)
    every = [one for picture in seen for one in picture]
    assert len(every) > 16
    assert all(one.score > geneval_rules.CONFIDENCE for one in every)
    assert len({one.cls for one in every}) > 3
    assert all(one.color in geneval.COLOURS for one in every)
    assert len({one.color for one in every}) > 1
    assert all(one.instance.mask.shape == (32, 32) for one in every)
    assert len({int(one.instance.mask.sum()) for one in every}) > 8
    surest = tiny._geneval.objects(images, [asked("counting", {"class": "cat", "count": 1})] * 16)
    assert any(surest)  # above the stricter threshold of counting


def test_partial_credit_is_sometimes_earned(tiny, images):
    """Every class once: what the detector happens to see earns credit, the rest none."""
    every = [asked("single_object", {"class": name, "count": 1}) for name in geneval.COCO]
    earned = torch.stack([tiny._geneval.components(images[:1], [""], [entry])["flow_grpo"] for entry in every])
    assert 0 < float(earned.mean()) < 1


def test_the_detector_sees_small_pictures_and_small_masks_come_back(tiny):
    seen = []
    hook = tiny._geneval._detector.register_forward_pre_hook(
        lambda module, args, options: seen.append(tuple(options["pixel_values"].shape)), with_kwargs=True
    )
    tiny(torch.zeros(1, 3, 40, 56), [""], [asked("single_object", {"class": "cat", "count": 1})])
    hook.remove()
    assert DETECTOR_SIDE == 64
    assert seen == [(1, 3, 64, 96)]  # 64 x 89.6, padded to multiples of 32


def test_it_passes_its_self_test_and_is_the_same_in_every_process(tiny, images):
    assert all(outcome.passed for outcome in selftest.run(tiny))
    before = torch.get_rng_state()
    again = rewards.get("tiny_geneval")
    assert torch.equal(torch.get_rng_state(), before)
    metadata = [asked("counting", {"class": "dog", "count": 2})] * 16
    assert torch.equal(tiny(images, [""] * 16, metadata), again(images, [""] * 16, metadata))
    with pytest.raises(RewardError, match="no 'tag'"):
        tiny(images[:1], [""], [{}])


def test_prompts_of_the_task_can_be_judged(tiny, images):
    prompts = tasks.draw(task.train_prompts(), 16, "these")
    assert {prompt.tag for prompt in prompts} == {prompt.tag for prompt in task.train_prompts()}
    told = judge(tiny, images, [p.text for p in prompts], [p.metadata for p in prompts])
    assert bool(told.score.isfinite().all())


@pytest.mark.parametrize("name", [name for name in recipes.names() if "geneval" in name])
def test_bundled_recipes_are_rehearsed_with_it(name):
    small = rehearsal.rehearsed(recipes.load(name))
    assert (small.reward, small.reward_options) == ("tiny_geneval", {})
