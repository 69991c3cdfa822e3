"""LoRA files: written so that ``pipe.load_lora_weights`` opens them, read without trusting them, converted from PEFT's.

Files are safetensors with keys ``transformer.<module>.lora_A.weight`` ``[rank, in]`` and ``lora_B`` ``[out, rank]``.
Rank and alpha are in the metadata, without which diffusers would silently take alpha = rank.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from stepcredit.errors import UserError
from stepcredit.untrusted import loads, quoted

WEIGHTS = "pytorch_lora_weights.safetensors"
"""Name of the file that ``load_lora_weights`` looks for in a folder."""
METADATA_KEY = "lora_adapter_metadata"
PREFIX = "transformer."
LARGEST_RANK = 1024
LARGEST_ALPHA = 1e6
_LARGEST_CONFIG = 1 << 20

_KEY = re.compile(r"(?P<module>[A-Za-z0-9_.]+)\.lora_(?P<half>[AB])\.weight")
_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_KEPT = {"r", "lora_alpha", "target_modules", "use_rslora"}
_DESCRIPTIVE = {
    "auto_mapping",
    "base_model_name_or_path",
    "exclude_modules",
    "inference_mode",
    "init_lora_weights",
    "layers_pattern",
    "layers_to_transform",
    "lora_dropout",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
    "task_type",
}
"""Config fields that say where an adapter comes from or how it was trained, not what it computes: dropped."""
_NEUTRAL = {"peft_type": ("LORA",), "bias": ("none",)}
"""Fields with one value that changes nothing; every field on no list must be empty or false."""


class LoraError(UserError, ValueError):
    """An adapter that cannot be attached, saved or read; the message names the module, key or field at fault."""


@dataclass(frozen=True)
class AdapterFile:
    """A checked adapter: for every module its halves A ``[rank, in]`` and B ``[out, rank]``."""

    rank: int
    alpha: float
    modules: dict[str, tuple[Tensor, Tensor]]


def write(adapter: AdapterFile, folder: str | Path) -> Path:
    """Writes an adapter as ``save`` does, with rank and alpha in the metadata; the file appears whole or not at all."""
    path = Path(folder) / WEIGHTS
    path.parent.mkdir(parents=True, exist_ok=True)
    config = {"r": adapter.rank, "lora_alpha": plain(adapter.alpha), "target_modules": sorted(adapter.modules)}
    tensors: dict[str, Tensor] = {}
    for module, halves in adapter.modules.items():
        for half, tensor in zip("AB", halves, strict=True):
            _finite(tensor, f"{module}.lora_{half}", "nothing was written")
            tensors[f"{PREFIX}{module}.lora_{half}.weight"] = tensor.contiguous()
    metadata = {METADATA_KEY: json.dumps({PREFIX + field: value for field, value in config.items()}, sort_keys=True)}
    part = path.with_suffix(f".{os.getpid()}.part")
    try:
        save_file(tensors, part, metadata={"format": "pt", **metadata})
        if not _equal(read(part), adapter):
            raise LoraError(f"{path} does not read back as it was written; check the disk")
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
    return path


def read(path: str | Path, transformer: nn.Module | None = None) -> AdapterFile:
    """Reads an adapter file, or the one in a folder, trusting nothing; with a transformer, checks that it fits.

    LoraError for: a file that is not safetensors, keys that are not a transformer's LoRA pairs, shapes or ranks that
    disagree, non-finite values, config fields that would change what the adapter computes, or modules of another model.
    """
    path = Path(path) / WEIGHTS if Path(path).is_dir() else Path(path)
    tensors, metadata = _load(path)
    outside = next((key for key in tensors if not key.startswith(PREFIX)), None)
    if outside is not None:
        raise LoraError(
            f"{path}: key {quoted(outside)} is not a transformer's; for a folder written by PEFT use convert_peft"
            + (", and adapters of text encoders are not supported" if outside.startswith("text_encoder") else "")
        )
    try:
        fields = loads(metadata.get(METADATA_KEY, "{}"))
        config = {key.removeprefix(PREFIX): value for key, value in fields.items()}
    except (ValueError, AttributeError):
        raise LoraError(f"{path}: the metadata {METADATA_KEY!r} is not a JSON object") from None
    adapter = _assemble({key.removeprefix(PREFIX): tensor for key, tensor in tensors.items()}, config, str(path))
    if transformer is not None:
        check_fit(adapter, transformer, str(path))
    return adapter


def check_fit(adapter: AdapterFile, transformer: nn.Module, source: str) -> None:
    """LoraError unless every module of the adapter is a linear layer of the transformer, of the same shape."""
    modules = dict(transformer.named_modules())
    for name, (a, b) in adapter.modules.items():
        layer = modules.get(f"{name}.base_layer", modules.get(name))
        if not isinstance(layer, nn.Linear):
            raise LoraError(
                f"{source}: {type(transformer).__name__} has no linear layer {name!r}; is it of another model?"
            )
        if (layer.out_features, layer.in_features) != (len(b), a.shape[1]):
            raise LoraError(
                f"{source}: {name} maps {a.shape[1]} to {len(b)} features, but this model's maps {layer.in_features} "
                f"to {layer.out_features}; it is of another model"
            )


def convert_peft(source: str | Path, folder: str | Path, transformer: nn.Module | None = None) -> Path:
    """Turns a folder that PEFT's ``save_pretrained`` wrote (flow_grpo's checkpoints) into ours; the new file's path.

    diffusers opens such folders as if they were empty. Raises LoraError as ``read``, and for pickled weights.
    """
    source = Path(source)
    source = source / "lora" if (source / "lora" / "adapter_config.json").exists() else source
    described = source / "adapter_config.json"
    if not described.exists():
        raise LoraError(f"{source} has no adapter_config.json; point at the folder that PEFT's save_pretrained wrote")
    if not (source / "adapter_model.safetensors").exists():
        raise LoraError(
            f"{source} has no adapter_model.safetensors; pickled weights are not opened: save them again as such"
        )
    if described.stat().st_size > _LARGEST_CONFIG:
        raise LoraError(f"{described} has more than {_LARGEST_CONFIG} bytes; it is no config")
    try:
        config = dict(loads(described.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):  # absent, not UTF-8, not JSON, not an object
        raise LoraError(f"{described} is not a JSON object") from None
    tensors, _ = _load(source / "adapter_model.safetensors")
    bare = {key.removeprefix("base_model.model.").removeprefix(PREFIX): tensor for key, tensor in tensors.items()}
    adapter = _assemble(bare, config, str(source))
    if transformer is not None:
        check_fit(adapter, transformer, str(source))
    return write(adapter, folder)


# ------------------------------------------------------------------------------------------------------------- checks


def plain(number: float) -> int | float:
    """The number as an integer where it is one, as adapter configs have it."""
    return int(number) if float(number).is_integer() else number


def _equal(one: AdapterFile, two: AdapterFile) -> bool:
    if (one.rank, one.alpha, one.modules.keys()) != (two.rank, two.alpha, two.modules.keys()):
        return False
    return all(
        torch.equal(old, new) and old.dtype == new.dtype
        for name, halves in one.modules.items()
        for old, new in zip(halves, two.modules[name], strict=True)
    )


def _load(path: Path) -> tuple[dict[str, Tensor], Mapping[str, str]]:
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            return {key: file.get_tensor(key) for key in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except FileNotFoundError:
        raise LoraError(f"{path} does not exist") from None
    except (SafetensorError, OSError) as error:
        raise LoraError(f"{path} is not a readable safetensors file ({error})") from None


def _assemble(tensors: Mapping[str, Tensor], config: Mapping[str, Any], source: str) -> AdapterFile:
    for field, value in config.items():
        if field in _KEPT or field in _DESCRIPTIVE or value in _NEUTRAL.get(field, ()):
            continue
        if value:
            raise LoraError(f"{source}: config field {quoted(field)} is {quoted(value)}; only plain LoRA is supported")
    modules = pairs(tensors, source)
    ranks = {len(a) for a, _ in modules.values()}
    rank = config.get("r", min(ranks))
    if type(rank) is not int or ranks != {rank} or not 1 <= rank <= LARGEST_RANK:
        raise LoraError(
            f"{source}: the tensors have rank {sorted(ranks)}, its config {quoted(rank)}; one rank is expected"
        )
    alpha = config.get("lora_alpha", rank)
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not 0 < alpha <= LARGEST_ALPHA:
        raise LoraError(
            f"{source}: config field 'lora_alpha' is {quoted(alpha)}; it must be a positive number, at most "
            f"{LARGEST_ALPHA:g}"
        )
    if config.get("use_rslora"):  # scaled by alpha / sqrt(rank): the same adapter has a larger alpha in our convention
        alpha *= math.sqrt(rank)
    return AdapterFile(rank, float(alpha), modules)


def pairs(tensors: Mapping[str, Tensor], source: str) -> dict[str, tuple[Tensor, Tensor]]:
    """Halves A and B of every module, from tensors keyed ``<module>.lora_A.weight``; LoraError unless they match."""
    halves: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        match = _KEY.fullmatch(key)
        if match is None:
            raise LoraError(f"{source}: key {quoted(key)} is not of the form <module>.lora_A.weight or .lora_B.weight")
        if tensor.ndim != 2 or tensor.dtype not in _DTYPES:
            raise LoraError(
                f"{source}: {key[:160]} is a {tensor.dtype} tensor of shape {tuple(tensor.shape)}, not a matrix of "
                "floats"
            )
        _finite(tensor, key, f"{source} is refused")
        halves.setdefault(match["module"], {})[match["half"]] = tensor
    if not halves:
        raise LoraError(f"{source} holds no LoRA weights")
    for module, pair in halves.items():
        if pair.keys() != {"A", "B"}:
            raise LoraError(f"{source}: {module} has lora_{min(pair)} without its other half")
        if len(pair["A"]) != pair["B"].shape[1]:
            raise LoraError(
                f"{source}: {module} has rank {len(pair['A'])} in lora_A and {pair['B'].shape[1]} in lora_B"
            )
    return {module: (pair["A"], pair["B"]) for module, pair in sorted(halves.items())}


def _finite(tensor: Tensor, name: str, consequence: str) -> None:
    if not bool(tensor.isfinite().all()):
        raise LoraError(f"{name} holds a value that is not finite; {consequence}")
