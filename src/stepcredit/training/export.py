"""Export of a run: files that others open, compared with what was trained, and a card that says what they are."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from stepcredit import tasks
from stepcredit.errors import UserError
from stepcredit.policies import lora
from stepcredit.policies.base import Policy
from stepcredit.policies.desk import DeskPolicy
from stepcredit.policies.diffusers_policy import DiffusersPolicy
from stepcredit.rewards.base import to_uint8
from stepcredit.sampling import sample
from stepcredit.training import models
from stepcredit.training import recipe as recipes
from stepcredit.training.checkpoint import Warn
from stepcredit.training.chosen import AUTO, chosen
from stepcredit.training.files import write_text_atomic
from stepcredit.training.recipe import Recipe
from stepcredit.training.setup import torch_device
from stepcredit.training.state import load_weights

_log = logging.getLogger(__name__)

COLUMNS = 6
"""Pictures in a row of the grid."""
STANDS_FOR_REHEARSAL = "**This is a rehearsal**: a tiny random model, exported to prove that exporting works."


@dataclass(frozen=True)
class Exported:
    """What an export wrote."""

    files: list[Path]
    difference: float
    """Largest difference, in [0, 1], between images of the trained weights and of the file as others open it."""
    dtype: torch.dtype


def export_run(
    folder: Path,
    to: Path,
    weights: Literal["ema", "last"] = "ema",
    seed: int = 0,
    which: str = AUTO,
    warn: Warn = _log.warning,
) -> Exported:
    """Write a run's trained weights, a grid of images before and after from the same noise, and a model card to ``to``.

    ``which`` checkpoint: see :func:`stepcredit.training.chosen.chosen`, which tells ``warn`` if it is not the newest.
    A LoRA is written as ``pipe.load_lora_weights`` opens it, opened so, and compared by images; a desk model is loaded
    again and compared in the same way. Raises UserError for a folder that is not empty, and if in float32 the images
    differ at all.
    """
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise UserError(f"{str(to)!r} exists and is not empty; nothing is overwritten: give another --to")
    recipe = recipes.parse((folder / "recipe.yaml").read_text(encoding="utf-8"), str(folder / "recipe.yaml"))
    saved = chosen(folder, which, warn)
    prompts = _prompts(folder, recipe)
    policy = models.load_policy(recipe, torch_device(recipe.device))
    steps = recipe.eval_steps or recipe.steps
    before = sample(policy, prompts, steps=steps, seed=seed, micro_batch=recipe.micro_batch)
    load_weights(policy, saved, "ema" if weights == "ema" else "weights")
    after = sample(policy, prompts, steps=steps, seed=seed, micro_batch=recipe.micro_batch)

    to.mkdir(parents=True, exist_ok=True)
    path, difference, dtype = _write(policy, to, prompts, steps, recipe)
    if difference > 0 and dtype == torch.float32:
        raise UserError(
            f"{path} does not give the trained images when it is opened again (largest difference {difference:.1e}); "
            "this is a bug, please report it"
        )
    grid = to / "before-after.png"
    _grid(before, after).save(grid, format="PNG")
    card = to / "README.md"
    write_text_atomic(card, _card(folder, recipe, path, saved.iteration, weights, prompts, difference, dtype, seed))
    return Exported([path, grid, card], difference, dtype)


def _prompts(folder: Path, recipe: Recipe) -> list[str]:
    """The first held-out prompts that the run was judged on."""
    index = folder / "samples" / "samples.json"
    if index.is_file():
        found = json.loads(index.read_text(encoding="utf-8"))["prompts"][:COLUMNS]
        if found:
            return [str(prompt) for prompt in found]
    _, heldout = tasks.prompts_of(
        tasks.get(recipe.task), heldout=recipe.heldout_prompts, practice=models.is_tiny(recipe)
    )
    return [prompt.text for prompt in tasks.draw(heldout, COLUMNS, "heldout")]


def _write(policy: Policy, to: Path, prompts: list[str], steps: int, recipe: Recipe) -> tuple[Path, float, torch.dtype]:
    """Weights of a policy in the form that others open; the file, the image difference on opening it, the dtype."""
    if isinstance(policy, DeskPolicy):
        path = to / f"{recipe.task}.safetensors"
        policy.save(path)
        ours, theirs = (sample(p, prompts, steps=steps) for p in (policy, DeskPolicy.load(path)))
        return path, float((ours - theirs).abs().max()), torch.float32
    assert isinstance(policy, DiffusersPolicy)
    if recipe.tuning == "full":
        transformer = policy.pipe.transformer
        transformer.save_pretrained(to / "transformer", safe_serialization=True)
        again = type(transformer).from_pretrained(to / "transformer", torch_dtype=policy.dtype).to(policy.device)
        named = dict(again.named_parameters())
        worst = max(float((p - named[name]).detach().abs().max()) for name, p in transformer.named_parameters())
        return to / "transformer", worst, policy.dtype
    path = lora.save(policy.pipe.transformer, to)
    return path, lora.image_difference(policy, to, prompts, steps), policy.dtype


def _grid(before: Tensor, after: Tensor) -> Image.Image:
    """Images ``[N, 3, H, W]`` of the base model in the first row, of the trained one below."""
    rows = [np.concatenate(list(to_uint8(images).numpy()), axis=1) for images in (before, after)]
    return Image.fromarray(np.concatenate(rows, axis=0))


def _card(
    folder: Path,
    recipe: Recipe,
    path: Path,
    iteration: int,
    weights: str,
    prompts: list[str],
    difference: float,
    dtype: torch.dtype,
    seed: int,
) -> str:
    """A model card in Markdown, with the header that the hub reads."""
    base, pipeline = models.model_of(recipe), not models.is_desk(recipe)
    hub = pipeline and not models.is_tiny(recipe) and not Path(base).exists()
    header = {
        **({"base_model": base} if hub else {}),
        "library_name": "diffusers" if pipeline else "stepcredit",
        "tags": [
            "text-to-image",
            "reinforcement-learning",
            "stepcredit",
            *(["lora"] if recipe.tuning == "lora" else []),
        ],
    }
    steps, kind = recipe.eval_steps or recipe.steps, str(dtype).removeprefix("torch.")
    summary_path = folder / "summary.json"
    summary: dict[str, Any] = json.loads(summary_path.read_text(encoding="utf-8")) if summary_path.is_file() else {}
    measured = weights == "ema" and iteration == summary.get("iterations")  # else the rewards are of other weights
    lines = ["---", json.dumps(header), "---", "", f"# {folder.name}", ""]
    if models.is_tiny(recipe):
        lines += [STANDS_FOR_REHEARSAL, ""]
    lines += [
        f"Trained from `{base}` on the task `{recipe.task}` by reinforcement learning with step-wise credit "
        f"(`{recipe.credit}`), {iteration} iterations of {recipe.prompts_per_iteration} prompts x {recipe.group_size} "
        "images.",
        "",
        "## Rewards on held-out prompts",
        "",
        "| | mean | 95 % interval |",
        "|---|---|---|",
    ]
    for key, name in (("reward_before", "before"), ("reward_after", "after"), ("improvement", "change, paired")):
        found = summary.get(key) if measured or key == "reward_before" else None
        shown = (
            (f"{found['mean']:.4g}", f"{found['low']:.4g} to {found['high']:.4g}") if found else ("not measured", "")
        )
        lines.append(f"| {name} | {shown[0]} | {shown[1]} |")
    lines += [
        "",
        f"Reward `{summary.get('reward', recipe.reward or recipe.task)}`; intervals are over prompts within their "
        "tags. Rewards can be gamed: look at the pictures.",
        "",
        "![before and after](before-after.png)",
        "",
        f"First row before, second row after, from the same noise (seed {seed}), ODE in {steps} steps. "
        f"Opened again, the file gives the trained images to {difference:.1e} ({kind}).",
        "",
        *[f"{k}. {prompt.replace('`', chr(39))}" for k, prompt in enumerate(prompts, 1)],
        "",
        "## Use",
        "",
        "```python",
        *_usage(recipe, base, path),
        "```",
        "",
        "## Recipe",
        "",
        "```yaml",
        recipes.dump(recipe).rstrip(),
        "```",
        "",
    ]
    return "\n".join(lines)


def _usage(recipe: Recipe, base: str, path: Path) -> list[str]:
    if models.is_desk(recipe):
        return [
            "import stepcredit as sc",
            f'policy = sc.policies.desk.DeskPolicy.load("{path.name}")',
            "images = sc.sample(policy, [...])",
        ]
    guidance = "" if recipe.guidance_scale is None else f", guidance_scale={recipe.guidance_scale:g}"
    load = (
        ['pipe.load_lora_weights("path/to/this/folder")']
        if recipe.tuning == "lora"
        else ['pipe.transformer = type(pipe.transformer).from_pretrained("path/to/this/folder/transformer")']
    )
    size = recipe.resolution or models.RESOLUTION
    return [
        "from diffusers import DiffusionPipeline",
        f'pipe = DiffusionPipeline.from_pretrained("{base}")',
        *load,
        f'image = pipe("...", height={size}, width={size}{guidance}).images[0]',
    ]
