"""How the scorer of the reward ``prefer`` is made: contrastive training on freshly rendered pairs.

Every batch is a pure function of (seed, step): prompts of the training split in balanced tags, for each a neighbour
that differs in one thing, and a picture of either. A picture is to be told from all others of the batch by its prompt,
its neighbour's among them, and a prompt by its picture (CLIP's symmetric loss); pairs that match by chance are left
out. Pictures are blurred, faded and speckled at random, as clean estimates of early states are, and of one picture in
two states the cleaner is to score higher. The same seed and thread count give the same file, byte for byte.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from stepcredit import noise
from stepcredit.rewards.prefer_model import Scorer, ScorerConfig
from stepcredit.tasks.base import Prompt, draw
from stepcredit.tasks.compose.neighbours import KINDS, Neighbours, neighbours
from stepcredit.tasks.compose.prompts import COLORS, SHAPES, TAGS, heldout_prompts, train_prompts
from stepcredit.tasks.compose.render import Label, render_labelled
from stepcredit.training.ema import EMA

BLUR, FADE, SPECKLE = 2.5, 0.6, 0.2
"""At full strength: deviation of the blur in pixels, share of the mean colour mixed in, deviation of the noise."""
_RADIUS = 5


@dataclass(frozen=True)
class PreferConfig:
    """Settings of a training run of the scorer; the defaults make the shipped one."""

    steps: int = 1600
    """Optimiser steps."""
    batch: int = 64
    """Prompts a step, each with a neighbour: twice as many pictures."""
    seed: int = 0
    scorer: ScorerConfig = field(default_factory=ScorerConfig)
    lr: float = 2e-3
    """Peak learning rate of AdamW."""
    warmup: int = 100
    quality: float = 0.3
    """Weight of the loss by which the cleaner of two pictures scores higher."""
    clean: float = 0.4
    """Share of pictures that are left as they were rendered."""
    ema: float = 0.995
    """Highest decay of the moving average of the weights, which is the result."""
    rounds: int = 10
    """Neighbours that every held-out prompt meets at the end, to measure the accuracy."""


@dataclass(frozen=True)
class Progress:
    """State of a run: step, smoothed loss, and at its end the accuracy on held-out prompts."""

    step: int
    loss: float
    accuracy: dict[str, float] | None = None


def pretrain(config: PreferConfig, report: Callable[[Progress], None] = lambda _: None) -> Scorer:
    """Train a scorer from nothing and return it with its averaged weights; ``report`` is called after every step.

    Raises ValueError for fewer than 1 step or 2 prompts a step, FloatingPointError if the loss is not finite.
    """
    if config.steps < 1 or config.batch < 2:
        raise ValueError(f"steps must be at least 1 and batch at least 2, not {config.steps} and {config.batch}")
    scorer = Scorer(config.scorer, config.seed)
    pool = train_prompts()
    beside = neighbours(pool)
    optimiser = torch.optim.AdamW(scorer.parameters(), lr=config.lr, betas=(0.9, 0.98), weight_decay=0.01)
    ema = EMA(dict(scorer.named_parameters()), config.ema)
    smoothed = math.nan
    for step in range(config.steps):
        value = loss(scorer, pool, beside, config, step)
        if not math.isfinite(float(value.detach())):
            raise FloatingPointError(f"the loss is not finite at step {step}; lower lr")
        value.backward()
        torch.nn.utils.clip_grad_norm_(scorer.parameters(), 1.0)
        for group in optimiser.param_groups:
            group["lr"] = config.lr * min(1.0, (step + 1) / config.warmup) * _decay(step / config.steps)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        ema.update()
        now = float(value.detach())
        smoothed = now if math.isnan(smoothed) else 0.98 * smoothed + 0.02 * now
        if step + 1 < config.steps:
            report(Progress(step + 1, smoothed))
    with torch.no_grad():
        for name, parameter in scorer.named_parameters():
            parameter.copy_(ema.shadow[name])
    scorer = scorer.requires_grad_(False).eval()
    report(Progress(config.steps, smoothed, accuracy(scorer, heldout_prompts(), config.rounds)))
    return scorer


def loss(scorer: Scorer, pool: Sequence[Prompt], beside: Neighbours, config: PreferConfig, step: int) -> Tensor:
    """The loss of one batch, a scalar: CLIP's symmetric one over pairs that do not match, and the quality's."""
    generator = noise.generator("prefer", config.seed, step)
    asked = draw(pool, config.batch, "prefer", config.seed, step)
    prompts = [*asked, *(_neighbour(beside[prompt.text], generator)[1] for prompt in asked)]
    images, labels = render_labelled([prompt.metadata for prompt in prompts], int(generator.integers(2**31)))
    strength = torch.from_numpy(generator.random(len(images))).float()
    strength[torch.from_numpy(generator.random(len(images)) < config.clean)] = 0.0
    seen = degrade(images, strength, generator)
    picture, prompt = scorer.embed_pictures(seen), scorer.embed_prompts([p.text for p in prompts])
    logits = scorer.scale * picture @ prompt.T  # [pictures, prompts]
    right = torch.arange(len(prompts))
    by_chance = fits(labels, prompts)
    by_chance[right, right] = False
    logits = logits.masked_fill(by_chance, -torch.inf)
    contrast = 0.5 * (functional.cross_entropy(logits, right) + functional.cross_entropy(logits.T, right))
    half = len(asked)
    worse = strength[:half] + (1 - strength[:half]) * torch.from_numpy(generator.uniform(0.3, 1, half)).float()
    spoilt = scorer.embed_pictures(degrade(images[:half], worse, generator))
    gap = scorer.scale * ((picture[:half] - spoilt) * prompt[:half]).sum(1)
    return contrast + config.quality * functional.softplus(-gap).mean()


def degrade(images: Tensor, strength: Tensor, generator: np.random.Generator) -> Tensor:
    """Pictures ``[B, 3, H, W]`` blurred, faded to their mean colour and speckled, each by random shares of ``strength``
    ``[B]`` in [0, 1]; in [0, 1]. Strength 0 leaves a picture as it is.
    """
    if not bool((strength > 0).any()):
        return images
    B, C, H, W = images.shape
    blur, fade, speckle = (strength * torch.from_numpy(generator.random(B)).float() for _ in range(3))
    sigma = (BLUR * blur).clamp(min=1e-3)
    offset = torch.arange(-_RADIUS, _RADIUS + 1)
    kernel = (-0.5 * (offset / sigma[:, None]).square()).exp()
    kernel = (kernel / kernel.sum(1, keepdim=True)).repeat_interleave(C, 0)[:, None]
    out = functional.pad(images, (_RADIUS,) * 4, mode="replicate").reshape(1, B * C, H + 2 * _RADIUS, -1)
    out = functional.conv2d(out, kernel[..., None], groups=B * C)
    out = functional.conv2d(out, kernel[:, :, None], groups=B * C).view(B, C, H, W)
    share = (FADE * fade).view(-1, 1, 1, 1)
    out = (1 - share) * out + share * images.mean((2, 3), keepdim=True)
    grain = torch.from_numpy(generator.standard_normal(images.shape, dtype=np.float32))
    out = (out + (SPECKLE * speckle).view(-1, 1, 1, 1) * grain).clamp(0, 1)
    return torch.where((strength > 0).view(-1, 1, 1, 1), out, images)


def fits(labels: Sequence[Sequence[Label]], prompts: Sequence[Prompt]) -> Tensor:
    """Whether picture i, drawn for prompt i, may show what prompt j asks for: bool ``[N, N]``, from the labels.

    The objects must be exactly those asked for, on the background asked for. Relations are compared as they were asked
    for; where only prompt j asks for one, the picture is taken to fit.
    """
    N = len(prompts)
    held = torch.zeros(N, len(SHAPES), len(COLORS), dtype=torch.long)
    for k, objects in enumerate(labels):
        for one in objects:
            held[k, SHAPES.index(one.cls), COLORS.index(one.color)] += 1
    of_shape, total = held.sum(2), held.sum((1, 2))
    result = torch.zeros(N, N, dtype=torch.bool)
    grounds = [prompt.metadata["background"] for prompt in prompts]
    relations = [_relation(prompt) for prompt in prompts]
    for j, prompt in enumerate(prompts):
        clauses = prompt.metadata["include"]
        good = (total == sum(clause["count"] for clause in clauses)) & torch.tensor([g == grounds[j] for g in grounds])
        for clause in clauses:
            shape = SHAPES.index(clause["class"])
            there = held[:, shape, COLORS.index(clause["color"])] if "color" in clause else of_shape[:, shape]
            good &= there == clause["count"]
        if relations[j] is not None:
            good &= torch.tensor([own is None or own == relations[j] for own in relations])
        result[:, j] = good
    return result


def accuracy(scorer: Scorer, prompts: Sequence[Prompt], rounds: int, strength: float = 0.0) -> dict[str, float]:
    """Share of pairs in which a prompt's own picture scores above that of a neighbour, by tag and by kind of change.

    Each prompt meets one neighbour a round, on fresh pictures, all degraded by ``strength`` in [0, 1].
    """
    beside = neighbours(prompts)
    right: dict[str, list[bool]] = {name: [] for name in (*TAGS, *KINDS)}
    asked = [prompt for prompt in prompts if beside[prompt.text]]
    for turn in range(rounds):
        generator = noise.generator("prefer accuracy", turn)
        twins = [_neighbour(beside[prompt.text], generator) for prompt in asked]
        pictured = [*asked, *(twin for _, twin in twins)]
        drawn, _ = render_labelled([p.metadata for p in pictured], int(generator.integers(2**31)))
        drawn = degrade(drawn, torch.full((len(drawn),), strength), generator)
        with torch.no_grad():
            own, other = scorer(drawn, [p.text for p in (*asked, *asked)]).chunk(2)
        for prompt, (kind, _), better in zip(asked, twins, (own > other).tolist(), strict=True):
            right[prompt.tag].append(better)
            right[kind].append(better)
    return {name: sum(each) / len(each) for name, each in right.items() if each}


def metadata(config: PreferConfig) -> dict[str, str]:
    """What the header of the weights says of their making."""
    return {
        "command": "stepcredit pretrain prefer",
        **{f"pretrain.{key}": str(value) for key, value in asdict(config).items()},
    }


def _relation(prompt: Prompt) -> tuple[str, str, str] | None:
    """The relation asked for, the same for "a left of b" and "b right of a"; None where none is."""
    clauses = prompt.metadata["include"]
    if "position" not in clauses[-1]:
        return None
    target, placed = clauses
    name = placed["position"][0]
    a, b = placed["class"], target["class"]
    return (a, name, b) if name in ("left of", "above") else (b, {"right of": "left of", "below": "above"}[name], a)


def _decay(done: float) -> float:
    """A cosine from 1 to 0."""
    return 0.5 * (1 + math.cos(math.pi * done))


def _neighbour(by_kind: Mapping[str, Sequence[Prompt]], generator: np.random.Generator) -> tuple[str, Prompt]:
    """A kind of change, all equally likely, and a prompt changed so."""
    kinds = sorted(by_kind)
    kind = kinds[int(generator.integers(len(kinds)))]
    return kind, by_kind[kind][int(generator.integers(len(by_kind[kind])))]
