"""Pictures of an inspection: how large they are shown, and their bytes within a budget."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass

from PIL import Image

from stepcredit.inspection.collect import SHARP, Look
from stepcredit.reports.style import data_uri

BUDGET = 2_000_000
"""Bytes of picture data that a page may carry, where pictures are reduced at all."""
WIDEST = 72
"""Most CSS pixels of a picture in a strip."""
LONGEST = (192, 160, 128, 96, 64)
"""Longer sides that are tried in turn until all pictures fit."""


@dataclass(frozen=True)
class Side:
    """Measures on a wide page or on a phone, in CSS pixels."""

    label: int
    """Room on the left for names of rows and ticks."""
    tile: int
    """Width of a picture in a strip."""
    pitch: int
    """Distance from one state to the next: strips, heat map and curves share it."""


@dataclass(frozen=True)
class Layout:
    """How pictures are laid out."""

    sides: tuple[Side, Side]
    """Of a wide page and of a phone."""
    ratio: float
    """Height of a picture over its width."""
    sharp: bool
    """Enlarge by whole factors without blur."""
    large: int
    """Width of the enlarged pair."""


def layout(size: tuple[int, int], states: int, looks: int) -> Layout:
    """Measures for strips of ``states`` pictures of ``size`` (height, width), ``looks`` of them side by side."""
    height, width = size
    sharp = max(size) <= SHARP
    # a wide page has numbers in its map, for which a step needs room; a phone has colours alone
    wide = _side(width, states, 594 if looks > 1 else 960, 44, 50, sharp)
    narrow = _side(width, states, 333, 34, 26, sharp)
    large = width * max(1, round(144 / width)) if sharp else 160
    return Layout((wide, narrow), height / width, sharp, large)


def _side(width: int, states: int, room: int, label: int, least: int, sharp: bool) -> Side:
    """Measures that use the room, or go beyond it where a state would get less than ``least``."""
    each = max(least, (room - label) // states)
    tile = min(WIDEST, each - 2)
    tile = max(1, tile // width) * width if sharp else tile
    return Side(label, tile, max(tile + 2, min(each, WIDEST + 8)))


def encode(looks: Sequence[Look]) -> list[list[list[str]]]:
    """Data URIs of every look's picture of every member and state: small ones exactly, as PNG; others as JPEG that
    fit the budget together.
    """
    distinct = [[Image.fromarray(image.numpy()) for image in look.images] for look in looks]
    if max(distinct[0][0].size) <= SHARP:
        return _laid_out(looks, [[_png(image) for image in images] for images in distinct])
    placed: list[list[list[str]]] = []
    for longest in LONGEST:
        placed = _laid_out(looks, [[_jpeg(image, longest) for image in images] for images in distinct])
        if sum(len(uri) for rows in placed for row in rows for uri in row) <= BUDGET:
            break
    return placed


def _laid_out(looks: Sequence[Look], uris: Sequence[Sequence[str]]) -> list[list[list[str]]]:
    return [
        [[known[k] for k in row] for row in look.estimate.tolist()] for look, known in zip(looks, uris, strict=True)
    ]


def _png(image: Image.Image) -> str:
    content = io.BytesIO()
    image.save(content, "PNG", optimize=True)
    return data_uri(content.getvalue(), "png")


def _jpeg(image: Image.Image, longest: int) -> str:
    content, reduced = io.BytesIO(), image.copy()
    reduced.thumbnail((longest, longest), Image.Resampling.LANCZOS)
    reduced.save(content, "JPEG", quality=82)
    return data_uri(content.getvalue(), "jpeg")
