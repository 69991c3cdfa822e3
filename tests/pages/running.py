"""Run a command line in this process, or only take it through the parser that would read it."""

from __future__ import annotations

import argparse
import ast
import importlib
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
from reading import PAGES, ROOT, blocks

from stepcredit.cli import COMMANDS, main
from stepcredit.errors import UserError
from stepcredit.rewards import registry


class _ReadError(Exception):
    """The real parser has taken the command line."""


def run(command: str) -> int:
    """Execute a command as the page has it: ``stepcredit`` in this process, ``torchrun`` in its own; the exit code."""
    program, *words = shlex.split(command)
    if program == "torchrun":
        return subprocess.run([sys.executable, "-m", "torch.distributed.run", *words], timeout=240).returncode
    assert program in ("stepcredit", "python"), f"`{command}` is none of ours to run"
    try:
        return main(words) if program == "stepcredit" else _script(words)
    except SystemExit as error:  # tyro's own complaint, or a script's last line
        return int(error.code or 0)


def _script(words: Sequence[str]) -> int:
    """A script of the page's reader, in this process; rewards that it registers are forgotten again."""
    with mock.patch.dict(registry._registered), mock.patch.object(sys, "argv", list(words)):
        runpy.run_path(words[0], run_name="__main__")
    return 0


def check(command: str) -> None:
    """Take a command through its parser and no further. Raises AssertionError with what the parser said."""
    program, *words = shlex.split(command)
    {
        "stepcredit": _stepcredit,
        "make": _make,
        "torchrun": _torchrun,
        "python": _python,
        "pytest": _pytest,
        "pip": _pip,
    }[program](words)


def _stepcredit(words: Sequence[str]) -> None:
    if not words or words[0].startswith("-"):
        assert main(words) == 0
        return
    assert words[0] in COMMANDS, f"there is no `stepcredit {words[0]}`"
    module = importlib.import_module(f"stepcredit.cli.{words[0].replace('-', '_')}_command")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("parse", "parse_with_recipe", "parse_with_recipes"):
            if hasattr(module, name):
                patch.setattr(module, name, _then_stop(getattr(module, name)))
        try:
            module.run(list(words[1:]))
        except _ReadError:
            return
        except (UserError, SystemExit) as error:
            raise AssertionError(f"`stepcredit {shlex.join(words)}` is refused: {error}") from error
    raise AssertionError(f"`stepcredit {shlex.join(words)}` never came to its parser")


def _then_stop(parser: Any) -> Any:
    def parse(*arguments: Any, **options: Any) -> Any:
        parser(*arguments, **options)
        raise _ReadError

    return parse


def _make(words: Sequence[str]) -> None:
    """The target exists, and what it would run is a command line that its parser takes."""
    shown = subprocess.run(["make", "-n", *words], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert shown.returncode == 0, shown.stderr
    for line in shown.stdout.splitlines():
        ours = re.match(r"\S*/?bin/(stepcredit .*|python benchmarks/.*)", line)
        if ours:
            check(ours[1])


def _torchrun(words: Sequence[str]) -> None:
    from torch.distributed.run import get_args_parser

    words = list(words)
    if words[-1] == "...":  # its own options alone
        get_args_parser().parse_args([*words[:-1], "-m", "stepcredit"])
        return
    options = get_args_parser().parse_args(words)
    assert options.module, "torchrun starts `-m stepcredit`"
    assert options.training_script == "stepcredit"
    _stepcredit(options.training_script_args)


def _python(words: Sequence[str]) -> None:
    """A script of ours whose own parser takes the words, ``-m stepcredit``, or a page's script around our commands."""
    if words[:2] == ["-m", "stepcredit"]:
        _stepcredit(words[2:])
        return
    if any(block.text.startswith(f"# {words[0]}\n") for page in PAGES for block in blocks(page, "python")):
        _stepcredit(words[1:])
        return
    script = ROOT / words[0]
    assert script.is_file(), f"{words[0]} does not exist"
    if "argparse" not in script.read_text(encoding="utf-8"):
        assert "sys.argv" in script.read_text(encoding="utf-8") or len(words) == 1, f"{words[0]} takes no arguments"
        return
    real = argparse.ArgumentParser.parse_args

    def parse(self: argparse.ArgumentParser, *arguments: Any, **options: Any) -> Any:
        real(self, *arguments, **options)
        raise _ReadError

    with (
        mock.patch.object(argparse.ArgumentParser, "parse_args", parse),
        mock.patch.object(sys, "argv", list(words)),
        mock.patch.object(sys, "path", [str(script.parent), *sys.path]),
        pytest.raises(_ReadError),
    ):
        runpy.run_path(str(script), run_name="__main__")


def _pytest(words: Sequence[str]) -> None:
    """Its paths exist, and every word of -k is in the name of a test there."""
    words = list(words)
    at = words.index("-k") if "-k" in words else len(words)
    wanted = re.findall(r"\w+", " ".join(words[at + 1 : at + 2]))
    names: list[str] = []
    for name in words[:at]:
        path = ROOT / name
        assert path.exists(), f"{name} does not exist"
        for file in [path] if path.is_file() else path.rglob("test_*.py"):
            tree = ast.parse(file.read_text(encoding="utf-8"))
            names += [node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    tests = [name for name in names if name.startswith("test_")]
    assert tests, f"no test in {words[:at]}"
    for word in set(wanted) - {"or", "and", "not"}:
        assert any(word in name for name in tests), f"-k {word!r} selects nothing in {' '.join(words[:at])}"


def _pip(words: Sequence[str]) -> None:
    """Nothing is installed; extras of ours exist."""
    assert words[0] == "install"
    known = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    for extras in re.findall(r"(?:stepcredit|\.)\[([^\]]+)\]", " ".join(words)):
        assert set(extras.split(",")) <= set(known), f"pyproject.toml has no extra {extras}"
