"""``stepcredit data``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import tyro

from stepcredit.cli.common import console, parse, table
from stepcredit.errors import UserError
from stepcredit.tasks import data, fetch, files


@dataclass
class Data:
    """Prompt files that other projects published: list them, or fetch one into the cache.

    None is part of stepcredit. A file is verified by its SHA-256 before it is kept. Where none is known here, the first
    call shows the checksum of what the server sends and keeps nothing; the second one accepts it. A file that you have
    already is read from the folder named in STEPCREDIT_DATA.
    """

    action: tyro.conf.Positional[Literal["list", "get"]] = "list"
    """What to do."""
    name: tyro.conf.Positional[str | None] = None
    """File to fetch."""
    accept_checksum: str | None = None
    """SHA-256 of a file whose checksum is not known here."""


def run(argv: Sequence[str]) -> int:
    """Run the command."""
    args = parse(Data, "data", argv)
    out = console()
    if args.action == "list":
        rows = table("", "name", "what", "licence", "checksum", "where")
        for column in rows.columns:
            column.justify = "left"
        rows.columns[-1].overflow = "fold"
        for file in data.CATALOGUE.values():
            known = file.sha256[:12] if file.sha256 else "to be accepted"
            rows.add_row(file.name, file.content, file.licence, known, str(file.place() or "absent"))
        out.print(rows)
        return 0
    if args.name is None:
        raise UserError(f"name the file to get: {', '.join(data.CATALOGUE)}")
    file = data.get(args.name)
    path = fetch.fetch(file, args.accept_checksum)
    prompts = files.read(path)
    out.print(f"{len(prompts):,} prompts in {path} (licence: {file.licence})")
    return 0
