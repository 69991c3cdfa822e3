"""The pictures of a report: tiles cut from the grids of a run folder, as data URIs."""

from __future__ import annotations

import io
import json
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from stepcredit.reports.folder import mapping, number, numbers
from stepcredit.reports.style import data_uri

SHARP = 96
"""Tiles up to this many pixels wide are embedded as they are and enlarged without blur; larger ones are reduced."""
REDUCED = 224
BUDGET = 240_000
"""Bytes of picture data that a page may carry; pairs that no longer fit are left out, and the page says so."""


@dataclass(frozen=True)
class Pair:
    """One prompt before and after: two images from the same noise, as data URIs, and their rewards."""

    prompt: str
    tag: str
    before: str
    after: str
    reward_before: float | None
    reward_after: float | None


@dataclass(frozen=True)
class Samples:
    """The pairs shown, how many there are in all, and how to show them; ``missing`` says why there are none."""

    pairs: tuple[Pair, ...] = ()
    total: int = 0
    sharp: bool = True
    missing: str = ""


def pairs(folder: Path) -> Samples:
    """Cut ``before.png`` and ``after.png`` of a samples folder along ``samples.json``. Never raises for bad files."""
    try:
        index = mapping(json.loads((folder / "samples.json").read_text(encoding="utf-8")))
        sheets = [Image.open(folder / name).convert("RGB") for name in ("before.png", "after.png")]
    except FileNotFoundError:
        return Samples(missing="Samples are written when a run ends; this one has no pair of before and after yet.")
    except (OSError, ValueError, Image.DecompressionBombError):
        return Samples(missing="The sample grids of this run cannot be read.")
    prompts, tags = (value if isinstance(value, list) else [] for value in (index.get("prompts"), index.get("tags")))
    rewards = [numbers(index.get(key)) for key in ("rewards_before", "rewards_after")]
    layout = [*numbers(index.get("size")), number(index.get("columns"))]
    height, width, columns = (int(n) if n else 0 for n in layout) if len(layout) == 3 else (0, 0, 0)
    if min(height, width, columns) < 1 or not prompts:
        return Samples(missing="samples.json does not say how the sample grids of this run are laid out.")
    needed = (min(len(prompts), columns) * width, -(-len(prompts) // columns) * height)
    if any(sheet.width < needed[0] or sheet.height < needed[1] for sheet in sheets):
        return Samples(missing="The sample grids of this run are smaller than samples.json says.")
    sharp, spent = max(height, width) <= SHARP, 0
    found: list[Pair] = []
    for k, prompt in enumerate(prompts):
        x, y = k % columns * width, k // columns * height
        uris = [_encode(sheet.crop((x, y, x + width, y + height)), sharp) for sheet in sheets]
        spent += sum(map(len, uris))
        if spent > BUDGET and found:
            break
        earned = [r[k] if k < len(r) else None for r in rewards]
        found.append(Pair(str(prompt), str(tags[k] if k < len(tags) else ""), uris[0], uris[1], earned[0], earned[1]))
    return Samples(tuple(found), len(prompts), sharp)


def _encode(tile: Image.Image, sharp: bool) -> str:
    content = io.BytesIO()
    if sharp:
        tile.save(content, "PNG", optimize=True)
    else:
        tile.thumbnail((REDUCED, REDUCED), Image.Resampling.LANCZOS)
        tile.save(content, "JPEG", quality=82)
    return data_uri(content.getvalue(), "png" if sharp else "jpeg")
