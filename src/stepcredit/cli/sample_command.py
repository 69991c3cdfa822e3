"""``stepcredit sample``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from stepcredit import tasks
from stepcredit.cli.common import DEFAULT_RECIPE, console, parse, resolve
from stepcredit.errors import UserError
from stepcredit.rewards.base import to_uint8
from stepcredit.sampling import sample
from stepcredit.tasks import files
from stepcredit.training import models, pictures
from stepcredit.training.chosen import chosen, require_run
from stepcredit.training.setup import torch_device
from stepcredit.training.state import load_weights


@dataclass
class Sample:
    """Write a PNG grid of images: of a recipe's base model, or of the trained weights of a run.

    The same seed gives the same noise, so grids of base and tuned weights can be laid side by side.
    """

    source: tyro.conf.Positional[str] = DEFAULT_RECIPE
    """Recipe (its base model) or folder of a run (its trained weights)."""
    prompt: tuple[str, ...] = ()
    """Prompts to draw; held-out prompts of the task by default."""
    prompts: Path | None = None
    """File of prompts, .txt or .jsonl."""
    count: int = 24
    """Images to draw; prompts take turns."""
    seed: int = 0
    """Seed of the noise."""
    steps: int | None = None
    """ODE steps; as in the recipe's training by default."""
    weights: Literal["ema", "last", "base"] = "ema"
    """Of a run: the averaged weights that were evaluated, the last ones, or the base model."""
    checkpoint: str = "auto"
    """Of a run: latest, best, or an iteration; auto is the latest, or the best where a guard stopped the run."""
    to: Path = Path("samples.png")
    """File to write."""
    enlarge: int = 4
    """Whole factor of enlargement, without blur."""
    force: bool = False
    """Overwrite the file if it exists."""


def run(argv: Sequence[str]) -> int:
    """Run the command."""
    args = parse(Sample, "sample", argv)
    if args.to.exists() and not args.force:
        raise UserError(f"{str(args.to)!r} exists; give another --to, or --force to overwrite it")
    if args.count < 1 or args.enlarge < 1:
        raise UserError(f"--count and --enlarge must be at least 1, not {args.count} and {args.enlarge}")
    of_run = (Path(args.source) / "recipe.yaml").is_file()
    if not of_run:
        require_run(args.source, args.checkpoint)
    recipe = resolve(args.source)
    out = console()
    try:
        policy = models.load_policy(recipe, torch_device(recipe.device))
        task = tasks.get(recipe.task)
        if args.prompt:
            texts = list(args.prompt)
        elif args.prompts:
            texts = [prompt.text for prompt in files.read(args.prompts)]
        else:
            _, heldout = tasks.prompts_of(task, heldout=recipe.heldout_prompts, practice=models.is_tiny(recipe))
            texts = [prompt.text for prompt in tasks.draw(heldout, args.count, "heldout")]
        if of_run and args.weights != "base":
            saved = chosen(Path(args.source), args.checkpoint, out.print)
            load_weights(policy, saved, "ema" if args.weights == "ema" else "weights")
        drawn = [texts[k % len(texts)] for k in range(args.count)]
        images = sample(policy, drawn, steps=args.steps or recipe.steps, seed=args.seed, micro_batch=recipe.micro_batch)
    except (ValueError, OSError) as error:
        raise UserError(str(error)) from error
    pictures.save_grid(args.to, to_uint8(images), gap=2, enlarge=args.enlarge)
    columns = pictures.columns_of(args.count)
    for start in range(0, args.count, columns):
        out.print(" | ".join(drawn[start : start + columns]))
    out.print(f"wrote {args.to}: {args.count} images, rows as listed")
    return 0
