"""Finds coloured shapes in 24x24 pictures: the desk's stand-in for GenEval's Mask2Former.

A pixel p over a background b is read as b + a (c - b) with a palette colour c: the coverage a is exact on anti-aliased
edges, where the nearest palette colour would be wrong (an edge of yellow on black is nearest to orange). Connected
pixels of one colour form a component, which is compared with the anti-aliased template of every shape at its size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stepcredit.tasks.compose.prompts import COLORS, SHAPES
from stepcredit.tasks.compose.render import PALETTE, SIZE, inside, pixel_means

CORE = 0.5
"""Least coverage of a pixel that founds a component."""
FRINGE = 0.15
"""Least coverage of a neighbouring pixel that still widens the component's box."""
COLOR_TOLERANCE = (0.15, 0.30)
"""Distance in RGB from the line background-colour: full trust up to the first value, none from the second on."""
ALIKE = 0.12
"""Distance in RGB below which two touching pixels belong to one object, whichever palette colour each is nearest to."""
MIN_AREA, MIN_EXTENT = 8, 4
"""Components with fewer core pixels, or narrower, are taken for dirt."""
MATCH = (0.55, 0.9)
"""Similarity to the best template at which the mask's quality is 0 and 1."""
CONTRAST = (0.45, 0.7)
"""Share of the palette colour's contrast to the background at which an object counts for nothing and in full."""
BLURS = (0.0, 0.8, 1.2)
"""Gaussian blurs of the templates, in pixels: without them a soft square would pass for a circle."""
SHARPNESS = (1.0, 0.9, 0.6)
"""Factor of the score for each blur."""
TEMPERATURE = 0.02
"""Of the softmax over the similarities to the six shapes."""
ASPECT = (0.55, 0.8)
"""Shorter over longer side at which a component counts for nothing and in full: shapes here are as wide as high."""

_PAD = SIZE + 2  # one pixel of nothing around the picture spares every test for the border
_CHUNK = 256
_NEIGHBOURS = np.array([dy * _PAD + dx for dy in (-1, 0, 1) for dx in (-1, 0, 1) if (dy, dx) != (0, 0)])
_INSETS = ((0.0, 0.0), (0.5, 0.5), (1.0, 0.0), (0.0, 1.0), (1.0, 1.0))
_SUPERSAMPLE = 3

_Floats = NDArray[np.float32]
_Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Detection:
    """One object found; ``score`` in [0, 1], ``box`` is (x1, y1, x2, y2) in pixels, y downwards."""

    cls: str
    color: str
    score: float
    box: tuple[float, float, float, float]


class Detector(Protocol):
    """What the reward needs of a detector: :func:`detect` is one."""

    def __call__(self, images: Tensor) -> Sequence[Sequence[Detection]]:
        """Objects of each picture: ``[B, 3, 24, 24]`` in [0, 1] -> B lists."""
        ...


def _color_coverage(images: _Floats) -> tuple[_Floats, _Ints]:
    """Coverage of each pixel by each colour ``[B, 6, H, W]`` and the colour that explains the pixel best ``[B, H, W]``.

    The background is the median of the outermost pixels.
    """
    B = len(images)
    frame = np.concatenate([images[:, :, 0], images[:, :, -1], images[:, :, 1:-1, 0], images[:, :, 1:-1, -1]], axis=2)
    background = np.median(frame, axis=2)
    toward = np.array([PALETTE[c] for c in COLORS], np.float32) - background[:, None]  # [B, 6, 3]
    length = np.square(toward).sum(2)[..., None]
    offset = images.reshape(B, 3, -1) - background[..., None]
    along = toward @ offset
    # A background of the colour itself leaves nothing to see in that colour.
    alpha = np.where(length > 0.01, np.clip(along / np.maximum(length, 0.01), 0, 1), 0)
    squared = np.square(offset).sum(1)[:, None] - alpha * (2 * along - alpha * length)
    distance = np.sqrt(np.maximum(squared, 0))
    low, high = COLOR_TOLERANCE
    trusted = alpha * np.clip((high - distance) / (high - low), 0, 1)
    return trusted.reshape(B, -1, SIZE, SIZE), distance.argmin(1).reshape(B, SIZE, SIZE)


def _components(core: _Ints, color: _Ints, pixels: _Floats) -> _Ints:
    """Component of every core pixel, as the largest index among its pixels: flat padded positions ``[N]`` -> ``[N]``.

    Pixels are joined when they touch, corners included, and share a colour (``color``, flat padded, -1 outside cores)
    or look alike (``pixels``, flat padded ``[.., 3]``): a hue between two palette colours stays one object.
    """
    index = np.full(color.shape, -1)
    index[core] = np.arange(len(core))
    around = core[:, None] + _NEIGHBOURS
    alike = np.square(pixels[around] - pixels[core][:, None]).sum(2) < ALIKE**2
    joined = (color[around] >= 0) & (alike | (color[around] == color[core][:, None]))
    neighbours = np.where(joined, index[around], np.arange(len(core))[:, None])
    root = np.arange(len(core))
    while True:
        reached = np.maximum(root, root[neighbours].max(1))
        reached = reached[reached]  # pointer jumping: the number of rounds grows with the logarithm of the path
        if (reached == root).all():
            return root
        root = reached


@lru_cache(maxsize=512)
def _templates(height: int, width: int) -> tuple[_Floats, _Floats]:
    """Templates for a box of whole pixels: ``[(h + 2)(w + 2), shapes * 25]`` with a frame of 1, and their boxes.

    The true outline lies up to one pixel within the box, so each axis is tried with several insets. Boxes are
    (x1, y1, x2, y2) relative to the box's corner, ``[25, 4]``.
    """

    def unit(extent: int) -> NDArray[np.float64]:
        samples = (np.arange((extent + 2) * _SUPERSAMPLE) + 0.5) / _SUPERSAMPLE - 1
        return np.stack([(samples - low) / (extent - low - high) * 2 - 1 for low, high in _INSETS])

    def blur(extent: int, sigma: float) -> _Floats:
        steps = np.subtract.outer(np.arange(extent + 2), np.arange(extent + 2))
        reach = np.arange(-9, 10)
        weights = np.exp(-np.square(steps) / (2 * sigma**2)) / np.exp(-np.square(reach) / (2 * sigma**2)).sum()
        result: _Floats = weights.astype(np.float32)
        return result

    u, v = unit(width)[None, :, None, :], unit(height)[:, None, :, None]
    stacks = []
    for shape in SHAPES:
        sharp = pixel_means(inside(shape, u, v), _SUPERSAMPLE)
        stacks += [sharp] + [blur(height, sigma) @ sharp @ blur(width, sigma) for sigma in BLURS[1:]]
    templates = np.stack(stacks).reshape(len(SHAPES) * len(BLURS) * len(_INSETS) ** 2, -1)
    boxes = [(x1, y1, width - x2, height - y2) for y1, y2 in _INSETS for x1, x2 in _INSETS]
    return np.ascontiguousarray(templates.T), np.array(boxes * len(BLURS), np.float32)


def _ramp(value: _Floats, ends: tuple[float, float]) -> _Floats:
    clipped: _Floats = np.clip((value - ends[0]) / (ends[1] - ends[0]), 0, 1)
    return clipped


def _classify(patches: _Floats, height: int, width: int) -> tuple[_Ints, _Floats, _Floats]:
    """Shape index ``[n]``, score ``[n]`` and box ``[n, 4]`` of coverage patches ``[n, h + 2, w + 2]``.

    Similarity is Tanimoto's, A.T / (A.A + T.T - A.T), of patch and template brought to one norm: 1 for equal pictures,
    faint or strong. The score is the probability of the class times the quality of the mask, as in Mask2Former; the
    quality falls with blur, with contrast and where no template fits.
    """
    templates, boxes = _templates(height, width)
    flat = patches.reshape(len(patches), -1)
    dot, squares = flat @ templates, np.square(templates).sum(0)
    cosine = dot / np.sqrt(np.square(flat).sum(1)[:, None] * squares)
    similarity = (cosine / (2 - cosine)).reshape(len(patches), len(SHAPES), -1)
    by_shape = similarity.max(2)
    best, top = by_shape.argmax(1), by_shape.max(1)
    probability = 1 / np.exp((by_shape - top[:, None]) / TEMPERATURE).sum(1)
    rows = np.arange(len(best))
    variant = similarity[rows, best].argmax(1)
    column = best * similarity.shape[2] + variant
    contrast = dot[rows, column] / squares[column]  # the factor by which the template fits the patch best
    box, sharpness = boxes[variant], np.array(SHARPNESS, np.float32)[variant // len(_INSETS) ** 2]
    sides = box[:, 2:] - box[:, :2]
    quality = sharpness * _ramp(contrast, CONTRAST) * _ramp(top, MATCH) * _ramp(sides.min(1) / sides.max(1), ASPECT)
    return best, probability * quality, box


def _detect_chunk(images: _Floats) -> list[list[Detection]]:
    B = len(images)
    found: list[list[Detection]] = [[] for _ in range(B)]
    trusted, nearest = _color_coverage(images)
    soft = np.zeros((B, len(COLORS), _PAD, _PAD), np.float32)
    soft[:, :, 1:-1, 1:-1] = trusted
    own = np.zeros((B, _PAD, _PAD), np.float32)  # coverage by the colour that explains the pixel best
    own[:, 1:-1, 1:-1] = np.take_along_axis(trusted, nearest[:, None], axis=1)[:, 0]
    padded = np.full((B, _PAD, _PAD), -1)
    padded[:, 1:-1, 1:-1] = np.where(own[:, 1:-1, 1:-1] >= CORE, nearest, -1)
    color = padded.reshape(-1)
    core = np.flatnonzero(color >= 0)
    if not core.size:
        return found
    pixels = np.zeros((B, _PAD, _PAD, 3), np.float32)
    pixels[:, 1:-1, 1:-1] = images.transpose(0, 2, 3, 1)
    root = _components(core, color, pixels.reshape(-1, 3))
    member = np.full(color.shape, -1)
    member[core] = root

    # The box of a component: its core pixels and the fringe that touches them.
    image, cell = np.divmod(core, _PAD * _PAD)
    around = np.concatenate([core[:, None], core[:, None] + _NEIGHBOURS], axis=1)
    plane = (image * len(COLORS) + color[core]) * _PAD * _PAD - image * _PAD * _PAD
    reach = (soft.reshape(-1)[plane[:, None] + around] >= FRINGE) & (color[around] < 0)
    reach[:, 0] = True
    rows, columns = np.divmod(np.where(reach, around - image[:, None] * _PAD * _PAD, cell[:, None]), _PAD)
    order = np.argsort(root, kind="stable")
    starts = np.flatnonzero(np.diff(root[order], prepend=-1))

    def low(values: _Ints) -> _Ints:
        return np.minimum.reduceat(values[order], starts)

    def high(values: _Ints) -> _Ints:
        return np.maximum.reduceat(values[order], starts)

    area = np.diff(starts, append=len(core))
    y_core, x_core = np.divmod(cell, _PAD)
    extent = np.minimum(high(y_core) - low(y_core), high(x_core) - low(x_core)) + 1
    y1, x1 = low(rows.min(1)), low(columns.min(1))
    height, width = high(rows.max(1)) - y1 + 1, high(columns.max(1)) - x1 + 1
    first = order[starts]
    where, label = image[first], root[first]
    votes = np.add.reduceat((color[core] == np.arange(len(COLORS))[:, None])[:, order], starts, axis=1, dtype=np.int64)
    kind = votes.argmax(0)
    kept = (area >= MIN_AREA) & (extent >= MIN_EXTENT)

    members = member.reshape(B, _PAD, _PAD)
    for h, w in sorted(set(zip(height[kept].tolist(), width[kept].tolist(), strict=True))):
        group = np.flatnonzero(kept & (height == h) & (width == w))
        at_y = (y1[group, None] - 1 + np.arange(h + 2))[:, :, None]
        at_x = (x1[group, None] - 1 + np.arange(w + 2))[:, None, :]
        at_image = where[group, None, None]
        others = members[at_image, at_y, at_x]
        edge = soft[at_image, kind[group, None, None], at_y, at_x] * (others < 0)
        patches = np.where(others == label[group, None, None], own[at_image, at_y, at_x], edge)
        shape, score, box = _classify(patches, h, w)
        corner = np.stack([x1[group], y1[group]] * 2, axis=1) - 1  # out of the padding
        for b, s, c, p, xyxy in zip(where[group], shape, kind[group], score, box + corner, strict=True):
            left, top, right, bottom = xyxy.tolist()
            found[b].append(Detection(SHAPES[s], COLORS[c], float(p), (left, top, right, bottom)))
    return [sorted(objects, key=lambda d: (-d.score, d.box)) for objects in found]


def detect(images: Tensor) -> list[list[Detection]]:
    """Objects of each picture, the surest first: ``[B, 3, 24, 24]`` in [0, 1] -> B lists of :class:`Detection`.

    Deterministic; no picture depends on another, but for the last digits of a score. A picture with a value that is
    not finite has no objects. Raises ValueError for another shape.
    """
    if images.ndim != 4 or images.shape[1:] != (3, SIZE, SIZE):
        raise ValueError(
            f"images of shape {tuple(images.shape)} cannot be read: compose pictures are [B, 3, {SIZE}, {SIZE}]; "
            "resize them first"
        )
    pixels = images.detach().to("cpu", torch.float32)
    finite = pixels.isfinite().flatten(1).all(1)
    clean = torch.where(finite[:, None, None, None], pixels, torch.zeros(())).clamp(0, 1).numpy()
    found: list[list[Detection]] = []
    for start in range(0, len(clean), _CHUNK):
        found += _detect_chunk(clean[start : start + _CHUNK])
    return found
