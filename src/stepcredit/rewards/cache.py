"""A cache of scores keyed by content: the same picture for the same prompt is judged once."""

from __future__ import annotations

import hashlib
import json
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from stepcredit.rewards.base import Metadata, Reward, RewardError, RewardInfo, SelfTest, judge, to_uint8


class Cached:
    """A reward that remembers, and that scores equal images of one call once (states shared by several members).

    Keys are SHA-256 digests of the 8-bit picture, the prompt, the metadata and the reward's name. At ``capacity`` the
    entries unused for longest leave. NaN is never kept: a sample that failed is tried again. ``hits``, ``misses`` and
    ``seconds`` (spent in the reward itself) are counted. Raises ValueError for a reward that judges images against
    each other (``per_image`` False), whose scores belong to a group and not to a picture.
    """

    def __init__(self, reward: Reward, capacity: int = 200_000) -> None:
        if not getattr(reward, "per_image", True):
            raise ValueError(f"reward {reward.info.name!r} compares images within a group; its scores cannot be cached")
        if capacity < 1:
            raise ValueError(f"cache: capacity must be at least 1; got {capacity}")
        self.reward, self.capacity = reward, capacity
        self.hits = self.misses = 0
        self.seconds = 0.0
        self._scores: OrderedDict[bytes, dict[str, float]] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def info(self) -> RewardInfo:
        """That of the reward inside."""
        return self.reward.info

    def self_test(self) -> SelfTest:
        """That of the reward inside."""
        return self.reward.self_test()

    def __getattr__(self, name: str) -> Any:
        """What else the reward inside can do, apart from judging images against each other."""
        if name == "reward":  # not there yet, while this object is being built
            raise AttributeError(name)
        return getattr(self.reward, name)

    def __call__(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Metadata]) -> Tensor:
        """Scores as float32 ``[B]``, equal to what the reward itself gives."""
        return self.components(images, prompts, metadata)["score"]

    def components(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Metadata]) -> dict[str, Tensor]:
        """``score``, and every component and verdict that the reward inside gives with it, float32 ``[B]`` each."""
        keys = [self._key(*sample) for sample in zip(images, prompts, metadata, strict=True)]
        with self._lock:
            known = {key: self._scores[key] for key in keys if key is not None and key in self._scores}
        owner: dict[bytes, int] = {}  # the row that is scored for all rows of the same content
        rows: list[int] = []
        for row, key in enumerate(keys):
            if key is None or (key not in known and owner.setdefault(key, row) == row):
                rows.append(row)
        fresh = self._score(images, prompts, metadata, rows)
        values = [
            fresh[row] if key is None else known[key] if key in known else fresh[owner[key]]
            for row, key in enumerate(keys)
        ]
        with self._lock:
            self.hits += len(keys) - len(rows)
            self.misses += len(rows)
            for key in known:
                if key in self._scores:
                    self._scores.move_to_end(key)
            for key, row in owner.items():
                if not math.isnan(fresh[row]["score"]):
                    self._scores[key] = fresh[row]
            while len(self._scores) > self.capacity:
                self._scores.popitem(last=False)
        names = values[0] if values else ("score",)
        return {name: torch.tensor([value[name] for value in values], dtype=torch.float32) for name in names}

    def _score(
        self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Metadata], rows: Sequence[int]
    ) -> dict[int, dict[str, float]]:
        if not rows:
            return {}
        start = time.perf_counter()
        found = judge(self.reward, images[torch.tensor(rows)], [prompts[r] for r in rows], [metadata[r] for r in rows])
        self.seconds += time.perf_counter() - start
        parts = {"score": found.score, **found.components}
        if found.exact is not None:
            parts["exact"] = found.exact
        lists = {name: values.tolist() for name, values in parts.items()}
        return {row: {name: values[k] for name, values in lists.items()} for k, row in enumerate(rows)}

    def _key(self, image: Tensor, prompt: str, metadata: Metadata) -> bytes | None:
        """Digest of one sample; None for an image with NaN, which rounding would make look like another."""
        if not bool(image.isfinite().all()):
            return None
        try:
            text = json.dumps([self.info.name, list(image.shape), prompt, dict(metadata)], sort_keys=True)
        except TypeError as error:
            raise RewardError(f"reward {self.info.name!r}: metadata must be JSON to be cached: {error}") from error
        digest = hashlib.sha256(text.encode())
        digest.update(to_uint8(image[None]).numpy().tobytes())
        return digest.digest()
