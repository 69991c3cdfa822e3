"""The gradient of an optimiser step, against one computed directly, and its independence of the micro-batch."""

import math

import pytest
import torch

from stepcredit import grids, kernels, rollout
from stepcredit.training.ema import EMA
from stepcredit.training.update import UpdateStats, accumulate, apply, combined

T, P, G, D = 5, 2, 4, 3


class Linear(torch.nn.Module):
    """v = W x + t b: enough for gradients to differ between steps and members."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.w = torch.nn.Parameter(0.3 * torch.randn(D, D, generator=generator, dtype=torch.float64))
        self.b = torch.nn.Parameter(torch.randn(D, generator=generator, dtype=torch.float64))

    def forward(self, x, t, member):
        return x @ self.w.T + t[:, None].double() * self.b


def sampled(model, kernel_name="flow_sde", shared=True, micro_batch=8, reduce="mean"):
    kernel = kernels.make(kernel_name, grids.shifted(T))
    groups = rollout.groups([(0, T)] * P, G, kernel.trainable, shared)
    generator = torch.Generator().manual_seed(5)
    start = torch.randn(groups.layout.rows(0), D, generator=generator, dtype=torch.float64)
    table = torch.randn(T, P * G, D, generator=generator, dtype=torch.float64)
    trajectory = rollout.rollout(model, start, kernel, groups.layout, lambda i, m: table[i, m], micro_batch, reduce)
    advantage = torch.randn(P * G, T, generator=generator, dtype=torch.float64)
    return kernel, groups, trajectory, advantage


def gradient(model, trajectory, advantage, micro_batch=8, pairs=None, weights=None, **options):
    model.zero_grad()
    pairs = trajectory.layout.noisy.sum(0) if pairs is None else pairs
    weights = torch.ones(T) if weights is None else weights
    stats = accumulate(model, options.pop("reference", None), trajectory, advantage, pairs, weights, micro_batch,
                       clip=options.pop("clip", 0.2), **options)  # fmt: skip
    return torch.cat([model.w.grad.flatten(), model.b.grad]), stats


def direct_policy_gradient(model, kernel, trajectory, advantage, trained):
    """Gradient of -mean(A log p), written with torch.distributions from the states alone."""
    total, terms = int(trained.sum()), []
    for i in range(T):
        for b in range(P * G):
            if not trained[b, i]:
                continue
            x, x_next = trajectory.state(i)[b], trajectory.state(i + 1)[b]
            s, s_next, std = kernel.grid[i], kernel.grid[i + 1], kernel.std[i]
            v = x @ model.w.T + s.float().double() * model.b
            g2d = std**2
            mean = x * (1 - g2d / (2 * s)) - v * ((s - s_next) + g2d * (1 - s) / (2 * s))
            log_prob = torch.distributions.Normal(mean, std).log_prob(x_next).mean()
            terms.append(-advantage[b, i] * log_prob)
    loss = torch.stack(terms).sum() / total
    grads = torch.autograd.grad(loss, [model.w, model.b])
    return torch.cat([grads[0].flatten(), grads[1]])


@pytest.mark.parametrize("shared", [True, False])
def test_first_update_is_the_plain_policy_gradient(shared):
    model = Linear()
    kernel, groups, trajectory, advantage = sampled(model, shared=shared)
    expected = direct_policy_gradient(model, kernel, trajectory, advantage, groups.layout.noisy)
    found, stats = gradient(model, trajectory, advantage)
    # kernels read times as float32 from the model's side; the direct form is float64
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)
    # log_prob is stored in float32, replay here is float64
    assert stats.ratio_deviation < 1e-6
    assert float(stats.clip_fraction.sum()) == 0


@pytest.mark.parametrize("micro_batch", [1, 2, 3, 8, 64])
def test_the_micro_batch_changes_nothing(micro_batch):
    model = Linear()
    _, _, trajectory, advantage = sampled(model)
    whole, _ = gradient(model, trajectory, advantage, micro_batch=8)
    cut, stats = gradient(model, trajectory, advantage, micro_batch=micro_batch)
    torch.testing.assert_close(cut, whole, rtol=1e-9, atol=1e-12)
    assert math.isfinite(stats.loss)


def test_shares_of_an_update_add_up_to_the_whole():
    """One prompt's trajectories after the other, as two processes would: gradients and statistics are sums."""
    model = Linear()
    kernel, groups, trajectory, advantage = sampled(model)
    with torch.no_grad():
        model.w += 0.02  # off policy, so that ratios are clipped
    whole, stats = gradient(model, trajectory, advantage, clip=1e-3)
    assert float(stats.clip_fraction.sum()) > 0
    shares = []
    for p in range(P):
        own, tree = groups.prompt == p, groups.of_prompts(p, p + 1).layout
        assert torch.equal(tree.noisy, groups.layout.noisy[own])
        states = [x[groups.layout.index[i][own]][tree.first[i]] for i, x in enumerate(trajectory.states)]
        velocities = [v[groups.layout.index[i][own]][tree.first[i]] for i, v in enumerate(trajectory.velocities)]
        share = rollout.Trajectory(kernel, tree, tuple(states), tuple(velocities), trajectory.log_prob[own])
        shares.append(gradient(model, share, advantage[own], pairs=groups.layout.noisy.sum(0), clip=1e-3))
    torch.testing.assert_close(sum(found for found, _ in shares), whole, rtol=1e-9, atol=1e-12)
    added = combined([share for _, share in shares])
    assert added.loss == pytest.approx(stats.loss, rel=1e-6)
    assert added.ratio_deviation == stats.ratio_deviation
    torch.testing.assert_close(added.clip_fraction, stats.clip_fraction)


def test_untrained_steps_and_zero_weights_give_no_gradient():
    model = Linear()
    _, _, trajectory, advantage = sampled(model)
    weights = torch.tensor([0.0, 1.0, 0.0, 0.0, 0.0])
    found, _ = gradient(model, trajectory, advantage, weights=weights)
    only = torch.zeros_like(advantage)
    only[:, 1] = advantage[:, 1]
    expected, _ = gradient(model, trajectory, only)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_kl_pulls_to_the_reference_and_vanishes_there():
    model, reference = Linear(), Linear()
    _, _, trajectory, _ = sampled(model)
    nothing = torch.zeros(P * G, T, dtype=torch.float64)
    at_reference, stats = gradient(model, trajectory, nothing, reference=reference, kl_beta=0.5)
    assert float(at_reference.abs().max()) == 0
    assert stats.kl.tolist() == [0.0] * T
    with torch.no_grad():
        model.w += 0.1
    away, stats = gradient(model, trajectory, nothing, reference=reference, kl_beta=0.5)
    assert bool((stats.kl > 0).all())
    with torch.no_grad():
        model.w -= 1e-3 * away[: D * D].view(D, D)
        model.b -= 1e-3 * away[D * D :]
    _, closer = gradient(model, trajectory, nothing, reference=reference, kl_beta=0.5)
    assert closer.loss < stats.loss


def test_normalised_ratio_has_the_scaled_gradient_on_policy():
    """At the sampling policy d(log ratio) = std * d(mean_d eps mu / std), std times that of the plain ratio."""
    model = Linear()
    kernel, _, trajectory, advantage = sampled(model)
    plain, _ = gradient(model, trajectory, advantage, weights=kernel.std)
    normalised, stats = gradient(model, trajectory, advantage, normalised_ratio=True)
    # plain: eps dmu / std; normalised: eps dmu: weight each step of the plain one by its std
    torch.testing.assert_close(normalised, plain, rtol=1e-4, atol=1e-7)
    assert stats.ratio_deviation < 1e-6


def test_a_gradient_that_is_not_finite_never_reaches_the_weights():
    model = Linear()
    optimiser = torch.optim.AdamW(model.parameters(), lr=0.1)
    before = model.w.detach().clone()
    model.w.grad = torch.full_like(model.w, float("nan"))
    model.b.grad = torch.zeros_like(model.b)
    stats = UpdateStats(0.0, 0.0, torch.zeros(T), torch.zeros(T))
    assert not apply(optimiser, list(model.parameters()), stats, 1.0)
    assert torch.equal(model.w, before)
    assert model.w.grad is None


def test_ema_follows_its_schedule_and_gives_the_weights_back():
    parameter = torch.nn.Parameter(torch.zeros(1))
    ema = EMA({"p": parameter}, highest=0.9)
    expected = 0.0
    for n in range(100):
        with torch.no_grad():
            parameter.fill_(float(n))
        ema.update()
        decay = min((1 + n) / (10 + n), 0.9)
        expected = decay * expected + (1 - decay) * n
    assert float(ema.shadow["p"]) == pytest.approx(expected, rel=1e-5)
    with ema.applied():
        assert float(parameter) == pytest.approx(expected, rel=1e-5)
    assert float(parameter) == 99.0
    off = EMA({"p": parameter}, highest=0.0)
    with torch.no_grad():
        parameter.fill_(7.0)
    off.update()
    assert float(off.shadow["p"]) == 7.0


def test_sgd_takes_steps_of_the_length_of_the_learning_rate():
    model = Linear()
    optimiser = torch.optim.SGD(model.parameters(), lr=0.25, momentum=0.9)
    before = torch.cat([p.detach().flatten() for p in model.parameters()])
    for scale in (1e-6, 1e3):  # whatever the gradient's own length
        for p in model.parameters():
            p.grad = scale * torch.ones_like(p)
        assert apply(optimiser, list(model.parameters()), UpdateStats(0.0, 0.0, torch.zeros(T), torch.zeros(T)), 1.0,
                     unit_length=True)  # fmt: skip
        after = torch.cat([p.detach().flatten() for p in model.parameters()])
        moved, before = float((after - before).norm()), after
        assert moved == pytest.approx(0.25 if scale == 1e-6 else 0.25 * 1.9, rel=1e-6)
