"""Intervals for rewards: bootstraps over prompts, since images of one prompt are not independent."""

from __future__ import annotations

import math
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


def student(values: Sequence[float]) -> Interval:
    """Mean of a few independent values, as of seeds, with Student's t interval; NaN bounds for fewer than two.

    A bootstrap of three to ten values would be far too narrow.
    """
    array = np.asarray(values, dtype=np.float64)
    mean = float(array.mean()) if len(array) else math.nan
    if len(array) < 2:
        return Interval(mean, math.nan, math.nan)
    half = t_quantile(len(array) - 1) * float(array.std(ddof=1)) / math.sqrt(len(array))
    return Interval(mean, mean - half, mean + half)


def t_quantile(freedom: int) -> float:
    """The 97.5 % quantile of Student's t (Cornish-Fisher; within 0.3 % from 4 degrees of freedom on)."""
    exact = {1: 12.706, 2: 4.303, 3: 3.182}
    if freedom in exact:
        return exact[freedom]
    z, v = 1.959964, float(freedom)
    return (
        z
        + (z**3 + z) / (4 * v)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * v**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * v**3)
    )


def _codes(clusters: Sequence[Hashable]) -> NDArray[np.int64]:
    numbers: dict[Hashable, int] = {}
    return np.array([numbers.setdefault(c, len(numbers)) for c in clusters], dtype=np.int64)
