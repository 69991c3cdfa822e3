"""Figures as inline SVG: pure functions, numbers in, markup out. Colours are classes of the page's style sheet.

Drawn by hand rather than by a plotting library so that a figure follows the reader's light or dark scheme, stays a few
kilobytes and keeps its text as text. ``None`` in a series means "no value": a gap, never a zero.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from stepcredit.reports.folder import mean
from stepcredit.reports.svg import (
    CHARACTER,
    Frame,
    Values,
    element,
    figure,
    known,
    path,
    percent_labels,
    tick_labels,
    ticks,
)

WIDE, NARROW, HALF, THIRD = (880, 300), (360, 260), (400, 220), (280, 140)
"""Sizes in CSS pixels: full width, full width on a phone, two and three in a row."""


SHADES = 16
"""Steps of strength in the heat map."""
POINTS = 240
"""Most points of a curve; longer ones are averaged in equal bins."""


@dataclass(frozen=True)
class Chart:
    """A small figure with its heading and the sentence that says what it shows."""

    title: str
    figure: Markup
    note: str = ""


@dataclass(frozen=True)
class Line:
    """One curve; ``role`` is its CSS class: ``faint``, ``early``, ``late`` or ``held-out``."""

    role: str
    x: Sequence[float]
    y: Values
    low: Values | None = None
    high: Values | None = None
    dots: bool = False


def _axes(
    size: tuple[int, int],
    x: tuple[float, float],
    y: Sequence[float],
    labels: Sequence[str],
    x_label: str,
    strip: bool = False,
) -> tuple[Frame, list[Markup]]:
    """Horizontal grid lines with their labels and the name of the x axis; ``strip`` leaves room under the axis."""
    width, height = size
    left = max(len(label) for label in labels) * CHARACTER + 8
    frame = Frame(left, width - 6.0, 8.0, height - (36.0 if strip else 32.0), x, (y[0], y[-1]))
    parts = [
        part
        for value, label in zip(y, labels, strict=True)
        for part in (
            element(
                "line",
                x1=frame.left,
                x2=frame.right,
                y1=frame.py(value),
                y2=frame.py(value),
                class_="zero" if abs(value) < 1e-12 else "rule",
            ),
            element("text", label, x=frame.left - 6, y=frame.py(value) + 3.8, text_anchor="end"),
        )
    ]
    middle = (frame.left + frame.right) / 2
    parts.append(element("text", x_label, x=middle, y=height - 4.0, text_anchor="middle", class_="axis-name"))
    return frame, parts


def _runs(x: Sequence[float], *ys: Values) -> list[list[tuple[float, ...]]]:
    """Maximal runs of points at which every series has a value."""
    runs: list[list[tuple[float, ...]]] = [[]]
    for point in zip(x, *ys, strict=True):
        values = known(point)
        if len(values) == len(point):
            runs[-1].append(tuple(values))
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]


def _draw(line: Line, frame: Frame) -> list[Markup]:
    parts: list[Markup] = []
    if line.low is not None and line.high is not None:
        for run in _runs(line.x, line.low, line.high):
            outline = [(frame.px(x), frame.py(low)) for x, low, _ in run]
            outline += [(frame.px(x), frame.py(high)) for x, _, high in reversed(run)]
            if len(run) > 1:
                parts.append(element("path", d=path(outline, close=True), class_=f"band {line.role}"))
            else:
                parts.append(element("path", d=path(outline), class_=f"whisker {line.role}"))
    for run in _runs(line.x, line.y):
        points = [(frame.px(x), frame.py(y)) for x, y in run]
        if len(points) > 1:
            parts.append(element("path", d=path(points), class_=f"curve {line.role}"))
        if line.dots or len(points) == 1:
            parts += [element("circle", cx=x, cy=y, r=2.6, class_=f"dot {line.role}") for x, y in points]
    return parts


def lines(
    series: Sequence[Line],
    label: str,
    size: tuple[int, int] = HALF,
    x_label: str = "iteration",
    percent: bool = False,
    from_zero: bool = False,
) -> Markup:
    """Curves over a common axis, bands where a line has ``low`` and ``high``; empty markup when nothing is known."""
    xs = known(*(line.x for line in series))
    ys = known(*(values for line in series for values in (line.y, line.low, line.high)))
    if not xs or not ys:
        return Markup("")
    low, high = min(ys), max(ys)
    if from_zero:
        low, high = min(low, 0.0), max(high, 0.0)
    if from_zero and low == high:
        high = 1.0
    levels = ticks(low, high, 4 if size[1] >= 190 else 2)
    x_range = (min(xs), max(xs)) if max(xs) > min(xs) else (min(xs) - 1, min(xs) + 1)
    frame, parts = _axes(size, x_range, levels, (percent_labels if percent else tick_labels)(levels), x_label)
    marks = [t for t in ticks(*x_range, 8 if size[0] > 500 else 4) if x_range[0] <= t <= x_range[1] and t == int(t)]
    parts += [
        element("text", f"{mark:,.0f}", x=frame.px(mark), y=frame.bottom + 14, text_anchor="middle") for mark in marks
    ]
    for line in series:
        parts += _draw(line, frame)
    return figure(size, label, parts)


def step_bars(
    series: Sequence[tuple[str, str, Values]],
    label: str,
    trained: Values | None = None,
    percent: bool = False,
    size: tuple[int, int] = HALF,
) -> Markup:
    """Bars per step, series side by side: (role, name, values [T]); a strip under the axis marks trained steps.

    trained ``[T]``: share of the iterations in which the step was trained. Empty markup when nothing is known.
    """
    found = known(*(values for _, _, values in series))
    if not found:
        return Markup("")
    steps = max(len(values) for _, _, values in series)
    levels = ticks(min(0.0, *found), max(0.0, *found)) if any(found) else [0.0, 1.0]
    labels = (percent_labels if percent else tick_labels)(levels)
    frame, parts = _axes(size, (-0.5, steps - 0.5), levels, labels, "step", strip=trained is not None)
    slot = (frame.right - frame.left) / steps
    bar = slot * 0.76 / len(series)
    for k, (role, name, values) in enumerate(series):
        for i, value in enumerate(values):
            if value is None:
                continue
            top, bottom = sorted((frame.py(value), frame.py(0.0)))
            hint = f"step {i}, {name}: {(percent_labels([0.0, value]) if percent else [f'{value:.4g}'])[-1]}"
            parts.append(
                element(
                    "rect",
                    element("title", hint),
                    x=frame.px(i) - bar * len(series) / 2 + k * bar,
                    y=top,
                    width=bar * 0.94,
                    height=max(bottom - top, 0.6),
                    class_=f"bar {role}",
                )
            )
    below = 14 if trained is None else 18
    every = math.ceil(steps * 17 / (frame.right - frame.left))
    parts += [
        element("text", str(i), x=frame.px(i), y=frame.bottom + below, text_anchor="middle")
        for i in range(0, steps, every)
    ]
    for i, share in enumerate(trained or ()):
        if share:
            x, width = frame.px(i) - slot * 0.42, slot * 0.84
            opacity = f"{0.25 + 0.75 * share:.2f}"
            parts.append(
                element("rect", x=x, y=frame.bottom + 4, width=width, height=2.5, class_="trained", opacity=opacity)
            )
    return figure(size, label, parts)


def heat_map(columns: Sequence[Values], names: Sequence[str], label: str, size: tuple[int, int] = WIDE) -> Markup:
    """Signed values by column (iterations) and row (steps, first on top); strength is opacity, the sign is a colour."""
    largest = max((abs(v) for v in known(*columns)), default=0.0)
    if largest == 0:
        return Markup("")
    rows = max(len(column) for column in columns)
    width, height = size
    left, top, right, bottom = 26.0, 4.0, width - 6.0, height - 32.0
    w, h = (right - left) / len(columns), (bottom - top) / rows
    shades: dict[tuple[bool, int], list[str]] = {}  # one path per shade: a rectangle each would be ten times the size
    for c, column in enumerate(columns):
        for i, value in enumerate(column):
            if shade := round(math.sqrt(abs(value or 0.0) / largest) * SHADES):
                cell = f"M{left + c * w:.1f} {top + i * h:.1f}h{w:.1f}v{h - 1:.1f}h{-w:.1f}z"
                shades.setdefault(((value or 0.0) < 0, shade), []).append(cell)
    parts = [
        element("path", d="".join(cells), class_="cell minus" if loss else "cell", opacity=f"{shade / SHADES:.2f}")
        for (loss, shade), cells in sorted(shades.items())
    ]
    parts += [
        element("text", str(i), x=left - 6, y=top + (i + 0.5) * h + 3.8, text_anchor="end")
        for i in range(0, rows, math.ceil(rows * 13 / (bottom - top)))
    ]
    for c in sorted({0, len(columns) // 2, len(columns) - 1}):
        anchor = "start" if c == 0 else "end" if c == len(columns) - 1 else "middle"
        x = left + (c + (0.0 if c == 0 else 1.0 if c == len(columns) - 1 else 0.5)) * w
        parts.append(element("text", names[c], x=x, y=bottom + 14, text_anchor=anchor))
    parts.append(
        element("text", "iteration", x=(left + right) / 2, y=height - 4.0, text_anchor="middle", class_="axis-name")
    )
    return figure(size, label, parts, class_="figure crisp")


def interval(mean: float, low: float, high: float, label: str, size: tuple[int, int] = (360, 64)) -> Markup:
    """One estimate and its interval on an axis that always shows zero."""
    levels = ticks(min(low, 0.0), max(high, 0.0), 4)
    width, height = size
    frame = Frame(24.0, width - 24.0, 0.0, height - 20.0, (levels[0], levels[-1]), (0.0, 1.0))
    middle = frame.bottom / 2 + 2
    parts = [element("line", x1=frame.left, x2=frame.right, y1=frame.bottom, y2=frame.bottom, class_="rule")]
    for value, text in zip(levels, tick_labels(levels), strict=True):
        x = frame.px(value)
        if value == 0:
            parts.append(element("line", x1=x, x2=x, y1=4, y2=frame.bottom, class_="zero"))
        parts.append(element("text", text, x=x, y=height - 5.0, text_anchor="middle"))
    role = "minus" if high < 0 else "late" if low > 0 else "early"
    parts.append(element("path", d=path([(frame.px(low), middle), (frame.px(high), middle)]), class_=f"span {role}"))
    parts.append(element("circle", cx=frame.px(mean), cy=middle, r=5.5, class_=f"dot {role}"))
    return figure(size, label, parts)


def dumbbell(before: float, after: float, bounds: tuple[float, float], label: str) -> Markup:
    """Before and after on one small axis, for a table cell."""
    low, high = bounds if bounds[1] > bounds[0] else (bounds[0] - 0.5, bounds[0] + 0.5)
    frame = Frame(5.0, 115.0, 0.0, 14.0, (low, high), (0.0, 1.0))
    role = "minus" if after < before else "late"
    parts = [
        element("line", x1=frame.left, x2=frame.right, y1=7, y2=7, class_="rule"),
        element("path", d=path([(frame.px(before), 7.0), (frame.px(after), 7.0)]), class_=f"span thin {role}"),
        element("circle", cx=frame.px(before), cy=7.0, r=3.6, class_="dot early"),
        element("circle", cx=frame.px(after), cy=7.0, r=3.6, class_=f"dot {role}"),
    ]
    return figure((120, 14), label, parts, class_="dumbbell")


def shares(parts: Sequence[tuple[str, float]], label: str) -> Markup:
    """A single bar divided by the parts' shares of their sum; empty markup when the sum is zero."""
    total = sum(value for _, value in parts)
    if total <= 0:
        return Markup("")
    drawn, x = [], 0.0
    for k, (name, value) in enumerate(parts):
        width = value / total * 880
        drawn.append(
            element(
                "rect",
                element("title", f"{name}: {value / total:.0%}"),
                x=x,
                y=0,
                width=max(width - 1.5, 0.5),
                height=18,
                class_=f"part part-{k % 5}",
            )
        )
        x += width
    return figure((880, 18), label, drawn, class_="shares", stretch=True)


def binned(x: Sequence[float], y: Values, limit: int = POINTS) -> tuple[list[float], list[float | None]]:
    """A curve of at most ``limit`` points: means over equal bins."""
    size = max(1, math.ceil(len(x) / limit))
    cuts = range(0, len(x), size)
    return [sum(x[c : c + size]) / len(x[c : c + size]) for c in cuts], [mean(y[c : c + size]) for c in cuts]
