"""Statistics of two models on the same prompts and noise. Pure functions of values, prompts and tags.

Images of one prompt are not independent, so prompts are what is resampled and what is flipped; tags are strata, whose
sizes were chosen and do not vary.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from stepcredit.training.stats import Interval

RESAMPLES = 10_000
FLIPS = 19_999
"""Random sign vectors of a test; the smallest p-value is 1 / (FLIPS + 1)."""
EXACT = 14
"""Up to so many prompts all sign vectors are tried."""
_CHUNK = 1000

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Design:
    """Which value belongs to which prompt, and which prompt to which tag."""

    cluster: Ints
    """``[N]``: number of the prompt, 0..C-1."""
    stratum: Ints
    """``[C]``: number of the prompt's tag, 0..S-1."""
    macro: bool
    """Tags count equally (GenEval's overall score), or in proportion to their values."""


def design(prompts: Sequence[Hashable], tags: Sequence[Hashable] | None = None, macro: bool = False) -> Design:
    """Design of N values by their prompts and tags (one tag for all without). Raises ValueError if lengths differ."""
    tags = [""] * len(prompts) if tags is None else tags
    if len(prompts) != len(tags):
        raise ValueError(f"{len(prompts)} prompts and {len(tags)} tags; there must be one of each for every value")
    clusters: dict[tuple[Hashable, Hashable], int] = {}
    strata: dict[Hashable, int] = {}
    cluster = [clusters.setdefault(pair, len(clusters)) for pair in zip(prompts, tags, strict=True)]
    stratum = [strata.setdefault(tag, len(strata)) for _, tag in clusters]
    return Design(np.array(cluster, dtype=np.int64), np.array(stratum, dtype=np.int64), macro)


def estimate(values: Floats, of: Design) -> float:
    """Mean of ``values`` ``[N]``: of all, or of the tags' means with ``macro``. NaN values are left out."""
    return float(contributions(values, of).sum()) if not np.isnan(values).all() else math.nan


def contributions(values: Floats, of: Design) -> Floats:
    """What each prompt adds to the estimate, ``[C]``; the sum is the estimate. A prompt without a value adds 0."""
    result = np.zeros(len(of.stratum))
    for weight, members, sums, sizes in _strata(values, of):
        result[members] = weight * sums / sizes.sum()
    return result


def interval(values: Floats, of: Design) -> Interval:
    """The estimate with its 95 % percentile interval from 10,000 resamples of whole prompts within their tags.

    Deterministic. For a paired comparison pass the differences. A tag of one prompt contributes no spread.
    """
    if np.isnan(values).all():
        return Interval(math.nan, math.nan, math.nan)
    random = np.random.default_rng(0)
    means = np.zeros(RESAMPLES)
    for weight, _, sums, sizes in _strata(values, of):
        for start in range(0, RESAMPLES, _CHUNK):
            drawn = random.integers(0, len(sums), (min(_CHUNK, RESAMPLES - start), len(sums)))
            means[start : start + _CHUNK] += weight * sums[drawn].sum(1) / sizes[drawn].sum(1)
    low, high = np.quantile(means, [0.025, 0.975])
    return Interval(estimate(values, of), float(low), float(high))


def over_prompts(values: Sequence[float] | Floats, prompts: Sequence[Hashable], tags: Sequence[Hashable]) -> Interval:
    """Mean of N values with its interval, given the prompt and the tag of each: see :func:`interval`."""
    return interval(np.asarray(values, dtype=np.float64), design(prompts, tags))


def sign_flip(parts: Floats) -> float:
    """Two-sided p-value of paired differences ``[C]``, one for each prompt, by flipping their signs.

    Under the hypothesis that base and tuned images of a prompt are exchangeable every sign is equally likely. All
    sign vectors are tried for up to 14 prompts that differ, else 19,999 random ones with a fixed seed (Phipson and
    Smyth 2010: the observed one counts). 1 when nothing differs. Pass ``contributions`` of the differences. NaN is
    refused with ValueError.
    """
    if np.isnan(parts).any():
        raise ValueError("differences hold NaN; leave failed samples out first")
    parts = parts[parts != 0]
    count = len(parts)
    if count == 0:
        return 1.0
    least = abs(float(parts.sum())) - 1e-12 * float(np.abs(parts).sum())  # sums that are equal but for rounding
    if count <= EXACT:
        signs = 1.0 - 2.0 * (np.arange(2**count)[:, None] >> np.arange(count) & 1)
        return float((np.abs(signs @ parts) >= least).mean())
    random = np.random.default_rng(0)
    hits = 0
    for start in range(0, FLIPS, _CHUNK):
        flips = random.integers(0, 2, (min(_CHUNK, FLIPS - start), count), dtype=np.int8)
        hits += int((np.abs((1.0 - 2.0 * flips) @ parts) >= least).sum())
    return (1 + hits) / (1 + FLIPS)


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjusted p-values of a family of tests (Holm 1979): at most one false find in twenty families at .05."""
    order = sorted(range(len(p_values)), key=lambda k: p_values[k])
    adjusted = [1.0] * len(p_values)
    largest = 0.0
    for rank, k in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[k]))
        adjusted[k] = largest
    return adjusted


def standard_error(values: Floats, of: Design) -> float:
    """Standard error of the estimate over prompts within tags; NaN where a tag has fewer than two prompts."""
    total = 0.0
    for weight, _, sums, sizes in _strata(values, of):
        count = len(sums)
        if count < 2:
            return math.nan
        # of a ratio of sums over clusters, linearised
        residual = (sums - sizes * sums.sum() / sizes.sum()) / sizes.mean()
        total += weight**2 * float(residual.var(ddof=1)) / count
    return math.sqrt(total)


def planned_error(deviation: float, of: Design) -> float:
    """Standard error to expect when the paired differences of prompts deviate by ``deviation`` in every tag."""
    unit = np.ones(len(of.cluster))
    return deviation * math.sqrt(sum(weight**2 / len(sums) for weight, _, sums, _ in _strata(unit, of)))


def detectable(error: float, alpha: float = 0.05, power: float = 0.8) -> float:
    """The smallest true difference that a two-sided test at ``alpha`` finds with probability ``power``.

    ``error``: standard error of the difference. 2.80 standard errors at the usual .05 and .8.
    """
    normal = NormalDist()
    return (normal.inv_cdf(1 - alpha / 2) + normal.inv_cdf(power)) * error


def paired_deviation(values: Floats, of: Design) -> float:
    """Standard deviation over prompts of the mean paired difference, tags' means removed; NaN for too few prompts."""
    squares, freedom = 0.0, 0
    for _, _, sums, sizes in _strata(values, of):
        means = sums / sizes
        squares += float(np.square(means - means.mean()).sum())
        freedom += len(means) - 1
    return math.sqrt(squares / freedom) if freedom > 0 else math.nan


def _strata(values: Floats, of: Design) -> Iterator[tuple[float, Ints, Floats, Floats]]:
    """For every tag that has a value: its weight, its prompts, and the sum and count of each prompt's values."""
    seen = ~np.isnan(values)
    clusters = len(of.stratum)
    sums = np.bincount(of.cluster[seen], weights=values[seen], minlength=clusters).astype(np.float64)
    sizes = np.bincount(of.cluster[seen], minlength=clusters).astype(np.float64)
    there = [s for s in range(int(of.stratum.max(initial=-1)) + 1) if sizes[of.stratum == s].any()]
    for s in there:
        members = np.flatnonzero((of.stratum == s) & (sizes > 0))
        weight = 1 / len(there) if of.macro else sizes[members].sum() / sizes.sum()
        yield float(weight), members, sums[members], sizes[members]
