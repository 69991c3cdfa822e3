"""What the papers claim, at desk scale: every row of docs/evidence.md, in resumable pieces.

A piece is one training run. Its result is a JSON file in results/papers and is not computed again unless its recipe has
changed or the file is removed; its run folder lies in runs/papers, from which an interrupted piece goes on. The first
stage finds a learning rate for every method with the same budget, the second runs the rows with these rates. The tables
and plots are made from whatever there is.

    python benchmarks/papers.py                  # everything that is missing, 5 seeds: hours
    python benchmarks/papers.py --only main      # one row
    python benchmarks/papers.py --quick          # the main row with one seed, at the learning rates known here
    python benchmarks/papers.py --quick --results /tmp/anew --runs /tmp/anew   # the same, run anew: minutes
    python benchmarks/papers.py --minutes 20     # stop after 20 minutes, saved; the same command goes on
    python benchmarks/papers.py --table          # write docs/evidence.md from the results and run nothing
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evidence import foretold, page
from evidence.rows import METHODS, RATES, ROWS, TUNING_ITERATIONS, TUNING_SEED, Method, Row
from rich.console import Console

from stepcredit.comparison.runs import Planned, execute
from stepcredit.comparison.summary import curve_of
from stepcredit.reports import folder as folders
from stepcredit.training import recipe as recipes
from stepcredit.training.files import write_text_atomic
from stepcredit.training.interrupt import Stop, interruptible

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "papers"
console = Console()


@dataclass(frozen=True)
class Piece:
    """One training run and the file of its result."""

    run: Planned
    result: Path

    @property
    def known(self) -> dict[str, Any] | None:
        """Its result, None if it has not been computed with this recipe."""
        if not self.result.is_file():
            return None
        found: dict[str, Any] = json.loads(self.result.read_text(encoding="utf-8"))
        return found if found["recipe"] == fingerprint(self.run.recipe) else None


@dataclass(frozen=True)
class Places:
    """Folders of a reproduction: of the runs, and of what is kept of them."""

    runs: Path
    results: Path


def fingerprint(recipe: recipes.Recipe) -> str:
    """A short name of all in which a recipe differs from the defaults: a key that is new changes no old result."""
    own = recipe.model_dump(mode="json", exclude_defaults=True)
    return hashlib.sha256(json.dumps(own, sort_keys=True).encode()).hexdigest()[:12]


def piece(method: Method, lr: float, seed: int, places: Places, **changes: Any) -> Piece:
    """The run of a method with a learning rate and a seed."""
    recipe = recipes.load(method.recipe, {**method.changes, **changes, "lr": lr, "seed": seed})
    name = f"{method.name}-lr{lr:g}-{recipe.iterations}-seed{seed}"
    return Piece(Planned(method.name, seed, recipe, places.runs / name), places.results / f"{name}.json")


def tuning(method: Method, places: Places) -> list[Piece]:
    """The trials of a method's learning rate, short and on a seed of their own."""
    return [piece(method, lr, TUNING_SEED, places, iterations=TUNING_ITERATIONS) for lr in RATES]


def chosen(method: Method, places: Places) -> float | None:
    """Its own, or that whose trial had the highest mean held-out reward; None before all trials are known."""
    if method.rate is not None:
        return method.rate
    trials = tuning(METHODS[method.rate_of or method.name], places)
    found = {lr: one.known for lr, one in zip(RATES, trials, strict=True)}
    scores = {lr: page.area(known["curve"]) for lr, known in found.items() if known is not None}
    return max(scores, key=lambda lr: scores[lr]) if len(scores) == len(RATES) else None


def compute(pieces: Sequence[Piece], jobs: int, stop: Stop) -> None:
    """Run what is not known, ``jobs`` at a time, and write each result as it comes."""
    by_folder = {one.run.folder: one for one in pieces}
    missing = [one.run for one in by_folder.values() if one.known is None]

    def ended(run: Planned) -> None:
        if run.finished:
            keep(by_folder[run.folder])
            console.print(f"{run.folder.name} done")

    for run in [run for run in missing if run.finished]:
        ended(run)
    failed = execute([run for run in missing if not run.finished], jobs, stop, console, ended)
    for name, reason in failed.items():
        console.print(f"{name} FAILED: {reason}", markup=False)


def keep(one: Piece) -> None:
    """Write the result of a finished run."""
    read = folders.read(one.run.folder)
    curve = curve_of(read)
    summary = read.summary
    result = {
        "recipe": fingerprint(one.run.recipe),
        "method": one.run.label,
        "seed": one.run.seed,
        "lr": one.run.recipe.lr,
        "curve": {key: list(getattr(curve, key)) for key in ("iterations", "evaluations", "seconds", "reward")},
        **{key: summary.get(key) for key in ("reward_before", "reward_after", "improvement", "exact_after", "stopped")},
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
    }
    one.result.parent.mkdir(parents=True, exist_ok=True)
    write_text_atomic(one.result, json.dumps(result, indent=1) + "\n")


def results_of(
    row: Row, places: Places, rates: Mapping[str, float | None], seeds: Sequence[int]
) -> Mapping[str, list[dict[str, Any]]]:
    """Results of a row's methods for the seeds that all of them have."""
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for name in row.methods:
        lr = rates[name]
        pieces = {} if lr is None else {seed: piece(METHODS[name], lr, seed, places).known for seed in seeds}
        found[name] = {seed: known for seed, known in pieces.items() if known is not None}
    common = [seed for seed in seeds if all(seed in some for some in found.values())]
    return {name: [some[seed] for seed in common] for name, some in found.items()}


def main() -> None:
    """Run the missing pieces and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[row.name for row in ROWS], help="rows; all by default")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=2, help="runs side by side, one thread each")
    parser.add_argument("--minutes", type=float, help="stop after so long; the same command goes on")
    parser.add_argument("--quick", action="store_true", help="the main row with one seed, printed only")
    parser.add_argument("--table", action="store_true", help="run nothing")
    parser.add_argument("--runs", type=Path, default=Path("runs/papers"))
    parser.add_argument(
        "--results", type=Path, default=RESULTS, help="where results are kept; with an empty folder all is run anew"
    )
    options = parser.parse_args()
    rows = [row for row in ROWS if not options.only or row.name in options.only]
    if options.quick:
        rows = rows[:1]
    seeds = range(1 if options.quick else options.seeds)
    places = Places(options.runs, options.results)
    rated = Places(options.runs, RESULTS) if options.quick else places  # quickly: with the rates that are known
    methods = {name: METHODS[name] for row in rows for name in row.methods}
    stop = Stop()
    if not options.table:
        if options.minutes:
            timer = threading.Timer(options.minutes * 60, lambda: setattr(stop, "reason", "the time is up"))
            timer.daemon = True
            timer.start()
        with interruptible(stop, console.print):
            tuned = sorted({one.rate_of or one.name for one in methods.values() if one.rate is None})
            compute([one for name in tuned for one in tuning(METHODS[name], rated)], options.jobs, stop)
            compute(
                [
                    piece(METHODS[name], lr, seed, places)
                    for row in rows
                    for seed in seeds
                    for name in row.methods
                    if (lr := chosen(METHODS[name], rated)) is not None
                ],
                options.jobs,
                stop,
            )
    rates = {name: chosen(method, rated) for name, method in methods.items()}
    found = [(row, results_of(row, places, rates, seeds)) for row in rows]
    if options.quick or options.only or options.results != RESULTS:
        console.print("\n".join(line for row, results in found for line in page.section(row, results)), markup=False)
    else:
        every: dict[str, list[dict[str, Any]]] = {}
        for _, results in found:
            every |= {name: some for name, some in results.items() if len(some) > len(every.get(name, ()))}
        page.write(HERE.parent / "docs", found, foretold.section(every))
    if stop.reason is not None:
        console.print(f"{stop.reason}; the same command goes on from here")


if __name__ == "__main__":
    main()
