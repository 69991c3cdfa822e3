"""The content cache: same scores, fewer calls, nothing kept that failed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from stepcredit.rewards import FunctionReward, RewardError, RewardInfo, SelfTest
from stepcredit.rewards.cache import Cached
from stepcredit.rewards.composite import Composite

NAN = float("nan")


class Counter:
    """The mean of the red channel; remembers how many images it saw, and is blind (NaN) at first if told so."""

    def __init__(self, blind: bool = False) -> None:
        self.seen: list[int] = []
        self.blind = blind

    def __call__(self, images: Tensor, prompts: object, metadata: object) -> Tensor:
        self.seen.append(len(images))
        return torch.full((len(images),), NAN) if self.blind else images[:, 0].mean((1, 2))


def _cached(counter: Counter, capacity: int = 100, batch_size: int = 64) -> Cached:
    info = RewardInfo("red", (0.0, 1.0), "own", "red", batch_size=batch_size)
    black = torch.zeros(3, 4, 4)
    return Cached(FunctionReward(info, counter, SelfTest(black + 1, black, "x", {})), capacity)


def test_equal_content_is_scored_once_within_and_across_calls() -> None:
    counter = Counter()
    cached = _cached(counter)
    images = torch.rand(3, 3, 4, 4)[[0, 1, 0, 2, 1]]
    found = cached(images, ["p"] * 5, [{}] * 5)
    assert torch.allclose(found, images[:, 0].mean((1, 2)))
    assert counter.seen == [3]
    assert torch.equal(cached(images, ["p"] * 5, [{}] * 5), found)
    assert (counter.seen, cached.hits, cached.misses) == ([3], 7, 3)
    assert cached(torch.empty(0, 3, 4, 4), [], []).shape == (0,)


def test_prompt_metadata_shape_and_pixels_are_part_of_the_key() -> None:
    counter = Counter()
    cached = _cached(counter)
    image = torch.full((1, 3, 2, 8), 0.5)
    cached(image, ["p"], [{"a": 1, "b": 2}])
    cached(image, ["p"], [{"b": 2, "a": 1}])  # the order of keys does not matter
    assert counter.seen == [1]
    cached(image, ["q"], [{"a": 1, "b": 2}])
    cached(image, ["p"], [{"a": 1, "b": 3}])
    cached(image.reshape(1, 3, 8, 2), ["p"], [{"a": 1, "b": 2}])
    cached(image + 2 / 255, ["p"], [{"a": 1, "b": 2}])
    assert counter.seen == [1] * 5


def test_failures_are_tried_again_and_nan_images_bypass() -> None:
    counter = Counter(blind=True)
    cached = _cached(counter)
    image = torch.rand(1, 3, 4, 4)
    assert bool(cached(image, ["p"], [{}]).isnan())
    counter.blind = False
    assert float(cached(image, ["p"], [{}])) == pytest.approx(float(image[0, 0].mean()))
    broken = torch.full((2, 3, 4, 4), NAN)
    assert cached(broken, ["p"] * 2, [{}] * 2).isnan().all()
    assert counter.seen == [1, 1, 2]


def test_capacity_bounds_it_and_drops_what_is_unused_for_longest() -> None:
    counter = Counter()
    cached = _cached(counter, capacity=2)
    a, b, c = torch.rand(3, 1, 3, 4, 4)
    for image in (a, b, a, c):  # b is unused for longest when c comes
        cached(image, ["p"], [{}])
    assert counter.seen == [1, 1, 1]
    cached(a, ["p"], [{}])
    assert counter.seen == [1, 1, 1]
    cached(b, ["p"], [{}])
    assert counter.seen == [1, 1, 1, 1]


def test_the_reward_is_called_in_its_own_batches() -> None:
    counter = Counter()
    _cached(counter, batch_size=2)(torch.rand(5, 3, 4, 4), ["p"] * 5, [{}] * 5)
    assert counter.seen == [2, 2, 1]


def test_what_cannot_be_cached_is_refused() -> None:
    inner = _cached(Counter()).reward
    with pytest.raises(ValueError, match="compares images within a group"):
        Cached(Composite({"red": inner}, {"red": 1.0}))
    with pytest.raises(ValueError, match="capacity"):
        Cached(inner, capacity=0)
    with pytest.raises(RewardError, match="must be JSON"):
        Cached(inner)(torch.rand(1, 3, 4, 4), ["p"], [{"x": object()}])
