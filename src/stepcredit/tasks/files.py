"""Prompt files of a user."""

from __future__ import annotations

import json
from pathlib import Path

from stepcredit.errors import UserError
from stepcredit.tasks.base import Prompt


def read(path: Path) -> list[Prompt]:
    """Prompts of a ``.txt`` file (one a line) or a ``.jsonl`` file (objects with a ``prompt``, the rest is metadata).

    Blank lines are skipped. Raises UserError for a file that cannot be read, is of another kind, holds no prompt, or
    has a malformed line (named by its number).
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the prompt file {str(path)!r}: {error}") from error
    if path.suffix not in (".txt", ".jsonl"):
        raise UserError(f"prompt file {str(path)!r} must end in .txt (one prompt a line) or .jsonl (one object a line)")
    numbered = [(number, line.strip()) for number, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise UserError(f"prompt file {str(path)!r} holds no prompt; write one a line")
    if path.suffix == ".txt":
        return [Prompt(line) for _, line in numbered]
    return [_parse(line, f"{path.name}, line {number}") for number, line in numbered]


def _parse(line: str, where: str) -> Prompt:
    try:
        entry = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise UserError(f"{where} is not a JSON object: {error}") from error
    if not isinstance(entry, dict) or not isinstance(entry.get("prompt"), str) or not entry["prompt"].strip():
        raise UserError(f'{where} must be an object with a non-empty "prompt", as GenEval\'s metadata is')
    return Prompt(entry["prompt"], entry)
