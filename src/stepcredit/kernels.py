"""Transition kernels: what makes the sampler of a flow model a stochastic policy.

A kernel turns a state and its velocity into a Gaussian ``N(mean, std^2 I)`` over the next state. All of them are the
Euler step of the ODE moved along the noise estimate, ``mean = euler(x, v) + drift[i] * x1_hat(x, v)``, so a kernel is
nothing but two tables over the grid:

=============  ==============================  =====================================  =====================
kernel         ``std[i]``                      ``drift[i]``                           source (arXiv)
=============  ==============================  =====================================  =====================
``ode``        0                               0
``ddim``       ``level s' sqrt(1 - s)``        ``sqrt(s'^2 - std^2) - s'``            Stepwise-Flow-GRPO 2603.28718
``cps``        ``s' sin(level pi / 2)``        "                                      CPS 2509.05952
``precise``    ``s' sqrt(1 - rho^level^2)``    "                                      Precise 2605.23522
``flow_sde``   ``level sqrt(s D / (1 - s))``   ``-std^2 / (2 s)``                     Flow-GRPO 2505.05470
``dance``      ``level sqrt(D)``               "                                      DanceGRPO 2505.07818
=============  ==============================  =====================================  =====================

with ``s = grid[i]``, ``s' = grid[i + 1]``, ``D = s - s'``, ``rho = s'(1 - s) / (s (1 - s'))``. The first three keep the
interpolant, ``mean = (1 - s') x0_hat + sqrt(s'^2 - std^2) x1_hat``; the last two are Euler-Maruyama steps,
``mean = x (1 - g^2 D / 2s) - v (1 + g^2 (1 - s) / 2s) D`` with ``std = g sqrt(D)``. Written as a correction to the
Euler step, level 0 is the ODE to the last bit. Sampling, log-prob, KL, weights and diagnostics read these tables.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from stepcredit import grids
from stepcredit.interpolant import euler, full_precision, per_sample, x1_hat

Step = int | Tensor
"""A step index, or one per sample (long ``[B]``)."""

Reduce = Literal["mean", "sum"]
KL = Literal["gaussian", "flow_grpo", "velocity"]


@dataclass(frozen=True)
class Kernel:
    """A transition kernel on a grid; build one with :func:`make`. Tables are float64 on the CPU.

    Methods take states and velocities ``[B, ...]`` and a step index i: one for all, or one per sample. Arithmetic is
    float32, or float64 for float64 inputs.
    """

    name: str
    grid: Tensor
    level: float
    std: Tensor
    drift: Tensor

    @property
    def steps(self) -> int:
        """T, the number of steps."""
        return len(self.std)

    @property
    def trainable(self) -> Tensor:
        """bool ``[T]``: steps with noise. The others are deterministic and carry no policy gradient."""
        return self.std > 0

    @property
    def velocity_gain(self) -> Tensor:
        """``d mu / d v`` of every step, float64 ``[T]``: ``drift (1 - s) - D``, negative."""
        return self.drift * (1 - self.grid[:-1]) + self.grid.diff()

    def mean(self, x_t: Tensor, v: Tensor, i: Step) -> Tensor:
        """Mean of the next state, ``[B, ...]``."""
        x_t, v = full_precision(x_t), full_precision(v)
        s, s_next = self._at(self.grid[:-1], i, x_t), self._at(self.grid[1:], i, x_t)
        return euler(x_t, v, s, s_next) + per_sample(self._at(self.drift, i, x_t), x_t) * x1_hat(x_t, v, s)

    def step(self, x_t: Tensor, v: Tensor, i: Step, noise: Tensor) -> Tensor:
        """Sample of the next state from standard Gaussian ``noise`` of the state's shape, ``[B, ...]``."""
        mean = self.mean(x_t, v, i)
        return mean + per_sample(self._at(self.std, i, mean), mean) * noise.to(mean)

    def log_prob(self, x_next: Tensor, x_t: Tensor, v: Tensor, i: Step, reduce: Reduce = "mean") -> Tensor:
        """Gaussian log-density of ``x_next`` as stored, all constants kept, ``[B]``.

        Reduced over all dimensions but the first: ``"mean"`` (Flow-GRPO: the ratio is then the likelihood ratio to the
        power 1/d, which is why published clip ranges are 1e-4 and less) or ``"sum"``. Raises ValueError, naming the
        step, where the step has no noise.
        """
        self.require_trainable(i)
        mean = self.mean(x_t, v, i)
        std = per_sample(self._at(self.std, i, mean), mean)
        log_density = -0.5 * ((x_next.to(mean) - mean) / std) ** 2 - std.log() - 0.5 * math.log(2 * math.pi)
        return _reduce(log_density, reduce)

    def kl(self, v: Tensor, v_ref: Tensor, i: Step, variant: KL = "gaussian") -> Tensor:
        """Penalty on leaving the reference, mean over all dimensions but the first, ``[B]``; >= 0.

        ``gaussian``: ``(mu - mu_ref)^2 / (2 std^2)``, the exact KL per dimension. ``flow_grpo``: the same with
        ``std^2 / D`` in place of ``std^2`` (D times the exact one; the published betas belong to it). ``velocity``:
        ``(v - v_ref)^2``. Both means start from the same state, so ``mu - mu_ref = velocity_gain (v - v_ref)``.
        Raises ValueError where the first two have no noise to divide by.
        """
        squared = (full_precision(v) - full_precision(v_ref)) ** 2
        if variant != "velocity":
            self.require_trainable(i)
            squared = squared * per_sample(self._at(self._kl_scale(variant), i, squared), squared)
        return _reduce(squared, "mean")

    def require_trainable(self, i: Step) -> None:
        """Raise ValueError, naming them, if any of the steps is deterministic."""
        steps = torch.as_tensor(i).reshape(-1).cpu()
        dead = sorted({int(k) for k in steps[~self.trainable[steps]]})
        if dead:
            usable = self.trainable.nonzero().flatten().tolist()
            raise ValueError(
                f"step {', '.join(map(str, dead))} of kernel {self.name!r} has no noise, so it has no log-prob and "
                f"cannot be trained; its trainable steps are {usable}"
            )

    def _kl_scale(self, variant: KL) -> Tensor:
        """``(d mu / d v)^2 / (2 std^2)`` for every step, float64 ``[T]``; infinite where std is 0."""
        variance = self.std**2 / (-self.grid.diff() if variant == "flow_grpo" else 1.0)
        return self.velocity_gain**2 / (2 * variance)

    def _at(self, table: Tensor, i: Step, like: Tensor) -> Tensor:
        return table[i.cpu() if isinstance(i, Tensor) else i].to(like.device, like.dtype)


def make(name: str, grid: Tensor, level: float | None = None) -> Kernel:
    """A kernel by name on a grid ``[T + 1]``, with its usual level if none is given.

    Raises ValueError for an unknown name, a malformed grid, a negative level, and a level so high that
    ``s'^2 - std^2`` is negative somewhere (the message names the step and the highest level allowed).
    """
    if name not in _KERNELS:
        raise ValueError(f"unknown kernel {name!r}; the kernels are {', '.join(_KERNELS)}")
    usual, std_of, interpolating = _KERNELS[name]
    level = usual if level is None else float(level)
    if not 0 <= level < math.inf:
        raise ValueError(f"level of kernel {name!r} must be a finite number >= 0, not {level}")
    if name == "cps" and level > 1:
        raise ValueError(f"level of kernel 'cps' is an angle in quarter turns, in [0, 1], not {level}")
    if name == "ode" and level != 0:
        raise ValueError(f"kernel 'ode' has no noise, so its level is 0, not {level}")
    grid = grids.validate(grid)
    s, s_next = grid[:-1], grid[1:]
    std = std_of(s, s_next, level)
    if interpolating:
        rest = s_next**2 - std**2
        if bool((rest < -1e-12).any()):
            step = int(rest.argmin())
            highest = level * float((s_next / std)[std > 0].min())
            raise ValueError(
                f"level {level} of kernel {name!r} makes s'^2 - std^2 negative at step {step}; "
                f"use at most {highest:.4g}"
            )
        # rationalised form of sqrt(s'^2 - std^2) - s': no cancellation, and exactly 0 at level 0
        drift = -(std**2) / (rest.clamp(min=0).sqrt() + s_next).clamp(min=torch.finfo(torch.float64).tiny)
    else:
        drift = -(std**2) / (2 * s)
    return Kernel(name=name, grid=grid, level=level, std=std, drift=drift)


def _ode(s: Tensor, s_next: Tensor, level: float) -> Tensor:
    return torch.zeros_like(s)


def _ddim(s: Tensor, s_next: Tensor, level: float) -> Tensor:
    return level * s_next * (1 - s).sqrt()


def _cps(s: Tensor, s_next: Tensor, level: float) -> Tensor:
    return s_next * math.sin(level * math.pi / 2)


def _precise(s: Tensor, s_next: Tensor, level: float) -> Tensor:
    rho = s_next * (1 - s) / (s * (1 - s_next))
    return s_next * (1 - rho ** (level**2)).sqrt()


def _flow_sde(s: Tensor, s_next: Tensor, level: float) -> Tensor:
    # 1 - s is replaced by 1 - grid[1] at s = 1, so that the first std is exactly the level
    to_data = torch.where(s == 1, 1 - s_next, 1 - s)
    return level * (s * (s - s_next) / to_data).sqrt()


def _dance(s: Tensor, s_next: Tensor, level: float) -> Tensor:
    return level * (s - s_next).sqrt()


_KERNELS: dict[str, tuple[float, Callable[[Tensor, Tensor, float], Tensor], bool]] = {
    # name: (usual level, std table, keeps the interpolant)
    "ode": (0.0, _ode, True),
    "ddim": (0.7, _ddim, True),
    "cps": (0.8, _cps, True),
    "precise": (1.5, _precise, True),
    "flow_sde": (0.7, _flow_sde, False),
    "dance": (0.3, _dance, False),
}
KERNELS = tuple(_KERNELS)


def _reduce(values: Tensor, reduce: Reduce) -> Tensor:
    flat = values.flatten(1)
    return flat.mean(1) if reduce == "mean" else flat.sum(1)
