"""Checkpoints that survive a crash at any moment: ``step-NNNNNN/`` folders, ``latest`` and ``best`` links to them.

A save goes ``step-NNNNNN.tmp`` -> files, each fsynced -> manifest -> read back and compared -> renamed -> ``latest``
repointed -> older ones pruned. So a name without ``.tmp`` is only ever given to a checkpoint that was whole on the
disk, and nothing is removed before that. The format is described in ``manifest.py``.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from stepcredit.training import files
from stepcredit.training.manifest import (
    MANIFEST,
    STATE,
    VERSION,
    CheckpointError,
    FileEntry,
    Manifest,
    is_good,
    is_ours,
    read_contents,
    step_name,
    step_of,
    steps,
    tensor_file,
    verify,
)
from stepcredit.training.snapshot import Snapshot, safetensors_stream, snapshot

__all__ = ["Checkpoint", "CheckpointError", "Manifest", "load", "read", "rehearse_write", "save", "steps", "verify"]

LATEST, BEST = "latest", "best"
_REHEARSAL = "rehearsal.tmp"
_log = logging.getLogger(__name__)
Warn = Callable[[str], None]


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint in memory, every byte of it verified."""

    iteration: int
    tensors: dict[str, dict[str, Tensor]]
    """By group and name, on the CPU."""
    state: dict[str, Any]
    path: Path


def save(
    folder: Path,
    iteration: int,
    tensors: Mapping[str, Mapping[str, Tensor]],
    state: Mapping[str, Any],
    keep: int = 2,
    best: int | None = None,
    warn: Warn = _log.warning,
) -> Path:
    """Write the checkpoint of an iteration, repoint ``latest``, prune; returns its folder, ``folder/step-NNNNNN``.

    ``tensors`` are groups of named tensors (group ``weights`` becomes ``weights.safetensors``); ``state`` is a JSON
    object. Saving an iteration again is nothing if the contents are equal, and otherwise replaces it. ``best`` is the
    iteration whose checkpoint the link ``best`` is to name; without it the link stays. The ``keep`` newest good
    checkpoints and the best are kept; of the others only folders with our manifest and nothing else in them go.
    Whatever cannot be cleaned up is told to ``warn``.

    Raises ValueError for ``keep < 1`` or a negative iteration, and CheckpointError for a tensor that is not finite, for
    contents that the format cannot hold, and for a disk that fails; the checkpoints before it are then intact.
    """
    if keep < 1 or iteration < 0:
        raise ValueError(f"save needs keep >= 1 and iteration >= 0; got keep={keep}, iteration={iteration}")
    contents = snapshot(tensors, state)
    target = folder / step_name(iteration)
    try:
        _make(folder)
        tidy(folder, warn)
        _place(_stage(folder / f"{target.name}.tmp", iteration, contents), target, warn)
        files.point_link(folder / LATEST, target.name)
        if best is not None:
            _point_best(folder, best, target, warn)
        _prune(folder, keep, target, warn)
    except OSError as error:
        raise CheckpointError(
            f"cannot save checkpoint {target} ({error.strerror or error}); "
            "see that the disk has space and may be written to; earlier checkpoints are intact"
        ) from error
    return target


def load(folder: Path, warn: Warn = _log.warning) -> Checkpoint:
    """The newest good checkpoint of a folder.

    Every newer one that is damaged is told to ``warn``, with what is wrong, and so is a save that was cut short.
    Raises CheckpointError if none is good.
    """
    found = steps(folder)
    for path in sorted(folder.glob("step-*.tmp")):
        warn(f"{path} is left from a save that was cut short; it is not used")
    for path in found:
        try:
            return read(path)
        except CheckpointError as error:
            warn(f"{error}; looking for the checkpoint before it")
    if found:
        raise CheckpointError(f"none of the {len(found)} checkpoints in {folder} is good; restore one from a copy")
    raise CheckpointError(f"there is no checkpoint in {folder}")


def read(path: Path) -> Checkpoint:
    """The checkpoint of one folder (or of a link to one, as ``latest`` and ``best`` are).

    Raises CheckpointError that names the file and what is wrong.
    """
    manifest, tensors, state = read_contents(path)
    return Checkpoint(manifest.iteration, tensors, state, path)


def rehearse_write(
    folder: Path, tensors: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any], keep: int = 2
) -> None:
    """Write, read back and remove a dummy checkpoint, so that a run fails before its first iteration or never.

    Tries every act of a save (folders, files, renames, links), and sees that the disk has room for as many checkpoints
    as a run holds at once: ``keep``, the best, the one being written. Raises CheckpointError.
    """
    contents = snapshot(tensors, state)
    created = not folder.exists()
    staged, renamed, link = folder / _REHEARSAL, folder / f"{step_name(0)}.tmp", folder / "rehearsal.link"
    try:
        try:
            _make(folder)
            tidy(folder, _log.warning)
            manifest = _stage(staged, 0, contents)[1]
            files.rename(staged, renamed)
            files.point_link(link, renamed.name)
            size = sum(entry.size for entry in manifest.files.values())
            missing = max(0, keep + 1 - len(steps(folder))) * size - shutil.disk_usage(folder).free
        finally:
            with contextlib.suppress(OSError):
                link.unlink(missing_ok=True)
                link.with_name(link.name + ".tmp").unlink(missing_ok=True)
                tidy(folder, _log.warning)
                if created:
                    folder.rmdir()
    except OSError as error:
        raise CheckpointError(
            f"checkpoints cannot be written to {folder} ({error.strerror or error}); "
            "see that the disk has space and may be written to, or choose another --out"
        ) from error
    if missing > 0:
        raise CheckpointError(
            f"the disk of {folder} lacks {missing / 1e9:.2f} GB for the {keep + 2} checkpoints of {size / 1e9:.2f} GB "
            "that a run holds at once; free some space or choose another --out"
        )


def _make(folder: Path) -> None:
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        files.make_folder(folder)
        files.fsync_folder(folder.parent)


def _stage(path: Path, iteration: int, contents: Snapshot) -> tuple[Path, Manifest]:
    """Write a whole checkpoint into a new folder, read it back and compare. The folder is removed on failure."""
    files.make_folder(path)
    try:
        written = {
            tensor_file(group): files.write_stream(path / tensor_file(group), safetensors_stream(named))
            for group, named in contents.tensors.items()
        }
        written[STATE] = files.write_stream(path / STATE, [contents.state])
        manifest = Manifest(
            version=VERSION,
            iteration=iteration,
            files={name: FileEntry(sha256=digest, size=size) for name, (digest, size) in written.items()},
            tensors=contents.entries,
        )
        files.write_stream(path / MANIFEST, [manifest.model_dump_json(indent=1).encode()])
        files.fsync_folder(path)
        if verify(path) != manifest:
            raise CheckpointError(f"checkpoint {path}: {MANIFEST} reads back otherwise than it was written")
    except (OSError, CheckpointError):
        with contextlib.suppress(OSError):
            files.remove_flat_folder(path)
        raise
    return path, manifest


def _place(staged: tuple[Path, Manifest], target: Path, warn: Warn) -> None:
    """Give a staged checkpoint its name. One of that name and equal contents stays; another makes way."""
    path, manifest = staged
    if not target.exists() and not target.is_symlink():
        files.rename(path, target)
        return
    try:
        present = verify(target)
    except CheckpointError as error:
        aside = next(a for k in range(10**6) if not (a := target.with_name(f"{target.name}.damaged-{k}")).exists())
        warn(f"{error}; it is moved to {aside.name}")
        files.rename(target, aside)
        files.rename(path, target)
        return
    if present.files == manifest.files:
        files.remove_flat_folder(path)
        return
    old = target.with_name(target.name + ".old")  # load() knows this name: a crash between the renames loses nothing
    files.rename(target, old)
    try:
        files.rename(path, target)
    except OSError:
        with contextlib.suppress(OSError):
            files.rename(old, target)
        raise
    _try_remove(old, warn)


def _point_best(folder: Path, best: int, saved: Path, warn: Warn) -> None:
    wanted = folder / step_name(best)
    if _link_target(folder / BEST) == wanted.name and wanted.is_dir():
        return
    try:
        if wanted != saved:
            verify(wanted)
    except CheckpointError as error:
        warn(f"{error}; the link {BEST!r} stays as it was")
        return
    files.point_link(folder / BEST, wanted.name)


def tidy(folder: Path, warn: Warn) -> None:
    """Finish or undo what a crashed save left: ``.tmp`` folders go, ``.old`` ones go or get their name back.

    Raises OSError for a folder that cannot be read or renamed.
    """
    for path in sorted(folder.iterdir(), reverse=True):  # .tmp before .old, which may need its name
        if path.is_symlink() or not path.is_dir():
            continue
        if path.name == _REHEARSAL or (path.name.endswith(".tmp") and _is_step(path.name.removesuffix(".tmp"))):
            _try_remove(path, warn)
        elif path.name.endswith(".old") and step_of(path.name) is not None:
            current = path.with_name(path.name.removesuffix(".old"))
            if not current.exists():
                files.rename(path, current)
            elif is_good(current):
                _try_remove(path, warn)


def _prune(folder: Path, keep: int, saved: Path, warn: Warn) -> None:
    """Remove what is older than the ``keep``-th good checkpoint, except the best and what is not ours."""
    found = [path for path in steps(folder) if _is_step(path.name)]
    good = 0
    for path in found if len(found) > keep else []:
        if good < keep:
            good += path == saved or is_good(path)
        elif path != saved and path.name != _link_target(folder / BEST) and is_ours(path):
            _try_remove(path, warn)


def _try_remove(path: Path, warn: Warn) -> None:
    """Remove a folder of ours, as ``.tmp`` first: a crash half-way must not leave what looks like a checkpoint."""
    try:
        if not path.name.endswith(".tmp"):
            doomed = path.with_name(path.name.removesuffix(".old") + ".tmp")
            files.rename(path, doomed)
            path = doomed
        files.remove_flat_folder(path)
    except OSError as error:
        warn(f"the old checkpoint {path} could not be removed ({error.strerror or error}); remove it by hand")


def _is_step(name: str) -> bool:
    return step_of(name) is not None and not name.endswith(".old")


def _link_target(link: Path) -> str | None:
    return link.readlink().name if link.is_symlink() else None
