"""What a checkpoint is to hold, taken from a running state: checked, described and turned into bytes."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stepcredit.training.manifest import DTYPES, GROUP, MAX_JSON, CheckpointError, TensorEntry, l2_norm


@dataclass(frozen=True)
class Snapshot:
    """Contents that can be saved without loss."""

    tensors: dict[str, dict[str, Tensor]]
    """By group and name, on the CPU; those that were there already share memory with their source."""
    entries: dict[str, dict[str, TensorEntry]]
    state: bytes
    """JSON."""


def snapshot(tensors: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any]) -> Snapshot:
    """Check tensors and state, and describe them.

    Raises CheckpointError that names the tensor or the part of the state: values that are not finite, dtypes, layouts
    or names that a safetensors file cannot hold, and whatever JSON would lose or change (tuples become lists).
    """
    on_cpu: dict[str, dict[str, Tensor]] = {}
    entries: dict[str, dict[str, TensorEntry]] = {}
    for group, named in tensors.items():
        if not re.fullmatch(GROUP, group, re.ASCII):
            raise CheckpointError(f"tensor group {group!r} must be lower-case letters, digits and '_'")
        on_cpu[group] = {name: _on_cpu(f"{group} {name!r}", name, tensor) for name, tensor in named.items()}
        entries[group] = {name: _entry(f"{group} {name!r}", tensor) for name, tensor in on_cpu[group].items()}
    return Snapshot(on_cpu, entries, _json(dict(state)))


def safetensors_stream(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    """The bytes of a safetensors file of CPU tensors, piece by piece, without a second copy of them in memory.

    Equal tensors give equal bytes in whatever order they come. Format: length of the header (u64, little-endian),
    header (JSON, padded with spaces to a multiple of 8), then the tensors, wide dtypes first, so that all are aligned.
    """
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        begin, end = end, end + tensors[name].numel() * tensors[name].element_size()
        shape = list(tensors[name].shape)
        header[name] = {"dtype": DTYPES[tensors[name].dtype], "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for name in names:
        yield tensors[name].contiguous().reshape(-1).view(torch.uint8).numpy().data


def _on_cpu(what: str, name: str, tensor: Tensor) -> Tensor:
    if not name.isprintable() or name in ("", "__metadata__"):
        raise CheckpointError(f"tensor {what} needs another name, of printable characters")
    if tensor.dtype not in DTYPES or tensor.layout != torch.strided or tensor.is_meta:
        raise CheckpointError(f"tensor {what} ({tensor.dtype}, {tensor.layout}, {tensor.device}) cannot be saved")
    return tensor.detach().to("cpu")


def _entry(what: str, tensor: Tensor) -> TensorEntry:
    norm = l2_norm(tensor)
    if norm is None:
        raise CheckpointError(f"tensor {what} has values that are not finite; they are not saved")
    return TensorEntry(shape=tuple(tensor.shape), dtype=DTYPES[tensor.dtype], norm=norm)


def _json(state: dict[str, Any]) -> bytes:
    try:
        where = _lossy(state, "state")
        text = json.dumps(state, allow_nan=False).encode() if where is None else b""
    except (ValueError, RecursionError) as error:  # an integer of thousands of digits; a list that holds itself
        raise CheckpointError(f"the state cannot be written as JSON ({error})") from error
    if where is not None:
        raise CheckpointError(f"{where} cannot be kept in JSON without loss; use strings, finite numbers and lists")
    if len(text) > MAX_JSON:
        raise CheckpointError(f"the state has {len(text)} bytes as JSON; at most {MAX_JSON} can be saved")
    return text


def _lossy(value: Any, where: str) -> str | None:
    """Where a value holds something that JSON would lose or change; None if nowhere."""
    if value is None or isinstance(value, (bool, int, str)):
        return None
    if isinstance(value, float):
        return None if math.isfinite(value) else f"{where} = {value}"
    if isinstance(value, (list, tuple)):
        return next((w for i, v in enumerate(value) if (w := _lossy(v, f"{where}[{i}]"))), None)
    if isinstance(value, dict):
        odd = next((key for key in value if not isinstance(key, str)), None)
        if odd is not None:
            return f"{where} with the key {odd!r}"
        return next((w for k, v in value.items() if (w := _lossy(v, f"{where}.{k}"))), None)
    return f"{where} of type {type(value).__name__}"
