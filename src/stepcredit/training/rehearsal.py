"""Rehearsals: a recipe whole, from sampling to export, made small enough for any machine and a minute.

Everything but sizes stays: kernel, credit, advantage, objective, guidance, adapters and their targets. The model
becomes a tiny random pipeline of the same family, large rewards become tiny random ones, prompts are our own.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

import torch

from stepcredit import rewards, tasks
from stepcredit.training import models
from stepcredit.training import recipe as recipes
from stepcredit.training.recipe import Recipe

SMALL: dict[str, Any] = {
    "iterations": 2,
    "group_size": 4,
    "eval_every": 1,
    "eval_prompts": 6,
    "eval_prompts_during": 4,
    "checkpoint_every": 1,
    "lr_schedule": "constant",
    "warmup": 0,
}
RESOLUTION = 32
TOKENS = 16
STAND_INS = {
    "pickscore": "tiny_pickscore",
    "clip_l14_cos": "tiny_pickscore",
    "ocr": "tiny_ocr",
    "geneval": "tiny_geneval",
    "geneval_partial": "tiny_geneval",
    "jpeg_size": "jpeg_size",
}
"""Reward -> its stand-in; all others are replaced by ``jpeg_size``."""
LOUD = (
    "REHEARSAL: a tiny model and a few prompts stand in for the real ones. It proves that this recipe runs from end to "
    "end; its rewards and images mean nothing."
)


def rehearsed(recipe: Recipe, given: Mapping[str, Any] | None = None) -> Recipe:
    """The same recipe on tiny parts; desk recipes keep model and reward. Raises UserError for an unknown family.

    ``given``: keys that the user has set; of these the numbers of the batch and of the evaluations are kept.
    """
    keys = {**recipe.model_dump(), **SMALL}
    keys["prompts_per_iteration"] = 2 * recipe.updates_per_rollout
    keys["micro_batch"] = 4
    keys |= dict.fromkeys(("max_kl", "max_ratio_deviation", "max_reward_drop", "max_watch_drop", "max_image_drift"))
    keys["eval_steps"] = min(recipe.eval_steps or recipe.steps, recipe.steps)
    kept = (*SMALL, "prompts_per_iteration", "micro_batch", "eval_steps")
    keys |= {key: value for key, value in (given or {}).items() if key in kept}
    family = models.family_name(recipe)
    if family is not None:
        reward = recipe.reward or tasks.get(recipe.task).reward
        keys |= {
            "model": models.TINY + family,
            "revision": None,
            "resolution": RESOLUTION,
            "max_sequence_length": TOKENS,
            "precision": recipe.precision if torch.cuda.is_available() and recipe.device != "cpu" else "fp32",
            "lora_rank": min(recipe.lora_rank, 4),
            "lora_alpha": recipe.lora_alpha * min(recipe.lora_rank, 4) / recipe.lora_rank,
            "reward": stand_in(reward),
            "reward_options": _weights(recipe.reward_options) if reward == "composite" else {},
            "watch": _watched(recipe.watch, stand_in(reward)),
            "watch_options": {},
            "train_prompts": None,
            "heldout_prompts": None,
        }
    return recipes.build(keys, "the rehearsal")


def stand_in(reward: str) -> str:
    """Name of the reward that rehearses another one; of a composite, every part has its own."""
    if reward == "composite":
        return reward
    if reward == "ocr" and importlib.util.find_spec("rapidocr") is None:
        return "jpeg_size"
    return reward if reward in STAND_INS.values() else STAND_INS.get(reward, "jpeg_size")


def _watched(watch: str | None, reward: str) -> str | None:
    """A stand-in for the watched reward that is not the trained one's."""
    if watch is None or stand_in(watch) not in (reward, "composite"):
        return watch and stand_in(watch)
    return "tiny_pickscore" if reward == "jpeg_size" else "jpeg_size"


def _weights(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a composite with a stand-in for every part; parts with the same stand-in add their weights."""
    small: dict[str, Any] = {key: options[key] for key in ("how", "group_size") if key in options}
    for key, value in options.items():
        if key in rewards.names():
            name = stand_in(key)
            small[name] = small.get(name, 0) + value
    return small


def replaced(recipe: Recipe, small: Recipe) -> str:
    """What a rehearsal has put in place of what, in a line."""
    real, tiny = ((r.reward or tasks.get(r.task).reward) for r in (recipe, small))
    parts = [f"model {models.model_of(recipe)} -> {models.model_of(small)}", f"reward {real} -> {tiny}"]
    changed = recipes.changed(recipe, small)
    keys = (
        "iterations",
        "prompts_per_iteration",
        "group_size",
        "micro_batch",
        "resolution",
        "precision",
        "eval_prompts",
    )
    parts += [f"{key} {changed[key][0]} -> {changed[key][1]}" for key in keys if key in changed]
    return "; ".join(part for part in parts if part.split(" -> ")[0].split(" ", 1)[1] != part.split(" -> ")[1])


def first_half(small: Recipe) -> Recipe:
    """The rehearsal up to its first checkpoint, which it is then resumed from."""
    return recipes.build({**small.model_dump(), "iterations": 1}, "the rehearsal")
