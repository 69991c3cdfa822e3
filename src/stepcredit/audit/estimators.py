"""Estimates of gradients' products from independent groups, unbiased, with jackknife intervals.

The squared norm of a noisy mean overstates the true one by the noise, so nothing here multiplies a group's gradient
with itself where a property of the expectation is asked for: all such products are means over pairs of different
groups (U-statistics). Everything is computed from the matrices of the groups' inner products.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stepcredit.training.stats import Interval, t_quantile

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Replicated:
    """A statistic of all N groups, and of all but each one of them in turn."""

    value: float
    left_out: Array
    """``[N]``."""

    def map(self, function: Callable[..., Array], *others: Replicated) -> Replicated:
        """The same function of this statistic and others, on all groups and on each N - 1 of them."""
        parts = (self, *others)
        with np.errstate(invalid="ignore", divide="ignore"):
            value = function(*(np.float64(part.value) for part in parts))
            return Replicated(float(value), np.asarray(function(*(part.left_out for part in parts))))

    def interval(self) -> Interval:
        """The value with its 95 % delete-one jackknife interval (Student's t); NaN bounds where a replicate is NaN.

        Source: Arvesen (1969), the jackknife for U-statistics and smooth functions of them.
        """
        n = len(self.left_out)
        if n < 2:
            return Interval(self.value, math.nan, math.nan)
        deviation = self.left_out - self.left_out.mean()
        half = t_quantile(n - 1) * math.sqrt((n - 1) / n * float(deviation @ deviation))
        return Interval(self.value, self.value - half, self.value + half)


def pair_mean(products: Array) -> Replicated:
    """Mean of ``products[g, h]``, ``[N, N]``, over pairs of different groups: unbiased for the product of expectations.

    NaN for fewer than two groups (three where one is left out).
    """
    n = len(products)
    own = np.diagonal(products)
    total = products.sum() - own.sum()
    without = total - (products.sum(0) + products.sum(1) - 2 * own)
    return Replicated(
        float(total) / (n * (n - 1)) if n > 1 else math.nan,
        without / ((n - 1) * (n - 2)) if n > 2 else np.full(n, math.nan),
    )


def mean(values: Array) -> Replicated:
    """Mean of ``values`` ``[N]``; NaN where no group is left."""
    n = len(values)
    left = (values.sum() - values) / (n - 1) if n > 1 else np.full(n, math.nan)
    return Replicated(float(values.mean()) if n else math.nan, left)


@dataclass(frozen=True)
class Products:
    """Expectations of products of a scheme's gradient k of a group and the reference r, each with its replicates."""

    along: Replicated
    """``E[k] . E[r]``."""
    signal: Replicated
    """``|E[k]|^2``; may come out negative where the noise hides it."""
    power: Replicated
    """``E|k|^2``: signal and noise of one group."""
    true: Replicated
    """``|E[r]|^2``."""


def products(scheme: Array, reference: Array) -> Products:
    """All products of gradients by group: ``scheme`` and ``reference`` are ``[N, D]``, group g in row g of both."""
    own = scheme @ scheme.T
    return Products(
        along=pair_mean(scheme @ reference.T),
        signal=pair_mean(own),
        power=mean(np.diagonal(own)),
        true=pair_mean(reference @ reference.T),
    )


def signal_to_noise(p: Products) -> Replicated:
    """``|E[k]|^2`` over the variance of k, both of one group; n groups have n times as much."""
    return p.signal.map(lambda signal, power: signal / (power - signal), p.power)


def alignment(p: Products) -> Replicated:
    """Cosine of the expected gradients of scheme and reference: 1 is unbiased. NaN where either norm is not resolved.

    The estimate is not confined to [-1, 1], which would bias it.
    """
    return p.along.map(
        lambda along, signal, true: along / np.sqrt(np.where((signal > 0) & (true > 0), signal * true, np.nan)),
        p.signal,
        p.true,
    )


def progress(p: Products, groups: float) -> Replicated:
    """Expected first-order gain of the reference's objective for a step of length 1 along the mean of ``groups`` k.

    ``E[r] . E[k] / sqrt(E|mean of n k|^2)``, with ``E|mean|^2 = |E k|^2 (1 - 1/n) + E|k|^2 / n``: in reward per unit of
    length in weight space where r is the gradient of the expected reward. Unlike a cosine it needs no norm to be
    resolved. ``groups`` need not be whole.
    """

    def ratio(along: Array, signal: Array, power: Array) -> Array:
        square = signal * (1 - 1 / groups) + power / groups
        # a signal estimated below zero is no signal: what is left is noise
        return np.asarray(along / np.sqrt(np.maximum(square, power / groups)))

    return p.along.map(ratio, p.signal, p.power)
