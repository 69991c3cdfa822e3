"""Clean estimates along trajectories, and the ledger of what they cost."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from toy_fields import Elementwise, initial, one_by_one, step_noise

from stepcredit import grids, interpolant, kernels
from stepcredit.kernels import Kernel
from stepcredit.ledger import ledger
from stepcredit.rollout import Groups, chunks, groups, layout, replay, rollout
from stepcredit.scoring import ScoringPlan, clean_estimates, plan

GRID = grids.shifted(10)
NAMES = [3, 11]
ESTIMATES = [
    {"estimate": "tweedie"},
    {"estimate": "substeps", "substeps": 5},
    {"estimate": "substeps", "substeps": 2},
    {"estimate": "substeps", "substeps": 3, "spacing": "linear"},
    {"estimate": "full"},
    {"estimate": "full", "states": []},
    {"estimate": "substeps", "substeps": 5, "states": [2, 3, 4]},
]
SETTINGS = {
    "flow_sde, shared": ("flow_sde", [(0, 10)] * 2, True, False),
    "flow_sde, independent": ("flow_sde", [(0, 10)] * 2, False, False),
    "ddim, shared": ("ddim", [(0, 10)] * 2, True, False),
    "cps, window of 3": ("cps", [(2, 5)] * 2, True, False),
    "cps, independent, two windows": ("cps", [(2, 5), (6, 8)], False, False),
    "branches": ("flow_sde", [(0, 10)] * 2, True, True),
}


def _setting(name: str, size: int = 3) -> tuple[Kernel, Groups]:
    kernel_name, windows, shared, branch = SETTINGS[name]
    kernel = kernels.make(kernel_name, GRID)
    return kernel, groups(windows, size, kernel.trainable, shared, branch)


def _scored(kernel: Kernel, made: Groups, planned: ScoringPlan, micro_batch: int = 7) -> tuple[Tensor, int, int]:
    """Estimates ``[B, T + 1, ...]`` (NaN where not scored), evaluations of the rollout, and of the scoring."""
    velocity = Elementwise(made.prompt)
    trajectory = rollout(velocity, initial(made, NAMES), kernel, made.layout, step_noise(made, NAMES), micro_batch)
    sampling = velocity.evaluations
    clean = clean_estimates(trajectory, planned, velocity, micro_batch)
    assert len(clean) == planned.count
    spread = clean[planned.estimate.clamp(min=0)]
    missing = (planned.estimate < 0).reshape(*planned.estimate.shape, 1, 1)
    return torch.where(missing, torch.nan, spread), sampling, velocity.evaluations - sampling


def _complete(x: Tensor, times: list[float], prompt: Tensor) -> Tensor:
    """The ODE from one state through the given times, one member on its own."""
    for s, s_next in itertools.pairwise(times):
        x = interpolant.euler(x, Elementwise.of(x, torch.tensor([s]), prompt), s, s_next)
    return x


def _schedule(i: int, estimate: str, substeps: int = 5, spacing: str = "grid", states: object = None) -> list[float]:
    t = GRID.tolist()
    if i == 10:
        return [0.0]
    if estimate == "full":
        return t[i:]
    if estimate == "tweedie":
        return [t[i], 0.0]
    if spacing == "linear":
        return [*(t[i] * (1 - k / substeps) for k in range(substeps)), 0.0]
    n = min(substeps, 10 - i)
    return [t[i + round(k * (10 - i) / n)] for k in range(n + 1)]


def _noise_is_over(made: Groups, b: int, i: int) -> bool:
    """Whether some member in this state meets no more noise: its final image is then the state's completion."""
    noisy = made.layout.noisy
    alike = [
        c
        for c in range(made.layout.members)
        if c == b or (made.root[c] == made.root[b] and not noisy[[b, c], :i].any())
    ]
    return any(not noisy[c, i:].any() for c in alike)


# --- what is estimated --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("options", ESTIMATES, ids=str)
def test_every_estimate_is_the_ode_of_its_own_state(setting: str, options: dict) -> None:
    kernel, made = _setting(setting)
    planned = plan(made.layout, GRID, **options)
    clean, _, _ = _scored(kernel, made, planned)
    states = one_by_one(kernel, made, NAMES)
    wanted = {*options.get("states", range(11)), 10}
    for b in range(made.layout.members):
        for i in range(11):
            if i not in wanted:
                assert clean[b, i].isnan().all()
                continue
            times = GRID.tolist()[i:] if _noise_is_over(made, b, i) else _schedule(i, **options)
            expected = _complete(states[b, i][None], times, made.prompt[b, None])[0]
            # equally spaced times are one rounding away from ours
            if options.get("spacing") == "linear":
                torch.testing.assert_close(clean[b, i], expected)
            else:
                assert torch.equal(clean[b, i], expected)


def test_tweedie_is_the_clean_estimate_of_the_interpolant() -> None:
    kernel, made = _setting("flow_sde, shared")
    clean, _, extra = _scored(kernel, made, plan(made.layout, GRID, "tweedie"))
    states = one_by_one(kernel, made, NAMES)
    for i in range(10):
        v = Elementwise.of(states[:, i], torch.full((6,), float(GRID[i])), made.prompt)
        torch.testing.assert_close(clean[:, i], interpolant.x0_hat(states[:, i], v, float(GRID[i])))
    assert extra == 0


def test_full_completions_are_ode_sampling_from_the_state() -> None:
    # from x[0] on, the full completion is the image that plain ODE sampling makes of the same noise
    kernel, made = _setting("flow_sde, shared")
    clean, _, _ = _scored(kernel, made, plan(made.layout, GRID, "full"))
    ode = kernels.make("ode", GRID)
    tree = layout(made.root, torch.zeros(6, 10, dtype=torch.bool))
    sampled = rollout(Elementwise(made.prompt), initial(made, NAMES), ode, tree, step_noise(made, NAMES), 4)
    assert torch.equal(clean[:, 0], sampled.state(10))


@pytest.mark.parametrize("options", ESTIMATES, ids=str)
@pytest.mark.parametrize("micro_batch", [1, 4, 1000])
def test_micro_batching_changes_nothing(options: dict, micro_batch: int) -> None:
    kernel, made = _setting("ddim, shared")
    planned = plan(made.layout, GRID, **options)
    whole, *counts = _scored(kernel, made, planned, micro_batch=7)
    parts, *counts_of_parts = _scored(kernel, made, planned, micro_batch=micro_batch)
    torch.testing.assert_close(parts, whole, rtol=0, atol=0, equal_nan=True)
    assert counts == counts_of_parts


# --- times --------------------------------------------------------------------------------------------------------


def test_substeps_end_on_grid_points() -> None:
    _, made = _setting("flow_sde, shared")
    times = plan(made.layout, GRID, "substeps", substeps=5).times
    assert times[0].tolist() == GRID[[0, 2, 4, 6, 8, 10]].tolist()
    assert times[5].tolist() == GRID[5:].tolist()
    assert times[8].tolist() == GRID[8:].tolist()
    assert times[10].tolist() == [0.0]
    linear = plan(made.layout, GRID, "substeps", substeps=5, spacing="linear").times
    for i in (0, 4, 9):
        assert linear[i].tolist() == pytest.approx([float(GRID[i]) * k / 5 for k in (5, 4, 3, 2, 1, 0)], abs=1e-15)


@given(st.integers(1, 30), st.integers(1, 40))
def test_substeps_are_never_more_than_the_steps_left(steps: int, substeps: int) -> None:
    grid = grids.shifted(steps)
    made = groups([(0, steps)], 2, torch.ones(steps, dtype=torch.bool), shared_noise=True)
    for i, times in enumerate(plan(made.layout, grid, "substeps", substeps=substeps).times):
        assert len(times) - 1 == min(substeps, steps - i)
        assert times[0] == grid[i]
        assert times[-1] == 0
        assert (times.diff() < 0).all()
        assert torch.isin(times, grid).all()


def test_as_many_substeps_as_steps_are_a_full_completion() -> None:
    kernel, made = _setting("cps, window of 3")
    many = plan(made.layout, GRID, "substeps", substeps=10)
    full = plan(made.layout, GRID, "full")
    assert torch.equal(_scored(kernel, made, many)[0], _scored(kernel, made, full)[0])
    assert many.evaluations == full.evaluations


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"estimate": "substeps", "substeps": 0}, "substeps"),
        ({"states": [3, 11]}, "states"),
        ({"states": [-1]}, "states"),
    ],
)
def test_impossible_plans_are_refused(options: dict, message: str) -> None:
    _, made = _setting("ddim, shared")
    with pytest.raises(ValueError, match=message):
        plan(made.layout, GRID, **options)


# --- where the rewards go -----------------------------------------------------------------------------------------


def test_rewards_reach_their_states() -> None:
    kernel, made = _setting("ddim, shared")
    planned = plan(made.layout, GRID, "full")
    clean, _, _ = _scored(kernel, made, planned)
    # any reward of the estimates: here their first number
    values = torch.full((planned.count,), torch.nan)
    values[planned.estimate.flatten()] = clean[..., 0, 0].flatten()
    assert torch.equal(planned.per_state(values), clean[..., 0, 0])


def test_the_member_of_an_estimate_is_one_that_passes_there() -> None:
    for setting in SETTINGS:
        _, made = _setting(setting)
        planned = plan(made.layout, GRID, "tweedie")
        for k in range(planned.count):
            i, row, b = int(planned.state[k]), int(planned.row[k]), int(planned.member[k])
            assert int(made.layout.index[i][b]) == row
            assert int(planned.estimate[b, i]) == k


def test_states_that_are_not_scored_are_nan() -> None:
    _, made = _setting("flow_sde, shared")
    planned = plan(made.layout, GRID, "substeps", states=[4])
    R = planned.per_state(torch.arange(planned.count).float())
    assert R.isnan().all(0).tolist() == [i not in (4, 10) for i in range(11)]
    assert not R[:, [4, 10]].isnan().any()


# --- the ledger ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("options", ESTIMATES, ids=str)
def test_the_ledger_counts_what_is_done(setting: str, options: dict) -> None:
    kernel, made = _setting(setting)
    planned = plan(made.layout, GRID, **options)
    cost = ledger(made.layout, planned)
    clean, sampling, scoring = _scored(kernel, made, planned)
    assert (cost.rollout_evaluations, cost.scoring_evaluations) == (sampling, scoring)
    assert cost.model_evaluations == sampling + scoring
    assert cost.scoring_evaluations == planned.evaluations
    assert cost.trajectories == made.layout.members
    # no image is decoded or scored twice, and every estimate is somebody's
    assert cost.decodes == cost.reward_calls == planned.count
    assert planned.estimate[planned.estimate >= 0].unique().tolist() == list(range(planned.count))
    wanted = [i for i in range(11) if i in {*options.get("states", range(11)), 10}]
    assert planned.count <= len(clean[:, wanted].flatten(0, 1))


@pytest.mark.parametrize("micro_batch", [1, 4])
@pytest.mark.parametrize("setting", SETTINGS)
def test_the_ledger_counts_the_training_passes(setting: str, micro_batch: int) -> None:
    kernel, made = _setting(setting)
    velocity = Elementwise(made.prompt)
    trajectory = rollout(velocity, initial(made, NAMES), kernel, made.layout, step_noise(made, NAMES), 4)
    velocity.evaluations = 0
    for i in range(10):
        for chunk in chunks(made.layout, i, micro_batch):
            if len(chunk.members):
                replay(velocity, trajectory, chunk)
    planned = plan(made.layout, GRID)
    assert ledger(made.layout, planned, micro_batch).trained_evaluations == velocity.evaluations


@pytest.mark.parametrize(
    ("options", "evaluations", "decodes"),
    [
        ({"states": []}, 10, 1),  # Flow-GRPO: the rollout alone
        ({"estimate": "tweedie"}, 10, 11),  # free: the rollout's own velocities
        # 5 substeps, the first free, capped by what is left: 4 for each of x[0..5], then 3 2 1 0
        ({"estimate": "substeps", "substeps": 5}, 10 + 6 * 4 + 3 + 2 + 1 + 0, 11),
        # TP-GRPO: 9 + 8 + ... + 0
        ({"estimate": "full"}, 10 + 45, 11),
        # Stepwise to the letter: 5 substeps for each of ten states would be 50 (60 in all), of which 10 are free
        ({"estimate": "substeps", "substeps": 5, "spacing": "linear"}, 60 - 10, 11),
    ],
)
def test_published_procedures_without_sharing(options: dict, evaluations: int, decodes: int) -> None:
    kernel = kernels.make("flow_sde", GRID)
    made = groups([(0, 10)] * 3, 4, kernel.trainable, shared_noise=False)
    cost = ledger(made.layout, plan(made.layout, GRID, **options)).per_trajectory()
    assert cost["model_evaluations_per_trajectory"] == evaluations
    assert cost["decodes_per_trajectory"] == decodes
    assert cost["reward_calls_per_trajectory"] == decodes
    assert cost["trained_evaluations_per_trajectory"] == 10


def test_tempflow_costs_280_a_root() -> None:
    # the path's 10, and 6 members for each of 10 branches with 9, 8, ..., 0 steps of their own
    kernel = kernels.make("flow_sde", GRID)
    made = groups([(0, 10)] * 2, 6, kernel.trainable, shared_noise=True, branch=True)
    cost = ledger(made.layout, plan(made.layout, GRID, states=[]))
    assert cost.model_evaluations == 2 * (10 + 6 * 45)
    assert cost.decodes == 2 * 60
    assert cost.trained_evaluations == 2 * 10  # members of a branch start their noisy step from one state


@pytest.mark.parametrize(
    ("name", "window", "options", "rollout_rows", "scoring", "decodes"),
    # one prompt, four members, shared x[0]
    [
        # flow_sde: x[0] once, then four each. Substeps: 4 for x[0], 4 x (5 x 4 + 3 + 2 + 1)
        ("flow_sde", (0, 10), {"estimate": "substeps"}, 1 + 9 * 4, 4 + 4 * 26, 1 + 10 * 4),
        ("flow_sde", (0, 10), {"estimate": "full"}, 1 + 9 * 4, 9 + 4 * 36, 1 + 10 * 4),
        # ddim: x[0] and x[1] once. Substeps: 4 + 4 for them, 4 x (4 x 4 + 3 + 2 + 1); x[9] ends in x[10] by the ODE
        ("ddim", (0, 10), {"estimate": "substeps"}, 2 + 8 * 4, 8 + 4 * 22, 2 + 8 * 4),
        # full: x[0]'s completion runs through x[1], so it is x[1]'s; likewise x[9]'s is the final image
        ("ddim", (0, 10), {"estimate": "full"}, 2 + 8 * 4, 8 + 4 * 28, 1 + 8 * 4),
        ("ddim", (0, 10), {"estimate": "tweedie"}, 2 + 8 * 4, 0, 2 + 8 * 4),
        # window [4, 6): x[0..4] once, and all of them complete to one image; x[5] four times; after it the ODE
        ("flow_sde", (4, 6), {"estimate": "full"}, 5 + 5 * 4, 5 + 4 * 4, 1 + 4 + 4),
        ("flow_sde", (4, 6), {"states": []}, 5 + 5 * 4, 0, 4),
    ],
)
def test_sharing_by_hand(
    name: str, window: tuple[int, int], options: dict, rollout_rows: int, scoring: int, decodes: int
) -> None:
    kernel = kernels.make(name, GRID)
    made = groups([window], 4, kernel.trainable, shared_noise=True)
    cost = ledger(made.layout, plan(made.layout, GRID, **options))
    assert (cost.rollout_evaluations, cost.scoring_evaluations, cost.decodes) == (rollout_rows, scoring, decodes)
