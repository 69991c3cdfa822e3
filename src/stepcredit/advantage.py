"""Advantage: credit compared within the group of a prompt.

All functions take credit ``[..., G, T]`` (G members, T steps) and return advantages of that shape: centred, divided
by a population standard deviation plus ``eps``, clamped to ``[-clamp, clamp]``.

Common keyword arguments:

- ``trained``: bool, broadcastable to the credit. Only these steps enter the statistics; elsewhere the advantage is 0.
- ``eps``: added to the standard deviation, so that a group of equal members gets 0.
- ``global_std``: the standard deviation of all groups of the call together in place of each group's own, distances
  between groups included (Flow-GRPO's option); for ``centred``, which has none left, that of all centred credit.
- ``clamp``: largest absolute advantage.

NaN credit marks a failed sample: the statistics leave it out and its advantage is 0. Statistics are float64.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

EPS = 1e-4
CLAMP = 5.0


def group(
    credit: Tensor,
    trained: Tensor | None = None,
    eps: float = EPS,
    global_std: bool = False,
    clamp: float = CLAMP,
) -> Tensor:
    """Centre and scale over the members, for credit that is equal over steps. Source: Flow-GRPO (2505.05470).

    A member's credit is the mean over its trained steps. Raises ValueError if credit differs between steps.
    """
    valid = _valid(credit, trained)
    highest = credit.masked_fill(~valid, -torch.inf).amax(-1)
    lowest = credit.masked_fill(~valid, torch.inf).amin(-1)
    if bool((highest > lowest).any()):
        raise ValueError(
            "advantage 'group' needs one credit per member, but this credit differs between steps; "
            "use 'joint', 'per_step' or 'centred' for step-wise credit"
        )
    member = torch.where(valid, credit.double(), 0.0).sum(-1, keepdim=True) / valid.sum(-1, keepdim=True).clamp(min=1)
    return _normalise(
        credit, member, valid, centre=(-2,), scale=(-2,), one_step=True, options=_Options(eps, global_std, clamp)
    )


def joint(
    credit: Tensor,
    trained: Tensor | None = None,
    eps: float = EPS,
    global_std: bool = False,
    clamp: float = CLAMP,
) -> Tensor:
    """Centre and scale over members and steps together. Source: Stepwise-Flow-GRPO (2603.28718, section 5)."""
    options = _Options(eps, global_std, clamp)
    return _normalise(credit, credit, _valid(credit, trained), centre=(-2, -1), scale=(-2, -1), options=options)


def per_step(
    credit: Tensor,
    trained: Tensor | None = None,
    eps: float = EPS,
    global_std: bool = False,
    clamp: float = CLAMP,
) -> Tensor:
    """Centre and scale over members at each step alone. Source: TP-GRPO (2602.06422), TempFlow-GRPO (2508.04324)."""
    options = _Options(eps, global_std, clamp)
    return _normalise(credit, credit, _valid(credit, trained), centre=(-2,), scale=(-2,), options=options)


def centred(
    credit: Tensor,
    trained: Tensor | None = None,
    eps: float = EPS,
    global_std: bool = False,
    clamp: float = CLAMP,
) -> Tensor:
    """Centre over members at each step, scale by the pooled deviation of members and steps.

    Steps keep their natural size, as in ``joint``, and lose the baseline that ``joint`` leaves in each of them: a
    constant on all members of a step moves no expected gradient, only its variance. Source: ours.
    """
    options = _Options(eps, global_std, clamp)
    return _normalise(credit, credit, _valid(credit, trained), centre=(-2,), scale=(-2, -1), options=options)


def degenerate(credit: Tensor, trained: Tensor | None = None) -> Tensor:
    """Groups that teach nothing, since at every trained step all members are equal: bool ``[...]``."""
    valid = _valid(credit, trained)
    highest = credit.masked_fill(~valid, -torch.inf).amax(-2)
    lowest = credit.masked_fill(~valid, torch.inf).amin(-2)
    return (highest <= lowest).all(-1)


class _Options(NamedTuple):
    eps: float
    global_std: bool
    clamp: float


def _valid(credit: Tensor, trained: Tensor | None) -> Tensor:
    valid = ~credit.isnan()
    return valid if trained is None else valid & trained


def _normalise(
    credit: Tensor,
    value: Tensor,
    valid: Tensor,
    centre: tuple[int, ...],
    scale: tuple[int, ...],
    options: _Options,
    one_step: bool = False,
) -> Tensor:
    """Masked centring over ``centre`` and scaling over ``scale``; ``one_step`` when ``value`` is ``[..., G, 1]``."""
    seen = valid.any(-1, keepdim=True) if one_step else valid
    value = torch.where(seen, value.double(), 0.0)
    mean = _mean(value, seen, centre)
    # a constant has no deviation: its mean's rounding error must not be divided by eps
    constant = _spread(value, seen, centre) == 0
    deviation = torch.where(seen & ~constant, value - mean, 0.0)
    measured = deviation
    if options.global_std:
        pooled = (*range(-value.ndim, -2), *scale)
        if centre == scale:  # of the credit as it is, so that distances between groups count
            measured = torch.where(seen, value - _mean(value, seen, pooled), 0.0)
        scale = pooled
    std = _mean(measured**2, seen, scale).sqrt()
    advantage = (deviation / (std + options.eps)).clamp(-options.clamp, options.clamp)
    return torch.where(valid, advantage, 0.0).to(credit.dtype)


def _mean(value: Tensor, seen: Tensor, over: tuple[int, ...]) -> Tensor:
    return value.sum(over, keepdim=True) / seen.sum(over, keepdim=True).clamp(min=1)


def _spread(value: Tensor, seen: Tensor, over: tuple[int, ...]) -> Tensor:
    highest = value.masked_fill(~seen, -torch.inf).amax(over, keepdim=True)
    return highest - value.masked_fill(~seen, torch.inf).amin(over, keepdim=True)
