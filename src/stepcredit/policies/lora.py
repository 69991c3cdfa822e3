"""LoRA adapters of a transformer: attach, save, load, compare.

``W + (alpha / rank) B A`` with B = 0 at the start (LoRA, arXiv 2106.09685).
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stepcredit import noise
from stepcredit.policies import lora_files
from stepcredit.policies.lora_files import LARGEST_RANK, AdapterFile, LoraError
from stepcredit.sampling import sample

ADAPTER = "default"
"""Name under which peft keeps the trained adapter."""


@dataclass(frozen=True)
class LoraSpec:
    """Size and place of the adapters. Flow-GRPO and the methods built on it use rank 32, alpha 64."""

    rank: int = 32
    alpha: float = 64.0
    targets: Sequence[str] | None = None
    """Name endings of the linear layers to adapt; None takes the published ones of the model's family."""
    seed: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.rank <= LARGEST_RANK:
            raise LoraError(f"LoRA rank is {self.rank}; it must be between 1 and {LARGEST_RANK}")
        if not (math.isfinite(self.alpha) and self.alpha > 0):
            raise LoraError(f"LoRA alpha is {self.alpha}; it must be positive, usually once or twice the rank")
        if self.targets is not None and (isinstance(self.targets, str) or not self.targets):
            raise LoraError(f"LoRA targets are {self.targets!r}; pass a list of names, or None for the published ones")


# ------------------------------------------------------------------------------------------------------------- attach


def targeted(transformer: nn.Module, targets: Sequence[str]) -> dict[str, nn.Linear]:
    """Linear layers whose name is, or ends in, one of the targets; LoraError for a target that matches none."""
    linear = {name: module for name, module in transformer.named_modules() if isinstance(module, nn.Linear)}
    for target in targets:
        if not any(_ends_in(name, target) for name in linear):
            endings = sorted({re.sub(r"^\w+\.\d+\.", "", name) for name in linear})
            raise LoraError(
                f"LoRA target {target!r} matches no linear layer of {type(transformer).__name__}; its layers end in "
                f"{', '.join(endings)}"
            )
    return {name: module for name, module in linear.items() if any(_ends_in(name, target) for target in targets)}


def parameter_count(transformer: nn.Module, targets: Sequence[str], rank: int) -> int:
    """Number of LoRA parameters, from shapes alone: the model may be on the meta device. LoraError as ``targeted``."""
    layers = targeted(transformer, targets).values()
    return sum(rank * (layer.in_features + layer.out_features) for layer in layers)


def attach(transformer: Any, spec: LoraSpec, default_targets: Sequence[str]) -> dict[str, nn.Parameter]:
    """Adds float32 adapters to a transformer, freezes all else, and returns the adapters' parameters by name.

    A is Gaussian with standard deviation 1/rank and a function of (seed, module) alone; B is zero, so the
    model's output is unchanged. Raises LoraError for a transformer that has adapters already, or a target that
    matches nothing.
    """
    from peft import LoraConfig

    if getattr(transformer, "peft_config", None):
        raise LoraError(
            f"the transformer already has the adapter {', '.join(transformer.peft_config)}; merge it into the base "
            "with pipe.fuse_lora() and pipe.unload_lora_weights(), or pass lora=None to sample with it"
        )
    targets = list(spec.targets or default_targets)
    targeted(transformer, targets)
    transformer.requires_grad_(False)
    alpha: Any = lora_files.plain(spec.alpha)  # peft says int, and scales by any number
    config = LoraConfig(r=spec.rank, lora_alpha=alpha, target_modules=targets, init_lora_weights=False)
    transformer.add_adapter(config, adapter_name=ADAPTER)
    parameters = {name: weight for name, weight in transformer.named_parameters() if weight.requires_grad}
    for name, weight in parameters.items():
        weight.data = weight.data.float()
        if not weight.is_meta and ".lora_A." in name:
            weight.data.copy_(noise.normal(tuple(weight.shape), "lora", spec.seed, name) / spec.rank)
        elif not weight.is_meta:
            weight.data.zero_()
    return parameters


def attached(transformer: Any) -> AdapterFile:
    """The adapter of a transformer as it stands, on the CPU. LoraError when there is none."""
    if ADAPTER not in getattr(transformer, "peft_config", {}):
        raise LoraError("the transformer has no adapter of ours; build the policy with lora=LoraSpec(...)")
    config = transformer.peft_config[ADAPTER]
    weights = {
        name.replace(f".{ADAPTER}.", "."): weight.detach().cpu().clone()
        for name, weight in transformer.named_parameters()
        if f".{ADAPTER}." in name
    }
    return AdapterFile(config.r, float(config.lora_alpha), lora_files.pairs(weights, "the attached adapter"))


# ----------------------------------------------------------------------------------------------------- save and load


def save(transformer: Any, folder: str | Path) -> Path:
    """Writes the attached adapter for ``pipe.load_lora_weights(folder)``, reads it back and compares; the file's path.

    Raises LoraError for non-finite weights, which are never written, or if the file does not hold what was written.
    """
    return lora_files.write(attached(transformer), folder)


@torch.no_grad()
def load(transformer: Any, path: str | Path) -> None:
    """Copies a file into the attached adapter. LoraError unless modules, rank and alpha are the very same."""
    new, old = lora_files.read(path, transformer), attached(transformer)
    for field in ("rank", "alpha"):
        if getattr(new, field) != getattr(old, field):
            raise LoraError(f"{path} has {field} {getattr(new, field)}, the attached adapter {getattr(old, field)}")
    if new.modules.keys() != old.modules.keys():
        name = sorted(new.modules.keys() ^ old.modules.keys())[0]
        raise LoraError(
            f"{path} and the attached adapter differ in module {name!r}; attach LoraSpec(targets=...) to match"
        )
    parameters = dict(transformer.named_parameters())
    for name, halves in new.modules.items():
        for half, tensor in zip("AB", halves, strict=True):
            parameters[f"{name}.lora_{half}.{ADAPTER}.weight"].copy_(tensor)


@torch.no_grad()
def image_difference(policy: Any, path: str | Path, prompts: Sequence[str], steps: int = 10, seed: int = 0) -> float:
    """Largest difference, in [0, 1], between images of the attached adapter and of a saved one opened by diffusers.

    Loads the folder through ``pipe.load_lora_weights`` beside the attached adapter, samples both from the same noise,
    and removes it again. 0.0 in float32 for a file of these very weights.
    """
    pipe, transformer, other = policy.pipe, policy.pipe.transformer, "readback"
    ours = sample(policy, prompts, steps=steps, seed=seed)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Already found a `peft_config`")  # two adapters are meant here
            pipe.load_lora_weights(str(path), adapter_name=other)
        if other not in transformer.peft_config:
            raise LoraError(f"{path}: load_lora_weights found no adapter for the transformer in it")
        transformer.set_adapter(other)
        theirs = sample(policy, prompts, steps=steps, seed=seed)
    finally:
        transformer.set_adapter(ADAPTER)
        if other in transformer.peft_config:
            transformer.delete_adapters(other)
    return float((ours - theirs).abs().max())


def _ends_in(name: str, target: str) -> bool:
    return name == target or name.endswith("." + target)
