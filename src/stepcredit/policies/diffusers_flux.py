"""FLUX.1: guidance as an input of the network, latents packed 2x2 to tokens ``[B, H/16 * W/16, 64]``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from stepcredit.policies import diffusers_common as common
from stepcredit.policies.base import Conditioning


@dataclass(frozen=True)
class Flux:
    """A FluxPipeline at one image size and embedded guidance scale (``Family`` of diffusers_policy.py)."""

    pipe: Any
    height: int
    width: int
    guidance_scale: float
    max_sequence_length: int

    name: ClassVar[str] = "flux"
    default_guidance: ClassVar[float] = 3.5
    negative_prompt: ClassVar[str] = ""
    precision: ClassVar[common.Precision] = "bf16"
    encoders: ClassVar[tuple[str, ...]] = ("text_encoder", "text_encoder_2")
    lora_targets: ClassVar[tuple[str, ...]] = (
        "attn.to_q",
        "attn.to_k",
        "attn.to_v",
        "attn.to_out.0",
        "attn.add_q_proj",
        "attn.add_k_proj",
        "attn.add_v_proj",
        "attn.to_add_out",
        "ff.net.0.proj",
        "ff.net.2",
        "ff_context.net.0.proj",
        "ff_context.net.2",
    )
    """Attention of every block and both feed-forwards of the double blocks, as in Flow-GRPO's FLUX recipe."""

    def __post_init__(self) -> None:
        common.check_size(self.height, self.width, self.pipe.vae_scale_factor * 2)

    @property
    def latent_shape(self) -> tuple[int, ...]:
        return (self._rows * self._columns, self.pipe.transformer.config.in_channels)

    @property
    def uses_cfg(self) -> bool:
        return False

    def grid(self, steps: int) -> Tensor:
        scheduler = self.pipe.scheduler
        mu = common.resolution_shift(scheduler.config, self._rows * self._columns)
        own = scheduler.config.get("use_flow_sigmas", False)
        return common.scheduler_grid(scheduler, steps, None if own else common.falling_sigmas(steps), mu)

    def embed(self, prompts: Sequence[str]) -> Conditioning:
        device = common.device_of(self.pipe.transformer)
        text, pooled, _ = self.pipe.encode_prompt(
            list(prompts), device=device, max_sequence_length=self.max_sequence_length
        )
        return {"text": text, "pooled": pooled}

    def predict(self, transformer: Any, x: Tensor, t: Tensor, cond: Conditioning) -> Tensor:
        guidance = None
        if transformer.config.guidance_embeds:
            guidance = torch.full((len(x),), self.guidance_scale, device=x.device)
        velocity: Tensor = transformer(
            hidden_states=x,
            timestep=(t * 1000).to(x.dtype) / 1000,  # with the pipeline's rounding: it holds t * 1000 in x's dtype
            guidance=guidance,
            encoder_hidden_states=cond["text"],
            pooled_projections=cond["pooled"],
            txt_ids=torch.zeros(cond["text"].shape[1], 3, device=x.device),
            img_ids=self._image_ids.to(x.device),
            return_dict=False,
        )[0]
        return velocity

    def combine(self, conditional: Tensor, unconditional: Tensor) -> Tensor:
        raise AssertionError("FLUX.1 has no unconditional half")

    def decode(self, x_0: Tensor) -> Tensor:
        return common.decode_kl(self.pipe.vae, common.unpack(x_0, 2 * self._rows, 2 * self._columns))

    def remarks(self) -> list[str]:
        if self.pipe.transformer.config.guidance_embeds:
            return [
                "FLUX with embedded guidance is guidance-distilled: it is trained at "
                f"guidance_scale={self.guidance_scale} and should be sampled at the same"
            ]
        return [
            "this FLUX has no embedded guidance (guidance_embeds=False), as the step-distilled FLUX.1-schnell: "
            "reinforcement learning tends to blur such models, and guidance_scale has no effect"
        ]

    @property
    def _rows(self) -> int:
        return int(self.height // (self.pipe.vae_scale_factor * 2))

    @property
    def _columns(self) -> int:
        return int(self.width // (self.pipe.vae_scale_factor * 2))

    @cached_property
    def _image_ids(self) -> Tensor:
        """Row and column of every token, ``[N, 3]``; the first column is 0 for all."""
        rows, columns = torch.arange(self._rows), torch.arange(self._columns)
        return torch.cartesian_prod(torch.zeros(1, dtype=torch.long), rows, columns).float()


FAMILY = Flux
