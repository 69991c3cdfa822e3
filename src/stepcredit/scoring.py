"""Scoring: clean estimates of the states along a trajectory, and the rewards they earn.

``R[i]`` is the reward of the clean estimate of x[i]; ``R[T]`` is that of the final image. What has to be computed is
known from the layout alone, so it is planned first: states that members share are estimated once; where a state is
carried on by the ODE to the same end as its successor, it has the successor's estimate; and where no noise follows at
all, the final image is the exact estimate, whatever was asked for.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from stepcredit import storage
from stepcredit.interpolant import euler
from stepcredit.rollout import Layout, Trajectory, Velocity, evaluate
from stepcredit.storage import Kept

Estimate = Literal["tweedie", "substeps", "full"]
Spacing = Literal["grid", "linear"]


@dataclass(frozen=True)
class ScoringPlan:
    """Which estimates a batch needs: ``count`` of them, each a row of a state with its times down to 0."""

    steps: int
    state: Tensor
    """long ``[count]``: the grid point that an estimate starts from, T for final images."""
    row: Tensor
    """long ``[count]``: its row there."""
    member: Tensor
    """long ``[count]``: a member of that row, for its prompt."""
    times: tuple[Tensor, ...]
    """For every grid point 0..T the times of its completion, float64, from grid[i] to 0; one entry at T."""
    estimate: Tensor
    """long ``[B, T + 1]``: number of the estimate of each member's state, -1 where the state is not scored."""

    @property
    def count(self) -> int:
        """Number of images to decode and score."""
        return len(self.state)

    @property
    def evaluations(self) -> int:
        """Model evaluations beyond the rollout's own: the first substep of each estimate is free."""
        return int(sum(max(len(self.times[i]) - 2, 0) for i in self.state.tolist()))

    def per_state(self, values: Tensor) -> Tensor:
        """Values of estimates ``[count]`` laid out as ``R`` ``[B, T + 1]``; NaN where a state is not scored."""
        spread = values[self.estimate.clamp(min=0)]
        return torch.where(self.estimate >= 0, spread, torch.nan)

    def needs(self, tree: Layout) -> Kept:
        """The rows of states and velocities that the estimates start from."""
        kept = storage.nothing(tuple(tree.rows(i) for i in range(tree.steps + 1)))
        for i, row in _by_state(self):
            kept.states[i][row] = True
            if i < self.steps:
                kept.velocities[i][row] = True
        return kept


def plan(
    tree: Layout,
    grid: Tensor,
    estimate: Estimate = "tweedie",
    substeps: int = 5,
    spacing: Spacing = "grid",
    states: Collection[int] | None = None,
) -> ScoringPlan:
    """Plan the estimates of a layout's states on its grid ``[T + 1]``.

    ``tweedie``: ``x0_hat`` from the rollout's velocity, free. ``substeps``: that many Euler steps of the ODE to time 0;
    with spacing ``grid`` they end on grid points and are never more than the remaining steps, with ``linear`` they
    are equally spaced in time and always ``substeps`` (Stepwise-Flow-GRPO's T'). ``full``: the remaining grid steps
    (TP-GRPO). ``states``: the grid points to score, all by default; T is always among them. Raises ValueError for
    fewer than 1 substep or a state outside the grid.
    """
    steps = tree.steps
    wanted = set(range(steps + 1)) if states is None else {*states, steps}
    if not all(0 <= i <= steps for i in wanted):
        raise ValueError(f"states to score must lie in 0..{steps}, not {sorted(wanted)}")
    times = tuple(_completion(grid, i, estimate, substeps, spacing) for i in range(steps + 1))

    of_state = torch.full((tree.members, steps + 1), -1)
    first_row, state, row, member = 0, [], [], []
    for i in sorted(wanted, reverse=True):
        own = torch.full((tree.rows(i),), -1)
        if i < steps:
            ended = (~tree.noisy[:, i:].any(1)).nonzero().flatten()
            own[tree.index[i][ended]] = of_state[ended, steps]
        follows = i < steps and i + 1 in wanted and torch.equal(times[i], grid[i:])
        if follows:
            # the ODE leads through the successor's state on the same grid points: one estimate for both
            calm = (~tree.noisy[:, i]).nonzero().flatten()
            own[tree.index[i][calm]] = of_state[calm, i + 1]
        new = (own < 0).nonzero().flatten()
        own[new] = first_row + torch.arange(len(new))
        first_row += len(new)
        of_state[:, i] = own[tree.index[i]]
        state.append(torch.full((len(new),), i))
        row.append(new)
        member.append(tree.first[i][new])
    return ScoringPlan(steps, torch.cat(state), torch.cat(row), torch.cat(member), times, of_state)


@torch.no_grad()
def clean_estimates(trajectory: Trajectory, planned: ScoringPlan, velocity: Velocity, micro_batch: int) -> Tensor:
    """The planned estimates, ``[count, ...]`` float32: states of all grid points and members advance as one batch."""
    x, done = torch.empty(0), 0
    for i, row in _by_state(planned):
        some = trajectory.states[i][row].float()
        if i < planned.steps:
            some = euler(some, trajectory.velocities[i][row], planned.times[i][0], planned.times[i][1])
        if done == 0:
            x = torch.empty(planned.count, *some.shape[1:], device=some.device)
        x[done : done + len(row)] = some
        done += len(row)
    lengths = torch.tensor([len(t) for t in planned.times])[planned.state]
    for k in range(1, int(lengths.max()) - 1):
        active = (lengths > k + 1).nonzero().flatten()
        now = torch.stack([planned.times[i][k] for i in planned.state[active].tolist()])
        after = torch.stack([planned.times[i][k + 1] for i in planned.state[active].tolist()])
        for start in range(0, len(active), micro_batch):
            part = slice(start, start + micro_batch)
            some = active[part]
            v = evaluate(velocity, x[some], now[part], planned.member[some], f"substep {k} of a clean estimate")
            x[some] = euler(x[some], v, now[part], after[part])
    return x


def _by_state(planned: ScoringPlan) -> list[tuple[int, Tensor]]:
    values, counts = planned.state.unique_consecutive(return_counts=True)
    return list(zip(values.tolist(), planned.row.split(counts.tolist()), strict=True))


def _completion(grid: Tensor, i: int, estimate: Estimate, substeps: int, spacing: Spacing) -> Tensor:
    """Times of the completion of state i, from grid[i] to 0."""
    remaining = len(grid) - 1 - i
    if substeps < 1:
        raise ValueError(f"substeps must be at least 1, not {substeps}")
    if remaining == 0 or estimate == "full":
        return grid[i:]
    n = 1 if estimate == "tweedie" else substeps
    if spacing == "linear" and estimate == "substeps":
        return grid[i] * torch.linspace(1, 0, n + 1, dtype=grid.dtype)
    n = min(n, remaining)
    return grid[i + (torch.arange(n + 1) * remaining / n).round().long()]
