"""What a checkpoint holds, bit by bit, and what it refuses to hold."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_cases import FILES, JSON, TEXT, contents, identical, names, no_fsync, same, silent, two_checkpoints
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from stepcredit.training import checkpoint
from stepcredit.training.checkpoint import CheckpointError


@pytest.fixture
def two(tmp_path: Path) -> Path:
    """A folder with the checkpoints 1 and 2."""
    return two_checkpoints(tmp_path / "checkpoints")


# --- what is written ------------------------------------------------------------------------------------------------


def test_save_and_load(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "checkpoints"
    path = checkpoint.save(folder, 12, *contents(12), best=12, warn=silent)
    assert path == folder / "step-000012"
    assert names(folder) == {"step-000012", "latest", "best"}
    assert names(path) == set(FILES)
    assert os.readlink(folder / "latest") == os.readlink(folder / "best") == "step-000012"
    loaded = checkpoint.load(folder, warn=silent)
    assert loaded.iteration == 12
    assert loaded.path == path
    assert same(loaded, *contents(12))
    assert same(checkpoint.read(folder / "latest"), *contents(12))


def test_manifest_describes_files_and_tensors(tmp_path: Path) -> None:
    tensors = {"weights": {"w": torch.tensor([[3.0], [-4.0]]), "n": torch.tensor([2, 2, 1], dtype=torch.int32)}}
    path = checkpoint.save(tmp_path, 3, tensors, {})
    manifest = json.loads((path / "manifest.json").read_text())
    assert (manifest["version"], manifest["iteration"]) == (1, 3)
    assert manifest["tensors"] == {  # |(3, -4)| = 5, |(2, 2, 1)| = 3
        "weights": {
            "w": {"shape": [2, 1], "dtype": "F32", "norm": 5.0},
            "n": {"shape": [3], "dtype": "I32", "norm": 3.0},
        }
    }
    for name in ("weights.safetensors", "state.json"):
        data = (path / name).read_bytes()
        assert manifest["files"][name] == {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data)}
    assert set(manifest["files"]) == {"weights.safetensors", "state.json"}
    assert checkpoint.verify(path).iteration == 3


def test_tensor_file_byte_by_byte(tmp_path: Path) -> None:
    tensors = {"weights": {"b": torch.tensor([True]), "w": torch.tensor([1.0, -2.0])}}
    path = checkpoint.save(tmp_path, 0, tensors, {})
    header = (
        b'{"__metadata__":{"format":"pt"},"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},'
        b'"b":{"dtype":"BOOL","shape":[1],"data_offsets":[8,9]}}'
    )
    header += b" " * (-len(header) % 8)
    data = b"\x00\x00\x80\x3f" + b"\x00\x00\x00\xc0" + b"\x01"  # IEEE 754, little-endian: 1.0, -2.0; then true
    assert (path / "weights.safetensors").read_bytes() == len(header).to_bytes(8, "little") + header + data


def test_tensor_files_open_with_the_safetensors_library(tmp_path: Path) -> None:
    tensors, state = contents(5)
    path = checkpoint.save(tmp_path, 5, tensors, state)
    for group, named in tensors.items():
        found = load_file(path / f"{group}.safetensors")
        assert all(identical(found[name], tensor) for name, tensor in named.items())
        assert found.keys() == named.keys()


BASE = torch.arange(12, dtype=torch.float32).reshape(3, 4)
EXACT = {
    "bf16": torch.tensor([0x0001, -0x8000, 0x7F7F, 0x3F80], dtype=torch.int16).view(torch.bfloat16),
    "fp16": torch.tensor([0x0001, 0x03FF, 0x7BFF], dtype=torch.int16).view(torch.float16),
    "double": torch.tensor([5e-324, -0.0, 1.7976931348623157e308, 0.1], dtype=torch.float64),
    "float": torch.tensor([1e-45, -0.0, 3.4028235e38, 0.1]),
    "int64": torch.tensor([-(2**63), 2**63 - 1, 2**53 + 1]),
    "uint8": torch.arange(256, dtype=torch.uint8),
    "bool": torch.tensor([[True, False]]),
    "scalar": torch.tensor(1.5),
    "int scalar": torch.tensor(-7),
    "bool scalar": torch.tensor(True),
    "empty": torch.zeros(0),
    "empty 2d": torch.zeros(3, 0, dtype=torch.float64),
    "transposed": BASE.t(),
    "strided": BASE[::2, 1::2],
    "expanded": torch.tensor([2.0]).expand(4),
    "tied": BASE,
    "parameter": torch.nn.Parameter(BASE + 1),
}


@pytest.mark.parametrize("name", EXACT)
def test_every_kind_of_tensor_comes_back_bit_by_bit(tmp_path: Path, name: str) -> None:
    with no_fsync():
        checkpoint.save(tmp_path, 1, {"weights": {"x": EXACT[name], "tied": BASE}, "none": {}}, {})
    loaded = checkpoint.load(tmp_path, warn=silent).tensors
    assert identical(loaded["weights"]["x"], EXACT[name].detach())
    assert not loaded["weights"]["x"].requires_grad
    assert loaded["none"] == {}


DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int16, torch.uint8)
SPEC = st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 4), max_size=3), st.integers(0, 2**31))
PRINTABLE = st.text(st.characters(codec="utf-8"), min_size=1, max_size=20).filter(str.isprintable)


def from_bits(dtype: torch.dtype, shape: list[int], seed: int) -> Tensor:
    """A tensor of random bits, those that are no finite number set to zero."""
    count = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.randint(0, 256, (count,), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    tensor = raw.view(dtype).reshape(shape)
    return torch.where(torch.isfinite(tensor), tensor, torch.zeros_like(tensor))


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(PRINTABLE, SPEC, max_size=4), st.dictionaries(TEXT, JSON, max_size=4), st.integers(0, 10**7))
def test_round_trip(
    tmp_path_factory: pytest.TempPathFactory, specs: dict[str, Any], state: dict[str, Any], iteration: int
) -> None:
    folder = tmp_path_factory.mktemp("round")
    tensors = {"weights": {name: from_bits(*spec) for name, spec in specs.items() if name != "__metadata__"}}
    with no_fsync():
        checkpoint.save(folder, iteration, tensors, state, warn=silent)
    loaded = checkpoint.load(folder, warn=silent)
    assert loaded.iteration == iteration
    assert same(loaded, tensors, state)


def test_loaded_tensors_outlive_their_file(two: Path) -> None:
    loaded = checkpoint.load(two, warn=silent)
    for path in (two / "step-000002").iterdir():
        path.write_bytes(b"\0" * path.stat().st_size)
    assert same(loaded, *contents(2))


# --- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("group", ["weights", "ema", "optimizer"])
def test_values_that_are_not_finite_are_never_saved(tmp_path: Path, group: str, value: float) -> None:
    tensors, state = contents(1)
    tensors[group]["a.weight/exp_avg"] = torch.tensor([1.0, value], dtype=torch.bfloat16)
    for act in (checkpoint.rehearse_write, lambda folder, *given: checkpoint.save(folder, 1, *given)):
        with pytest.raises(CheckpointError, match=f"tensor {group} 'a.weight/exp_avg' has values that are not finite"):
            act(tmp_path / "c", tensors, state)
    assert not (tmp_path / "c").exists()


def _itself() -> list[Any]:
    inner: list[Any] = []
    inner.append(inner)
    return inner


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (float("nan"), r"state\.a\[1\] = nan"),
        (-float("inf"), r"state\.a\[1\] = -inf"),
        ({1: "x"}, r"state\.a\[1\] with the key 1"),
        ({"b": {"x"}}, r"state\.a\[1\]\.b of type set"),
        (b"x", "type bytes"),
        (torch.tensor(1), "type Tensor"),
        ([10**5000], "cannot be written as JSON"),
        (_itself(), "cannot be written as JSON"),
    ],
)
def test_state_that_json_would_change_is_refused(tmp_path: Path, value: Any, says: str) -> None:
    with pytest.raises(CheckpointError, match=says):
        checkpoint.save(tmp_path / "c", 1, {}, {"a": [0, value]})
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        ({"../x": {}}, "tensor group '../x'"),
        ({"Weights": {}}, "tensor group 'Weights'"),
        ({"weights": {"": BASE}}, "needs another name"),
        ({"weights": {"__metadata__": BASE}}, "needs another name"),
        ({"weights": {"a\x1b[2J": BASE}}, "needs another name"),
        ({"weights": {"w": BASE.to_sparse()}}, "'w' .*sparse.* cannot be saved"),
        ({"weights": {"w": BASE.to("meta")}}, "'w' .*meta.* cannot be saved"),
        ({"weights": {"w": BASE.to(torch.complex64)}}, "'w' .*complex64.* cannot be saved"),
    ],
)
def test_tensors_that_the_format_cannot_hold_are_refused(tmp_path: Path, tensors: Any, says: str) -> None:
    with pytest.raises(CheckpointError, match=says):
        checkpoint.save(tmp_path / "c", 1, tensors, {})
    assert not (tmp_path / "c").exists()


def test_bad_arguments(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="keep=0"):
        checkpoint.save(tmp_path, 1, {}, {}, keep=0)
    with pytest.raises(ValueError, match="iteration=-1"):
        checkpoint.save(tmp_path, -1, {}, {})
