"""Tasks by name."""

from __future__ import annotations

from stepcredit.errors import UserError, nearest
from stepcredit.tasks.base import Prompt, Task, draw

__all__ = ["NAMES", "Prompt", "Task", "draw", "get"]

NAMES = ("compose",)


def get(name: str) -> Task:
    """A task by name; UserError names the nearest for an unknown one."""
    if name == "compose":
        from stepcredit.tasks.compose import prompts

        return Task("compose", "compose", "compose", prompts.train_prompts, prompts.heldout_prompts)
    raise UserError(f"unknown task {name!r}{nearest(name, NAMES)} The tasks are {', '.join(NAMES)}")
