"""What every adapter of a diffusers pipeline shares, as plain functions; nothing here imports diffusers at the top."""

from __future__ import annotations

import copy
import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import PurePath
from typing import Any, Literal

import torch
from torch import Tensor, nn

from stepcredit import grids
from stepcredit.errors import UserError
from stepcredit.policies.base import Conditioning

Precision = Literal["fp32", "bf16", "fp16"]
DTYPES: dict[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
NEGATIVE = "negative_"
"""Prefix of the unconditional half of a conditioning: its presence is what switches guidance on."""

_STEP_DISTILLED = re.compile(r"turbo|schnell|lightning|hyper|lcm|distill|\d+-?steps?\b", re.IGNORECASE)


class PipelineError(UserError, ValueError):
    """A pipeline, or a setting for it, that cannot be used; the message names the field, its value and the remedy."""


class PolicyWarning(UserWarning):
    """Something about a pipeline that makes training likely to disappoint; never raised for sampling alone."""


# ---------------------------------------------------------------------------------------------------------- the grid


def scheduler_grid(
    scheduler: Any, steps: int, sigmas: Sequence[float] | None = None, mu: float | None = None
) -> Tensor:
    """The very times that the pipeline would sample on: its scheduler's sigmas, float64 ``[steps + 1]``, 1 to 0.

    Asks a copy of the scheduler, so that every option of its config counts and the pipeline is left as it was.
    sigmas: times before shifting, for pipelines that hand over their own; mu: shift for the resolution, where dynamic.
    Raises ValueError for fewer than 1 step, or sigmas that do not fall from 1 to 0.
    """
    if steps < 1:
        raise PipelineError(f"steps must be at least 1, not {steps}")
    scheduler = copy.deepcopy(scheduler)
    scheduler.set_timesteps(**({"num_inference_steps": steps} if sigmas is None else {"sigmas": sigmas}), mu=mu)
    return grids.validate(scheduler.sigmas)


def check_scheduler(scheduler: Any) -> None:
    """Raises PipelineError for a scheduler that does not take Euler steps of a flow."""
    if "FlowMatchEulerDiscreteScheduler" not in {base.__name__ for base in type(scheduler).__mro__}:
        raise PipelineError(
            f"pipe.scheduler is a {type(scheduler).__name__}, which is not a flow-matching Euler scheduler; set "
            "pipe.scheduler = FlowMatchEulerDiscreteScheduler.from_config(pipe.scheduler.config)"
        )


def resolution_shift(config: Any, image_seq_len: int, max_shift: float = 1.15) -> float:
    """``mu`` of the resolution-dependent shift: linear in the number of image tokens, by the scheduler's config."""
    low, high = config.get("base_image_seq_len", 256), config.get("max_image_seq_len", 4096)
    low_shift, high_shift = config.get("base_shift", 0.5), config.get("max_shift", max_shift)
    slope = (high_shift - low_shift) / (high - low)
    return float(image_seq_len * slope + (low_shift - slope * low))


def falling_sigmas(steps: int) -> list[float]:
    """Times from 1 to 1/steps, equally spaced: what pipelines with a resolution-dependent shift start from."""
    return torch.linspace(1.0, 1.0 / max(steps, 1), max(steps, 1), dtype=torch.float64).tolist()


# ------------------------------------------------------------------------------------------------------- the velocity


def guided(
    predict: Callable[[Tensor, Tensor, Conditioning], Tensor],
    combine: Callable[[Tensor, Tensor], Tensor],
    x: Tensor,
    t: Tensor,
    cond: Conditioning,
) -> Tensor:
    """Velocity with classifier-free guidance in one batch of 2B when the conditioning has a negative half, else plain.

    predict(x, t, cond) -> velocity; combine(conditional, unconditional) -> guided velocity; both ``[B, ...]``.
    """
    positive = {name: tensor for name, tensor in cond.items() if not name.startswith(NEGATIVE)}
    if len(positive) == len(cond):
        return predict(x, t, cond)
    both = {name: torch.cat([cond[NEGATIVE + name], tensor]) for name, tensor in positive.items()}
    unconditional, conditional = predict(torch.cat([x, x]), torch.cat([t, t]), both).chunk(2)
    return combine(conditional, unconditional)


def linear_guidance(conditional: Tensor, unconditional: Tensor, scale: float) -> Tensor:
    """``u + scale (c - u)``: scale 1 is the conditional velocity. Source: Imagen (arXiv 2205.11487), eq. 2."""
    return unconditional + scale * (conditional - unconditional)


@contextmanager
def adapters_off(transformer: Any) -> Iterator[None]:
    """The base model: every adapter of the transformer is switched off within the block, and on again after it."""
    if not getattr(transformer, "peft_config", None):
        yield
        return
    transformer.disable_adapters()
    try:
        yield
    finally:
        transformer.enable_adapters()


def pad_rows(rows: Sequence[Tensor]) -> Tensor:
    """Rows ``[L_i, ...]`` stacked to ``[B, max L, ...]``, zeros after the end of the shorter ones."""
    return nn.utils.rnn.pad_sequence(list(rows), batch_first=True) if rows[0].ndim else torch.stack(list(rows))


def with_negative(positive: Conditioning, negative: Conditioning) -> Conditioning:
    """Adds the one negative row to every prompt's; sequences of unequal length are padded with zeros to the longer."""
    cond: Conditioning = {}
    for name, tensor in positive.items():
        row = negative[name]
        if tensor.ndim > 1 and tensor.shape[1] != row.shape[1]:
            tensor, row = _lengthen(tensor, row.shape[1]), _lengthen(row, tensor.shape[1])
        cond[name] = tensor
        cond[NEGATIVE + name] = row.expand(len(tensor), *row.shape[1:])
    return cond


def _lengthen(x: Tensor, length: int) -> Tensor:
    missing = max(0, length - x.shape[1])
    return torch.cat([x, x.new_zeros(len(x), missing, *x.shape[2:])], dim=1) if missing else x


# ------------------------------------------------------------------------------------------------- sizes and latents


def check_size(height: int, width: int, multiple: int, largest: int | None = None) -> None:
    """Raises PipelineError unless height and width are positive multiples of ``multiple``, and at most ``largest``."""
    for name, value in (("height", height), ("width", width)):
        if value <= 0 or value % multiple:
            nearest = max(multiple, round(value / multiple) * multiple)
            raise PipelineError(
                f"{name} is {value}; this model makes multiples of {multiple} pixels, for example {nearest}"
            )
        if largest is not None and value > largest:
            raise PipelineError(f"{name} is {value}; this model's position table ends at {largest} pixels")


def unpack(x: Tensor, height: int, width: int) -> Tensor:
    """Packed latents ``[B, height/2 * width/2, 4 C]`` to ``[B, C, height, width]`` (height, width in latent pixels)."""
    patches = x.reshape(len(x), height // 2, width // 2, -1, 2, 2)
    return patches.permute(0, 3, 1, 4, 2, 5).reshape(len(x), -1, height, width)


def decode_kl(vae: Any, z: Tensor) -> Tensor:
    """Raw images of an AutoencoderKL, about [-1, 1], of latents ``[B, C, h, w]`` in the diffusion model's scale."""
    z = z / float(vae.config.scaling_factor) + float(vae.config.shift_factor or 0.0)
    images: Tensor = vae.decode(z.to(device_of(vae), vae.dtype), return_dict=False)[0]
    return images


# --------------------------------------------------------------------------------------------- modules and precision


def device_of(module: Any) -> torch.device:
    """Where a module computes: the device of its weights, or that of its offloading hook."""
    hooked = getattr(getattr(module, "_hf_hook", None), "execution_device", None)
    return torch.device(hooked) if hooked is not None else next(module.parameters()).device


def freeze(pipe: Any) -> None:
    """Puts every network of the pipeline into evaluation mode, without gradients."""
    for part in pipe.components.values():
        if isinstance(part, nn.Module):
            part.requires_grad_(False).eval()


def set_precision(pipe: Any, precision: Precision | None) -> None:
    """Sets the transformer's dtype; the VAE is then kept in float32.

    precision None leaves all dtypes as loaded. Text encoders keep theirs: T5 overflows when cast to float16 afterwards.
    Raises PipelineError for an unknown precision.
    """
    if precision is not None and precision not in DTYPES:
        raise PipelineError(
            f"precision is {precision!r}; choose one of {', '.join(DTYPES)}, or None to keep the pipeline's"
        )
    if precision is not None:
        pipe.transformer.to(DTYPES[precision])
        pipe.vae.to(torch.float32)


def fingerprint(modules: Sequence[nn.Module]) -> str:
    """Hash of a few values of every weight: tells two sets of encoders apart without reading them whole."""
    digest = hashlib.sha256()
    for module in modules:
        for name, weight in module.named_parameters():
            flat = weight.detach().flatten()
            values = flat[:: max(1, len(flat) // 16)][:16].double().tolist()
            digest.update(repr((name, tuple(weight.shape), values)).encode())
    return digest.hexdigest()[:32]


def step_distilled(pipe: Any) -> str | None:
    """The checkpoint's name if it says that the model was distilled to few steps (schnell, turbo, ...), else None."""
    names = [pipe.config.get("_name_or_path"), pipe.transformer.config.get("_name_or_path")]
    for name in filter(None, names):
        if _STEP_DISTILLED.search("/".join(PurePath(name).parts[-2:])):
            return str(name)
    return None
