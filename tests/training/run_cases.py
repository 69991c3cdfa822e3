"""What the tests of whole runs share: run a recipe, read what it left, compare it bit by bit."""

import json

import torch

from stepcredit.training import checkpoint
from stepcredit.training.telemetry import make_display
from stepcredit.training.trainer import train

KEYS = {
    "reward": "jpeg_size",
    "iterations": 4,
    "prompts_per_iteration": 2,
    "group_size": 4,
    "micro_batch": 4,
    "steps": 5,
    "window": None,
    "eval_prompts": 12,
    "eval_prompts_during": 6,
    "eval_every": 2,
    "checkpoint_every": 1,
    "lr": 1e-2,
    "lr_schedule": "constant",
}
"""Of a bundled recipe, cut down to run in a second."""
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
