"""The whole chain, kernel to loss, against the brute-force gradient of the expected reward.

A flow to a two-mode mixture on the line, its velocity disturbed by a few parameters, a smooth reward on its end.
The expected reward is integrated on a grid of states, one transition at a time, with the kernels' formulas written out
here; autograd through that integral gives the true gradient. The estimate samples trajectories with the kernel, turns
rewards into credit and advantages, and differentiates the surrogate at ratio 1. Multiplied by the number of trained
steps and the scale of the advantage it must equal the true gradient, not only point along it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import pytest
import torch
from closed_forms import Mixture
from torch import Tensor

from stepcredit import advantage, credit, grids, interpolant, kernels, objective

N = 160_000
LEVELS = {"flow_sde": 0.7, "dance": 0.8, "cps": 0.6, "ddim": 0.9, "precise": 1.0}
STEPS = {"flow_sde": 3, "dance": 3, "cps": 4, "ddim": 4, "precise": 4}
STATES = torch.linspace(-7, 7, 801, dtype=torch.float64)
CELL = float(STATES[1] - STATES[0])


def _reward(x_0: Tensor) -> Tensor:
    """High near +1, lower near -1: neither mode is the mode of the reward."""
    return torch.exp(-2 * (x_0 - 1.1) ** 2) - 0.5 * torch.exp(-4 * (x_0 + 0.9) ** 2)


def _velocity(data: Mixture, theta: Tensor, x: Tensor, t: float) -> Tensor:
    return data.velocity(x, t) + theta[0] + theta[1] * x + theta[2] * torch.sin(2 * x) + theta[3] * t


def _transition(name: str, t: list[float], i: int, x: Tensor, v: Tensor) -> tuple[Tensor, float]:
    """Mean and std of a kernel's step, from the papers' formulas."""
    s, s_next, a = t[i], t[i + 1], LEVELS[name]
    D = s - s_next
    if name in ("flow_sde", "dance"):
        g = a * math.sqrt(s / (1 - t[1] if s == 1 else 1 - s)) if name == "flow_sde" else a
        return x * (1 - g**2 * D / (2 * s)) - v * (1 + g**2 * (1 - s) / (2 * s)) * D, g * math.sqrt(D)
    std = {
        "ddim": a * s_next * math.sqrt(1 - s),
        "cps": s_next * math.sin(a * math.pi / 2),
        "precise": s_next * math.sqrt(1 - (s_next * (1 - s) / (s * (1 - s_next))) ** a**2),
    }[name]
    mean = (1 - s_next) * (x - s * v) + math.sqrt(max(s_next**2 - std**2, 0.0)) * (x + (1 - s) * v)
    return mean, std


def _value(name: str, data: Mixture, theta: Tensor, i: int, x: Tensor) -> Tensor:
    """E[reward | x_i = x] for x ``[n]``, by quadrature over the next state of every noisy step.

    theta acts on noisy steps alone: a deterministic step is not part of the policy and its own influence on the reward
    is not what a policy gradient estimates.
    """
    t = grids.linear(STEPS[name]).tolist()
    if i == STEPS[name]:
        return _reward(x)
    _, std = _transition(name, t, i, x, x)
    mean, _ = _transition(name, t, i, x, _velocity(data, theta if std > 0 else 0 * theta.detach(), x, t[i]))
    if std == 0:
        return _value(name, data, theta, i + 1, mean)
    density = torch.exp(-((STATES - mean[:, None]) ** 2) / (2 * std**2)) / (std * math.sqrt(2 * math.pi))
    return CELL * density @ _value(name, data, theta, i + 1, STATES)


@functools.cache
def _true_gradient(name: str, data: Mixture) -> Tensor:
    theta = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    prior = torch.exp(-(STATES**2) / 2) / math.sqrt(2 * math.pi)
    expected = CELL * prior @ _value(name, data, theta, 0, STATES)
    return torch.autograd.grad(expected, theta)[0]


def _estimate(
    name: str,
    data: Mixture,
    scheme: Callable[[Tensor], Tensor],
    normalise: Callable[..., Tensor],
    group: int = N,
    value: Callable[[int, Tensor], Tensor] | None = None,
) -> Tensor:
    """Gradient of the surrogate, brought to the scale of the expected reward.

    Groups of ``group`` members share x[0] unless there is one group alone. ``value(i, x)`` stands in for the reward of
    the clean estimate.
    """
    grid = grids.linear(STEPS[name])
    kernel = kernels.make(name, grid, LEVELS[name])
    generator = torch.Generator().manual_seed(11)
    normal = functools.partial(torch.randn, generator=generator, dtype=torch.float64)
    theta = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    x = normal(N, 1) if group == N else normal(N // group, 1).repeat_interleave(group, 0)
    rewards, log_probs = [], []
    for i, t in enumerate(grid[:-1].tolist()):
        v = _velocity(data, theta, x, t)
        clean = interpolant.x0_hat(x, v.detach(), t)
        rewards.append(_reward(clean) if value is None else value(i, x))
        x_next = kernel.step(x, v.detach(), i, normal(N, 1))
        if kernel.trainable[i]:
            log_probs.append(kernel.log_prob(x_next, x, v, i, reduce="sum"))
        x = x_next
    rewards.append(_reward(x))
    R = torch.cat(rewards, 1).reshape(N // group, group, len(rewards))
    given = scheme(R)
    adv = normalise(given, trained=kernel.trainable, eps=0.0, clamp=math.inf, global_std=True)
    # what the advantage was divided by: the ratio of a centred credit to its advantage
    centred = given - given.mean(1, keepdim=True)
    scale = (centred[..., kernel.trainable].std() / adv[..., kernel.trainable].std()).item()
    adv = adv.reshape(N, -1)[:, kernel.trainable].T.reshape(-1)
    logp = torch.cat(log_probs)
    loss = objective.surrogate(logp, logp.detach(), adv, 1e-4)
    return -torch.autograd.grad(loss, theta)[0] * scale * int(kernel.trainable.sum())


def _assert_same_direction(estimate: Tensor, truth: Tensor, shrink: float = 1.0) -> None:
    cosine = torch.nn.functional.cosine_similarity(estimate, truth, dim=0)
    assert cosine > 0.999
    assert (estimate.norm() / truth.norm() / shrink).item() == pytest.approx(1, abs=0.02)


def test_the_integral_is_right(mixture: Mixture) -> None:
    # the quadrature itself, against plain averages over samples of the formulas above
    for name in LEVELS:
        t = grids.linear(STEPS[name]).tolist()
        theta = torch.tensor([0.2, -0.1, 0.1, 0.3], dtype=torch.float64)
        generator = torch.Generator().manual_seed(0)
        start = torch.full((100_000,), 0.4, dtype=torch.float64)
        x = start
        for i in range(STEPS[name]):
            _, std = _transition(name, t, i, x, x)
            mean, _ = _transition(name, t, i, x, _velocity(mixture, theta if std > 0 else 0 * theta, x, t[i]))
            x = mean + std * torch.randn(len(x), generator=generator, dtype=torch.float64)
        sampled = _reward(x)
        exact = _value(name, mixture, theta, 0, start[:1]).item()
        assert abs(sampled.mean() - exact) < 4 * sampled.std() / math.sqrt(len(x)) + 1e-9


@pytest.mark.parametrize("name", LEVELS)
def test_uniform_credit_gives_the_gradient_of_the_expected_reward(name: str, mixture: Mixture) -> None:
    _assert_same_direction(_estimate(name, mixture, credit.uniform, advantage.group), _true_gradient(name, mixture))


@pytest.mark.parametrize("name", LEVELS)
def test_gae_one_gives_the_gradient_of_the_expected_reward(name: str, mixture: Mixture) -> None:
    # R[T] - R[i]: the reward of the clean estimate is a baseline that the step's own noise cannot change
    scheme = functools.partial(credit.gae, lam=1.0)
    _assert_same_direction(_estimate(name, mixture, scheme, advantage.centred), _true_gradient(name, mixture))


@pytest.mark.parametrize("lam", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("name", ["flow_sde", "cps"])
def test_with_exact_values_every_lambda_gives_the_gradient(name: str, lam: float, mixture: Mixture) -> None:
    # if R[i] were the true value of x[i], credit could be cut short anywhere without bias, down to the plain gain
    theta = torch.zeros(4, dtype=torch.float64)
    table = torch.stack([_value(name, mixture, theta, i, STATES) for i in range(STEPS[name])])

    def value(i: int, x: Tensor) -> Tensor:
        place = ((x - STATES[0]) / CELL).clamp(0, len(STATES) - 2)
        left = place.long()
        return torch.lerp(table[i][left], table[i][left + 1], place - left)

    scheme = functools.partial(credit.gae, lam=lam)
    _assert_same_direction(
        _estimate(name, mixture, scheme, advantage.centred, value=value), _true_gradient(name, mixture)
    )


@pytest.mark.parametrize("scheme", [credit.uniform, functools.partial(credit.gae, lam=1.0)])
def test_small_groups_with_shared_noise_shrink_the_gradient_but_do_not_turn_it(
    scheme: Callable[[Tensor], Tensor], mixture: Mixture
) -> None:
    # a member is part of the mean it is compared with: (1 - 1/G) of the gradient is left
    estimate = _estimate("flow_sde", mixture, scheme, advantage.centred, group=8)
    _assert_same_direction(estimate, _true_gradient("flow_sde", mixture), shrink=7 / 8)
