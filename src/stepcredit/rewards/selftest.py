"""Try rewards on their own known good and known bad image."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from stepcredit.rewards.base import Reward, RewardError, score


@dataclass(frozen=True)
class Outcome:
    """What a reward gave its two known images."""

    name: str
    good: float
    bad: float
    margin: float
    """Least amount by which the good one has to be the better."""
    direction: str = "higher"

    @property
    def passed(self) -> bool:
        """False as well when either score is NaN."""
        gain = self.good - self.bad if self.direction == "higher" else self.bad - self.good
        return gain > self.margin

    def __str__(self) -> str:
        verdict = "passes" if self.passed else "FAILS"
        return f"reward {self.name!r} {verdict} its self-test: good {self.good:.4g}, bad {self.bad:.4g}"


def run(reward: Reward) -> list[Outcome]:
    """Outcomes of the reward's self-test, or of each part's for a combination (anything with ``parts``)."""
    parts = getattr(reward, "parts", None)
    if isinstance(parts, Mapping):
        return [outcome for part in parts.values() for outcome in run(part)]
    test = reward.self_test()
    pair = torch.stack([test.good, test.bad])
    good, bad = score(reward, pair, [test.prompt] * 2, [test.metadata] * 2).tolist()
    return [Outcome(reward.info.name, good, bad, test.margin, reward.info.direction)]


def require(reward: Reward) -> None:
    """Raise RewardError unless the reward, or every part of a combination, passes its self-test."""
    for outcome in run(reward):
        if not outcome.passed:
            raise RewardError(
                f"{outcome}; its weights or its engine are not installed right "
                "(docs/troubleshooting.md#a-reward-fails-its-self-test)"
            )
