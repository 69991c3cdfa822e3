"""A trust region around every update: a step that moves the policy too far is shortened until it does not.

How far is measured where it counts, between the Gaussians of the policy before and after at states of the rollout. A
learning rate bounds how far weights move, which says little of that: the same step moves a policy little at one time
and ruins it at another. Source: the constraint of TRPO (1502.05477), by backtracking along the optimiser's own step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from stepcredit.interpolant import full_precision
from stepcredit.rollout import Trajectory, Velocity
from stepcredit.training import distributed

ATTEMPTS = 8
"""Times that a step is shortened, at most; the KL is nearly quadratic in its length, so that one or two are enough."""
SLACK = 1.02
"""A KL within this factor of the limit is within the limit."""


class Probe(NamedTuple):
    """Where an update is measured: some members of a cell, at every step at which they take noise."""

    velocity: Velocity
    """Under the weights as they are whenever it is called."""
    trajectory: Trajectory
    members: Tensor
    """long ``[n]``."""


class Moved(NamedTuple):
    """What became of an update."""

    made: bool
    """False if there was no step to take."""
    kl: float
    """Between the policy before and after, per dimension, mean over the probes; 0 for no step."""
    share: float
    """Of the optimiser's step that was taken, 1 for all of it."""


@torch.no_grad()
def step_within(
    limit: float,
    parameters: Sequence[torch.nn.Parameter],
    probes: Sequence[Probe],
    micro_batch: int,
    step: Callable[[], bool],
) -> Moved:
    """Take an optimiser's ``step``, and shorten it until the KL between old and new policy is at most ``limit``.

    The KL is that of the kernel's Gaussians, ``(mu - mu_old)^2 / (2 std^2)``, mean over dimensions and over all states
    of the ``probes`` of all processes. The optimiser's moments stay as the whole step left them. Costs two evaluations
    of these states and one more each time it shortens, and a copy of the parameters meanwhile. Raises
    FloatingPointError, with the parameters as they were, if velocities are not finite after a step however short.
    """
    before = [_velocities(probe, micro_batch) for probe in probes]
    old = [parameter.detach().clone() for parameter in parameters]
    if not step():
        return Moved(False, 0.0, 1.0)
    kl, share = _kl(probes, before, micro_batch), 1.0
    for _ in range(ATTEMPTS):
        if kl <= limit * SLACK:
            break
        factor = math.sqrt(limit / kl) if math.isfinite(kl) else 0.1
        share *= factor
        for parameter, was in zip(parameters, old, strict=True):
            parameter.copy_(was + (parameter - was) * factor)
        kl = _kl(probes, before, micro_batch)
    if not math.isfinite(kl):
        for parameter, was in zip(parameters, old, strict=True):
            parameter.copy_(was)
        raise FloatingPointError(
            f"the velocity is not finite after an update, even shortened to {share:.0e} of itself; "
            "lower the learning rate"
        )
    return Moved(True, kl, share)


def _velocities(probe: Probe, micro_batch: int) -> list[Tensor]:
    """Of the members that take noise, at each step, under the weights as they are, which need not be finite."""
    trajectory, found = probe.trajectory, []
    for i, members in _noisy(probe):
        parts = []
        for some in members.split(micro_batch):
            x = trajectory.states[i][trajectory.layout.index[i][some]]
            t = trajectory.kernel.grid[i].to(x.device, torch.float32).expand(len(x))
            parts.append(full_precision(probe.velocity(x, t, some)))
        found.append(torch.cat(parts))
    return found


def _noisy(probe: Probe) -> list[tuple[int, Tensor]]:
    noisy = probe.trajectory.layout.noisy[probe.members]
    return [(i, probe.members[noisy[:, i]]) for i in range(noisy.shape[1]) if bool(noisy[:, i].any())]


def _kl(probes: Sequence[Probe], before: Sequence[Sequence[Tensor]], micro_batch: int) -> float:
    """Mean over all processes, whose probes are added in their order: any number of processes has the same bits."""
    sums = []
    for probe, was in zip(probes, before, strict=True):
        now = zip(_noisy(probe), was, _velocities(probe, micro_batch), strict=True)
        kl = torch.cat([probe.trajectory.kernel.kl(v, v_old, i).double().cpu() for (i, _), v_old, v in now])
        sums.append(torch.stack([kl.sum(), torch.tensor(len(kl)).double()]))
    total, count = distributed.gather(torch.stack(sums)).sum(0).tolist()
    return float(total / count)
