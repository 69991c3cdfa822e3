"""Image grids as PNG files."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
from PIL import Image
from torch import Tensor

from stepcredit.training.evaluation import Evaluation
from stepcredit.training.files import write_text_atomic
from stepcredit.training.records import to_json


def columns_of(count: int) -> int:
    """Columns of a grid of ``count`` images: a little wider than high."""
    return max(1, math.ceil(math.sqrt(count * 1.5)))


def grid(images: Tensor, gap: int = 0, enlarge: int = 1) -> Image.Image:
    """Images uint8 ``[N, H, W, 3]`` in rows, each enlarged by a whole factor without blur, ``gap`` pixels apart."""
    tiles = images.numpy().repeat(enlarge, 1).repeat(enlarge, 2)
    count, height, width, _ = tiles.shape
    columns = columns_of(count)
    rows = math.ceil(count / columns)
    sheet = np.full((rows * (height + gap) - gap, columns * (width + gap) - gap, 3), 255, np.uint8)
    for k, tile in enumerate(tiles):
        y, x = (k // columns) * (height + gap), (k % columns) * (width + gap)
        sheet[y : y + height, x : x + width] = tile
    return Image.fromarray(sheet)


def save_grid(path: Path, images: Tensor, gap: int = 0, enlarge: int = 1) -> None:
    """Write a grid of images as PNG, making its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    grid(images, gap, enlarge).save(path, format="PNG")


def save_index(path: Path, before: Evaluation, after: Evaluation, count: int) -> None:
    """Write what the tiles of before.png and after.png are: prompts, tags, rewards, columns, tile size."""
    slots = before.slots[:count]
    index = {
        "prompts": [slot.prompt.text for slot in slots],
        "tags": [slot.prompt.tag for slot in slots],
        "rewards_before": [_number(r) for r in before.rewards[:count].tolist()],
        "rewards_after": [_number(r) for r in after.rewards[:count].tolist()],
        "columns": columns_of(len(slots)),
        "size": list(after.images.shape[1:3]),
    }
    write_text_atomic(path, to_json(index))


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
