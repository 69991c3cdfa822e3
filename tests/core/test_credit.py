"""Credit schemes against sequences worked out by hand and the rules read literally."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from stepcredit import credit

SCHEMES = {
    "uniform": credit.uniform,
    "gain": credit.gain,
    "gae": lambda R: credit.gae(R, 0.6),
    "tempflow": credit.tempflow,
    "strict": credit.turning_point,
    "loose": lambda R: credit.turning_point(R, strict=False),
    "balanced": lambda R: credit.turning_point(R, balance=True),
    "loose, balanced": lambda R: credit.turning_point(R, strict=False, balance=True),
    "smooth": credit.turning_point_smooth,
}


@st.composite
def rewards(draw: st.DrawFn, largest: int = 80) -> Tensor:
    """R [groups, G, T + 1] of eighths, so that sums and differences are exact."""
    values = st.integers(-largest, largest).map(lambda k: k / 8)
    count, size, steps = draw(st.integers(1, 2)), draw(st.integers(1, 4)), draw(st.integers(1, 6))
    flat = draw(st.lists(values, min_size=count * size * (steps + 1), max_size=count * size * (steps + 1)))
    return torch.tensor(flat, dtype=torch.float64).reshape(count, size, steps + 1)


def _row(*values: float) -> Tensor:
    return torch.tensor([values], dtype=torch.float64)


def _sign(x: float) -> int:
    return (x > 0) - (x < 0)


def _turns(R: list[float], strict: bool) -> list[bool]:
    """The definition of a turning point, read line by line."""
    T = len(R) - 1
    d = [R[i + 1] - R[i] for i in range(T)]
    c = [_sign(x) * _sign(R[T] - R[0]) for x in d]
    found = []
    for i in range(T):
        agrees = _sign(d[i]) * _sign(R[T] - R[i + 1]) > 0
        if i == 0:
            found.append(agrees if strict else c[0] > 0)
        else:
            found.append(c[i - 1] < 0 and c[i] > 0 and (agrees or not strict))
    return found


# --- the simple schemes -------------------------------------------------------------------------------------------


def test_by_hand() -> None:
    R = torch.tensor([[1.0, 3.0, 2.0, 5.0], [1.0, 0.0, 0.0, -1.0]])
    assert credit.uniform(R).tolist() == [[5.0, 5.0, 5.0], [-1.0, -1.0, -1.0]]
    assert credit.tempflow(R).tolist() == [[5.0, 5.0, 5.0], [-1.0, -1.0, -1.0]]
    assert credit.gain(R).tolist() == [[2.0, -1.0, 3.0], [-1.0, 0.0, -1.0]]
    # 3; -1 + 3/2 = .5; 2 + .5/2 = 2.25 and -1; 0 - 1/2; -1 - .5/2
    assert credit.gae(R, 0.5).tolist() == [[2.25, 0.5, 3.0], [-1.25, -0.5, -1.0]]
    assert credit.gae(R, 1.0).tolist() == [[4.0, 2.0, 3.0], [-2.0, -1.0, -1.0]]


@given(rewards())
def test_gains_telescope(R: Tensor) -> None:
    assert torch.equal(credit.gain(R).sum(-1), R[..., -1] - R[..., 0])


@given(rewards())
def test_gae_runs_from_the_gain_to_all_that_follows(R: Tensor) -> None:
    assert torch.equal(credit.gae(R, 0.0), credit.gain(R))
    assert torch.equal(credit.gae(R, 1.0), R[..., -1:] - R[..., :-1])


@given(rewards(), st.floats(0, 1))
def test_gae_is_the_sum_it_says(R: Tensor, lam: float) -> None:
    d, T = credit.gain(R), R.shape[-1] - 1
    expected = torch.stack([sum(lam ** (k - i) * d[..., k] for k in range(i, T)) for i in range(T)], dim=-1)
    torch.testing.assert_close(credit.gae(R, lam), expected, atol=1e-10, rtol=1e-12)


def test_gae_zero_is_the_gain_where_rewards_are_missing_too() -> None:
    R = _row(0, 1, math.nan, 2)
    torch.testing.assert_close(credit.gae(R, 0.0), credit.gain(R), equal_nan=True)


@pytest.mark.parametrize("lam", [-0.1, 1.1, math.nan])
def test_gae_refuses_lam_outside_the_unit_interval(lam: float) -> None:
    with pytest.raises(ValueError, match="lam"):
        credit.gae(torch.zeros(2, 3), lam)


# --- turning points -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("R", "loose", "strict"),
    [
        # up all the way: only the first step turns (from nothing), and it has the rest behind it
        ([0, 1, 2, 3], [3, 1, 1], [3, 1, 1]),
        # down all the way: the same, with the sign of the whole
        ([0, -1, -2, -3], [-3, -1, -1], [-3, -1, -1]),
        # one step alone: loose it turns, and credit is its gain; strict the last step never turns
        ([0, 2], [2], [2]),
        # down, then up to above the start: the turn is the last step, whose long-term reward is its own gain
        ([0, -1, 2], [-1, 3], [-1, 3]),
        # down, up, up: step 1 turns, with more to follow: R[3] - R[1] = 4 replaces 1
        ([0, -1, 0, 3], [-1, 4, 3], [-1, 4, 3]),
        # down, up too far, down again to above the start: loose turns at 1, strict does not (what follows disagrees)
        ([0, -1, 5, 3], [-1, 4, -2], [-1, 6, -2]),
        # up, down, up in a falling trajectory: step 1 turns with the trend, then step 2 goes against it.
        # loose: R[3] - R[1] = -2 replaces -4; strict: -4 and R[3] - R[2] = 2 disagree
        ([0, 1, -3, -1], [1, -2, 2], [1, -4, 2]),
        # the same with a second fall: step 1 turns in both, R[4] - R[1] = -6 replaces -4
        ([0, 1, -3, -1, -5], [1, -6, 2, -4], [1, -6, 2, -4]),
        # a pause between fall and rise: no turn, since c[1] = 0 is not negative
        ([0, -1, -1, 2], [-1, 0, 3], [-1, 0, 3]),
        # ends where it began: the trend has no sign, nothing turns; strict asks d[0] to agree with the rest: it cannot
        ([0, 1, 0], [1, -1], [1, -1]),
        ([0, -2, 3, 0], [-2, 5, -3], [-2, 5, -3]),
        # first step up and the whole up, but what follows is down: loose turns (credit 1 < gain 3), strict does not
        ([0, 3, 1], [1, -2], [3, -2]),
        # first step up and nothing follows
        ([0, 3, 3], [3, 0], [3, 0]),
        # first step 0: no turn anywhere
        ([0, 0, 2], [0, 2], [0, 2]),
        # constant
        ([1, 1, 1, 1], [0, 0, 0], [0, 0, 0]),
    ],
)
def test_turning_points_by_hand(R: list[float], loose: list[float], strict: list[float]) -> None:
    assert credit.turning_point(_row(*R), strict=False).tolist() == [loose]
    assert credit.turning_point(_row(*R), strict=True).tolist() == [strict]
    assert credit.turning_point(_row(*R)).tolist() == [strict]  # strict is the default


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("steps", [1, 2, 3, 4])
def test_every_sign_pattern(strict: bool, steps: int) -> None:
    # gains of different sizes, so that every sign of the whole and of the rest occurs with every pattern
    sizes = (4, 3, 7, 2), (1, 1, 1, 1), (1, 5, 2, 9)
    rows = [
        [0.0, *itertools.accumulate(sign * size for sign, size in zip(signs, of, strict=False))]
        for signs in itertools.product((-1, 0, 1), repeat=steps)
        for of in sizes
    ]
    R = torch.tensor(rows, dtype=torch.float64)
    expected = [
        [row[-1] - row[i] if turn else row[i + 1] - row[i] for i, turn in enumerate(_turns(row, strict))]
        for row in rows
    ]
    assert credit.turning_point(R, strict=strict).tolist() == expected
    assert credit.turning_points(R, strict=strict).tolist() == [_turns(row, strict) for row in rows]


@given(rewards())
def test_strict_credit_has_the_sign_of_the_gain_and_is_larger(R: Tensor) -> None:
    turns, d = credit.turning_points(R), credit.gain(R)
    aggregated = credit.turning_point(R)
    assert (aggregated.sign() == d.sign()).all()
    assert (aggregated.abs()[turns] > d.abs()[turns]).all()
    assert torch.equal(aggregated[~turns], d[~turns])


@given(rewards())
def test_where_nothing_can_turn(R: Tensor) -> None:
    strict, loose = credit.turning_points(R), credit.turning_points(R, strict=False)
    assert not strict[..., -1].any()
    assert not (strict & ~loose).any()
    assert not (loose & (credit.gain(R) == 0)).any()
    assert not loose[R[..., -1] == R[..., 0]].any()
    assert not (loose[..., 1:] & loose[..., :-1]).any()  # a turn needs a step against the trend before it


def test_untrained_steps_do_not_turn() -> None:
    R = _row(0, -1, 0, 3, 2, 6)
    assert credit.turning_point(R).tolist() == [[-1, 7, 3, -1, 4]]
    trained = torch.tensor([True, False, True, True, True])
    assert credit.turning_point(R, trained=trained).tolist() == [[-1, 1, 3, -1, 4]]


# --- balancing ----------------------------------------------------------------------------------------------------


def _one_turn(first: float, last: float) -> list[float]:
    """A member whose first step turns (strictly) with credit ``last``, and whose second does not."""
    return [0.0, first, last]


def test_balancing_keeps_the_largest_of_each_sign() -> None:
    # first-step turns of credit +5, +3, +9 and -4: one negative, so one positive stays, the 9
    R = torch.tensor([_one_turn(1, 5), _one_turn(2, 3), _one_turn(4, 9), _one_turn(-1, -4)])
    assert credit.turning_point(R).tolist() == [[5, 4], [3, 1], [9, 5], [-4, -3]]
    assert credit.turning_point(R, balance=True).tolist() == [[1, 4], [2, 1], [9, 5], [-4, -3]]


def test_balancing_works_on_negative_excess_and_across_steps() -> None:
    # turns: member 0 at steps 0 (credit 6)... its path 0 1 -1 6: c = + - +, strict: step 0 (1, rest 5 > 0) and step 2
    # is last, never. Members 1, 2 fall: first-step turns of -2 and -8. Member 3 rises then falls, no strict turn:
    # 0 1 -3 -1 -5 turns at step 1 with -6. So one positive (6) against -2, -8, -6: the -8 stays.
    R = torch.tensor(
        [
            [0.0, 1, -1, 6, 6],
            [0.0, -1, -2, -2, -2],
            [0.0, -3, -8, -8, -8],
            [0.0, 1, -3, -1, -5],
        ]
    )
    assert credit.turning_point(R).tolist() == [[6, -2, 7, 0], [-2, -1, 0, 0], [-8, -5, 0, 0], [1, -6, 2, -4]]
    assert credit.turning_point(R, balance=True).tolist() == [
        [6, -2, 7, 0],
        [-1, -1, 0, 0],
        [-8, -5, 0, 0],
        [1, -4, 2, -4],
    ]


def test_balancing_keeps_all_when_one_sign_is_absent() -> None:
    R = torch.tensor([_one_turn(1, 5), _one_turn(2, 3), [0.0, 0.0, 0.0]])
    assert torch.equal(credit.turning_point(R, balance=True), credit.turning_point(R))


def test_balancing_is_within_a_group() -> None:
    one = torch.tensor([_one_turn(1, 5), _one_turn(2, 3), _one_turn(-1, -4)])
    other = torch.tensor([_one_turn(-1, -7), _one_turn(-2, -3), _one_turn(-3, -6)])
    both = credit.turning_point(torch.stack([one, other]), balance=True)
    assert torch.equal(both[0], credit.turning_point(one, balance=True))
    assert torch.equal(both[1], credit.turning_point(other))  # no positive there: all kept


def test_balancing_counts_trained_steps_only() -> None:
    # the negative turn sits on a step that is not trained, so there is no negative one and both positive stay
    R = torch.tensor([[0.0, 1, 5, 5], [0.0, 2, 3, 3], [0.0, 1, -3, -4]])
    assert credit.turning_point(R)[2].tolist() == [1, -5, -1]
    trained = torch.tensor([True, False, True])
    assert credit.turning_point(R, balance=True, trained=trained).tolist() == [[5, 4, 0], [3, 1, 0], [1, -4, -1]]


@given(rewards(largest=10**6), st.booleans())
def test_balanced_turns_are_a_balanced_subset(R: Tensor, strict: bool) -> None:
    every, to_end, d = credit.turning_points(R, strict), R[..., -1:] - R[..., :-1], credit.gain(R)
    balanced = credit.turning_point(R, strict=strict, balance=True)
    for g in range(R.shape[0]):
        # which were kept shows only where both credits differ; at other turns the question is moot
        visible = every[g] & (to_end[g] != d[g])
        kept = visible & (balanced[g] == to_end[g])
        assert torch.equal(balanced[g][~kept], d[g][~kept])
        if bool(visible.ne(every[g]).any()):
            continue
        signs = [every[g] & (to_end[g] > 0), every[g] & (to_end[g] < 0)]
        counts = [int(of.sum()) for of in signs]
        wanted = min(counts) or max(counts)
        for of, count in zip(signs, counts, strict=True):
            assert int((kept & of).sum()) == min(wanted, count)
            dropped, stayed = to_end[g].abs()[of & ~kept], to_end[g].abs()[of & kept]
            if len(dropped):
                assert stayed.min() >= dropped.max()


# --- the smooth form ----------------------------------------------------------------------------------------------


@given(rewards(), st.floats(0.05, 20))
def test_smooth_lies_between_the_gain_and_all_that_follows(R: Tensor, temperature: float) -> None:
    smooth = credit.turning_point_smooth(R, temperature)
    ends = torch.stack([credit.gain(R), R[..., -1:] - R[..., :-1]])
    assert (smooth >= ends.amin(0) - 1e-9).all()
    assert (smooth <= ends.amax(0) + 1e-9).all()


@given(rewards())
def test_smooth_touches_only_turns(R: Tensor) -> None:
    # away from the (loose) turning points there is no flip and the weight is 0, to the bit
    still = ~credit.turning_points(R, strict=False)
    assert torch.equal(credit.turning_point_smooth(R)[still], credit.gain(R)[still])


def test_smooth_tends_to_the_gain_and_to_the_switch() -> None:
    R = torch.tensor([[0.0, -1, 0, 3], [0.0, 2, 4, 4]], dtype=torch.float64)
    torch.testing.assert_close(credit.turning_point_smooth(R, 1e9), credit.gain(R), atol=1e-6, rtol=0)
    torch.testing.assert_close(
        credit.turning_point_smooth(R, 1e-3), credit.turning_point(R, strict=False), atol=1e-12, rtol=0
    )


def test_smooth_grows_with_the_flip() -> None:
    # member 1 turns more sharply than member 0 and is trusted more; both weights lie strictly between 0 and 1
    R = torch.tensor([[0.0, -0.1, 0.1, 3.0], [0.0, -2.0, 0.5, 3.0]], dtype=torch.float64)
    weight = (credit.turning_point_smooth(R) - credit.gain(R))[:, 1] / (R[:, 3] - R[:, 2])
    assert 0 < weight[0] < weight[1] < 1


@given(rewards(), st.sampled_from([0.25, 2.0, 1024.0]))
def test_smooth_does_not_depend_on_the_unit_of_the_reward(R: Tensor, scale: float) -> None:
    torch.testing.assert_close(credit.turning_point_smooth(scale * R), scale * credit.turning_point_smooth(R))


def test_smooth_refuses_a_temperature_that_is_not_positive() -> None:
    with pytest.raises(ValueError, match="temperature"):
        credit.turning_point_smooth(torch.zeros(2, 3), 0.0)


# --- all schemes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCHEMES)
@given(R=rewards(), order=st.randoms(use_true_random=False))
def test_members_may_be_permuted(name: str, R: Tensor, order: object) -> None:
    # equal |credit| under balancing is decided by position, so break ties with distinct multiples of a tiny amount
    tie_breaker = torch.arange(R.numel(), dtype=torch.float64).reshape(R.shape) ** 2 * 1e-7
    R = R + tie_breaker
    permutation = list(range(R.shape[-2]))
    order.shuffle(permutation)  # type: ignore[attr-defined]
    scheme = SCHEMES[name]
    torch.testing.assert_close(scheme(R[:, permutation]), scheme(R)[:, permutation], atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("name", SCHEMES)
@given(R=rewards())
def test_shapes_dtypes_and_groups(name: str, R: Tensor) -> None:
    scheme = SCHEMES[name]
    before = R.clone()
    whole = scheme(R)
    assert whole.shape == (*R.shape[:-1], R.shape[-1] - 1)
    assert whole.dtype == R.dtype
    assert scheme(R.float()).dtype == torch.float32
    assert torch.equal(R, before)  # the input is left alone
    for g in range(R.shape[0]):  # no scheme looks beyond its group
        torch.testing.assert_close(whole[g], scheme(R[g]), atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("name", [name for name in SCHEMES if name not in ("uniform", "tempflow")])
@given(R=rewards(), shift=st.integers(-100, 100))
def test_a_constant_reward_more_changes_no_step_wise_credit(name: str, R: Tensor, shift: int) -> None:
    scheme = SCHEMES[name]
    torch.testing.assert_close(scheme(R + shift), scheme(R), atol=1e-9, rtol=0)


@pytest.mark.parametrize("name", SCHEMES)
@given(R=rewards())
def test_a_negated_reward_negates_the_credit(name: str, R: Tensor) -> None:
    scheme = SCHEMES[name]
    torch.testing.assert_close(scheme(-R), -scheme(R), atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("name", SCHEMES)
def test_a_failed_member_does_not_touch_the_others(name: str) -> None:
    # a member whose rewards are missing gets NaN everywhere, the others what they would get
    R = torch.tensor([[0.0, -1, 0, 3], [math.nan] * 4, [0.0, -2, -4, -4]], dtype=torch.float64)
    result = SCHEMES[name](R)
    assert result[1].isnan().all()
    assert not result[[0, 2]].isnan().any()
    torch.testing.assert_close(result[[0, 2]], SCHEMES[name](R[[0, 2]]))


@pytest.mark.parametrize("name", ["uniform", "tempflow", "gain", "gae"])
def test_a_missing_reward_is_never_a_number(name: str) -> None:
    R = _row(0, math.nan, 2, 3)
    expected = {
        "uniform": [False, False, False],
        "tempflow": [False, False, False],
        "gain": [True, True, False],
        "gae": [True, True, False],
    }[name]
    assert SCHEMES[name](R).isnan().tolist() == [expected]
