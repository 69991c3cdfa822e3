"""From results to docs/evidence.md and its plots; nothing here runs anything."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt

from evidence.rows import RATES, TUNING_ITERATIONS, Row
from stepcredit.comparison import curves
from stepcredit.comparison.curves import Curve, Ratio
from stepcredit.training.files import write_text_atomic
from stepcredit.training.stats import Interval, student

BEGIN, END = "<!-- made by benchmarks/papers.py: begin -->", "<!-- end -->"
ENOUGH = 5
"""Seeds from which on a row is more than preliminary."""
VAIN = 1000.0
"""Factor between the ends of an interval that says nothing."""
COLOURS = ("#33415c", "#c8553d", "#2a9d8f", "#8a5a9e", "#d9a441")
Results = Mapping[str, Sequence[Mapping[str, Any]]]


def area(curve: Mapping[str, Sequence[float]]) -> float:
    """Mean held-out reward over the updates of a run, by the trapezoid rule."""
    x, y = curve["iterations"], curve["reward"]
    parts = [(b - a) * (u + v) / 2 for a, b, u, v in zip(x[:-1], x[1:], y[:-1], y[1:], strict=True)]
    return sum(parts) / (x[-1] - x[0])


def curve_of(result: Mapping[str, Any]) -> Curve:
    """The learning curve of a result."""
    return Curve(**{key: tuple(values) for key, values in result["curve"].items()})


def section(row: Row, results: Results) -> list[str]:
    """A row's claim, table and verdicts in Markdown."""
    lines = [
        f"## {row.title}",
        "",
        f"> {row.claim}",
        "",
        "```",
        f"python benchmarks/papers.py --only {row.name}",
        "```",
    ]
    first = row.methods[0]
    seeds = len(results[first])
    if seeds == 0:
        return [*lines, "", "**Not run yet.**", ""]
    drawn = {name: [curve_of(result) for result in results[name]] for name in row.methods}
    target = curves.halfway(drawn[first])
    lines += ["", f"![learning curves](images/evidence-{row.name}.svg)", ""]
    told = "no target: the first does not rise" if target is None else f"target {target:.3f}"
    few = f"**Preliminary: fewer than {ENOUGH} seeds.** " if seeds < ENOUGH else ""
    lines += [
        f"{few}{seeds} seed{'s' if seeds > 1 else ''}; {told} (halfway from the base to the end of `{first}`).",
        "",
    ]
    lines += [
        "| method | learning rate | reward at the end | change | against the first | updates | evaluations | seconds |",
        "|---|---|---|---|---|---|---|---|",
    ]
    verdicts = []
    for name in row.methods:
        some = results[name]
        end = student([one["reward_after"]["mean"] for one in some])
        change = student([one["reward_after"]["mean"] - one["reward_before"]["mean"] for one in some])
        cells = [f"`{name}`", f"{some[0]['lr']:.1e}", shown(end), shown(change, "+"), *[""] * 4]
        if name != first:
            pairs = zip(some, results[first], strict=True)
            difference = student([a["reward_after"]["mean"] - b["reward_after"]["mean"] for a, b in pairs])
            by_axis = {axis: _ratio(drawn[name], drawn[first], target, axis) for axis in curves.AXES}
            cells[4:] = [shown(difference, "+"), *(_times(ratio) for ratio in by_axis.values())]
            verdicts.append(_verdict(name, first, by_axis, difference))
        lines.append(f"| {' | '.join(cells)} |")
    return [
        *lines,
        "",
        "Updates, model evaluations and seconds: times those of the first to the target, paired by seed.",
        "",
        *verdicts,
        "",
    ]


def _ratio(own: Sequence[Curve], first: Sequence[Curve], target: float | None, axis: curves.Axis) -> Ratio:
    if target is None:
        return Ratio(None, None, None, "unknown", 0)
    times = [curves.first_reaching(curve, target, axis) for curve in own]
    base = [(curves.first_reaching(curve, target, axis), curve.along(axis)[-1]) for curve in first]
    return curves.ratio(times, [curve.along(axis)[-1] for curve in own], base)


def _verdict(name: str, first: str, ratios: Mapping[str, Ratio], difference: Interval) -> str:
    words = []
    for ratio, what in zip(ratios.values(), ("updates", "evaluations", "seconds"), strict=True):
        if ratio.low is None or ratio.high is None:
            words.append(f"{what} unknown")
        elif ratio.high < 1:
            words.append(f"fewer {what}")
        elif ratio.low > 1:
            words.append(f"more {what}")
        else:
            words.append(f"{what} not told apart")
    end = "the end not told apart"
    if difference.low > 0 or difference.high < 0:
        end = "a higher end" if difference.low > 0 else "a lower end"
    return f"- **`{name}` against `{first}`**: {'; '.join([*words, end])}."


def shown(value: Interval, sign: str = "") -> str:
    """A mean with its interval, if it has one."""
    bounds = f" [{value.low:{sign}.3f}, {value.high:{sign}.3f}]" if math.isfinite(value.low) else ""
    return f"{value.mean:{sign}.3f}{bounds}"


def _times(ratio: Ratio) -> str:
    if ratio.value is None:
        return "unknown"
    bounds = ""
    if ratio.low is not None and ratio.high is not None:
        vain = ratio.high > VAIN * ratio.low
        bounds = " [anything]" if vain else f" [{ratio.low:.2f}, {ratio.high:.2f}]"
    return f"{'' if ratio.kind == 'equal' else ratio.kind + ' '}{ratio.value:.2f}{bounds}"


def plot(row: Row, results: Results, target: Path) -> None:
    """Mean curves with bands, by updates and by seconds, as SVG."""
    mpl.rcParams.update({"svg.hashsalt": "stepcredit", "svg.fonttype": "path", "font.size": 8})
    figure, axes = plt.subplots(1, 2, figsize=(8, 2.8), layout="constrained", sharey=True)
    for axis, along, label in zip(axes, ("iterations", "seconds"), ("updates", "seconds of training"), strict=True):
        for k, name in enumerate(row.methods):
            band = curves.band([curve_of(result) for result in results[name]], along)  # type: ignore[arg-type]
            colour = COLOURS[k % len(COLOURS)]
            mean = [point.mean for point in band.reward]
            axis.plot(band.x, mean, color=colour, marker="o", ms=2.5, lw=1.2, label=name)
            if len(results[name]) > 1:
                bounds = [p.low for p in band.reward], [p.high for p in band.reward]
                axis.fill_between(band.x, *bounds, color=colour, alpha=0.12, lw=0)
        axis.set_xlabel(label)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("held-out reward")
    axes[0].legend(frameon=False)
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, metadata={"Date": None})
    plt.close(figure)


def write(docs: Path, found: Sequence[tuple[Row, Results]], last: Sequence[str] = ()) -> None:
    """Replace the part of docs/evidence.md between the markers, with some ``last`` lines, and draw the plots."""
    lines = [BEGIN, "", *_method(found)]
    for row, results in found:
        lines += section(row, results)
        if results[row.methods[0]]:
            plot(row, results, docs / "images" / f"evidence-{row.name}.svg")
    path = docs / "evidence.md"
    before, _, rest = path.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    write_text_atomic(path, before + "\n".join([*lines, *last, END]) + after)


def _method(found: Sequence[tuple[Row, Results]]) -> list[str]:
    seconds = [one["curve"]["seconds"][-1] for _, results in found for some in results.values() for one in some]
    methods = {name for _, results in found for name, some in results.items() if some}
    machines = sorted({one["machine"] for _, results in found for some in results.values() for one in some})
    return [
        f"Learning rates are those of {', '.join(f'{rate:.1e}' for rate in RATES)} with the highest mean held-out "
        f"reward in one trial of {TUNING_ITERATIONS} updates on a seed of its own; methods that differ from another in "
        f"one key take its rate. {len(methods)} methods, {len(seconds)} runs, {sum(seconds) / 3600:.1f} hours of "
        f"training on {', '.join(machines) or 'no machine yet'}. Intervals are 95 %, over seeds, by Student's t; one "
        "seed has none.",
        "",
    ]
