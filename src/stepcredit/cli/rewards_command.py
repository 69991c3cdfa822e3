"""``stepcredit rewards``."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from stepcredit import rewards
from stepcredit.cli.common import console, parse, table
from stepcredit.errors import UserError
from stepcredit.rewards.base import RewardError
from stepcredit.rewards.weights import cache_folder


@dataclass
class Rewards:
    """List the rewards, show one with its options, or convert published weights to safetensors, once (of hpsv3, its
    question to a text).

    Conversion verifies the SHA-256 of the published file and reads it in a process of its own that accepts tensors and
    nothing else.
    """

    action: tyro.conf.Positional[Literal["list", "show", "convert"]] = "list"
    """What to do."""
    name: tyro.conf.Positional[str | None] = None
    """Reward to show, or whose weights to convert."""
    file: tyro.conf.Positional[Path | None] = None
    """The published file; fetched by default, where it can be."""
    to: Path | None = None
    """Folder to convert to; by default the one in the user's cache where the reward looks."""
    sha256: str | None = None
    """Digest of the file, where none is known here."""


def run(argv: Sequence[str]) -> int:
    """Run the command."""
    args = parse(Rewards, "rewards", argv)
    out = console()
    if args.action == "list":
        rows = table("", "reward", "what")
        rows.columns[0].no_wrap = True
        rows.columns[1].justify = "left"
        for name in rewards.names():
            rows.add_row(name, _plain(_paragraphs(name)[0]))
        out.print(rows)
        return 0
    if args.name is None:
        raise UserError(f"name the reward to {args.action}: stepcredit rewards {args.action} imagereward")
    if args.action == "show":
        out.print(_shown(args.name))
        return 0
    from stepcredit.rewards import convert

    try:
        folder = convert.run(args.name, args.file, args.to, args.sha256)
    except ValueError as error:
        raise UserError(str(error)) from error
    out.print(f"wrote {folder}")
    return 0


def _shown(name: str) -> str:
    """A reward's documentation, its options with their defaults, and whether its converted weights are there."""
    from stepcredit.rewards import convert

    lines = [name, "", *_plain("\n\n".join(_paragraphs(name))).split("\n")]
    options = [one for one in _signature(name).parameters.values() if one.kind is not one.VAR_KEYWORD]
    lines += ["", "reward_options:"] if options else ["", "It has no options."]
    lines += [f"  {one.name}" + ("" if one.default is one.empty else f": {one.default!r}") for one in options]
    if name in convert.RECIPES:
        folder = cache_folder(name)
        kept = folder / convert.RECIPES[name].product
        there = "there" if kept.is_file() else f"absent: stepcredit rewards convert {name}"
        lines += ["", f"converted: {kept} is {there}"]
    return "\n".join(lines)


def _signature(name: str) -> inspect.Signature:
    try:
        return inspect.signature(rewards.factory(name))
    except ValueError as error:
        raise UserError(str(error)) from error


def _paragraphs(name: str) -> list[str]:
    """Documentation of a reward by paragraphs; what is missing, where a package that it needs is not installed."""
    try:
        return (inspect.getdoc(rewards.factory(name)) or "no description").split("\n\n")
    except RewardError as error:
        return [str(error)]
    except ValueError as error:
        raise UserError(str(error)) from error


def _plain(text: str) -> str:
    return text.replace("``", "")
