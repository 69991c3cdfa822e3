"""Prompt files of other projects: known by source and SHA-256, read from the user's folder, never shipped."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from stepcredit.errors import UserError
from stepcredit.tasks import files
from stepcredit.tasks.base import Prompt

VARIABLE = "STEPCREDIT_DATA"
"""Environment variable with the folder that holds the files."""


@dataclass(frozen=True)
class Published:
    """A file of prompts that another project published."""

    path: str
    """Below the data folder."""
    url: str
    """Where it is to be had."""
    sha256: str
    licence: str

    def read(self) -> list[Prompt]:
        """Its prompts. Raises UserError, naming the file and how to get it, if it is absent or another file."""
        path = Path(os.environ.get(VARIABLE) or "data").expanduser() / self.path
        remedy = f"or name a file of your own as heldout_prompts (source: {self.url}, licence {self.licence})"
        if not path.is_file():
            raise UserError(
                f"the prompt file {str(path)!r} is absent: mkdir -p '{path.parent}' && curl -fLo '{path}' {self.url}, "
                f"or set {VARIABLE} to a folder that has {self.path}, {remedy}"
            )
        if hashlib.sha256(path.read_bytes()).hexdigest() != self.sha256:
            raise UserError(
                f"{str(path)!r} is not the published file (its SHA-256 does not begin with {self.sha256[:12]}); get it "
                f"again, {remedy}"
            )
        return files.read(path)
