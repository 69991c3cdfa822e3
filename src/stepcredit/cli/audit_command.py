"""``stepcredit audit``."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from stepcredit.audit.measure import measure
from stepcredit.audit.result import FEWEST, summarise
from stepcredit.audit.schemes import prepare, shapes, standard
from stepcredit.cli.common import console, parse_with_recipes, table
from stepcredit.errors import UserError
from stepcredit.training import checkpoint
from stepcredit.training.interrupt import Stop, interruptible
from stepcredit.training.records import to_json
from stepcredit.training.state import load_weights


@dataclass
class Audit:
    """Measure, without training, the gradient's signal under each recipe's credit, kernel, window and normalisation.

    All recipes look at one policy, that of the first (its averaged weights, if it is the folder of a run), on the same
    prompts and noise; those that agree in their rollouts share them. Ends with the setting to take. Flags set keys of
    all recipes. Ctrl-C gives the result so far.
    """

    recipes: tyro.conf.Positional[tuple[str, ...]] = ()
    """Bundled recipes, paths of YAML files, or folders of runs; they come first."""
    groups: int = 64
    """Prompts to measure, each with one group; intervals narrow with the square root of their number."""
    all_schemes: bool = False
    """Add the standard table of credit schemes on the first recipe's kernel, window and estimate."""
    seed: int = 0
    """Seed of prompts and noise."""
    dimensions: int = 16384
    """Numbers to which a gradient is sketched, unbiased; models with no more parameters are measured exactly."""
    plain: bool = False
    """Hold schemes against the gradient of the expected reward with all steps weighted equally, whatever the recipe's
    `step_weight`: exact, and much noisier."""
    json: bool = False
    """Print JSON."""
    to: Path | None = None
    """Also write the JSON to this file."""


def run(argv: Sequence[str]) -> int:
    """Run the command; 0, or 130 after Ctrl-C."""
    parsed = parse_with_recipes(Audit, "audit", argv)
    args = parsed.own
    if args.groups < FEWEST:
        raise UserError(f"--groups must be at least {FEWEST}, not {args.groups}: intervals need independent groups")
    if args.dimensions < 1:
        raise UserError(f"--dimensions must be at least 1, not {args.dimensions}")
    named = dict(parsed.recipes)
    if args.all_schemes:
        named |= standard(next(iter(named.values())))
    schemes = prepare(named, args.groups, args.seed)
    source = Path(parsed.sources[0])
    weights = "base"
    if (source / "recipe.yaml").is_file():
        load_weights(schemes[0].parts.policy, checkpoint.load(source / "checkpoints"))
        weights = str(source)

    stop = Stop()
    found_shapes = shapes(schemes, args.plain)

    def stopped() -> bool:
        stop.settle()
        return stop.reason is not None

    with _Display(args.groups) as display, interruptible(stop, display.message):
        sums = measure(found_shapes, args.groups, args.dimensions, display.done, stopped)
    stop.settle()
    found = summarise(found_shapes, sums)
    settings = {
        "weights": weights,
        "plain": args.plain,
        "seed": args.seed,
        "asked_groups": args.groups,
        "dimensions": args.dimensions,
    }
    text = to_json({**settings, "stopped": stop.reason, **found}, indent=2)
    if args.to is not None:
        args.to.parent.mkdir(parents=True, exist_ok=True)
        args.to.write_text(text + "\n", encoding="utf-8")
    if args.json:
        print(text)
    else:
        show(found)
    return 130 if stop.reason is not None else 0


def show(found: Mapping[str, Any]) -> None:
    """Print the result for a person."""
    out = console()
    rows = found["schemes"]
    if rows:
        title = f"{found['groups']} groups; an update at equal cost, a step of length 1; intervals are 95 %"
        listed = table(title, "scheme", "evaluations", "signal/noise", "alignment", "progress", "ratio")
        for column in listed.columns:
            column.no_wrap = True
        for row in rows:
            listed.add_row(
                row["label"],
                f"{row['model_evaluations_per_trajectory']:.1f} + {row['trained_evaluations_per_trajectory']:.1f}",
                *(_shown(row[key], digits) for key, digits in _COLUMNS),
            )
        out.print(listed)
        out.print(
            "evaluations: of the model, a trajectory, and trained; signal/noise: for 1,000 of them, a trained one "
            "counted as three;"
        )
        out.print(
            "alignment: cosine of the expected gradient to the unbiased one; ratio: progress over that of the first"
        )
        best = max(rows, key=lambda row: row["progress_at_equal_cost"]["mean"])
        out.print()
        out.print(_steps(best, found["shapes"][best["shape"]]))
        out.print()
    out.print(found["advice"])


_COLUMNS = (
    ("signal_per_evaluation", 3),
    ("alignment", 2),
    ("progress_at_equal_cost", 3),
    ("ratio", 2),
)


def _steps(row: Mapping[str, Any], shape: Mapping[str, Any]) -> Any:
    steps = row["steps"]
    spreads = shape["gain_spread"]
    listed = table(
        f"{row['label']} by step",
        "step",
        "t",
        "std",
        *(f"gains ({name})" for name in spreads),
        "gradient norm",
        "share of signal",
        "share of noise",
    )
    for i, norm in enumerate(steps["gradient_norm"]):
        if norm > 0:
            listed.add_row(
                str(i),
                f"{shape['times'][i]:.3f}",
                f"{shape['std'][i]:.3f}",
                *(f"{spread[i]:.3f}" for spread in spreads.values()),
                f"{norm:.2e}",
                _shown(steps["share_of_signal"][i], 2),
                f"{steps['share_of_noise'][i]:.2f}",
            )
    return listed


def _shown(value: Mapping[str, float], digits: int) -> str:
    mean, low, high = value["mean"], value["low"], value["high"]
    if mean != mean:
        return "unknown"
    bounds = "" if low != low or high != high else f" [{low:.{digits}f}, {high:.{digits}f}]"
    return f"{mean:.{digits}f}{bounds}"


class _Display:
    """Progress on standard error: a bar in a terminal, a line now and then elsewhere."""

    def __init__(self, total: int) -> None:
        self._console = console(stderr=True)
        columns = (TextColumn("groups"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        self._bar = Progress(*columns, console=self._console, disable=not self._console.is_terminal, transient=True)
        self._task = self._bar.add_task("groups", total=total)
        self._started = self._told = time.monotonic()

    def __enter__(self) -> _Display:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def done(self, done: int, total: int) -> None:
        """So many groups are measured."""
        self._bar.update(self._task, completed=done)
        now = time.monotonic()
        if not self._console.is_terminal and (now - self._told > 10 or done == total):
            left = (now - self._started) / done * (total - done)
            self.message(f"{done}/{total} groups, about {left:.0f} s left")
            self._told = now

    def message(self, text: str) -> None:
        """A line above the bar."""
        self._console.print(text)
