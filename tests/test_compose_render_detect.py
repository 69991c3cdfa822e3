"""Pictures of compose and what is seen in them: exact labels, exact detection, the reward on top."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from stepcredit.rewards import RewardError, get, score
from stepcredit.rewards.compose import ComposeReward
from stepcredit.rewards.geneval_rules import Box, relations
from stepcredit.tasks.base import Prompt, draw
from stepcredit.tasks.compose import prompts as p
from stepcredit.tasks.compose.detect import Detection, detect
from stepcredit.tasks.compose.render import (
    BACKGROUND,
    PALETTE,
    Label,
    coverage,
    render,
    render_batch,
    render_labelled,
)

N = 320


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _of_tag(tag: str, n: int = N) -> list[Prompt]:
    pool = [prompt for prompt in p.all_prompts() if prompt.tag == tag]
    return [pool[i * 37 % len(pool)] for i in range(n)]  # 37 shares no factor with any pool's size


def _pictures(tag: str, seed: int = 0) -> tuple[list[Prompt], Tensor, list[list[Label]]]:
    prompts = _of_tag(tag)
    return prompts, *render_labelled([prompt.metadata for prompt in prompts], seed)


def _gap(a: Box, b: Box) -> float:
    """Distance of two boxes along the axis that separates them best."""
    return max(b[0] - a[2], a[0] - b[2], b[1] - a[3], a[1] - b[3])


def _same(labels: list[Label], found: list[Detection]) -> bool:
    """Class, colour and every side of the box within 1.5 px, one to one."""
    left = list(found)
    for label in labels:
        for seen in left:
            near = all(abs(s - t) <= 1.5 for s, t in zip(seen.box, label.box, strict=True))
            if near and (seen.cls, seen.color) == (label.cls, label.color):
                left.remove(seen)
                break
        else:
            return False
    return not left


def _sure(images: Tensor, least: float = 0.5) -> list[list[Detection]]:
    return [[seen for seen in found if seen.score > least] for found in detect(images)]


def _blur(images: Tensor, sigma: float) -> Tensor:
    weights = torch.exp(-torch.arange(-9, 10.0).square() / (2 * sigma**2))
    kernel = (weights[:, None] * weights / weights.sum() ** 2).expand(3, 1, 19, 19)
    return functional.conv2d(functional.pad(images, (9,) * 4, mode="replicate"), kernel, groups=3)


@pytest.mark.parametrize("tag", p.TAGS)
def test_labels_say_what_the_prompt_asks(tag: str) -> None:
    prompts, images, labels = _pictures(tag)
    assert images.shape == (N, 3, 24, 24)
    assert images.dtype == torch.float32
    assert 0 <= float(images.min()) <= float(images.max()) <= 1
    for prompt, objects in zip(prompts, labels, strict=True):
        asked = [(c["class"], c.get("color")) for c in prompt.metadata["include"] for _ in range(c["count"])]
        assert [label.cls for label in objects] == [cls for cls, _ in asked]
        assert all(want in (None, label.color) for (_, want), label in zip(asked, objects, strict=True))
        for x1, y1, x2, y2 in (label.box for label in objects):
            assert x1 in (2, 6, 10, 14)
            assert y1 in (2, 6, 10, 14)
            assert (x2 - x1, y2 - y1) == (8, 8)
        assert all(_gap(a.box, b.box) >= 2 for a, b in combinations(objects, 2))
        if tag == "position":
            target, placed = objects
            assert prompt.metadata["include"][1]["position"][0] in relations(placed.box, target.box)


def test_pixels_outside_the_boxes_are_background_and_boxes_are_tight() -> None:
    prompts, images, labels = _pictures("color_attr")
    for prompt, image, objects in zip(prompts, images, labels, strict=True):
        ground = torch.tensor(BACKGROUND[prompt.metadata["background"]])[:, None, None]
        painted = (image - ground).abs().amax(0) > 1e-6
        for box in (label.box for label in objects):
            x1, y1, x2, y2 = (int(side) for side in box)
            inside = painted[y1:y2, x1:x2]
            assert all(bool(edge.any()) for edge in (inside[0], inside[-1], inside[:, 0], inside[:, -1]))
            painted[y1:y2, x1:x2] = False
        assert not bool(painted.any())


def test_open_colours_and_places_vary() -> None:
    prompt = next(x for x in p.all_prompts() if x.text == "three circles on white")
    _, labels = render_labelled([prompt.metadata] * 200, seed=0)
    assert {label.color for objects in labels for label in objects} == set(p.COLORS)
    assert any(len({label.color for label in objects}) == 3 for objects in labels)
    single = next(x for x in p.all_prompts() if x.text == "a circle on white")
    _, labels = render_labelled([single.metadata] * 200, seed=0)
    assert len({label.box for objects in labels for label in objects}) == 16


def test_rendering_is_deterministic_in_the_seed() -> None:
    prompts = draw(p.train_prompts(), 24, 0)
    assert torch.equal(render_batch(prompts, seed=3), render_batch(prompts, seed=3))
    assert not torch.equal(render_batch(prompts, seed=3), render_batch(prompts, seed=4))
    image, labels = render(prompts[0].metadata, seed=3)
    assert image.shape == (3, 24, 24)
    assert labels


def test_coverage_is_the_exact_area_up_to_supersampling() -> None:
    size = 12
    assert coverage("square", size).sum() == size**2
    assert coverage("circle", size).sum() == pytest.approx(torch.pi * 36, rel=0.01)
    assert coverage("triangle", size).sum() == pytest.approx(size**2 / 2, rel=0.01)
    assert coverage("diamond", size).sum() == pytest.approx(size**2 / 2, rel=0.05)
    assert coverage("cross", size).sum() == pytest.approx(size**2 * 5 / 9, rel=0.01)
    assert coverage("ring", size).sum() == pytest.approx(torch.pi * 36 * (1 - 0.55**2), rel=0.02)
    with pytest.raises(ValueError, match="shape 'star' is unknown"):
        coverage("star", size)


def test_rendering_refuses_too_many_objects() -> None:
    metadata = {"include": [{"class": "ring", "count": 5}], "prompt": "five rings", "background": "grey"}
    with pytest.raises(ValueError, match="asks for 5 objects; at most 4 fit"):
        render(metadata, seed=0)


@pytest.mark.parametrize("tag", p.TAGS)
def test_detection_is_right_on_rendered_pictures(tag: str) -> None:
    _, images, labels = _pictures(tag, seed=1)
    noisy = (images + 0.03 * torch.randn(images.shape, generator=torch.Generator().manual_seed(0))).clamp(0, 1)
    for pictures in (images, noisy, (images * 255).round() / 255, 0.9 * images + 0.05):
        right = sum(_same(*pair) for pair in zip(labels, _sure(pictures), strict=True))
        assert right >= 0.995 * N


@pytest.mark.parametrize("background", p.BACKGROUNDS)
@pytest.mark.parametrize("color", p.COLORS)
def test_every_colour_is_told_apart_on_every_background_at_half_coverage(color: str, background: str) -> None:
    # A square with half-covered edges: the edge of yellow on black is nearer to orange than to yellow.
    ground, paint = torch.tensor(BACKGROUND[background]), torch.tensor(PALETTE[color])
    alpha = torch.zeros(24, 24)
    alpha[9:21, 9:21] = 0.6
    alpha[10:20, 10:20] = 1
    image = ground[:, None, None] + alpha * (paint - ground)[:, None, None]
    (only,) = detect(image[None])[0]
    assert (only.cls, only.color) == ("square", color)
    assert all(abs(s - t) <= 0.75 for s, t in zip(only.box, (9.4, 9.4, 20.6, 20.6), strict=True))


def test_blurred_estimates_fade_instead_of_lying() -> None:
    _, images, labels = _pictures("color_attr")
    true = sum(len(objects) for objects in labels)
    counts = [sum(map(len, _sure(_blur(images, sigma)))) for sigma in (0.5, 1.0, 2.0, 4.0)]
    assert counts[0] == true
    assert counts == sorted(counts, reverse=True)
    assert counts[2] < 0.1 * true
    assert counts[3] <= 0.02 * true


@pytest.mark.parametrize("tag", p.TAGS)
@pytest.mark.parametrize("sigma", [0.8, 1.2])
def test_what_is_sure_in_a_blurred_picture_is_true(tag: str, sigma: float) -> None:
    # The corners of a square melt first: it must become unsure, not a sure circle.
    _, images, labels = _pictures(tag)
    for objects, found in zip(labels, _sure(_blur(images, sigma)), strict=True):
        assert {(seen.cls, seen.color) for seen in found} <= {(label.cls, label.color) for label in objects}


def test_faint_objects_keep_their_shape_until_they_are_too_faint() -> None:
    _, images, labels = _pictures("color_attr")
    ground = images[:, :, :1, :1]  # a corner is background
    for contrast, expected in ((0.75, 1.0), (0.55, 0.0)):
        faded = ground + contrast * (images - ground)
        found = _sure(faded)
        assert sum(map(len, found)) == expected * sum(map(len, labels))
        assert all(_same(*pair) for pair in zip(labels, found, strict=True)) is (expected == 1)


@pytest.mark.parametrize("shape", p.SHAPES)
def test_a_hue_between_two_colours_makes_one_object_of_the_nearer_colour(shape: str) -> None:
    # Mottled about the middle of yellow and orange: single pixels are nearest to either.
    yellow, orange = torch.tensor(PALETTE["yellow"]), torch.tensor(PALETTE["orange"])
    wobble = torch.rand(24, 24, generator=torch.Generator().manual_seed(0)) * 0.2
    share = 0.36 + wobble  # of orange: .46 on average
    paint = (1 - share) * yellow[:, None, None] + share * orange[:, None, None]
    ground = torch.full((3, 24, 24), 0.62)
    alpha = torch.zeros(24, 24)
    alpha[6:14, 6:14] = torch.from_numpy(coverage(shape, 8))
    (only,) = _sure((ground + alpha * (paint - ground))[None])[0]
    assert (only.cls, only.color) == (shape, "yellow")


def test_sure_detections_of_a_half_way_blend_are_few() -> None:
    prompts, images, labels = _pictures("two_object")
    by_ground = sorted(range(N), key=lambda i: prompts[i].metadata["background"])
    images = images[by_ground]  # neighbours share a background: the fair case of two minds about one picture
    blend = (images + images.roll(1, 0)) / 2
    assert sum(map(len, _sure(blend))) < 0.2 * sum(map(len, labels))


def test_pictures_without_objects_have_none() -> None:
    flat = torch.stack([torch.full((3, 24, 24), level) for level in (0.0, 0.3, 0.5, 1.0)])
    red = torch.tensor(PALETTE["red"])[:, None, None].expand(1, 3, 24, 24)
    noise = torch.rand(16, 3, 24, 24, generator=torch.Generator().manual_seed(0))
    ramp = torch.linspace(0, 1, 24).expand(1, 3, 24, 24)
    for images in (flat, red, noise, ramp, torch.full((2, 3, 24, 24), float("nan"))):
        assert not any(_sure(images))
    assert detect(torch.empty(0, 3, 24, 24)) == []


def test_dirt_is_dropped_and_touching_colours_are_told_apart() -> None:
    image = torch.ones(3, 24, 24)
    image[:, 4:14, 4:14] = torch.tensor(PALETTE["blue"])[:, None, None]
    image[:, 4:14, 14:24] = torch.tensor(PALETTE["red"])[:, None, None]
    image[:, 18:20, 18:20] = torch.tensor(PALETTE["green"])[:, None, None]
    found = sorted(detect(image[None])[0], key=lambda seen: seen.box)
    assert [(seen.cls, seen.color, seen.box) for seen in found] == [
        ("square", "blue", (4.0, 4.0, 14.0, 14.0)),
        ("square", "red", (14.0, 4.0, 24.0, 14.0)),
    ]


def test_a_shape_between_two_shapes_is_not_sure_of_either() -> None:
    blue = torch.tensor(PALETTE["blue"])[:, None, None] - 1
    scores = []
    for share in (0.0, 0.5, 1.0):  # from a circle to a square
        image = torch.ones(3, 24, 24)
        mixed = (1 - share) * torch.from_numpy(coverage("circle", 12)) + share * torch.from_numpy(
            coverage("square", 12)
        )
        image[:, 6:18, 6:18] += mixed * blue
        scores.append(detect(image[None])[0][0].score)
    assert scores[1] < 0.8 < 0.9 < min(scores[0], scores[2])


@pytest.mark.parametrize("mode", ["partial", "official", "strict"])
def test_reward_is_one_on_rendered_pictures_and_falls_on_others(mode: str) -> None:
    prompts = draw(p.all_prompts(), 120, 0)
    images = render_batch(prompts, seed=0)
    texts, metadata = [x.text for x in prompts], [x.metadata for x in prompts]
    reward = get("compose", mode=mode)
    assert torch.equal(score(reward, images, texts, metadata), torch.ones(120))
    assert float(score(reward, torch.full_like(images, 0.5), texts, metadata).max()) == 0
    shuffled = score(reward, images.roll(1, 0), texts, metadata)
    assert float(shuffled.mean()) < 0.3


def test_exact_is_where_partial_credit_is_full() -> None:
    prompts = draw(p.all_prompts(), 120, 1)
    # Alternate rows get the picture of another prompt of the same tag: some still fit, some in part, some not.
    images = render_batch([prompts[(i + 6 * (i % 2)) % 120] for i in range(120)], seed=0)
    metadata, reward = [x.metadata for x in prompts], ComposeReward()
    values, exact = reward(images, [""] * 120, metadata), reward.exact(images, metadata)
    assert exact.dtype == torch.bool
    assert torch.equal(values == 1, exact)
    assert bool(exact[::2].all())
    assert int(((values > 0) & (values < 1)).sum()) > 0


def test_reward_self_test_and_options() -> None:
    test, reward = get("compose").self_test(), get("compose")
    values = reward(torch.stack([test.good, test.bad]), [test.prompt] * 2, [test.metadata] * 2)
    assert values.tolist() == [1.0, 0.5]  # both colours wrong: terms 1, 0, 1, 0
    assert values[0] - values[1] > test.margin
    with pytest.raises(ValueError, match="mode must be one of partial, official, strict; got 'exact'"):
        get("compose", mode="exact")
    with pytest.raises(ValueError, match="threshold must lie in"):
        get("compose", threshold=1.5)


def test_reward_takes_another_detector() -> None:
    def sees_a_ring(images: Tensor) -> list[list[Detection]]:
        return [[Detection("ring", "red", 0.6, (1.0, 1.0, 9.0, 9.0))] for _ in images]

    metadata = [{"include": [{"class": "ring", "count": 1}]}, {"include": [{"class": "cross", "count": 1}]}]
    images = torch.zeros(2, 3, 24, 24)
    assert ComposeReward(detector=sees_a_ring)(images, [""] * 2, metadata).tolist() == [1.0, 0.0]
    assert ComposeReward(detector=sees_a_ring, threshold=0.6)(images, [""] * 2, metadata).tolist() == [0.0, 0.0]


def test_reward_refuses_other_sizes_and_marks_what_is_not_finite() -> None:
    metadata = [{"include": [{"class": "ring", "count": 1}]}]
    with pytest.raises(ValueError, match=r"images of shape \(1, 3, 64, 64\) cannot be read"):
        ComposeReward()(torch.zeros(1, 3, 64, 64), [""], metadata)
    with pytest.raises(RewardError, match="metadata 0 has no 'include' clauses"):
        ComposeReward()(torch.zeros(1, 3, 24, 24), [""], [{}])
    images = torch.zeros(2, 3, 24, 24)
    images[0, 0, 0, 0] = float("nan")
    values = ComposeReward()(images, [""] * 2, metadata * 2)
    assert values.isnan().tolist() == [True, False]
