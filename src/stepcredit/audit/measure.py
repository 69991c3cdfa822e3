"""The audit's loop: rollouts of one prompt after another, and the gradients of every scheme on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from stepcredit import credit
from stepcredit.audit.estimators import Array
from stepcredit.audit.gradients import Sketch, member_gradients
from stepcredit.audit.schemes import Shape, reference_advantage
from stepcredit.training.collect import sample, scored
from stepcredit.training.recipe import Recipe

BLOCKS = 16
"""Parts into which the groups are dealt for what is kept by step."""


@dataclass
class Sums:
    """What an audit keeps of a shape: gradients by group and, in blocks of groups, by step. K + 1 rows: the last is the
    reference's.
    """

    totals: list[Tensor] = field(default_factory=list)
    """A float32 ``[K + 1, D]`` of every group: the sum over its steps."""
    blocks: Tensor | None = None
    """float32 ``[BLOCKS, K + 1, T, D]``: sums over the groups of a block."""
    powers: Array | None = None
    """``[K + 1, T]``: sums over the groups of squared norms."""
    spreads: list[Array] = field(default_factory=list)
    """``[estimates, T]`` of every group: deviation of the gains within it, NaN where unknown."""
    silent: Array | None = None
    """``[K]``: groups in which a scheme gives no member an advantage."""
    rewards: list[float] = field(default_factory=list)
    """Mean final reward of every group."""

    @property
    def groups(self) -> int:
        """Groups (prompts) measured so far."""
        return len(self.totals)

    def gradients(self, k: int) -> Array:
        """Gradients of a scheme (-1: of the reference) by group, float64 ``[N, D]``."""
        return torch.stack([total[k] for total in self.totals]).double().numpy()

    def by_block(self, k: int, step: int | None = None) -> Array:
        """The same by block, at a step or over all steps, ``[used blocks, D]``."""
        assert self.blocks is not None
        rows = self.blocks[: min(self.groups, BLOCKS), k]
        return (rows.sum(1) if step is None else rows[:, step]).double().numpy()


def measure(
    shapes: Sequence[Shape],
    groups: int,
    dimensions: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
    stopped: Callable[[], bool] = lambda: False,
) -> list[Sums]:
    """Gradients of the schemes of every shape on ``groups`` prompts, each with a rollout of its own.

    Prompt and noise of a group are the same in all shapes. ``dimensions``: size of the sketch of a gradient, see
    :class:`stepcredit.audit.gradients.Sketch`. ``progress(done, total)`` is called after each group; when ``stopped()``
    is true, the groups done so far are what is returned. Raises what a rollout and its scoring raise.
    """
    policy = shapes[0].schemes[0].parts.policy
    size = sum(parameter.numel() for _, parameter in policy.named_parameters())
    sketch = Sketch(size, dimensions, policy.device)
    results = [Sums() for _ in shapes]
    for g in range(groups):
        if stopped():
            break
        for shape, sums in zip(shapes, results, strict=True):
            _add_group(shape, sums, g, sketch)
        progress(g + 1, groups)
    return results


def _add_group(shape: Shape, sums: Sums, g: int, sketch: Sketch) -> None:
    lead = shape.schemes[0].parts
    made = sample(lead, g + 1)
    groups = made.groups
    R = [scored(parts, [made]).R for parts in shape.scored_by]
    rows = [
        scheme.advantage(R[k], groups.trained) * scheme.weights
        for scheme, k in zip(shape.schemes, shape.estimate_of, strict=True)
    ]
    rows.append(reference_advantage(R[0], groups.trained) * shape.reference_weights)
    A = torch.stack(rows).flatten(1, 2) / groups.size  # [K + 1, B, T]
    tree, steps = groups.layout, groups.layout.steps
    by_step = torch.zeros(len(rows), steps, sketch.dimensions)
    parameters = [parameter for _, parameter in lead.policy.named_parameters()]
    for i in range(steps):
        members = (tree.noisy[:, i] & (A[:, :, i] != 0).any(0)).nonzero().flatten()
        if len(members):
            by_step[:, i] = A[:, members, i] @ member_gradients(
                made.velocity, made.trajectory, i, members, parameters, sketch
            )
    if sums.blocks is None or sums.powers is None or sums.silent is None:
        sums.blocks = torch.zeros(BLOCKS, *by_step.shape)
        sums.powers, sums.silent = np.zeros(by_step.shape[:2]), np.zeros(len(shape.schemes))
    sums.totals.append(by_step.sum(1))
    sums.blocks[g % BLOCKS] += by_step
    sums.powers += by_step.double().square().sum(-1).numpy()
    sums.silent += (A[:-1] == 0).all(-1).all(-1).double().numpy()
    sums.spreads.append(np.stack([_spread(r, groups.trained) for r in R]))
    sums.rewards.append(float(R[0][..., -1].nanmean()))


def _spread(R: Tensor, trained: Tensor) -> Array:
    """Deviation of the gains within a group, at each step, over the groups in which it is trained."""
    d = credit.gain(R).double()
    d = torch.where(trained.any(-2, keepdim=True), d, torch.nan)
    deviation = (d - d.nanmean(-2, keepdim=True)).square().nanmean(-2).sqrt()
    return np.asarray(deviation.nanmean(0).numpy(), dtype=np.float64)


def describe_estimate(recipe: Recipe) -> str:
    """A recipe's clean estimate in a word or two."""
    if recipe.estimate != "substeps":
        return recipe.estimate
    return f"{recipe.substeps} substeps" + (", linear" if recipe.spacing == "linear" else "")
