"""What rewards cost: calls, images, seconds and cache hits of every reward of a run."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch import Tensor

from stepcredit.rewards.base import Metadata, Reward, RewardInfo, SelfTest
from stepcredit.rewards.cache import Cached
from stepcredit.rewards.composite import Composite

T = TypeVar("T")


class Metered:
    """A reward that counts what is asked of it: ``calls``, ``images``, and ``seconds`` until it has answered.

    Calls that overlap (a served reward) each count their own time. Everything else is the reward's own.
    """

    def __init__(self, reward: Reward) -> None:
        self.reward = reward
        self.calls = self.images = 0
        self.seconds = 0.0
        self._lock = threading.Lock()

    @property
    def info(self) -> RewardInfo:
        """That of the reward inside."""
        return self.reward.info

    def self_test(self) -> SelfTest:
        """That of the reward inside."""
        return self.reward.self_test()

    def __call__(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Metadata]) -> Tensor:
        """Scores of the reward inside, counted."""
        return self._timed(lambda: self.reward(images, prompts, metadata), len(images))

    def __getattr__(self, name: str) -> Any:
        """What the reward inside has beyond the contract; looks at images are counted as well."""
        if name == "reward":  # not there yet, while this object is being built
            raise AttributeError(name)
        found = getattr(self.reward, name)
        if name == "components":
            return lambda images, *rest: self._timed(lambda: found(images, *rest), len(images))
        if name == "exact":
            return lambda images, *rest: self._timed(lambda: found(images, *rest), 0)
        return found

    def cost(self) -> dict[str, Any]:
        """Name, calls, images, seconds, and the cache's hits (None without a cache)."""
        hits = self.reward.hits if isinstance(self.reward, Cached) else None
        return {
            "name": self.info.name,
            "calls": self.calls,
            "images": self.images,
            "seconds": self.seconds,
            "cache_hits": hits,
        }

    def _timed(self, ask: Callable[[], T], images: int) -> T:
        started = time.perf_counter()
        try:
            return ask()
        finally:
            with self._lock:
                self.calls += images > 0
                self.images += images
                self.seconds += time.perf_counter() - started


def metered(reward: Reward, cache: int = 0) -> Reward:
    """The reward with its cost counted; of a composite every part's. ``cache``: scores to remember, 0 for none.

    A reward that compares images with each other is not cached. Raises ValueError for a negative ``cache``.
    """
    if cache < 0:
        raise ValueError(f"reward_cache must not be negative; got {cache}")
    if isinstance(reward, Composite):
        parts = {name: metered(part, cache) for name, part in reward.parts.items()}
        return Composite(parts, reward.weights, reward.how, reward.group_size)
    return Metered(Cached(reward, cache) if cache and getattr(reward, "per_image", True) else reward)


def costs(reward: Reward) -> list[dict[str, Any]]:
    """A row of counts for the reward, or for each part of a composite; none for a reward without a meter."""
    if isinstance(reward, Composite):
        return [row for part in reward.parts.values() for row in costs(part)]
    return [reward.cost()] if isinstance(reward, Metered) else []
