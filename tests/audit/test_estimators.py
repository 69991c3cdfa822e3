"""Unbiased products of noisy means, against known expectations."""

import numpy as np
import pytest

from stepcredit.audit import estimators
from stepcredit.training.stats import t_quantile

D, N = 40, 12
MU_K = np.zeros(D)
MU_K[0], MU_K[1] = 0.3, 0.4
MU_R = np.zeros(D)
MU_R[0] = 1.0
"""|k| = .5, |r| = 1, their product .3, so their cosine .6."""


def draw(seed: int, n: int = N) -> tuple[np.ndarray, np.ndarray]:
    """Scheme and reference of n groups: unit noise in each of D directions, half of it common to the two."""
    noise = np.random.default_rng(seed).standard_normal((3, n, D))
    return MU_K + (noise[0] + noise[2]) / 2**0.5, MU_R + (noise[1] + noise[2]) / 2**0.5


def test_products_of_different_groups_are_unbiased_where_plain_ones_are_not():
    found = [estimators.products(*draw(seed)) for seed in range(1000)]
    for name, truth in {"along": 0.3, "signal": 0.25, "true": 1.0, "power": 0.25 + D}.items():
        values = np.array([getattr(p, name).value for p in found])
        assert abs(values.mean() - truth) < 4 * values.std() / len(values) ** 0.5, name
    plain = np.mean([k.mean(0) @ r.mean(0) for k, r in (draw(seed) for seed in range(1000))])
    assert plain == pytest.approx(0.3 + D / 2 / N, abs=0.1)  # the common noise, counted as agreement


def test_intervals_cover_the_truth_as_often_as_they_say():
    kinds = {"along": 0.3, "true": 1.0, "power": 0.25 + D}
    hits = dict.fromkeys(kinds, 0)
    for seed in range(1000):
        p = estimators.products(*draw(seed, 24))
        for name, truth in kinds.items():
            interval = getattr(p, name).interval()
            hits[name] += interval.low <= truth <= interval.high
    # 95 %, or a little more: the jackknife of a degenerate U-statistic errs on the careful side
    assert all(930 <= count <= 995 for count in hits.values()), hits


def test_progress_and_alignment_tend_to_their_closed_forms():
    k, r = draw(0, 1600)
    p = estimators.products(k, r)
    assert estimators.alignment(p).value == pytest.approx(0.6, abs=0.1)
    assert estimators.signal_to_noise(p).value == pytest.approx(0.25 / D, abs=0.001)
    for n in (8, 32.5):
        assert estimators.progress(p, n).value == pytest.approx(0.3 / (0.25 + D / n) ** 0.5, rel=0.08)
    # and it is what steps along means of 8 groups gain on average, reward being MU_R . theta
    means = k.reshape(200, 8, D).mean(1)
    gained = (means / np.linalg.norm(means, axis=1, keepdims=True)) @ MU_R
    assert estimators.progress(p, 8).value == pytest.approx(gained.mean(), rel=0.08)


def test_the_intervals_of_ratios_cover():
    hits = {"progress": 0, "ratio": 0}
    truth = 0.3 / (0.25 + D / 16) ** 0.5
    for seed in range(300):
        k, r = draw(seed, 100)
        a = estimators.progress(estimators.products(k, r), 16)
        b = estimators.progress(estimators.products(r, r), 16)
        ratio = a.map(lambda x, y: x / y, b).interval()
        hits["progress"] += a.interval().low <= truth <= a.interval().high
        hits["ratio"] += ratio.low <= truth / (1 / (1 + D / 16) ** 0.5) <= ratio.high
    assert all(270 <= count <= 298 for count in hits.values()), hits


def test_left_out_values_are_those_of_the_others_alone():
    k, r = draw(3, 7)
    whole = estimators.products(k, r)
    for g in range(7):
        rest = np.delete(np.arange(7), g)
        part = estimators.products(k[rest], r[rest])
        for name in ("along", "signal", "power", "true"):
            assert getattr(whole, name).left_out[g] == pytest.approx(getattr(part, name).value, rel=1e-9)
    by_hand = np.mean([k[g] @ r[h] for g in range(7) for h in range(7) if g != h])
    assert whole.along.value == pytest.approx(by_hand, rel=1e-12)


def test_the_order_of_groups_changes_nothing():
    k, r = draw(5)
    order = np.random.default_rng(1).permutation(N)
    for statistic in (estimators.signal_to_noise, estimators.alignment, lambda p: estimators.progress(p, 8)):
        one, other = (statistic(estimators.products(*pair)).interval() for pair in ((k, r), (k[order], r[order])))
        assert one.mean == pytest.approx(other.mean, rel=1e-9, nan_ok=True)
        assert one.high == pytest.approx(other.high, rel=1e-9, nan_ok=True)


def test_what_is_not_resolved_is_nan_and_two_groups_have_no_interval():
    k, r = draw(0)
    k = np.where(np.arange(N)[:, None] % 2, k[:1], -k[:1])  # opposite halves: the mean is nought
    p = estimators.products(k, r)
    assert p.signal.value < 0
    assert np.isnan(estimators.alignment(p).value)
    assert np.isfinite(estimators.progress(p, 8).value)
    two = estimators.products(*draw(0, 2)).along.interval()
    assert np.isfinite(two.mean)
    assert np.isnan(two.low)


@pytest.mark.parametrize(("freedom", "quantile"), [(1, 12.706), (4, 2.776), (9, 2.262), (30, 2.042), (1000, 1.962)])
def test_quantiles_of_students_t(freedom, quantile):
    assert t_quantile(freedom) == pytest.approx(quantile, rel=0.003)
