"""Z-Image: time runs from 0 (noise) to 1, the network predicts the negative velocity, text comes as a list."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from stepcredit.policies import diffusers_common as common
from stepcredit.policies.base import Conditioning


@dataclass(frozen=True)
class ZImage:
    """A ZImagePipeline at one image size and guidance scale, 0 being none (``Family`` of diffusers_policy.py)."""

    pipe: Any
    height: int
    width: int
    guidance_scale: float
    max_sequence_length: int

    name: ClassVar[str] = "z-image"
    default_guidance: ClassVar[float] = 5.0
    negative_prompt: ClassVar[str] = ""
    precision: ClassVar[common.Precision] = "bf16"
    encoders: ClassVar[tuple[str, ...]] = ("text_encoder",)
    lora_targets: ClassVar[tuple[str, ...]] = (
        "attention.to_q",
        "attention.to_k",
        "attention.to_v",
        "attention.to_out.0",
    )
    """Attention of every block, the refiners' too."""

    def __post_init__(self) -> None:
        common.check_size(self.height, self.width, self.pipe.vae_scale_factor * 2)

    @property
    def latent_shape(self) -> tuple[int, ...]:
        scale = self.pipe.vae_scale_factor
        return (self.pipe.transformer.in_channels, self.height // scale, self.width // scale)

    @property
    def uses_cfg(self) -> bool:
        return self.guidance_scale > 0

    def grid(self, steps: int) -> Tensor:
        _, rows, columns = self.latent_shape
        mu = common.resolution_shift(self.pipe.scheduler.config, (rows // 2) * (columns // 2))
        sigmas = torch.linspace(1, 1 / max(steps, 1), max(steps, 1)).tolist()  # in float32, as the pipeline
        return common.scheduler_grid(self.pipe.scheduler, steps, sigmas, mu)

    def embed(self, prompts: Sequence[str]) -> Conditioning:
        rows, _ = self.pipe.encode_prompt(
            list(prompts),
            device=common.device_of(self.pipe.transformer),
            do_classifier_free_guidance=False,
            max_sequence_length=self.max_sequence_length,
        )
        return {
            "text": common.pad_rows(rows),
            "length": torch.tensor([len(row) for row in rows], device=rows[0].device),
        }

    def predict(self, transformer: Any, x: Tensor, t: Tensor, cond: Conditioning) -> Tensor:
        text = [row[:length] for row, length in zip(cond["text"], cond["length"].tolist(), strict=True)]
        # A list of one-frame videos; the pipeline counts time the other way round, in thousandths.
        frames = transformer(list(x.unsqueeze(2).unbind()), (1000 - t * 1000) / 1000, text, return_dict=False)[0]
        return -torch.stack(frames).squeeze(2)

    def combine(self, conditional: Tensor, unconditional: Tensor) -> Tensor:
        return common.linear_guidance(conditional, unconditional, 1 + self.guidance_scale)

    def decode(self, x_0: Tensor) -> Tensor:
        return common.decode_kl(self.pipe.vae, x_0)

    def remarks(self) -> list[str]:
        return []


FAMILY = ZImage
