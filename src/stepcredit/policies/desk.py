"""The desk policy: small text-to-image models, shipped with the package, that train on a CPU.

Images in [-1, 1] are their own latents. Weights are safetensors files whose header holds the architecture and the
vocabulary, so that a file is refused rather than misread.
"""

from __future__ import annotations

import copy
import importlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from stepcredit import grids, model_files
from stepcredit.errors import nearest
from stepcredit.policies.base import Conditioning
from stepcredit.policies.desk_model import DeskConfig, DeskTransformer
from stepcredit.untrusted import loads

KIND = model_files.Kind("stepcredit-desk-1", "a desk model", "stepcredit pretrain")
SHIFT = 3.0
"""Of the time grid, as SD3.5-M."""
LANGUAGES = {"compose": "stepcredit.tasks.compose.prompts", "spell": "stepcredit.tasks.spell.prompts"}
"""Task -> the module with its ``vocabulary()`` and ``tokenize(texts, length)``."""


class DeskPolicy:
    """A :class:`DeskTransformer` as a policy, with a frozen copy of the weights it was made of as reference."""

    forwards_per_velocity = 1

    def __init__(self, model: DeskTransformer, task: str = "compose") -> None:
        """Take over a model; raises ValueError if the task has no language or another vocabulary size."""
        words = len(vocabulary(task))
        if model.config.words != words:
            raise ValueError(f"the model knows {model.config.words} words, but task {task!r} has {words}")
        self.name = f"desk-{task}"
        self.task = task
        self.model = model
        self.latent_shape: tuple[int, ...] = (model.config.channels, model.config.height, model.config.width)
        self.reset_reference()

    @classmethod
    def initial(cls, task: str = "compose", seed: int = 0, **architecture: int) -> DeskPolicy:
        """An untrained policy, a function of the arguments alone; ``architecture`` are fields of DeskConfig."""
        return cls(DeskTransformer(DeskConfig(words=len(vocabulary(task)), **architecture), seed), task)

    @classmethod
    def pretrained(cls, name: str) -> DeskPolicy:
        """A base model shipped with the package. Raises ValueError, naming the nearest, for an unknown name."""
        if name not in LANGUAGES:
            known = ", ".join(LANGUAGES)
            raise ValueError(f"there is no desk model {name!r}{nearest(name, LANGUAGES)}; the package has: {known}")
        with resources.as_file(resources.files("stepcredit") / "assets" / f"{name}.safetensors") as path:
            return cls.load(path)

    @classmethod
    def load(cls, path: str | Path) -> DeskPolicy:
        """A policy of a file that :meth:`save` wrote; its weights are the reference too.

        Raises FileNotFoundError, or ValueError for a file that is damaged, is of another kind, architecture or
        vocabulary, or holds a weight that is not finite.
        """
        task, config, tensors = _read(Path(path))
        with torch.device("meta"):
            model = DeskTransformer(config)
        model_files.require_fit(tensors, model, Path(path))
        model.load_state_dict(tensors, assign=True)
        return cls(model, task)

    def load_weights(self, path: str | Path) -> None:
        """Replace the trained weights by a file's and keep the reference. Raises as :meth:`load`."""
        task, config, tensors = _read(Path(path))
        if (task, config) != (self.task, self.model.config):
            raise ValueError(f"{path} holds a {task} model {config}; this policy is {self.task} {self.model.config}")
        model_files.require_fit(tensors, self.model, Path(path))
        self.model.load_state_dict(tensors)

    def save(self, path: str | Path, metadata: Mapping[str, str] | None = None) -> None:
        """Write the trained weights as float32 safetensors, in one rename; ``metadata`` joins the header.

        Raises ValueError for a weight that is not finite or a metadata key that the format uses itself.
        """
        header = {
            "task": self.task,
            "config": json.dumps(asdict(self.model.config)),
            "vocabulary": json.dumps(vocabulary(self.task)),
        }
        KIND.save(Path(path), self.model, header, metadata)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.model.positions.device

    def to(self, device: torch.device | str) -> DeskPolicy:
        """Move weights and reference; returns the policy itself."""
        self.model.to(device)
        self._reference.to(device)
        return self

    def grid(self, steps: int) -> Tensor:
        """SD3's shifted grid, float64 ``[steps + 1]``."""
        return grids.shifted(steps, SHIFT)

    def encode(self, prompts: Sequence[str]) -> Conditioning:
        """Word numbers of prompts: ``{"tokens": int64 [B, text_length]}``. Raises ValueError for an unknown word."""
        tokens: Tensor = _language(self.task).tokenize(prompts, length=self.model.config.text_length)
        return {"tokens": tokens.to(self.device)}

    def velocity(self, x: Tensor, t: Tensor, cond: Conditioning) -> Tensor:
        """Velocity at images ``[B, 3, H, W]`` and times ``[B]``; float32, with gradients to the weights."""
        return _evaluate(self.model, x, t, cond)

    @torch.no_grad()
    def reference_velocity(self, x: Tensor, t: Tensor, cond: Conditioning) -> Tensor:
        """Velocity under the reference weights, without gradients."""
        return _evaluate(self._reference, x, t, cond)

    def reset_reference(self) -> None:
        """Make the present weights the reference."""
        self._reference = copy.deepcopy(self.model).requires_grad_(False)

    def decode(self, x_0: Tensor) -> Tensor:
        """Images in [0, 1] of images in [-1, 1], clamped."""
        return ((x_0.float() + 1) / 2).clamp(0, 1)

    def named_parameters(self) -> Iterable[tuple[str, nn.Parameter]]:
        """Every weight of the model, in a fixed order."""
        return self.model.named_parameters()


def vocabulary(task: str) -> tuple[str, ...]:
    """Words of a task in the order of their numbers. Raises ValueError for a task without a desk model."""
    words: tuple[str, ...] = _language(task).vocabulary()
    return words


def read_metadata(path: str | Path) -> dict[str, str]:
    """Header of a desk model's file. Raises FileNotFoundError, or ValueError for a file of another kind."""
    return KIND.header(Path(path))


def _language(task: str) -> Any:
    if task not in LANGUAGES:
        raise ValueError(f"task {task!r} has no desk model{nearest(task, LANGUAGES)}; use: {', '.join(LANGUAGES)}")
    return importlib.import_module(LANGUAGES[task])


def _evaluate(model: DeskTransformer, x: Tensor, t: Tensor, cond: Conditioning) -> Tensor:
    velocity: Tensor = model(x.float(), t.float(), cond["tokens"])
    return velocity


def _read(path: Path) -> tuple[str, DeskConfig, dict[str, Tensor]]:
    header = KIND.header(path)
    try:
        task = header["task"]
        config = DeskConfig(**loads(header["config"]))
        known = loads(header["vocabulary"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"the header of {path} does not describe a desk model: {error}") from error
    if known != list(vocabulary(task)) or config.words != len(known):
        raise ValueError(f"{path} was trained on another vocabulary; rebuild it with `stepcredit pretrain {task}`")
    tensors = model_files.tensors_of(path)
    # before the model is built: a header may ask for more layers than a machine builds in an hour
    if config.depth > len(tensors):
        raise ValueError(f"{path} has {len(tensors)} weights for {config.depth} layers; it is of another architecture")
    cells = config.height // config.patch * (config.width // config.patch)
    positions = tensors.get("positions")
    if positions is None or tuple(positions.shape) != (cells, config.hidden):
        raise ValueError(
            f"{path} lacks the weight 'positions' [{cells}, {config.hidden}]; it is of another architecture"
        )
    return task, config, tensors
