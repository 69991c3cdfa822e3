"""``stepcredit inspect``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro
from rich.progress import Progress

from stepcredit.cli.common import DEFAULT_RECIPE, console, parse_with_recipe
from stepcredit.errors import UserError
from stepcredit.inspection import collect
from stepcredit.reports import inspection as page
from stepcredit.reports import style
from stepcredit.training import models
from stepcredit.training.chosen import chosen, require_run
from stepcredit.training.setup import setup
from stepcredit.training.state import load_weights


@dataclass
class Inspect:
    """Look inside the trajectories of one prompt's group: a page of clean estimates, gains, turning points and credit.

    Of a recipe the base model is shown; of a run the base and the trained weights side by side, from the same noise.
    Kernel, window and estimate are the recipe's; any of its keys can be set for the occasion (--estimate full).
    """

    recipe: tyro.conf.Positional[str] = DEFAULT_RECIPE
    """Bundled recipe, path of a YAML file, or folder of a run; it comes first."""
    prompt: str | None = None
    """Prompt to draw; the first held-out prompt by default. A text of your own suits rewards that need no metadata."""
    members: int | None = None
    """Members of the group; the recipe's group size by default, at most 16."""
    weights: Literal["ema", "last"] = "ema"
    """Of a run: the averaged weights that were evaluated, or the last ones."""
    checkpoint: str = "auto"
    """Of a run: latest, best, or an iteration; auto is the latest, or the best where a guard stopped the run."""
    to: Path | None = None
    """Page to write; inspect.html, in the run's folder if a run is shown."""
    force: bool = False
    """Overwrite the page if it exists."""


def run(argv: Sequence[str]) -> int:
    """Run the command."""
    parsed = parse_with_recipe(Inspect, "inspect", argv)
    args = parsed.own
    folder = Path(parsed.source) if (Path(parsed.source) / "recipe.yaml").is_file() else None
    if folder is None:
        require_run(parsed.source, args.checkpoint)
    target = args.to or (folder or Path()) / "inspect.html"
    if target.exists() and not args.force:
        raise UserError(f"{str(target)!r} exists; give another --to, or --force to overwrite it")
    if not target.parent.is_dir():
        raise UserError(f"the folder {str(target.parent)!r} of --to does not exist; make it, or give another --to")
    recipe = collect.narrowed(parsed.recipe, args.members)
    saved = chosen(folder, args.checkpoint, console().print) if folder else None
    parts = setup(recipe)
    prompt = collect.find_prompt(parts, args.prompt)

    out = console()
    names = ["Base model"]
    if saved is not None:
        kind = "averaged weights" if args.weights == "ema" else "last weights"
        names.append(f"Tuned: {kind} after iteration {saved.iteration}")
    looks = []
    with Progress(console=out, transient=True, disable=not out.is_terminal) as bar:
        for k, name in enumerate(names):
            if k == 1 and saved is not None:
                load_weights(parts.policy, saved, "ema" if args.weights == "ema" else "weights")
            looks.append(collect.look(parts, prompt, name, _shown_on(bar, name)))
    seen = collect.inspection(parts, prompt, looks, models.model_of(recipe))
    style.write(target, page.render(seen))
    out.print(f'"{prompt.text}", {recipe.group_size} members, {recipe.steps} steps')
    for shown in looks:
        first, last = shown.R[:, 0].nanmean(), shown.R[:, -1].nanmean()
        out.print(f"{shown.name}: mean reward {first:.3f} of the noise's estimate -> {last:.3f} of the images")
    out.print(f"wrote {target}")
    return 0


def _shown_on(bar: Progress, name: str) -> collect.Progress:
    """A line of the display for one set of weights."""
    task = bar.add_task(name)
    return lambda phase, done, total: bar.update(task, description=f"{name}: {phase}", completed=done, total=total)
