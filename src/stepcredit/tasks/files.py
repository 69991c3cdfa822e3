"""Prompt files of a user."""

from __future__ import annotations

from pathlib import Path

from stepcredit.errors import UserError
from stepcredit.tasks.base import Prompt
from stepcredit.untrusted import loads

LARGEST = 256 << 20
"""Bytes of the largest prompt file that is read."""


def read(path: Path) -> list[Prompt]:
    """Prompts of a ``.txt`` file (one a line) or a ``.jsonl`` file (objects with a ``prompt``, the rest is metadata).

    Blank lines are skipped. Raises UserError for a file that cannot be read, is of another kind, holds no prompt, or
    has a malformed line (named by its number).
    """
    if path.suffix not in (".txt", ".jsonl"):
        raise UserError(f"prompt file {str(path)!r} must end in .txt (one prompt a line) or .jsonl (one object a line)")
    lines = _text(path).split("\n")  # and at no other character that Python takes for an end of line
    numbered = [(number, line.strip()) for number, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise UserError(f"prompt file {str(path)!r} holds no prompt; write one a line")
    if path.suffix == ".txt":
        return [Prompt(line) for _, line in numbered]
    return [_parse(line, f"{path.name}, line {number}") for number, line in numbered]


def _text(path: Path) -> str:
    try:
        if path.exists() and not path.is_file():
            raise UserError(f"prompt file {str(path)!r} is not a plain file")  # reading a pipe may never end
        if path.stat().st_size > LARGEST:
            raise UserError(f"prompt file {str(path)!r} has more than {LARGEST} bytes; split it")
        return path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:  # not UTF-8, or a path that no file can have
        raise UserError(f"cannot read the prompt file {str(path)!r}: {error}") from error


def _parse(line: str, where: str) -> Prompt:
    try:
        entry = loads(line)
    except ValueError as error:
        raise UserError(f"{where} is not a JSON object: {error}") from error
    if not isinstance(entry, dict) or not isinstance(entry.get("prompt"), str) or not entry["prompt"].strip():
        raise UserError(f'{where} must be an object with a non-empty "prompt", as GenEval\'s metadata is')
    return Prompt(entry["prompt"], entry)
