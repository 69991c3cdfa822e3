"""What an iteration costs beyond the model itself.

For each method: measured seconds of an iteration, divided by (model evaluations in the ledger x one batched forward +
trained evaluations x one batched forward-backward), all measured in this run. 1.00 would mean that noise, kernels,
decoding, rewards, credit and the optimiser cost nothing.

    python benchmarks/iteration.py [--repeats 5] [--threads 1]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch

import stepcredit  # noqa: F401  (sets the thread policy before torch is loaded)
from stepcredit.cli.plan_command import calibrate
from stepcredit.training import recipe as recipes
from stepcredit.training.iteration import iterate
from stepcredit.training.records import machine
from stepcredit.training.setup import setup
from stepcredit.training.state import fresh

METHODS = {
    "uniform": ("compose-uniform", {}),
    "stepwise, 5 substeps": ("compose-stepwise", {"substeps": 5}),
    "stepwise, 2 substeps": ("compose-stepwise", {}),
    "stepwise, tweedie": ("compose-stepwise", {"estimate": "tweedie"}),
    "turning point": ("compose-turning-point", {}),
}


def main() -> None:
    """Run the benchmark and print a table and one JSON line."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--repeats", type=int, default=5)
    arguments.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    results = {}
    print(f"{'method':<22} {'evaluations':>11} {'trained':>8} {'model s':>8} {'iteration s':>11} {'ratio':>6}")
    for name, (recipe, overrides) in METHODS.items():
        parts = setup(recipes.load(recipe, overrides))
        state = fresh(parts.policy, parts.recipe)
        iterate(parts, state, lambda *_: None)
        model, whole = [], []
        for _ in range(options.repeats):
            unit = calibrate(parts)
            model.append(
                parts.cost.model_evaluations * unit["seconds_per_evaluation"]
                + parts.cost.trained_evaluations * unit["seconds_per_trained_evaluation"]
            )
            started = time.perf_counter()
            iterate(parts, state, lambda *_: None)
            whole.append(time.perf_counter() - started)
        ratio = statistics.median(w / m for w, m in zip(whole, model, strict=True))
        results[name] = {
            "evaluations_per_trajectory": parts.cost.model_evaluations / parts.cost.trajectories,
            "trained_per_trajectory": parts.cost.trained_evaluations / parts.cost.trajectories,
            "model_seconds": statistics.median(model),
            "iteration_seconds": statistics.median(whole),
            "ratio": ratio,
        }
        row = results[name]
        print(
            f"{name:<22} {row['evaluations_per_trajectory']:>11.2f} {row['trained_per_trajectory']:>8.2f} "
            f"{row['model_seconds']:>8.2f} {row['iteration_seconds']:>11.2f} {ratio:>6.2f}"
        )
    print(json.dumps({"machine": machine(), "results": results}))


if __name__ == "__main__":
    main()
