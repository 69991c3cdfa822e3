"""A trust region around every update: closed forms on a linear policy, and through whole runs."""

import json
import math

import pytest
import torch

from stepcredit import grids, kernels, rollout
from stepcredit.training import trust
from stepcredit.training.telemetry import make_display
from stepcredit.training.trainer import train

T, P, G, D = 4, 2, 3, 5
EVERY = torch.arange(P * G)


class Linear(torch.nn.Module):
    """v = W x + t b, linear in its parameters, so that the KL is exactly quadratic in a step's length."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.w = torch.nn.Parameter(0.3 * torch.randn(D, D, generator=generator, dtype=torch.float64))
        self.b = torch.nn.Parameter(torch.randn(D, generator=generator, dtype=torch.float64))

    def forward(self, x, t, member):
        return x @ self.w.T + t[:, None].double() * self.b


def sampled(model, window=(0, T)):
    kernel = kernels.make("flow_sde", grids.shifted(T))
    groups = rollout.groups([window] * P, G, kernel.trainable, shared_noise=False)
    generator = torch.Generator().manual_seed(5)
    start = torch.randn(P * G, D, generator=generator, dtype=torch.float64)
    table = torch.randn(T, P * G, D, generator=generator, dtype=torch.float64)
    return rollout.rollout(model, start, kernel, groups.layout, lambda i, m: table[i, m], 100)


def step_of(model, length=1.0):
    generator = torch.Generator().manual_seed(9)
    steps = [length * torch.randn(p.shape, generator=generator, dtype=p.dtype) for p in model.parameters()]

    def step():
        with torch.no_grad():
            for parameter, by in zip(model.parameters(), steps, strict=True):
                parameter += by
        return True

    return step, steps


def divergence(old, new, trajectory, steps, members=slice(None)):
    """Mean of KL(N(mu_old, std) || N(mu_new, std)) per dimension, by torch.distributions."""
    kernel, terms = trajectory.kernel, []
    for i in steps:
        x, s, s_next, std = trajectory.state(i)[members], kernel.grid[i], kernel.grid[i + 1], kernel.std[i]
        means = []
        for w, b in (old, new):
            v = x @ w.T + s.float().double() * b
            means.append(x * (1 - std**2 / (2 * s)) - v * ((s - s_next) + std**2 * (1 - s) / (2 * s)))
        one, other = (torch.distributions.Normal(mean, std) for mean in means)
        terms.append(torch.distributions.kl_divergence(one, other).mean(1))
    return float(torch.cat(terms).mean())


def weights(model):
    return model.w.detach().clone(), model.b.detach().clone()


def test_a_step_within_the_limit_is_taken_whole_and_its_kl_is_told():
    model, plain = Linear(), Linear()
    trajectory, old = sampled(model), weights(model)
    step_of(plain, 0.01)[0]()
    moved = trust.step_within(
        1.0, list(model.parameters()), [trust.Probe(model, trajectory, EVERY)], 100, step_of(model, 0.01)[0]
    )
    assert (moved.made, moved.share) == (True, 1.0)
    assert torch.equal(model.w, plain.w)
    assert moved.kl == pytest.approx(divergence(old, weights(model), trajectory, range(T)), rel=1e-5)


@pytest.mark.parametrize("limit", [1e-2, 1e-5])
def test_a_longer_step_is_shortened_to_the_limit_along_itself(limit):
    model, whole = Linear(), Linear()
    trajectory, old = sampled(model), weights(model)
    step, steps = step_of(model)
    step_of(whole)[0]()
    full = divergence(old, weights(whole), trajectory, range(T))
    assert full > limit
    moved = trust.step_within(limit, list(model.parameters()), [trust.Probe(model, trajectory, EVERY)], 100, step)
    share = math.sqrt(limit / full)
    assert moved.share == pytest.approx(share, rel=1e-4)
    torch.testing.assert_close(model.w.detach(), old[0] + share * steps[0], rtol=1e-4, atol=1e-9)
    assert moved.kl == pytest.approx(limit, rel=1e-3)
    assert divergence(old, weights(model), trajectory, range(T)) == pytest.approx(limit, rel=1e-3)


@pytest.mark.parametrize("micro_batch", [1, 2, 100])
def test_it_is_measured_on_the_given_members_wherever_they_take_noise(micro_batch):
    model = Linear()
    trajectory, other, old = sampled(model), sampled(model, window=(1, 3)), weights(model)
    probes = [trust.Probe(model, trajectory, torch.tensor([0, 3])), trust.Probe(model, other, torch.tensor([1, 2, 5]))]
    moved = trust.step_within(1e9, list(model.parameters()), probes, micro_batch, step_of(model)[0])
    new = weights(model)
    first = divergence(old, new, trajectory, range(T), [0, 3])
    second = divergence(old, new, other, (1, 2), [1, 2, 5])
    assert moved.kl == pytest.approx((2 * T * first + 3 * 2 * second) / (2 * T + 3 * 2), rel=1e-5)


def test_where_the_kl_is_not_quadratic_it_is_shortened_again():
    class Cubic(Linear):
        def forward(self, x, t, member):
            return x @ (self.w**3).T

    model = Cubic()
    trajectory = sampled(model)
    moved = trust.step_within(
        1e-4, list(model.parameters()), [trust.Probe(model, trajectory, EVERY)], 100, step_of(model, 3.0)[0]
    )
    assert 0 < moved.kl <= 1e-4 * trust.SLACK
    assert moved.share < 1


def test_no_step_is_no_move():
    model = Linear()
    old = weights(model)
    moved = trust.step_within(
        1e-9, list(model.parameters()), [trust.Probe(model, sampled(model), EVERY)], 100, lambda: False
    )
    assert moved == (False, 0.0, 1.0)
    assert torch.equal(model.w, old[0])


def test_a_step_beyond_the_numbers_comes_back_into_the_region():
    class Bounded(Linear):
        """Overflows where a weight has changed by more than 50."""

        def forward(self, x, t, member):
            return super().forward(x, t, member) * torch.where(self.w.abs().max() < 50, 1.0, math.inf)

    model = Bounded()
    probe = trust.Probe(model, sampled(model), EVERY)
    moved = trust.step_within(1e-4, list(model.parameters()), [probe], 100, step_of(model, 1e4)[0])
    assert 0 < moved.kl <= 1e-4 * trust.SLACK
    assert moved.share < 1e-2


def test_a_step_to_nowhere_is_taken_back():
    model = Linear()
    trajectory, old = sampled(model), weights(model)

    def step():
        with torch.no_grad():
            model.w.fill_(math.nan)
        return True

    with pytest.raises(FloatingPointError, match="even shortened to 1e-08 of itself"):
        trust.step_within(1e-4, list(model.parameters()), [trust.Probe(model, trajectory, EVERY)], 100, step)
    assert torch.equal(model.w, old[0])


def run(recipe, folder):
    train(recipe, folder, make_display(quiet=True))
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()][1:]


def test_the_micro_batch_changes_nothing(small, tmp_path):
    found = [run(small(iterations=2, trust_kl=1e-6, lr=0.05, micro_batch=n), tmp_path / str(n)) for n in (2, 8)]
    for key in ("update_kl", "update_share", "grad_norm"):
        assert [line[key] for line in found[0]] == pytest.approx([line[key] for line in found[1]], rel=1e-3)
    assert found[0][0]["update_share"] < 1


@pytest.mark.parametrize("keys", [{}, {"replay": "retain"}, {"updates_per_rollout": 2}, {"window_size": 2}])
def test_a_run_keeps_within_its_region(small, tmp_path, keys):
    free = run(small(iterations=2, trust_kl=1e3, lr=0.05, **keys), tmp_path / "free")
    usual = run(small(iterations=2, lr=0.05, **keys), tmp_path / "usual")
    assert [line["grad_norm"] for line in free] == [line["grad_norm"] for line in usual]
    assert [line["update_share"] for line in free] == [1.0, 1.0]
    assert [line["update_kl"] for line in usual] == [None, None]
    limit = free[0]["update_kl"] / 100
    held = run(small(iterations=2, trust_kl=limit, lr=0.05, **keys), tmp_path / "held")
    for line in held:
        assert 0 < line["update_kl"] <= limit * trust.SLACK
        assert 0 < line["update_share"] < 1
