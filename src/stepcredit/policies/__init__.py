"""Policies: what predicts a velocity. ``from_pipeline`` makes one of a loaded diffusers pipeline."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from stepcredit.policies.base import Conditioning, Policy, take
from stepcredit.policies.diffusers_common import PipelineError
from stepcredit.policies.placement import Placement

if TYPE_CHECKING:
    from stepcredit.policies.diffusers_common import Precision
    from stepcredit.policies.diffusers_policy import DiffusersPolicy
    from stepcredit.policies.lora import LoraSpec

__all__ = ["FAMILIES", "Conditioning", "PipelineError", "Placement", "Policy", "family_of", "from_pipeline", "take"]

FAMILIES: dict[str, str] = {
    "StableDiffusion3Pipeline": "diffusers_sd3",
    "FluxPipeline": "diffusers_flux",
    "QwenImagePipeline": "diffusers_qwen",
    "ZImagePipeline": "diffusers_zimage",
}
"""Class of the pipeline -> module of this package whose ``FAMILY`` adapts it, imported when first used."""


def family_of(pipe: Any) -> Any:
    """The ``diffusers_policy.Family`` that adapts pipelines of this class.

    Raises PipelineError, listing the known classes, for any other.
    """
    for base in type(pipe).__mro__:
        if base.__name__ in FAMILIES:
            return importlib.import_module(f"{__name__}.{FAMILIES[base.__name__]}").FAMILY
    raise PipelineError(
        f"{type(pipe).__name__} is of no known family; there are adapters for {', '.join(FAMILIES)}, and "
        "docs/adapters.md says how to add one"
    )


def from_pipeline(
    pipe: Any,
    *,
    height: int,
    width: int,
    guidance_scale: float | None = None,
    lora: LoraSpec | Literal["full"] | None = None,
    precision: Precision | None = None,
    max_sequence_length: int | None = None,
    gradient_checkpointing: bool = False,
    reference_copy: bool = False,
    embedding_cache: str | Path | None = None,
    revision: str | None = None,
    decode_batch: int = 8,
    placement: Placement | None = None,
) -> DiffusersPolicy:
    """A policy of a loaded diffusers pipeline, which it takes over: adapters and dtypes are changed in place.

    height, width: of the images, in pixels. guidance_scale: as the pipeline's own argument; None takes the family's
    published one (SD3 4.5, FLUX 3.5). lora: ``LoraSpec(rank, alpha, targets)``, ``"full"`` to train the whole
    transformer (reference_copy then keeps a frozen copy for the KL), or None to sample only. precision: "fp32", "bf16"
    or "fp16" for the transformer (``family_of(pipe).precision`` is the published one), None as loaded; velocities,
    adapters and decoding are float32 at least. max_sequence_length: tokens for T5, None as the pipeline's default.
    embedding_cache: folder for text embeddings, keyed by model, ``revision`` and prompt. decode_batch: images decoded
    at a time. placement: ``Placement(device)`` keeps autoencoder and text encoders in the CPU's memory while they are
    idle, and moves the transformer to the device. Warns (PolicyWarning) when what is to be trained is distilled or
    guided.
    Raises PipelineError for a pipeline of an unknown family or a size that the model cannot make, and LoraError for a
    target that matches no layer; both are ValueErrors.
    """
    make = family_of(pipe)
    from stepcredit.policies import diffusers_policy

    family = make(
        pipe,
        height=height,
        width=width,
        guidance_scale=make.default_guidance if guidance_scale is None else float(guidance_scale),
        max_sequence_length=_sequence_length(pipe) if max_sequence_length is None else max_sequence_length,
    )
    return diffusers_policy.build(
        family,
        lora=lora,
        precision=precision,
        gradient_checkpointing=gradient_checkpointing,
        reference_copy=reference_copy,
        embedding_cache=embedding_cache,
        revision=revision,
        decode_batch=decode_batch,
        placement=placement,
    )


def _sequence_length(pipe: Any) -> int:
    """The default of the pipeline's own call."""
    return int(inspect.signature(type(pipe).__call__).parameters["max_sequence_length"].default)
