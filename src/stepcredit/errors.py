"""Errors that a user can mend: one clear sentence, no traceback, exit code 2."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """Something in a recipe, a file or a command line is wrong; the message names it, its value and the remedy."""


def nearest(name: str, known: Iterable[str]) -> str:
    """``"; did you mean 'x'?"`` for the known name closest to ``name``, or an empty string if none is close."""
    found = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {found[0]!r}?" if found else ""
