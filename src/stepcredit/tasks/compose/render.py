"""Exact, anti-aliased pictures of ``compose`` prompts, with labels.

Every object is a stamp of coverage (4x4 supersampling, box average) pasted at whole pixels, so a label's box is exact.
Objects lie inside a frame of background, at least ``GAP`` pixels apart along one axis, and a relation holds with a margin over
GenEval's threshold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stepcredit.tasks.base import Prompt
from stepcredit.tasks.compose.prompts import COLORS, RELATIONS, SHAPES

SIZE = 32
GAP = 2
"""Least distance between the boxes of two objects along one axis, in pixels."""
MARGIN = 1
"""Width of the frame of plain background around the picture, in pixels."""
SIZES = tuple(range(8, 14))
"""Extents an object may have, in pixels: width = height."""
SIZE_RANGE = {1: (9, 13), 2: (8, 13), 3: (8, 12), 4: (8, 11)}
"""Smallest and largest extent for a picture of that many objects."""
RELATION_MARGIN = 0.8
"""Least cosine between the offset, shrunk as GenEval does, and the relation's axis; the rule asks for 0.5."""

PALETTE = {
    "red": (0.89, 0.20, 0.22),
    "green": (0.22, 0.66, 0.33),
    "blue": (0.16, 0.42, 0.90),
    "yellow": (0.99, 0.84, 0.20),
    "purple": (0.57, 0.24, 0.72),
    "orange": (0.98, 0.53, 0.09),
}
BACKGROUND = {"white": (1.0, 1.0, 1.0), "black": (0.0, 0.0, 0.0), "grey": (0.62, 0.62, 0.62)}

_STAMP = max(SIZES)
_MAX_OBJECTS = max(SIZE_RANGE)
_Floats = NDArray[np.float32]
_Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Label:
    """One object of a rendered picture; ``box`` is (x1, y1, x2, y2) in pixels, y downwards."""

    cls: str
    color: str
    box: tuple[float, float, float, float]


def coverage(shape: str, width: float, height: float, supersample: int = 4) -> _Floats:
    """Anti-aliased coverage of a shape that fills a box of ``width`` x ``height`` pixels: ``[ceil(h), ceil(w)]``.

    Values in [0, 1]: the share of supersamples of each pixel inside the shape. Raises ValueError for an unknown shape.
    """
    rows, columns = int(np.ceil(height)), int(np.ceil(width))
    y, x = np.mgrid[0 : rows * supersample, 0 : columns * supersample].astype(np.float64)
    # To the unit box [-1, 1]; samples beyond the box (a fractional size) fall outside every shape.
    u = (x + 0.5) / supersample / width * 2 - 1
    v = (y + 0.5) / supersample / height * 2 - 1
    radius = np.hypot(u, v)
    if shape == "circle":
        inside = radius <= 1
    elif shape == "square":
        inside = np.maximum(abs(u), abs(v)) <= 1
    elif shape == "triangle":
        inside = (abs(u) <= (v + 1) / 2) & (v <= 1)
    elif shape == "cross":
        inside = (np.minimum(abs(u), abs(v)) <= 1 / 3) & (np.maximum(abs(u), abs(v)) <= 1)
    elif shape == "diamond":
        inside = abs(u) + abs(v) <= 1
    elif shape == "ring":
        inside = (radius <= 1) & (radius >= 0.55)
    else:
        raise ValueError(f"shape {shape!r} is unknown; use one of {', '.join(SHAPES)}")
    cells = inside.reshape(rows, supersample, columns, supersample)
    return np.asarray(cells.mean(axis=(1, 3)), dtype=np.float32)


@cache
def _stamps() -> _Floats:
    """Coverage of every shape at every size: ``[shapes, sizes, 13, 13]``, zero outside the object."""
    stamps = np.zeros((len(SHAPES), len(SIZES), _STAMP, _STAMP), np.float32)
    for i, shape in enumerate(SHAPES):
        for j, size in enumerate(SIZES):
            stamps[i, j, :size, :size] = coverage(shape, size, size)
    return stamps


@dataclass(frozen=True)
class _Scenes:
    """What a batch of prompts fixes; object slots are -1 where unused or, for colours, free."""

    shape: _Ints  # [B, 4]
    color: _Ints  # [B, 4]
    relation: _Ints  # [B]; of object 1 against object 0; -1 where none
    background: _Floats  # [B, 3]


def _parse(metadata: Sequence[Mapping[str, Any]]) -> _Scenes:
    B = len(metadata)
    shape, color = np.full((B, _MAX_OBJECTS), -1), np.full((B, _MAX_OBJECTS), -1)
    relation, background = np.full(B, -1), np.zeros((B, 3), np.float32)
    for b, entry in enumerate(metadata):
        slot = 0
        for clause in entry["include"]:
            end = slot + clause["count"]
            if end > _MAX_OBJECTS:
                raise ValueError(f"prompt {entry['prompt']!r} asks for {end} objects; at most {_MAX_OBJECTS} fit")
            shape[b, slot:end] = SHAPES.index(clause["class"])
            if "color" in clause:
                color[b, slot:end] = COLORS.index(clause["color"])
            if "position" in clause:
                name, target = clause["position"]
                if (slot, target) != (1, 0):
                    raise ValueError(f"prompt {entry['prompt']!r}: a relation must place object 1 against object 0")
                relation[b] = RELATIONS.index(name)
            slot = end
        background[b] = BACKGROUND[entry["background"]]
    return _Scenes(shape.astype(np.int64), color.astype(np.int64), relation.astype(np.int64), background)


def _related(relation: _Ints, x: _Ints, y: _Ints, size: _Ints, other: tuple[_Ints, _Ints, _Ints]) -> NDArray[np.bool_]:
    """Whether an object at (x, y) stands clearly in ``relation`` to the other; all broadcast; -1 is always true."""
    x_0, y_0, size_0 = other
    offset = np.stack(np.broadcast_arrays(x + size / 2 - x_0 - size_0 / 2, y + size / 2 - y_0 - size_0 / 2))
    shrunk = np.sign(offset) * np.maximum(abs(offset) - 0.1 * (size + size_0), 0)
    unit = shrunk / np.maximum(np.hypot(*shrunk), 1e-9)
    holds = np.stack([-unit[0], unit[0], -unit[1], unit[1]]) >= RELATION_MARGIN  # the order of RELATIONS
    chosen = np.take_along_axis(holds, np.broadcast_to(np.maximum(relation, 0), holds.shape[1:])[None], axis=0)[0]
    return np.asarray(chosen | (relation < 0), dtype=np.bool_)


def _place(scenes: _Scenes, rng: np.random.Generator) -> tuple[_Ints, _Ints, _Ints]:
    """Sizes and top-left corners: three ``[B, 4]``. Each object in turn is uniform over the places left to it."""
    used = scenes.shape >= 0
    bounds = np.array([SIZE_RANGE[n] for n in range(1, _MAX_OBJECTS + 1)])[used.sum(1) - 1]
    B = len(used)
    sizes, xs, ys = (np.zeros((B, _MAX_OBJECTS), np.int64) for _ in range(3))
    todo = np.arange(B)
    grid_y, grid_x = np.arange(SIZE)[None, :, None], np.arange(SIZE)[None, None, :]
    while todo.size:  # a picture whose next object finds no place starts again
        size = rng.integers(bounds[todo, :1], bounds[todo, 1:] + 1, (todo.size, _MAX_OBJECTS))
        x, y = np.zeros_like(size), np.zeros_like(size)
        failed = np.zeros(todo.size, np.bool_)
        for k in range(_MAX_OBJECTS):
            rows = np.flatnonzero(used[todo, k] & ~failed)
            if not rows.size:
                break
            s = size[rows, k, None, None]
            free = (np.minimum(grid_x, grid_y) >= MARGIN) & (np.maximum(grid_x, grid_y) + s <= SIZE - MARGIN)
            for j in range(k):
                x_j, y_j, s_j = (a[rows, j, None, None] for a in (x, y, size))
                apart_x = (grid_x >= x_j + s_j + GAP) | (grid_x + s + GAP <= x_j)
                free &= apart_x | (grid_y >= y_j + s_j + GAP) | (grid_y + s + GAP <= y_j)
            if k == 1:
                first = tuple(a[rows, 0, None, None] for a in (x, y, size))
                relation = scenes.relation[todo[rows], None, None]
                free &= _related(relation, grid_x, grid_y, s, (first[0], first[1], first[2]))
            flat = free.reshape(len(rows), -1).cumsum(1)
            total = flat[:, -1]
            pick = (rng.random(len(rows)) * total).astype(np.int64)
            place = (flat > pick[:, None]).argmax(1)
            failed[rows[total == 0]] = True
            y[rows, k], x[rows, k] = np.divmod(place, SIZE)
        done = todo[~failed]
        sizes[done], xs[done], ys[done] = size[~failed], x[~failed], y[~failed]
        todo = todo[failed]
    return sizes, xs, ys


def render_labelled(metadata: Sequence[Mapping[str, Any]], seed: int) -> tuple[Tensor, list[list[Label]]]:
    """Draw prompts given by their metadata: B entries -> float32 ``[B, 3, 32, 32]`` in [0, 1] and labels, in order.

    Deterministic in (metadata, seed). Colours that the prompt leaves open are random, for each object its own.
    """
    rng = np.random.default_rng(seed)
    scenes = _parse(metadata)
    used = scenes.shape >= 0
    size, x, y = _place(scenes, rng)
    color = np.where(scenes.color >= 0, scenes.color, rng.integers(0, len(COLORS), scenes.color.shape))
    palette, cells = np.array([PALETTE[c] for c in COLORS], np.float32), np.arange(_STAMP)
    padded = SIZE + _STAMP  # a small object's stamp may reach over the edge with zeros
    canvas = np.empty((len(metadata), padded, padded, 3), np.float32)
    canvas[:] = scenes.background[:, None, None]
    for k in range(_MAX_OBJECTS):
        rows = np.flatnonzero(used[:, k])
        alpha = _stamps()[scenes.shape[rows, k], size[rows, k] - SIZES[0]]
        paint = (palette[color[rows, k]] - scenes.background[rows])[:, None, None] * alpha[..., None]
        at = (rows[:, None, None], (y[rows, k, None] + cells)[:, :, None], (x[rows, k, None] + cells)[:, None])
        canvas[at] += paint  # objects do not overlap, so the sum is the composite
    images = torch.from_numpy(np.ascontiguousarray(canvas[:, :SIZE, :SIZE].transpose(0, 3, 1, 2))).clamp_(0, 1)
    labels = [
        [
            Label(SHAPES[shape], COLORS[c], (float(x_k), float(y_k), float(x_k + s), float(y_k + s)))
            for shape, c, x_k, y_k, s in zip(*(a[b].tolist() for a in (scenes.shape, color, x, y, size)), strict=True)
            if shape >= 0
        ]
        for b in range(len(metadata))
    ]
    return images, labels


def render(metadata: Mapping[str, Any], seed: int) -> tuple[Tensor, list[Label]]:
    """Draw one prompt given by its metadata: float32 ``[3, 32, 32]`` in [0, 1] and the labels of its objects."""
    images, labels = render_labelled([metadata], seed)
    return images[0], labels[0]


def render_batch(prompts: Sequence[Prompt], seed: int) -> Tensor:
    """Draw prompts: float32 ``[B, 3, 32, 32]`` in [0, 1], deterministic in (prompts, seed)."""
    return render_labelled([p.metadata for p in prompts], seed)[0]
