"""The progress table of a comparison, read from the run folders, so that it is the same for runs in any process."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from stepcredit.comparison.runs import Planned, Status, status
from stepcredit.training.progress import clock


class Board:
    """Where every run is, and when all will be done."""

    def __init__(self, planned: Sequence[Planned], jobs: int) -> None:
        self._planned = tuple(planned)
        self._jobs = jobs

    def __rich__(self) -> RenderableType:
        """The table as it is now: a row a recipe, a column a seed."""
        now = {(run.label, run.seed): status(run) for run in self._planned}
        labels = list(dict.fromkeys(label for label, _ in now))
        seeds = list(dict.fromkeys(seed for _, seed in now))
        rows = Table(box=None, pad_edge=False, header_style="bold")
        rows.add_column("recipe", no_wrap=True)
        for seed in seeds:
            rows.add_column(f"seed {seed}", no_wrap=True)
        for label in labels:
            rows.add_row(label, *(_cell(now[label, seed]) for seed in seeds))
        return Group(rows, Text(self._left(now), style="dim"))

    def line(self, run: Planned) -> str:
        """A run that has ended, and how far all are, in a line."""
        now = {(other.label, other.seed): status(other) for other in self._planned}
        own = now[run.label, run.seed]
        reached = "not evaluated" if own.reward is None else f"held-out {own.reward:.3f}"
        how = "" if own.finished else f" after {own.done} of {own.total} iterations, unfinished"
        return f"{run.label} seed {run.seed}: {reached}{how}; {self._left(now)}"

    def _left(self, now: dict[tuple[str, int], Status]) -> str:
        ended = sum(s.finished for s in now.values())
        seconds = remaining(list(now.items()), self._jobs)
        words = f"{ended} of {len(now)} runs done"
        return words if seconds is None or ended == len(now) else f"{words}, about {clock(seconds)} left"


def remaining(runs: Sequence[tuple[tuple[str, int], Status]], jobs: int) -> float | None:
    """Seconds that the unfinished runs will take, ``jobs`` at a time; None while nothing is known of any.

    A recipe that has not begun is taken to be as fast as the median of those that have.
    """
    known: dict[str, list[float]] = {}
    for (label, _), own in runs:
        if own.seconds is not None:
            known.setdefault(label, []).append(own.seconds)
    evaluations = [own.evaluation for _, own in runs if own.evaluation is not None]
    if not known:
        return None
    evaluation = statistics.median(evaluations) if evaluations else 0.0
    rates = {label: statistics.median(seconds) for label, seconds in known.items()}
    usual = statistics.median(rates.values())
    total = 0.0
    for (label, _), own in runs:
        if not own.finished:
            total += rates.get(label, usual) * max(own.total - own.done, 0)
            total += evaluation * (1 if own.evaluation is not None else 2)
    return total / jobs


def _cell(own: Status) -> Text:
    reward = "" if own.reward is None else f" {own.reward:.3f}"
    if own.finished:
        return Text(f"done{reward}", style="green")
    if own.reward is None and own.done == 0:
        return Text("waiting", style="dim")
    return Text(f"{own.done}/{own.total}{reward}")
