"""Objective: the clipped surrogate, its ratio, and the weights of the steps.

Pure functions of log-probs and advantages, ``[B]`` each: one entry per trained (member, step). The KL penalties live
with the kernel that defines them (:meth:`stepcredit.kernels.Kernel.kl`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from stepcredit.interpolant import full_precision, per_sample
from stepcredit.kernels import Kernel, Step

StepWeight = Literal["none", "std", "balanced", "table"]


def surrogate(logp: Tensor, logp_old: Tensor, adv: Tensor, clip: float) -> Tensor:
    """Clipped surrogate loss to minimise, a scalar: the mean over ``[B]`` of :func:`surrogate_terms`.

    ``logp`` under the current policy (carries the gradient), ``logp_old`` under the one that sampled. Source: PPO
    (1707.06347, eq. 7); Flow-GRPO (2505.05470).
    """
    return surrogate_terms(logp - logp_old, adv, clip).mean()


def surrogate_terms(log_ratio: Tensor, adv: Tensor, clip: float) -> Tensor:
    """``max(-A rho, -A clip(rho, 1 - clip, 1 + clip))`` for each sample, ``[B]``, with ``rho = exp(log_ratio)``.

    ``clip`` > 0 in units of the ratio: 1e-4 .. 1e-6 where log-probs are means over dimensions. Raises ValueError for a
    clip that is not positive.
    """
    if not clip > 0:
        raise ValueError(f"clip must be positive, not {clip}")
    ratio = log_ratio.exp()
    return torch.maximum(-adv * ratio, -adv * ratio.clamp(1 - clip, 1 + clip))


def clipped(log_ratio: Tensor, adv: Tensor, clip: float) -> Tensor:
    """Samples without gradient: their ratio has left the range on the side it is pushed to; bool ``[B]``."""
    ratio = log_ratio.exp()
    return ((adv > 0) & (ratio > 1 + clip)) | ((adv < 0) & (ratio < 1 - clip))


def ratio_norm(x_next: Tensor, mean: Tensor, mean_old: Tensor, kernel: Kernel, i: Step) -> Tensor:
    """Normalised log-ratio ``mean_d(eps (mu - mu_old) / std) std``, ``eps = (x_next - mu_old) / std``; ``[B]``.

    The plain log-ratio's quadratic term, which biases it below zero, is left out, and steps of different std are made
    comparable. Means ``[B, ...]``; published clip range 2e-6, for ``flow_sde`` only. Raises ValueError for a step
    without noise. Source: GRPO-Guard (2510.22319).
    """
    kernel.require_trainable(i)
    mean, mean_old = full_precision(mean), full_precision(mean_old)
    std = kernel.std[i.cpu() if isinstance(i, Tensor) else i].to(mean)
    noise = (x_next.to(mean) - mean_old) / per_sample(std, mean)
    return (noise * (mean - mean_old)).flatten(1).mean(1)


def step_weights(kind: StepWeight, kernel: Kernel, trained: Tensor, table: Sequence[float] | None = None) -> Tensor:
    """Loss weight of every step, float64 ``[T]``, 0 where ``trained`` (bool ``[T]``) is False.

    ``none``: 1. ``std``: proportional to the kernel's std, scaled to mean 1 over the trained steps of this grid (the
    2.25 of the TempFlow-GRPO code holds for one grid only). ``balanced``: the inverse of the step's gradient with
    respect to the velocity, ``std / |d mu / d v|``, likewise scaled, so that every step pulls equally hard
    (unweighted, the last steps pull tens of times harder than the first and drown them in noise; ours). ``table``:
    the user's numbers, one per step, >= 0. Raises ValueError if no step is trained, for an unknown kind, or for a
    table of the wrong length or with a negative entry.
    """
    trained = trained.cpu()
    if not bool(trained.any()):
        raise ValueError("no step is trained, so there is nothing to weight")
    if kind == "none":
        weights = torch.ones(kernel.steps, dtype=torch.float64)
    elif kind == "std":
        weights = kernel.std / kernel.std[trained].mean()
    elif kind == "balanced":
        inverse = kernel.std / kernel.velocity_gain.abs()
        weights = inverse / inverse[trained].mean()
    elif kind == "table":
        if table is None or len(table) != kernel.steps:
            raise ValueError(f"step weights need one number for each of the {kernel.steps} steps, not {table}")
        weights = torch.tensor(list(table), dtype=torch.float64)
        if bool((weights < 0).any()):
            raise ValueError(f"step weights must not be negative: {list(table)}")
    else:
        raise ValueError(f"unknown step weight {kind!r}; use 'none', 'std' (TempFlow-GRPO), 'balanced' or 'table'")
    return torch.where(trained, weights, 0.0)
