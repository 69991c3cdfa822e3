"""The rectified-flow path ``x_t = (1 - t) x_0 + t x_1``; no other module knows its formula.

Times are floats, scalar tensors, or one time per sample ``[B]``. Half-precision inputs are computed in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

Time = float | Tensor


def interpolate(x_0: Tensor, x_1: Tensor, t: Time) -> Tensor:
    """Point of the path between data ``x_0`` and noise ``x_1`` at time t in [0, 1]; ``[B, ...]``."""
    x_0, x_1 = full_precision(x_0), full_precision(x_1)
    t = per_sample(t, x_0)
    return (1 - t) * x_0 + t * x_1


def x0_hat(x_t: Tensor, v: Tensor, t: Time) -> Tensor:
    """Clean estimate ``x_t - t v``: Tweedie's posterior mean ``E[x_0 | x_t]`` for the exact velocity; ``[B, ...]``."""
    x_t, v = full_precision(x_t), full_precision(v)
    return x_t - per_sample(t, x_t) * v


def x1_hat(x_t: Tensor, v: Tensor, t: Time) -> Tensor:
    """Noise estimate ``x_t + (1 - t) v``: ``E[x_1 | x_t]`` for the exact velocity; ``[B, ...]``."""
    x_t, v = full_precision(x_t), full_precision(v)
    return x_t + (1 - per_sample(t, x_t)) * v


def euler(x_t: Tensor, v: Tensor, t: Time, t_next: Time) -> Tensor:
    """One Euler step of the ODE ``dx/dt = v`` from time t to ``t_next``; ``[B, ...]``."""
    x_t, v = full_precision(x_t), full_precision(v)
    return x_t + (per_sample(t_next, x_t) - per_sample(t, x_t)) * v


def full_precision(x: Tensor) -> Tensor:
    """The tensor in float32, or as it is when already wider: step arithmetic is never done in half precision."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def per_sample(value: Time, like: Tensor) -> Tensor:
    """A scalar or one value per sample ``[B]``, shaped to broadcast against ``like`` ``[B, ...]``, in its dtype."""
    value = torch.as_tensor(value, dtype=like.dtype, device=like.device)
    return value.reshape(-1, *[1] * (like.ndim - 1)) if value.ndim else value
