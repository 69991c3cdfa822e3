"""What the pages tell a reader to type: commands of shell blocks, commands within sentences, Python and YAML blocks."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    path
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md"))
    if path.name != "reference.md"  # made from docstrings
)
SHELL = ("", "bash", "sh")
"""Languages of a block of commands; one that holds none is marked ``text``."""
PROGRAMS = ("stepcredit", "make", "torchrun", "python", "pytest", "pip")
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: str
    language: str
    text: str


def blocks(page: Path, *languages: str) -> list[Block]:
    """Fenced blocks of these languages, in order."""
    found = FENCE.findall(page.read_text(encoding="utf-8"))
    return [Block(page.name, language, text) for _, language, text in found if language in languages]


def commands(page: Path) -> list[str]:
    """Command lines of the page's shell blocks, in order, without comments and with continuations joined."""
    lines = [line for block in blocks(page, *SHELL) for line in block.text.replace("\\\n", " ").splitlines()]
    return [command for line in lines if (command := without_comment(line))]


def without_comment(line: str) -> str:
    """A shell line without its comment, spaces as one; a # counts where a word may begin."""
    return " ".join(re.sub(r"(^|\s)#.*", "", line).split())


def mentions(page: Path) -> list[str]:
    """Commands in backticks within sentences and tables, in order; a bare ``stepcredit NAME`` is one too."""
    prose = FENCE.sub("", page.read_text(encoding="utf-8"))
    spans = (" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose))
    return [span for span in spans if span.split(" ")[0] in PROGRAMS and " " in span]
