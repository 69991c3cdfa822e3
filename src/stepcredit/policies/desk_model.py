"""The network of the desk policy: a flow transformer small enough to be trained by reinforcement on a CPU.

Patches of the image and words of the prompt attend to each other in one stream of tokens. Time and the pooled text
modulate every block (adaLN-Zero; DiT, arXiv 2212.09748), and a depthwise convolution tells each patch of its
neighbours (as in conditional position encodings, arXiv 2102.10882): without it a network of this size spends most of
its training on finding out which patches touch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

_TIME_FEATURES = 64
_HIGHEST = 4096
_Layer = TypeVar("_Layer", nn.Linear, nn.Conv2d)


@dataclass(frozen=True)
class DeskConfig:
    """Architecture of a desk model; stands in the header of its weights. Raises ValueError for what cannot be built."""

    words: int
    """Size of the vocabulary, padding included."""
    text_length: int = 10
    height: int = 32
    width: int = 32
    channels: int = 3
    patch: int = 4
    hidden: int = 96
    depth: int = 3
    heads: int = 3

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            # bounded, since the header of a file is not to be trusted with the machine's time and memory
            if type(value) is not int or not 1 <= value <= _HIGHEST:
                raise ValueError(f"{field.name} must be a whole number from 1 to {_HIGHEST}, not {value!r}")
        if self.height % self.patch or self.width % self.patch:
            raise ValueError(f"patch {self.patch} must divide the image's height {self.height} and width {self.width}")
        if self.hidden % self.heads or self.hidden % 4:
            raise ValueError(f"hidden {self.hidden} must be a multiple of 4 and of heads {self.heads}")


class DeskTransformer(nn.Module):
    """Velocity field ``v(x_t, t, words)`` of images. Initial weights are a function of (config, seed)."""

    def __init__(self, config: DeskConfig, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        D, cell = config.hidden, config.channels * config.patch**2
        rows, columns = config.height // config.patch, config.width // config.patch
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.patches = nn.Linear(cell, D)
            self.positions = nn.Parameter(_plane_waves(rows, columns, D))
            self.words = nn.Embedding(config.words, D)
            self.places = nn.Parameter(0.1 * torch.randn(config.text_length, D))
            self.time = nn.Sequential(nn.Linear(_TIME_FEATURES, D), nn.SiLU(), nn.Linear(D, D))
            self.pooled = nn.Linear(D, D)
            self.blocks = nn.ModuleList(Block(D, config.heads, rows, columns) for _ in range(config.depth))
            self.modulation = _zero(nn.Linear(D, 2 * D))
            self.out = _zero(nn.Linear(D, cell))

    def forward(self, x: Tensor, t: Tensor, tokens: Tensor) -> Tensor:
        """Images ``[B, C, H, W]``, times ``[B]`` in [0, 1], words int64 ``[B, text_length]`` -> velocity like x."""
        text = self.words(tokens) + self.places
        c = functional.silu(self.time(_time_features(t)) + self.pooled(text.mean(dim=1)))
        image = self.patches(_cells(x, self.config.patch)) + self.positions
        h = torch.cat([image, text], dim=1)
        for block in self.blocks:
            h = block(h, c)
        shift, scale = self.modulation(c)[:, None].chunk(2, dim=-1)
        return _picture(self.out(_modulate(h[:, : image.shape[1]], shift, scale)), x, self.config.patch)


class Block(nn.Module):
    """Neighbourhood, self-attention and MLP; starts as the identity."""

    def __init__(self, hidden: int, heads: int, rows: int, columns: int) -> None:
        super().__init__()
        self.heads, self.rows, self.columns = heads, rows, columns
        self.modulation = _zero(nn.Linear(hidden, 6 * hidden))
        self.near = _zero(nn.Conv2d(hidden, hidden, 3, padding=1, groups=hidden))
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.merge = nn.Linear(hidden, hidden)
        self.up = nn.Linear(hidden, 4 * hidden)
        self.down = nn.Linear(4 * hidden, hidden)

    def forward(self, h: Tensor, c: Tensor) -> Tensor:
        """Tokens ``[B, N, hidden]``, patches first and words last, and conditioning ``[B, hidden]`` -> tokens."""
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = self.modulation(c)[:, None].chunk(6, dim=-1)
        h = self._neighbours(h)
        h = torch.addcmul(h, gate_a, self._attend(_modulate(h, shift_a, scale_a)))
        return torch.addcmul(h, gate_m, self.down(functional.silu(self.up(_modulate(h, shift_m, scale_m)))))

    def _neighbours(self, h: Tensor) -> Tensor:
        image, text = h.split([self.rows * self.columns, h.shape[1] - self.rows * self.columns], dim=1)
        plane = image.reshape(len(h), self.rows, self.columns, -1).permute(0, 3, 1, 2)
        return torch.cat([image + self.near(plane).flatten(2).transpose(1, 2), text], dim=1)

    def _attend(self, h: Tensor) -> Tensor:
        B, N, D = h.shape
        q, k, v = self.qkv(h).view(B, N, 3, self.heads, D // self.heads).permute(2, 0, 3, 1, 4)
        merged: Tensor = self.merge(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(B, N, D))
        return merged


def _modulate(h: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return torch.addcmul(shift, functional.layer_norm(h, h.shape[-1:]), 1 + scale)


def _cells(x: Tensor, n: int) -> Tensor:
    """Images ``[B, C, H, W]`` -> patches ``[B, H/n * W/n, C n n]``, row by row."""
    B, C, H, W = x.shape
    return x.reshape(B, C, H // n, n, W // n, n).permute(0, 2, 4, 1, 3, 5).reshape(B, -1, C * n * n)


def _picture(cells: Tensor, like: Tensor, n: int) -> Tensor:
    """The inverse of ``_cells``."""
    B, C, H, W = like.shape
    return cells.view(B, H // n, W // n, C, n, n).permute(0, 3, 1, 4, 2, 5).reshape(B, C, H, W)


def _time_features(t: Tensor) -> Tensor:
    """Cosines and sines of t at 32 frequencies, geometrically from 300 down to 0.37: ``[B, 64]``."""
    half = _TIME_FEATURES // 2
    frequency = 300.0 * torch.exp(torch.arange(half, device=t.device) * (-math.log(1000.0) / half))
    angle = t.float()[:, None] * frequency
    return torch.cat([angle.cos(), angle.sin()], dim=1)


def _plane_waves(rows: int, columns: int, hidden: int) -> Tensor:
    """Where the learned positions begin, ``[rows * columns, hidden]``: half the channels tell the row, half the column.

    Frequencies fall geometrically from 1.5 radians a patch to a twentieth of it, hidden/4 of them.
    """
    frequency = 1.5 * torch.exp(torch.arange(hidden // 4) * (-math.log(20.0) / (hidden // 4)))

    def waves(n: int) -> Tensor:
        angle = torch.arange(n)[:, None] * frequency
        return torch.cat([angle.cos(), angle.sin()], dim=1)

    row = waves(rows)[:, None].expand(rows, columns, -1)
    column = waves(columns)[None].expand(rows, columns, -1)
    return 0.5 * torch.cat([row, column], dim=2).reshape(rows * columns, hidden)


def _zero(layer: _Layer) -> _Layer:
    nn.init.zeros_(layer.weight)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer
