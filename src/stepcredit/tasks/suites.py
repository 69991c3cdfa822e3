"""Evaluation suites by name: which prompts, how many images of each, which rewards, and how the tags are averaged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from stepcredit import tasks
from stepcredit.errors import UserError, nearest
from stepcredit.tasks import data, files
from stepcredit.tasks.base import Prompt, draw


@dataclass(frozen=True)
class Suite:
    """One protocol of evaluation."""

    name: str
    rewards: tuple[str, ...]
    """Registered names; the first is the suite's own figure."""
    images: int = 1
    """Images of each prompt."""
    macro: bool = False
    """The mean of the tags' means, as GenEval's overall score; else the mean of all images."""
    published: str | None = None
    """Name of the prompt file in ``tasks.data``; None for a desk task's own held-out prompts."""
    size: int | None = None
    """Prompts drawn by default, in equal shares of the tags; None takes every one, in the file's order."""

    def file(self, own: Path | None = None) -> Path | None:
        """The file of its prompts: the user's, else the published one; None where there is none. Raises UserError."""
        return own or (data.get(self.published).find() if self.published else None)

    def prompts(self, count: int | None = None, own: Path | None = None) -> list[Prompt]:
        """Its prompts, each once; ``count`` of them drawn in equal shares of the tags. Raises UserError.

        The same count always draws the same prompts.
        """
        file = self.file(own)
        found = files.read(file) if file else list(tasks.get(self.name).heldout())
        every = list({(prompt.text, prompt.tag): prompt for prompt in found}.values())
        count = count or (None if own else self.size)
        return every if count is None or count >= len(every) else draw(every, count, "suite", self.name)


PUBLISHED = {
    suite.name: suite
    for suite in (
        Suite("geneval", ("geneval",), images=4, macro=True, published="geneval"),
        Suite("ocr", ("ocr",), published="ocr"),
        Suite("pickscore-sfw", ("pickscore",), published="pickscore-sfw"),
        Suite("drawbench", ("pickscore", "aesthetic", "imagereward"), images=5, published="drawbench"),
    )
}


def names() -> tuple[str, ...]:
    """Every suite: the published ones, then the desk's tasks."""
    return (*PUBLISHED, *_desk())


def get(name: str) -> Suite:
    """A suite by name; UserError names the nearest for an unknown one."""
    if name in PUBLISHED:
        return PUBLISHED[name]
    if name in _desk():
        return Suite(name, (tasks.get(name).reward,), size=1000)
    raise UserError(f"unknown suite {name!r}{nearest(name, names()) or '.'} The suites are {', '.join(names())}")


def _desk() -> Sequence[str]:
    """Tasks whose held-out prompts need no file of others: those of desk models, which are no hub repositories."""
    return [name for name in tasks.NAMES if "/" not in tasks.get(name).model]
