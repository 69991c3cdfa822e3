"""What all report pages share: the template environment, the style sheet, and how numbers are written."""

from __future__ import annotations

import base64
import math
import os
from collections.abc import Callable
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from stepcredit import __version__
from stepcredit.reports.svg import minus
from stepcredit.training.stats import Interval

MISSING = "–"
"""Shown where a value was not recorded."""
_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def render(template: str, **context: Any) -> str:
    """A page from one of the templates, self-contained: all text escaped, style inline, no request."""
    return _environment().get_template(template).render(version=__version__, style=_style_sheet(), **context)


def write(path: Path, page: str) -> Path:
    """Write a page whole or not at all, and return its path."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(page, encoding="utf-8", errors="replace")
    os.replace(partial, path)
    return path


def data_uri(content: bytes, kind: str) -> str:
    """An image as a ``data:`` URI; ``kind`` is ``png`` or ``jpeg``."""
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


def number(value: float | None) -> str:
    """A reward or a mean: three decimals, fewer for large values, scientific for tiny ones."""
    if value is None or not math.isfinite(value):
        return MISSING
    if value != 0 and abs(value) < 5e-4:
        return scientific(value)
    value += 0.0  # -0.0 has no sign to show
    return minus(f"{value:,.{3 if abs(value) < 100 else 1 if abs(value) < 10_000 else 0}f}")


def signed(value: float | None) -> str:
    """A change, with its sign."""
    text = number(value)
    return f"+{text}" if value is not None and math.isfinite(value) and value > 0 else text


def percent(value: float | None) -> str:
    """A share in [0, 1] as a percentage."""
    return MISSING if value is None or not math.isfinite(value) else minus(f"{value * 100:.1f}\N{NO-BREAK SPACE}%")


def scientific(value: float | None) -> str:
    """``1.2 × 10⁻⁷``; zero is ``0`` since it means exactly that."""
    if value is None or not math.isfinite(value):
        return MISSING
    if value == 0:
        return "0"
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{minus(mantissa)}\N{NO-BREAK SPACE}×\N{NO-BREAK SPACE}10{str(int(exponent)).translate(_SUPERSCRIPT)}"


def count(value: float | None) -> str:
    """A count with thousands separators; decimals only where it is not whole, as in a mean per trajectory."""
    if value is None or not math.isfinite(value):
        return MISSING
    return f"{value:,.0f}" if value == int(value) else f"{value:,.1f}"


def duration(seconds: float | None) -> str:
    """``0.8 s``, ``48 s``, ``1 min 52 s``, ``3 h 04 min``."""
    if seconds is None or not math.isfinite(seconds):
        return MISSING
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def bounds(interval: Interval | None, write: Callable[[float | None], str] = number) -> str:
    """``[low, high]``, or nothing where the interval is not known."""
    if interval is None or not (math.isfinite(interval.low) and math.isfinite(interval.high)):
        return ""
    return f"[{write(interval.low)}, {write(interval.high)}]"


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("stepcredit.reports"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters = (number, signed, percent, scientific, count, duration, bounds)
    environment.filters.update({function.__name__: function for function in filters})
    environment.globals["percent"] = percent
    return environment


@cache
def _style_sheet() -> Markup:
    return Markup(resources.files("stepcredit.reports").joinpath("templates", "style.css").read_text(encoding="utf-8"))
