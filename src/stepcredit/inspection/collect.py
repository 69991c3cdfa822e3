"""From the parts of a run to what can be looked at: one group's clean estimates and their rewards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from stepcredit import scoring, tasks
from stepcredit.errors import UserError, nearest
from stepcredit.rewards.base import RewardError, require_finite, score, to_uint8
from stepcredit.tasks import Prompt
from stepcredit.training import models
from stepcredit.training import recipe as recipes
from stepcredit.training.collect import sample
from stepcredit.training.recipe import Recipe
from stepcredit.training.setup import Setup

SHARP = 96
"""Images up to this many pixels wide and high are kept as they are."""
REDUCED = 192
"""Longer side of the others, once reduced."""
ITERATION = 0
"""Iteration that names the noise of a look: one that training, which begins at 1, never uses."""

Progress = Callable[[str, int, int], None]
"""``progress(phase, done, total)``."""


@dataclass(frozen=True)
class Look:
    """One prompt's group as one set of weights draws it."""

    name: str
    R: Tensor
    """float32 ``[G, T + 1]``: reward of the clean estimate of every state, NaN where it has none."""
    images: Tensor
    """uint8 ``[N, H, W, 3]``: the distinct clean estimates, reduced if large."""
    estimate: Tensor
    """long ``[G, T + 1]``: which of them belongs to each member's state."""


@dataclass(frozen=True)
class Inspection:
    """A group, looked at under one or two sets of weights from the same noise."""

    prompt: Prompt
    recipe: Recipe
    """The recipe as inspected: one prompt, with the members shown."""
    grid: Tensor
    """float64 ``[T + 1]``: times of the states."""
    level: float
    """Noise level of the kernel."""
    std: Tensor
    """float64 ``[T]``: noise of the kernel at each step, whether the window lets it take any or not."""
    trained: Tensor
    """bool ``[G, T]``: steps that take noise, which are the trained ones."""
    looks: tuple[Look, ...]
    reward: str = ""
    model: str = ""


def narrowed(recipe: Recipe, members: int | None = None) -> Recipe:
    """The recipe for one group of ``members``, its own group size (at most 16) by default. Raises UserError.

    Kernel, level, window and estimates stay. TempFlow's branches become one group that is noisy in the whole window:
    a branch has a single step to look at.
    """
    members = min(recipe.group_size, 16) if members is None else members
    if members < 2:
        raise UserError(f"--members must be at least 2, not {members}: a member is judged against its group")
    keys = recipe.model_dump() | {
        "prompts_per_iteration": 1,
        "group_size": members,
        "micro_batch": max(n for n in range(1, min(recipe.micro_batch, members) + 1) if members % n == 0),
        "updates_per_rollout": 1,
        "replay": "recompute",
        "branch": False,
        "credit": "uniform" if recipe.credit == "tempflow" else recipe.credit,
        # any prompt may be asked for, so the text encoders stay; what training needs of memory is not needed here
        "embedding_cache": None,
        "check_memory": False,
    }
    return recipes.build(keys, "the recipe of the inspection")


def find_prompt(parts: Setup, text: str | None) -> Prompt:
    """The prompt of this text among those held out or trained on, with its metadata; the first held-out one for None.

    A text of one's own comes without metadata, which suits rewards that need none.
    """
    if text is None:
        return parts.heldout[0].prompt
    if not text.strip():
        raise UserError("--prompt is empty; leave it out for the first held-out prompt, or give a text")
    wanted = " ".join(text.lower().split())
    return next((p for p in _known(parts.recipe) if " ".join(p.text.lower().split()) == wanted), Prompt(text))


@torch.no_grad()
def look(parts: Setup, prompt: Prompt, name: str, progress: Progress = lambda phase, done, total: None) -> Look:
    """Sample the group of a prompt with the policy's present weights and score the estimate of every state.

    ``parts`` are those of a narrowed recipe. The noise is named by (seed, member, step) alone, so looks at different
    weights are paired. Raises UserError for a prompt that the policy or the reward cannot do with.
    """
    recipe, policy = parts.recipe, parts.policy
    try:
        sampled = sample(
            replace(parts, train=(prompt,)), ITERATION, lambda done: progress("sampling", done, recipe.steps)
        )
    except ValueError as error:  # a word that the model does not know
        raise UserError(str(error)) from error
    layout, grid = sampled.groups.layout, parts.kernel.grid
    plan = scoring.plan(layout, grid, recipe.estimate, recipe.substeps, recipe.spacing)
    x_0 = scoring.clean_estimates(sampled.trajectory, plan, sampled.velocity, recipe.micro_batch)
    rewards, images = [], []
    for part in x_0.split(parts.reward.info.batch_size):
        decoded = torch.cat([policy.decode(some).cpu() for some in part.split(recipe.micro_batch)])
        rewards.append(_scored(parts, decoded, prompt))
        images.append(to_uint8(_reduced(decoded)))
        progress("scoring", sum(map(len, images)), plan.count)
    R = plan.per_state(torch.cat(rewards))
    return Look(name, R, torch.cat(images), plan.estimate)


def inspection(parts: Setup, prompt: Prompt, looks: Sequence[Look], model: str = "") -> Inspection:
    """Looks at one group together with what they share."""
    return Inspection(
        prompt=prompt,
        recipe=parts.recipe,
        grid=parts.kernel.grid,
        level=parts.kernel.level,
        std=parts.kernel.std,
        trained=parts.batch(ITERATION)[1].layout.noisy,
        looks=tuple(looks),
        reward=parts.reward.info.name,
        model=model,
    )


def _known(recipe: Recipe) -> list[Prompt]:
    """All prompts held out or trained on; a run's own evaluations draw from the former."""
    task = tasks.get(recipe.task)
    train, heldout = tasks.prompts_of(
        task, recipe.train_prompts, recipe.heldout_prompts, practice=models.is_tiny(recipe)
    )
    return [*heldout, *train]


def _scored(parts: Setup, images: Tensor, prompt: Prompt) -> Tensor:
    require_finite(images, [prompt.text] * len(images))
    try:
        return score(parts.reward, images, [prompt.text] * len(images), [prompt.metadata] * len(images))
    except RewardError as error:
        if prompt.metadata:
            raise
        known = [p.text for p in _known(parts.recipe)]
        raise UserError(
            f"prompt {prompt.text!r} is none of the recipe's own, so the reward knows nothing of it but its text"
            f"{nearest(prompt.text, known)} ({error})"
        ) from error


def _reduced(images: Tensor) -> Tensor:
    """Images ``[B, 3, H, W]`` no longer than REDUCED on a side, or as they are up to SHARP."""
    height, width = images.shape[-2:]
    if max(height, width) <= SHARP:
        return images
    scale = min(1.0, REDUCED / max(height, width))
    size = (max(1, round(height * scale)), max(1, round(width * scale)))
    return interpolate(images.float(), size=size, mode="bilinear", antialias=True)
