"""The one gate that every reward's input passes: shapes, ranges, and which samples are images at all."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from PIL import Image
from torch import Tensor

from stepcredit.rewards.base import Metadata, RewardError, to_uint8

TOLERANCE = 1e-3
"""How far outside [0, 1] a pixel may lie: a quarter of an 8-bit step, well above the rounding of bfloat16 decoders."""


def check_batch(
    name: str, images: Tensor, prompts: Sequence[str], metadata: Sequence[Metadata], *, need_prompt: bool = True
) -> Tensor:
    """Hold a batch to the image contract and say which samples can be scored.

    images ``[B, 3, H, W]`` floats in [0, 1]. Returns bool ``[B]``: False where an image holds NaN or infinity, whose
    score must be NaN (rounding it to bytes would turn it into a valid black image). Raises RewardError for a wrong
    rank, channel count or dtype, for finite values outside [0, 1], for lengths that differ and for an empty prompt.
    """
    if not isinstance(images, Tensor) or images.ndim != 4 or images.shape[1] != 3:
        got = f"shape {tuple(images.shape)}" if isinstance(images, Tensor) else type(images).__name__
        raise RewardError(f"reward {name!r}: images must be a tensor [B, 3, H, W]; got {got}")
    if not images.is_floating_point():
        raise RewardError(f"reward {name!r}: images must be floats in [0, 1]; got {images.dtype}, divide it by 255")
    if not len(images) == len(prompts) == len(metadata):
        raise RewardError(
            f"reward {name!r}: {len(images)} images, {len(prompts)} prompts and {len(metadata)} metadata entries; "
            "the three must agree"
        )
    flat = images.detach().reshape(len(images), -1)
    finite = flat.isfinite().all(dim=1).cpu()
    if flat.shape[1] == 0:
        raise RewardError(f"reward {name!r}: images have no pixels; got shape {tuple(images.shape)}")
    outside = (((flat < -TOLERANCE) | (flat > 1 + TOLERANCE)) & flat.isfinite()).any(dim=1).cpu()
    if bool(outside.any()):
        bad = int(outside.nonzero()[0])
        low, high = float(flat[bad].min()), float(flat[bad].max())
        raise RewardError(
            f"reward {name!r}: image {bad} has values in [{low:.3g}, {high:.3g}]; they must lie in [0, 1]"
        )
    if need_prompt:
        for index, prompt in enumerate(prompts):
            if not isinstance(prompt, str) or not prompt.strip():
                raise RewardError(f"reward {name!r}: prompt {index} is empty; give every image its prompt")
    return finite


def to_pil(images: Tensor) -> list[Image.Image]:
    """RGB pictures of ``[B, 3, H, W]`` floats in [0, 1], through the one canonical 8-bit form."""
    return [Image.fromarray(array.numpy()) for array in to_uint8(images)]


def scatter(values: Tensor, valid: Tensor) -> Tensor:
    """Float32 ``[B]`` holding ``values`` at the samples marked in ``valid`` (bool ``[B]``), NaN elsewhere."""
    result = torch.full(valid.shape, float("nan"))
    result[valid] = values.detach().to("cpu", torch.float32)
    return result


def group_rows(name: str, prompts: Sequence[str], metadata: Sequence[Metadata], size: int | None) -> list[list[int]]:
    """Rows of each group: runs of ``size``, or with None all images of one prompt and equal metadata.

    Raises RewardError when the batch does not divide into groups of that size.
    """
    if size is not None:
        if len(prompts) % size:
            raise RewardError(f"reward {name!r}: {len(prompts)} images do not divide into groups of {size}")
        return [list(range(start, start + size)) for start in range(0, len(prompts), size)]
    groups: list[tuple[str, Metadata, list[int]]] = []
    for index, (prompt, entry) in enumerate(zip(prompts, metadata, strict=True)):
        rows = next((rows for text, known, rows in groups if text == prompt and known == entry), None)
        if rows is None:
            groups.append((prompt, entry, [index]))
        else:
            rows.append(index)
    return [rows for _, _, rows in groups]
