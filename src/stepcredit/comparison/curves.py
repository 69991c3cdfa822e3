"""Statistics of learning curves: means over seeds, the way to a target, and ratios paired by seed. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from stepcredit.training.stats import Interval, bootstrap, student

Axis = Literal["iterations", "evaluations", "seconds"]
AXES: tuple[Axis, ...] = ("iterations", "evaluations", "seconds")


@dataclass(frozen=True)
class Curve:
    """Held-out reward of one run: points in order, the base model first. All of one length."""

    iterations: tuple[float, ...]
    evaluations: tuple[float, ...]
    """Model evaluations so far."""
    seconds: tuple[float, ...]
    """Seconds of training so far, without evaluations."""
    reward: tuple[float, ...]

    def along(self, axis: Axis) -> tuple[float, ...]:
        """The points' positions on an axis."""
        return {"iterations": self.iterations, "evaluations": self.evaluations, "seconds": self.seconds}[axis]

    def at(self, iteration: float, axis: Axis | Literal["reward"] = "reward") -> float:
        """A quantity at an iteration, linear between points; after the last point it stays as it was."""
        values = self.reward if axis == "reward" else self.along(axis)
        return float(np.interp(iteration, self.iterations, values))


@dataclass(frozen=True)
class Band:
    """The mean curve of several seeds on one axis, with a 95 % band."""

    x: tuple[float, ...]
    reward: tuple[Interval, ...]


def band(curves: Sequence[Curve], axis: Axis) -> Band:
    """Mean reward over runs at every iteration that one of them was evaluated at, against the mean position there.

    The band is a bootstrap over runs. A run that ended early keeps its last reward: its weights stay what they are.
    """
    iterations = sorted({k for curve in curves for k in curve.iterations})
    x = [float(np.mean([curve.at(k, axis) for curve in curves])) for k in iterations]
    return Band(tuple(x), tuple(bootstrap([curve.at(k) for curve in curves]) for k in iterations))


def first_reaching(curve: Curve, target: float, axis: Axis) -> float | None:
    """Where a curve first reaches a target, linear between its points; None if it never does (censored)."""
    x, y = curve.along(axis), curve.reward
    for k, reward in enumerate(y):
        if reward >= target:
            if k == 0:
                return x[0]
            share = (target - y[k - 1]) / (reward - y[k - 1])
            return x[k - 1] + share * (x[k] - x[k - 1])
    return None


@dataclass(frozen=True)
class Ratio:
    """How many times as much a recipe needs as the first, a geometric mean over seeds."""

    value: float | None
    low: float | None
    high: float | None
    kind: Literal["equal", "at least", "at most", "unknown"]
    """``at least`` (``at most``) where some runs of the recipe (of the first) never reached the target: they count with
    their whole length, so that the value is a bound and has no interval."""
    seeds: int
    """Pairs that it is made of."""


def ratio(times: Sequence[float | None], spent: Sequence[float], first: Sequence[tuple[float | None, float]]) -> Ratio:
    """Ratio of times to target to those of the first recipe, paired by seed.

    ``times``: of the recipe by seed, None where the target was never reached; ``spent``: the length of those runs.
    ``first``: the same pairs of the first recipe. The interval is Student's t of the log ratios; a pair in which
    neither run reached the target tells nothing and makes the ratio unknown, as do bounds of both kinds.
    """
    kinds: set[str] = set()
    logs = []
    for time, length, (first_time, first_length) in zip(times, spent, first, strict=True):
        if time is None and first_time is None:
            return Ratio(None, None, None, "unknown", 0)
        kinds |= {"at least"} if time is None else {"at most"} if first_time is None else set()
        a, b = length if time is None else time, first_length if first_time is None else first_time
        if not (a > 0 and b > 0):  # the base model is at the target already
            return Ratio(None, None, None, "unknown", 0)
        logs.append(math.log(a / b))
    if not logs or len(kinds) == 2:
        return Ratio(None, None, None, "unknown", 0)
    told = student(logs)
    if "at least" in kinds or "at most" in kinds:
        kind: Literal["at least", "at most"] = "at least" if "at least" in kinds else "at most"
        return Ratio(math.exp(told.mean), None, None, kind, len(logs))
    low, high = (math.exp(bound) if math.isfinite(bound) else None for bound in (told.low, told.high))
    return Ratio(math.exp(told.mean), low, high, "equal", len(logs))


def halfway(first: Sequence[Curve]) -> float | None:
    """The default target: halfway from the base model's reward to the mean end of the first recipe's runs.

    None if those runs did not end above where they began.
    """
    start = float(np.mean([curve.reward[0] for curve in first]))
    end = float(np.mean([curve.reward[-1] for curve in first]))
    return (start + end) / 2 if end > start else None
