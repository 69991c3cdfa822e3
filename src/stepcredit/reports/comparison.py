"""The page of a comparison: ``comparison.html``, made from ``comparison.json`` and nothing else."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from stepcredit.reports import figures, style
from stepcredit.reports.figures import HALF, NARROW, WIDE, Line
from stepcredit.reports.folder import estimate, mapping, number
from stepcredit.training.stats import Interval

COLOURS = (0, 2, 3, 1, 4)
"""Colours of the style sheet, neighbours far apart; further recipes are drawn in them again, dashed."""
AXES = {
    "iterations": ("iteration", "iterations"),
    "evaluations": ("model evaluations", "model evaluations"),
    "seconds": ("seconds of training", "seconds"),
}


def write(folder: Path, found: Mapping[str, Any]) -> Path:
    """Write ``folder/comparison.html`` and return its path."""
    return style.write(folder / "comparison.html", render(folder.resolve().name, found))


def render(name: str, found: Mapping[str, Any]) -> str:
    """The page of a comparison as HTML."""
    recipes = found["recipes"]
    charts = [(AXES[axis][0], *_chart(recipes, axis, number(found["target"]))) for axis in AXES] if recipes else []
    return style.render(
        "comparison.html.j2",
        name=name,
        found=found,
        roles=[role(k) for k in range(len(recipes))],
        verdicts=verdicts(found),
        charts=charts,
        targets=_targets(recipes),
        results=[_result(recipe) for recipe in recipes],
        tags=_table(recipes, "per_tag"),
        statistics=_table(recipes, "image_statistics"),
        halted=[(r["label"], run) for r in recipes for run in r["runs"] if run["guard"] or run["skipped_updates"]],
        axes=[words[1] for words in AXES.values()],
    )


def role(k: int) -> str:
    """CSS classes of the k-th recipe."""
    return f"part-{COLOURS[k % len(COLOURS)]}" + (" dashed" if k >= len(COLOURS) else "")


def verdicts(found: Mapping[str, Any]) -> list[str]:
    """What can be said of every recipe against the first, each in a sentence."""
    recipes = found["recipes"]
    if not recipes:
        return ["No seed has been finished by every recipe yet, so nothing is compared."]
    return [_verdict(recipes[0]["label"], recipe, len(found["seeds"])) for recipe in recipes[1:]]


def _verdict(first: str, recipe: Mapping[str, Any], seeds: int) -> str:
    difference = estimate(recipe["to_first"])
    told = f"{recipe['label']}: "
    ratios = mapping(recipe["ratio"])
    if ratios:
        parts = [f"{times(ratios[axis])} the {words[1]}" for axis, words in AXES.items()]
        told += f"{parts[0]}, {parts[1]} and {parts[2]} of {first} to the target; "
    if difference is None:
        return told + "no reward at the end"
    end = f"{style.signed(difference.mean)} {style.bounds(difference)} at the end".replace("  ", " ")
    if not math.isfinite(difference.low):
        return f"{told}{end}, from {'one seed' if seeds == 1 else f'{seeds} seeds'}: no interval, so no finding."
    if difference.low > 0 or difference.high < 0:
        return f"{told}{end}, clear of zero over {seeds} seeds."
    return f"{told}{end}: {seeds} seeds do not tell them apart."


def times(ratio: Mapping[str, Any]) -> str:
    """A ratio in words: ``0.45 [0.30, 0.68] times``, ``at least 2.1 times``, ``an unknown multiple of``."""
    value = number(ratio["value"])
    if value is None:
        return "an unknown multiple of"
    bound = "" if ratio["kind"] == "equal" else f"{ratio['kind']} "
    low, high = number(ratio["low"]), number(ratio["high"])
    interval = f" [{low:.2f}, {high:.2f}]" if low is not None and high is not None else ""
    return f"{bound}{value:.2f}{interval} times"


def _chart(recipes: Sequence[Mapping[str, Any]], axis: str, target: float | None) -> tuple[Markup, Markup, Markup]:
    """Curves with bands, and the target as a level line: for a wide page, for half of one and for a phone."""
    series = []
    for k, recipe in enumerate(recipes):
        curve = recipe["curves"][axis]
        low, high = (curve["low"], curve["high"]) if len(recipe["runs"]) > 1 else (None, None)
        series.append(Line(role(k), curve["x"], curve["mean"], low, high, dots=True))
    label = f"Held-out reward by {AXES[axis][0]}: " + "; ".join(
        f"{r['label']} from {style.number(r['curves'][axis]['mean'][0])} to "
        f"{style.number(r['curves'][axis]['mean'][-1])}"
        for r in recipes
    )
    if target is not None:
        end = max(max(r["curves"][axis]["x"]) for r in recipes)
        series.insert(0, Line("faint", [0.0, end], [target, target]))
    sizes = (WIDE, HALF, NARROW)
    wide, half, narrow = (figures.lines(series, label, size, x_label=AXES[axis][0]) for size in sizes)
    return wide, half, narrow


@dataclass(frozen=True)
class TargetCell:
    """What a recipe needs to reach the target on one axis."""

    mean: str
    reached: int
    runs: int
    ratio: str


def _targets(recipes: Sequence[Mapping[str, Any]]) -> list[list[TargetCell]]:
    """Per recipe a cell for every axis; empty without a target."""
    rows = []
    for recipe in recipes:
        if recipe["to_target"] is None:
            return []
        cells = []
        for axis in AXES:
            reached = [t for t in recipe["to_target"][axis] if t is not None]
            whole = len(recipe["to_target"][axis])
            mean = sum(reached) / len(reached) if reached else None
            digits = 1 if axis == "iterations" else 0
            shown = style.duration(mean) if axis == "seconds" else style.count(mean and round(mean, digits))
            told = recipe["ratio"][axis]
            cells.append(TargetCell(shown, len(reached), whole, times(told) if number(told["value"]) else "unknown"))
        rows.append(cells)
    return rows


def _result(recipe: Mapping[str, Any]) -> dict[str, Interval | None]:
    return {key: estimate(recipe[key]) for key in ("reward", "change", "to_first", "exact")}


def _table(recipes: Sequence[Mapping[str, Any]], key: str) -> list[tuple[str, float | None, list[float | None]]]:
    """Rows of (name, base, tuned by recipe) of per-tag results or image statistics."""
    rows = []
    for name, entry in recipes[0][key].items() if recipes else ():
        tuned = [mapping(recipe[key].get(name)).get("after") for recipe in recipes]
        values = [number(mapping(v).get("mean")) if isinstance(v, Mapping) else number(v) for v in tuned]
        rows.append((name, number(entry["before"]), values))
    return rows
