"""The reward along the trajectories of a group, drawn on the ruler that heat map and strips share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup
from torch import Tensor

from stepcredit.reports.svg import Frame, element, figure, path, tick_labels, ticks


@dataclass(frozen=True)
class Ruler:
    """Where states stand: state i is centred at ``label + (i + 1/2) pitch`` CSS pixels."""

    label: int
    pitch: int
    steps: int
    height: int

    @property
    def width(self) -> int:
        return self.label + self.pitch * (self.steps + 1)


def curves(
    R: Tensor, loose: Tensor, strict: Tensor, trained: Tensor, scale: Sequence[float], ruler: Ruler, name: str
) -> Markup:
    """One curve per member of ``R`` ``[G, T + 1]``, their mean, and a mark where a step turns (bool ``[G, T]``).

    trained: bool ``[T]``, steps to shade. scale: the finite rewards of all looks, whose axes are then equal. The
    frame is told in data attributes, by which the page finds and marks a point.
    """
    levels = ticks(min(scale), max(scale), 4) if scale else [0.0, 1.0]
    first = ruler.label + ruler.pitch / 2
    frame = Frame(
        first, first + ruler.pitch * ruler.steps, 8.0, ruler.height - 10.0, (0.0, ruler.steps), (levels[0], levels[-1])
    )
    parts = [
        element("rect", x=frame.px(i), y=frame.top, width=ruler.pitch, height=frame.bottom - frame.top, class_="shade")
        for i in trained.nonzero().flatten().tolist()
    ]
    for value, label in zip(levels, tick_labels(levels), strict=True):
        y = frame.py(value)
        parts.append(element("line", x1=ruler.label, x2=ruler.width, y1=y, y2=y, class_="rule"))
        parts.append(element("text", label, x=ruler.label - 6, y=y + 3.8, text_anchor="end"))
    for member, row in enumerate(R.tolist()):
        parts += [element("path", d=path(run), class_="curve member", data_member=member) for run in _runs(row, frame)]
    parts += [element("path", d=path(run), class_="curve mean") for run in _runs(R.nanmean(0).tolist(), frame)]
    for (kind, radius), turns in zip((("loose", 3.4), ("strict", 3.0)), (loose & ~strict, strict), strict=True):
        for member, step in turns.nonzero().tolist():
            x, y = frame.px(step), frame.py(float(R[member, step]))
            parts.append(element("circle", cx=x, cy=y, r=radius, class_=f"turn {kind}", data_member=member))
    parts.append(element("path", class_="picked", d=""))
    parts.append(element("path", class_="picked step", d=""))
    drawn = figure(
        (ruler.width, ruler.height),
        f"{name}: reward of the clean estimate of every state, a curve per member; the mean goes from "
        f"{_said(R[:, 0])} to {_said(R[:, -1])}. The table that follows has the gains.",
        parts,
        class_="curves",
    )
    told = {
        "left": frame.left, "pitch": ruler.pitch, "top": frame.top, "bottom": frame.bottom,
        "low": levels[0], "high": levels[-1],
    }  # fmt: skip
    attributes = "".join(f' data-{key}="{value:g}"' for key, value in told.items())
    return Markup(str(drawn).replace("<svg", f'<svg width="{ruler.width}" height="{ruler.height}"{attributes}', 1))


def _runs(values: Sequence[float], frame: Frame) -> list[list[tuple[float, float]]]:
    """Points of a curve, broken where a reward is missing."""
    runs: list[list[tuple[float, float]]] = [[]]
    for i, value in enumerate(values):
        if math.isfinite(value):
            runs[-1].append((frame.px(i), frame.py(value)))
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]


def _said(values: Tensor) -> str:
    mean = float(values.nanmean())
    return f"{mean:.3g}" if math.isfinite(mean) else "unknown"
