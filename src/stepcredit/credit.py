"""Credit: from the rewards along a trajectory to one number per step.

``R[..., i]`` is the reward of the clean estimate of state ``x[i]``, i = 0..T; ``R[..., T]`` is that of the final image.
Step i leads from ``x[i]`` to ``x[i + 1]``; its gain is ``d[i] = R[i + 1] - R[i]``. All functions take ``R`` of shape
``[..., G, T + 1]`` (G members of a group; rewards in any unit) and return credit ``[..., G, T]`` in the same unit. NaN
rewards (a failed sample) give NaN credit at the steps that they touch.
"""

from __future__ import annotations

import torch
from torch import Tensor


def uniform(R: Tensor) -> Tensor:
    """Every step gets the final reward: ``credit[i] = R[T]``. Source: Flow-GRPO (2505.05470)."""
    return R[..., -1:].expand(*R.shape[:-1], R.shape[-1] - 1).clone()


def tempflow(R: Tensor) -> Tensor:
    """The final reward of a branch, to be used at the branch's one noisy step; elsewhere it is not trained.

    The same numbers as ``uniform``: what makes TempFlow-GRPO (2508.04324) is the branching of the rollout, whose
    groups share a prompt and a step, and the step weight proportional to ``std``.
    """
    return uniform(R)


def gain(R: Tensor) -> Tensor:
    """What each step added: ``credit[i] = R[i + 1] - R[i]``; the sum over steps is ``R[T] - R[0]``.

    Source: Stepwise-Flow-GRPO (2603.28718).
    """
    return R.diff(dim=-1)


def gae(R: Tensor, lam: float) -> Tensor:
    """Discounted sum of the gains to come, ``credit[i] = sum_{k >= i} lam^(k - i) d[k]``, lam in [0, 1].

    Reads ``R[i]`` as a value estimate of ``x[i]``: generalised advantage estimation (1506.02438) without a discount.
    lam = 0 is ``gain``; lam = 1 is ``R[T] - R[i]``. Raises ValueError for lam outside [0, 1].
    """
    if not 0 <= lam <= 1:
        raise ValueError(f"lam must be in [0, 1], not {lam}; 0 credits each step's own gain, 1 all that follows")
    d = gain(R)
    if lam == 0:
        return d  # 0 x NaN would carry a missing reward back to the steps before it
    credit = d.clone()
    for i in range(d.shape[-1] - 2, -1, -1):
        credit[..., i] += lam * credit[..., i + 1]
    return credit


def turning_points(R: Tensor, strict: bool = True) -> Tensor:
    """Where the local trend turns to agree with the whole trajectory's: bool ``[..., G, T]``.

    With ``G = R[T] - R[0]`` and ``c[i] = sign(d[i]) sign(G)``: step i >= 1 turns if ``c[i - 1] < 0`` and ``c[i] > 0``;
    the first step turns if ``c[0] > 0``. ``strict`` also demands ``sign(d[i]) sign(R[T] - R[i + 1]) > 0``, that what
    follows agrees too (at i = 0 in place of ``c[0] > 0``, which it implies); the last step then never turns. Zero
    differences never trigger. Source: TP-GRPO (2602.06422).
    """
    d = gain(R).sign()
    c = d * (R[..., -1:] - R[..., :1]).sign()
    before = torch.cat([-torch.ones_like(c[..., :1]), c[..., :-1]], dim=-1)  # the first step has nothing to turn from
    turns = (before < 0) & (c > 0)
    if strict:
        turns &= d * (R[..., -1:] - R[..., 1:]).sign() > 0
    return turns


def turning_point(R: Tensor, strict: bool = True, balance: bool = False, trained: Tensor | None = None) -> Tensor:
    """Gains, replaced at turning points by the long-term reward ``R[T] - R[i]``. Source: TP-GRPO (2602.06422).

    ``balance`` keeps, within each group, as many positive as negative turning points, those of the largest credit
    first (of equal ones the earlier member and step); if one sign is absent, all are kept. The others fall back to
    their gain. ``trained`` (bool, broadcastable to the credit) confines turning points to trained steps.
    """
    d = gain(R)
    to_end = R[..., -1:] - R[..., :-1]
    turns = turning_points(R, strict)
    if trained is not None:
        turns = turns & trained
    if balance:
        turns = _balanced(turns, to_end)
    return torch.where(turns, to_end, d)


def turning_point_smooth(R: Tensor, temperature: float = 1.0) -> Tensor:
    """Turning points without a threshold: ``credit[i] = d[i] + w[i] (R[T] - R[i + 1])``, w in [0, 1].

    ``w[i] = tanh(f[i] / (temperature s))``, where the flip ``f[i] = min(max(-c[i - 1], 0), max(c[i], 0))`` is the
    smaller of how far the trend went against the trajectory before the step and with it at the step (with
    ``c[i] = d[i] sign(R[T] - R[0])``, and only the latter at i = 0), and s is the root mean square of the group's
    gains. Small flips are gains, large ones long-term rewards; a higher temperature trusts flips less. Raises
    ValueError for temperature <= 0. Source: ours.
    """
    if temperature <= 0:
        raise ValueError(f"temperature must be positive, not {temperature}")
    d = gain(R)
    c = d * (R[..., -1:] - R[..., :1]).sign()
    with_trend = c.clamp(min=0)
    against_before = torch.cat([with_trend[..., :1], (-c[..., :-1]).clamp(min=0)], dim=-1)
    flip = torch.minimum(against_before, with_trend)
    size = d.square().nanmean(dim=(-2, -1), keepdim=True).sqrt()
    weight = torch.tanh(flip / (temperature * size).clamp(min=torch.finfo(d.dtype).tiny))
    return d + weight * (R[..., -1:] - R[..., 1:])


def _balanced(turns: Tensor, credit: Tensor) -> Tensor:
    """Turning points thinned to equally many of each sign in every group, the largest |credit| first."""
    flat_turns, flat_credit = turns.flatten(-2), credit.flatten(-2)
    positive, negative = flat_turns & (flat_credit > 0), flat_turns & (flat_credit < 0)
    n_positive, n_negative = positive.sum(-1, keepdim=True), negative.sum(-1, keepdim=True)
    keep = torch.minimum(n_positive, n_negative)
    keep = torch.where(keep == 0, torch.maximum(n_positive, n_negative), keep)

    def largest(of: Tensor) -> Tensor:
        size = torch.where(of, flat_credit.abs(), -torch.inf)
        rank = size.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1, stable=True)
        return of & (rank < keep)

    return (largest(positive) | largest(negative)).reshape(turns.shape)
