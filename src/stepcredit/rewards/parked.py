"""Rewards whose networks leave the device while they have nothing to judge."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch import Tensor, nn

from stepcredit.policies.placement import Placement
from stepcredit.rewards.base import Metadata, Reward, RewardInfo, SelfTest
from stepcredit.rewards.composite import Composite

T = TypeVar("T")


class Parked:
    """A reward whose networks come to the device for every call. Everything else is the reward's own."""

    def __init__(self, reward: Reward, placement: Placement, networks: Sequence[nn.Module]) -> None:
        self.reward, self._placement, self._networks = reward, placement, networks
        placement.park(networks, scoring=True)

    @property
    def info(self) -> RewardInfo:
        """That of the reward inside."""
        return self.reward.info

    def self_test(self) -> SelfTest:
        """That of the reward inside."""
        return self._at_work(self.reward.self_test)

    def __call__(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Metadata]) -> Tensor:
        """Scores of the reward inside."""
        return self._at_work(lambda: self.reward(images, prompts, metadata))

    def __getattr__(self, name: str) -> Any:
        """What the reward inside has beyond the contract."""
        if name == "reward":  # not there yet, while this object is being built
            raise AttributeError(name)
        found = getattr(self.reward, name)
        if name in ("components", "exact"):
            return lambda *args: self._at_work(lambda: found(*args))
        return found

    def _at_work(self, ask: Callable[[], T]) -> T:
        with self._placement.visit(self._networks):
            return ask()


def parked(reward: Reward, placement: Placement | None) -> Reward:
    """The reward with its ``networks`` parked, or as it is: without a placement, or where it has none on its device.

    Of a composite every part's are. A reward with an option ``device`` of its own stays there.
    """
    if placement is None:
        return reward
    if isinstance(reward, Composite):
        parts = {name: parked(part, placement) for name, part in reward.parts.items()}
        return Composite(parts, reward.weights, reward.how, reward.group_size)
    networks = [n for n in getattr(reward, "networks", ()) if next(n.parameters()).device.type == placement.work.type]
    return Parked(reward, placement, networks) if networks else reward
