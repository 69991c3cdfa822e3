"""Instance detection with Mask2Former as GenEval uses it: its preprocessing and post-processing, through transformers.

The library's own post-processing resamples masks to 384 x 384 and lets one object overwrite another; GenEval's rules
need neither, so everything behind the network is here. Sources: Cheng et al. 2022 (Mask2Former); Ghosh et al. 2023.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from stepcredit.rewards.base import to_uint8

ChannelOrder = Literal["official", "flow_grpo"]
SHORT, LONG, MULTIPLE = 800, 1333, 32
MEAN, STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)


@dataclass(frozen=True)
class Instance:
    """One detected object in the pixels of the original picture."""

    label: int
    score: float
    box: tuple[float, float, float, float]
    """x1, y1, x2, y2 around the mask, y downwards, the last row and column included: x2 = last column + 1."""
    mask: Tensor
    """bool ``[H, W]``."""


def resized(height: int, width: int, short: int | None = None) -> tuple[int, int]:
    """Height and width after scaling the short side to 800 unless the long one would exceed 1333.

    ``short`` in place of 800 scales the two limits alike.
    """
    least = short or SHORT
    scale = min(LONG * (least / SHORT) / max(height, width), least / min(height, width))
    return int(height * scale + 0.5), int(width * scale + 0.5)


def network_input(images: Tensor, channel_order: ChannelOrder = "official", short: int | None = None) -> Tensor:
    """Images ``[B, 3, H, W]`` in [0, 1] -> normalised float32 ``[B, 3, h, w]``, padded with zeros to multiples of 32.

    Bilinear without antialiasing on 8-bit values, as the detector was trained. ``flow_grpo`` hands it pictures with
    red and blue exchanged, as the published reward servers do by mistake; ``official`` does not.
    """
    pixels = to_uint8(images).permute(0, 3, 1, 2).float()
    if channel_order == "flow_grpo":
        pixels = pixels.flip(1)
    height, width = resized(pixels.shape[-2], pixels.shape[-1], short)
    pixels = functional.interpolate(pixels, (height, width), mode="bilinear", align_corners=False).round()
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (MEAN, STD))
    return functional.pad((pixels - mean) / std, (0, -width % MULTIPLE, 0, -height % MULTIPLE))


def instances(
    class_logits: Tensor,
    mask_logits: Tensor,
    size: tuple[int, int],
    least: float = 0.0,
    top: int = 100,
    short: int | None = None,
) -> list[Instance]:
    """Objects of one picture of ``size`` (height, width), surest class first.

    class_logits ``[Q, C + 1]``, the last class being "nothing"; mask_logits ``[Q, h, w]`` over the padded input. The
    ``top`` pairs of query and class by class probability count, so that one query may give several classes. Score:
    class probability times the mean mask probability inside the mask; objects without a pixel, and those whose score
    does not exceed ``least``, are left out.
    """
    probabilities = class_logits.float().softmax(-1)[:, :-1]
    classes = probabilities.shape[1]
    chosen = probabilities.flatten().topk(min(top, probabilities.numel()))
    # The mask can only lower a score, so what the class alone leaves below the threshold needs no mask.
    pairs = [(p, index) for p, index in zip(chosen.values.tolist(), chosen.indices.tolist(), strict=True) if p > least]
    found = []
    masks: dict[int, Tensor] = {}
    for probability, index in pairs:
        query, label = divmod(index, classes)
        if query not in masks:
            masks[query] = _to_picture(mask_logits[query], size, short)
        logits = masks[query]
        mask = logits > 0
        if not bool(mask.any()):
            continue
        score = probability * float(logits[mask].sigmoid().mean())
        if score > least:
            rows, columns = mask.any(1).nonzero(), mask.any(0).nonzero()
            box = (int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1)
            found.append(Instance(label, score, box, mask.cpu()))
    return found


def _to_picture(logits: Tensor, size: tuple[int, int], short: int | None) -> Tensor:
    """Mask logits ``[h, w]`` over the padded input -> ``[H, W]`` over the picture: upsample, crop, resample."""
    height, width = resized(size[0], size[1], short)
    padded = (height + -height % MULTIPLE, width + -width % MULTIPLE)
    full = functional.interpolate(logits.float()[None, None], padded, mode="bilinear", align_corners=False)
    return functional.interpolate(full[:, :, :height, :width], size, mode="bilinear", align_corners=False)[0, 0]


@torch.no_grad()
def detect(
    model: Any,
    images: Tensor,
    channel_order: ChannelOrder = "official",
    least: float = 0.0,
    short: int | None = None,
) -> list[list[Instance]]:
    """Objects in each of the images ``[B, 3, H, W]``; ``model`` is a Mask2FormerForUniversalSegmentation.

    ``short``: the short side of what the model is shown, 800 by default.
    """
    height, width = images.shape[-2:]
    output = model(pixel_values=network_input(images, channel_order, short).to(model.device, model.dtype))
    pairs = zip(output.class_queries_logits, output.masks_queries_logits, strict=True)
    return [instances(classes, masks, (height, width), least, short=short) for classes, masks in pairs]
