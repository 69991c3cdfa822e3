"""What the tests of checkpoints share."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from hypothesis import strategies as st
from torch import Tensor

from stepcredit.training import checkpoint

Tensors = dict[str, dict[str, Tensor]]
TEXT = st.text(max_size=12)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=10,
)
FILES = ("ema.safetensors", "manifest.json", "optimizer.safetensors", "state.json", "weights.safetensors")


def contents(seed: int, size: int = 40) -> tuple[Tensors, dict[str, Any]]:
    """Tensors and state of a small run; another seed changes every file."""
    g = torch.Generator().manual_seed(seed)
    weights = {"a.weight": torch.randn(size, size, generator=g), "a.bias": torch.randn(3, generator=g).bfloat16()}
    moments = {"a.weight/step": torch.tensor(float(seed)), "a.weight/exp_avg": torch.randn(2, generator=g).double()}
    ema = {name: tensor / 2 for name, tensor in weights.items()}
    state = {"iteration": seed, "best": [0.1 * seed, 1], "recipe": {"task": "grün"}, "note": None}
    return {"weights": weights, "ema": ema, "optimizer": moments}, state


def identical(a: Tensor, b: Tensor) -> bool:
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and torch.equal(a.contiguous().reshape(-1).view(torch.uint8), b.contiguous().reshape(-1).view(torch.uint8))
    )


def same(loaded: checkpoint.Checkpoint, tensors: Tensors, state: dict[str, Any]) -> bool:
    return (
        loaded.state == state
        and {g: set(named) for g, named in loaded.tensors.items()} == {g: set(named) for g, named in tensors.items()}
        and all(identical(loaded.tensors[g][n], t) for g, named in tensors.items() for n, t in named.items())
    )


def names(folder: Path) -> set[str]:
    return {entry.name for entry in folder.iterdir()}


def silent(message: str) -> None:
    raise AssertionError(f"unexpected warning: {message}")


def load(folder: Path) -> tuple[checkpoint.Checkpoint, list[str]]:
    said: list[str] = []
    return checkpoint.load(folder, warn=said.append), said


@contextlib.contextmanager
def no_fsync() -> Iterator[None]:
    """For tests that no power failure is part of: fsync is most of their time."""
    with mock.patch.object(os, "fsync"):
        yield


def two_checkpoints(folder: Path) -> Path:
    """The folder, filled with the checkpoints 1 and 2."""
    with no_fsync():
        for seed in (1, 2):
            checkpoint.save(folder, seed, *contents(seed), warn=silent)
    return folder


class Fault:
    """Stands in for ``files._point``: records the acts, and fails from the n-th on, ``count`` times."""

    def __init__(self, n: int = 10**9, count: int = 1) -> None:
        self.acts: list[str] = []
        self.failing = range(n, n + count)

    def __call__(self, act: str) -> None:
        self.acts.append(act)
        if len(self.acts) - 1 in self.failing:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
