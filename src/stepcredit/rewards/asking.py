"""Rewards asked without waiting: a server judges one piece of images while the caller samples or decodes the next."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from stepcredit.rewards.base import Judgement, Metadata, Reward, judge
from stepcredit.rewards.composite import Composite

Answer = Callable[[], Judgement]
"""Waits for a judgement and gives it, or raises what the reward raised."""


def at_a_time(reward: Reward) -> int:
    """How many calls of a reward may be under way: its ``concurrent``, 1 without; of a composite its parts' highest."""
    if isinstance(reward, Composite):
        return max(at_a_time(part) for part in reward.parts.values())
    return int(getattr(reward, "concurrent", 1))


class Asking:
    """A reward at work, to be left when its answers are no longer wanted; what was asked and not begun is dropped then.

    A reward with ``concurrent`` above 1 waits for a server: its calls run in threads of their own. Any other answers in
    the caller's thread, at once. Parts of a composite are asked each in its own way. No more than ``concurrent`` calls
    are under way, and their images held: another waits for the oldest. No result depends on any of this.
    """

    def __init__(self, reward: Reward) -> None:
        self._reward = reward
        self._width = at_a_time(reward)
        self._pool = ThreadPoolExecutor(self._width)
        self._under_way: deque[Answer] = deque()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(cancel_futures=True)

    def __call__(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Metadata]) -> Answer:
        """Ask for images ``[B, 3, H, W]``; the answer's score is NaN for a composite that needs whole groups.

        Raises what the oldest call under way raised, and RewardError as :func:`stepcredit.rewards.base.judge` for a
        reward that answers at once.
        """
        while len(self._under_way) >= self._width:
            self._under_way.popleft()()
        answer = self._asked(images, prompts, metadata)
        if self._width > 1:
            self._under_way.append(answer)
        return answer

    def _asked(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Metadata]) -> Answer:
        reward = self._reward
        if not isinstance(reward, Composite):
            return self._of(reward, images, prompts, metadata)
        parts = {name: self._of(part, images, prompts, metadata) for name, part in reward.parts.items()}
        unknown = torch.full((len(images),), torch.nan)

        def joined() -> Judgement:
            native = reward.named({name: part() for name, part in parts.items()})
            return Judgement(reward.combined(native, ()) if reward.per_image else unknown, native, None)

        return joined

    def _of(self, reward: Reward, images: Tensor, prompts: Sequence[str], metadata: Sequence[Metadata]) -> Answer:
        if at_a_time(reward) > 1:
            return self._pool.submit(judge, reward, images, prompts, metadata).result
        found = judge(reward, images, prompts, metadata)
        return lambda: found
