"""The loss, term by term: values by hand, gradients by finite differences, and zero exactly where the clip cuts."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from stepcredit import grids, kernels, objective

NOISY = ("ddim", "cps", "precise", "flow_sde", "dance")


def _normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# --- the clipped surrogate ----------------------------------------------------------------------------------------

# ratio, advantage, loss of that sample at clip .2, and its derivative by log-prob: -A rho inside, 0 where clipped
CASES = [
    (1.0, 2.0, -2.0, -2.0),
    (1.1, 2.0, -2.2, -2.2),
    (1.5, 2.0, -2.4, 0.0),  # good and already likelier: clipped at 1.2
    (0.5, 2.0, -1.0, -1.0),  # good but less likely: never clipped
    (1.0, -2.0, 2.0, 2.0),
    (0.9, -2.0, 1.8, 1.8),
    (0.5, -2.0, 1.6, 0.0),  # bad and already less likely: clipped at .8
    (1.5, -2.0, 3.0, 3.0),  # bad but likelier: never clipped
    (1.5, 0.0, 0.0, 0.0),
]


@pytest.mark.parametrize(("ratio", "adv", "loss", "slope"), CASES)
def test_surrogate_by_hand(ratio: float, adv: float, loss: float, slope: float) -> None:
    logp_old = torch.tensor([-1.3], dtype=torch.float64)
    logp = (logp_old + math.log(ratio)).requires_grad_()
    value = objective.surrogate(logp, logp_old, torch.tensor([adv], dtype=torch.float64), 0.2)
    assert value.ndim == 0
    assert value.item() == pytest.approx(loss, abs=1e-12)
    (gradient,) = torch.autograd.grad(value, logp)
    assert gradient.item() == pytest.approx(slope, abs=1e-12)
    is_cut = objective.clipped(torch.tensor([math.log(ratio)]), torch.tensor([adv]), 0.2)
    assert is_cut.tolist() == [adv != 0 and slope == 0]


def test_surrogate_is_the_mean_of_its_terms() -> None:
    ratio, adv, loss, _ = (torch.tensor(column, dtype=torch.float64) for column in zip(*CASES, strict=True))
    terms = objective.surrogate_terms(ratio.log(), adv, 0.2)
    torch.testing.assert_close(terms, loss, atol=1e-12, rtol=0)
    total = objective.surrogate(ratio.log() - 7, torch.full_like(ratio, -7.0), adv, 0.2)
    assert total.item() == pytest.approx((-2 - 2.2 - 2.4 - 1 + 2 + 1.8 + 1.6 + 3 + 0) / 9, abs=1e-12)


def test_on_policy_the_gradient_is_the_policy_gradient() -> None:
    # ratio 1, clip of the published size: d loss / d logp = -A / B, none of it clipped
    logp, adv = _normal(0, 6).requires_grad_(), _normal(1, 6)
    (gradient,) = torch.autograd.grad(objective.surrogate(logp, logp.detach(), adv, 1e-5), logp)
    torch.testing.assert_close(gradient, -adv / 6, atol=1e-14, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_on_policy_the_loss_is_exactly_minus_the_mean_advantage(dtype: torch.dtype) -> None:
    # a ratio of exactly 1, however small or large the log-probs
    logp, adv = (1e3 * _normal(0, 8)).to(dtype), _normal(1, 8).to(dtype)
    assert objective.surrogate(logp, logp, adv, 1e-6).item() == (-adv).mean().item()


@given(st.floats(-1, 1), st.floats(-5, 5), st.floats(1e-6, 0.5))
def test_surrogate_is_the_pessimistic_one(log_ratio: float, adv: float, clip: float) -> None:
    rho = math.exp(log_ratio)
    expected = -min(adv * rho, adv * min(max(rho, 1 - clip), 1 + clip))
    one = torch.ones(1, dtype=torch.float64)
    result = objective.surrogate_terms(log_ratio * one, adv * one, clip)
    assert result.item() == pytest.approx(expected, rel=1e-12, abs=1e-15)
    assert result.item() >= -adv * rho - 1e-12


def test_surrogate_gradcheck() -> None:
    logp_old, adv = _normal(0, 12), _normal(1, 12)
    logp = (logp_old + 0.3 * _normal(2, 12)).requires_grad_()
    assert (objective.clipped(logp - logp_old, adv, 0.1)).any()  # both regions are crossed
    assert not (objective.clipped(logp - logp_old, adv, 0.1)).all()
    assert torch.autograd.gradcheck(lambda x: objective.surrogate(x, logp_old, adv, 0.1), (logp,))


@pytest.mark.parametrize("clip", [0.0, -0.1, math.nan])
def test_clip_must_be_positive(clip: float) -> None:
    with pytest.raises(ValueError, match="clip"):
        objective.surrogate(torch.zeros(2), torch.zeros(2), torch.ones(2), clip)


@pytest.mark.parametrize("name", NOISY)
def test_the_gradient_reaches_the_velocity(name: str) -> None:
    # from the loss through ratio, log-prob and mean to the model's output
    kernel = kernels.make(name, grids.shifted(10))
    x, v, noise = _normal(0, 4, 3), _normal(1, 4, 3).requires_grad_(), _normal(2, 4, 3)
    x_next = kernel.step(x, v.detach(), 3, noise)
    logp = kernel.log_prob(x_next, x, v, 3)
    adv = torch.tensor([1.0, -1.0, 0.5, 0.0], dtype=torch.float64)
    (gradient,) = torch.autograd.grad(objective.surrogate(logp, logp.detach(), adv, 1e-4), v)
    assert (gradient[:3] != 0).all()
    assert not gradient[3].any()


# --- KL -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NOISY)
def test_gaussian_kl_is_that_of_the_two_transitions(name: str) -> None:
    kernel = kernels.make(name, grids.shifted(10))
    x, v, v_ref = _normal(0, 3, 2, 4), _normal(1, 3, 2, 4), _normal(2, 3, 2, 4)
    for i in kernel.trainable.nonzero().flatten().tolist():
        policy = torch.distributions.Normal(kernel.mean(x, v, i), kernel.std[i])
        reference = torch.distributions.Normal(kernel.mean(x, v_ref, i), kernel.std[i])
        expected = torch.distributions.kl_divergence(policy, reference).mean((1, 2))
        torch.testing.assert_close(kernel.kl(v, v_ref, i), expected, atol=1e-12, rtol=1e-8)
        torch.testing.assert_close(kernel.kl(v, v_ref, i, variant="gaussian"), expected, atol=1e-12, rtol=1e-8)


@pytest.mark.parametrize("name", NOISY)
def test_flow_grpo_kl_divides_by_the_variance_per_unit_of_time(name: str) -> None:
    grid = grids.shifted(10)
    kernel = kernels.make(name, grid)
    x, v, v_ref = _normal(0, 3, 5), _normal(1, 3, 5), _normal(2, 3, 5)
    for i in kernel.trainable.nonzero().flatten().tolist():
        gap = kernel.mean(x, v, i) - kernel.mean(x, v_ref, i)
        variance = kernel.std[i] ** 2 / (grid[i] - grid[i + 1])
        expected = (gap**2 / (2 * variance)).mean(1)
        torch.testing.assert_close(kernel.kl(v, v_ref, i, variant="flow_grpo"), expected, atol=1e-12, rtol=1e-8)


def test_velocity_kl_is_the_mean_square_at_any_step() -> None:
    kernel = kernels.make("ddim", grids.shifted(10))
    v, v_ref = torch.tensor([[1.0, 2.0], [0.0, 0.0]]), torch.tensor([[0.0, 4.0], [0.0, 0.0]])
    for i in range(10):
        assert kernel.kl(v, v_ref, i, variant="velocity").tolist() == [2.5, 0.0]


def test_kl_by_hand() -> None:
    # dance, level 1, four equal steps, i = 1: s = 3/4, D = 1/4, std^2 = 1/4; d mean / d v = -(1 + (1/4) / (3/2)) / 4
    # = -7/24, so a gap of 2 in v is one of -7/12 in the mean: KL = (49/144) / (1/2) = 49/72, and with std^2 / D = 1
    # a quarter of that
    kernel = kernels.make("dance", grids.linear(4), 1.0)
    v, v_ref = torch.full((1, 3), 3.0, dtype=torch.float64), torch.full((1, 3), 1.0, dtype=torch.float64)
    assert kernel.kl(v, v_ref, 1).item() == pytest.approx(49 / 72, abs=1e-12)
    assert kernel.kl(v, v_ref, 1, variant="flow_grpo").item() == pytest.approx(49 / 288, abs=1e-12)
    assert kernel.kl(v, v_ref, 1, variant="velocity").item() == pytest.approx(4, abs=1e-12)


@pytest.mark.parametrize("name", NOISY)
@pytest.mark.parametrize("variant", ["gaussian", "flow_grpo", "velocity"])
def test_kl_gradient(name: str, variant: str) -> None:
    kernel = kernels.make(name, grids.shifted(10))
    v, v_ref = _normal(0, 2, 3).requires_grad_(), _normal(1, 2, 3)
    (gradient,) = torch.autograd.grad(kernel.kl(v, v_ref, 4, variant=variant).sum(), v)
    assert (gradient != 0).all()
    assert (gradient.sign() == (v - v_ref).sign()).all()  # it pulls towards the reference
    assert torch.autograd.gradcheck(lambda x: kernel.kl(x, v_ref, 4, variant=variant), (v,))
    assert torch.autograd.gradcheck(lambda x: kernel.kl(x, v_ref, torch.tensor([2, 7]), variant=variant), (v,))


@pytest.mark.parametrize("variant", ["gaussian", "flow_grpo", "velocity"])
def test_kl_of_equal_velocities_is_zero_with_zero_gradient(variant: str) -> None:
    kernel = kernels.make("cps", grids.shifted(10))
    v = _normal(0, 2, 3).requires_grad_()
    kl = kernel.kl(v, v.detach(), 2, variant=variant)
    assert kl.tolist() == [0.0, 0.0]
    assert not torch.autograd.grad(kl.sum(), v)[0].any()


# --- ratio normalisation ------------------------------------------------------------------------------------------


def _ratio_norm_inputs(i: int) -> tuple[kernels.Kernel, Tensor, Tensor, Tensor, Tensor]:
    kernel = kernels.make("flow_sde", grids.shifted(10))
    x, v_old, noise = _normal(0, 4, 2, 3), _normal(1, 4, 2, 3), _normal(2, 4, 2, 3)
    mean_old = kernel.mean(x, v_old, i)
    mean = kernel.mean(x, v_old + 0.01 * _normal(3, 4, 2, 3), i)
    return kernel, kernel.step(x, v_old, i, noise), mean, mean_old, noise


@pytest.mark.parametrize("i", [0, 4, 9])
def test_ratio_norm_is_its_formula(i: int) -> None:
    kernel, x_next, mean, mean_old, noise = _ratio_norm_inputs(i)
    expected = (noise * (mean - mean_old) / kernel.std[i]).mean((1, 2)) * kernel.std[i]
    torch.testing.assert_close(objective.ratio_norm(x_next, mean, mean_old, kernel, i), expected, atol=1e-11, rtol=0)
    steps = torch.full((4,), i)
    torch.testing.assert_close(
        objective.ratio_norm(x_next, mean, mean_old, kernel, steps), expected, atol=1e-11, rtol=0
    )


@pytest.mark.parametrize("i", [1, 6])
def test_ratio_norm_is_the_log_ratio_without_its_bias(i: int) -> None:
    # log N(x'; mu) - log N(x'; mu_old) = noise (mu - mu_old) / std - (mu - mu_old)^2 / (2 std^2), mean over dims
    kernel, x_next, mean, mean_old, _ = _ratio_norm_inputs(i)
    std = kernel.std[i]
    log_ratio = sum(
        sign * torch.distributions.Normal(m, std).log_prob(x_next).mean((1, 2))
        for sign, m in ((1, mean), (-1, mean_old))
    )
    bias = ((mean - mean_old) ** 2 / (2 * std**2)).mean((1, 2))
    expected = (log_ratio + bias) * std
    torch.testing.assert_close(objective.ratio_norm(x_next, mean, mean_old, kernel, i), expected, atol=1e-11, rtol=0)


def test_ratio_norm_has_mean_zero_over_the_noise() -> None:
    kernel = kernels.make("flow_sde", grids.shifted(10))
    mean_old = torch.zeros(100_000, 1, dtype=torch.float64)
    noise = _normal(0, 100_000, 1)
    values = objective.ratio_norm(mean_old + kernel.std[3] * noise, mean_old + 0.5, mean_old, kernel, 3)
    assert abs(values.mean()) < 4 * values.std() / math.sqrt(len(values))


def test_ratio_norm_is_exactly_one_on_policy_and_has_a_gradient() -> None:
    kernel, x_next, _, mean_old, noise = _ratio_norm_inputs(5)
    mean = mean_old.clone().requires_grad_()
    log_ratio = objective.ratio_norm(x_next, mean, mean_old, kernel, 5)
    assert log_ratio.exp().tolist() == [1.0] * 4
    adv = torch.tensor([1.0, -2.0, 3.0, 0.5], dtype=torch.float64)
    (gradient,) = torch.autograd.grad(objective.surrogate_terms(log_ratio, adv, 2e-6).mean(), mean)
    # d / d mu of -A mean_d(noise (mu - mu_old)): -A noise / 6, over 4 samples
    torch.testing.assert_close(gradient, -adv[:, None, None] * noise / 24, atol=1e-11, rtol=0)


def test_ratio_norm_gradcheck_and_deterministic_steps() -> None:
    kernel, x_next, mean, mean_old, _ = _ratio_norm_inputs(5)
    mean.requires_grad_()
    assert torch.autograd.gradcheck(lambda m: objective.ratio_norm(x_next, m, mean_old, kernel, 5), (mean,))
    with pytest.raises(ValueError, match=r"step 9\b"):
        objective.ratio_norm(x_next, mean, mean_old, kernels.make("cps", grids.shifted(10)), 9)


# --- step weights -------------------------------------------------------------------------------------------------


def _mask(steps: int, *trained: int) -> Tensor:
    mask = torch.zeros(steps, dtype=torch.bool)
    mask[list(trained)] = True
    return mask


def test_no_step_weights_are_ones() -> None:
    kernel = kernels.make("flow_sde", grids.shifted(10))
    assert objective.step_weights("none", kernel, _mask(10, 0, 1, 4)).tolist() == [1, 1, 0, 0, 1, 0, 0, 0, 0, 0]


def test_std_weights_by_hand() -> None:
    # dance on 1, .64, .28, .19, .03, 0 with level 1: std = .6 .6 .3 .4 .173; over steps 0, 2, 3 the mean is 1.3 / 3
    grid = torch.tensor([1.0, 0.64, 0.28, 0.19, 0.03, 0.0], dtype=torch.float64)
    weights = objective.step_weights("std", kernels.make("dance", grid, 1.0), _mask(5, 0, 2, 3))
    assert weights.tolist() == pytest.approx([1.8 / 1.3, 0, 0.9 / 1.3, 1.2 / 1.3, 0], abs=1e-12)


@pytest.mark.parametrize("name", NOISY)
@given(st.data())
def test_std_weights_have_mean_one_over_the_trained_steps_and_follow_std(name: str, data: st.DataObject) -> None:
    kernel = kernels.make(name, grids.shifted(data.draw(st.integers(3, 20))))
    trained = data.draw(
        st.lists(st.sampled_from(kernel.trainable.nonzero().flatten().tolist()), min_size=1, unique=True)
    )
    weights = objective.step_weights("std", kernel, _mask(kernel.steps, *trained))
    assert weights[trained].mean().item() == pytest.approx(1, abs=1e-12)
    torch.testing.assert_close(
        weights[trained] / kernel.std[trained], (1 / kernel.std[trained].mean()).expand(len(trained))
    )
    assert not weights[~_mask(kernel.steps, *trained)].any()


def test_the_factor_of_the_std_weights_belongs_to_its_grid() -> None:
    # published std of flow_sde .7 at T = 10, shift 3: mean .4002, so a factor of 2.5; a finer grid has smaller std
    factors = []
    for grid in (grids.shifted(10), grids.shifted(28)):
        kernel = kernels.make("flow_sde", grid)
        factors.append(float(objective.step_weights("std", kernel, kernel.trainable)[0] / kernel.std[0]))
    published = [0.700, 0.743, 0.536, 0.446, 0.392, 0.353, 0.319, 0.282, 0.225, 0.006]
    assert factors[0] == pytest.approx(10 / sum(published), abs=2e-3)
    assert factors[1] > factors[0] + 0.5


def test_a_table_is_taken_as_it_is() -> None:
    kernel = kernels.make("flow_sde", grids.linear(3))
    assert objective.step_weights("table", kernel, _mask(3, 0, 2), table=[2.0, 5.0, 0.5]).tolist() == [2.0, 0.0, 0.5]


@pytest.mark.parametrize("table", [None, [1.0, 2.0], [1.0, -1.0, 1.0]])
def test_a_table_that_does_not_fit_is_refused(table: list[float] | None) -> None:
    with pytest.raises(ValueError, match="weights"):
        objective.step_weights("table", kernels.make("flow_sde", grids.linear(3)), _mask(3, 0), table=table)


@pytest.mark.parametrize("kind", ["none", "std"])
def test_no_trained_step_is_refused(kind: str) -> None:
    with pytest.raises(ValueError, match="step"):
        objective.step_weights(kind, kernels.make("flow_sde", grids.linear(3)), _mask(3))


@pytest.mark.parametrize("name", [name for name in kernels.KERNELS if name != "ode"])
def test_balanced_weights_make_every_step_pull_the_velocity_equally_hard(name: str) -> None:
    # |d log p / d v| = |eps| |d mu / d v| / std with eps of unit size: its product with the weight is one constant.
    # d mu / d v by autograd, from the kernel's mean.
    kernel = kernels.make(name, grids.shifted(10))
    weights = objective.step_weights("balanced", kernel, kernel.trainable)
    pulls = []
    for i in kernel.trainable.nonzero().flatten().tolist():
        v = torch.zeros(1, 1, dtype=torch.float64, requires_grad=True)
        (slope,) = torch.autograd.grad(kernel.mean(torch.zeros(1, 1, dtype=torch.float64), v, i), v)
        pulls.append(float(weights[i] * slope.abs() / kernel.std[i]))
    assert pulls == pytest.approx([pulls[0]] * len(pulls), rel=1e-9)
    assert float(weights[kernel.trainable].mean()) == pytest.approx(1.0)
    assert float(weights[~kernel.trainable].abs().sum()) == 0
