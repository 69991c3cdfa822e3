"""Exact, anti-aliased pictures of ``compose`` prompts, with labels.

Every object is a stamp of coverage (4x4 supersampling, box average) pasted at whole pixels, so a label's box is exact.
Objects are of one size and stand on a lattice, which a small model learns in minutes where free places took it hours.
They lie inside a frame of background, at least ``GAP`` pixels apart along one axis, and a relation holds with a margin
over GenEval's threshold.
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

SIZE = 24
"""Width and height of a picture, in pixels."""
EXTENT = 8
"""Width and height of an object, in pixels."""
MARGIN = 2
"""Width of the frame of plain background around the picture, in pixels; the lattice begins there."""
LATTICE = 4
"""Distance of the places at which an object's top-left corner may stand, along each axis, in pixels."""
SUPERSAMPLE = 4
GAP = 2
"""Least distance between the boxes of two objects along one axis, in pixels."""
RELATION_MARGIN = 0.65
"""Least share of the offset, shrunk as GenEval does, along the relation's axis; the rule asks for more than 0.5."""

PALETTE = {
    "red": (0.89, 0.20, 0.22),
    "green": (0.22, 0.66, 0.33),
    "blue": (0.16, 0.42, 0.90),
    "yellow": (0.99, 0.84, 0.20),
    "purple": (0.57, 0.24, 0.72),
    "orange": (0.98, 0.53, 0.09),
}
BACKGROUND = {"white": (1.0, 1.0, 1.0), "black": (0.0, 0.0, 0.0), "grey": (0.62, 0.62, 0.62)}

_MAX_OBJECTS = 4
_Floats = NDArray[np.float32]
_Reals = NDArray[np.float64]
_Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Label:
    """One object of a rendered picture; ``box`` is (x1, y1, x2, y2) in pixels, y downwards."""

    cls: str
    color: str
    box: tuple[float, float, float, float]


def inside(shape: str, u: _Reals, v: _Reals) -> NDArray[np.bool_]:
    """Whether points lie in a shape that fills the box [-1, 1] x [-1, 1]; u to the right, v downwards, broadcast.

    Raises ValueError for an unknown shape.
    """
    if shape == "circle":
        return np.hypot(u, v) <= 1
    if shape == "square":
        return np.maximum(abs(u), abs(v)) <= 1
    if shape == "triangle":
        return (abs(u) <= (v + 1) / 2) & (v <= 1)
    if shape == "cross":
        return (np.minimum(abs(u), abs(v)) <= 1 / 3) & (np.maximum(abs(u), abs(v)) <= 1)
    if shape == "diamond":
        return abs(u) + abs(v) <= 1
    if shape == "ring":
        return abs(np.hypot(u, v) - 0.775) <= 0.225
    raise ValueError(f"shape {shape!r} is unknown; use one of {', '.join(SHAPES)}")


def pixel_means(samples: NDArray[np.bool_], supersample: int) -> _Floats:
    """Box average of a mask ``[..., H * supersample, W * supersample]``: coverage in [0, 1], ``[..., H, W]``."""
    *lead, rows, columns = samples.shape
    cells = samples.reshape(*lead, rows // supersample, supersample, columns // supersample, supersample)
    means: _Floats = cells.mean(axis=(-3, -1), dtype=np.float32)
    return means


def coverage(shape: str, size: int) -> _Floats:
    """Anti-aliased picture of a shape ``size`` pixels wide and high: coverage in [0, 1], ``[size, size]``."""
    centres = (np.arange(size * SUPERSAMPLE) + 0.5) / (size * SUPERSAMPLE) * 2 - 1
    return pixel_means(inside(shape, centres[None, :], centres[:, None]), SUPERSAMPLE)


@cache
def _stamps() -> _Floats:
    """Coverage of every shape: ``[shapes, EXTENT, EXTENT]``."""
    return np.stack([coverage(shape, EXTENT) for shape in SHAPES])


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


def _related(relation: _Ints, x: _Ints, y: _Ints, x_0: _Ints, y_0: _Ints) -> NDArray[np.bool_]:
    """Whether an object at (x, y) stands clearly in ``relation`` to that at (x_0, y_0); all broadcast; -1 holds."""
    offset = np.stack(np.broadcast_arrays(x - x_0, y - y_0)).astype(np.float64)
    shrunk = np.sign(offset) * np.maximum(abs(offset) - 0.1 * (EXTENT + EXTENT), 0)
    unit = shrunk / np.maximum(np.hypot(*offset), 1e-9)  # by the full offset: GenEval's rule
    holds = np.stack([-unit[0], unit[0], -unit[1], unit[1]]) >= RELATION_MARGIN  # the order of RELATIONS
    chosen = np.take_along_axis(holds, np.broadcast_to(np.maximum(relation, 0), holds.shape[1:])[None], axis=0)[0]
    return np.asarray(chosen | (relation < 0), dtype=np.bool_)


def _place(scenes: _Scenes, rng: np.random.Generator) -> tuple[_Ints, _Ints]:
    """Top-left corners: two ``[B, 4]``. Each object in turn is uniform over the places left to it."""
    used = scenes.shape >= 0
    xs, ys = (np.zeros(used.shape, np.int64) for _ in range(2))
    todo = np.arange(len(used))
    places = np.arange(MARGIN, SIZE - MARGIN - EXTENT + 1, LATTICE)
    grid_y, grid_x = places[None, :, None], places[None, None, :]
    while todo.size:  # a picture whose next object finds no place starts again
        x, y = (np.zeros((todo.size, _MAX_OBJECTS), np.int64) for _ in range(2))
        failed = np.zeros(todo.size, np.bool_)
        for k in range(_MAX_OBJECTS):
            rows = np.flatnonzero(used[todo, k] & ~failed)
            if not rows.size:
                break
            free = np.ones((len(rows), len(places), len(places)), np.bool_)
            for j in range(k):
                x_j, y_j = (a[rows, j, None, None] for a in (x, y))
                free &= (abs(grid_x - x_j) >= EXTENT + GAP) | (abs(grid_y - y_j) >= EXTENT + GAP)
            if k == 1:
                relation = scenes.relation[todo[rows], None, None]
                free &= _related(relation, grid_x, grid_y, x[rows, 0, None, None], y[rows, 0, None, None])
            flat = free.reshape(len(rows), -1).cumsum(1)
            total = flat[:, -1]
            pick = (rng.random(len(rows)) * total).astype(np.int64)
            place = (flat > pick[:, None]).argmax(1)
            failed[rows[total == 0]] = True
            row, column = np.divmod(place, len(places))
            y[rows, k], x[rows, k] = places[row], places[column]
        done = todo[~failed]
        xs[done], ys[done] = x[~failed], y[~failed]
        todo = todo[failed]
    return xs, ys


def render_labelled(metadata: Sequence[Mapping[str, Any]], seed: int) -> tuple[Tensor, list[list[Label]]]:
    """Draw prompts given by their metadata: B entries -> float32 ``[B, 3, 24, 24]`` in [0, 1] and labels, in order.

    Deterministic in (metadata, seed). Colours that the prompt leaves open are random, for each object its own.
    """
    rng = np.random.default_rng(seed)
    scenes = _parse(metadata)
    used = scenes.shape >= 0
    x, y = _place(scenes, rng)
    color = np.where(scenes.color >= 0, scenes.color, rng.integers(0, len(COLORS), scenes.color.shape))
    palette, cells = np.array([PALETTE[c] for c in COLORS], np.float32), np.arange(EXTENT)
    canvas = np.empty((len(metadata), SIZE, SIZE, 3), np.float32)
    canvas[:] = scenes.background[:, None, None]
    for k in range(_MAX_OBJECTS):
        rows = np.flatnonzero(used[:, k])
        alpha = _stamps()[scenes.shape[rows, k]]
        paint = (palette[color[rows, k]] - scenes.background[rows])[:, None, None] * alpha[..., None]
        at = (rows[:, None, None], (y[rows, k, None] + cells)[:, :, None], (x[rows, k, None] + cells)[:, None])
        canvas[at] += paint  # objects do not overlap, so the sum is the composite
    images = torch.from_numpy(np.ascontiguousarray(canvas.transpose(0, 3, 1, 2))).clamp_(0, 1)
    labels = [
        [
            Label(SHAPES[shape], COLORS[c], (float(x_k), float(y_k), float(x_k + EXTENT), float(y_k + EXTENT)))
            for shape, c, x_k, y_k in zip(*(a[b].tolist() for a in (scenes.shape, color, x, y)), strict=True)
            if shape >= 0
        ]
        for b in range(len(metadata))
    ]
    return images, labels


def render(metadata: Mapping[str, Any], seed: int) -> tuple[Tensor, list[Label]]:
    """Draw one prompt given by its metadata: float32 ``[3, 24, 24]`` in [0, 1] and the labels of its objects."""
    images, labels = render_labelled([metadata], seed)
    return images[0], labels[0]


def render_batch(prompts: Sequence[Prompt], seed: int) -> Tensor:
    """Draw prompts: float32 ``[B, 3, 24, 24]`` in [0, 1], deterministic in (prompts, seed)."""
    return render_labelled([p.metadata for p in prompts], seed)[0]
