"""Which checkpoints are kept, what a save cleans up and what it leaves alone; the rehearsal of a save."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from unittest import mock

import pytest
from checkpoint_cases import FILES, Fault, contents, load, names, no_fsync, same, silent, two_checkpoints

from stepcredit.training import checkpoint, files
from stepcredit.training.checkpoint import CheckpointError


@pytest.fixture
def two(tmp_path: Path) -> Path:
    """A folder with the checkpoints 1 and 2."""
    return two_checkpoints(tmp_path / "checkpoints")


# --- keeping and pruning --------------------------------------------------------------------------------------------


def test_the_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    with no_fsync():
        for seed in range(1, 8):
            checkpoint.save(tmp_path, seed, *contents(seed), keep=2, best=3 if seed >= 3 else None, warn=silent)
            assert os.readlink(tmp_path / "latest") == f"step-00000{seed}"
        assert names(tmp_path) == {"step-000003", "step-000006", "step-000007", "latest", "best"}
        assert os.readlink(tmp_path / "best") == "step-000003"
        checkpoint.save(tmp_path, 8, *contents(8), keep=2, warn=silent)  # without `best` the link and its target stay
        assert names(tmp_path) == {"step-000003", "step-000007", "step-000008", "latest", "best"}
        checkpoint.save(tmp_path, 9, *contents(9), keep=1, best=9, warn=silent)
        assert names(tmp_path) == {"step-000009", "latest", "best"}


def test_a_best_that_does_not_exist_is_named_and_the_link_stays(two: Path) -> None:
    said: list[str] = []
    with no_fsync():
        checkpoint.save(two, 3, *contents(3), keep=9, best=2, warn=silent)
        checkpoint.save(two, 4, *contents(4), keep=9, best=7, warn=said.append)
    assert len(said) == 1
    assert "step-000007" in said[0]
    assert os.readlink(two / "best") == "step-000002"


def test_only_good_checkpoints_count_as_kept(two: Path) -> None:
    with no_fsync():
        checkpoint.save(two, 3, *contents(3), keep=9)
        (two / "step-000003" / "ema.safetensors").unlink()
        checkpoint.save(two, 4, *contents(4), keep=2)
    assert names(two) == {"step-000002", "step-000003", "step-000004", "latest"}


def test_pruning_touches_only_what_is_ours(two: Path) -> None:
    elsewhere = two.parent / "moved"
    shutil.move(two / "step-000001", elsewhere)
    (two / "step-000001").symlink_to(elsewhere)  # moved to another disk by its owner
    (two / "step-000002" / "notes.txt").write_text("mine")
    (two / "step-000000").mkdir()
    (two / "step-000000" / "model.bin").write_text("not ours")
    for name in ("step-7", "step-0000001", "step-000001.bak", "step-000001.tmp.d", "my-step-000001"):
        shutil.copytree(elsewhere, two / name)
    (two / "step-000001.tmp").write_text("a file")
    (two / "step-000005.tmp" / "deep").mkdir(parents=True)
    before = {path.relative_to(two.parent): path.is_dir() or path.read_bytes() for path in two.parent.rglob("*")}
    said: list[str] = []
    with no_fsync():
        for seed in (3, 4):
            checkpoint.save(two, seed, *contents(seed), keep=1, warn=said.append)
    after = {path.relative_to(two.parent): path.is_dir() or path.read_bytes() for path in two.parent.rglob("*")}
    assert before.items() <= after.items()
    assert names(two / "step-000004") == set(FILES)
    assert not (two / "step-000003").exists()
    assert len(said) == 2  # step-000005.tmp, at each save
    assert all("step-000005.tmp" in text for text in said)


def test_leftovers_of_a_crash_go_at_the_next_save(two: Path) -> None:
    shutil.copytree(two / "step-000002", two / "step-000003.tmp")
    (two / "step-000003.tmp" / "manifest.json").unlink()
    shutil.copytree(two / "step-000002", two / "step-000009.tmp")  # complete, but never renamed
    shutil.copytree(two / "step-000002", two / "rehearsal.tmp")
    (two / "latest.tmp").symlink_to("step-000009")
    loaded, said = load(two)
    assert loaded.iteration == 2
    assert [name for name in ("step-000003.tmp", "step-000009.tmp") if any(name in text for text in said)] == [
        "step-000003.tmp", "step-000009.tmp",
    ]  # fmt: skip
    with no_fsync():
        checkpoint.save(two, 3, *contents(3), keep=3, warn=silent)
    assert names(two) == {"step-000001", "step-000002", "step-000003", "latest"}


def test_saving_again(two: Path) -> None:
    inode = (two / "step-000002").stat().st_ino
    with no_fsync():
        checkpoint.save(two, 2, *contents(2), warn=silent)
        assert (two / "step-000002").stat().st_ino == inode
        checkpoint.save(two, 2, *contents(7), warn=silent)
    assert names(two) == {"step-000001", "step-000002", "latest"}
    loaded = checkpoint.load(two, warn=silent)
    assert loaded.iteration == 2
    assert same(loaded, *contents(7))


def test_saving_over_a_damaged_one_moves_it_aside(two: Path) -> None:
    said: list[str] = []
    with no_fsync():
        for k in range(2):
            (two / "step-000002" / "state.json").write_text("{}")
            checkpoint.save(two, 2, *contents(2), warn=said.append)
            assert f"step-000002.damaged-{k}" in said[-1]
    assert names(two) == {"step-000001", "step-000002", "step-000002.damaged-0", "step-000002.damaged-1", "latest"}
    assert same(checkpoint.load(two, warn=silent), *contents(2))


def test_saving_over_a_linked_one_leaves_its_target(two: Path) -> None:
    shutil.move(two / "step-000002", two.parent / "moved")
    (two / "step-000002").symlink_to(two.parent / "moved")
    with no_fsync():
        checkpoint.save(two, 2, *contents(7), warn=silent)
    assert same(checkpoint.load(two, warn=silent), *contents(7))
    assert same(checkpoint.read(two.parent / "moved"), *contents(2))


def test_an_old_one_left_by_a_crash_between_two_renames_is_used(two: Path) -> None:
    (two / "step-000002").rename(two / "step-000002.old")
    assert same(checkpoint.load(two, warn=silent), *contents(2))
    with no_fsync():
        checkpoint.save(two, 3, *contents(3), warn=silent)
    assert names(two) == {"step-000002", "step-000003", "latest"}


def test_an_old_one_beside_its_successor_is_used_only_if_that_is_damaged(two: Path) -> None:
    (two / "step-000002").rename(two / "step-000002.old")
    with no_fsync():
        shutil.move(checkpoint.save(two.parent / "other", 2, *contents(7)), two / "step-000002")
    assert same(checkpoint.load(two, warn=silent), *contents(7))
    (two / "step-000002" / "state.json").unlink()
    assert same(checkpoint.load(two, warn=lambda text: None), *contents(2))
    with no_fsync():
        checkpoint.save(two, 3, *contents(3), keep=9, warn=silent)  # must not take the old one, the good one, away
    assert same(checkpoint.read(two / "step-000002.old"), *contents(2))


def test_latest_may_dangle_and_load_does_not_need_it(two: Path) -> None:
    (two / "latest").unlink()
    assert checkpoint.load(two, warn=silent).iteration == 2
    (two / "latest").symlink_to("step-000099")
    assert checkpoint.load(two, warn=silent).iteration == 2


# --- rehearsal ------------------------------------------------------------------------------------------------------


def test_rehearsal_leaves_nothing(two: Path, tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    checkpoint.rehearse_write(two, *contents(3))
    checkpoint.rehearse_write(tmp_path / "absent", *contents(3))
    assert sorted(tmp_path.rglob("*")) == before
    checkpoint.rehearse_write(tmp_path, *contents(3))
    assert sorted(tmp_path.rglob("*")) == before


def test_rehearsal_finds_a_full_disk_at_every_act(tmp_path: Path) -> None:
    fault = Fault()
    with no_fsync(), mock.patch.object(files, "_point", fault):
        checkpoint.rehearse_write(tmp_path / "c", *contents(3))
    cleaning = fault.acts.index("rename rehearsal.link.tmp to rehearsal.link")
    for n in range(cleaning + 1):
        full = mock.patch.object(files, "_point", Fault(n))
        with no_fsync(), full, pytest.raises(CheckpointError, match="No space left"):
            checkpoint.rehearse_write(tmp_path / "c", *contents(3))
        assert list(tmp_path.iterdir()) == []


def test_rehearsal_wants_room_for_a_run(two: Path, tmp_path: Path) -> None:
    size = sum(path.stat().st_size for path in (two / "step-000001").iterdir() if path.name != "manifest.json")
    # keep 3, the best and the one being written: 5. Without checkpoints 4 more than the rehearsal, here 2.
    for folder, copies in ((tmp_path / "new", 4), (two, 2)):
        with mock.patch.object(shutil, "disk_usage", return_value=mock.Mock(free=copies * size)):
            checkpoint.rehearse_write(folder, *contents(1), keep=3)
        with (
            mock.patch.object(shutil, "disk_usage", return_value=mock.Mock(free=copies * size - 1)),
            pytest.raises(CheckpointError, match="5 checkpoints"),
        ):
            checkpoint.rehearse_write(folder, *contents(1), keep=3)


def test_rehearsal_in_a_place_that_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "c").write_text("a file")
    with pytest.raises(CheckpointError, match="cannot be written"):
        checkpoint.rehearse_write(tmp_path / "c", *contents(1))
    with pytest.raises(CheckpointError, match="cannot save"):
        checkpoint.save(tmp_path / "c", 1, *contents(1))
