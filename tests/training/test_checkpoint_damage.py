"""Damaged checkpoints and hostile ones: found out, named, and passed over."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_cases import FILES, JSON, TEXT, contents, load, same, silent, two_checkpoints
from hypothesis import given, settings
from hypothesis import strategies as st

from stepcredit.training import checkpoint
from stepcredit.training.checkpoint import CheckpointError


@pytest.fixture
def two(tmp_path: Path) -> Path:
    """A folder with the checkpoints 1 and 2."""
    return two_checkpoints(tmp_path / "checkpoints")


# --- damage ---------------------------------------------------------------------------------------------------------


def damaged(folder: Path, name: str) -> None:
    """Load falls back on checkpoint 1, and says which file of checkpoint 2 is wrong."""
    loaded, said = load(folder)
    assert same(loaded, *contents(1))
    assert len(said) == 1
    assert "step-000002" in said[0]
    assert name in said[0]
    with pytest.raises(CheckpointError, match=name):
        checkpoint.read(folder / "step-000002")


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file(two: Path, name: str) -> None:
    (two / "step-000002" / name).unlink()
    damaged(two, name)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("left", [0, 7, 0.5, -1])
def test_a_truncated_file(two: Path, name: str, left: float) -> None:
    path = two / "step-000002" / name
    size = path.stat().st_size
    os.truncate(path, int(left * size) if isinstance(left, float) else left % size)
    damaged(two, name)


@pytest.mark.parametrize("name", [name for name in FILES if name != "manifest.json"])
def test_one_flipped_bit(two: Path, name: str) -> None:
    path = two / "step-000002" / name
    data = path.read_bytes()
    for at in sorted({0, 8, 20, len(data) // 2, len(data) - 1}):
        path.write_bytes(data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :])
        damaged(two, name)
    path.write_bytes(data)
    assert same(checkpoint.load(two, warn=silent), *contents(2))


def test_a_flipped_bit_anywhere_in_the_manifest_is_seen_or_harmless(two: Path) -> None:
    path = two / "step-000002" / "manifest.json"
    data = path.read_bytes()
    seen = 0
    for at in range(0, len(data), 3):
        path.write_bytes(data[:at] + bytes([data[at] ^ 1 << at % 7]) + data[at + 1 :])
        loaded, said = load(two)
        seen += bool(said)
        assert same(loaded, *contents(1 if said else 2))
    assert seen > len(data) / 3 * 0.7  # the rest: spaces, and last digits of norms


def test_none_good(two: Path) -> None:
    for step in (1, 2):
        (two / f"step-00000{step}" / "weights.safetensors").write_bytes(b"")
    said: list[str] = []
    with pytest.raises(CheckpointError, match="none of the 2 checkpoints"):
        checkpoint.load(two, warn=said.append)
    assert ["step-000002" in said[0], "step-000001" in said[1]] == [True, True]


def test_no_checkpoint(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "absent"):
        assert checkpoint.steps(folder) == []
        with pytest.raises(CheckpointError, match="there is no checkpoint"):
            checkpoint.load(folder, warn=silent)
    (tmp_path / "step-000003.tmp").mkdir()
    assert checkpoint.steps(tmp_path) == []


def test_load_tells_the_log_unless_told_otherwise(two: Path, caplog: pytest.LogCaptureFixture) -> None:
    (two / "step-000002" / "state.json").write_text("100% damaged")
    assert checkpoint.load(two).iteration == 1
    assert "state.json" in caplog.text


# --- hostile hands --------------------------------------------------------------------------------------------------


def reseal(path: Path, edit: Callable[[dict[str, Any]], object] = lambda manifest: None) -> None:
    """Give a folder a manifest whose sizes and hashes fit its files, as an attacker would."""
    manifest = json.loads((path / "manifest.json").read_text())
    for name, entry in manifest["files"].items():
        data = (path / name).read_bytes()
        entry |= {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data)}
    edit(manifest)
    (path / "manifest.json").write_text(json.dumps(manifest))


HOSTILE: dict[str, Callable[[dict[str, Any]], object]] = {
    "path out": lambda m: m["files"].update({"../../secret.safetensors": m["files"]["state.json"]}),
    "absolute path": lambda m: m["files"].update({"/etc/passwd": m["files"]["state.json"]}),
    "group out": lambda m: m["tensors"].update({"../../secret": {}}),
    "group and file out": lambda m: (
        m["tensors"].update({"../x": {}}),
        m["files"].update({"../x.safetensors": m["files"]["state.json"]}),
    ),
    "nul": lambda m: m["files"].update({"a\0b": m["files"]["state.json"]}),
    "escape codes": lambda m: m["files"].update({"\x1b[2J": m["files"]["state.json"]}),
    "huge size": lambda m: m["files"]["state.json"].update(size=2**62),
    "size beyond 64 bits": lambda m: m["files"]["state.json"].update(size=10**400),
    "negative size": lambda m: m["files"]["state.json"].update(size=-1),
    "size as text": lambda m: m["files"]["state.json"].update(size="27"),
    "huge shape": lambda m: m["tensors"]["weights"]["a.bias"].update(shape=[2**62, 2**62]),
    "negative shape": lambda m: m["tensors"]["weights"]["a.bias"].update(shape=[-3]),
    "other shape": lambda m: m["tensors"]["weights"]["a.bias"].update(shape=[3, 1]),
    "other dtype": lambda m: m["tensors"]["weights"]["a.bias"].update(dtype="F16"),
    "other norm": lambda m: m["tensors"]["weights"]["a.bias"].update(norm=1.0),
    "norm nan": lambda m: m["tensors"]["weights"]["a.bias"].update(norm=float("nan")),
    "more tensors": lambda m: m["tensors"]["weights"].update({"c": m["tensors"]["weights"]["a.bias"]}),
    "fewer tensors": lambda m: m["tensors"]["weights"].pop("a.bias"),
    "short hash": lambda m: m["files"]["state.json"].update(sha256=""),
    "newer version": lambda m: m.update(version=2, more="fields"),
    "version as text": lambda m: m.update(version="1"),
    "no version": lambda m: m.pop("version"),
    "other iteration": lambda m: m.update(iteration=1),
    "iteration as float": lambda m: m.update(iteration=2.0),
    "iteration as bool": lambda m: m.update(iteration=True),
    "no state": lambda m: m["files"].pop("state.json"),
    "unlisted tensors": lambda m: m["files"].pop("weights.safetensors"),
    "unknown field": lambda m: m.update(run="rm -rf"),
    "files as list": lambda m: m.update(files=list(m["files"])),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_manifest(two: Path, name: str) -> None:
    (two.parent / "secret.safetensors").write_text("secret")
    reseal(two / "step-000002")
    assert same(checkpoint.load(two, warn=silent), *contents(2))
    reseal(two / "step-000002", HOSTILE[name])
    loaded, said = load(two)
    assert same(loaded, *contents(1))
    assert len(said) == 1
    assert said[0].isprintable()


def test_another_version_is_named_as_such(two: Path) -> None:
    reseal(two / "step-000002", HOSTILE["newer version"])
    with pytest.raises(CheckpointError, match=r"manifest\.json has format version 2; this release reads version 1"):
        checkpoint.verify(two / "step-000002")


def start(data: bytes) -> str:
    """A short name for a test."""
    return repr(data[:16])


@pytest.mark.parametrize(
    "data",
    [b"", b"null", b"[]", b"{", b"\xff", b"[" * 200_000, b'{"version":' * 50_000, b"1" * 5000, b"NaN"],
    ids=start,
)
def test_a_manifest_that_is_none(two: Path, data: bytes) -> None:
    (two / "step-000002" / "manifest.json").write_bytes(data)
    damaged(two, "manifest.json")


def test_a_manifest_beyond_all_bounds_is_not_read(two: Path) -> None:
    os.truncate(two / "step-000002" / "manifest.json", 2**40)  # sparse
    damaged(two, f"manifest.json has {2**40} bytes, more than")


@pytest.mark.parametrize("name", FILES)
def test_links_and_pipes_are_not_opened(two: Path, name: str) -> None:
    path = two / "step-000002" / name
    shutil.move(path, two.parent / name)
    path.symlink_to(two.parent / name)
    damaged(two, f"{name} is not a plain file")
    path.unlink()
    os.mkfifo(path)  # opening it would never end
    damaged(two, f"{name} is not a plain file")


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (str(self.path),))


@pytest.mark.parametrize("name", [name for name in FILES if name != "manifest.json"])
@pytest.mark.parametrize("zipped", [False, True])
def test_nothing_is_unpickled(two: Path, tmp_path: Path, name: str, zipped: bool) -> None:
    path = two / "step-000002" / name
    bomb = Bomb(tmp_path / "boom")
    if zipped:
        torch.save({"w": bomb}, path)
    else:
        path.write_bytes(pickle.dumps(bomb))
    reseal(two / "step-000002")
    damaged(two, name)
    assert not (tmp_path / "boom").exists()


def _safetensors(header: bytes, data: bytes = b"") -> bytes:
    return len(header).to_bytes(8, "little") + header + data


@pytest.mark.parametrize(
    "data",
    [
        b"\xff" * 16,
        _safetensors(b"{}" + b" " * 6)[:-1],
        _safetensors(b"[" * 5000),
        _safetensors(b'{"a.bias":{"dtype":"BF16","shape":[3],"data_offsets":[0,6]}}'),
        _safetensors(b'{"a.bias":{"dtype":"BF16","shape":[3],"data_offsets":[0,6]}}', b"\0" * 600),
        _safetensors(b'{"a.bias":{"dtype":"BF16","shape":[9223372036854775807,4],"data_offsets":[0,6]}}', b"\0" * 6),
        _safetensors(b'{"a.bias":{"dtype":"F4","shape":[12],"data_offsets":[0,6]}}', b"\0" * 6),
        _safetensors(b'{"a.bias":{"dtype":"??","shape":[3],"data_offsets":[0,6]}}', b"\0" * 6),
        _safetensors(b'{"a.bias":{"dtype":"BF16","shape":[3],"data_offsets":[6,0]}}', b"\0" * 6),
    ],
    ids=range(9),
)
def test_a_hostile_tensor_file(two: Path, data: bytes) -> None:
    (two / "step-000002" / "weights.safetensors").write_bytes(data)
    reseal(two / "step-000002")
    damaged(two, "weights.safetensors")


def test_a_tensor_that_is_not_finite_is_not_loaded(two: Path) -> None:
    data = _safetensors(b'{"a.bias":{"dtype":"BF16","shape":[1],"data_offsets":[0,2]}}', b"\xc0\x7f")  # NaN
    (two / "step-000002" / "weights.safetensors").write_bytes(data)
    reseal(
        two / "step-000002",
        lambda m: m["tensors"].update(weights={"a.bias": {"shape": [1], "dtype": "BF16", "norm": 0.0}}),
    )
    damaged(two, "weights.safetensors")


@pytest.mark.parametrize(
    "data", [b"[]", b"null", b'{"a": NaN}', b'{"a": -Infinity}', b"[" * 100_000, b"\xff", b"9" * 9999], ids=start
)
def test_a_hostile_state(two: Path, data: bytes) -> None:
    (two / "step-000002" / "state.json").write_bytes(data)
    reseal(two / "step-000002")
    damaged(two, "state.json")


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    folder = tmp_path_factory.mktemp("fuzz")
    path = checkpoint.save(folder, 2, *contents(2, size=3))
    return path, (path / "manifest.json").read_bytes()


def error_or_identical(path: Path, data: bytes) -> None:
    """With this manifest, reading the folder raises CheckpointError or gives what was saved, bit by bit."""
    (path / "manifest.json").write_bytes(data)
    try:
        loaded = checkpoint.read(path)
    except CheckpointError as error:
        text = str(error)
        assert text.isprintable(), text
    else:
        assert loaded.iteration == 2
        assert same(loaded, *contents(2, size=3))


@settings(max_examples=250, deadline=None)
@given(
    edits=st.lists(st.tuples(st.integers(0, 2**16), st.integers(0, 6), st.binary(max_size=8)), min_size=1, max_size=3)
)
def test_fuzz_manifest_bytes(fuzzed: tuple[Path, bytes], edits: list[tuple[int, int, bytes]]) -> None:
    path, data = fuzzed
    for at, cut, put in edits:
        at %= len(data) + 1
        data = data[:at] + put + data[at + cut :]
    error_or_identical(path, data)


def paths(value: Any, here: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield here
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield from paths(value[key], (*here, key))


@settings(max_examples=250, deadline=None)
@given(data=st.data())
def test_fuzz_manifest_values(fuzzed: tuple[Path, bytes], data: st.DataObject) -> None:
    path, original = fuzzed
    manifest = json.loads(original)
    *where, last = data.draw(st.sampled_from([p for p in paths(manifest) if p]))
    inner = manifest
    for key in where:
        inner = inner[key]
    if data.draw(st.booleans()) or not isinstance(inner, dict):
        inner[last] = data.draw(JSON | st.floats() | st.integers(-3, 3) | st.just("F32"))
    else:
        inner[data.draw(TEXT | st.sampled_from(["../weights", "ema.safetensors", "a.bias"]))] = inner.pop(last)
    error_or_identical(path, json.dumps(manifest).encode())
