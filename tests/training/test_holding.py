"""What an iteration keeps of its trajectories: no state that nobody will ask for, and not a bit of difference."""

import gc
import math
import weakref
from dataclasses import replace

import pytest
import torch

from stepcredit import grids, kernels, noise, rollout, scoring
from stepcredit.rollout import groups, layout
from stepcredit.storage import Kept, Rows
from stepcredit.training import collect, holding, iteration
from stepcredit.training.collect import sample_cell
from stepcredit.training.setup import setup
from stepcredit.training.state import fresh
from stepcredit.training.update import accumulate

CASES = {
    "everything trained": {},
    "a window": {"window": (1, 3), "credit": "uniform", "advantage": "group"},
    "windows drawn anew": {"window_size": 2, "credit": "turning_point"},
    "branches": {"credit": "tempflow", "branch": True, "estimate": "tweedie"},
    "a reference": {"kl_beta": 0.1, "window": (2, 5)},
    "graphs kept": {"replay": "retain", "window": (1, 4)},
    "graphs kept, a reference": {"replay": "retain", "kl_beta": 0.1},
    "GRPO-Guard": {"ratio": "normalised", "window": (0, 2)},
    "half": {"latent_dtype": "bfloat16", "estimate": "full"},
}


def cell_of(parts, lean):
    prompts, every = parts.batch(1)
    return sample_cell(parts, 1, prompts, every, torch.arange(every.count), lambda _: None, lean)


def update(parts, cell):
    """Gradients and statistics of the first update."""
    recipe = parts.recipe
    tree = cell.groups.layout
    advantage = noise.normal((tree.members, tree.steps), "advantage")
    parameters = [parameter for _, parameter in parts.policy.named_parameters()]
    for parameter in parameters:
        parameter.grad = None
    stats = accumulate(cell.velocity, cell.reference, cell.trajectory, advantage, tree.noisy.sum(0), parts.weights,
                       recipe.micro_batch, recipe.clip, recipe.kl_beta, recipe.kl,
                       recipe.ratio == "normalised", recipe.log_prob)  # fmt: skip
    return [parameter.grad.clone() for parameter in parameters], stats


def nbytes(trajectory):
    """Memory behind the states and velocities, each piece of it counted once."""
    tensors = [x.values if isinstance(x, Rows) else x for x in (*trajectory.states, *trajectory.velocities)]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.numel()}.values())


@pytest.mark.parametrize("case", CASES)
def test_what_is_kept_gives_the_bits_of_everything(small, case):
    parts = setup(small(**CASES[case]))
    whole, lean = cell_of(parts, lean=False), cell_of(parts, lean=True)
    assert torch.equal(whole.trajectory.log_prob, lean.trajectory.log_prob)
    R, of_lean = (collect.scored(parts, [cell]).R for cell in (whole, lean))
    assert torch.equal(R.nan_to_num(math.pi), of_lean.nan_to_num(math.pi))
    wanted, stats = update(parts, whole)
    got, lean_stats = update(parts, lean.for_update(parts.recipe))
    assert any(bool((gradient != 0).any()) for gradient in wanted)
    assert all(torch.equal(a, b) for a, b in zip(wanted, got, strict=True))
    assert (stats.loss, stats.ratio_deviation) == (lean_stats.loss, lean_stats.ratio_deviation)
    assert stats.ratio_deviation == 0


@pytest.mark.parametrize("case", CASES)
def test_the_memory_is_that_of_the_rows_that_are_kept(small, case):
    parts = setup(small(**CASES[case]))
    recipe, numel = parts.recipe, math.prod(parts.policy.latent_shape)
    whole, lean = cell_of(parts, lean=False), cell_of(parts, lean=True)
    after = lean.for_update(recipe)
    tree = lean.groups.layout
    needs = holding.for_update(recipe, tree)
    itemsize = getattr(torch, recipe.latent_dtype).itemsize
    assert nbytes(lean.trajectory) == (needs | parts.plan(lean.groups).needs(tree)).nbytes(numel, itemsize)
    assert nbytes(after.trajectory) == needs.nbytes(numel, itemsize)
    every = sum(tree.rows(i) for i in range(6)) * itemsize + sum(tree.rows(i) for i in range(5)) * 4
    assert nbytes(whole.trajectory) == every * numel
    assert nbytes(after.trajectory) < nbytes(whole.trajectory)


def test_rows_by_hand(small):
    """Two prompts of four members, five steps, noise at steps 1 and 2 from shared starts, the final image scored."""
    recipe = small(window=(1, 3), credit="uniform", advantage="group", micro_batch=4)
    parts = setup(recipe)
    cell = cell_of(parts, lean=True).groups
    needs = holding.for_update(recipe, cell.layout)
    # x[1] is shared by the members of a prompt; x[2] is replayed and gone to; x[3] is gone to
    assert [int(mask.sum()) for mask in needs.states] == [0, 2, 8, 8, 0, 0]
    assert not any(mask.any() for mask in needs.velocities)
    scored = parts.plan(cell).needs(cell.layout)
    assert [int(mask.sum()) for mask in scored.states] == [0, 0, 0, 0, 0, 8]
    assert not any(mask.any() for mask in scored.velocities)  # the final state is its own estimate
    # one cell after the other, at most: the two cells' 2 + 8 + 8 rows, 4 + 4 of them the last cell's final ones, and
    # while that one moves 4 rows of state, 4 of its successor and 4 of velocity
    numel = math.prod(parts.policy.latent_shape)
    cut = [(c.layout, parts.plan(c)) for c in parts.cells(cell)[0]]
    assert len(cut) == 2
    assert holding.peak_bytes(recipe, cut, numel) == (18 + 4 + 12) * 4 * numel
    whole = [(cell.layout, parts.plan(cell))]
    assert holding.peak_bytes(recipe, whole, numel) == (18 + 8 + 24) * 4 * numel


def test_one_branch_keeps_its_own_step_alone(small):
    """A tempflow member is replayed at one step of five: two states of six, and those before it are shared."""
    recipe = small(**CASES["branches"], prompts_per_iteration=1, micro_batch=4)
    parts = setup(recipe)
    tree = cell_of(parts, lean=True).groups.layout
    steps = int(parts.kernel.trainable.sum())
    needs = holding.for_update(recipe, tree)
    members = tree.members
    assert members == 4 * steps
    # of each branch: its four members after its step, and before it the prompt's one shared row; where the branches
    # that have left are told from it, rows in chunks of four share its chunk
    rows = [int(mask.sum()) for mask in needs.states]
    assert rows[0] == 1
    assert all(members / steps <= n <= 2 * members / steps for n in rows[1 : steps + 1])
    assert tree.rows(steps) == members


@pytest.mark.parametrize("case", ["a window", "a reference", "GRPO-Guard", "branches"])
def test_no_row_is_kept_for_nothing(small, case):
    """Whatever one leaves out of what is kept for the update, the update asks for it."""
    parts = setup(small(**CASES[case]))
    lean = cell_of(parts, lean=True).for_update(parts.recipe)
    kept = holding.for_update(parts.recipe, lean.groups.layout)
    for name in ("states", "velocities"):
        for i, mask in enumerate(getattr(kept, name)):
            for row in mask.nonzero().flatten()[:1].tolist():
                less = [m.clone() for m in getattr(kept, name)]
                less[i][row] = False
                poorer = replace(kept, **{name: tuple(less)})
                with pytest.raises(LookupError, match="not kept"):
                    update(parts, replace(lean, trajectory=lean.trajectory.keep(poorer)))


def test_a_dropped_state_is_gone_while_the_rollout_goes_on():
    """The states behind the rows that the model was shown are dead, but for those that were to be kept."""
    kernel = kernels.make("flow_sde", grids.linear(6))
    made = groups([(4, 6)] * 2, 3, kernel.trainable, shared_noise=False)
    alive, counts = [], []

    def velocity(x, t, member):
        behind = x._base
        assert behind is not None
        alive.append(weakref.ref(behind))
        return -x

    def count(done):
        gc.collect()
        counts.append(sum(state() is not None for state in alive))

    tree = made.layout
    needs = scoring.plan(tree, kernel.grid, states=()).needs(tree)
    kept = [torch.zeros(6, dtype=torch.bool) for _ in range(7)]
    kept[2][:] = kept[6][:] = True
    start = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
    made_with = kernel, tree, lambda i, m: torch.ones(len(m), 3), 6
    whole = rollout.rollout(velocity, start.clone(), *made_with, progress=count)
    assert counts == [1, 2, 3, 4, 5, 6]
    alive.clear()
    counts.clear()
    keep = needs | Kept(tuple(kept), needs.velocities)
    lean = rollout.rollout(velocity, start.clone(), *made_with, progress=count, keep=keep)
    # x[0], which the caller holds until the call is over; x[2]; and the state that a step has just left
    assert counts == [1, 2, 2, 3, 3, 3]
    gc.collect()
    assert [i for i, state in enumerate(alive) if state() is not None] == [2]
    assert torch.equal(lean.states[2][torch.arange(6)], whole.state(2))
    assert torch.equal(lean.state(6), whole.state(6))
    for i in (0, 1, 3, 4, 5):
        with pytest.raises(LookupError):
            lean.state(i)
        assert lean.states[i].nbytes == 0


def test_cells_sampled_before_have_nothing_but_their_update_left(small, monkeypatch):
    parts = setup(small(prompts_per_iteration=4, window=(1, 3)))
    seen, living = [], []

    def spy(*args):
        gc.collect()
        living.append(sum(trajectory() is not None for trajectory in seen))
        cell = sample_cell(*args)
        seen.append(weakref.ref(cell.trajectory))
        return cell

    monkeypatch.setattr(iteration, "sample_cell", spy)
    iteration.iterate(parts, fresh(parts.policy, parts.recipe), lambda *_: None)
    assert living == [0, 0, 0, 0]


def test_an_inspection_still_sees_every_state(small):
    sampled = collect.sample(setup(small(window=(1, 3))), 1)
    assert all(len(sampled.trajectory.state(i)) == 8 for i in range(6))


def test_kept_is_a_union():
    tree = layout(torch.arange(2), torch.zeros(2, 2, dtype=torch.bool))
    a = scoring.plan(tree, grids.linear(2), states=()).needs(tree)
    b = scoring.plan(tree, grids.linear(2), "tweedie").needs(tree)
    union = a | b
    assert all(torch.equal(u, x | y) for u, x, y in zip(union.states, a.states, b.states, strict=True))
