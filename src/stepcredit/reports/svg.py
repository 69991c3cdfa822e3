"""The parts that figures are made of: SVG elements, round ticks, and the map from data to a drawing's rectangle."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

Values = Sequence[float | None]
FONT_SIZE = 11
CHARACTER = 6.1
"""Mean width of a digit at that size, in CSS pixels."""


@dataclass(frozen=True)
class Frame:
    """The rectangle in which data are drawn, and the two linear maps into it."""

    left: float
    right: float
    top: float
    bottom: float
    x: tuple[float, float]
    y: tuple[float, float]

    def px(self, x: float) -> float:
        return self.left + (x - self.x[0]) / (self.x[1] - self.x[0]) * (self.right - self.left)

    def py(self, y: float) -> float:
        return self.bottom - (y - self.y[0]) / (self.y[1] - self.y[0]) * (self.bottom - self.top)


def element(name: str, *content: str, **attributes: object) -> Markup:
    """An SVG element; text and attribute values are escaped, Markup is not; ``class_`` is class, ``_`` is ``-``."""
    written = Markup("").join(
        Markup(' {}="{}"').format(key.rstrip("_").replace("_", "-"), _attribute(value))
        for key, value in attributes.items()
        if value is not None
    )
    inner = Markup("").join(escape(c) for c in content)
    tag = Markup(name)
    return Markup("<{}{}>{}</{}>").format(tag, written, inner, tag) if inner else Markup("<{}{}/>").format(tag, written)


def _attribute(value: object) -> str:
    return f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else str(value)


def figure(
    size: tuple[int, int], label: str, parts: Sequence[str], class_: str = "figure", stretch: bool = False
) -> Markup:
    """A drawing of ``size`` units; ``label`` says in words what it shows, for readers who do not see it.

    ``stretch`` lets it fill any box, out of proportion.
    """
    return element(
        "svg",
        *parts,
        preserveAspectRatio="none" if stretch else None,
        viewBox=f"0 0 {size[0]} {size[1]}",
        role="img",
        aria_label=label,
        class_=class_,
        font_size=FONT_SIZE,
    )


def ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Round numbers (1, 2, 2.5 or 5 times a power of ten) that enclose [low, high] in about ``count`` intervals."""
    if not high > low:
        pad = abs(low) * 0.05 or 0.5
        low, high = low - pad, high + pad
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [k * step for k in range(first, last + 1)]


def tick_labels(values: Sequence[float]) -> list[str]:
    """Labels of evenly spaced ticks with just the digits that tell them apart; scientific where very small or large."""
    step = values[1] - values[0] if len(values) > 1 else abs(values[0]) or 1.0
    largest = max(abs(v) for v in values)
    if largest < 1e-3 or largest >= 1e6:
        return ["0" if v == 0 else minus(f"{v:.1e}".replace(".0e", "e").replace("e-0", "e-")) for v in values]
    decimals = next((d for d in range(8) if abs(round(step, d) - step) < step * 1e-6), 8)
    return [minus(f"{v:,.{decimals}f}") for v in values]


def percent_labels(values: Sequence[float]) -> list[str]:
    """Labels of ticks that are shares: 0.25 is written 25 %."""
    return [f"{label} %" for label in tick_labels([v * 100 for v in values])]


def minus(text: str) -> str:
    """The text with hyphens set as minus signs."""
    return text.replace("-", "\N{MINUS SIGN}")


def known(*series: Values | None) -> list[float]:
    """All finite numbers of some series, in one list."""
    return [v for values in series if values is not None for v in values if v is not None and math.isfinite(v)]


def path(points: Sequence[tuple[float, float]], close: bool = False) -> str:
    """The ``d`` attribute of a path through points, closed or not."""
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points) + ("Z" if close else "")
