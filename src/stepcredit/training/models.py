"""The model of a recipe: a desk file, a bundled desk model, a diffusers pipeline, or a tiny one for a rehearsal.

``sketch`` gives a policy that knows all sizes and holds no weights; ``load_policy`` gives the real one. What can be
refused from names and configurations is refused by the sketch, before anything large is read.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch

from stepcredit import policies, tasks
from stepcredit.errors import UserError, nearest
from stepcredit.folders import cache_root
from stepcredit.policies import desk
from stepcredit.policies.base import Policy
from stepcredit.policies.desk import DeskPolicy
from stepcredit.policies.diffusers_common import DTYPES, PipelineError, PolicyWarning
from stepcredit.policies.lora import LoraSpec
from stepcredit.policies.placement import Placement
from stepcredit.training import architectures
from stepcredit.training.architectures import Blueprint
from stepcredit.training.recipe import Recipe

TINY = "tiny:"
"""Prefix of a rehearsal's model: ``tiny:sd3`` is a tiny random pipeline of the family ``sd3``."""
DESK_REFUSES = (
    *("revision", "resolution", "guidance_scale", "max_sequence_length", "tuning", "lora_rank", "lora_alpha"),
    *("lora_targets", "precision", "gradient_checkpointing", "shard", "decode_batch", "embedding_cache", "offload"),
)
"""Keys that mean nothing to a desk model."""
RESOLUTION = 512


def model_of(recipe: Recipe) -> str:
    """The recipe's model, or its task's own."""
    return recipe.model or tasks.get(recipe.task).model


def is_desk(recipe: Recipe) -> bool:
    """Whether the model is one of the desk's: a bundled one, or a single file."""
    spec = model_of(recipe)
    return spec in desk.LANGUAGES or spec.endswith(".safetensors") or Path(spec).is_file()


def is_tiny(recipe: Recipe) -> bool:
    """Whether the model is a rehearsal's, of random weights."""
    return model_of(recipe).startswith(TINY)


def family_name(recipe: Recipe) -> str | None:
    """Name of the family of a recipe's pipeline, None for a desk model. Raises PipelineError as ``sketch``."""
    if is_desk(recipe):
        return None
    if is_tiny(recipe):
        return model_of(recipe).removeprefix(TINY)
    return str(architectures.family_class(blueprint(recipe).pipeline, model_of(recipe)).name)


def sketch(recipe: Recipe) -> Policy:
    """A policy with the model's shapes, grid and trained parameters, on the meta device; small models whole.

    Raises UserError or OSError for what cannot be found, is of no known family, or does not fit the recipe.
    """
    if is_desk(recipe):
        return _desk(recipe)
    if is_tiny(recipe):
        return load_policy(recipe)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PolicyWarning)  # the real policy gives them
        return _policy(recipe, blueprint(recipe).build(), cache=False)


def load_policy(recipe: Recipe, device: torch.device | None = None, place: Placement | None = None) -> Policy:
    """The base model that a recipe starts from, on the device; with ``offload`` its idle parts are placed by ``place``,
    one of its own by default. Raises UserError, ValueError or OSError if it cannot.
    """
    if is_desk(recipe):
        return _desk(recipe)
    device = device or torch.device("cpu")
    place = place or placement(recipe, device)
    pipe = _tiny(recipe) if is_tiny(recipe) else _pipeline(recipe)
    return _policy(recipe, pipe if place else pipe.to(device), place=place)


def placement(recipe: Recipe, device: torch.device) -> Placement | None:
    """Where the idle networks of a recipe wait; None without ``offload``. Raises UserError where nothing is gained."""
    if recipe.offload == "none":
        return None
    if device.type == "cpu" and not is_tiny(recipe):
        raise UserError(
            "offload 'idle' moves idle networks from a GPU to the CPU's memory, and the device is the CPU: leave it out"
        )
    return Placement(device)


def locate(recipe: Recipe) -> None:
    """Raises PipelineError unless the recipe's pipeline is a folder, or the hub's cache or the hub itself has it."""
    if not Path(model_of(recipe)).expanduser().is_dir():
        _fetch(recipe, "model_index.json")


def blueprint(recipe: Recipe) -> Blueprint:
    """Classes and configurations of the recipe's pipeline, from its folder, the table of known ones, or the hub."""
    spec = model_of(recipe)
    folder = Path(spec).expanduser()
    if folder.is_dir():
        return architectures.read(spec, lambda name: _in_folder(folder, name))
    if spec in architectures.KNOWN:
        return architectures.KNOWN[spec]
    return architectures.read(spec, lambda name: _fetch(recipe, name))


def cache_folder(recipe: Recipe) -> Path | None:
    """Folder of the recipe's text embeddings; None if they are not kept."""
    if recipe.embedding_cache != "auto":
        return Path(recipe.embedding_cache).expanduser() if recipe.embedding_cache else None
    return cache_root() / "embeddings"


def _desk(recipe: Recipe) -> DeskPolicy:
    defaults = Recipe()
    foreign = [key for key in DESK_REFUSES if getattr(recipe, key) != getattr(defaults, key)]
    if foreign:
        raise UserError(
            f"{foreign[0]} = {getattr(recipe, foreign[0])!r} is for diffusers pipelines; {model_of(recipe)!r} is a "
            "desk model: leave the key out, or set model to a pipeline"
        )
    spec = model_of(recipe)
    return DeskPolicy.pretrained(spec) if spec in desk.LANGUAGES else DeskPolicy.load(Path(spec))


def _policy(recipe: Recipe, pipe: Any, cache: bool = True, place: Placement | None = None) -> Policy:
    size = recipe.resolution or RESOLUTION
    spec = LoraSpec(recipe.lora_rank, recipe.lora_alpha, recipe.lora_targets, recipe.seed)
    return policies.from_pipeline(
        pipe,
        height=size,
        width=size,
        guidance_scale=recipe.guidance_scale,
        lora="full" if recipe.tuning == "full" else spec,
        precision=recipe.precision or policies.family_of(pipe).precision,
        max_sequence_length=recipe.max_sequence_length,
        gradient_checkpointing=recipe.gradient_checkpointing,
        reference_copy=recipe.tuning == "full" and recipe.kl_beta > 0,
        embedding_cache=cache_folder(recipe) if cache else None,
        revision=recipe.revision,
        decode_batch=recipe.decode_batch,
        placement=place,
    )


def _tiny(recipe: Recipe) -> Any:
    from stepcredit.policies import tiny

    architectures.library()
    family = model_of(recipe).removeprefix(TINY)
    if family not in tiny.BUILDERS:
        raise UserError(
            f"no tiny pipeline {family!r}{nearest(family, tiny.BUILDERS) or '.'} There are {', '.join(tiny.BUILDERS)}"
        )
    return tiny.build(family)


def _pipeline(recipe: Recipe) -> Any:
    """The pipeline with its weights, in the precision of the recipe, on the CPU."""
    spec, diffusers = model_of(recipe), architectures.library()
    local = Path(spec).expanduser().is_dir()
    locate(recipe)
    name = blueprint(recipe).pipeline
    precision = recipe.precision or architectures.family_class(name, spec).precision
    try:
        return getattr(diffusers, name).from_pretrained(
            str(Path(spec).expanduser()) if local else spec,
            revision=None if local else recipe.revision,
            torch_dtype=DTYPES[precision],
            use_safetensors=True,
            local_files_only=local,
        )
    except (OSError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:300]
        raise PipelineError(f"the pipeline {spec!r} could not be loaded: {reason}; {_remedy(spec)}") from error


def _in_folder(folder: Path, name: str) -> Path:
    path = folder / name
    if not path.is_file():
        raise PipelineError(
            f"the folder {str(folder)!r} has no {name}: a pipeline's folder is what `hf download ID --local-dir "
            "FOLDER` or pipe.save_pretrained writes"
        )
    return path


def _fetch(recipe: Recipe, name: str) -> Path:
    """A small file of the recipe's hub repository, from the cache or the network. Raises PipelineError."""
    spec = model_of(recipe)
    if spec.count("/") != 1 or spec.startswith((".", "/", "~")):
        raise PipelineError(
            f"model {spec!r} is neither an existing file or folder, nor a hub id 'owner/name', nor a desk model "
            f"({', '.join(desk.LANGUAGES)})"
        )
    architectures.library()
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(spec, name, revision=recipe.revision))
    except Exception as error:  # the hub's errors have many types, and each means: not to be had
        at = f" at revision {recipe.revision!r}" if recipe.revision else ""
        raise PipelineError(
            f"model {spec!r}{at}: no {name} in the hub's cache, and it cannot be fetched ({type(error).__name__}); "
            f"{_remedy(spec)}"
        ) from error


def _remedy(spec: str) -> str:
    return (
        f"accept its licence at https://huggingface.co/{spec} and run `hf auth login`, or run `hf download {spec} "
        "--local-dir FOLDER` where there is a network and pass --model FOLDER"
        if spec.count("/") == 1 and not Path(spec).is_dir()
        else "check the folder, or download it again with `hf download ID --local-dir FOLDER`"
    )
