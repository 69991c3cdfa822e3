"""The trials behind the bundled recipes, kept and resumable.

Every trial is one run of a bundled recipe with some keys changed; its result is a line of results/tuning.jsonl, and a
trial that has its line is not run again. `--jobs` trials run side by side, each with one thread.

    python benchmarks/tune.py [--jobs 2] [--only SUBSTRING] [--seeds 0 1 2] [--table]
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
Trial = tuple[str, dict[str, Any]]

TRIALS: list[Trial] = [
    ("compose-stepwise", {}),
    ("compose-uniform", {}),
    ("compose-stepwise", {"credit": "gain", "estimate": "full", "prompts_per_iteration": 16, "iterations": 16}),
    *(("compose-stepwise", {"credit": "gain", "prompts_per_iteration": 8, "lr": lr}) for lr in (1e-4, 2e-4, 4e-4)),
    ("compose-stepwise", {"credit": "gain", "prompts_per_iteration": 8, "kernel": "cps", "lr": 2e-4}),
    ("compose-uniform", {"prompts_per_iteration": 8, "lr": 2e-4}),
]


def main() -> None:
    """Run the missing trials, then print the table."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--jobs", type=int, default=2)
    arguments.add_argument("--only", default="", help="run trials whose description contains this")
    arguments.add_argument("--seeds", type=int, nargs="+", default=[0])
    arguments.add_argument("--table", action="store_true", help="print the results and run nothing")
    options = arguments.parse_args()
    known = {(r["recipe"], _key(r["changes"]), r["seed"]) for r in results()}
    wanted = [
        (recipe, changes, seed)
        for seed in options.seeds
        for recipe, changes in TRIALS
        if (recipe, _key(changes), seed) not in known and options.only in f"{recipe} {_key(changes)}"
    ]
    if not options.table:
        RESULTS.parent.mkdir(exist_ok=True)
        with ThreadPoolExecutor(options.jobs) as pool:
            for done in pool.map(lambda trial: run(*trial), wanted):
                print(done, flush=True)
    table()


def run(recipe: str, changes: dict[str, Any], seed: int) -> str:
    """Train one trial in a process of its own and append its result."""
    with tempfile.TemporaryDirectory() as folder:
        flags = [word for key, value in changes.items() for word in (f"--{key.replace('_', '-')}", *str(value).split())]
        command = [sys.executable, "-m", "stepcredit", "train", recipe, "--name", "trial", "--out", folder, "--quiet"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [*command, "--seed", str(seed), *flags], env=environment, capture_output=True, text=True, check=False
        )
        if done.returncode:
            return f"FAILED {recipe} {_key(changes)} seed {seed}: {done.stderr.strip()[-300:]}"
        summary = json.loads((Path(folder) / "trial" / "summary.json").read_text())
        lines = [json.loads(line) for line in (Path(folder) / "trial" / "metrics.jsonl").read_text().splitlines()]
    result = {
        "recipe": recipe,
        "changes": changes,
        "seed": seed,
        "before": summary["reward_before"],
        "after": summary["reward_after"],
        "exact_after": summary["exact_after"]["mean"],
        "during": {line["iteration"]: line["evaluation"]["mean"] for line in lines[1:] if line["evaluation"]},
        "iterations": summary["iterations"],
        "seconds": summary["seconds"],
        "model_evaluations": summary["model_evaluations"],
    }
    with RESULTS.open("a") as file:
        file.write(json.dumps(result) + "\n")
    return f"{recipe} {_key(changes)} seed {seed}: {result['before']['mean']:.3f} -> {result['after']['mean']:.3f}"


def results() -> list[dict[str, Any]]:
    """All results so far."""
    return [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []


def table() -> None:
    """Print the results as Markdown: the mean over seeds of every trial."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for result in results():
        groups[result["recipe"], _key(result["changes"])].append(result)
    print("| recipe | changes | seeds | after 10 | after 20 | after all | lowest - highest | s |")
    print("|---|---|---|---|---|---|---|---|")
    for (recipe, changes), trials in sorted(groups.items()):
        after = [t["after"]["mean"] for t in trials]
        during = [
            _mean([t["during"][k] for t in trials]) if all(k in t["during"] for t in trials) else ""
            for k in ("10", "20")
        ]
        print(
            f"| {recipe} | {changes} | {len(trials)} | {during[0]} | {during[1]} | {_mean(after)} "
            f"| {min(after):.3f} - {max(after):.3f} | {sum(t['seconds'] for t in trials) / len(trials):.0f} |"
        )


def _mean(values: list[float]) -> str:
    return f"{sum(values) / len(values):.3f}"


def _key(changes: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in changes.items())


if __name__ == "__main__":
    main()
