"""Where files of a user lie that belong to no run."""

from __future__ import annotations

import os
from pathlib import Path


def cache_root() -> Path:
    """The user's cache: ``$STEPCREDIT_CACHE``, else ``$XDG_CACHE_HOME/stepcredit``, else ``~/.cache/stepcredit``."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("STEPCREDIT_CACHE") or Path(base, "stepcredit")).expanduser()
