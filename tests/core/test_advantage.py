"""Advantages against numbers worked out by hand and against numpy."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from stepcredit import advantage

STEP_WISE = ("joint", "per_step", "centred")
ALL = ("group", *STEP_WISE)
nan = math.nan


def _get(name: str) -> Callable[..., Tensor]:
    return getattr(advantage, name)  # type: ignore[no-any-return]


def _literal(name: str, credit: np.ndarray, trained: np.ndarray, eps: float = 1e-4, clamp: float = 5.0) -> np.ndarray:
    """The table of definitions for one group ``[G, T]``, NaN and untrained entries left out."""
    out = np.zeros_like(credit)
    valid = trained & ~np.isnan(credit)
    if not valid.any():
        return out
    if name == "joint":
        out[valid] = (credit[valid] - credit[valid].mean()) / (credit[valid].std() + eps)
    else:
        pooled = credit.copy()
        for i in range(credit.shape[1]):
            column = valid[:, i]
            if column.any():
                pooled[column, i] -= credit[column, i].mean()
        for i in range(credit.shape[1]):
            column = valid[:, i]
            if column.any():
                scale = pooled[valid].std() if name == "centred" else credit[column, i].std()
                out[column, i] = pooled[column, i] / (scale + eps)
    return np.clip(out, -clamp, clamp)


@st.composite
def credits(draw: st.DrawFn, failures: bool = False) -> Tensor:
    """Credit [groups, G, T], well spread (a spread of rounding errors would be divided by itself)."""
    count, size, steps = draw(st.integers(1, 3)), draw(st.integers(2, 5)), draw(st.integers(1, 5))
    n = count * size * steps
    value = st.integers(-50, 50).map(float)
    flat = draw(st.lists(st.one_of(st.just(nan), value, value) if failures else value, min_size=n, max_size=n))
    return torch.tensor(flat, dtype=torch.float64).reshape(count, size, steps)


# --- by hand ------------------------------------------------------------------------------------------------------


def test_group_by_hand() -> None:
    # 1 2 3 4: mean 2.5, population variance (2.25 + .25) 2 / 4 = 1.25
    credit = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)[:, None].expand(4, 3)
    scale = math.sqrt(1.25) + 1e-4
    expected = torch.tensor([-1.5, -0.5, 0.5, 1.5], dtype=torch.float64)[:, None].expand(4, 3) / scale
    torch.testing.assert_close(advantage.group(credit), expected, atol=1e-12, rtol=0)


# members (0 2), (4 2): step means 2 and 2, joint mean 2; deviations -2 0, 2 0
# members (0 6), (4 8): step means 2 and 7, joint mean 4.5, joint variance (20.25 + .25 + 2.25 + 12.25) / 4 = 8.75
@pytest.mark.parametrize(
    ("name", "credit", "numerator", "std"),
    [
        ("joint", [[0, 2], [4, 2]], [[-2, 0], [2, 0]], [math.sqrt(2)] * 2),
        ("per_step", [[0, 2], [4, 2]], [[-2, 0], [2, 0]], [2, 0]),
        ("centred", [[0, 2], [4, 2]], [[-2, 0], [2, 0]], [math.sqrt(2)] * 2),
        ("joint", [[0, 6], [4, 8]], [[-4.5, 1.5], [-0.5, 3.5]], [math.sqrt(8.75)] * 2),
        ("per_step", [[0, 6], [4, 8]], [[-2, -1], [2, 1]], [2, 1]),
        ("centred", [[0, 6], [4, 8]], [[-2, -1], [2, 1]], [math.sqrt(2.5)] * 2),
    ],
)
def test_step_wise_by_hand(name: str, credit: list, numerator: list, std: list) -> None:
    eps = 1e-4
    expected = torch.tensor(numerator, dtype=torch.float64) / (torch.tensor(std, dtype=torch.float64) + eps)
    result = _get(name)(torch.tensor(credit, dtype=torch.float64))
    torch.testing.assert_close(result, expected, atol=1e-12, rtol=0)


def test_only_trained_steps_enter_by_hand() -> None:
    # the third step would change every number
    credit = torch.tensor([[0.0, 6.0, 100.0], [4.0, 8.0, -100.0]], dtype=torch.float64)
    trained = torch.tensor([True, True, False])
    for name in STEP_WISE:
        result = _get(name)(credit, trained=trained)
        assert result[:, 2].tolist() == [0, 0]
        torch.testing.assert_close(result[:, :2], _get(name)(credit[:, :2]), atol=1e-12, rtol=0)


def test_a_mask_of_the_shape_of_the_credit_by_hand() -> None:
    # two groups with windows of their own: joint over (1 3) at step 0, and over (2 6) at step 1
    credit = torch.tensor([[[1.0, 9.0], [3.0, 7.0]], [[9.0, 2.0], [5.0, 6.0]]], dtype=torch.float64)
    trained = torch.tensor([[[True, False]], [[False, True]]])
    expected = [[[-1 / 1.0001, 0], [1 / 1.0001, 0]], [[0, -2 / 2.0001], [0, 2 / 2.0001]]]
    for name in STEP_WISE:
        torch.testing.assert_close(
            _get(name)(credit, trained=trained), torch.tensor(expected, dtype=torch.float64), atol=1e-12, rtol=0
        )


def test_a_failed_member_is_left_out_by_hand() -> None:
    credit = torch.tensor([[0.0, 6.0], [nan, nan], [4.0, 8.0]], dtype=torch.float64)
    for name in STEP_WISE:
        result = _get(name)(credit)
        assert result[1].tolist() == [0, 0]
        torch.testing.assert_close(result[[0, 2]], _get(name)(credit[[0, 2]]), atol=1e-12, rtol=0)
    final = torch.tensor([1.0, nan, 3.0], dtype=torch.float64)[:, None].expand(3, 2)
    expected = torch.tensor([-1.0, 0.0, 1.0], dtype=torch.float64)[:, None].expand(3, 2) / 1.0001
    torch.testing.assert_close(advantage.group(final), expected, atol=1e-12, rtol=0)


def test_a_single_failed_step_is_left_out_by_hand() -> None:
    # step 1 has members 6 and 8 left; joint over 0 2 4 | 6 8: mean 4, variance (16 + 4 + 0 + 4 + 16) / 5 = 8
    credit = torch.tensor([[0.0, 6.0], [2.0, nan], [4.0, 8.0]], dtype=torch.float64)
    joint = torch.tensor([[-4.0, 2], [-2, 0], [0, 4]], dtype=torch.float64) / (math.sqrt(8) + 1e-4)
    torch.testing.assert_close(advantage.joint(credit), joint, atol=1e-12, rtol=0)
    # centred deviations -2 0 2 | -1 1: variance 10 / 5
    centred = torch.tensor([[-2.0, -1], [0, 0], [2, 1]], dtype=torch.float64) / (math.sqrt(2) + 1e-4)
    torch.testing.assert_close(advantage.centred(credit), centred, atol=1e-12, rtol=0)


def test_outliers_are_clamped() -> None:
    # one of 50 members differs: (1 - 1/50) / sqrt(1/50 * 49/50) = 7
    credit = torch.zeros(50, 1, dtype=torch.float64)
    credit[7] = 1
    for name in ALL:
        assert _get(name)(credit)[7].item() == 5
        assert _get(name)(-credit)[7].item() == -5
        assert _get(name)(credit, clamp=2.0)[7].item() == 2
        assert _get(name)(credit, clamp=10.0)[7].item() == pytest.approx(7, abs=0.01)


def test_eps_by_hand() -> None:
    credit = torch.tensor([[1.0], [3.0]], dtype=torch.float64)
    for name in ALL:
        assert _get(name)(credit, eps=1.0).flatten().tolist() == [-0.5, 0.5]


# --- one scale for all groups -------------------------------------------------------------------------------------


def test_global_std_of_final_rewards_by_hand() -> None:
    # Flow-GRPO's global_std: each prompt has its own mean, the std is that of all rewards of the iteration.
    # 0 2 | 10 14: mean 6.5, variance (42.25 + 20.25 + 12.25 + 56.25) / 4 = 32.75
    credit = torch.tensor([[0.0, 2.0], [10.0, 14.0]], dtype=torch.float64)[..., None].expand(2, 2, 3)
    scale = math.sqrt(32.75) + 1e-4
    expected = torch.tensor([[-1.0, 1.0], [-2.0, 2.0]], dtype=torch.float64)[..., None].expand(2, 2, 3) / scale
    torch.testing.assert_close(advantage.group(credit, global_std=True), expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize(
    ("name", "numerator", "std"),
    # groups (0 6 | 4 8) and (10 1 | 14 5), members by row: the std takes in the distance between the groups, as
    # Flow-GRPO's does; `per_step` has one for each step, `centred` has no distance left to take in
    [
        ("joint", [[[-4.5, 1.5], [-0.5, 3.5]], [[2.5, -6.5], [6.5, -2.5]]], [math.sqrt(18.75)] * 2),
        ("per_step", [[[-2, -1], [2, 1]], [[-2, -2], [2, 2]]], [math.sqrt(29), math.sqrt(6.5)]),
        ("centred", [[[-2, -1], [2, 1]], [[-2, -2], [2, 2]]], [math.sqrt(3.25)] * 2),
    ],
)
def test_global_std_of_step_wise_credit_by_hand(name: str, numerator: list, std: list) -> None:
    # joint: all eight have mean 6 and squared deviations 36 0 4 4 16 25 64 1, so variance 150 / 8 = 18.75
    # per_step: 0 4 10 14 have mean 7 and variance (49 + 9 + 9 + 49) / 4; 6 8 1 5 have 5 and (1 + 9 + 16 + 0) / 4
    # centred: 2 1 2 1 2 2 2 2, mean square (4 1 4 1 4 4 4 4) / 8 = 3.25
    credit = torch.tensor([[[0.0, 6.0], [4.0, 8.0]], [[10.0, 1.0], [14.0, 5.0]]], dtype=torch.float64)
    expected = torch.tensor(numerator, dtype=torch.float64) / (torch.tensor(std, dtype=torch.float64) + 1e-4)
    torch.testing.assert_close(_get(name)(credit, global_std=True), expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("name", ALL)
def test_global_std_keeps_the_proportions_between_groups(name: str) -> None:
    # whatever the scale is, it is one number: advantages are the centred credit times a constant
    credit = torch.tensor([[0.0, 2.0, 1.5], [10.0, 14.0, 3.0]], dtype=torch.float64)[..., None]
    result = _get(name)(credit, global_std=True)
    ratio = result / (credit - credit.mean(1, keepdim=True))
    torch.testing.assert_close(ratio, ratio[0, :1].expand_as(ratio))


@pytest.mark.parametrize("name", ALL)
def test_global_std_of_one_group_is_its_own(name: str) -> None:
    credit = torch.tensor([[[1.0], [2.0], [6.0]]], dtype=torch.float64)
    torch.testing.assert_close(_get(name)(credit, global_std=True), _get(name)(credit))


@pytest.mark.parametrize("name", ALL)
def test_global_std_leaves_a_degenerate_group_at_zero(name: str) -> None:
    credit = torch.tensor([[1.0, 3.0], [7.0, 7.0]], dtype=torch.float64)[..., None]
    assert _get(name)(credit, global_std=True)[1].flatten().tolist() == [0, 0]


# --- degenerate groups --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("value", [0.0, 0.1, 1 / 3, -7e5, 1e-30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_members_get_exactly_zero(name: str, value: float, dtype: torch.dtype) -> None:
    # the mean of equal numbers may differ from them by rounding, which must not be divided by eps
    credit = torch.full((3, 7, 3), value, dtype=dtype)
    assert not _get(name)(credit).any()
    assert advantage.degenerate(credit).tolist() == [True] * 3


@pytest.mark.parametrize("name", ["per_step", "centred"])
def test_members_equal_at_every_step_get_exactly_zero(name: str) -> None:
    credit = torch.tensor([0.1, -0.7, 1 / 3]).expand(6, 3)
    assert not _get(name)(credit).any()
    assert advantage.degenerate(credit).item() is True


def test_degenerate_by_hand() -> None:
    credit = torch.tensor(
        [
            [[1.0, 2.0], [1.0, 2.0]],  # equal at every step
            [[1.0, 2.0], [1.0, 3.0]],  # differ at step 1
            [[1.0, nan], [1.0, 3.0]],  # differ only where one failed
            [[nan, nan], [nan, nan]],  # nothing left
        ]
    )
    assert advantage.degenerate(credit).tolist() == [True, False, True, True]
    assert advantage.degenerate(credit, trained=torch.tensor([True, False])).tolist() == [True] * 4
    assert advantage.degenerate(credit, trained=torch.tensor([False, True])).tolist() == [True, False, True, True]


@pytest.mark.parametrize("name", ALL)
def test_a_group_of_failures_gives_zeros(name: str) -> None:
    assert _get(name)(torch.full((1, 4, 2), nan)).tolist() == [[[0.0] * 2] * 4]
    only_one = torch.full((4, 2), nan)
    only_one[2] = 3.0
    assert not _get(name)(only_one).any()


@pytest.mark.parametrize("name", ALL)
def test_no_trained_step_gives_zeros(name: str) -> None:
    credit = torch.tensor([[1.0, 1.0], [2.0, 2.0]])
    assert not _get(name)(credit, trained=torch.zeros(2, dtype=torch.bool)).any()


# --- properties ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", STEP_WISE)
@given(credit=credits(failures=True), seed=st.integers(0, 10**6))
def test_agrees_with_the_literal_definition(name: str, credit: Tensor, seed: int) -> None:
    rng = np.random.default_rng(seed)
    steps = rng.random(credit.shape[-1]) < 0.7
    result = _get(name)(credit, trained=torch.from_numpy(steps))
    for g in range(credit.shape[0]):
        mask = np.broadcast_to(steps, credit.shape[1:])
        expected = _literal(name, credit[g].numpy(), mask)
        np.testing.assert_allclose(result[g].numpy(), expected, atol=1e-8)


@given(credits(failures=True))
def test_group_agrees_with_the_literal_definition(credit: Tensor) -> None:
    final = credit[..., :1].expand_as(credit)
    for g in range(credit.shape[0]):
        expected = _literal("per_step", credit[g, :, :1].numpy(), np.ones((credit.shape[1], 1), dtype=bool))
        for i in range(credit.shape[2]):
            np.testing.assert_allclose(advantage.group(final)[g, :, i].numpy(), expected[:, 0], atol=1e-8)


def test_on_uniform_credit_all_four_agree() -> None:
    credit = torch.tensor([0.3, -1.0, 2.5, 0.0], dtype=torch.float64)[:, None].expand(4, 5)
    for name in STEP_WISE:
        torch.testing.assert_close(_get(name)(credit), advantage.group(credit), atol=1e-12, rtol=0)


def test_group_refuses_credit_that_differs_between_steps() -> None:
    with pytest.raises(ValueError, match="group"):
        advantage.group(torch.tensor([[1.0, 2.0], [3.0, 3.0]]))
    # where it differs only at a step that is not trained, it is as good as equal
    result = advantage.group(torch.tensor([[1.0, 2.0], [3.0, 3.0]]), trained=torch.tensor([True, False]))
    torch.testing.assert_close(result, torch.tensor([[-1 / 1.0001, 0.0], [1 / 1.0001, 0.0]]))


@pytest.mark.parametrize("name", STEP_WISE)
@pytest.mark.parametrize("global_std", [False, True])
@given(credit=credits(failures=True), order=st.randoms(use_true_random=False))
def test_members_and_groups_may_be_permuted(name: str, global_std: bool, credit: Tensor, order: object) -> None:
    members, groups = list(range(credit.shape[1])), list(range(credit.shape[0]))
    order.shuffle(members)  # type: ignore[attr-defined]
    order.shuffle(groups)  # type: ignore[attr-defined]
    function = _get(name)
    expected = function(credit, global_std=global_std)[groups][:, members]
    torch.testing.assert_close(function(credit[groups][:, members], global_std=global_std), expected)


@pytest.mark.parametrize("name", ALL)
@given(credit=credits(), shift=st.integers(-100, 100))
def test_a_constant_more_on_all_credit_changes_nothing(name: str, credit: Tensor, shift: int) -> None:
    credit = credit[..., :1].expand_as(credit) if name == "group" else credit
    torch.testing.assert_close(_get(name)(credit + shift), _get(name)(credit), atol=1e-7, rtol=0)


@pytest.mark.parametrize("name", ["per_step", "centred"])
@given(credit=credits(), seed=st.integers(0, 10**6))
def test_a_constant_more_on_one_step_changes_nothing(name: str, credit: Tensor, seed: int) -> None:
    shift = torch.randint(-50, 50, (credit.shape[0], 1, credit.shape[2]), generator=torch.Generator().manual_seed(seed))
    torch.testing.assert_close(_get(name)(credit + shift), _get(name)(credit), atol=1e-7, rtol=0)


def test_joint_keeps_what_separates_the_steps() -> None:
    # the difference between the names: joint sees a step that was good for all members
    credit = torch.tensor([[0.0, 6.0], [4.0, 8.0]])
    assert advantage.joint(credit)[:, 1].mean() > 0.5
    assert abs(advantage.centred(credit)[:, 1].mean()) < 1e-6


@pytest.mark.parametrize("name", ALL)
@given(credit=credits(), scale=st.sampled_from([0.25, 3.0, 1e4]))
def test_the_unit_of_the_reward_does_not_matter(name: str, credit: Tensor, scale: float) -> None:
    credit = credit[..., :1].expand_as(credit) if name == "group" else credit
    function = _get(name)
    torch.testing.assert_close(function(scale * credit, eps=1e-12), function(credit, eps=1e-12), atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(function(-credit), -function(credit), atol=1e-12, rtol=0)


@pytest.mark.parametrize("name", ["per_step", "centred"])
@given(credit=credits(failures=True))
def test_advantages_of_a_step_sum_to_zero(name: str, credit: Tensor) -> None:
    result = _get(name)(credit, clamp=math.inf)
    torch.testing.assert_close(result.sum(-2), torch.zeros_like(result.sum(-2)), atol=1e-8, rtol=0)


@given(credits())
def test_joint_advantages_have_mean_zero_and_deviation_one(credit: Tensor) -> None:
    result = advantage.joint(credit, eps=1e-15, clamp=math.inf)
    for g in range(credit.shape[0]):
        assert result[g].mean().item() == pytest.approx(0, abs=1e-9)
        if credit[g].std(correction=0) > 0:
            assert result[g].std(correction=0).item() == pytest.approx(1, abs=1e-9)


@pytest.mark.parametrize("name", ALL)
def test_dtype_and_input_are_kept(name: str) -> None:
    credit = torch.tensor([[1.0, 1.0], [2.0, 2.0], [nan, nan]])
    before = credit.clone()
    result = _get(name)(credit)
    assert result.dtype == torch.float32
    assert result.shape == credit.shape
    torch.testing.assert_close(credit, before, equal_nan=True)
