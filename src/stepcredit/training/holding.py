"""What an iteration holds of its trajectories, from sampling to the update, and how many bytes that is at its peak."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from stepcredit import storage
from stepcredit.rollout import Layout, chunks
from stepcredit.scoring import ScoringPlan
from stepcredit.storage import Kept
from stepcredit.training.recipe import Recipe


def for_update(recipe: Recipe, tree: Layout) -> Kept:
    """What replaying the trained steps of a layout will ask for: whole chunks of states, since the model must see the
    batch that sampled, and the states that their noisy members went to.

    Retained graphs bring both; a KL penalty and a trust region ask for the states all the same, GRPO-Guard's ratio for
    the velocities.
    """
    kept = storage.nothing(tuple(tree.rows(i) for i in range(tree.steps + 1)))
    retained = recipe.replay == "retain"
    for i in range(tree.steps):
        for chunk in chunks(tree, i, recipe.micro_batch):
            if len(chunk.members) == 0:
                continue
            if not retained or recipe.kl_beta > 0 or recipe.trust_kl is not None:
                kept.states[i][chunk.rows] = True
            if not retained:
                kept.states[i + 1][tree.index[i + 1][chunk.members]] = True
            if recipe.ratio == "normalised":
                kept.velocities[i][chunk.rows] = True
    return kept


def peak_bytes(recipe: Recipe, cells: Sequence[tuple[Layout, ScoringPlan]], numel: int) -> int:
    """Most bytes of states, velocities and clean estimates at once in an iteration over these cells, for latents of
    ``numel`` numbers: a cell is scored when it was sampled, and keeps from then on what its update needs.
    """
    itemsize = getattr(torch, recipe.latent_dtype).itemsize
    held = peak = 0
    for tree, plan in cells:
        update = for_update(recipe, tree)
        whole = (update | plan.needs(tree)).nbytes(numel, itemsize)
        rows = [tree.rows(i) for i in range(tree.steps + 1)]
        moving = max((a + b) * itemsize + a * 4 for a, b in itertools.pairwise(rows)) * numel
        copies = 0
        if recipe.replay == "retain":  # of each noisy member's state, successor and velocity
            copies = int(tree.noisy.sum()) * numel * (2 * itemsize + 4)
        peak = max(peak, held + whole + copies + max(moving, plan.count * numel * 4))
        held += update.nbytes(numel, itemsize) + copies
    return max(peak, held)
