"""``stepcredit check``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import tyro
from rich.text import Text

from stepcredit.cli.common import DEFAULT_RECIPE, console, parse_with_recipe
from stepcredit.training.checks import run_checks
from stepcredit.training.setup import setup


@dataclass
class Check:
    """Prove on this machine that a recipe can be trained; exit code 1 if anything fails.

    Batch algebra, level 0 = ODE, the reward's self-test, a ratio of exactly 1 before the first update, and one update
    that moves weights and images. Writes nothing.
    """

    recipe: tyro.conf.Positional[str] = DEFAULT_RECIPE
    """Bundled recipe, path of a YAML file, or folder of a run; it comes first."""


def run(argv: Sequence[str]) -> int:
    """Run the command."""
    parsed = parse_with_recipe(Check, "check", argv)
    parts = setup(parsed.recipe)
    out = console()
    failed = 0
    for result in run_checks(parts):
        out.print(Text("pass", "green") if result.passed else Text("FAIL", "red"), end="")
        out.print(f"  {result.name:<27}", end="")
        out.print(result.detail)
        failed += not result.passed
    out.print("ready to train" if not failed else f"{failed} failed: mend these before training")
    return 1 if failed else 0
