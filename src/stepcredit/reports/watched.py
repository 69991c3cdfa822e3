"""The watched reward of a run beside the trained one and the image statistics: where a hacked reward shows."""

from __future__ import annotations

from dataclasses import dataclass

from stepcredit.reports import figures, folder, style
from stepcredit.reports.figures import HALF, THIRD, Chart, Line
from stepcredit.reports.folder import Object, RunFolder, estimate, lookup, mapping, mean_of
from stepcredit.reports.outcome import common_rows, interval_of
from stepcredit.reports.svg import known
from stepcredit.training.stats import Interval


@dataclass(frozen=True)
class Watched:
    """What a report shows of a watched reward."""

    name: str
    kind: str
    """``clear``, ``flat``, ``worse`` or ``open``, as of a run's headline."""
    verdict: str
    charts: tuple[Chart, ...]
    statistics: tuple[Chart, ...]
    exact: bool
    names: tuple[str, ...]
    """Of the image statistics in the rows."""
    rows: tuple[Object, ...]
    """Of every evaluation: iteration, prompts, reward, watched (Interval), exact, statistics."""


def section(run: RunFolder) -> Watched | None:
    """The watched reward by evaluation, on the images that all evaluations share; None for a run without one."""
    name = lookup(run.summary, "watched", "reward") or run.recipe.get("watch")
    told = _statistics(run)
    rows: list[Object] = []
    for iteration, kept in common_rows(run).items():
        asked = [(row.prompt, row.tag) for row in kept]
        watched = interval_of([row.watched for row in kept], asked)
        if watched is not None:
            rows.append(
                {
                    "iteration": iteration,
                    "prompts": len(kept),
                    "reward": folder.mean([row.reward for row in kept]),
                    "watched": watched,
                    "exact": folder.mean([row.watched_exact for row in kept]),
                    "statistics": [mean_of(value) for value in told.get(iteration, {}).values()],
                }
            )
    if not isinstance(name, str) or not rows:
        return None
    kind, verdict = _verdict(name, estimate(lookup(run.summary, "watched", "change")), run)
    exact = any(row["exact"] is not None for row in rows)
    names = tuple(key.replace("_", " ") for key in told.get(0, {}))
    return Watched(name, kind, verdict, _charts(name, rows), _drifts(told), exact, names, tuple(rows))


def _verdict(name: str, change: Interval | None, run: RunFolder) -> tuple[str, str]:
    """What may be said of the watched reward, and of both together."""
    if change is None:
        return "open", f"There is no evaluation by {name} after training yet."
    trained = estimate(run.summary.get("improvement"))
    rose = trained is not None and trained.low > 0
    said = f"{style.signed(change.mean)} {style.bounds(change)}"
    if change.high < 0:
        over = " while the reward that was trained on rose: it was hacked" if rose else ""
        return "worse", f"By {name} the images became worse{over}: {said}."
    if change.low > 0:
        return "clear", f"By {name}, which nothing was trained on, the images became better too: {said}."
    return "flat", f"By {name} the change of {said} is not distinguishable from zero."


def _charts(name: str, rows: list[Object]) -> tuple[Chart, ...]:
    """The two rewards side by side, each on its own scale, since their units differ."""
    x = [float(row["iteration"]) for row in rows]
    intervals = [row["watched"] for row in rows]
    trained = Line("held-out", x, [row["reward"] for row in rows], dots=True)
    watched = Line(
        "late", x, [e.mean for e in intervals], [e.low for e in intervals], [e.high for e in intervals], dots=True
    )
    charts = [
        Chart("Reward trained on", figures.lines([trained], "Held-out reward by iteration", HALF), "Held-out mean."),
        Chart(name, figures.lines([watched], f"{name} by iteration, watched", HALF), "Watched, with 95 % interval."),
    ]
    exact = [row["exact"] for row in rows]
    if known(exact):
        drawn = figures.lines([Line("late", x, exact, dots=True)], "Exactly right by iteration", HALF, percent=True)
        charts.append(Chart("Exactly right", drawn, f"Share of the images that {name} calls wholly right."))
    return tuple(chart for chart in charts if chart.figure)


def _drifts(told: dict[int, Object]) -> tuple[Chart, ...]:
    """Relative change of every image statistic since the base model."""
    charts = []
    for name, value in told.get(0, {}).items():
        base = mean_of(value)
        later = [mean_of(statistics.get(name)) for statistics in told.values()]
        if not base:
            continue
        drift = [None if now is None else now / base - 1 for now in later]
        title = name.replace("_", " ")
        label = f"Relative change of {title} by iteration"
        drawn = figures.lines(
            [Line("faint", [float(k) for k in told], drift, dots=True)], label, THIRD, percent=True, from_zero=True
        )
        charts.append(Chart(title, drawn))
    return tuple(chart for chart in charts if chart.figure)


def _statistics(run: RunFolder) -> dict[int, Object]:
    """Image statistics of every evaluation by iteration, the last one's being those after the run."""
    told = {0: mapping(run.start.get("image_statistics"))}
    told |= {int(line["iteration"]): mapping(lookup(line, "evaluation", "image_statistics")) for line in run.iterations}
    after = mapping(lookup(run.summary, "image_statistics", "after"))
    if after and run.iterations:
        told[max(told)] = after
    return {iteration: statistics for iteration, statistics in told.items() if statistics}
