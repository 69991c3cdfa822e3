"""What is kept of trajectories: the rows that a later stage will ask for, and no others."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Kept:
    """Which rows of a layout's states and velocities are kept. ``a | b`` keeps what either keeps."""

    states: tuple[Tensor, ...]
    """T + 1 bool tensors ``[rows(i)]``."""
    velocities: tuple[Tensor, ...]
    """T bool tensors ``[rows(i)]``."""

    def __or__(self, other: Kept) -> Kept:
        return Kept(
            tuple(a | b for a, b in zip(self.states, other.states, strict=True)),
            tuple(a | b for a, b in zip(self.velocities, other.velocities, strict=True)),
        )

    def nbytes(self, numel: int, itemsize: int) -> int:
        """Bytes of the rows kept: latents of ``numel`` numbers, states of ``itemsize`` bytes each, velocities of 4."""
        states, velocities = (sum(int(mask.sum()) for mask in masks) for masks in (self.states, self.velocities))
        return numel * (states * itemsize + velocities * 4)


def nothing(rows: tuple[int, ...]) -> Kept:
    """Keeps nothing of a layout whose states have so many ``rows``, T + 1 numbers."""
    masks = tuple(torch.zeros(n, dtype=torch.bool) for n in rows)
    return Kept(masks, tuple(mask.clone() for mask in masks[:-1]))


@dataclass(frozen=True)
class Rows:
    """Some rows of a tensor ``[n, ...]``, asked for by the numbers that they had in it."""

    values: Tensor
    """``[kept, ...]``."""
    place: Tensor
    """long ``[n]``: where each row is in ``values``, -1 for those that were dropped."""

    def __getitem__(self, rows: slice | Tensor) -> Tensor:
        """The rows of a slice or of a long tensor. Raises LookupError for any that was dropped."""
        place = self.place[rows.cpu() if isinstance(rows, Tensor) else rows]
        if bool((place < 0).any()):
            raise LookupError("these rows of a trajectory were not kept: ask rollout() to keep them")
        return self.values[place.to(self.values.device)]

    @property
    def nbytes(self) -> int:
        """Bytes of the rows that are kept."""
        return self.values.nbytes


def rows_of(tensor: Tensor | Rows, mask: Tensor) -> Tensor | Rows:
    """The rows of a tensor ``[n, ...]`` where ``mask`` (bool ``[n]``) holds, in memory of their own; the tensor itself
    where it holds everywhere. Raises LookupError for rows that were dropped before.
    """
    if bool(mask.all()):
        return tensor if isinstance(tensor, Tensor) else tensor[torch.arange(len(mask))]
    rows = mask.nonzero().flatten()
    place = torch.full((len(mask),), -1)
    place[rows] = torch.arange(len(rows))
    values = tensor[rows] if isinstance(tensor, Rows) else tensor[rows.to(tensor.device)]
    return Rows(values, place)
