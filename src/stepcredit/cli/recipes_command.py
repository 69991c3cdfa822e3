"""``stepcredit recipes``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from stepcredit.cli.common import console, parse, table
from stepcredit.errors import UserError
from stepcredit.training import recipe as recipes
from stepcredit.training.files import write_text_atomic


@dataclass
class Recipes:
    """List the bundled recipes, show one, or copy one to a file of your own to change."""

    action: tyro.conf.Positional[Literal["list", "show", "copy"]] = "list"
    """What to do."""
    name: tyro.conf.Positional[str | None] = None
    """Recipe to show or copy."""
    to: tyro.conf.Positional[Path | None] = None
    """File to copy it to; NAME.yaml here by default."""


def run(argv: Sequence[str]) -> int:
    """Run the command."""
    args = parse(Recipes, "recipes", argv)
    out = console()
    if args.action == "list":
        rows = table("", "recipe", "credit", "kernel", "what")
        rows.columns[1].justify = rows.columns[2].justify = rows.columns[3].justify = "left"
        rows.columns[0].no_wrap = True
        for name in recipes.names():
            recipe = recipes.load(name)
            rows.add_row(name, recipe.credit, recipe.kernel, _summary(name))
        out.print(rows)
        return 0
    if args.name is None:
        raise UserError(f"name the recipe to {args.action}: stepcredit recipes {args.action} compose-stepwise")
    text = recipes.text(args.name)
    if args.action == "show":
        print(text, end="")
        return 0
    target = args.to or Path(f"{args.name}.yaml")
    if target.is_dir():
        target = target / f"{args.name}.yaml"
    if target.exists():
        raise UserError(f"{str(target)!r} exists and is not overwritten; name another file")
    write_text_atomic(target, text)
    out.print(f"wrote {target}; train it with: stepcredit train {target}")
    return 0


def _summary(name: str) -> str:
    """The first line of prose in a recipe's opening comment (the line after its command)."""
    comments = [line.lstrip("# ").strip() for line in recipes.text(name).splitlines() if line.startswith("#")]
    prose = [line for line in comments if line and not line.startswith("stepcredit ")]
    return prose[0] if prose else ""
