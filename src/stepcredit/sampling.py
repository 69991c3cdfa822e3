"""Sampling without training: the probability-flow ODE of a policy, in Euler steps on its own grid."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from stepcredit import noise as streams
from stepcredit.interpolant import euler
from stepcredit.policies.base import Policy, take


@torch.no_grad()
def sample(
    policy: Policy,
    prompts: Sequence[str],
    noise: Tensor | None = None,
    steps: int = 10,
    seed: int = 0,
    micro_batch: int | None = None,
) -> Tensor:
    """Images of prompts: float32 ``[B, 3, H, W]`` in [0, 1], with ``steps`` Euler steps of the ODE.

    noise: initial latents ``[B, *policy.latent_shape]`` in the pipeline's own layout (packed for FLUX); without it,
    image i starts from a pure function of (seed, i). micro_batch: images computed together, all by default; it changes
    the result by rounding alone. Raises ValueError for noise or steps that do not fit.
    """
    prompts = [prompts] if isinstance(prompts, str) else list(prompts)
    shape = (len(prompts), *policy.latent_shape)
    if not prompts:
        raise ValueError("prompts is empty; pass at least one")
    if noise is None:
        noise = torch.stack([streams.normal(policy.latent_shape, "sample", seed, i) for i in range(len(prompts))])
    if noise.shape != shape:
        raise ValueError(f"noise has shape {tuple(noise.shape)}; {len(prompts)} prompts of this policy need {shape}")
    if micro_batch is not None and micro_batch < 1:
        raise ValueError(f"micro_batch must be at least 1, not {micro_batch}")
    grid, cond = policy.grid(steps), policy.encode(prompts)
    rows = torch.arange(len(prompts), device=policy.device).split(micro_batch or len(prompts))
    return torch.cat([policy.decode(_solve(policy, noise[part.cpu()], take(cond, part), grid)) for part in rows])


def _solve(policy: Policy, x: Tensor, cond: dict[str, Tensor], grid: Tensor) -> Tensor:
    x = x.to(policy.device)
    for t, t_next in zip(grid.tolist()[:-1], grid.tolist()[1:], strict=True):
        x = euler(x, policy.velocity(x, torch.full((len(x),), t, device=x.device), cond), t, t_next)
    return x
