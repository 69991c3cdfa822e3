"""Transition kernels: tables, means and log-densities against literal formulas, published numbers and torch."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from stepcredit import grids, interpolant, kernels

FAMILY_A = ("ode", "ddim", "cps", "precise")
FAMILY_B = ("flow_sde", "dance")
NOISY = ("ddim", "cps", "precise", "flow_sde", "dance")

# std at T = 10, shift 3. The first four rows are published figures; `dance` is .3 sqrt(D) of the published times.
REFERENCE_STD = {
    ("ode", None): [0.0] * 10,
    ("flow_sde", 0.7): [0.700, 0.743, 0.536, 0.446, 0.392, 0.353, 0.319, 0.282, 0.225, 0.006],
    ("cps", 0.8): [0.913, 0.869, 0.816, 0.752, 0.673, 0.573, 0.442, 0.264, 0.0085, 0.0],
    ("ddim", 0.7): [0.0, 0.128, 0.177, 0.209, 0.227, 0.228, 0.205, 0.142, 0.0053, 0.0],
    ("precise", 1.5): [0.960, 0.839, 0.726, 0.638, 0.563, 0.486, 0.393, 0.255, 0.0089, 0.0],
    ("dance", 0.3): [0.0599, 0.0649, 0.0707, 0.0778, 0.0865, 0.0973, 0.1112, 0.1297, 0.1556, 0.0283],
}
TRAINABLE = {
    "ode": [],
    "ddim": list(range(1, 9)),
    "cps": list(range(9)),
    "precise": list(range(9)),
    "flow_sde": list(range(10)),
    "dance": list(range(10)),
}

times = st.lists(st.integers(1, 999), min_size=0, max_size=12, unique=True).map(
    lambda inner: torch.tensor([1.0, *(k / 1000 for k in sorted(inner, reverse=True)), 0.0], dtype=torch.float64)
)


def _normal(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.mark.parametrize(("name", "level"), REFERENCE_STD)
def test_std_matches_the_reference_numbers(name: str, level: float | None) -> None:
    kernel = kernels.make(name, grids.shifted(10), level)
    # .0005 is half a unit of the last printed digit; entries printed to four digits are held to .00005
    expected = torch.tensor(REFERENCE_STD[name, level], dtype=torch.float64)
    torch.testing.assert_close(kernel.std, expected, atol=5.1e-4, rtol=0)
    for small in (k for k, value in enumerate(expected.tolist()) if 0 < value < 0.006):
        assert abs(float(kernel.std[small] - expected[small])) < 5.1e-5


@pytest.mark.parametrize(
    ("name", "level"), [("ode", 0.0), ("ddim", 0.7), ("cps", 0.8), ("precise", 1.5), ("flow_sde", 0.7), ("dance", 0.3)]
)
def test_usual_levels(name: str, level: float) -> None:
    kernel, explicit = kernels.make(name, grids.shifted(10)), kernels.make(name, grids.shifted(10), level)
    assert (kernel.name, kernel.level, kernel.steps) == (name, level, 10)
    assert torch.equal(kernel.std, explicit.std)
    assert kernel.std.dtype == torch.float64


def test_the_six_names() -> None:
    assert sorted(kernels.KERNELS) == sorted((*FAMILY_A, *FAMILY_B))


@given(times, st.floats(0, 1))
def test_std_matches_the_definition(grid: Tensor, level: float) -> None:
    tables = {name: kernels.make(name, grid, level).std.tolist() for name in NOISY}
    t = grid.tolist()
    for i, (s, s_next) in enumerate(itertools.pairwise(t)):
        D = s - s_next
        rho = s_next * (1 - s) / (s * (1 - s_next))
        to_data = 1 - t[1] if s == 1 else 1 - s
        expected = {
            "ddim": level * s_next * math.sqrt(1 - s),
            "cps": s_next * math.sin(level * math.pi / 2),
            "precise": s_next * math.sqrt(1 - rho ** (level**2)),
            "flow_sde": level * math.sqrt(s / to_data) * math.sqrt(D),
            "dance": level * math.sqrt(D),
        }
        for name, value in expected.items():
            assert tables[name][i] == pytest.approx(value, rel=1e-9, abs=1e-14), (name, i)


@given(times, st.floats(0.1, 1))
def test_first_std_of_flow_sde_is_the_level(grid: Tensor, level: float) -> None:
    assert kernels.make("flow_sde", grid, level).std[0].item() == pytest.approx(level, rel=1e-12)


@given(times, st.floats(0.01, 1), st.integers(0, 10**6))
def test_mean_of_family_a_is_the_interpolant_form(grid: Tensor, level: float, seed: int) -> None:
    x, v = _normal(seed, 2, 3), _normal(seed + 1, 2, 3)
    for name in FAMILY_A[1:]:
        kernel = kernels.make(name, grid, level)
        for i in range(kernel.steps):
            s, s_next, std = float(grid[i]), float(grid[i + 1]), float(kernel.std[i])
            x0_hat, x1_hat = x - s * v, x + (1 - s) * v
            expected = (1 - s_next) * x0_hat + math.sqrt(max(s_next**2 - std**2, 0.0)) * x1_hat
            # sqrt(s'^2 - std^2) amplifies the rounding of std where std is nearly s'
            torch.testing.assert_close(kernel.mean(x, v, i), expected, atol=3e-7, rtol=0)


@pytest.mark.parametrize(
    ("name", "level"), [("ddim", 0.7), ("ddim", 1.0), ("cps", 0.8), ("cps", 0.3), ("precise", 1.5)]
)
def test_mean_of_family_a_to_double_precision(name: str, level: float) -> None:
    kernel, t = kernels.make(name, grids.shifted(10), level), grids.shifted(10).tolist()
    x, v = _normal(1, 2, 3), _normal(2, 2, 3)
    for i in range(1, 10):  # at i = 0 precise has std = s', where the square root loses half the digits
        std = {
            "ddim": level * t[i + 1] * math.sqrt(1 - t[i]),
            "cps": t[i + 1] * math.sin(level * math.pi / 2),
            "precise": t[i + 1] * math.sqrt(1 - (t[i + 1] * (1 - t[i]) / (t[i] * (1 - t[i + 1]))) ** level**2),
        }[name]
        expected = (1 - t[i + 1]) * (x - t[i] * v) + math.sqrt(t[i + 1] ** 2 - std**2) * (x + (1 - t[i]) * v)
        torch.testing.assert_close(kernel.mean(x, v, i), expected, atol=1e-12, rtol=1e-12)


@given(times, st.floats(0, 1.2), st.integers(0, 10**6))
def test_mean_of_family_b_is_the_euler_maruyama_form(grid: Tensor, level: float, seed: int) -> None:
    x, v = _normal(seed, 2, 3), _normal(seed + 1, 2, 3)
    for name in FAMILY_B:
        kernel, t = kernels.make(name, grid, level), grid.tolist()
        for i in range(kernel.steps):
            s, D = t[i], t[i] - t[i + 1]
            g = level * math.sqrt(s / (1 - t[1] if s == 1 else 1 - s)) if name == "flow_sde" else level
            expected = x * (1 - g**2 * D / (2 * s)) - v * (1 + g**2 * (1 - s) / (2 * s)) * D
            torch.testing.assert_close(kernel.mean(x, v, i), expected, atol=1e-10, rtol=1e-10)


def test_first_step_of_flow_sde_by_hand() -> None:
    # s = 1, s' = 1/2, level 1: std = 1, g^2 D = 1, and 1 - s = 0 outside g: mean = x (1 - 1/2) - v / 2.
    kernel = kernels.make("flow_sde", grids.linear(2), 1.0)
    assert kernel.mean(torch.tensor([[3.0]]), torch.tensor([[2.0]]), 0).item() == 0.5
    # s = 1/2, s' = 0: g^2 = 1, mean = x (1 - 1/2) - v (1 + 1/2) / 2.
    assert kernel.std.tolist() == pytest.approx([1.0, math.sqrt(0.5)], abs=1e-15)
    assert kernel.mean(torch.tensor([[3.0]]), torch.tensor([[2.0]]), 1).item() == pytest.approx(0.0, abs=1e-6)


# --- level 0 is the ODE -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", kernels.KERNELS)
@given(grid=times, seed=st.integers(0, 10**6), scale=st.sampled_from([1e-6, 1.0, 1e4]))
def test_level_zero_is_the_euler_step_to_the_last_bit(name: str, grid: Tensor, seed: int, scale: float) -> None:
    kernel = kernels.make(name, grid, 0.0)
    assert torch.equal(kernel.std, torch.zeros_like(kernel.std))
    assert not kernel.trainable.any()
    for dtype in (torch.float32, torch.float64):
        x, v, noise = (scale * _normal(seed + k, 2, 5, dtype=dtype) for k in range(3))
        for i in range(kernel.steps):
            expected = interpolant.euler(x, v, float(grid[i]), float(grid[i + 1]))
            assert torch.equal(kernel.mean(x, v, i), expected)
            assert torch.equal(kernel.step(x, v, i, noise), expected)


@pytest.mark.parametrize("name", kernels.KERNELS)
def test_level_zero_on_a_dyadic_grid_is_exact(name: str) -> None:
    # All of these numbers have few bits, so x + (s' - s) v is exact, whatever the order of evaluation.
    kernel = kernels.make(name, grids.linear(4), 0.0)
    x, v = torch.tensor([[1.0, -3.0, 0.5]]), torch.tensor([[2.0, 8.0, -1.0]])
    for i in range(4):
        assert kernel.mean(x, v, i).tolist() == [[0.5, -5.0, 0.75]]


@given(times)
def test_the_ode_kernel_has_no_noise(grid: Tensor) -> None:
    kernel = kernels.make("ode", grid)
    assert not kernel.std.any()
    assert not kernel.trainable.any()


# --- which steps can be trained -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", kernels.KERNELS)
def test_trainable_steps(name: str) -> None:
    kernel = kernels.make(name, grids.shifted(10))
    assert kernel.trainable.dtype == torch.bool
    assert kernel.trainable.nonzero().flatten().tolist() == TRAINABLE[name]


@pytest.mark.parametrize("name", kernels.KERNELS)
@pytest.mark.parametrize("steps", [1, 2])
def test_short_grids_give_no_nan(name: str, steps: int) -> None:
    kernel = kernels.make(name, grids.linear(steps))
    x, v = _normal(0, 3, 2), _normal(1, 3, 2)
    for i in range(steps):
        assert kernel.step(x, v, i, _normal(2, 3, 2)).isfinite().all()
        if kernel.trainable[i]:
            assert kernel.log_prob(x, x, v, i).isfinite().all()


@pytest.mark.parametrize(("name", "step"), [("ode", 4), ("ddim", 0), ("ddim", 9), ("cps", 9), ("precise", 9)])
def test_a_deterministic_step_has_no_log_prob_and_says_which(name: str, step: int) -> None:
    kernel = kernels.make(name, grids.shifted(10))
    x = _normal(0, 2, 3)
    with pytest.raises(ValueError, match=rf"step {step}\b"):
        kernel.log_prob(x, x, x, step)
    with pytest.raises(ValueError, match=rf"step {step}\b"):
        kernel.log_prob(x, x, x, torch.tensor([5 if name != "ode" else step, step]))
    for variant in ("gaussian", "flow_grpo"):
        with pytest.raises(ValueError, match=rf"step {step}\b"):
            kernel.kl(x, x, step, variant=variant)
    assert kernel.kl(x, x + 1, step, variant="velocity").tolist() == pytest.approx([1.0, 1.0])


@pytest.mark.parametrize("name", kernels.KERNELS)
def test_deterministic_steps_ignore_the_noise(name: str) -> None:
    kernel = kernels.make(name, grids.shifted(10))
    x, v = _normal(0, 2, 3), _normal(1, 2, 3)
    for i in (~kernel.trainable).nonzero().flatten().tolist():
        assert torch.equal(kernel.step(x, v, i, _normal(2, 2, 3)), kernel.mean(x, v, i))


# --- levels that cannot be ----------------------------------------------------------------------------------------


def test_a_level_that_leaves_no_variance_is_refused() -> None:
    # ddim: std > s' as soon as level sqrt(1 - s) > 1; on this grid 1 - s is 3/4 at the last noisy step.
    grid = torch.tensor([1.0, 0.5, 0.25, 0.125, 0.0], dtype=torch.float64)
    highest = 1 / math.sqrt(0.75)
    kernels.make("ddim", grid, highest - 1e-6)
    with pytest.raises(ValueError, match=r"negative at step 2\b.*1\.15"):
        kernels.make("ddim", grid, highest + 1e-3)


@pytest.mark.parametrize("name", NOISY)
@pytest.mark.parametrize("level", [-0.1, math.nan, math.inf])
def test_levels_are_finite_and_not_negative(name: str, level: float) -> None:
    with pytest.raises(ValueError, match="level"):
        kernels.make(name, grids.linear(4), level)


def test_cps_at_level_one_forgets_the_old_noise() -> None:
    kernel = kernels.make("cps", grids.shifted(10), 1.0)  # std = s': nothing of x1_hat is left
    x, v = _normal(0, 2, 3), _normal(1, 2, 3)
    for i in range(10):
        s, s_next = kernel.grid[i], kernel.grid[i + 1]
        torch.testing.assert_close(kernel.mean(x, v, i), (1 - s_next) * (x - s * v))


def test_unknown_names_and_bad_grids_are_refused() -> None:
    with pytest.raises(ValueError, match="ddim"):  # the message lists the known ones
        kernels.make("ddpm", grids.linear(4))
    with pytest.raises(ValueError, match="grid"):
        kernels.make("ddim", torch.tensor([0.0, 0.5, 1.0]))


# --- sampling and log-probability ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NOISY)
def test_step_is_mean_plus_std_times_noise(name: str) -> None:
    kernel = kernels.make(name, grids.shifted(10))
    x, v, noise = (_normal(k, 3, 2, 2) for k in range(3))
    for i in range(10):
        torch.testing.assert_close(kernel.step(x, v, i, noise), kernel.mean(x, v, i) + float(kernel.std[i]) * noise)


@pytest.mark.parametrize("name", NOISY)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_log_prob_is_the_gaussian_density(name: str, dtype: torch.dtype) -> None:
    kernel = kernels.make(name, grids.shifted(10))
    x, v, noise = (_normal(k, 4, 3, 2, dtype=dtype) for k in range(3))
    for i in TRAINABLE[name]:
        x_next = kernel.step(x, v, i, 1.3 * noise)
        density = torch.distributions.Normal(kernel.mean(x, v, i), kernel.std[i].to(dtype))
        expected = density.log_prob(x_next)
        torch.testing.assert_close(kernel.log_prob(x_next, x, v, i), expected.mean((1, 2)))
        torch.testing.assert_close(kernel.log_prob(x_next, x, v, i, reduce="mean"), expected.mean((1, 2)))
        torch.testing.assert_close(kernel.log_prob(x_next, x, v, i, reduce="sum"), expected.sum((1, 2)))


def test_log_prob_by_hand() -> None:
    # dance, level 1, D = 1/4: std = 1/2; mean of x = 0, v = 0 is 0. log N(1; 0, 1/4) = -2 + log 2 - log(2 pi) / 2.
    kernel = kernels.make("dance", grids.linear(4), 1.0)
    zero, one = torch.zeros(1, 6, dtype=torch.float64), torch.ones(1, 6, dtype=torch.float64)
    expected = -2 + math.log(2) - math.log(2 * math.pi) / 2
    assert kernel.log_prob(one, zero, zero, 2).item() == pytest.approx(expected, abs=1e-12)
    assert kernel.log_prob(one, zero, zero, 2, reduce="sum").item() == pytest.approx(6 * expected, abs=1e-12)


@pytest.mark.parametrize("name", NOISY)
def test_a_step_per_sample_equals_one_step_for_all(name: str) -> None:
    kernel = kernels.make(name, grids.shifted(10))
    steps = torch.tensor([1, 8, 4, 4])
    x, v, noise = (_normal(k, 4, 3, 2, dtype=torch.float32) for k in range(3))
    x_next = kernel.step(x, v, steps, noise)
    for b, i in enumerate(steps.tolist()):
        row = slice(b, b + 1)
        assert torch.equal(kernel.mean(x, v, steps)[row], kernel.mean(x[row], v[row], i))
        assert torch.equal(x_next[row], kernel.step(x[row], v[row], i, noise[row]))
        for reduce in ("mean", "sum"):
            whole = kernel.log_prob(x_next, x, v, steps, reduce=reduce)[row]
            torch.testing.assert_close(whole, kernel.log_prob(x_next[row], x[row], v[row], i, reduce=reduce))
        whole = kernel.kl(v, x, steps)[row]
        torch.testing.assert_close(whole, kernel.kl(v[row], x[row], i))


@pytest.mark.parametrize("name", NOISY)
@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_single(name: str, half: torch.dtype) -> None:
    kernel = kernels.make(name, grids.shifted(10))
    x, v, noise = (_normal(k, 2, 5, dtype=torch.float32).to(half) for k in range(3))
    for i in TRAINABLE[name]:
        for reduce in ("mean", "sum"):
            mean = kernel.mean(x, v, i)
            assert mean.dtype == torch.float32
            assert torch.equal(mean, kernel.mean(x.float(), v.float(), i))
            # scored as stored: rounded to the storage type first
            x_next = kernel.step(x, v, i, noise).to(half)
            logp = kernel.log_prob(x_next, x, v, i, reduce=reduce)
            assert logp.dtype == torch.float32
            assert logp.isfinite().all()
            assert torch.equal(logp, kernel.log_prob(x_next.float(), x.float(), v.float(), i, reduce=reduce))
        assert kernel.kl(v, x, i).dtype == torch.float32


@pytest.mark.parametrize("name", NOISY)
def test_single_precision_agrees_with_double(name: str) -> None:
    kernel = kernels.make(name, grids.shifted(10))
    x, v, noise = (_normal(k, 2, 64) for k in range(3))
    for i in TRAINABLE[name]:
        x_next = kernel.step(x, v, i, noise)
        single = kernel.log_prob(x_next.float(), x.float(), v.float(), i)
        # a state's rounding, 6e-8, is divided by std: 1e-5 at worst, at the last step
        torch.testing.assert_close(single.double(), kernel.log_prob(x_next, x, v, i), atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("name", NOISY)
def test_gradient_of_log_prob(name: str) -> None:
    kernel = kernels.make(name, grids.shifted(10))
    x, v, x_next = (_normal(k, 2, 3) for k in range(3))
    v.requires_grad_()
    for i in (TRAINABLE[name][0], TRAINABLE[name][-1]):
        (gradient,) = torch.autograd.grad(kernel.log_prob(x_next, x, v, i, reduce="sum").sum(), v)
        assert (gradient != 0).all()
        # by hand: (x' - mean) / std^2 * d mean / d v, the latter -D - s(1 - s')... read off two means instead
        slope = kernel.mean(torch.zeros(1, 1).double(), torch.ones(1, 1).double(), i)
        by_hand = (x_next - kernel.mean(x, v, i)) / kernel.std[i] ** 2 * slope
        torch.testing.assert_close(gradient, by_hand.detach())
        assert torch.autograd.gradcheck(lambda u, i=i: kernel.log_prob(x_next, x, u, i), (v,))


# --- variance -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NOISY)
@given(grid=times, level=st.floats(0.01, 1))
def test_family_a_keeps_the_variance_of_the_interpolant(name: str, grid: Tensor, level: float) -> None:
    # If x0_hat has variance p and x1_hat is an independent unit Gaussian, the next state must have variance
    # (1 - s')^2 p + s'^2. The mean is linear in the two: read its coefficients from x0_hat, x1_hat in {0, 1}.
    if name in FAMILY_B:
        return
    kernel = kernels.make(name, grid, level)
    for i in range(kernel.steps):
        s, s_next = float(grid[i]), float(grid[i + 1])
        x0_hat, x1_hat = torch.tensor([[1.0], [0.0]]).double(), torch.tensor([[0.0], [1.0]]).double()
        of_x0, of_x1 = kernel.mean((1 - s) * x0_hat + s * x1_hat, x1_hat - x0_hat, i).flatten().tolist()
        assert of_x0 == pytest.approx(1 - s_next, abs=1e-12)
        assert of_x1**2 + float(kernel.std[i]) ** 2 == pytest.approx(s_next**2, abs=1e-12)
