"""JPEG size: how well an image compresses. Text-blind and deterministic; the reward to test a pipeline with."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Literal

import torch
from PIL import Image
from torch import Tensor

from stepcredit.rewards.base import Metadata, RewardInfo, SelfTest
from stepcredit.rewards.inputs import check_batch, scatter, to_pil

Unit = Literal["kb", "kb/500", "bits_per_pixel"]


class JpegSize:
    """Size of the image as JPEG of quality 95 with 4:2:0 chroma (DDPO, Black et al. 2023).

    ``goal``: ``small`` rewards compressible images (minus the size), ``large`` incompressible ones (the size).
    ``unit``: ``kb`` of 1000 bytes as in DDPO, ``kb/500`` as in flow_grpo, or ``bits_per_pixel``, the only one of the
    three that does not grow with the resolution. Sizes vary by a few per cent between builds of the JPEG library.
    """

    def __init__(self, goal: Literal["small", "large"] = "small", unit: Unit = "kb", quality: int = 95) -> None:
        if goal not in ("small", "large"):
            raise ValueError(f"jpeg_size: goal must be 'small' or 'large'; got {goal!r}")
        if unit not in ("kb", "kb/500", "bits_per_pixel"):
            raise ValueError(f"jpeg_size: unit must be 'kb', 'kb/500' or 'bits_per_pixel'; got {unit!r}")
        if not 1 <= quality <= 100:
            raise ValueError(f"jpeg_size: quality must lie in 1..100; got {quality}")
        self.goal, self.unit, self.quality = goal, unit, quality
        small = goal == "small"
        self.info = RewardInfo(
            name="jpeg_size",
            range=(-float("inf"), 0.0) if small else (0.0, float("inf")),
            licence="none needed",
            description=f"{'minus the ' if small else ''}JPEG size at quality {quality}, in {unit.replace('_', ' ')}",
            batch_size=256,
        )

    def __call__(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Metadata]) -> Tensor:
        """Signed sizes, float32 ``[B]``; the prompts do not matter."""
        valid = check_batch("jpeg_size", images, prompts, metadata, need_prompt=False)
        sizes = [
            self._size(image.width * image.height, _encode(image, self.quality)) for image in to_pil(images[valid])
        ]
        signed = torch.tensor(sizes) * (-1.0 if self.goal == "small" else 1.0)
        return scatter(signed, valid)

    def _size(self, pixels: int, data: bytes) -> float:
        if self.unit == "bits_per_pixel":
            return 8 * len(data) / pixels
        return len(data) / (1000 if self.unit == "kb" else 500_000)

    def self_test(self) -> SelfTest:
        """A flat grey image against coloured noise."""
        flat = torch.full((3, 64, 64), 0.5)
        noise = torch.rand(3, 64, 64, generator=torch.Generator().manual_seed(0))
        good, bad = (flat, noise) if self.goal == "small" else (noise, flat)
        return SelfTest(good=good, bad=bad, prompt="a grey square", metadata={})


def _encode(image: Image.Image, quality: int) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format="JPEG", quality=quality, subsampling="4:2:0")
    return buffer.getvalue()
