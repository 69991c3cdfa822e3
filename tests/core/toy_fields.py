"""Velocities for the tests of rollout and scoring, and trajectories computed one member at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from stepcredit import interpolant, noise
from stepcredit.kernels import Kernel
from stepcredit.rollout import Groups

SHAPE = (2, 3)


@dataclass
class Elementwise:
    """A velocity of exact IEEE operations on each element, so that batching cannot change a bit; counts its rows."""

    prompt: Tensor
    """long ``[B]``: prompt of each member; another prompt is another field."""
    evaluations: int = 0
    calls: list[int] = field(default_factory=list)

    def __call__(self, x: Tensor, t: Tensor, member: Tensor) -> Tensor:
        assert x.shape[0] == t.shape[0] == member.shape[0]
        self.evaluations += len(x)
        self.calls.append(len(x))
        return self.of(x, t, self.prompt[member])

    @staticmethod
    def of(x: Tensor, t: Tensor, prompt: Tensor) -> Tensor:
        x = x.float()
        p = (prompt.float() / 4).reshape(-1, *[1] * (x.ndim - 1))
        t = t.reshape(-1, *[1] * (x.ndim - 1))
        return x * (0.5 + p) - p + t * x / (1 + x * x)


def initial(groups: Groups, names: list[int], iteration: int = 1, dtype: torch.dtype = torch.float32) -> Tensor:
    """x[0] of every root; ``names`` are the prompts' numbers in the data set, which the noise is keyed by."""
    rows = []
    for leader in groups.layout.first[0].tolist():
        name = names[int(groups.prompt[leader])]
        shared = bool((groups.root == groups.root[leader]).sum() > 1)
        rows.append(noise.normal(SHAPE, "initial", 0, iteration, name, 0 if shared else int(groups.member[leader])))
    return torch.stack(rows).to(dtype)


def step_noise(groups: Groups, names: list[int], iteration: int = 1) -> Callable[[int, Tensor], Tensor]:
    """Noise keyed by (seed, iteration, prompt, member, step)."""

    def draw(step: int, members: Tensor) -> Tensor:
        keys = [(names[int(groups.prompt[b])], int(groups.member[b])) for b in members]
        return torch.stack([noise.normal(SHAPE, "step", 0, iteration, name, member, step) for name, member in keys])

    return draw


def one_by_one(kernel: Kernel, groups: Groups, names: list[int], iteration: int = 1) -> Tensor:
    """States ``[B, T + 1, ...]`` of every member on its own: no sharing, no batching, a rollout read plainly."""
    x_init, draw = initial(groups, names, iteration), step_noise(groups, names, iteration)
    t, members = kernel.grid.tolist(), []
    for b in range(groups.layout.members):
        x = x_init[groups.root[b]][None]
        states = [x]
        for i in range(kernel.steps):
            v = Elementwise.of(x, torch.tensor([t[i]]), groups.prompt[b, None])
            if groups.layout.noisy[b, i]:
                x = kernel.step(x, v, i, draw(i, torch.tensor([b])))
            else:
                x = interpolant.euler(x, v, t[i], t[i + 1])
            states.append(x)
        members.append(torch.cat(states))
    return torch.stack(members)
