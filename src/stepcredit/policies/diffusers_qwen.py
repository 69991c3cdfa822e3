"""Qwen-Image: rescaled classifier-free guidance, masked text of varying length, packed latents, a video autoencoder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from stepcredit.policies import diffusers_common as common
from stepcredit.policies.base import Conditioning


@dataclass(frozen=True)
class QwenImage:
    """A QwenImagePipeline at one image size and (true) guidance scale (``Family`` of diffusers_policy.py)."""

    pipe: Any
    height: int
    width: int
    guidance_scale: float
    max_sequence_length: int

    name: ClassVar[str] = "qwen-image"
    default_guidance: ClassVar[float] = 4.0
    negative_prompt: ClassVar[str] = " "  # the model card's; an empty text is not what the model was shown
    precision: ClassVar[common.Precision] = "bf16"
    encoders: ClassVar[tuple[str, ...]] = ("text_encoder",)
    lora_targets: ClassVar[tuple[str, ...]] = (
        "attn.to_q",
        "attn.to_k",
        "attn.to_v",
        "attn.to_out.0",
        "attn.add_q_proj",
        "attn.add_k_proj",
        "attn.add_v_proj",
        "attn.to_add_out",
        "img_mlp.net.0.proj",
        "img_mlp.net.2",
        "txt_mlp.net.0.proj",
        "txt_mlp.net.2",
    )
    """Attention and feed-forwards of both streams."""

    def __post_init__(self) -> None:
        common.check_size(self.height, self.width, self.pipe.vae_scale_factor * 2)

    @property
    def latent_shape(self) -> tuple[int, ...]:
        return (self._rows * self._columns, self.pipe.transformer.config.in_channels)

    @property
    def uses_cfg(self) -> bool:
        return self.guidance_scale > 1

    def grid(self, steps: int) -> Tensor:
        mu = common.resolution_shift(self.pipe.scheduler.config, self._rows * self._columns)
        return common.scheduler_grid(self.pipe.scheduler, steps, common.falling_sigmas(steps), mu)

    def embed(self, prompts: Sequence[str]) -> Conditioning:
        device = common.device_of(self.pipe.transformer)
        text, mask = self.pipe.encode_prompt(list(prompts), device=device, max_sequence_length=self.max_sequence_length)
        mask = torch.ones(text.shape[:2], device=text.device) if mask is None else mask  # None where none is padded
        return {"text": text, "mask": mask.bool()}

    def predict(self, transformer: Any, x: Tensor, t: Tensor, cond: Conditioning) -> Tensor:
        velocity: Tensor = transformer(
            hidden_states=x,
            timestep=(t * 1000).to(x.dtype) / 1000,  # with the pipeline's rounding
            encoder_hidden_states=cond["text"],
            encoder_hidden_states_mask=cond["mask"],
            img_shapes=[[(1, self._rows, self._columns)]] * len(x),
            return_dict=False,
        )[0]
        return velocity

    def combine(self, conditional: Tensor, unconditional: Tensor) -> Tensor:
        """Linear guidance with every token's velocity scaled back to the conditional one's length."""
        guided = common.linear_guidance(conditional, unconditional, self.guidance_scale)
        length, wanted = (torch.linalg.vector_norm(v, dim=-1, keepdim=True) for v in (guided, conditional))
        rescaled: Tensor = guided * (wanted / length)
        return rescaled

    def decode(self, x_0: Tensor) -> Tensor:
        vae = self.pipe.vae
        z = common.unpack(x_0, 2 * self._rows, 2 * self._columns)
        mean, std = (
            z.new_tensor(values).view(1, -1, 1, 1) for values in (vae.config.latents_mean, vae.config.latents_std)
        )
        frames = (z * std + mean).unsqueeze(2).to(common.device_of(vae), vae.dtype)
        images: Tensor = vae.decode(frames, return_dict=False)[0].squeeze(2)
        return images

    def remarks(self) -> list[str]:
        return []

    @property
    def _rows(self) -> int:
        return int(self.height // (self.pipe.vae_scale_factor * 2))

    @property
    def _columns(self) -> int:
        return int(self.width // (self.pipe.vae_scale_factor * 2))


FAMILY = QwenImage
