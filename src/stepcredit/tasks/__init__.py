"""Tasks by name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from stepcredit.errors import UserError, nearest
from stepcredit.tasks import files
from stepcredit.tasks.base import Prompt, Task, draw

__all__ = ["NAMES", "Prompt", "Task", "draw", "get", "prompts_of"]

NAMES = ("compose", "spell", "prefer", "geneval", "ocr", "pickscore")
SD35_MEDIUM = "stabilityai/stable-diffusion-3.5-medium"


def get(name: str) -> Task:
    """A task by name; UserError names the nearest for an unknown one."""
    if name == "compose":
        from stepcredit.tasks.compose import prompts

        return Task("compose", "compose", "compose", prompts.train_prompts, prompts.heldout_prompts)
    if name == "spell":
        from stepcredit.tasks.spell import prompts as s

        return Task("spell", "spell", "spell", s.train_prompts, s.heldout_prompts)
    if name == "prefer":
        from stepcredit.tasks.compose import prompts

        return Task("prefer", "prefer", "compose", prompts.train_prompts, prompts.heldout_prompts)
    if name == "geneval":
        from stepcredit.tasks import geneval as g

        ours = g.train_prompts
        return Task("geneval", "geneval_partial", SD35_MEDIUM, ours, g.test_prompts, g.apart, practice=ours)
    if name == "ocr":
        from stepcredit.tasks import ocr as o

        return Task("ocr", "ocr", SD35_MEDIUM, o.train_prompts, o.test_prompts, o.apart, o.train_prompts)
    if name == "pickscore":
        from stepcredit.tasks import pickscore as p

        return Task("pickscore", "pickscore", SD35_MEDIUM, p.train_prompts, p.test_prompts, practice=p.practice)
    raise UserError(f"unknown task {name!r}{nearest(name, NAMES) or '.'} The tasks are {', '.join(NAMES)}")


def prompts_of(
    task: Task, train: Path | None = None, heldout: Path | None = None, practice: bool = False
) -> tuple[Sequence[Prompt], Sequence[Prompt]]:
    """Prompts to train on and prompts held out: of the task, or of a user's files in their place.

    The task's own training prompts are kept apart from whatever is held out; a user's file is taken as it is.
    ``practice`` (a rehearsal) needs no file of others. Raises UserError for a file that is absent or malformed.
    """
    ours = list(task.practice()) if practice and task.practice else None
    held = files.read(heldout) if heldout else ours[1::2] if ours else task.heldout()
    if train:
        return files.read(train), held
    return (ours[::2] if ours else task.apart(task.train(), held)), held
