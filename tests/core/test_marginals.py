"""Marginals of the kernels on Gaussian data, where the velocity is affine and everything is known in closed form.

With data N(m, c^2) the marginal at time t is N((1 - t) m, V(t)), V(t) = (1 - t)^2 c^2 + t^2. Posterior means are affine
in the state, so mean and variance pass through a kernel by exact recursion: no sampling, float64.

What may be expected as T grows depends on the kernel. `ode`, `precise`, `flow_sde` and `dance` have std ~ sqrt(D) at a
fixed level: they discretise an SDE with the right marginals. `ddim` and `cps` put in the same share of fresh noise at
*every* step, however short, and treat the spread of x_0 around x0_hat as if it were none; at a fixed level that error
does not vanish with T. It does when the level falls like sqrt(1/T).
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from closed_forms import Mixture
from torch import Tensor

from stepcredit import grids, kernels
from stepcredit.kernels import Kernel

NOISY = ("ddim", "cps", "precise", "flow_sde", "dance")


def _exact(data: Mixture, grid: Tensor) -> tuple[Tensor, Tensor]:
    """Means and variances of the closed-form marginals, ``[T + 1]`` each."""
    t = grid.tolist()
    return (
        torch.tensor([data.mean(s) for s in t], dtype=torch.float64),
        torch.tensor([data.variance(s) for s in t], dtype=torch.float64),
    )


def _propagate(kernel: Kernel, data: Mixture) -> tuple[Tensor, Tensor]:
    """Means and variances of the kernel's own states, ``[T + 1]`` each, from N(0, 1) at t = 1."""
    steps, s = torch.arange(kernel.steps), kernel.grid[:-1, None]
    zero, one = torch.zeros_like(s), torch.ones_like(s)
    offset = kernel.mean(zero, data.velocity(zero, s), steps).flatten()
    slope = kernel.mean(one, data.velocity(one, s), steps).flatten() - offset
    means, variances = [0.0], [1.0]
    for a, b, std in zip(slope.tolist(), offset.tolist(), kernel.std.tolist(), strict=True):
        means.append(a * means[-1] + b)
        variances.append(a**2 * variances[-1] + std**2)
    return torch.tensor(means, dtype=torch.float64), torch.tensor(variances, dtype=torch.float64)


def _relative_variance(kernel: Kernel, data: Mixture) -> Tensor:
    return _propagate(kernel, data)[1] / _exact(data, kernel.grid)[1] - 1


@pytest.mark.parametrize("name", kernels.KERNELS)
@pytest.mark.parametrize("steps", [5, 10, 40])
def test_every_kernel_keeps_the_mean_exactly(name: str, steps: int, gaussian: Mixture) -> None:
    # At the mean of the marginal x1_hat = 0 and x0_hat = m, so noise and drift have nothing to act on.
    for grid in (grids.shifted(steps), grids.linear(steps)):
        mean, _ = _propagate(kernels.make(name, grid), gaussian)
        torch.testing.assert_close(mean, _exact(gaussian, grid)[0], atol=1e-12, rtol=0)


@pytest.mark.parametrize(
    ("name", "middle", "end"),
    # largest relative error of the variance at t = 1/2 and t = 0, with 2560 equal steps
    [("ode", 3e-4, 2e-3), ("precise", 5e-4, 4e-3), ("dance", 3e-4, 2e-3), ("flow_sde", 6e-3, 4e-3)],
)
def test_variance_approaches_the_marginals_at_a_fixed_level(
    name: str, middle: float, end: float, gaussian: Mixture
) -> None:
    errors = []
    for steps in (40, 160, 640, 2560):
        error = _relative_variance(kernels.make(name, grids.linear(steps)), gaussian).abs()
        errors.append((error[steps // 2].item(), error[-1].item()))
    assert errors[-1][0] < middle
    assert errors[-1][1] < end
    # flow_sde's first steps have std ~ level however fine the grid; what they inflate decays like T^(-level^2)
    factor = 0.55 if name == "flow_sde" else 0.35
    assert all(fine[0] < factor * coarse[0] for coarse, fine in itertools.pairwise(errors))


@pytest.mark.parametrize("name", ["ddim", "cps"])
def test_variance_approaches_the_marginals_as_the_level_falls_with_the_step(name: str, gaussian: Mixture) -> None:
    usual = kernels.make(name, grids.linear(2)).level
    errors = []
    for steps in (40, 160, 640, 2560):
        kernel = kernels.make(name, grids.linear(steps), usual * math.sqrt(10 / steps))
        errors.append(_relative_variance(kernel, gaussian).abs().max().item())
    assert errors[-1] < 0.005
    assert all(fine < 0.35 * coarse for coarse, fine in itertools.pairwise(errors))


@pytest.mark.parametrize("name", ["ddim", "cps"])
def test_at_a_fixed_level_the_variance_stays_short_by_a_known_factor(name: str, gaussian: Mixture) -> None:
    # With q = sqrt(s^2 - std^2) and ever shorter steps the state contracts by a = 1 - s (s - q) / V and gains std^2
    # at every step, so it settles at std^2 / (1 - a^2) = V (s + q) / (2 s - s^2 (s - q) / V).
    kernel = kernels.make(name, grids.linear(2560))
    s, V = 0.5, gaussian.variance(0.5)
    std = {"ddim": 0.7 * s * math.sqrt(1 - s), "cps": s * math.sin(0.4 * math.pi)}[name]
    q = math.sqrt(s**2 - std**2)
    expected = (s + q) / (2 * s - s**2 * (s - q) / V) - 1
    assert expected < -0.01
    assert _relative_variance(kernel, gaussian)[1280].item() == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("name", ["ddim", "cps", "precise"])
def test_one_step_of_family_a_from_the_exact_marginal(name: str, gaussian: Mixture) -> None:
    # Against the Euler step, the variance after one step is short by
    #   e (1 - s) c^2 / V (2 D + e (1 - s)),   e = s' - sqrt(s'^2 - std^2) ~ std^2 / (2 s'):
    # terms in std^4 and in D std^2.
    grid, c = grids.shifted(10), gaussian.sigmas[0]
    noisy, euler = kernels.make(name, grid), kernels.make("ode", grid)
    for i in range(9):
        s, s_next = grid[i].item(), grid[i + 1].item()
        V = gaussian.variance(s)
        after = []
        for kernel in (noisy, euler):
            zero, one = torch.zeros(1, 1).double(), torch.ones(1, 1).double()
            slope = kernel.mean(one, gaussian.velocity(one, s), i) - kernel.mean(zero, gaussian.velocity(zero, s), i)
            after.append(slope.item() ** 2 * V + kernel.std[i].item() ** 2)
        e = s_next - math.sqrt(max(s_next**2 - noisy.std[i].item() ** 2, 0))
        short = e * (1 - s) * c**2 / V * (2 * (s - s_next) + e * (1 - s))
        assert after[0] - after[1] == pytest.approx(-short, rel=1e-6, abs=1e-9)


def test_ddim_differs_from_the_marginal_by_the_fourth_power_of_std(gaussian: Mixture) -> None:
    # one very short step from the exact marginal at t = 1/2: halving std must divide the error by 16
    grid = torch.tensor([1.0, 0.5, 0.5 - 1e-9, 0.0], dtype=torch.float64)
    errors = []
    for level in (0.2, 0.1):
        kernel = kernels.make("ddim", grid, level)
        zero, one = torch.zeros(1, 1).double(), torch.ones(1, 1).double()
        slope = kernel.mean(one, gaussian.velocity(one, 0.5), 1) - kernel.mean(zero, gaussian.velocity(zero, 0.5), 1)
        errors.append(slope.item() ** 2 * gaussian.variance(0.5) + kernel.std[1].item() ** 2 - gaussian.variance(0.5))
    assert errors[0] < 0
    assert errors[0] / errors[1] == pytest.approx(16, rel=0.03)


def test_flow_sde_inflates_the_variance_on_a_coarse_grid() -> None:
    narrow = Mixture(means=(0.8,), sigmas=(0.25,))
    excess = _relative_variance(kernels.make("flow_sde", grids.shifted(10)), narrow)
    # by hand: x[1] = x (1 - level^2 / 2 - D) + m D + level n, D = 1 - .9601, so its variance is .715^2 + .49 = 1.001
    # where .9601^2 + .04^2 / 16 = .922 is right
    assert excess[1].item() == pytest.approx(0.0862, abs=5e-4)
    assert excess[1:8].min() > 0.08
    assert excess[1:8].max() < 0.25


@pytest.mark.parametrize("name", ["flow_sde", "dance"])
def test_family_b_never_has_less_variance_than_the_ode(name: str, gaussian: Mixture) -> None:
    grid = grids.shifted(10)
    _, noisy = _propagate(kernels.make(name, grid), gaussian)
    _, ode = _propagate(kernels.make("ode", grid), gaussian)
    assert (noisy[1:] > ode[1:]).all()


@pytest.mark.parametrize("name", ["ddim", "cps", "precise"])
def test_family_a_never_inflates(name: str, gaussian: Mixture) -> None:
    assert (_relative_variance(kernels.make(name, grids.shifted(10)), gaussian)[1:] < 1e-12).all()


@pytest.mark.parametrize("name", NOISY)
def test_samples_have_the_variance_of_the_recursion(name: str, gaussian: Mixture) -> None:
    count = 100_000
    kernel = kernels.make(name, grids.shifted(10))
    means, variances = _propagate(kernel, gaussian)
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(count, 1, generator=generator)
    for i in range(10):
        x = kernel.step(x, gaussian.velocity(x, grids.shifted(10)[i]), i, torch.randn(count, 1, generator=generator))
        standard_error = (variances[i + 1] / count) ** 0.5
        assert abs(x.mean() - means[i + 1]) < 5 * standard_error
        assert abs(x.var() / variances[i + 1] - 1) < 5 * math.sqrt(2 / count)
