"""Bootstrap intervals against what is known of means."""

import math

import numpy as np
import pytest

from stepcredit.training.stats import bootstrap


def test_interval_has_the_width_of_the_normal_approximation():
    values = np.random.default_rng(1).normal(2.0, 1.0, 400)
    result = bootstrap(values)
    half = 1.96 * values.std() / math.sqrt(400)
    assert result.mean == pytest.approx(values.mean())
    assert result.high - result.mean == pytest.approx(half, rel=0.12)
    assert result.mean - result.low == pytest.approx(half, rel=0.12)


def test_repeated_values_in_clusters_do_not_narrow_the_interval():
    values = np.random.default_rng(2).normal(size=100)
    single = bootstrap(values)
    repeated = bootstrap(np.repeat(values, 5), np.repeat(np.arange(100), 5).tolist())
    naive = bootstrap(np.repeat(values, 5))
    assert repeated.high - repeated.low == pytest.approx(single.high - single.low, rel=1e-9)
    assert naive.high - naive.low < 0.6 * (single.high - single.low)


def test_failed_samples_are_left_out_and_nothing_gives_nan():
    assert bootstrap([1.0, float("nan"), 1.0]).mean == 1.0
    assert math.isnan(bootstrap([float("nan")]).mean)


def test_it_is_deterministic():
    values = np.random.default_rng(3).normal(size=50)
    assert bootstrap(values) == bootstrap(values)
