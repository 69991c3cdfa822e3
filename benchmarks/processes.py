"""What a second process brings: seconds of an iteration on one process and on two, each with one thread.

The recipe is compose-stepwise as it is shipped. What is timed is the median iteration of a run: rollout, scoring,
gathering and update. 2.00 would be perfect; the machine must be idle and have a core for each process.

    python benchmarks/processes.py [--processes 2] [--iterations 4]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from stepcredit.training.records import machine

EVALUATION = ["--eval-prompts", "8", "--eval-prompts-during", "4", "--eval-every", "0", "--checkpoint-every", "0"]


def seconds(processes: int, iterations: int, out: Path) -> list[float]:
    """Seconds of every iteration but the first, which also warms up."""
    name = f"{processes}-processes"
    train = ["-m", "stepcredit", "train", "compose-stepwise", "--iterations", str(iterations), *EVALUATION, "--quiet"]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    command = [sys.executable, *(launcher if processes > 1 else []), *train, "--out", str(out), "--name", name]
    subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL)
    lines = (out / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [entry["seconds"] for entry in map(json.loads, lines) if entry["iteration"] > 1]


def main() -> None:
    """Run both and print the ratio and one JSON line."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--processes", type=int, default=2)
    arguments.add_argument("--iterations", type=int, default=4)
    options = arguments.parse_args()
    with tempfile.TemporaryDirectory() as out:
        one = seconds(1, options.iterations, Path(out))
        several = seconds(options.processes, options.iterations, Path(out))
    ratio = statistics.median(one) / statistics.median(several)
    print(f"1 process {statistics.median(one):.2f} s, {options.processes} processes {statistics.median(several):.2f} s")
    print(f"throughput {ratio:.2f} times that of one")
    print(json.dumps({"machine": machine(), "one": one, "several": several, "ratio": ratio}))


if __name__ == "__main__":
    main()
