"""Flow matching on freshly rendered pictures: how the base model of a desk task is made.

Every batch is a pure function of (seed, step): prompts of the training split in balanced tags, pictures, times and
noise. Matrices inside the blocks are trained by Muon, everything else by AdamW; the result is the moving average of the
weights. The same seed and thread count give the same file, byte for byte.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from stepcredit import noise, rewards, tasks
from stepcredit.interpolant import interpolate
from stepcredit.policies.desk import DeskPolicy, vocabulary
from stepcredit.tasks.compose import render as compose
from stepcredit.tasks.spell import render as spell
from stepcredit.training.ema import EMA
from stepcredit.training.evaluation import evaluate, slots
from stepcredit.training.muon import Muon


@dataclass(frozen=True)
class PretrainConfig:
    """Settings of a pretraining run; the defaults make the shipped model of ``compose``."""

    task: str = "compose"
    steps: int = 9000
    """Optimiser steps."""
    batch: int = 32
    """Pictures a step."""
    seed: int = 0
    text_length: int = 10
    """Words of a prompt that the model reads."""
    hidden: int = 96
    depth: int = 3
    heads: int = 3
    muon_lr: float = 0.03
    """Peak learning rate of the blocks' matrices."""
    muon_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """What their updates are orthogonalised in; float32 is faster on CPUs without bfloat16 units."""
    adam_lr: float = 3e-3
    """Peak learning rate of all other weights."""
    warmup: int = 100
    decay: bool = True
    """Let the learning rate fall to 0 along a cosine; without, it stays at its peak."""
    shift: float = 2.2
    """Times are those of a uniform grid, shifted towards noise by this much."""
    ema: float = 0.998
    """Highest decay of the moving average."""
    evaluate_every: int = 1000
    """Steps between evaluations; 0 evaluates at the end only."""
    evaluate_prompts: int = 240


CONFIGS = {
    "compose": PretrainConfig(),
    "spell": PretrainConfig(
        task="spell",
        steps=1250,
        batch=48,
        text_length=4,
        hidden=128,
        depth=4,
        heads=4,
        muon_dtype="float32",
        decay=False,
        shift=3.0,
        evaluate_every=250,
        evaluate_prompts=160,
    ),
}
"""What makes the shipped model of every desk task."""


def shipped(task: str) -> PretrainConfig:
    """The settings that made a task's shipped model. Raises ValueError, naming the nearest, for one without a model."""
    vocabulary(task)
    return CONFIGS[task]


_Pictures = Callable[[list[tasks.Prompt], int], Tensor]
_RENDERERS: dict[str, tuple[_Pictures, int, int]] = {
    "compose": (compose.render_batch, compose.SIZE, compose.SIZE),
    "spell": (spell.render_batch, spell.HEIGHT, spell.WIDTH),
}
"""Task -> its renderer, height and width."""


@dataclass(frozen=True)
class Progress:
    """State of a run: step, smoothed loss, and at an evaluation the held-out reward and share of exact pictures."""

    step: int
    loss: float
    reward: float | None = None
    exact: float | None = None


def pretrain(config: PretrainConfig, report: Callable[[Progress], None] = lambda _: None) -> DeskPolicy:
    """Train a desk model from nothing and return it with its averaged weights.

    ``report`` is called after every step. Raises ValueError for a task without a desk model or fewer than 1 step, and
    FloatingPointError if the loss is not finite.
    """
    if config.steps < 1 or config.batch < 1:
        raise ValueError(f"steps and batch must be at least 1, not {config.steps} and {config.batch}")
    _, height, width = _renderer(config.task)
    policy = DeskPolicy.initial(
        config.task,
        config.seed,
        text_length=config.text_length,
        height=height,
        width=width,
        hidden=config.hidden,
        depth=config.depth,
        heads=config.heads,
    )
    prompts = tasks.get(config.task).train()
    optimisers = _optimisers(policy.model, config)
    peaks = [[group["lr"] for group in optimiser.param_groups] for optimiser in optimisers]
    ema = EMA(dict(policy.named_parameters()), config.ema)
    smoothed = float("nan")
    for step in range(config.steps):
        drawn = tasks.draw(prompts, config.batch, "pretrain", config.seed, step)
        loss = flow_matching_loss(policy, drawn, config, step)
        if not math.isfinite(float(loss.detach())):
            raise FloatingPointError(f"the loss is not finite at step {step}; lower muon_lr and adam_lr")
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.model.parameters(), 1.0)
        scale = _schedule(step, config)
        for optimiser, rates in zip(optimisers, peaks, strict=True):
            for group, peak in zip(optimiser.param_groups, rates, strict=True):
                group["lr"] = peak * scale
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        ema.update()
        smoothed = float(loss.detach()) if math.isnan(smoothed) else 0.99 * smoothed + 0.01 * float(loss.detach())
        report(Progress(step + 1, smoothed, *_evaluated(policy, ema, config, step + 1)))
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            parameter.copy_(ema.shadow[name])
    policy.reset_reference()
    return policy


def flow_matching_loss(policy: DeskPolicy, prompts: list[tasks.Prompt], config: PretrainConfig, step: int) -> Tensor:
    """Mean squared error of the velocity on one batch, a scalar. Source: flow matching (2210.02747)."""
    generator = noise.generator("flow matching", config.seed, step)
    render, _, _ = _renderer(config.task)
    x_0 = 2 * render(prompts, int(generator.integers(2**31))) - 1
    x_1 = torch.from_numpy(generator.standard_normal(x_0.shape, dtype=np.float32))
    # stratified: every batch covers the whole range of times
    n = len(prompts)
    u = torch.from_numpy((generator.permutation(n) + generator.random(n)) / n).float()
    t = config.shift * u / (1 + (config.shift - 1) * u)
    v = policy.velocity(interpolate(x_0, x_1, t), t, policy.encode([prompt.text for prompt in prompts]))
    return (v - (x_1 - x_0)).square().mean()


def metadata(config: PretrainConfig) -> dict[str, str]:
    """What the header of the weights says of their making."""
    return {
        "command": f"stepcredit pretrain {config.task}",
        **{f"pretrain.{k}": str(v) for k, v in asdict(config).items()},
    }


def _renderer(task: str) -> tuple[_Pictures, int, int]:
    vocabulary(task)  # refuses a task without a desk model
    return _RENDERERS[task]


def _optimisers(model: nn.Module, config: PretrainConfig) -> list[torch.optim.Optimizer]:
    inner: list[nn.Parameter] = []
    outer: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        (inner if name.startswith("blocks.") and parameter.ndim == 2 else outer).append(parameter)
    return [
        Muon(inner, config.muon_lr, weight_decay=0.01, dtype=getattr(torch, config.muon_dtype)),
        torch.optim.AdamW(outer, lr=config.adam_lr, betas=(0.9, 0.99), weight_decay=0.01),
    ]


def _schedule(step: int, config: PretrainConfig) -> float:
    """Linear warm-up, times a cosine from 1 to 0 if the rate decays."""
    decay = 0.5 * (1 + math.cos(math.pi * step / config.steps)) if config.decay else 1.0
    return min(1.0, (step + 1) / config.warmup) * decay


def _evaluated(policy: DeskPolicy, ema: EMA, config: PretrainConfig, step: int) -> tuple[float | None, float | None]:
    due = config.evaluate_every and step % config.evaluate_every == 0
    if not due and step < config.steps:
        return None, None
    task = tasks.get(config.task)
    heldout = slots(tasks.draw(task.heldout(), config.evaluate_prompts, "heldout"))
    with ema.applied():
        result = evaluate(policy, rewards.get(task.reward), heldout, steps=10, micro_batch=60)
    exact = result.exact_rate
    return result.reward.mean, exact.mean if exact else None
