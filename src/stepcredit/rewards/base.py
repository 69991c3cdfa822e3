"""The contract of a reward: images, prompts and metadata in, one float32 per image out, in native units."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

Metadata = Mapping[str, Any]


@dataclass(frozen=True)
class RewardInfo:
    """What a user must know of a reward before trusting it."""

    name: str
    range: tuple[float, float]
    """Lowest and highest value that can occur, in the reward's own units; infinite where unbounded."""
    licence: str
    description: str
    direction: Literal["higher", "lower"] = "higher"
    needs: tuple[str, ...] = ()
    """Extras or weights that must be present, for messages: ``("stepcredit[ocr]",)``."""
    batch_size: int = 64


@dataclass(frozen=True)
class SelfTest:
    """A known good and a known bad image for one prompt: the good one must score higher by ``margin``."""

    good: Tensor
    """``[3, H, W]`` in [0, 1]."""
    bad: Tensor
    prompt: str
    metadata: Metadata
    margin: float = 0.0


@runtime_checkable
class Reward(Protocol):
    """Scores images. NaN marks a sample that could not be scored; it is never replaced by a number."""

    @property
    def info(self) -> RewardInfo: ...

    def __call__(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Metadata]) -> Tensor:
        """Reward of each image: images ``[B, 3, H, W]`` in [0, 1] -> float32 ``[B]``, native units."""
        ...

    def self_test(self) -> SelfTest:
        """The pair of images by which ``check`` proves that the reward works on this machine."""
        ...


class RewardError(RuntimeError):
    """A reward broke its contract; the message names the reward and the first bad sample."""


def score(reward: Reward, images: Tensor, prompts: Sequence[str], metadata: Sequence[Metadata]) -> Tensor:
    """Call a reward in batches of its own size and hold it to its contract.

    images ``[B, 3, H, W]`` in [0, 1]; prompts and metadata of length B. Returns float32 ``[B]`` on the CPU; NaN marks
    samples that the reward could not score. Raises RewardError for a wrong length, a wrong type or an infinite value,
    FloatingPointError for an image that is not finite, to which many rewards would give a number like any other.
    """
    name, size = reward.info.name, reward.info.batch_size
    if not len(images) == len(prompts) == len(metadata):
        raise RewardError(
            f"reward {name!r}: {len(images)} images, {len(prompts)} prompts and {len(metadata)} metadata entries; "
            "the three must agree"
        )
    finite = images.isfinite().flatten(1).all(1) if len(images) else torch.ones(0)
    if not bool(finite.all()):
        bad = int((~finite).nonzero()[0])
        raise FloatingPointError(
            f"the image of sample {bad} (prompt {prompts[bad]!r}) is not finite; lower the learning rate, or use a "
            "wider dtype for the model or its autoencoder"
        )
    parts: list[Tensor] = []
    for start in range(0, len(images), size):
        stop = min(start + size, len(images))
        part = reward(images[start:stop], prompts[start:stop], metadata[start:stop])
        if not isinstance(part, Tensor) or not part.is_floating_point():
            kind = f"a {part.dtype} tensor" if isinstance(part, Tensor) else type(part).__name__
            raise RewardError(f"reward {name!r} returned {kind}; it must return a float tensor [B]")
        if part.shape != (stop - start,):
            raise RewardError(f"reward {name!r} returned shape {tuple(part.shape)} for {stop - start} images")
        if bool(part.isinf().any()):
            bad = start + int(part.isinf().nonzero()[0])
            raise RewardError(f"reward {name!r} is infinite for sample {bad} (prompt {prompts[bad]!r})")
        parts.append(part.detach().to("cpu", torch.float32))
    return torch.cat(parts) if parts else torch.empty(0)


def to_uint8(images: Tensor) -> Tensor:
    """The one canonical image form: ``[B, 3, H, W]`` floats in [0, 1] -> uint8 ``[B, H, W, 3]``, rounded, RGB."""
    return (images.float().clamp(0, 1) * 255).round().to(torch.uint8).permute(0, 2, 3, 1).contiguous().cpu()
