"""Files of the package's own small models: safetensors whose header says what they are, refused rather than misread."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from stepcredit.untrusted import loads, quoted

_ENTRY = "stepcredit"


@dataclass(frozen=True)
class Kind:
    """A kind of model file."""

    format: str
    """Value of ``format`` in the header."""
    name: str
    """For messages, with its article."""
    maker: str
    """The command that makes one."""

    def save(
        self, path: Path, model: nn.Module, header: Mapping[str, str], metadata: Mapping[str, str] | None = None
    ) -> None:
        """Write a model's weights as float32, in one rename; ``metadata`` joins the ``header`` of the format.

        Raises ValueError for a weight that is not finite or a metadata key that the format uses itself.
        """
        whole = {"format": self.format, **header}
        taken = whole.keys() & (metadata or {}).keys()
        if taken:
            raise ValueError(f"metadata key {min(taken)!r} belongs to the format; use another")
        tensors = {k: v.detach().to("cpu", torch.float32).contiguous() for k, v in model.state_dict().items()}
        _require_finite(tensors, "the model")
        partial = path.with_name(path.name + ".tmp")
        # one entry: safetensors writes several in an order that differs from file to file
        save_file(tensors, partial, metadata={_ENTRY: json.dumps({**whole, **(metadata or {})})})
        os.replace(partial, path)

    def header(self, path: Path) -> dict[str, str]:
        """Header of a file. Raises FileNotFoundError, or ValueError for a file that is damaged or of another kind."""
        if not path.is_file():
            raise FileNotFoundError(f"there is no file {path}; `{self.maker}` makes {self.name}")
        try:
            with safe_open(path, framework="pt") as file:
                entry = (file.metadata() or {}).get(_ENTRY, "{}")
        except SafetensorError as error:
            raise ValueError(f"{path} is not a whole safetensors file ({error}); fetch or make it anew") from error
        try:
            header = loads(entry)
        except ValueError as error:
            raise ValueError(f"{path} is not {self.name}: its header is not JSON ({error})") from error
        if not isinstance(header, dict) or header.get("format") != self.format:
            found = header.get("format") if isinstance(header, dict) else header
            raise ValueError(f"{path} is not {self.name}: its format is {quoted(found)}, not {self.format!r}")
        return {str(key): str(value) for key, value in header.items()}


def tensors_of(path: Path) -> dict[str, Tensor]:
    """All weights of a file whose header has been read."""
    with safe_open(path, framework="pt") as file:
        return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118


def require_fit(tensors: Mapping[str, Tensor], model: nn.Module, path: Path) -> None:
    """Raise ValueError unless the tensors are exactly the model's, float32 and finite."""
    wanted = model.state_dict()
    for key in sorted(wanted.keys() | tensors.keys()):
        if key not in tensors:
            raise ValueError(f"{path} lacks the weight {key!r}; it is of another architecture")
        if key not in wanted:
            raise ValueError(f"{path} has an unknown weight {key!r}; it is of another architecture")
        found, shape = tensors[key], tuple(wanted[key].shape)
        if tuple(found.shape) != shape or found.dtype != torch.float32:
            raise ValueError(f"{path}: weight {key!r} is {found.dtype} {tuple(found.shape)}, not float32 {shape}")
    _require_finite(tensors, str(path))


def _require_finite(tensors: Mapping[str, Tensor], owner: str) -> None:
    for key, tensor in tensors.items():
        if not bool(tensor.isfinite().all()):
            raise ValueError(f"weight {key!r} of {owner} is not finite; go back to an earlier checkpoint")
