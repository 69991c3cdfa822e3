"""`replay: retain`: the rollout's own graphs give the bits of a second evaluation, without one."""

import pytest
import torch

from stepcredit import grids, kernels, rollout
from stepcredit.errors import UserError
from stepcredit.rollout import chunks
from stepcredit.training import recipe as recipes
from stepcredit.training.update import accumulate

T, P, G, D = 6, 2, 4, 5


class Net(torch.nn.Module):
    """A small network of time, state and prompt; counts the rows it sees, with and without gradients."""

    def __init__(self, dtype):
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        sizes = [(32, D + 2), (32, 32), (D, 32)]
        self.layers = torch.nn.ParameterList(
            [(torch.randn(size, generator=generator, dtype=torch.float64) * 0.4).to(dtype) for size in sizes]
        )
        self.rows = {True: 0, False: 0}

    def forward(self, x, t, member):
        self.rows[torch.is_grad_enabled()] += len(x)
        features = torch.cat([x, t[:, None].to(x), (member // G)[:, None].to(x)], 1).to(self.layers[0].dtype)
        for layer in self.layers[:-1]:
            features = torch.nn.functional.silu(features @ layer.T)
        return features @ self.layers[-1].T


def sampled(net, retain, storage, shared=True, window=(1, T - 1), kernel_name="flow_sde", micro_batch=3, reduce="mean"):
    kernel = kernels.make(kernel_name, grids.shifted(T))
    groups = rollout.groups([window] * P, G, kernel.trainable, shared)
    generator = torch.Generator().manual_seed(5)
    start = torch.randn(groups.layout.rows(0), D, generator=generator, dtype=torch.float64).to(storage)
    noise = torch.randn(T, P * G, D, generator=generator, dtype=torch.float64).to(storage)
    made = rollout.rollout(
        net, start, kernel, groups.layout, lambda i, m: noise[i, m], micro_batch, reduce, retain=retain
    )
    return made, torch.randn(P * G, T, generator=generator, dtype=torch.float64)


def update(net, trajectory, advantage, micro_batch=3, reference=None, **options):
    net.zero_grad()
    pairs = trajectory.layout.noisy.sum(0)
    weights = torch.linspace(0.5, 1.5, T)
    stats = accumulate(
        net, reference, trajectory, advantage, pairs, weights, micro_batch, clip=1e-4,
        kl_beta=0.3 if reference else 0.0, **options,
    )  # fmt: skip
    return [p.grad.clone() for p in net.parameters()], stats


DTYPES = [
    (torch.float64, torch.float64),
    (torch.float32, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.bfloat16),
]
SETTINGS = {
    "plain": ({}, {}),
    "own noise, other kernel": ({"shared": False, "kernel_name": "dance"}, {}),
    "summed": ({"reduce": "sum"}, {"reduce": "sum"}),
    "normalised ratio": ({}, {"normalised_ratio": True}),
    "kl gaussian": ({}, {"kl": "gaussian"}),
    "kl velocity": ({}, {"kl": "velocity"}),
    "scaled": ({}, {"scale": 1024.0}),
}


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize(("network", "storage"), DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def test_retained_graphs_give_the_bits_of_a_second_evaluation(network, storage, setting):
    net, (sampling, options) = Net(network), SETTINGS[setting]
    reference = Net(network) if "kl" in options else None
    if reference is not None:
        with torch.no_grad():
            reference.layers[1] += 0.1
    results = {}
    for retain in (False, True):
        trajectory, advantage = sampled(net, retain, storage, **sampling)
        states = [*trajectory.states, *trajectory.velocities, trajectory.log_prob]
        assert not any(tensor.requires_grad for tensor in states)
        results[retain] = states, *update(net, trajectory, advantage, reference=reference, **options)
    for a, b in zip(results[False][0], results[True][0], strict=True):
        assert torch.equal(a, b)
    for a, b in zip(results[False][1], results[True][1], strict=True):
        assert torch.equal(a, b)
        assert float(a.abs().max()) > 0
    assert results[False][2].loss == results[True][2].loss
    assert torch.equal(results[False][2].kl.nan_to_num(), results[True][2].kl.nan_to_num())


def test_the_model_is_evaluated_once_where_it_would_be_twice():
    """Of 6 steps, 1..4 are noisy: 2 shared rows at states 0 and 1, then 8 each."""
    counts = {}
    for retain in (False, True):
        net = Net(torch.float32)
        trajectory, advantage = sampled(net, retain, torch.float32)
        update(net, trajectory, advantage)
        counts[retain] = net.rows
        assert not trajectory.retained  # nothing outlives its use
    assert counts[False] == {False: 2 + 2 + 4 * 8, True: 2 + 3 * 8}
    assert counts[True] == {False: 2 + 8, True: 2 + 3 * 8}


def test_what_was_retained_serves_once():
    """A second update is off-policy: it evaluates the model as it is by then."""
    net = Net(torch.float32)
    trajectory, advantage = sampled(net, True, torch.float32)
    update(net, trajectory, advantage)
    with torch.no_grad():
        net.layers[0] += 0.05
    off_policy, stats = update(net, trajectory, advantage)
    assert stats.ratio_deviation > 0
    fresh, _ = sampled(net, False, torch.float32)  # other states, since the model changed
    assert not torch.equal(fresh.log_prob, trajectory.log_prob)
    assert all(float(gradient.abs().max()) > 0 for gradient in off_policy)


def test_each_chunk_of_noisy_members_is_retained_and_no_other():
    net = Net(torch.float32)
    trajectory, _ = sampled(net, True, torch.float32)
    wanted = {
        (i, chunk.rows.start) for i in range(T) for chunk in chunks(trajectory.layout, i, 3) if len(chunk.members)
    }
    assert trajectory.retained.keys() == wanted
    assert {i for i, _ in wanted} == {1, 2, 3, 4}
    assert not sampled(net, False, torch.float32)[0].retained


def test_retaining_with_several_updates_is_refused():
    with pytest.raises(UserError, match="updates_per_rollout 2"):
        recipes.build({"replay": "retain", "updates_per_rollout": 2})
