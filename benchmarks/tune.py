"""The trials behind the bundled recipes, kept and resumable: the same budget for every method.

First three learning rates, then, at the best of them, the kernels and levels of its list. A trial is one run of a
bundled recipe with some keys changed, judged by the 1,000 held-out prompts at its end; its result is a line of
results/tuning.jsonl, and a trial that has its line is not run again. `--jobs` trials run side by side, one thread each.

    python benchmarks/tune.py [--jobs 2] [--only RECIPE ...] [--seeds 0 1 2] [--table]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "tuning.jsonl"
Changes = dict[str, Any]

USUAL: Changes = {"kernel": "flow_sde", "level": 0.7}
RATES: tuple[Changes, ...] = tuple({"lr": lr, **USUAL} for lr in (3e-4, 6e-4, 1.2e-3))
PAPER_RATES: tuple[Changes, ...] = tuple({"lr": lr, "level": 0.7} for lr in (7.5e-5, 1.5e-4, 3e-4))
"""The -paper recipes have a quarter of the trajectories and steps of their own weight: 3e-4 ruins one of them."""
NOISES: tuple[Changes, ...] = (
    {"kernel": "flow_sde", "level": 0.5},
    {"kernel": "flow_sde", "level": 0.9},
    {"kernel": "cps", "level": 0.7},
    {"kernel": "ddim", "level": 0.7},
)
"""Beside flow_sde 0.7, with which the learning rates are compared."""
BUDGETS: dict[str, tuple[tuple[Changes, ...], tuple[Changes, ...]]] = {
    "compose-turning-point": (RATES, NOISES),
    "compose-tempflow": (RATES, NOISES),
    "compose-gae": (RATES, NOISES),
    "compose-stepwise-paper": (PAPER_RATES, ({"level": 0.5}, {"level": 0.9})),
    "compose-turning-point-paper": (PAPER_RATES, ()),
    "compose-stepwise": (RATES, NOISES),
    "compose-uniform": (RATES, NOISES),
}
"""Learning rates and noise that are tried of every recipe. A -paper recipe keeps all that its paper publishes."""


def main() -> None:
    """Run the missing trials, then print the table."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--jobs", type=int, default=2)
    arguments.add_argument("--only", nargs="+", default=list(BUDGETS), choices=list(BUDGETS), metavar="RECIPE")
    arguments.add_argument("--seeds", type=int, nargs="+", default=[0])
    arguments.add_argument("--table", action="store_true", help="print the results and run nothing")
    options = arguments.parse_args()
    if not options.table:
        RESULTS.parent.mkdir(exist_ok=True)
        with ThreadPoolExecutor(options.jobs) as pool:
            for seed in options.seeds:
                for trials in (first, second):
                    wanted = [(recipe, changes, seed) for recipe in options.only for changes in trials(recipe, seed)]
                    for done in pool.map(lambda trial: run(*trial), [one for one in wanted if known(*one) is None]):
                        print(done, flush=True)
    table()


def first(recipe: str, seed: int) -> list[Changes]:
    """The trials of the learning rate."""
    return list(BUDGETS[recipe][0])


def second(recipe: str, seed: int) -> list[Changes]:
    """The trials of the noise, at the best learning rate; none before all of those are known."""
    rates, noises = BUDGETS[recipe]
    found = [known(recipe, changes, seed) for changes in rates]
    scores = [result["after"]["mean"] for result in found if result is not None]
    if len(scores) < len(rates):
        return []
    best = rates[max(range(len(rates)), key=lambda k: scores[k])]
    return [{**best, **changes} for changes in noises]


def known(recipe: str, changes: Changes, seed: int) -> dict[str, Any] | None:
    """The result of a trial, None if it has not been run."""
    wanted = (recipe, changes, seed)
    return next((r for r in results() if (r["recipe"], r["changes"], r["seed"]) == wanted), None)


def run(recipe: str, changes: Changes, seed: int) -> str:
    """Train one trial in a process of its own and append its result."""
    with tempfile.TemporaryDirectory() as folder:
        flags = [word for key, value in changes.items() for word in (f"--{key.replace('_', '-')}", *str(value).split())]
        command = [sys.executable, "-m", "stepcredit", "train", recipe, "--name", "trial", "--out", folder, "--quiet"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [*command, "--seed", str(seed), *flags], env=environment, capture_output=True, text=True, check=False
        )
        if done.returncode:
            return f"FAILED {recipe} {_text(changes)} seed {seed}: {done.stderr.strip()[-300:]}"
        summary = json.loads((Path(folder) / "trial" / "summary.json").read_text())
        lines = [json.loads(line) for line in (Path(folder) / "trial" / "metrics.jsonl").read_text().splitlines()]
    result = {
        "recipe": recipe,
        "changes": changes,
        "seed": seed,
        "before": summary["reward_before"],
        "after": summary["reward_after"],
        "change": summary["improvement"],
        "exact_after": summary["exact_after"]["mean"],
        "during": {line["iteration"]: line["evaluation"]["mean"] for line in lines[1:] if line["evaluation"]},
        "iterations": summary["iterations"],
        "stopped": summary["stopped"],
        "seconds": summary["seconds"],
        "model_evaluations": summary["model_evaluations"],
    }
    with RESULTS.open("a") as file:
        file.write(json.dumps(result) + "\n")
    return f"{recipe} {_text(changes)} seed {seed}: {result['before']['mean']:.3f} -> {result['after']['mean']:.3f}"


def results() -> list[dict[str, Any]]:
    """All results so far."""
    return [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []


def table() -> None:
    """Print the results as Markdown, a line for each trial: the change on held-out prompts, seed by seed."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for result in results():
        groups[result["recipe"], _text(result["changes"])].append(result)
    print("| recipe | tried | change on the held-out prompts, by seed | updates |")
    print("|---|---|---|---|")
    for (recipe, changes), trials in sorted(groups.items(), key=lambda one: list(BUDGETS).index(one[0][0])):
        gains = ", ".join(
            "{mean:+.3f} [{low:+.3f}, {high:+.3f}]".format(**t["change"])
            for t in sorted(trials, key=lambda t: t["seed"])
        )
        updates = ", ".join(sorted({str(t["iterations"]) for t in trials}))
        print(f"| `{recipe}` | {changes} | {gains} | {updates} |")


def _text(changes: Changes) -> str:
    return ", ".join(
        f"{key} {value:g}" if isinstance(value, float) else f"{key} {value}" for key, value in changes.items()
    )


if __name__ == "__main__":
    main()
