"""``pickscore``: any prompts that a user brings, judged by PickScore; none are published under a clear licence."""

from __future__ import annotations

from itertools import product

from stepcredit.tasks import data
from stepcredit.tasks.base import Prompt

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
    """Prompts of ``pickscore/train.txt``, yours or fetched. Raises UserError, naming the remedy, if it is absent."""
    return data.get("pickscore-sfw-train").read()


def test_prompts() -> list[Prompt]:
    """Prompts of ``pickscore/test.txt``, yours or fetched. Raises UserError, naming the remedy, if it is absent."""
    return data.get("pickscore-sfw").read()


def practice() -> list[Prompt]:
    """A few prompts of our own, enough for a rehearsal."""
    return [Prompt(f"{subject} {style}") for subject, style in product(_SUBJECTS, _STYLES)]
