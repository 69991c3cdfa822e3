"""Statistics of comparisons: values worked by hand, closed forms, and what resampling must give in the limit."""

import itertools
import math

import numpy as np
import pytest

from stepcredit.training import comparison as c

NAN = math.nan


def of(prompts, tags=None, macro=False):
    return c.design(list(prompts), list(tags) if tags else None, macro)


def test_micro_and_macro_means_by_hand():
    values = np.array([1.0, 0.0, 1.0, 1.0, 0.0])
    prompts, tags = "aabcd", "xxxyy"
    assert c.estimate(values, of(prompts, tags)) == pytest.approx(3 / 5)
    assert c.estimate(values, of(prompts, tags, macro=True)) == pytest.approx((2 / 3 + 1 / 2) / 2)
    # what each prompt adds: a 1, b 1 of the three values of x; c 1, d 0 of the two of y
    assert c.contributions(values, of(prompts, tags, macro=True)).tolist() == pytest.approx([1 / 6, 1 / 6, 1 / 4, 0])


def test_failed_samples_are_left_out_of_every_mean():
    values = np.array([1.0, NAN, 0.0, NAN, NAN])
    prompts, tags = "aabcd", "xxxyy"
    assert c.estimate(values, of(prompts, tags)) == pytest.approx(0.5)
    assert c.estimate(values, of(prompts, tags, macro=True)) == pytest.approx(0.5)  # tag y has no value at all
    assert math.isnan(c.estimate(np.full(5, NAN), of(prompts, tags)))
    assert math.isnan(c.interval(np.full(5, NAN), of(prompts, tags)).low)


def test_the_same_prompt_under_two_tags_is_two_prompts():
    plan = of("aa", "xy")
    assert plan.cluster.tolist() == [0, 1]
    assert plan.stratum.tolist() == [0, 1]
    with pytest.raises(ValueError, match="2 prompts and 1 tags"):
        of("aa", "x")


def test_the_interval_has_the_width_of_the_stratified_normal_approximation():
    random = np.random.default_rng(1)
    # tags far apart: resampling without strata would count their distance as noise
    values = np.concatenate([random.normal(0, 1, 300), random.normal(50, 2, 100)])
    plan = of(range(400), ["x"] * 300 + ["y"] * 100, macro=True)
    error = 0.5 * math.sqrt(values[:300].var() / 300 + values[300:].var() / 100)
    found = c.interval(values, plan)
    assert found.mean == pytest.approx((values[:300].mean() + values[300:].mean()) / 2)
    assert (found.high - found.low) / 2 == pytest.approx(1.96 * error, rel=0.05)
    assert c.standard_error(values, plan) == pytest.approx(error, rel=0.01)
    assert found == c.interval(values, plan)


def test_images_of_one_prompt_do_not_count_as_prompts():
    values = np.random.default_rng(2).normal(size=60)
    single, repeated = of(range(60)), of(np.repeat(range(60), 4).tolist())
    one, four = c.interval(values, single), c.interval(np.repeat(values, 4), repeated)
    assert (four.low, four.high) == pytest.approx((one.low, one.high))
    assert c.standard_error(np.repeat(values, 4), repeated) == pytest.approx(c.standard_error(values, single))
    assert c.standard_error(values, single) == pytest.approx(values.std(ddof=1) / math.sqrt(60))


@pytest.mark.parametrize(
    ("parts", "p"),
    [
        ([1.0, 2.0, 3.0], 2 / 8),  # only all plus and all minus reach 6
        ([3.0, -1.0], 1.0),  # |2| is reached by all of 2, -2, 4, -4
        ([1.0, 1.0, 1.0, -1.0], 10 / 16),  # |sum| >= 2: all but the six with two of each sign
        ([5.0], 1.0),
        ([0.0, 0.0], 1.0),
        ([], 1.0),
        ([0.1, 0.2, 0.3, 0.0], 2 / 8),  # sums equal but for rounding count; zeros do not
    ],
)
def test_sign_flips_by_hand(parts, p):
    assert c.sign_flip(np.array(parts)) == pytest.approx(p)


def test_sign_flips_are_all_tried_for_few_and_drawn_for_many():
    few = np.random.default_rng(4).normal(0.3, 1, 9)
    reached = [abs(np.dot(s, few)) >= abs(few.sum()) - 1e-12 for s in itertools.product((1, -1), repeat=9)]
    assert c.sign_flip(few) == pytest.approx(np.mean(reached))
    many = np.random.default_rng(5).normal(0.2, 1, 200)
    z = many.sum() / math.sqrt(np.square(many).sum())  # the flipped sum is normal in the limit
    assert c.sign_flip(many) == pytest.approx(math.erfc(abs(z) / math.sqrt(2)), abs=0.01)
    assert c.sign_flip(many) == c.sign_flip(many)
    assert c.sign_flip(np.ones(100)) == 1 / 20_000
    with pytest.raises(ValueError, match="NaN"):
        c.sign_flip(np.array([1.0, NAN]))


def test_tests_keep_their_level():
    """Of 400 comparisons without a difference about 5 % are found significant (binomial deviation 1.1 %)."""
    random = np.random.default_rng(6)
    found = [c.sign_flip(random.standard_t(3, 10)) <= 0.05 for _ in range(400)]
    assert 0.02 <= np.mean(found) <= 0.08


@pytest.mark.parametrize(
    ("p", "adjusted"),
    [
        ([0.01, 0.04, 0.03], [0.03, 0.06, 0.06]),  # 3 x .01; 2 x .03; max(.06, 1 x .04)
        ([0.5, 0.6], [1.0, 1.0]),
        ([0.02], [0.02]),
        ([], []),
    ],
)
def test_holm_by_hand(p, adjusted):
    assert c.holm(p) == pytest.approx(adjusted)


def test_detectable_differences_have_their_closed_form():
    assert c.detectable(1.0) == pytest.approx(1.959964 + 0.841621, abs=1e-5)
    assert c.planned_error(0.5, of(range(100))) == pytest.approx(0.05)
    # two tags, equally weighted, of 80 and 20 prompts with 4 images each
    prompts = np.repeat(range(100), 4).tolist()
    tags = ["x"] * 320 + ["y"] * 80
    assert c.planned_error(1.0, of(prompts, tags, macro=True)) == pytest.approx(0.5 * math.sqrt(1 / 80 + 1 / 20))
    assert c.planned_error(1.0, of(prompts, tags)) == pytest.approx(math.sqrt(0.8**2 / 80 + 0.2**2 / 20))


def test_a_difference_of_the_detectable_size_is_found_four_times_in_five():
    random, plan = np.random.default_rng(7), of(range(60))
    size = c.detectable(c.planned_error(1.0, plan))
    z = [random.normal(size, 1, 60).mean() * math.sqrt(60) for _ in range(2000)]
    assert np.mean(np.abs(z) > 1.96) == pytest.approx(0.8, abs=0.03)


def test_the_paired_deviation_is_within_tags():
    values = np.array([1.0, 3.0, 11.0, 13.0])  # within each tag: deviations -1, 1; 4 squares, 2 degrees of freedom
    assert c.paired_deviation(values, of("abcd", "xxyy")) == pytest.approx(math.sqrt(4 / 2))
    assert math.isnan(c.paired_deviation(values[:1], of("a")))
