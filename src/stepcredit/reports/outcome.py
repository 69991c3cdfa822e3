"""What a run achieved: the reward over time, and before against after, image by image."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from stepcredit.reports import figures, folder, style
from stepcredit.reports.figures import NARROW, THIRD, WIDE, Chart, Line, binned
from stepcredit.reports.folder import Object, Row, RunFolder, estimate, lookup, mapping, mean_of
from stepcredit.reports.svg import Values, known, tick_labels, ticks
from stepcredit.training.comparison import over_prompts
from stepcredit.training.stats import Interval


@dataclass(frozen=True)
class Curve:
    """The held-out evaluations of a run on one fixed set of prompts and noise."""

    x: tuple[int, ...]
    estimates: tuple[Interval, ...]
    prompts: int | None


def held_out(run: RunFolder) -> Curve:
    """Held-out reward by iteration, every point on the same images' slots.

    Evaluations during a run use a subset of the prompts of those before and after it. Where the single rewards were
    kept, all points are computed on the common subset: otherwise the curve would jump where the prompts change.
    """
    logged = {int(line["iteration"]): line.get("evaluation") for line in run.iterations}
    points = {0: estimate(run.start)} | {k: estimate(value) for k, value in logged.items()}
    if run.iterations:
        last = max(logged)
        points[last] = estimate(run.summary.get("reward_after")) or points[last]
    rows = common_rows(run)
    for k, kept in rows.items():
        points[k] = interval_of([row.reward for row in kept], [(row.prompt, row.tag) for row in kept]) or points.get(k)
    there = {k: point for k, point in sorted(points.items()) if point is not None}
    return Curve(tuple(there), tuple(there.values()), len(next(iter(rows.values()))) or None if rows else None)


def common_rows(run: RunFolder) -> dict[int, list[Row]]:
    """The images of every evaluation that was kept, by iteration: those of the slots that all of them have."""
    logged = {int(line["iteration"]): line.get("evaluation") for line in run.iterations}
    rows = {k: run.evaluation(f"iteration-{k:06d}") for k, told in {0: run.start, **logged}.items() if k == 0 or told}
    if logged:
        last = max(logged)
        rows[last] = run.evaluation("after") or rows.get(last, ())
    rows = {k: some for k, some in sorted(rows.items()) if some}
    common = set.intersection(*({row.slot for row in some} for some in rows.values())) if rows else set()
    return {k: [row for row in some if row.slot in common] for k, some in rows.items()}


def interval_of(values: Values, asked: Sequence[tuple[str, str]]) -> Interval | None:
    """Mean of the values that are there, its interval over the (prompt, tag) each belongs to; None if none is."""
    if not known(values):
        return None
    prompts, tags = [prompt for prompt, _ in asked], [tag for _, tag in asked]
    return over_prompts([math.nan if v is None else v for v in values], prompts, tags)


def reward_curve(run: RunFolder, curve: Curve) -> tuple[Markup, Markup]:
    """The reward over the run, for a wide page and for a phone: batch rewards faint, held-out ones with intervals."""
    x, batch = binned([float(line["iteration"]) for line in run.iterations], run.series("reward", "mean"))
    means = [e.mean for e in curve.estimates]
    series = [
        Line("faint", x, batch),
        Line(
            "held-out",
            curve.x,
            means,
            low=[e.low for e in curve.estimates],
            high=[e.high for e in curve.estimates],
            dots=True,
        ),
    ]
    label = "Reward by iteration. " + (
        f"Held-out reward goes from {style.number(means[0])} at iteration {curve.x[0]} to {style.number(means[-1])} "
        f"at iteration {curve.x[-1]}."
        if means
        else "There is no held-out evaluation yet."
    )
    return figures.lines(series, label, WIDE), figures.lines(series, label, NARROW)


def components(run: RunFolder) -> list[Chart]:
    """A curve for every part of a composite reward; none for a reward of one part."""
    names = list(dict.fromkeys(name for line in run.iterations for name in mapping(line.get("components"))))
    x = [float(line["iteration"]) for line in run.iterations]
    charts = []
    for name in names if len(names) > 1 else ():
        points = binned(x, run.series("components", name))
        charts.append(Chart(name, figures.lines([Line("late", *points)], f"Batch mean of {name} by iteration", THIRD)))
    return [chart for chart in charts if chart.figure]


@dataclass(frozen=True)
class Comparison:
    """Images of the same prompt and noise, before and after: how many, and how many got better or worse."""

    iteration: int | None
    """The iteration whose images are the later ones; None for those after the run."""
    total: int
    better: int
    worse: int
    change: Interval | None
    """Mean change of the reward over these images, paired; None without single rewards."""
    axis: tuple[str, str]
    """Ends of the axis on which the tags' figures are drawn."""
    tags: tuple[Object, ...]
    """A row per tag: tag, n, before, after, change (an Interval or None), figure."""

    @property
    def same(self) -> int:
        """Images whose reward did not change."""
        return self.total - self.better - self.worse


def comparison(run: RunFolder) -> Comparison:
    """Before against after, or against the latest evaluation of a run that did not come to its end.

    Image by image where the single rewards were kept, else from the summary's means per tag alone.
    """
    iteration, later = None, run.evaluation("after")
    if not later:
        found = [int(line["iteration"]) for line in run.iterations if mapping(line.get("evaluation"))]
        iteration = max(found, default=None)
        later = run.evaluation(f"iteration-{iteration:06d}") if iteration is not None else ()
    by_slot = {(row.slot, row.prompt): row.reward for row in later}
    matched = [
        ((row.prompt, row.tag), row.reward, after)
        for row in run.evaluation("iteration-000000")
        if row.reward is not None and (after := by_slot.get((row.slot, row.prompt))) is not None
    ]
    told = mapping(run.summary.get("per_tag"))
    rows = []
    for tag in dict.fromkeys([*told, *sorted({tag for (_, tag), _, _ in matched})]):
        some = [pair for pair in matched if pair[0][1] == tag]
        before = folder.mean([b for _, b, _ in some]) if some else mean_of(lookup(told, tag, "before"))
        after = folder.mean([a for _, _, a in some]) if some else mean_of(lookup(told, tag, "after"))
        if before is not None and after is not None:
            rows.append((tag, len(some) or None, before, after, _change(some)))
    marks = ticks(*_span([value for _, _, before, after, _ in rows for value in (before, after)]))
    labels = tick_labels(marks)
    return Comparison(
        iteration=iteration,
        total=len(matched),
        better=sum(after > before for _, before, after in matched),
        worse=sum(after < before for _, before, after in matched),
        change=_change(matched),
        axis=(labels[0], labels[-1]),
        tags=tuple(_row(*row, axis=(marks[0], marks[-1])) for row in rows) if any(row[0] for row in rows) else (),
    )


def _change(pairs: Sequence[tuple[tuple[str, str], float, float]]) -> Interval | None:
    return interval_of([after - before for _, before, after in pairs], [asked for asked, _, _ in pairs])


def _span(values: Sequence[float]) -> tuple[float, float]:
    return (min(values), max(values)) if values else (0.0, 1.0)


def _row(
    tag: str, n: int | None, before: float, after: float, change: Interval | None, axis: tuple[float, float]
) -> Object:
    label = f"from {style.number(before)} to {style.number(after)}"
    drawn = figures.dumbbell(before, after, axis, label)
    return {"tag": tag, "n": n, "before": before, "after": after, "change": change, "figure": drawn}
