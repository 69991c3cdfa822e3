"""Saves on disks that are full, broken or lying, and under kill -9.

Run as a program (``python test_checkpoint_crash.py FOLDER``), this file makes the folders of the kill tests: it forks
one child per act of a save, which kills itself before that act.
"""

from __future__ import annotations

import errno
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from checkpoint_cases import FILES, Fault, contents, names, no_fsync, same, silent, two_checkpoints

from stepcredit.training import checkpoint, files
from stepcredit.training.checkpoint import CheckpointError


@pytest.fixture
def two(tmp_path: Path) -> Path:
    """A folder with the checkpoints 1 and 2."""
    return two_checkpoints(tmp_path / "checkpoints")


# --- disks that fail ------------------------------------------------------------------------------------------------


Save = tuple[int, int, int]
"""Iteration, seed of the contents, keep."""
SAVES: dict[str, Save] = {"next, pruning": (3, 3, 1), "replacing": (2, 7, 2), "again": (2, 2, 2)}


def acts_of(folder: Path, save: Save) -> list[str]:
    copy = folder.with_name("dry")
    shutil.copytree(folder, copy, symlinks=True)
    fault = Fault()
    with mock.patch.object(files, "_point", fault):
        checkpoint.save(copy, save[0], *contents(save[1]), keep=save[2])
    shutil.rmtree(copy)
    return fault.acts


def old_or_new(folder: Path, save: Save) -> bool:
    """Whether the newest checkpoint is the new one; if not it is the old one. Each is whole and bit-identical."""
    loaded = checkpoint.load(folder, warn=lambda text: None)
    new = loaded.iteration == save[0] and same(loaded, *contents(save[1]))
    assert new or (loaded.iteration == 2 and same(loaded, *contents(2)))
    return new


def recovers(folder: Path, save: Save) -> None:
    """The next saves succeed in silence and leave nothing of the crash behind."""
    with no_fsync():
        checkpoint.save(folder, save[0], *contents(save[1]), keep=save[2], warn=silent)
        assert old_or_new(folder, save)
        checkpoint.save(folder, 9, *contents(9), keep=1, warn=silent)
    assert names(folder) == {"step-000009", "latest"}
    assert names(folder / "step-000009") == set(FILES)


@pytest.mark.parametrize("count", [1, 10**6], ids=["once", "for good"])
@pytest.mark.parametrize("kind", SAVES)
def test_a_full_disk_at_every_act(two: Path, kind: str, count: int) -> None:
    save = SAVES[kind]
    outcomes = []
    with no_fsync():
        acts = acts_of(two, save)
        for n in range(len(acts)):
            folder = two.with_name(f"{n}")
            shutil.copytree(two, folder, symlinks=True)
            said: list[str] = []
            with mock.patch.object(files, "_point", Fault(n, count)):
                try:
                    checkpoint.save(folder, save[0], *contents(save[1]), keep=save[2], warn=said.append)
                except CheckpointError as error:
                    said.append(str(error))
            assert any("No space left" in text for text in said), acts[n]
            outcomes.append(old_or_new(folder, save))
            recovers(folder, save)
            shutil.rmtree(folder)
    assert kind == "again" or (outcomes[0], outcomes[-1]) == (False, True)
    assert outcomes == sorted(outcomes)  # once the new one is there it stays


@pytest.mark.parametrize("call", ["fsync", "rename", "replace", "symlink", "mkdir", "unlink", "rmdir"])
def test_a_system_call_that_fails(two: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    real = getattr(os, call)
    for n in range(8):
        folder = two.with_name(f"{n}")
        shutil.copytree(two, folder, symlinks=True)
        calls = []

        def failing(*args: Any, n: int = n, calls: list[Any] = calls, **kwargs: Any) -> Any:
            calls.append(args)
            if len(calls) - 1 == n:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return real(*args, **kwargs)

        said: list[str] = []
        with monkeypatch.context() as patch:
            patch.setattr(os, call, failing)
            try:
                checkpoint.save(folder, 3, *contents(3), keep=1, warn=said.append)
            except CheckpointError as error:
                said.append(str(error))
        if len(calls) > n:
            assert any("Input/output error" in text for text in said)
        old_or_new(folder, (3, 3, 1))
        recovers(folder, (3, 3, 1))


def test_a_file_that_cannot_grow(two: Path) -> None:
    """A real short write: the kernel refuses bytes beyond a limit (EFBIG)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    tensors, state = contents(3)
    tensors["weights"]["big"] = torch.ones(2**18)
    before = {path: path.stat().st_mtime_ns for path in two.rglob("*")}
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**19, hard))
    try:
        with pytest.raises(CheckpointError, match="File too large"):
            checkpoint.save(two, 3, tensors, state, warn=silent)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert {path: path.stat().st_mtime_ns for path in two.rglob("*")} == before
    assert same(checkpoint.load(two, warn=silent), *contents(2))


@pytest.mark.parametrize("name", FILES)
def test_a_disk_that_lies_is_found_out_before_anything_is_pruned(
    two: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    real = files.write_stream

    def lying(path: Path, chunks: Any) -> tuple[str, int]:
        result = real(path, chunks)
        if path.name == name:
            data = path.read_bytes()
            path.write_bytes(data[:-9] + b"\0" + data[-8:])
        return result

    monkeypatch.setattr(files, "write_stream", lying)
    with pytest.raises(CheckpointError, match=name):
        checkpoint.save(two, 3, *contents(3), keep=1, warn=silent)
    assert names(two) == {"step-000001", "step-000002", "latest"}
    assert os.readlink(two / "latest") == "step-000002"


def test_order_of_acts(two: Path) -> None:
    """Every file is on the disk before the manifest, the manifest before the name, the name before any removal."""
    acts = acts_of(two, SAVES["next, pruning"])
    order = [
        *(
            f"fsync {name}"
            for name in ("weights.safetensors", "ema.safetensors", "optimizer.safetensors", "state.json")
        ),
        "open manifest.json",
        "fsync manifest.json",
        "fsync step-000003.tmp",
        "rename step-000003.tmp to step-000003",
        "fsync dry",
        "rename latest.tmp to latest",
        "rename step-000002 to step-000002.tmp",
        "unlink manifest.json",
    ]
    at = [acts.index(act) for act in order]
    assert at == sorted(at)
    assert acts[at[8] + 1 :].count("fsync dry") == 3  # after `latest`, and after each renaming of a pruned one


def test_failing_to_prune_costs_nothing(two: Path) -> None:
    said: list[str] = []
    with mock.patch.object(files, "remove_flat_folder", side_effect=PermissionError(errno.EACCES, "Permission denied")):
        checkpoint.save(two, 3, *contents(3), keep=1, warn=said.append)
    assert len(said) == 2
    assert all("Permission denied" in text for text in said)
    assert checkpoint.load(two, warn=lambda text: None).iteration == 3


# --- kill -9 --------------------------------------------------------------------------------------------------------


BIG = 400
"""Side of the largest tensor in the kills by clock, so that they also come amid a write."""


def child(act: Callable[[], object]) -> int:
    """Wait status of a forked child that does this."""
    pid = os.fork()
    if pid == 0:
        try:
            act()
            os._exit(0)
        except BaseException as error:
            print(repr(error), file=sys.stderr)
            os._exit(1)
    return os.waitpid(pid, 0)[1]


def crash(folder: Path) -> None:
    """Fill ``folder/KIND/N`` with what a save leaves that is killed before its N-th act; ``first``: into nothing."""
    torch.set_num_threads(1)
    base = folder / "base"
    os.fsync = lambda fd: None  # a kill loses no page cache; power failures are the business of test_order_of_acts
    for seed in (1, 2):
        checkpoint.save(base, seed, *contents(seed))
    for kind, (iteration, seed, keep) in {"first": (3, 3, 1), **SAVES}.items():
        for n in range(1000):
            copy = folder / kind / f"{n:03d}"
            copy.parent.mkdir(exist_ok=True)
            if kind != "first":
                shutil.copytree(base, copy, symlinks=True)

            def killed(copy: Path = copy, n: int = n, it: int = iteration, s: int = seed, keep: int = keep) -> None:
                left = iter(range(n))
                files._point = lambda act: next(left, None) is None and os.kill(os.getpid(), signal.SIGKILL)
                checkpoint.save(copy, it, *contents(s), keep=keep)

            status = child(killed)
            if status == 0:
                break
            assert os.WIFSIGNALED(status), status
            assert os.WTERMSIG(status) == signal.SIGKILL
    big = contents(3, BIG)
    begin = time.perf_counter()
    checkpoint.save(folder / "timing", 3, *big)
    whole = time.perf_counter() - begin
    for n in range(20):
        copy = folder / "clock" / f"{n:03d}"
        shutil.copytree(base, copy, symlinks=True)

        def timed(copy: Path = copy, after: float = whole * (n + 0.5) / 16) -> None:
            signal.setitimer(signal.ITIMER_REAL, after)  # SIGALRM, of which no Python code is told here: death
            checkpoint.save(copy, 3, *big, keep=1)

        status = child(timed)
        assert status == 0 or os.WTERMSIG(status) == signal.SIGALRM, status


def test_kill_leaves_the_old_or_the_new(tmp_path: Path) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, __file__, str(tmp_path)], check=True, env=environment, timeout=300)
    for kind, save in SAVES.items():
        folders = sorted((tmp_path / kind).iterdir())[:-1]  # the last one was not killed
        with no_fsync():
            assert len(folders) == len(acts_of(tmp_path / "base", save)) > 20
        outcomes = [old_or_new(folder, save) for folder in folders]
        assert kind == "again" or (outcomes[0], outcomes[-1]) == (False, True)
        assert outcomes == sorted(outcomes)
        for folder in folders:
            recovers(folder, save)

    outcomes = []
    for folder in sorted((tmp_path / "first").iterdir())[:-1]:
        outcomes.append(bool(checkpoint.steps(folder)))
        if outcomes[-1]:
            assert same(checkpoint.load(folder, warn=silent), *contents(3))
        else:
            with pytest.raises(CheckpointError, match="there is no checkpoint"):
                checkpoint.load(folder, warn=lambda text: None)
        recovers(folder, (3, 3, 1))
    assert outcomes == sorted(outcomes)
    assert (outcomes[0], outcomes[-1]) == (False, True)

    for folder in sorted((tmp_path / "clock").iterdir()):
        loaded = checkpoint.load(folder, warn=lambda text: None)
        assert loaded.iteration in (2, 3)
        assert same(loaded, *contents(loaded.iteration, BIG if loaded.iteration == 3 else 40))
        recovers(folder, (3, 3, 1))


if __name__ == "__main__":
    crash(Path(sys.argv[1]))
