"""Intervals for rewards: bootstraps over prompts, since images of one prompt are not independent."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 2000


@dataclass(frozen=True)
class Interval:
    """A mean with its 95 % bootstrap interval, in the units of what was averaged."""

    mean: float
    low: float
    high: float

    def as_dict(self) -> dict[str, float]:
        """As plain JSON."""
        return asdict(self)

    def __str__(self) -> str:
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]"


def bootstrap(values: Sequence[float] | NDArray[np.float64], clusters: Sequence[Hashable] | None = None) -> Interval:
    """Mean of ``values`` with a percentile interval from 2,000 resamples of whole clusters (values, by default).

    Deterministic. NaN values (failed samples) are left out; the interval of nothing is NaN. For a paired comparison
    pass the differences.
    """
    array = np.asarray(values, dtype=np.float64)
    seen = ~np.isnan(array)
    array = array[seen]
    if not len(array):
        return Interval(float("nan"), float("nan"), float("nan"))
    names = np.arange(len(array)) if clusters is None else _codes([c for c, s in zip(clusters, seen, strict=True) if s])
    sums = np.bincount(names, weights=array)
    sizes = np.bincount(names)
    draws = np.random.default_rng(0).integers(0, len(sums), (RESAMPLES, len(sums)))
    means = sums[draws].sum(1) / sizes[draws].sum(1)
    low, high = np.quantile(means, [0.025, 0.975])
    return Interval(float(array.mean()), float(low), float(high))


def _codes(clusters: Sequence[Hashable]) -> NDArray[np.int64]:
    numbers: dict[Hashable, int] = {}
    return np.array([numbers.setdefault(c, len(numbers)) for c in clusters], dtype=np.int64)
