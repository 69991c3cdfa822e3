"""Files that a crash or a full disk cannot leave half done, and run folders that stay where they belong."""

from __future__ import annotations

import errno
import hashlib
import os
from pathlib import Path

import pytest

from stepcredit.errors import UserError
from stepcredit.training import files


class Disk:
    """Stands in for ``files._point``: records every act, and fails at the ones it is told to."""

    def __init__(self, fail: set[int] | None = None) -> None:
        self.acts: list[str] = []
        self.fail = fail or set()

    def __call__(self, act: str) -> None:
        self.acts.append(act)
        if len(self.acts) - 1 in self.fail:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_write_stream_returns_digest_and_size_of_the_bytes(tmp_path: Path) -> None:
    digest, size = files.write_stream(tmp_path / "f", [b"ab", memoryview(b""), memoryview(b"c")])
    # SHA-256 of "abc", FIPS 180-2 appendix B.1.
    assert digest == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert size == 3
    assert (tmp_path / "f").read_bytes() == b"abc"


def test_write_text_atomic_writes_utf8_without_touching_newlines(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    for text in ("", "grün\r\nzwei\n", "again"):
        files.write_text_atomic(path, text)
        assert path.read_bytes() == text.encode()
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.txt"]


def test_write_text_atomic_syncs_the_file_before_the_rename_and_the_folder_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[object] = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (calls.append(os.fstat(fd).st_ino), fsync(fd)))
    monkeypatch.setattr(os, "replace", lambda a, b: (calls.append("replace"), replace(a, b)))
    files.write_text_atomic(tmp_path / "a", "x")
    assert calls == [(tmp_path / "a").stat().st_ino, "replace", tmp_path.stat().st_ino]


def test_a_full_disk_leaves_the_old_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.txt"
    files.write_text_atomic(path, "old")
    disk = Disk()
    monkeypatch.setattr(files, "_point", disk)
    files.write_text_atomic(path, "old")
    for n in range(len(disk.acts)):
        monkeypatch.setattr(files, "_point", Disk({n}))
        with pytest.raises(OSError, match="No space left"):
            files.write_text_atomic(path, "new")
        last = n == len(disk.acts) - 1  # the folder's fsync: the rename is done
        assert path.read_text() == ("new" if last else "old")
        assert [entry.name for entry in tmp_path.iterdir()] == ["a.txt"]


def test_append_line_appends(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    files.append_line(path, '{"a": "ü"}')
    files.append_line(path, "")
    files.append_line(path, "last")
    assert path.read_bytes() == '{"a": "ü"}\n\nlast\n'.encode()


@pytest.mark.parametrize("line", ["a\nb", "a\n", "a\rb"])
def test_append_line_takes_one_line(tmp_path: Path, line: str) -> None:
    with pytest.raises(ValueError, match="one line"):
        files.append_line(tmp_path / "log", line)
    assert not (tmp_path / "log").exists()


def test_append_line_never_runs_into_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b'{"a": 1}\n{"a":')
    files.append_line(path, '{"a": 3}')
    assert path.read_bytes() == b'{"a": 1}\n{"a":\n{"a": 3}\n'


def test_append_line_takes_back_what_a_failure_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "log"
    files.append_line(path, "one")
    disk = Disk()
    monkeypatch.setattr(files, "_point", disk)
    files.append_line(path, "two")
    before = path.read_bytes()
    for n in range(len(disk.acts)):
        monkeypatch.setattr(files, "_point", Disk({n}))
        with pytest.raises(OSError, match="No space left"):
            files.append_line(path, "three")
        assert path.read_bytes() == before
    monkeypatch.setattr(files, "_point", Disk())
    files.append_line(path, "three")
    assert path.read_bytes() == b"one\ntwo\nthree\n"


def _upto(iteration: int):
    return lambda line: line["iteration"] <= iteration


def test_truncate_drops_later_torn_and_unreadable_lines(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(
        b'{"iteration": 0}\n{"iteration": 1, "x": "\xe2\x80\xa8"}\n\0\0\0\n[1]\n\xff\n{"iteration": 2}\n'
        b'{"iteration": 3}\n{"iteration": 2}'
    )
    # Dropped: NULs, a list, bad UTF-8, iteration 3, and the last line, which has no newline. U+2028 ends no line.
    assert files.truncate_lines_after(path, _upto(2)) == 5
    assert path.read_bytes() == b'{"iteration": 0}\n{"iteration": 1, "x": "\xe2\x80\xa8"}\n{"iteration": 2}\n'


def test_truncate_leaves_alone_what_needs_no_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    assert files.truncate_lines_after(path, _upto(9)) == 0
    assert not path.exists()
    path.write_bytes(b'{"iteration": 1}\n')
    disk = Disk()
    monkeypatch.setattr(files, "_point", disk)
    assert files.truncate_lines_after(path, _upto(1)) == 0
    assert disk.acts == []
    assert files.truncate_lines_after(path, lambda line: False) == 1
    assert path.read_bytes() == b""


def test_truncate_survives_json_nested_without_end(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"[" * 100_000 + b'\n{"iteration": 1}\n')
    assert files.truncate_lines_after(path, _upto(1)) == 1


def test_truncate_lets_errors_of_the_predicate_through(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n')
    with pytest.raises(KeyError):
        files.truncate_lines_after(path, _upto(1))
    assert path.read_bytes() == b'{"step": 1}\n'


@pytest.mark.parametrize("name", ["a", "compose-stepwise", "2024.run_3", "x" * 100, "a..b"])
def test_run_names(tmp_path: Path, name: str) -> None:
    assert files.safe_run_dir(tmp_path, name) == tmp_path / name
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "../x", "a/b", "/etc", "a\\b", "-rf", ".hidden", "a b", "ä", "a\n", "a\0", "x" * 101, "~", "٣"],
)
def test_refused_run_names(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match="run name"):
        files.safe_run_dir(tmp_path, name)


def test_a_run_folder_may_not_be_a_link_out(tmp_path: Path) -> None:
    out, other = tmp_path / "runs", tmp_path / "other"
    (out / "real").mkdir(parents=True)
    other.mkdir()
    (out / "away").symlink_to(other)
    (out / "up").symlink_to("..")
    (out / "self").symlink_to(".")
    (out / "loose").symlink_to(tmp_path / "absent")
    for name in ("away", "up", "self", "loose"):
        with pytest.raises(UserError, match="link to somewhere else"):
            files.safe_run_dir(out, name)
    assert files.safe_run_dir(out, "real") == out / "real"


def test_a_runs_folder_may_itself_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "runs").symlink_to("disk")
    assert files.safe_run_dir(tmp_path / "runs", "a") == tmp_path / "runs" / "a"


def test_remove_flat_folder_removes_no_more_than_that(tmp_path: Path) -> None:
    flat, deep, link = tmp_path / "flat", tmp_path / "deep", tmp_path / "link"
    for folder in (flat, deep / "inner"):
        folder.mkdir(parents=True)
    for path in (flat / "a", flat / "b", deep / "a", tmp_path / "outside"):
        path.write_text("x")
    (flat / "to-outside").symlink_to(tmp_path / "outside")
    (flat / "to-deep").symlink_to(deep)
    link.symlink_to(deep)
    files.remove_flat_folder(flat)
    files.remove_flat_folder(link)
    with pytest.raises(OSError, match="'inner'"):
        files.remove_flat_folder(deep)
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")) == [
        "deep", "deep/a", "deep/inner", "outside",
    ]  # fmt: skip


def test_point_link_replaces_a_link_and_clears_a_leftover(tmp_path: Path) -> None:
    (tmp_path / "latest.tmp").symlink_to("crashed")
    for target in ("one", "two"):
        files.point_link(tmp_path / "latest", target)
        assert os.readlink(tmp_path / "latest") == target
    assert [entry.name for entry in tmp_path.iterdir()] == ["latest"]


def test_digest_is_of_what_was_meant_not_of_the_file(tmp_path: Path) -> None:
    digest, _ = files.write_stream(tmp_path / "f", (chunk for chunk in [b"x" * 10_000]))
    (tmp_path / "f").write_bytes(b"y")
    assert digest == hashlib.sha256(b"x" * 10_000).hexdigest()


def test_the_last_line_is_read_and_replaced_whole(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text('{"k": 1}\n{"k": 2}\n')
    assert files.last_line(path) == {"k": 2}
    files.replace_last_line(path, '{"k": 3, "more": true}')
    assert path.read_text() == '{"k": 1}\n{"k": 3, "more": true}\n'
    for text in ("", '{"k": 1}', '{"k": 1}\n{"k"', "[1]\n"):
        path.write_text(text)
        assert files.last_line(path) == {}
