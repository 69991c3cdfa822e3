"""Start runs as a person does, on one process or by torchrun, and read what they left."""

import json
import os
import subprocess
import sys

from stepcredit.cli import main
from stepcredit.training import checkpoint

TIMES = ("seconds", "phase_seconds", "memory_mb")


def alone(*arguments):
    """The command line in this very process; it must succeed."""
    assert main([str(argument) for argument in arguments]) == 0


def torchrun(processes, *arguments, script=("-m", "stepcredit"), **environment):
    """The command line on several processes; the launcher's finished process, with its output."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    command = [*launcher, *map(str, (*script, *arguments))]
    setting = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **environment}
    return subprocess.run(command, env=setting, capture_output=True, text=True, timeout=240)


def lines(folder):
    """metrics.jsonl without clocks and memory."""
    entries = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in entry.items() if key not in TIMES} for entry in entries]


def final(folder):
    """All tensors of the newest checkpoint by group and name, and its counters without clocks."""
    saved = checkpoint.load(folder / "checkpoints")
    counters = {key: value for key, value in saved.state.items() if key != "seconds"}
    return {f"{group}/{name}": t for group, named in saved.tensors.items() for name, t in named.items()}, counters
