"""Stable Diffusion 3 and 3.5: MMDiT with classifier-free guidance in one batch, latents ``[B, C, H/8, W/8]``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from stepcredit.policies import diffusers_common as common
from stepcredit.policies.base import Conditioning


@dataclass(frozen=True)
class StableDiffusion3:
    """A StableDiffusion3Pipeline at one image size and guidance scale (``Family`` of diffusers_policy.py)."""

    pipe: Any
    height: int
    width: int
    guidance_scale: float
    max_sequence_length: int

    name: ClassVar[str] = "sd3"
    default_guidance: ClassVar[float] = 4.5
    negative_prompt: ClassVar[str] = ""
    precision: ClassVar[common.Precision] = "fp16"
    encoders: ClassVar[tuple[str, ...]] = ("text_encoder", "text_encoder_2", "text_encoder_3")
    lora_targets: ClassVar[tuple[str, ...]] = (
        "attn.to_q",
        "attn.to_k",
        "attn.to_v",
        "attn.to_out.0",
        "attn.add_q_proj",
        "attn.add_k_proj",
        "attn.add_v_proj",
        "attn.to_add_out",
    )
    """The joint attention of every block, as in Flow-GRPO (arXiv 2505.05470)."""

    def __post_init__(self) -> None:
        config, pixel = (
            self.pipe.transformer.config,
            self.pipe.vae_scale_factor * self.pipe.transformer.config.patch_size,
        )
        common.check_size(self.height, self.width, pixel, pixel * config.pos_embed_max_size)

    @property
    def latent_shape(self) -> tuple[int, ...]:
        scale = self.pipe.vae_scale_factor
        return (self.pipe.transformer.config.in_channels, self.height // scale, self.width // scale)

    @property
    def uses_cfg(self) -> bool:
        return self.guidance_scale > 1

    def grid(self, steps: int) -> Tensor:
        scheduler = self.pipe.scheduler
        if not scheduler.config.use_dynamic_shifting:
            return common.scheduler_grid(scheduler, steps)
        _, rows, columns = self.latent_shape
        tokens = rows * columns // self.pipe.transformer.config.patch_size**2
        return common.scheduler_grid(scheduler, steps, mu=common.resolution_shift(scheduler.config, tokens, 1.16))

    def embed(self, prompts: Sequence[str]) -> Conditioning:
        text, _, pooled, _ = self.pipe.encode_prompt(
            list(prompts),
            prompt_2=None,
            prompt_3=None,
            device=common.device_of(self.pipe.transformer),
            do_classifier_free_guidance=False,
            max_sequence_length=self.max_sequence_length,
        )
        return {"text": text, "pooled": pooled}

    def predict(self, transformer: Any, x: Tensor, t: Tensor, cond: Conditioning) -> Tensor:
        velocity: Tensor = transformer(
            hidden_states=x,
            timestep=t * 1000,
            encoder_hidden_states=cond["text"],
            pooled_projections=cond["pooled"],
            return_dict=False,
        )[0]
        return velocity

    def combine(self, conditional: Tensor, unconditional: Tensor) -> Tensor:
        return common.linear_guidance(conditional, unconditional, self.guidance_scale)

    def decode(self, x_0: Tensor) -> Tensor:
        return common.decode_kl(self.pipe.vae, x_0)

    def remarks(self) -> list[str]:
        return []


FAMILY = StableDiffusion3
