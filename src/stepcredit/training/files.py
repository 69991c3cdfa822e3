"""Small acts on the disk that a crash cannot leave half done.

Every act that changes the disk is announced to ``_point`` first, so that tests can put a fault or a kill before any
of them. Whoever reads a file written here sees the old content or the new, never a mixture.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from stepcredit.errors import UserError

if sys.platform != "win32":
    import fcntl

_RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", re.ASCII)


def _point(act: str) -> None:
    """Called before every act that changes the disk; does nothing. Tests replace it."""


def write_stream(path: Path, chunks: Iterable[bytes | memoryview]) -> tuple[str, int]:
    """Write chunks of bytes to a file and fsync it; returns the SHA-256 (hex) and the size of what was to be written.

    The digest is that of the bytes in memory: comparing it with the file shows whether the disk kept them.
    Raises OSError.
    """
    digest, size = hashlib.sha256(), 0
    _point(f"open {path.name}")
    with path.open("wb") as file:
        for chunk in chunks:
            _point(f"write {path.name}")
            file.write(chunk)
            digest.update(chunk)
            size += len(chunk)
        _point(f"fsync {path.name}")
        file.flush()
        os.fsync(file.fileno())
        if hasattr(os, "posix_fadvise"):  # so that reading it back reads the disk, not the memory it came from
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return digest.hexdigest(), size


def write_text_atomic(path: Path, text: str) -> None:
    """Give a file new UTF-8 content, all or nothing: temporary file, fsync, rename, fsync of the folder.

    Raises OSError; the file is then as it was before, or whole and new if only the last fsync failed.
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        write_stream(temporary, [text.encode()])
        _point(f"rename {path.name}")
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    fsync_folder(path.parent)


def append_line(path: Path, line: str) -> None:
    """Append one line (given without its newline) to a UTF-8 file, flushed and fsynced.

    A line torn by an earlier crash is ended first, so that the two never run together. Raises ValueError for text with
    a newline, and OSError after taking back what was written of the line.
    """
    if "\n" in line or "\r" in line:
        raise ValueError(f"append_line takes one line without a newline; got {line[:60]!r}")
    created = not path.exists()
    _point(f"open {path.name}")
    with path.open("a+b", buffering=0) as file:  # unbuffered: nothing may be written after a failure is reported
        end = file.seek(0, os.SEEK_END)
        if end:
            file.seek(end - 1)
        torn = end > 0 and file.read(1) != b"\n"
        rest = memoryview((("\n" if torn else "") + line + "\n").encode())
        try:
            while rest:
                _point(f"write {path.name}")
                rest = rest[file.write(rest) :]
            _point(f"fsync {path.name}")
            os.fsync(file.fileno())
        except OSError:
            with contextlib.suppress(OSError):
                file.truncate(end)
            raise
    if created:
        fsync_folder(path.parent)


def truncate_lines_after(path: Path, predicate: Callable[[dict[str, Any]], bool]) -> int:
    """Keep the lines of a JSON-lines file for whose object ``predicate`` is true; returns how many were dropped.

    For a resume: ``truncate_lines_after(metrics, lambda line: line["iteration"] <= done)``. A last line without a
    newline is torn and dropped, and so is a line that is no JSON object. The file is replaced atomically, and only if
    something is dropped; a file that does not exist has no lines. Raises OSError.
    """
    try:
        *lines, torn = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return 0
    kept = [line for line in lines if (entry := _object(line)) is not None and predicate(entry)]
    dropped = len(lines) - len(kept) + bool(torn)
    if dropped:
        write_text_atomic(path, b"".join(line + b"\n" for line in kept).decode())
    return dropped


def last_line(path: Path) -> dict[str, Any]:
    """The last line of a JSON-lines file as an object; empty if it is torn or no object. Raises OSError."""
    lines = path.read_bytes().split(b"\n")
    return _object(lines[-2]) or {} if len(lines) > 1 and not lines[-1] else {}


def replace_last_line(path: Path, line: str) -> None:
    """Put a line (given without its newline) in the place of a file's last, atomically. Raises OSError."""
    *before, _, _ = path.read_bytes().split(b"\n")
    write_text_atomic(path, b"".join(one + b"\n" for one in before).decode() + line + "\n")


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        entry = json.loads(line.decode())
    except (ValueError, RecursionError):  # includes what is not UTF-8
        return None
    return entry if isinstance(entry, dict) else None


@contextlib.contextmanager
def sole_writer(folder: Path) -> Iterator[None]:
    """Hold a run folder, so that no other process writes into it; UserError if one holds it already.

    The hold is the kernel's (flock) and ends with the process, however it ends. Where there is none (Windows, some
    network file systems) nothing is held.
    """
    if sys.platform == "win32":
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"another process is training the run {str(folder)!r}: wait until it has ended, or end it first"
            ) from None
        except OSError:
            pass
        yield
    finally:
        os.close(handle)


def safe_run_dir(out: Path, name: str) -> Path:
    """The folder of a run, ``out / name``, which need not exist; nothing is created.

    Raises UserError for a name that is not 1 to 100 letters, digits, ``.``, ``_`` and ``-`` beginning with a letter or
    digit, and for a folder that a symbolic link takes out of ``out``.
    """
    if not _RUN_NAME.fullmatch(name):
        raise UserError(
            f"run name {name[:120]!r} is not allowed; use up to 100 letters, digits, '.', '_' and '-', "
            "beginning with a letter or digit"
        )
    folder = out / name
    if folder.resolve().parent != out.resolve():
        raise UserError(f"run folder {str(folder)!r} is a link to somewhere else; choose another --name or --out")
    return folder


def fsync_folder(folder: Path) -> None:
    """Make the entries of a folder (what was created, renamed or removed in it) durable."""
    _point(f"fsync {folder.name}")
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(folder: Path) -> None:
    """Create a folder that does not exist, in one that does."""
    _point(f"mkdir {folder.name}")
    folder.mkdir()


def rename(source: Path, target: Path) -> None:
    """Rename a folder to a name that is free, durably."""
    _point(f"rename {source.name} to {target.name}")
    os.rename(source, target)
    fsync_folder(target.parent)


def point_link(link: Path, target: str) -> None:
    """Make ``link`` a symbolic link to the entry ``target`` of the same folder, replacing an older link atomically."""
    temporary = link.with_name(link.name + ".tmp")
    _point(f"unlink {temporary.name}")
    temporary.unlink(missing_ok=True)
    _point(f"symlink {temporary.name}")
    temporary.symlink_to(target)
    _point(f"rename {temporary.name} to {link.name}")
    os.replace(temporary, link)
    fsync_folder(link.parent)


def remove_flat_folder(folder: Path) -> None:
    """Remove a folder and the files in it; of a link, the link alone.

    Raises OSError, having removed nothing, if the folder holds other folders.
    """
    if folder.is_symlink():
        _point(f"unlink {folder.name}")
        folder.unlink()
        return
    entries = list(os.scandir(folder))
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            raise OSError(f"{folder} holds a folder {entry.name!r} that does not belong there")
    for entry in entries:
        _point(f"unlink {entry.name}")
        os.unlink(entry.path)
    _point(f"rmdir {folder.name}")
    folder.rmdir()
