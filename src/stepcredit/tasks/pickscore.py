"""``pickscore``: any prompts that a user brings, judged by PickScore; none are published under a clear licence."""

from __future__ import annotations

import os
from itertools import product
from pathlib import Path

from stepcredit.errors import UserError
from stepcredit.tasks import files
from stepcredit.tasks.base import Prompt
from stepcredit.tasks.data import VARIABLE

_SUBJECTS = (
    "a red bicycle",
    "an old lighthouse",
    "a bowl of oranges",
    "a grey cat",
    "a mountain village",
    "a steam train",
)
_STYLES = ("in morning fog", "as an oil painting", "at night under a full moon", "in soft studio light")


def train_prompts() -> list[Prompt]:
    """Prompts of ``pickscore/train.txt`` in the data folder. Raises UserError, naming the remedy, if it is absent."""
    return _read("train.txt", "train_prompts")


def test_prompts() -> list[Prompt]:
    """Prompts of ``pickscore/test.txt`` in the data folder. Raises UserError, naming the remedy, if it is absent."""
    return _read("test.txt", "heldout_prompts")


def practice() -> list[Prompt]:
    """A few prompts of our own, enough for a rehearsal."""
    return [Prompt(f"{subject} {style}") for subject, style in product(_SUBJECTS, _STYLES)]


def _read(name: str, key: str) -> list[Prompt]:
    path = Path(os.environ.get(VARIABLE) or "data").expanduser() / "pickscore" / name
    if not path.is_file():
        raise UserError(
            f"task 'pickscore' has no prompts of its own and {str(path)!r} is absent: set {key} to a file with one "
            f"prompt a line, or {VARIABLE} to a folder that has pickscore/{name} (for example the split pickscore_sfw "
            "of https://github.com/yifan123/flow_grpo, folder dataset)"
        )
    return files.read(path)
