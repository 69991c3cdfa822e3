"""Text, JSON and YAML that others wrote: parsed strictly, and shown so that it stays text."""

from __future__ import annotations

import json
import math
import re
import reprlib
from typing import Any

import yaml

_ESCAPES = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)?|.)?", re.DOTALL)
# control characters, line separators, characters that turn text around, halves of characters
_BEYOND_ASCII = "\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff"
_UNPRINTABLE = re.compile(f"[\x00-\x1f{_BEYOND_ASCII}]+")
_UNPRINTABLE_IN_LINES = re.compile(f"[\x00-\x09\x0b-\x1f{_BEYOND_ASCII}]+")
_UNSEEN_IN_JSON = re.compile(f"[{_BEYOND_ASCII}]")
_HALVES = re.compile("[\ud800-\udfff]")
LONGEST = 400
"""Characters of a value that are shown in a message."""
DEEPEST = 100
"""Lists and objects inside each other that are read of a JSON text."""

_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxlong = 3, 60
_SHORT.maxstring = _SHORT.maxother = 160
_SHORT.maxlist = _SHORT.maxtuple = _SHORT.maxdict = _SHORT.maxset = 12


def clean(text: object) -> str:
    """A text on one line, without escape sequences, control characters or characters that turn text around."""
    return _UNPRINTABLE.sub(" ", _ESCAPES.sub("", str(text))).strip()


def clean_lines(text: str) -> str:
    """The same of a text whose lines and spaces are meant."""
    return _UNPRINTABLE_IN_LINES.sub(" ", _ESCAPES.sub("", text))


def quoted(value: object) -> str:
    """``repr`` for a message: of bounded length and work, whatever the value."""
    try:
        text = _SHORT.repr(value)
        return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."
    except ValueError:  # a number of more digits than Python writes
        return f"a {type(value).__name__} of too many digits"


def visible_json(text: str) -> str:
    """The same JSON with characters that rewrite a terminal, or cannot be encoded, as escapes."""
    return _UNSEEN_IN_JSON.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def loads(text: str) -> Any:
    """JSON without what Python would accept beyond it. Raises ValueError, in one line.

    Refused are NaN and infinities, also as numbers too large for a float, halves of characters, and more than DEEPEST
    levels.
    """
    try:
        value = json.loads(text, parse_constant=_no_constant, parse_float=_finite)
        _check(value, DEEPEST)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    return value


def load_yaml(text: str) -> Any:
    """YAML of plain values. Raises ValueError, in one line, for anything else.

    Tags are refused, though those of the safe loader construct nothing dangerous: a value is what it looks like. So are
    anchors and aliases, of which a page of text can make more than a machine holds.
    """
    try:
        loader = _PlainLoader(text)
        try:
            value = loader.get_single_data()
        finally:
            loader.dispose()
        _check(value, DEEPEST)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except (yaml.YAMLError, ValueError, ArithmeticError) as error:  # of a number or date out of range, the latter two
        raise ValueError(clean(" ".join(str(error).split()))[:400]) from None
    return value


class _PlainLoader(yaml.SafeLoader):
    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        refused = "aliases" if isinstance(event, yaml.AliasEvent) else "tags" if getattr(event, "tag", None) else None
        if refused is None and getattr(event, "anchor", None):
            refused = "anchors"
        if refused:
            raise yaml.composer.ComposerError(None, None, f"{refused} are not allowed", event.start_mark)
        return super().compose_node(parent, index)


def _no_constant(text: str) -> float:
    raise ValueError(f"{text} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:40]} is not a finite number")
    return value


def _check(value: Any, levels: int) -> None:
    if isinstance(value, str):
        if not value.isascii() and _HALVES.search(value):
            raise ValueError("a text holds half a character (a lone surrogate)")
    elif isinstance(value, dict | list):
        if levels == 0:
            raise ValueError("nested too deeply")
        if isinstance(value, dict):
            for key in value:
                _check(key, 0)
            value = value.values()
        for entry in value:
            _check(entry, levels - 1)
