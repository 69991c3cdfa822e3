"""The straight path between data and noise."""

from __future__ import annotations

import functools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from stepcredit import interpolant


def _pair(seed: int, shape: tuple[int, ...] = (3, 2, 4)) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))  # type: ignore[return-value]


close = functools.partial(torch.testing.assert_close, atol=1e-14, rtol=1e-13)


def test_by_hand() -> None:
    x_0, x_1 = torch.tensor([[2.0]]), torch.tensor([[-2.0]])
    x_t = interpolant.interpolate(x_0, x_1, 0.25)
    v = torch.tensor([[-4.0]])  # x_1 - x_0
    assert x_t.item() == 1.0  # .75 * 2 - .25 * 2
    assert interpolant.x0_hat(x_t, v, 0.25).item() == 2.0  # 1 + .25 * 4
    assert interpolant.x1_hat(x_t, v, 0.25).item() == -2.0  # 1 - .75 * 4
    assert interpolant.euler(x_t, v, 0.25, 0.125).item() == 1.5  # 1 + (-.125)(-4)
    assert interpolant.euler(x_t, v, 0.25, 0.0).item() == 2.0


@given(st.integers(0, 10**6), st.floats(0, 1), st.floats(0, 1))
def test_with_the_true_velocity_everything_is_recovered(seed: int, t: float, t_next: float) -> None:
    x_0, x_1 = _pair(seed)
    x_t, v = interpolant.interpolate(x_0, x_1, t), x_1 - x_0
    close(interpolant.x0_hat(x_t, v, t), x_0)
    close(interpolant.x1_hat(x_t, v, t), x_1)
    close(interpolant.euler(x_t, v, t, t_next), (1 - t_next) * x_0 + t_next * x_1)


@given(st.integers(0, 10**6), st.floats(0, 1))
def test_the_two_estimates_interpolate_back_to_the_state(seed: int, t: float) -> None:
    x, v = _pair(seed)
    back = interpolant.interpolate(interpolant.x0_hat(x, v, t), interpolant.x1_hat(x, v, t), t)
    close(back, x)


def test_ends_are_exact() -> None:
    x, v = _pair(0)
    assert torch.equal(interpolant.interpolate(x, v, 0.0), x)
    assert torch.equal(interpolant.interpolate(x, v, 1.0), v)
    assert torch.equal(interpolant.x0_hat(x, v, 0.0), x)
    assert torch.equal(interpolant.x1_hat(x, v, 1.0), x)
    assert torch.equal(interpolant.euler(x, v, 0.5, 0.5), x)


def test_a_time_per_sample_equals_a_time_for_all() -> None:
    x, v = _pair(1)
    t, t_next = torch.tensor([0.9, 0.5, 0.1]), torch.tensor([0.6, 0.25, 0.0])
    for function, times in (
        (interpolant.interpolate, (t,)),
        (interpolant.x0_hat, (t,)),
        (interpolant.x1_hat, (t,)),
        (interpolant.euler, (t, t_next)),
    ):
        whole = function(x, v, *times)
        rows = [function(x[b : b + 1], v[b : b + 1], *(u[b].item() for u in times)) for b in range(3)]
        scalars = [function(x[b : b + 1], v[b : b + 1], *(u[b] for u in times)) for b in range(3)]
        torch.testing.assert_close(whole, torch.cat(rows))
        torch.testing.assert_close(whole, torch.cat(scalars))


def test_gradients_reach_the_velocity() -> None:
    x, v = _pair(2)
    v.requires_grad_()
    interpolant.x0_hat(x, v, 0.25).sum().backward()
    assert v.grad is not None
    torch.testing.assert_close(v.grad, torch.full_like(v, -0.25))


@pytest.mark.parametrize("t", [0.1, torch.tensor(0.1, dtype=torch.float64), torch.tensor([0.1] * 3).double() * 0 + 0.1])
def test_times_are_not_rounded_to_single_precision(t: float | Tensor) -> None:
    x, v = _pair(4)
    close(interpolant.interpolate(x, v, t), 0.9 * x + 0.1 * v)
    close(interpolant.x0_hat(x, v, t), x - 0.1 * v)
    close(interpolant.x1_hat(x, v, t), x + 0.9 * v)
    close(interpolant.euler(x, v, t, t / 2), x - 0.05 * v)


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_single(half: torch.dtype) -> None:
    x, v = (u.to(half) for u in _pair(5))
    for function, times in (
        (interpolant.interpolate, (0.3,)),
        (interpolant.x0_hat, (0.3,)),
        (interpolant.x1_hat, (0.3,)),
        (interpolant.euler, (0.3, 0.1)),
    ):
        result = function(x, v, *times)
        assert result.dtype == torch.float32
        assert torch.equal(result, function(x.float(), v.float(), *times))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dtype_is_kept(dtype: torch.dtype) -> None:
    x, v = (u.to(dtype) for u in _pair(3))
    t = torch.tensor([0.9, 0.5, 0.1], dtype=torch.float64)
    assert interpolant.x0_hat(x, v, 0.3).dtype == dtype
    assert interpolant.euler(x, v, t, t / 2).dtype == dtype
