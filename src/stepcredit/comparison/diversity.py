"""How different the images of one prompt are: measured for a comparison, since a run's evaluations draw each once."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch

from stepcredit import noise
from stepcredit.comparison.runs import Planned
from stepcredit.policies.base import Policy
from stepcredit.sampling import sample
from stepcredit.training import checkpoint
from stepcredit.training import recipe as recipes
from stepcredit.training.files import write_text_atomic
from stepcredit.training.image_stats import pairwise_diversity
from stepcredit.training.records import to_json
from stepcredit.training.setup import POLICY, setup
from stepcredit.training.state import load_weights

PROMPTS, MEMBERS = 24, 4
BASE = "base"


def within_prompts(policy: Policy, prompts: Sequence[str], steps: int, micro_batch: int) -> float:
    """Pairwise diversity of ``MEMBERS`` images of each prompt, drawn by the ODE from noise of their own."""
    asked = [(prompt, k, m) for k, prompt in enumerate(prompts) for m in range(MEMBERS)]
    x_1 = torch.stack([noise.normal(policy.latent_shape, "diversity", k, m) for _, k, m in asked])
    images = sample(policy, [prompt for prompt, _, _ in asked], noise=x_1, steps=steps, micro_batch=micro_batch)
    return pairwise_diversity(images.unflatten(0, (len(prompts), MEMBERS)))


def measure(planned: Sequence[Planned], folder: Path) -> dict[str, float]:
    """Diversity within prompts of the base model (``base``) and of every finished run, by the run folder's name.

    Kept in ``diversity.json``, so that a comparison that goes on measures only what is new. Runs of another policy than
    the first run's are left out.
    """
    path = folder / "diversity.json"
    known: dict[str, float] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    first = planned[0].recipe
    alike = [run for run in planned if run.finished and not set(recipes.changed(first, run.recipe)) & set(POLICY)]
    keys = {run.folder.name: f"{run.folder.name}@{run.recipe.iterations}" for run in alike}
    if all(key in known for key in (BASE, *keys.values())):
        return {BASE: known[BASE], **{name: known[key] for name, key in keys.items()}}
    parts = setup(first)
    prompts = list(dict.fromkeys(slot.prompt.text for slot in parts.heldout))[:PROMPTS]

    def value() -> float:
        return within_prompts(parts.policy, prompts, parts.eval_steps, first.micro_batch)

    if BASE not in known:
        known[BASE] = value()
    for run in alike:
        if keys[run.folder.name] not in known:
            load_weights(parts.policy, checkpoint.load(run.folder / "checkpoints"))
            known[keys[run.folder.name]] = value()
    write_text_atomic(path, to_json(known, indent=1))
    return {BASE: known[BASE], **{name: known[key] for name, key in keys.items()}}
