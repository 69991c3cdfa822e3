"""Prompt files of other projects: known by source and checksum, fetched or read by the user, never shipped."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from stepcredit.errors import UserError, nearest
from stepcredit.folders import cache_root
from stepcredit.tasks import files
from stepcredit.tasks.base import Prompt

VARIABLE = "STEPCREDIT_DATA"
"""Environment variable with a folder that holds the files; it is looked into before the cache."""
LARGEST = 8 << 20
"""Bytes of the largest file that is read or fetched."""


@dataclass(frozen=True)
class Published:
    """A file of prompts that another project published."""

    name: str
    """As ``stepcredit data get`` knows it."""
    path: str
    """Below the data folder, and below the cache's."""
    url: str
    """Where it is to be had."""
    sha256: str | None
    """Digest of the published file, 64 hex digits; None where it is not known here and the user must accept one."""
    licence: str
    content: str
    """What is in it, in a few words."""
    key: str = "heldout_prompts"
    """Recipe key that takes a user's file in its place."""

    def find(self) -> Path:
        """The verified file, in ``$STEPCREDIT_DATA`` or in the cache.

        Raises UserError, naming the file and how to get it, if it is absent or another file. Where no checksum is
        known, a file in the user's own folder is taken as it is, and one in the cache is held to the accepted digest.
        """
        place = self.place()
        remedy = f"or name a file of your own as {self.key} (source: {self.url}, licence: {self.licence})"
        if place is None:
            raise UserError(
                f"{self.content}: {self.path} is absent; fetch it with `stepcredit data get {self.name}`, put it into "
                f"the folder that {VARIABLE} names, {remedy}"
            )
        expected = self.sha256 or (self.accepted() if place == self.cached else None)
        if expected is not None and digest(_read(place)) != expected:
            raise UserError(
                f"{str(place)!r} is not the published file (its SHA-256 does not begin with {expected[:12]}); get it "
                f"again, {remedy}"
            )
        return place

    def read(self) -> list[Prompt]:
        """Its prompts. Raises UserError as ``find``, and for a malformed line."""
        return files.read(self.find())

    def place(self) -> Path | None:
        """Where the file lies, unverified: in the user's folder, else in the cache, else nowhere."""
        named = os.environ.get(VARIABLE)
        places = ([Path(named).expanduser() / self.path] if named else []) + [self.cached]
        return next((place for place in places if place.is_file()), None)

    @property
    def cached(self) -> Path:
        """Where ``stepcredit data get`` puts it."""
        return cache_root() / "data" / self.path

    @property
    def record(self) -> Path:
        """JSON beside the cached file: source, licence and digest."""
        return self.cached.with_name(f"{self.cached.name}.source.json")

    def accepted(self) -> str | None:
        """The digest that was accepted when the cached file was fetched. Raises UserError if the record is damaged."""
        try:
            told = json.loads(self.record.read_text(encoding="utf-8"))["sha256"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{str(self.record)!r}, which says what {self.cached.name} must be, cannot be read; remove both and "
                f"run `stepcredit data get {self.name}`"
            ) from error
        return str(told)


_FLOW_GRPO = "https://raw.githubusercontent.com/yifan123/flow_grpo/main/dataset"
CATALOGUE: Mapping[str, Published] = {
    one.name: one
    for one in (
        Published(
            name="geneval",
            path="geneval/evaluation_metadata.jsonl",
            url="https://raw.githubusercontent.com/djghosh13/geneval/main/prompts/evaluation_metadata.jsonl",
            sha256="5c48e0813e812e3c373fa5c8ed07a8f0a483be30272b4427b0559c8048e67c13",
            licence="MIT",
            content="GenEval's 553 test prompts",
        ),
        Published(
            name="ocr",
            path="ocr/test.txt",
            url=f"{_FLOW_GRPO}/ocr/test.txt",
            sha256="4dd8caf3ab6ade73bd376c7d14c6ca49b6eacfb1bd321e22c40714ae4a98d4dc",
            licence="MIT",
            content="flow_grpo's 1,018 test prompts with quoted text",
        ),
        Published(
            name="pickscore-sfw",
            path="pickscore/test.txt",
            url=f"{_FLOW_GRPO}/pickscore_sfw/test.txt",
            sha256=None,
            licence="MIT tag on a derivative of user prompts without a licence",
            content="the held-out prompts of Pick-a-Pic's filtered set",
        ),
        Published(
            name="pickscore-sfw-train",
            path="pickscore/train.txt",
            url=f"{_FLOW_GRPO}/pickscore_sfw/train.txt",
            sha256=None,
            licence="MIT tag on a derivative of user prompts without a licence",
            content="the training prompts of Pick-a-Pic's filtered set",
            key="train_prompts",
        ),
        Published(
            name="drawbench",
            path="drawbench/test.txt",
            url=f"{_FLOW_GRPO}/drawbench/test.txt",
            sha256=None,
            licence="unknown",
            content="DrawBench's 200 prompts",
        ),
    )
}


def get(name: str) -> Published:
    """A file of the catalogue; UserError names the nearest for an unknown one."""
    if name not in CATALOGUE:
        raise UserError(
            f"unknown prompt file {name!r}{nearest(name, CATALOGUE) or '.'} Known are {', '.join(CATALOGUE)}"
        )
    return CATALOGUE[name]


def digest(content: bytes) -> str:
    """SHA-256 as 64 hex digits."""
    return hashlib.sha256(content).hexdigest()


def _read(path: Path) -> bytes:
    try:
        if path.stat().st_size > LARGEST:
            raise UserError(f"{str(path)!r} has more than {LARGEST} bytes, too many for a file of prompts")
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {str(path)!r}: {error}") from error
