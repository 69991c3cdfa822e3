"""What retaining the rollout's graphs saves over evaluating the trained steps again.

Both kinds of iteration are made in turns from the same state, so that what else the machine does falls on both. The
ratios are medians over pairs of (seconds with recompute / seconds with retain): of whole iterations by the clock and by
the processor time of this process, and of rollout and update alone by the clock (scoring is the same in both). Memory
is what the retained graphs hold by the end of a rollout, counted from the tensors that autograd saves.

    python benchmarks/replay.py [RECIPE ...] [--prompts 4] [--repeats 5] [--threads 1]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch

import stepcredit  # noqa: F401  (sets the thread policy before torch is loaded)
from stepcredit.training import recipe as recipes
from stepcredit.training.iteration import iterate
from stepcredit.training.records import machine
from stepcredit.training.setup import setup
from stepcredit.training.state import fresh


class Saved:
    """Bytes of the distinct tensors that autograd saves in a block and that are not parameters."""

    def __init__(self, parameters: set[int]) -> None:
        self.parameters = parameters
        self.bytes: dict[int, int] = {}

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        """Count a saved tensor's storage."""
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.parameters:
            self.bytes[storage.data_ptr()] = storage.nbytes()
        return tensor


def measure(name: str, prompts: int, repeats: int) -> dict[str, float]:
    """Seconds and ratios of a recipe with so many prompts an iteration."""
    keys = {"prompts_per_iteration": prompts, "micro_batch": 16}
    parts = {kind: setup(recipes.load(name, {**keys, "replay": kind})) for kind in ("recompute", "retain")}
    states = {kind: fresh(part.policy, part.recipe) for kind, part in parts.items()}
    whole: dict[str, list[float]] = {"recompute": [], "retain": []}
    phases: dict[str, list[float]] = {"recompute": [], "retain": []}
    processor: dict[str, list[float]] = {"recompute": [], "retain": []}
    for k in range(repeats + 1):
        for kind in ("recompute", "retain") if k % 2 else ("retain", "recompute"):
            begin = time.process_time()
            seconds = iterate(parts[kind], states[kind], lambda *_: None)["phase_seconds"]
            if k:  # the first is a warm-up
                processor[kind].append(time.process_time() - begin)
                whole[kind].append(sum(seconds.values()))
                phases[kind].append(seconds["rollout"] + seconds["update"])
    saved = Saved({p.untyped_storage().data_ptr() for p in states["retain"].parameters.values()})
    with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda tensor: tensor):
        iterate(parts["retain"], states["retain"], lambda *_: None)
    cost = parts["retain"].cost

    def ratio(seconds: dict[str, list[float]]) -> float:
        return statistics.median(a / b for a, b in zip(seconds["recompute"], seconds["retain"], strict=True))

    return {
        "trained_per_trajectory": cost.trained_evaluations / cost.trajectories,
        "recompute_seconds": statistics.median(whole["recompute"]),
        "retain_seconds": statistics.median(whole["retain"]),
        "iteration_ratio": ratio(whole),
        "iteration_ratio_processor": ratio(processor),
        "rollout_and_update_ratio": ratio(phases),
        "retained_mb": sum(saved.bytes.values()) / 1e6,
    }


def main() -> None:
    """Run the benchmark and print a table and one JSON line."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("recipes", nargs="*", default=["compose-uniform", "compose-stepwise"])
    arguments.add_argument("--prompts", type=int, default=4)
    arguments.add_argument("--repeats", type=int, default=5)
    arguments.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    results = {}
    print(
        f"{'recipe':<22} {'recompute s':>11} {'retain s':>9} {'iteration':>9} {'processor':>9} "
        f"{'without scoring':>15} {'MB':>7}"
    )
    for name in options.recipes:
        row = results[name] = measure(name, options.prompts, options.repeats)
        print(
            f"{name:<22} {row['recompute_seconds']:>11.2f} {row['retain_seconds']:>9.2f} "
            f"{row['iteration_ratio']:>9.2f} {row['iteration_ratio_processor']:>9.2f} "
            f"{row['rollout_and_update_ratio']:>15.2f} {row['retained_mb']:>7.0f}",
            flush=True,
        )
    print(json.dumps({"machine": machine(), "results": results}))


if __name__ == "__main__":
    main()
