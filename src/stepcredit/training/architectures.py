"""Pipelines without their weights: classes and configurations, from a folder, the hub or the table below.

A blueprint builds the pipeline on the meta device, where modules have shapes and no numbers, so that all that depends
on sizes (grids, adapters, memory, operations) is known before anything large is read.
"""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from stepcredit.policies import FAMILIES
from stepcredit.policies.diffusers_common import PipelineError

PARTS = ("transformer", "vae", "scheduler")
Config = dict[str, Any]


@dataclass(frozen=True)
class Blueprint:
    """Class names and configurations of a pipeline's parts; text encoders by their number of parameters alone."""

    pipeline: str
    """Class of the pipeline, a key of ``policies.FAMILIES``."""
    parts: dict[str, tuple[str, Config]]
    """Class and configuration of transformer, vae and scheduler."""
    encoder_parameters: float
    source: str

    def build(self) -> Any:
        """The pipeline on the meta device, without text encoders. Raises PipelineError for parts of unknown classes."""
        diffusers = library()
        made = {}
        for part, (name, config) in self.parts.items():
            cls = getattr(diffusers, name, None)
            if cls is None:
                raise PipelineError(f"{self.source}: {part} is a {name}, which this version of diffusers does not have")
            with torch.device("cpu" if part == "scheduler" else "meta"):
                made[part] = cls.from_config(config) if "_class_name" in config else cls(**config)
        cls = getattr(diffusers, self.pipeline)
        optional = {name: None for name in _parameters(cls) if name not in made}
        return cls(**made, **optional)


def library() -> Any:
    """The diffusers library, silent below errors; PipelineError names the extra if it is not installed."""
    try:
        found: Any = importlib.import_module("diffusers")
        importlib.import_module("transformers").logging.set_verbosity_error()
        importlib.import_module("peft")
    except ModuleNotFoundError as error:
        raise PipelineError(
            f"diffusers pipelines need the package {error.name!r}: pip install 'stepcredit[diffusers]'"
        ) from error
    found.utils.logging.set_verbosity_error()
    return found


def family_class(pipeline: str, source: str) -> Any:
    """The ``Family`` that adapts a class of pipelines; PipelineError, listing the known, for any other class."""
    if pipeline not in FAMILIES:
        raise PipelineError(
            f"{source} is a {pipeline or 'model of unknown kind'}, which is of no known family; there are adapters for "
            f"{', '.join(FAMILIES)}, and docs/adapters.md says how to add one"
        )
    return importlib.import_module(f"stepcredit.policies.{FAMILIES[pipeline]}").FAMILY


def read(source: str, fetch: Callable[[str], Path]) -> Blueprint:
    """The blueprint of a repository whose small files ``fetch(name)`` gives.

    Raises PipelineError for a pipeline of an unknown family, and whatever ``fetch`` raises for a file that is absent.
    """
    index = read_json(fetch("model_index.json"))
    pipeline = str(index.get("_class_name", ""))
    family_class(pipeline, source)
    parts = {}
    for part in PARTS:
        config = read_json(fetch(f"{part}/{'scheduler_config' if part == 'scheduler' else 'config'}.json"))
        origin = index.get(part)
        owner, name = origin if isinstance(origin, list) and len(origin) == 2 else (None, None)
        if owner != "diffusers" or not isinstance(name, str):
            raise PipelineError(
                f"{source}: model_index.json gives {part} as {origin!r}; only diffusers' own are opened"
            )
        parts[part] = (name, {"_class_name": name, **config})
    reference = next((known for known in KNOWN.values() if known.pipeline == pipeline), None)
    return Blueprint(pipeline, parts, reference.encoder_parameters if reference else 0.0, source)


def read_json(path: Path) -> Config:
    """A JSON object from a file. Raises PipelineError for anything else."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise PipelineError(f"{path} is not a readable JSON file ({error})") from error
    if not isinstance(found, dict):
        raise PipelineError(f"{path} must hold a JSON object, not a {type(found).__name__}")
    return found


def _parameters(cls: Any) -> list[str]:
    """Components that a pipeline's constructor takes."""
    found = inspect.signature(cls.__init__).parameters.values()
    return [p.name for p in found if p.name != "self" and not isinstance(p.default, (bool, int, float, str))]


# ------------------------------------------------------------------------------------------- published configurations
# Numbers of the configuration files in the named repositories. Parameters of text encoders: CLIP-L 123.65 M, CLIP-G
# 694.66 M, T5-XXL's encoder 4.762 B (their model cards).

_CLIP_L, _CLIP_G, _T5 = 123.65e6, 694.66e6, 4.762e9


def _vae(scaling: float, shift: float) -> tuple[str, Config]:
    blocks = 4
    config = {
        "in_channels": 3,
        "out_channels": 3,
        "down_block_types": ("DownEncoderBlock2D",) * blocks,
        "up_block_types": ("UpDecoderBlock2D",) * blocks,
        "block_out_channels": (128, 256, 512, 512),
        "layers_per_block": 2,
        "latent_channels": 16,
        "norm_num_groups": 32,
        "sample_size": 1024,
        "scaling_factor": scaling,
        "shift_factor": shift,
        "use_quant_conv": False,
        "use_post_quant_conv": False,
    }
    return "AutoencoderKL", config


def _sd3(layers: int, heads: int, table: int, dual: int) -> Config:
    return {
        "sample_size": 128,
        "patch_size": 2,
        "in_channels": 16,
        "out_channels": 16,
        "num_layers": layers,
        "attention_head_dim": 64,
        "num_attention_heads": heads,
        "joint_attention_dim": 4096,
        "caption_projection_dim": 64 * heads,
        "pooled_projection_dim": 2048,
        "pos_embed_max_size": table,
        "dual_attention_layers": tuple(range(dual)),
        "qk_norm": "rms_norm",
    }


def _flux(guidance: bool) -> Config:
    return {
        "patch_size": 1,
        "in_channels": 64,
        "num_layers": 19,
        "num_single_layers": 38,
        "attention_head_dim": 128,
        "num_attention_heads": 24,
        "joint_attention_dim": 4096,
        "pooled_projection_dim": 768,
        "guidance_embeds": guidance,
        "axes_dims_rope": (16, 56, 56),
    }


def _published(
    source: str, pipeline: str, transformer: tuple[str, Config], vae: tuple[str, Config], **options: Any
) -> Blueprint:
    encoders = _CLIP_L + _T5 + (_CLIP_G if pipeline.startswith("Stable") else 0)
    parts = {"transformer": transformer, "vae": vae, "scheduler": ("FlowMatchEulerDiscreteScheduler", options)}
    return Blueprint(pipeline, parts, encoders, f"the published configuration of {source}")


_SD3, _FLUX = "SD3Transformer2DModel", "FluxTransformer2DModel"
_DYNAMIC: Config = {
    "shift": 3.0,
    "use_dynamic_shifting": True,
    "base_shift": 0.5,
    "max_shift": 1.15,
    "base_image_seq_len": 256,
    "max_image_seq_len": 4096,
}
KNOWN: dict[str, Blueprint] = {
    source: _published(source, pipeline, transformer, vae, **scheduler)
    for source, pipeline, transformer, vae, scheduler in (
        ("stabilityai/stable-diffusion-3.5-medium", "StableDiffusion3Pipeline", (_SD3, _sd3(24, 24, 384, 13)),
         _vae(1.5305, 0.0609), {"shift": 3.0}),
        ("stabilityai/stable-diffusion-3.5-large", "StableDiffusion3Pipeline", (_SD3, _sd3(38, 38, 192, 0)),
         _vae(1.5305, 0.0609), {"shift": 3.0}),
        ("black-forest-labs/FLUX.1-dev", "FluxPipeline", (_FLUX, _flux(True)), _vae(0.3611, 0.1159), _DYNAMIC),
        ("black-forest-labs/FLUX.1-schnell", "FluxPipeline", (_FLUX, _flux(False)), _vae(0.3611, 0.1159),
         {"shift": 1.0, "use_dynamic_shifting": False}),
    )
}  # fmt: skip
"""Hub id -> blueprint, so that ``plan`` needs neither weights nor a network for them."""
