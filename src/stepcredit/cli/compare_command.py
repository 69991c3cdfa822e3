"""``stepcredit compare``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro
from rich.live import Live

from stepcredit.cli.common import console, parse_with_recipes, table
from stepcredit.comparison import diversity
from stepcredit.comparison.board import Board
from stepcredit.comparison.runs import execute, plan
from stepcredit.comparison.summary import interval, summarise
from stepcredit.errors import UserError
from stepcredit.reports import comparison as page
from stepcredit.training.files import safe_run_dir, write_text_atomic
from stepcredit.training.interrupt import Stop, interruptible
from stepcredit.training.records import to_json
from stepcredit.training.setup import setup


@dataclass
class Compare:
    """Train several recipes with the same seeds and say what their differences are worth.

    Every run is an ordinary run folder inside runs/NAME. Ctrl-C saves the run in hand; the same command goes on from
    there, keeps what is finished, and takes further recipes or seeds. Flags set keys of all recipes. Writes
    comparison.json and comparison.html.
    """

    recipes: tyro.conf.Positional[tuple[str, ...]] = ()
    """Bundled recipes, paths of YAML files, or folders of runs; the first is what the others are compared with."""
    seeds: int = 3
    """Seeds of each recipe."""
    seed: int = 0
    """The first of them."""
    target: float | None = None
    """Held-out reward to reach; halfway from the base model to the first recipe's mean end by default."""
    name: str | None = None
    """Name of the comparison; by default made of the recipes' names."""
    out: Path = Path("runs")
    """Folder that holds it."""
    jobs: int = 1
    """Runs at a time, each in a process and with a thread of its own; 1 trains in this process."""
    json: bool = False
    """Print the JSON."""


def run(argv: Sequence[str]) -> int:
    """Run the command; 0, 1 if a run failed, 130 after Ctrl-C."""
    parsed = parse_with_recipes(Compare, "compare", argv)
    args = parsed.own
    for name in ("seeds", "jobs"):
        if getattr(args, name) < 1:
            raise UserError(f"--{name} must be at least 1, not {getattr(args, name)}")
    if args.seed < 0:
        raise UserError(f"--seed must not be negative, and is {args.seed}")
    folder = safe_run_dir(args.out, args.name or "-vs-".join(parsed.recipes)[:100])
    planned = plan(parsed.recipes, range(args.seed, args.seed + args.seeds), folder)
    for recipe in parsed.recipes.values():  # what cannot be trained is refused before the first run begins
        setup(recipe, weights=False)
    folder.mkdir(parents=True, exist_ok=True)

    out = console(stderr=args.json)
    stop, board = Stop(), Board(planned, args.jobs)
    live = Live(board, console=out, refresh_per_second=1) if out.is_terminal else None

    def tell(line: str) -> None:
        out.print(line)

    def ended(done: Any) -> None:
        if live is None:
            tell(board.line(done))

    with interruptible(stop, tell):
        if live is None:
            failed = execute(planned, args.jobs, stop, out, ended)
        else:
            with live:
                failed = execute(planned, args.jobs, stop, out, ended)
    finished = any(run.finished for run in planned)
    spread = diversity.measure(planned, folder) if finished and stop.reason is None else {}
    found = summarise(planned, args.target, spread, failed)
    text = to_json(found, indent=2)
    write_text_atomic(folder / "comparison.json", text + "\n")
    page.write(folder, found)
    if args.json:
        print(text)
    else:
        show(found, folder)
    if stop.reason is not None:
        tell(f"{stop.reason}; the same command goes on from here")
        return 130
    return 1 if failed else 0


def show(found: Mapping[str, Any], folder: Path) -> None:
    """Print the result for a person."""
    out = console()
    for name, reason in found["failed"].items():
        out.print(f"{name} failed: {reason}")
    if found["recipes"]:
        seeds = found["seeds"]
        target = "no target" if found["target"] is None else f"target {found['target']:.3f} ({found['target_kind']})"
        rows = table(
            f"seeds {', '.join(map(str, seeds))}; {target}; × what the first needs to reach it, paired by seed",
            *("recipe", "after", "to the first", "× iterations", "× evaluations", "× seconds"),
        )
        for column in rows.columns:
            column.no_wrap = True
        for k, recipe in enumerate(found["recipes"]):
            ratios = recipe["ratio"] or {}
            rows.add_row(
                recipe["label"],
                _shown(recipe["reward"]),
                "" if k == 0 else _shown(recipe["to_first"], "+"),
                *(_ratio(ratios[axis]) if k and ratios else "" for axis in page.AXES),
            )
        out.print(rows)
    for verdict in page.verdicts(found):
        out.print(verdict)
    out.print(f"page: {folder / 'comparison.html'}")


def _shown(value: Mapping[str, Any], sign: str = "") -> str:
    told = interval(value)
    bounds = "" if told.low != told.low else f" [{told.low:{sign}.3f}, {told.high:{sign}.3f}]"
    return f"{told.mean:{sign}.3f}{bounds}"


def _ratio(ratio: Mapping[str, Any]) -> str:
    return "unknown" if ratio["value"] is None else page.times(ratio).removesuffix(" times")
