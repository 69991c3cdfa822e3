"""Statistics of learning curves on curves made by hand."""

import math

import pytest

from stepcredit.comparison import curves
from stepcredit.comparison.curves import Curve, first_reaching, ratio
from stepcredit.training.stats import student


def curve(*reward: float, step: float = 10.0, cost: float = 100.0) -> Curve:
    """Points every ten iterations, each of which costs 100 evaluations and two seconds."""
    iterations = tuple(step * k for k in range(len(reward)))
    return Curve(iterations, tuple(k * cost for k in iterations), tuple(2 * k for k in iterations), reward)


def test_the_target_is_reached_between_two_points():
    rising = curve(0.5, 0.6, 0.8)
    assert first_reaching(rising, 0.7, "iterations") == pytest.approx(15.0)
    assert first_reaching(rising, 0.65, "evaluations") == pytest.approx(1250.0)
    assert first_reaching(rising, 0.8, "seconds") == pytest.approx(40.0)
    assert first_reaching(rising, 0.5, "seconds") == 0.0
    assert first_reaching(rising, 0.81, "seconds") is None
    assert first_reaching(curve(0.5, 0.9, 0.2, 0.9), 0.7, "iterations") == pytest.approx(5.0)  # the first time counts


def test_ratios_are_geometric_means_with_students_interval():
    # twice and eight times as long: four times, and log 2 and log 8 are log 2 on either side of log 4
    told = ratio([20.0, 40.0], [99.0, 99.0], [(10.0, 99.0), (5.0, 99.0)])
    assert told.kind == "equal"
    assert told.value == pytest.approx(4.0)
    assert told.seeds == 2
    half = 12.706 * math.log(2)  # std log 2 sqrt 2, over sqrt 2
    assert (told.low, told.high) == pytest.approx((4 * math.exp(-half), 4 * math.exp(half)), rel=1e-3)
    alone = ratio([20.0], [99.0], [(10.0, 99.0)])
    assert alone.value == pytest.approx(2.0)
    assert alone.low is None


def test_runs_that_never_reach_the_target_make_bounds():
    late = ratio([None, 40.0], [90.0, 90.0], [(10.0, 90.0), (10.0, 90.0)])
    assert (late.kind, late.low, late.high) == ("at least", None, None)
    assert late.value == pytest.approx(6.0)  # 9 and 4
    early = ratio([10.0], [90.0], [(None, 90.0)])
    assert (early.kind, early.value) == ("at most", pytest.approx(1 / 9))
    assert ratio([None], [90.0], [(None, 90.0)]).kind == "unknown"
    assert ratio([None, 10.0], [90.0, 90.0], [(10.0, 90.0), (None, 90.0)]).kind == "unknown"
    assert ratio([0.0], [90.0], [(10.0, 90.0)]).kind == "unknown"
    assert ratio([], [], []).kind == "unknown"


def test_bands_are_over_seeds_and_a_run_that_ended_keeps_its_last_reward():
    told = curves.band([curve(0.5, 0.7, 0.9), curve(0.5, 0.6)], "evaluations")
    assert told.x == (0.0, 1000.0, 1500.0)  # the second stopped at 1,000
    assert [point.mean for point in told.reward] == pytest.approx([0.5, 0.65, 0.75])
    assert (told.reward[2].low, told.reward[2].high) == pytest.approx((0.6, 0.9))
    assert (told.reward[0].low, told.reward[0].high) == pytest.approx((0.5, 0.5))


def test_bands_of_runs_evaluated_at_different_iterations_meet_between_the_points():
    told = curves.band([curve(0.0, 1.0, step=10.0), curve(0.0, 1.0, 1.0, step=5.0)], "iterations")
    assert told.x == (0.0, 5.0, 10.0)
    assert [point.mean for point in told.reward] == pytest.approx([0.0, 0.75, 1.0])


def test_the_default_target_is_halfway_to_the_first_recipes_mean_end():
    assert curves.halfway([curve(0.5, 0.9), curve(0.5, 0.7)]) == pytest.approx(0.65)
    assert curves.halfway([curve(0.5, 0.4), curve(0.5, 0.6)]) is None


def test_students_interval_by_hand():
    told = student([1.0, 2.0, 3.0])
    assert told.mean == pytest.approx(2.0)
    assert told.high - told.mean == pytest.approx(4.303 / math.sqrt(3), rel=1e-3)
    assert math.isnan(student([1.0]).low)
    assert math.isnan(student([]).mean)
