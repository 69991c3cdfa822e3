"""What the tests of whole runs share: run a recipe, read what it left, compare it bit by bit."""

import json

import torch

from stepcredit.training import checkpoint
from stepcredit.training.telemetry import make_display
from stepcredit.training.trainer import train

TIMES = ("seconds", "phase_seconds", "memory_mb")


def run(recipe, folder, resume=False):
    return train(recipe, folder, make_display(quiet=True), resume=resume)


def lines(folder):
    """metrics.jsonl without what differs from run to run: clocks and memory."""
    entries = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in entry.items() if key not in TIMES} for entry in entries]


def final(folder):
    """All tensors of the newest checkpoint."""
    return checkpoint.load(folder / "checkpoints").tensors


def assert_equal(a, b):
    assert a.keys() == b.keys()
    for group in a:
        assert a[group].keys() == b[group].keys()
        for name, tensor in a[group].items():
            assert torch.equal(tensor, b[group][name]), (group, name)
