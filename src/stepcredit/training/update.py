"""One optimiser step's gradient: replay the trained steps chunk by chunk and accumulate the loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from stepcredit import objective
from stepcredit.kernels import KL, Reduce
from stepcredit.rollout import Chunk, Replay, Trajectory, Velocity, chunks, replay
from stepcredit.training import distributed, sharding
from stepcredit.training.guards import Skip


@dataclass
class UpdateStats:
    """What one optimiser step was made of; per-step tensors ``[T]`` are NaN where nothing was trained."""

    loss: float
    ratio_deviation: float
    """Largest |ratio - 1|; exactly 0 at the first update of a rollout."""
    clip_fraction: Tensor
    kl: Tensor
    grad_norm: float = field(default=float("nan"))
    """Before clipping."""
    skip: Skip | None = None
    """Why the update was skipped; None if it was made."""


def accumulate(
    velocity: Velocity,
    reference: Velocity | None,
    trajectory: Trajectory,
    advantage: Tensor,
    pairs: Tensor,
    weights: Tensor,
    micro_batch: int,
    clip: float,
    kl_beta: float = 0.0,
    kl: KL = "gaussian",
    normalised_ratio: bool = False,
    reduce: Reduce = "mean",
    progress: Callable[[int], None] | None = None,
    scale: float = 1.0,
) -> UpdateStats:
    """Add to the parameters' gradients that of ``mean(weight surrogate) + kl_beta mean(KL)``.

    The mean is over all noisy (member, step) pairs of the update, of which ``trajectory`` may be a share: ``pairs``
    (long ``[T]``) is their number at each step. ``advantage`` ``[B, T]``; ``weights`` float ``[T]``; ``reference`` is
    needed when ``kl_beta`` > 0. Chunks without a trained member are skipped. ``progress`` is called with the number of
    chunks done. Gradients are multiplied by ``scale``, which ``apply`` takes out again: see ``loss_scale``. Statistics
    are shares as well: see ``combined``.
    """
    tree = trajectory.layout
    total = int(pairs.sum())
    clip_count, kl_sum = torch.zeros(tree.steps).double(), torch.zeros(tree.steps).double()
    loss_sum, deviation, done = 0.0, 0.0, 0
    for i in range(tree.steps):
        for chunk in chunks(tree, i, micro_batch):
            if len(chunk.members) == 0:
                continue
            new = replay(velocity, trajectory, chunk, reduce)
            log_ratio = _log_ratio(new, trajectory, chunk, normalised_ratio)
            adv = advantage[chunk.members, i].to(log_ratio)
            terms = objective.surrogate_terms(log_ratio, adv, clip) * float(weights[i])
            if kl_beta > 0 and reference is not None:
                penalty = _penalty(reference, trajectory, chunk, new, kl)
                terms = terms + kl_beta * penalty
                kl_sum[i] += float(penalty.detach().sum())
            loss = terms.sum() / total
            (loss * scale).backward()
            with torch.no_grad():
                loss_sum += float(loss)
                deviation = max(deviation, float((log_ratio.exp() - 1).abs().max()))
                clip_count[i] += float(objective.clipped(log_ratio, adv, clip).sum())
            done += 1
            if progress is not None:
                progress(done)
    return UpdateStats(loss_sum, deviation, clip_count / pairs, kl_sum / pairs)


def combined(shares: Sequence[UpdateStats]) -> UpdateStats:
    """Statistics of an update from those of its shares, of all processes."""
    rows = torch.stack([torch.cat([torch.tensor([s.loss]).double(), s.clip_fraction, s.kl]) for s in shares])
    total = distributed.add(rows.sum(0))
    loss, (clip_fraction, kl) = float(total[0]), total[1:].chunk(2)
    deviation = distributed.largest(max(share.ratio_deviation for share in shares))
    return UpdateStats(loss, deviation, clip_fraction, kl)


def _log_ratio(new: Replay, trajectory: Trajectory, chunk: Chunk, normalised: bool) -> Tensor:
    i, kernel = chunk.step, trajectory.kernel
    if not normalised:
        return new.log_prob - trajectory.log_prob[chunk.members, i].to(new.log_prob)
    v_old = trajectory.velocities[i][chunk.rows][chunk.local]
    mean, mean_old = kernel.mean(new.x_t, new.v, i), kernel.mean(new.x_t, v_old, i)
    return objective.ratio_norm(new.x_next, mean, mean_old, kernel, i)


def _penalty(reference: Velocity, trajectory: Trajectory, chunk: Chunk, new: Replay, kl: KL) -> Tensor:
    i = chunk.step
    rows = trajectory.states[i][chunk.rows]
    with torch.no_grad():
        t = trajectory.kernel.grid[i].to(rows.device, torch.float32).expand(len(rows))
        v_ref = reference(rows, t, chunk.first)[chunk.local]
    return trajectory.kernel.kl(new.v, v_ref, i, kl)


def loss_scale(dtype: torch.dtype, pairs: int, dimensions: int) -> float:
    """A power of two that keeps gradients inside a float16 network from vanishing; 1 for every other dtype.

    The gradient with respect to one number of a velocity is about 1 / (pairs x dimensions), far below float16's
    smallest; multiplied by that product, less a margin of 64 for what grows on its way, it is in mid-range.
    """
    return 1.0 if dtype != torch.float16 else 2.0 ** round(math.log2(max(pairs * dimensions / 64, 1.0)))


def apply(
    optimiser: torch.optim.Optimizer,
    parameters: list[torch.nn.Parameter],
    stats: UpdateStats,
    grad_clip: float,
    scale: float = 1.0,
    unit_length: bool = False,
    spike: float = math.inf,
) -> bool:
    """Clip the gradient and step; False, leaving weights and optimiser alone, if the gradient is not finite or its norm
    is above ``spike``; ``stats.skip`` tells which. Clears gradients.

    ``scale`` is what ``accumulate`` multiplied the gradients by; they are divided by it first. ``unit_length`` makes
    the gradient's norm 1 in place of clipping it; a gradient of nothing but zeros stays as it is.
    """
    if scale != 1.0:
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.div_(scale)
    stats.grad_norm = float(sharding.whole(torch.nn.utils.clip_grad_norm_(parameters, grad_clip)))
    if not math.isfinite(stats.grad_norm):
        stats.skip = "not_finite"
    elif stats.grad_norm > spike:
        stats.skip = "spike"
    if unit_length and stats.skip is None and stats.grad_norm > 0:
        gradients = [p.grad for p in parameters if p.grad is not None]
        length = float(sharding.whole(torch.nn.utils.get_total_norm(gradients)))
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.div_(length)
    if stats.skip is None:
        optimiser.step()
    optimiser.zero_grad(set_to_none=True)
    return stats.skip is None
