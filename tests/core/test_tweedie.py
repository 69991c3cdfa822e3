"""Tweedie: with the exact velocity x0_hat is the posterior mean of the data, which quadrature gives independently."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from closed_forms import Mixture
from torch import Tensor

from stepcredit import interpolant

TIMES = [0.05, 0.3, 0.5, 0.8, 0.97, 1.0]
close = functools.partial(torch.testing.assert_close, atol=1e-10, rtol=0)


def _posterior(data: Mixture, x: Tensor, t: float) -> tuple[Tensor, Tensor]:
    """E[x_0 | x_t = x] and E[x_1 | x_t = x] for x ``[n]``: prior times likelihood, summed on a fine grid of x_0."""
    x_0 = torch.linspace(-6, 6, 24_001, dtype=torch.float64)
    prior = sum(
        w / c * torch.exp(-((x_0 - m) ** 2) / (2 * c**2))
        for w, m, c in zip(data.weights, data.means, data.sigmas, strict=True)
    )
    x_1 = (x[:, None] - (1 - t) * x_0) / t
    weight = prior * torch.exp(-(x_1**2) / 2)
    weight = weight / weight.sum(1, keepdim=True)
    return (weight * x_0).sum(1), (weight * x_1).sum(1)


@pytest.mark.parametrize("t", TIMES)
@pytest.mark.parametrize("kind", ["gaussian", "mixture"])
def test_clean_estimate_is_the_posterior_mean(kind: str, t: float, request: pytest.FixtureRequest) -> None:
    data: Mixture = request.getfixturevalue(kind)
    x = torch.linspace(-2.5, 2.5, 21, dtype=torch.float64)
    x_0, x_1 = _posterior(data, x, t)
    v = x_1 - x_0  # the velocity by its definition, E[x_1 - x_0 | x_t]
    close(interpolant.x0_hat(x, v, t), x_0)
    close(interpolant.x1_hat(x, v, t), x_1)
    close(data.velocity(x, t), v)  # and the closed form that the other tests use is that velocity


def test_gaussian_by_hand() -> None:
    # m = 1, c = 1/2, t = 1/2: V = 1/16 + 1/4 = 5/16; E[x_0 | x] = 1 + (1/8) / (5/16) (x - 1/2) = 1 + .4 (x - .5).
    data = Mixture(means=(1.0,), sigmas=(0.5,))
    x = torch.tensor([[1.5]], dtype=torch.float64)
    assert data.velocity(x, 0.5).item() == pytest.approx((1.5 - 1.4) / 0.5)
    assert interpolant.x0_hat(x, data.velocity(x, 0.5), 0.5).item() == pytest.approx(1.4)


def test_at_pure_noise_the_estimate_is_the_mean_of_the_data(mixture: Mixture) -> None:
    x = torch.linspace(-3, 3, 7, dtype=torch.float64)
    estimate = interpolant.x0_hat(x, mixture.velocity(x, 1.0), 1.0)
    close(estimate, torch.full_like(x, -0.35 * 1.2 + 0.65 * 0.9))


def test_at_the_data_the_estimate_is_the_state(mixture: Mixture) -> None:
    x = torch.linspace(-3, 3, 7, dtype=torch.float64)
    assert torch.equal(interpolant.x0_hat(x, mixture.velocity(x, 0.0), 0.0), x)


@pytest.mark.parametrize("t", [0.2, 0.6, 0.9])
def test_the_error_of_the_estimate_is_orthogonal_to_functions_of_the_state(mixture: Mixture, t: float) -> None:
    # what makes it the conditional mean, on samples and without any formula for it
    generator = torch.Generator().manual_seed(3)
    n = 200_000
    mode = (torch.rand(n, generator=generator) < mixture.weights[1]).long()
    m, c = torch.tensor(mixture.means)[mode], torch.tensor(mixture.sigmas)[mode]
    x_0 = (m + c * torch.randn(n, generator=generator)).double()
    x_1 = torch.randn(n, generator=generator).double()
    x_t = interpolant.interpolate(x_0, x_1, t)
    error = x_0 - interpolant.x0_hat(x_t, mixture.velocity(x_t, t), t)
    for function in (torch.ones_like, torch.sin, torch.tanh, lambda x: x, torch.cos):
        product = error * function(x_t)
        assert abs(product.mean()) < 4 * product.std() / math.sqrt(n)


def test_the_mixture_is_not_linear(mixture: Mixture) -> None:
    # guards the fixture: a mixture that behaved like one Gaussian would test nothing new
    x = torch.tensor([-1.0, 0.0, 1.0], dtype=torch.float64)
    left, middle, right = mixture.x_0(x, 0.5).tolist()
    assert abs((left + right) / 2 - middle) > 0.1
