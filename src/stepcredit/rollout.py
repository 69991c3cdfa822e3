"""Rollouts: trajectories of groups, as a tree in which what members share is computed once.

A batch holds B members. Members that start from the same noise are one state until each takes its first noisy step,
so a state of the batch is stored as *rows*, with an index from members to rows. The model is called on rows, in chunks
of a fixed size; sampling and replay walk the same chunks through the same function, so that the ratio of an unchanged
policy is 1 to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from stepcredit.interpolant import euler
from stepcredit.kernels import Kernel, Reduce
from stepcredit.storage import Kept, Rows, rows_of

Velocity = Callable[[Tensor, Tensor, Tensor], Tensor]
"""``velocity(x [n, ...], t [n], member [n]) -> [n, ...]``; ``member`` tells whose prompt each row has."""

StepNoise = Callable[[int, Tensor], Tensor]
"""``noise(step, member [n]) -> [n, ...]``: the standard Gaussian noise of those members at that step."""


@dataclass(frozen=True)
class Layout:
    """Which members share which states. State i has ``rows(i)`` rows; ``index[i]`` (long ``[B]``) finds a member's."""

    noisy: Tensor
    """bool ``[B, T]``: the steps at which a member takes noise. All others are steps of the ODE."""
    index: tuple[Tensor, ...]
    """T + 1 long tensors ``[B]``: the row of each member in each state."""
    first: tuple[Tensor, ...]
    """T + 1 long tensors ``[rows(i)]``: a member that passes through each row."""

    @property
    def members(self) -> int:
        """B, the number of trajectories."""
        return self.noisy.shape[0]

    @property
    def steps(self) -> int:
        """T, the number of steps."""
        return self.noisy.shape[1]

    def rows(self, i: int) -> int:
        """Number of distinct states at grid point i, 0..T."""
        return len(self.first[i])


def layout(root: Tensor, noisy: Tensor) -> Layout:
    """The tree of members that start from ``root`` (long ``[B]``: row of x[0]) and take noise where ``noisy`` says.

    Members of one root must share their prompt, and roots are numbered 0, 1, ... without gaps (else ValueError).
    """
    members, steps = noisy.shape
    roots = int(root.max()) + 1
    if len(root.unique()) != roots:
        raise ValueError("roots must be numbered from 0 without gaps, each used by at least one member")
    index, first = [], []
    alone = torch.zeros(members, dtype=torch.bool)
    for i in range(steps + 1):
        if i > 0:
            alone = alone | noisy[:, i - 1]
        key = torch.where(alone, roots + torch.arange(members), root)
        unique, row = key.unique(return_inverse=True)
        leader = torch.full((len(unique),), members).scatter_reduce(0, row, torch.arange(members), "amin")
        index.append(row)
        first.append(leader)
    return Layout(noisy=noisy, index=tuple(index), first=tuple(first))


@dataclass(frozen=True)
class Groups:
    """A layout together with the groups that its members form: ``count`` groups of ``size``, members in group order."""

    layout: Layout
    count: int
    size: int
    prompt: Tensor
    """long ``[B]``: position of each member's prompt in the batch."""
    member: Tensor
    """long ``[B]``: number of the member within its prompt, for keying noise."""
    root: Tensor
    """long ``[B]``: row of x[0]."""

    @property
    def trained(self) -> Tensor:
        """bool ``[count, size, T]``: the noisy steps, which are the trained ones."""
        return self.grouped(self.layout.noisy)

    @property
    def leaders(self) -> Tensor:
        """long ``[count]``: the first member of each group."""
        return torch.arange(self.count) * self.size

    def grouped(self, values: Tensor) -> Tensor:
        """Values of members ``[B, ...]`` seen as ``[count, size, ...]``."""
        return values.reshape(self.count, self.size, *values.shape[1:])

    def of_prompts(self, start: int, stop: int) -> Groups:
        """The groups of prompts start .. stop - 1 alone; prompts and members keep the numbers that key their noise."""
        own = (self.prompt >= start) & (self.prompt < stop)
        root = self.root[own] - self.root[own].min()
        return Groups(
            layout=layout(root, self.layout.noisy[own]),
            count=int(own.sum()) // self.size,
            size=self.size,
            prompt=self.prompt[own],
            member=self.member[own],
            root=root,
        )


def groups(
    windows: Sequence[tuple[int, int]],
    size: int,
    trainable: Tensor,
    shared_noise: bool,
    branch: bool = False,
) -> Groups:
    """Groups of ``size`` members, one per prompt, noisy at the trainable steps of the prompt's window ``[w0, w1)``.

    ``shared_noise``: all members of a prompt start from one x[0]. ``branch`` (TempFlow-GRPO): one group for each
    trainable step of the window, noisy at that step alone, all of a prompt's groups from one x[0]. ``trainable`` is the
    kernel's, bool ``[T]``. Raises ValueError for a size below 2, a window outside the grid, a window without a
    trainable step, prompts whose windows give different numbers of branches, and branching without shared noise.
    """
    steps = len(trainable)
    if size < 2:
        raise ValueError(f"group_size must be at least 2, not {size}: a member is judged against its group")
    if branch and not shared_noise:
        raise ValueError("branching needs shared_noise: true, since the branches of a prompt leave one ODE path")
    noisy_of: list[Tensor] = []
    for w0, w1 in windows:
        noisy_of.append(_window_steps(w0, w1, trainable))
    if branch:
        counts = {int(noisy.sum()) for noisy in noisy_of}
        if len(counts) > 1:
            raise ValueError(f"with branching every window must hold equally many trainable steps, not {counts}")
    per_prompt = [torch.eye(steps, dtype=torch.bool)[noisy] if branch else noisy[None] for noisy in noisy_of]
    noisy = torch.cat(per_prompt).repeat_interleave(size, 0)
    branches = len(per_prompt[0])
    prompt = torch.arange(len(windows)).repeat_interleave(branches * size)
    return Groups(
        layout=layout(prompt if shared_noise else torch.arange(len(prompt)), noisy),
        count=len(windows) * branches,
        size=size,
        prompt=prompt,
        member=torch.arange(branches * size).repeat(len(windows)),
        root=prompt if shared_noise else torch.arange(len(prompt)),
    )


def _window_steps(w0: int, w1: int, trainable: Tensor) -> Tensor:
    steps = len(trainable)
    if not 0 <= w0 < w1 <= steps:
        raise ValueError(
            f"window [{w0}, {w1}) must lie within the {steps} steps of the grid: 0 <= start < stop <= {steps}"
        )
    inside = torch.zeros(steps, dtype=torch.bool)
    inside[w0:w1] = True
    if not bool((inside & trainable).any()):
        usable = trainable.nonzero().flatten().tolist()
        raise ValueError(f"window [{w0}, {w1}) holds no trainable step; with this kernel and level those are {usable}")
    return inside & trainable


@dataclass(frozen=True)
class Chunk:
    """Rows of one state that go through the model together, and the members that take noise there."""

    step: int
    rows: slice
    first: Tensor
    """long ``[n]``: a member of each row."""
    members: Tensor
    """long ``[m]``: members that pass through these rows and take noise at this step."""
    local: Tensor
    """long ``[m]``: their row within the chunk."""


def chunks(tree: Layout, i: int, micro_batch: int) -> Iterator[Chunk]:
    """State i cut into chunks of at most ``micro_batch`` rows: the one geometry of sampling and replay."""
    noisy = tree.noisy[:, i]
    for start in range(0, tree.rows(i), micro_batch):
        stop = min(start + micro_batch, tree.rows(i))
        row = tree.index[i]
        members = (noisy & (row >= start) & (row < stop)).nonzero().flatten()
        yield Chunk(i, slice(start, stop), tree.first[i][start:stop], members, row[members] - start)


class Replay(NamedTuple):
    """A chunk's noisy members under the model as it is now: ``[m]`` and ``[m, ...]``."""

    log_prob: Tensor
    v: Tensor
    x_t: Tensor
    x_next: Tensor


@dataclass(frozen=True)
class Trajectory:
    """Sampled trajectories of a batch. Latents have any shape; tensors of states and velocities are rows.

    Rows that were not to be kept are gone, and asking for one is a LookupError.
    """

    kernel: Kernel
    layout: Layout
    states: tuple[Tensor | Rows, ...]
    """T + 1 tensors ``[rows(i), ...]`` in the storage dtype: x[i]."""
    velocities: tuple[Tensor | Rows, ...]
    """T tensors ``[rows(i), ...]``, float32: the velocities that moved the states."""
    log_prob: Tensor
    """float32 ``[B, T]``: log-prob of each noisy step as sampled, 0 elsewhere."""
    retained: dict[tuple[int, int], Replay] = field(default_factory=dict)
    """By step and first row, the chunks that :func:`replay` would evaluate again, with the graphs of the rollout."""

    def state(self, i: int) -> Tensor:
        """x[i] of every member, ``[B, ...]``."""
        return self.states[i][self.layout.index[i]]

    def velocity(self, i: int) -> Tensor:
        """v[i] of every member, ``[B, ...]``."""
        return self.velocities[i][self.layout.index[i]]

    def keep(self, rows: Kept) -> Trajectory:
        """The trajectories with these rows alone. Raises LookupError for rows that were dropped before."""
        states = (rows_of(x, mask) for x, mask in zip(self.states, rows.states, strict=True))
        velocities = (rows_of(v, mask) for v, mask in zip(self.velocities, rows.velocities, strict=True))
        return replace(self, states=tuple(states), velocities=tuple(velocities))


@torch.no_grad()
def rollout(
    velocity: Velocity,
    x_init: Tensor,
    kernel: Kernel,
    tree: Layout,
    noise: StepNoise,
    micro_batch: int,
    reduce: Reduce = "mean",
    progress: Callable[[int], None] | None = None,
    retain: bool = False,
    keep: Kept | None = None,
) -> Trajectory:
    """Sample the trajectories of a layout from ``x_init`` ``[rows(0), ...]``, whose dtype is the storage dtype.

    Noisy steps follow the kernel, all others the ODE. Log-probs are those of the states as stored. ``progress`` is
    called with the number of steps done. ``retain`` keeps the graphs of the noisy chunks, so that the first update
    needs no second evaluation of them; memory grows with their number. ``keep`` names the rows of states and velocities
    that will be asked for; all others are dropped as soon as the next state is there. Raises FloatingPointError, naming
    the step, if a velocity is not finite. Source of ``retain``: LeanGRPO.
    """
    x = x_init
    states: list[Tensor | Rows] = []
    velocities: list[Tensor | Rows] = []
    retained = {}
    log_prob = torch.zeros(tree.members, tree.steps)
    for i in range(tree.steps):
        v_rows = []
        x_next = x.new_empty(tree.rows(i + 1), *x.shape[1:])
        for chunk in chunks(tree, i, micro_batch):
            x_t = x[chunk.rows]
            with torch.set_grad_enabled(retain and len(chunk.members) > 0):
                v_graph = evaluate(velocity, x_t, kernel.grid[i], chunk.first, f"step {i}")
            v = v_graph.detach()
            v_rows.append(v)
            moved = euler(x_t, v, kernel.grid[i], kernel.grid[i + 1]).to(x.dtype)
            calm = (~tree.noisy[:, i] & torch.isin(tree.index[i], _range(chunk.rows))).nonzero().flatten()
            x_next[tree.index[i + 1][calm]] = moved[tree.index[i][calm] - chunk.rows.start]
            if len(chunk.members):
                x_m, v_m = x_t[chunk.local], v[chunk.local]
                stored = kernel.step(x_m, v_m, i, noise(i, chunk.members)).to(x.dtype)
                x_next[tree.index[i + 1][chunk.members]] = stored
                with torch.set_grad_enabled(retain):
                    v_m = v_graph[chunk.local]
                    logp = kernel.log_prob(stored, x_m, v_m, i, reduce)
                log_prob[chunk.members, i] = logp.detach().cpu().float()
                if retain:
                    retained[i, chunk.rows.start] = Replay(logp, v_m, x_m, stored)
        v_all = torch.cat(v_rows)
        states.append(x if keep is None else rows_of(x, keep.states[i]))
        velocities.append(v_all if keep is None else rows_of(v_all, keep.velocities[i]))
        x = x_next
        if progress is not None:
            progress(i + 1)
    states.append(x if keep is None else rows_of(x, keep.states[-1]))
    return Trajectory(kernel, tree, tuple(states), tuple(velocities), log_prob, retained)


def evaluate(velocity: Velocity, x: Tensor, t: float | Tensor, member: Tensor, where: str) -> Tensor:
    """One model call on rows ``x`` ``[n, ...]`` at time t (one, or ``[n]``); float32 at least, checked to be finite."""
    times = torch.as_tensor(t, dtype=torch.float32, device=x.device).expand(len(x))
    v = velocity(x, times, member)
    v = v.to(torch.promote_types(v.dtype, torch.float32))
    if not bool(torch.isfinite(v).all()):
        row = int((~torch.isfinite(v.flatten(1))).any(1).nonzero()[0])
        raise FloatingPointError(
            f"the velocity is not finite at {where} (t = {float(times[row]):.4f}, member {int(member[row])}); "
            "lower the learning rate, or use a wider model dtype"
        )
    return v


def replay(velocity: Velocity, trajectory: Trajectory, chunk: Chunk, reduce: Reduce = "mean") -> Replay:
    """Evaluate a chunk again, with gradients; or take what the rollout retained of it, once, for as long as the model
    is unchanged.

    The model sees the very batch that sampled, so for an unchanged model the log-probs equal ``trajectory.log_prob``
    bitwise, and so do their gradients those that were retained. Velocities are float32, states in the storage dtype.
    """
    i, tree = chunk.step, trajectory.layout
    retained = trajectory.retained.pop((i, chunk.rows.start), None)
    if retained is not None:
        return retained
    rows = trajectory.states[i][chunk.rows]
    v = evaluate(velocity, rows, trajectory.kernel.grid[i], chunk.first, f"step {i} of the replay")
    x_t, v_m = rows[chunk.local], v[chunk.local]
    x_next = trajectory.states[i + 1][tree.index[i + 1][chunk.members]]
    return Replay(trajectory.kernel.log_prob(x_next, x_t, v_m, i, reduce), v_m, x_t, x_next)


def _range(rows: slice) -> Tensor:
    return torch.arange(rows.start, rows.stop)
