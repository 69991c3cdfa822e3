"""Rollouts: the tree of shared states, and trajectories that depend on nothing but their names."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from toy_fields import SHAPE, Elementwise, initial, one_by_one, step_noise

from stepcredit import grids, interpolant, kernels, objective
from stepcredit.kernels import Kernel
from stepcredit.rollout import Groups, Trajectory, chunks, groups, layout, replay, rollout

GRID = grids.shifted(10)
NAMES = [3, 11, 4]
"""Numbers of the prompts in the data set."""


def _groups(
    kernel: Kernel,
    windows: list[tuple[int, int]] | None = None,
    size: int = 4,
    shared: bool = True,
    branch: bool = False,
) -> Groups:
    return groups(windows or [(0, kernel.steps)] * 3, size, kernel.trainable, shared, branch)


def _run(
    kernel: Kernel,
    made: Groups,
    names: list[int] = NAMES,
    micro_batch: int = 5,
    dtype: torch.dtype = torch.float32,
    **options: object,
) -> tuple[Trajectory, Elementwise]:
    velocity = Elementwise(made.prompt)
    x_init, draw = initial(made, names, dtype=dtype), step_noise(made, names)
    return rollout(velocity, x_init, kernel, made.layout, draw, micro_batch, **options), velocity  # type: ignore[arg-type]


def _states(trajectory: Trajectory) -> Tensor:
    """``[B, T + 1, ...]``."""
    return torch.stack([trajectory.state(i) for i in range(trajectory.layout.steps + 1)], dim=1)


# --- the tree -----------------------------------------------------------------------------------------------------


def test_rows_of_shared_noise_by_hand() -> None:
    # two prompts of three members, window [1, 3) of four steps: x[0] and x[1] shared, from x[2] on everybody alone
    made = groups([(1, 3)] * 2, 3, torch.ones(4, dtype=torch.bool), shared_noise=True)
    assert [made.layout.rows(i) for i in range(5)] == [2, 2, 6, 6, 6]
    assert made.layout.index[1].tolist() == [0, 0, 0, 1, 1, 1]
    assert made.layout.first[1].tolist() == [0, 3]
    assert made.layout.index[2].tolist() == made.layout.first[2].tolist() == [0, 1, 2, 3, 4, 5]
    assert made.layout.noisy.tolist() == [[False, True, True, False]] * 6
    assert made.prompt.tolist() == [0, 0, 0, 1, 1, 1]
    assert made.member.tolist() == [0, 1, 2, 0, 1, 2]
    assert made.root.tolist() == [0, 0, 0, 1, 1, 1]
    assert (made.count, made.size, made.layout.members, made.layout.steps) == (2, 3, 6, 4)
    assert made.trained.shape == (2, 3, 4)


def test_independent_noise_shares_nothing() -> None:
    made = groups([(1, 3)] * 2, 3, torch.ones(4, dtype=torch.bool), shared_noise=False)
    assert [made.layout.rows(i) for i in range(5)] == [6] * 5
    assert made.root.tolist() == list(range(6))


def test_ddim_shares_its_first_two_states() -> None:
    # std[0] = 0: with a shared x[0] the first step leads a whole group to one x[1]
    made = _groups(kernels.make("ddim", GRID), size=4)
    assert [made.layout.rows(i) for i in range(11)] == [3, 3, *[12] * 9]
    assert made.layout.noisy[0].tolist() == [False, *[True] * 8, False]


def test_a_window_for_every_group() -> None:
    made = groups([(0, 2), (2, 4)], 2, torch.ones(4, dtype=torch.bool), shared_noise=True)
    assert made.layout.noisy.tolist() == [[True, True, False, False]] * 2 + [[False, False, True, True]] * 2
    assert [made.layout.rows(i) for i in range(5)] == [2, 3, 3, 4, 4]
    assert made.trained[0].all(0).tolist() == [True, True, False, False]


def test_branches_leave_one_path() -> None:
    # TempFlow: one prompt, three steps, two members a branch: group k is noisy at step k alone
    made = groups([(0, 3)], 2, torch.ones(3, dtype=torch.bool), shared_noise=True, branch=True)
    assert (made.count, made.size) == (3, 2)
    assert made.grouped(made.layout.noisy).tolist() == [[row] * 2 for row in torch.eye(3, dtype=torch.bool).tolist()]
    # x[0]: one; x[1]: the path and branch 0's two; x[2]: the path and four; x[3]: no path is left
    assert [made.layout.rows(i) for i in range(4)] == [1, 3, 5, 6]
    assert made.member.tolist() == list(range(6))  # so that no two branches share noise


@given(st.data())
def test_the_tree_is_consistent(data: st.DataObject) -> None:
    steps = data.draw(st.integers(1, 6))
    root = torch.tensor(data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=8)))
    root = root.unique(return_inverse=True)[1]
    bits = data.draw(st.lists(st.booleans(), min_size=len(root) * steps, max_size=len(root) * steps))
    noisy = torch.tensor(bits).reshape(len(root), steps)
    tree = layout(root, noisy)
    for i in range(steps + 1):
        index, first = tree.index[i], tree.first[i]
        assert torch.equal(index[first], torch.arange(tree.rows(i)))  # the first member of a row is of that row
        for a in range(len(root)):
            for b in range(len(root)):
                # two members are one state exactly as long as they have one root and neither took noise
                together = a == b or bool(root[a] == root[b] and not noisy[[a, b], :i].any())
                assert bool(index[a] == index[b]) == together


def test_chunks_cover_every_row_and_every_noisy_member_once() -> None:
    made = groups([(0, 2), (1, 3)], 3, torch.ones(3, dtype=torch.bool), shared_noise=True)
    for i in range(3):
        for micro_batch in (1, 2, 4, 100):
            parts = list(chunks(made.layout, i, micro_batch))
            rows = [r for part in parts for r in range(part.rows.start, part.rows.stop)]
            members = torch.cat([part.members for part in parts])
            assert rows == list(range(made.layout.rows(i)))
            assert all(part.rows.stop - part.rows.start <= micro_batch for part in parts)
            assert sorted(members.tolist()) == made.layout.noisy[:, i].nonzero().flatten().tolist()
            for part in parts:
                assert torch.equal(part.rows.start + part.local, made.layout.index[i][part.members])


@pytest.mark.parametrize(
    ("windows", "size", "options", "message"),
    [
        ([(0, 3)], 1, {}, "group_size"),
        ([(2, 2)], 2, {}, r"window \[2, 2\)"),
        ([(-1, 2)], 2, {}, r"window \[-1, 2\)"),
        ([(0, 5)], 2, {}, r"window \[0, 5\)"),
        ([(3, 4)], 2, {}, r"window \[3, 4\).*trainable"),
        ([(0, 2)], 2, {"branch": True, "shared_noise": False}, "shared_noise"),
        ([(0, 2), (0, 3)], 2, {"branch": True}, "branching"),
    ],
)
def test_impossible_groups_are_refused(windows: list, size: int, options: dict, message: str) -> None:
    trainable = torch.tensor([True, True, True, False])
    with pytest.raises(ValueError, match=message):
        groups(windows, size, trainable, **{"shared_noise": True, **options})


def test_roots_without_gaps() -> None:
    with pytest.raises(ValueError, match="gap"):
        layout(torch.tensor([0, 2]), torch.zeros(2, 3, dtype=torch.bool))


# --- trajectories -------------------------------------------------------------------------------------------------

WINDOWS = [None, [(0, 3)] * 3, [(2, 5)] * 3, [(6, 10), (1, 2), (3, 9)]]


@pytest.mark.parametrize("name", ["ddim", "cps", "precise", "flow_sde", "dance"])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("windows", WINDOWS)
def test_the_tree_gives_the_trajectories_of_members_on_their_own(
    name: str, shared: bool, windows: list[tuple[int, int]] | None
) -> None:
    kernel = kernels.make(name, GRID)
    made = _groups(kernel, windows, shared=shared)
    trajectory, _ = _run(kernel, made)
    assert torch.equal(_states(trajectory), one_by_one(kernel, made, NAMES))


def test_branches_too() -> None:
    kernel = kernels.make("flow_sde", GRID)
    made = _groups(kernel, [(0, 10)] * 2, size=2, branch=True)
    trajectory, _ = _run(kernel, made, NAMES[:2])
    states = one_by_one(kernel, made, NAMES[:2])
    assert torch.equal(_states(trajectory), states)
    # every branch is on the prompt's ODE path until its own step, and no two members end alike
    for k in range(10):
        branch = made.grouped(states)[k]
        assert torch.equal(branch[:, : k + 1], made.grouped(states)[9][:, : k + 1])
    assert len(states[:, -1].flatten(1).unique(dim=0)) == len(states)


def test_a_shared_prefix_changes_no_state() -> None:
    # the same members and the same starting noise, once as a tree, once without any sharing
    kernel = kernels.make("cps", GRID)
    made = _groups(kernel, [(4, 7)] * 3)
    shared, velocity = _run(kernel, made)
    alone = layout(torch.arange(12), made.layout.noisy)
    x_init = initial(made, NAMES)[made.root]
    apart_velocity = Elementwise(made.prompt)
    apart = rollout(apart_velocity, x_init, kernel, alone, step_noise(made, NAMES), 5)
    assert torch.equal(_states(apart), _states(shared))
    assert torch.equal(apart.log_prob, shared.log_prob)
    assert (velocity.evaluations, apart_velocity.evaluations) == (5 * 3 + 5 * 12, 10 * 12)


def test_outside_the_window_it_is_the_ode() -> None:
    kernel = kernels.make("flow_sde", GRID)
    made = _groups(kernel, [(3, 6)] * 3)
    trajectory, _ = _run(kernel, made)
    for i in (0, 1, 2, 6, 7, 8, 9):
        x = trajectory.state(i)
        v = Elementwise.of(x, torch.full((12,), float(GRID[i])), made.prompt)
        assert torch.equal(trajectory.velocity(i), v)
        assert torch.equal(trajectory.state(i + 1), interpolant.euler(x, v, float(GRID[i]), float(GRID[i + 1])))
        assert not trajectory.log_prob[:, i].any()
    assert (trajectory.log_prob[:, 3:6] != 0).all()


@pytest.mark.parametrize("micro_batch", [1, 3, 4, 12, 1000])
def test_micro_batching_changes_nothing(micro_batch: int) -> None:
    kernel = kernels.make("ddim", GRID)
    made = _groups(kernel)
    whole, _ = _run(kernel, made, micro_batch=7)
    parts, velocity = _run(kernel, made, micro_batch=micro_batch)
    assert torch.equal(_states(parts), _states(whole))
    torch.testing.assert_close(parts.log_prob, whole.log_prob)
    assert max(velocity.calls) <= micro_batch


@pytest.mark.parametrize("shared", [False, True])
def test_a_prompt_alone_gives_the_trajectories_it_has_in_company(shared: bool) -> None:
    kernel = kernels.make("flow_sde", GRID)
    every = _groups(kernel, shared=shared)
    together = _states(_run(kernel, every)[0]).reshape(3, 4, 11, *SHAPE)
    for subset in ([1], [2, 0]):
        made = _groups(kernel, [(0, 10)] * len(subset), shared=shared)
        velocity = Elementwise(torch.tensor(subset)[made.prompt])
        names = [NAMES[k] for k in subset]
        alone = rollout(velocity, initial(made, names), kernel, made.layout, step_noise(made, names), 5)
        assert torch.equal(_states(alone).reshape(len(subset), 4, 11, *SHAPE), together[subset])


def test_members_differ_and_start_as_they_should() -> None:
    kernel = kernels.make("flow_sde", GRID)
    for shared in (True, False):
        trajectory, _ = _run(kernel, _groups(kernel, shared=shared))
        starts, ends = (trajectory.state(i).flatten(1).unique(dim=0) for i in (0, 10))
        assert len(starts) == (3 if shared else 12)
        assert len(ends) == 12


def test_the_ode_needs_no_noise() -> None:
    kernel = kernels.make("ode", GRID)
    tree = layout(torch.arange(2), torch.zeros(2, 10, dtype=torch.bool))
    x_init = torch.randn(2, *SHAPE, generator=torch.Generator().manual_seed(0))

    def no_noise(step: int, members: Tensor) -> Tensor:
        raise AssertionError("a deterministic step asked for noise")

    trajectory = rollout(Elementwise(torch.tensor([0, 1])), x_init, kernel, tree, no_noise, 8)
    assert not trajectory.log_prob.any()
    x = x_init
    for i in range(10):
        v = Elementwise.of(x, torch.full((2,), float(GRID[i])), torch.tensor([0, 1]))
        x = interpolant.euler(x, v, float(GRID[i]), float(GRID[i + 1]))
    assert torch.equal(trajectory.states[-1], x)


def test_progress_and_global_generator() -> None:
    kernel = kernels.make("cps", GRID)
    seen: list[int] = []
    before = torch.get_rng_state()
    _run(kernel, _groups(kernel), progress=seen.append)
    assert seen == list(range(1, 11))
    assert torch.equal(torch.get_rng_state(), before)


# --- log-probs and replay -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("reduce", ["mean", "sum"])
def test_log_probs_are_those_of_the_states_as_stored(dtype: torch.dtype, reduce: str) -> None:
    kernel = kernels.make("flow_sde", GRID)
    made = _groups(kernel, [(1, 9)] * 3)
    trajectory, _ = _run(kernel, made, dtype=dtype, reduce=reduce)
    assert trajectory.log_prob.dtype == torch.float32
    for i in range(1, 9):
        x, x_next = trajectory.state(i), trajectory.state(i + 1)
        assert x.dtype == x_next.dtype == dtype
        v = Elementwise.of(x, torch.full((12,), float(GRID[i])), made.prompt)
        assert torch.equal(trajectory.velocity(i), v)
        density = torch.distributions.Normal(kernel.mean(x.double(), v.double(), i), kernel.std[i])
        expected = density.log_prob(x_next.double())
        expected = expected.mean((1, 2)) if reduce == "mean" else expected.sum((1, 2))
        torch.testing.assert_close(trajectory.log_prob[:, i].double(), expected, atol=2e-5, rtol=2e-5)


class _Network(nn.Module):
    """Matrix products, so that the shape of a batch may change the last bits."""

    def __init__(self, prompt: Tensor) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.prompt = prompt
        self.layers = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 6))

    def forward(self, x: Tensor, t: Tensor, member: Tensor) -> Tensor:
        dtype = next(self.layers.parameters()).dtype
        inputs = torch.cat([x.flatten(1).to(dtype), t[:, None].to(dtype), self.prompt[member, None].to(dtype)], 1)
        return self.layers(inputs).reshape(x.shape)


@pytest.mark.parametrize("name", ["ddim", "cps", "flow_sde"])
@pytest.mark.parametrize("micro_batch", [1, 5, 7, 64])
@pytest.mark.parametrize("model", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shared", [False, True])
def test_the_ratio_of_an_unchanged_policy_is_one_to_the_last_bit(
    name: str, micro_batch: int, model: torch.dtype, shared: bool
) -> None:
    kernel = kernels.make(name, GRID)
    made = _groups(kernel, shared=shared)
    network = _Network(made.prompt)
    network.layers.to(model)
    x_init = initial(made, NAMES, dtype=model)
    trajectory = rollout(network, x_init, kernel, made.layout, step_noise(made, NAMES), micro_batch)
    replayed = torch.zeros(12, 10, dtype=torch.bool)
    for i in range(10):
        for chunk in chunks(made.layout, i, micro_batch):
            if len(chunk.members):
                result = replay(network, trajectory, chunk)
                ratio = (result.log_prob - trajectory.log_prob[chunk.members, i]).exp()
                assert ratio.tolist() == [1.0] * len(chunk.members)
                replayed[chunk.members, i] = True
    assert torch.equal(replayed, made.layout.noisy)


def test_replay_carries_the_gradient_to_the_weights() -> None:
    kernel = kernels.make("cps", GRID)
    made = _groups(kernel)
    network = _Network(made.prompt)
    trajectory = rollout(network, initial(made, NAMES), kernel, made.layout, step_noise(made, NAMES), 8)
    assert not trajectory.log_prob.requires_grad
    chunk = next(chunks(made.layout, 2, 8))
    result = replay(network, trajectory, chunk)
    adv = torch.linspace(-1, 1, len(chunk.members))
    objective.surrogate(result.log_prob, trajectory.log_prob[chunk.members, 2], adv, 1e-4).backward()
    for parameter in network.parameters():
        assert parameter.grad is not None
        assert parameter.grad.abs().sum() > 0
        assert parameter.grad.isfinite().all()


def test_replay_returns_what_the_step_was() -> None:
    kernel = kernels.make("flow_sde", GRID)
    made = _groups(kernel)
    trajectory, velocity = _run(kernel, made, micro_batch=5)
    for i in (0, 4):
        for chunk in chunks(made.layout, i, 5):
            result = replay(velocity, trajectory, chunk)
            assert torch.equal(result.x_t, trajectory.state(i)[chunk.members])
            assert torch.equal(result.x_next, trajectory.state(i + 1)[chunk.members])
            assert torch.equal(result.v, trajectory.velocity(i)[chunk.members])


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_velocity_that_is_not_finite_stops_and_names_the_step(value: float) -> None:
    kernel = kernels.make("cps", GRID)
    made = _groups(kernel)
    healthy = Elementwise(made.prompt)

    def breaks(x: Tensor, t: Tensor, member: Tensor) -> Tensor:
        v = healthy(x, t, member)
        return torch.where(((t < 0.85) & (member == 7))[:, None, None], value, v)

    with pytest.raises(FloatingPointError, match=r"step 4\b.*member 7\b"):
        rollout(breaks, initial(made, NAMES), kernel, made.layout, step_noise(made, NAMES), 5)
