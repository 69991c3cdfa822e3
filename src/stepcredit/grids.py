"""Time grids: float64 tensors ``[T + 1]`` that fall from 1 (noise) to 0 (data), in sampling order.

Papers count the steps down from T to 0. Here step i (0-based) always takes ``x[i]`` at ``s = grid[i]`` to ``x[i + 1]``
at ``s' = grid[i + 1]``, in every module.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

TRAIN_TIMESTEPS = 1000
"""Number of discrete times of the published schedulers; fixes the smallest time that they start from."""


def linear(steps: int) -> Tensor:
    """Equally spaced times, float64 ``[steps + 1]`` from 1 to 0. Raises ValueError when ``steps`` < 1."""
    _positive_steps(steps)
    return torch.linspace(1.0, 0.0, steps + 1, dtype=torch.float64)


def shifted(steps: int, shift: float = 3.0) -> Tensor:
    """SD3's grid: times shifted towards noise, float64 ``[steps + 1]`` from 1 to 0.

    ``t <- k t / (1 + (k - 1) t)`` with ``k = shift`` > 0 (3 for SD3.5-M), on the schedule of diffusers'
    FlowMatchEulerDiscreteScheduler: the smallest time 1/1000 is shifted when the scheduler is built, the times are
    spaced equally down to it, and all are shifted once more; a final 0 is appended. ``shift = 1`` shifts nothing.
    Raises ValueError for ``steps`` < 1 or ``shift`` <= 0. Source: SD3 (arXiv 2403.03206, eq. 23).
    """
    _positive_steps(steps)
    if shift <= 0:
        raise ValueError(f"shift must be positive, not {shift}; SD3.5 uses 3.0")
    smallest = _shift(torch.tensor(1 / TRAIN_TIMESTEPS, dtype=torch.float64), shift)
    times = torch.linspace(1.0, float(smallest), steps, dtype=torch.float64)
    return _close(_shift(times, shift))


def resolution(
    steps: int,
    image_seq_len: int,
    base_shift: float = 0.5,
    max_shift: float = 1.15,
    base_seq_len: int = 256,
    max_seq_len: int = 4096,
) -> Tensor:
    """FLUX's grid, shifted more for larger images; float64 ``[steps + 1]`` from 1 to 0.

    ``mu`` is linear in the number of image tokens, through (base_seq_len, base_shift) and (max_seq_len, max_shift);
    ``t <- exp(mu) / (exp(mu) + 1 / t - 1)`` on times equally spaced from 1 to 1/steps. Raises ValueError for
    ``steps`` < 1. Source: FLUX.1 as implemented in diffusers' FluxPipeline.
    """
    _positive_steps(steps)
    slope = (max_shift - base_shift) / (max_seq_len - base_seq_len)
    mu = base_shift + slope * (image_seq_len - base_seq_len)
    times = torch.linspace(1.0, 1.0 / steps, steps, dtype=torch.float64)
    return _close(math.exp(mu) / (math.exp(mu) + 1.0 / times - 1.0))


def validate(grid: Tensor) -> Tensor:
    """The grid as float64 after checking its form; raises ValueError unless it falls strictly from 1 to 0."""
    grid = grid.detach().to("cpu", torch.float64)
    if grid.ndim != 1 or len(grid) < 2:
        raise ValueError(f"a grid is a vector of at least 2 times, not of shape {tuple(grid.shape)}")
    if grid[0] != 1 or grid[-1] != 0 or not bool((grid.diff() < 0).all()):
        raise ValueError(f"a grid falls strictly from 1 to 0, but this one is {[round(float(t), 4) for t in grid]}")
    return grid


def _shift(times: Tensor, shift: float) -> Tensor:
    return shift * times / (1 + (shift - 1) * times)


def _close(times: Tensor) -> Tensor:
    times = torch.cat([times, times.new_zeros(1)])
    times[0] = 1.0  # the formulas give 1 up to rounding
    return times


def _positive_steps(steps: int) -> None:
    if steps < 1:
        raise ValueError(f"steps must be at least 1, not {steps}")
