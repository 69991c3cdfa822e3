"""What a checkpoint folder holds, and the proof that it holds it.

``step-NNNNNN/`` has one safetensors file per group of tensors (``weights``, ``ema``, ``optimizer``), ``state.json``,
and ``manifest.json``, written last, which gives the size and SHA-256 of every file and the shape, dtype and L2 norm of
every tensor. Nothing is ever unpickled. A manifest is read as if a stranger had written it.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import stat
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor

VERSION = 1
"""Of the format; a folder of another version is refused."""
MANIFEST, STATE = "manifest.json", "state.json"
MAX_JSON = 64 * 2**20
"""Largest manifest or state, in bytes."""

# The dtypes a training state is made of, by the names that safetensors gives them.
DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
GROUP = r"[a-z][a-z0-9_]{0,63}"
"""Pattern of the name of a group of tensors."""
_STEP = re.compile(r"step-(\d{6,18})(?:\.old)?", re.ASCII)


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, or is not what its manifest says; the message names what is wrong."""


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class FileEntry(_Strict):
    """A file of a checkpoint."""

    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    size: Annotated[int, Field(ge=0, lt=2**63)]
    """In bytes."""


class TensorEntry(_Strict):
    """A tensor of a checkpoint."""

    shape: tuple[Annotated[int, Field(ge=0, lt=2**63)], ...]
    dtype: str
    """As safetensors names it: ``F32``, ``BF16``, ..."""
    norm: Annotated[float, Field(ge=0)]
    """L2 norm, in float64."""


class Manifest(_Strict):
    """The contents of ``manifest.json``."""

    version: int
    iteration: Annotated[int, Field(ge=0, lt=10**18)]
    files: dict[str, FileEntry]
    tensors: dict[Annotated[str, Field(pattern=f"^{GROUP}$")], dict[str, TensorEntry]]
    """By group, then by name."""


class _Version(BaseModel):
    """The one field that every version of the format has."""

    version: Annotated[int, Field(strict=True, ge=0, lt=2**63)]


def step_name(iteration: int) -> str:
    """Folder name of an iteration's checkpoint."""
    return f"step-{iteration:06d}"


def step_of(name: str) -> int | None:
    """The iteration of a folder name that ``step_name`` gives (or that name + ``.old``); None for any other name."""
    match = _STEP.fullmatch(name)
    if match is None or name.removesuffix(".old") != step_name(int(match[1])):
        return None
    return int(match[1])


def steps(folder: Path) -> list[Path]:
    """The checkpoint folders, good or not, newest first; none if no save was ever completed.

    A crash may leave one that was being replaced (``step-NNNNNN.old``): it comes after its successor.
    """
    if not folder.is_dir():
        return []
    found = [(step, path) for path in folder.iterdir() if (step := step_of(path.name)) is not None and path.is_dir()]
    return [path for step, path in sorted(found, key=lambda entry: (-entry[0], entry[1].name))]


def tensor_file(group: str) -> str:
    """File name of a group of tensors."""
    return f"{group}.safetensors"


def read_manifest(path: Path) -> Manifest:
    """The manifest of a checkpoint folder, checked in itself but not yet against the files.

    Raises CheckpointError if it is missing, larger than MAX_JSON, malformed, of another version, of another iteration
    than the folder's name says, or lists other files than its groups of tensors and the state.
    """
    data = _read_small(path, MANIFEST)
    try:
        version = _Version.model_validate_json(data).version
        if version != VERSION:
            raise _bad(path, MANIFEST, f"has format version {version}; this release reads version {VERSION}")
        manifest = Manifest.model_validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(key) for key in first["loc"])
        raise _bad(path, MANIFEST, f"is malformed at {where[:120]!r}: {first['msg'][:200]!a}") from None
    if step_of(path.name) not in (None, manifest.iteration):
        raise _bad(path, MANIFEST, f"says iteration {manifest.iteration}, unlike the folder's name")
    odd = sorted(set(manifest.files) ^ {STATE, *map(tensor_file, manifest.tensors)})
    if odd:
        raise _bad(path, MANIFEST, f"lists files that do not fit its tensors: {odd[0][:120]!r}")
    return manifest


def verify(path: Path) -> Manifest:
    """Check every byte of a checkpoint folder against its manifest, which is returned.

    Raises CheckpointError that names the file and what is wrong: missing, of another size or content, or with other
    tensors than the manifest says. Files that the manifest does not name are not looked at.
    """
    manifest = read_manifest(path)
    for name, entry in manifest.files.items():
        size = _size(path, name)
        if size != entry.size:
            raise _bad(path, name, f"has {size} bytes instead of {entry.size}; it is truncated or was changed")
    for name, entry in manifest.files.items():
        try:
            with (path / name).open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise _bad(path, name, f"cannot be read ({error.strerror})") from error
        if digest != entry.sha256:
            raise _bad(path, name, "is damaged: its SHA-256 is not the manifest's")
    for group, entries in manifest.tensors.items():
        _verify_header(path, group, entries)
    return manifest


def _verify_header(path: Path, group: str, entries: Mapping[str, TensorEntry]) -> None:
    name = tensor_file(group)
    try:
        with safe_open(path / name, framework="pt") as file:
            found = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118 (not a mapping)
            shapes = {key: (tuple(view.get_shape()), view.get_dtype()) for key, view in found.items()}
    except (SafetensorError, OSError) as error:
        raise _bad(path, name, f"is not a safetensors file ({str(error)[:200]!a})") from error
    for key in sorted(shapes.keys() | entries.keys()):
        if key not in shapes or key not in entries:
            raise _bad(path, name, f"and its manifest disagree about the existence of tensor {key[:120]!r}")
        if shapes[key] != (entries[key].shape, entries[key].dtype) or entries[key].dtype not in DTYPES.values():
            raise _bad(path, name, f"has tensor {key[:120]!r} of another shape or dtype than the manifest says")


def is_good(path: Path) -> bool:
    """Whether ``verify`` finds nothing wrong."""
    try:
        verify(path)
    except CheckpointError:
        return False
    return True


def is_ours(path: Path) -> bool:
    """A real folder that holds what its manifest lists and nothing else."""
    try:
        expected = {MANIFEST, *read_manifest(path).files}
    except CheckpointError:
        return False
    return not path.is_symlink() and {entry.name for entry in path.iterdir()} <= expected


def read_contents(path: Path) -> tuple[Manifest, dict[str, dict[str, Tensor]], dict[str, Any]]:
    """Verify a checkpoint folder and read it: manifest, tensors (on the CPU, in own memory) and state.

    Raises CheckpointError as ``verify`` does, and for a tensor that is not finite or of another norm than its
    manifest says (relative tolerance 1e-6), and for a state that is not a JSON object.
    """
    manifest = verify(path)
    tensors: dict[str, dict[str, Tensor]] = {}
    for group, entries in manifest.tensors.items():
        with safe_open(path / tensor_file(group), framework="pt") as file:
            tensors[group] = {name: file.get_tensor(name).clone() for name in entries}
        for name, entry in entries.items():
            norm = l2_norm(tensors[group][name])
            if norm is None or not math.isclose(norm, entry.norm, rel_tol=1e-6):
                raise _bad(path, tensor_file(group), f"has tensor {name[:120]!r} with norm {norm}, not {entry.norm}")
    try:
        state = json.loads(_read_small(path, STATE), parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise _bad(path, STATE, f"is not JSON ({str(error)[:200]!a})") from error
    if not isinstance(state, dict):
        raise _bad(path, STATE, "is not a JSON object")
    return manifest, tensors, state


def l2_norm(tensor: Tensor) -> float | None:
    """L2 norm in float64, at most the largest float; None if an entry is not finite."""
    if tensor.is_floating_point():
        if not bool(torch.isfinite(tensor).all()):
            return None
        norm = torch.linalg.vector_norm(tensor, dtype=torch.float64)
    else:
        norm = torch.linalg.vector_norm(tensor.to(torch.float64))
    return min(float(norm), sys.float_info.max)


def _read_small(path: Path, name: str) -> bytes:
    size = _size(path, name)
    if size > MAX_JSON:
        raise _bad(path, name, f"has {size} bytes, more than the {MAX_JSON} that are read")
    try:
        with (path / name).open("rb") as file:
            return file.read(MAX_JSON)
    except OSError as error:
        raise _bad(path, name, f"cannot be read ({error.strerror})") from error


def _size(path: Path, name: str) -> int:
    """Size of a plain file; links and devices are refused, for reading one may never end."""
    try:
        status = (path / name).lstat()
    except OSError as error:
        missing = isinstance(error, FileNotFoundError)
        raise _bad(path, name, "is missing" if missing else f"cannot be read ({error.strerror})") from error
    if not stat.S_ISREG(status.st_mode):
        raise _bad(path, name, "is not a plain file")
    return status.st_size


def _bad(path: Path, name: str, what: str) -> CheckpointError:
    return CheckpointError(f"checkpoint {path}: {name} {what}")


def _no_constant(text: str) -> float:
    raise ValueError(f"{text} is not a JSON number")
