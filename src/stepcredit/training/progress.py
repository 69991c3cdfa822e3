"""How a run is getting on, and that in words and bars: pure, so that every kind of display says the same."""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from stepcredit.untrusted import clean

RECENT = 20
"""Iterations whose durations make the estimate of the time left."""
BLOCKS, ASCII_BLOCKS = " ▁▂▃▄▅▆▇█", " .:-=+*#@"
HANGING, ASCII_HANGING = " ▔▀█", " -=#"
"""Bars that hang from the top of their cell, for losses."""


@dataclass
class Progress:
    """What is known of a run so far, in one place for every kind of display."""

    clock: Callable[[], float] = time.monotonic
    total: int = 0
    done: int = 0
    metrics: Mapping[str, Any] = field(default_factory=dict)
    """The latest iteration's."""
    held_out: Mapping[str, Any] = field(default_factory=dict)
    """The latest evaluation's."""
    first: dict[str, float] = field(default_factory=dict)
    best: dict[str, tuple[float, int]] = field(default_factory=dict)
    """First and best mean of ``batch`` and ``held-out`` rewards; the best with its iteration."""
    first_prompts: object = None
    """Number of prompts of the first evaluation: only evaluations on as many are compared to the digit."""
    evaluated_at: int = 0
    began: float = 0.0
    last: float = 0.0
    final_evaluation: float = 0.0
    usual: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    """Seconds of recent iterations without an evaluation."""
    evaluated: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    """Seconds of recent iterations with one."""
    counted: list[int] = field(default_factory=lambda: [0, 0])

    def start(self, total: int, done: int) -> None:
        """Begin the clock."""
        self.total, self.done = total, done
        self.began = self.last = self.clock()

    def take(self, metrics: Mapping[str, Any]) -> None:
        """Add a line of metrics."""
        now = self.clock()
        iteration, seconds, self.last = _count(metrics.get("iteration")), now - self.last, now
        evaluation = metrics.get("evaluation")
        if isinstance(evaluation, Mapping):
            self.held_out, self.evaluated_at = evaluation, iteration or 0
            if "held-out" not in self.first:
                self.first_prompts = evaluation.get("prompts")
            self._note("held-out", _number(evaluation.get("mean")), iteration)
        if iteration == 0:
            self.final_evaluation = _number(metrics.get("seconds")) or seconds
            return
        self.metrics, self.done = metrics, iteration if iteration is not None else self.done + 1
        self._note("batch", _number(_entry(metrics, "reward", "mean")), iteration)
        kind = int(isinstance(evaluation, Mapping))
        self.counted[kind] += 1
        (self.usual, self.evaluated)[kind].append(seconds)

    def _note(self, kind: str, mean: float | None, iteration: int | None) -> None:
        if mean is None:
            return
        self.first.setdefault(kind, mean)
        if not iteration:  # the base model is where a run starts, not a best of its own
            return
        if kind not in self.best or mean > self.best[kind][0]:
            self.best[kind] = (mean, iteration)

    @property
    def elapsed(self) -> float:
        """Seconds since the start of this session."""
        return self.clock() - self.began

    @property
    def remaining(self) -> float | None:
        """Seconds left: medians of recent iterations, evaluations at the rate seen so far, and the one at the end."""
        rates = [statistics.median(seconds) if seconds else 0.0 for seconds in (self.usual, self.evaluated)]
        seen = sum(self.counted)
        if not seen:
            return None
        each = sum(rate * count for rate, count in zip(rates, self.counted, strict=True)) / seen
        return each * max(self.total - self.done, 0) + self.final_evaluation


def plain_line(progress: Progress, metrics: Mapping[str, Any]) -> str:
    """One line of plain text for a line of metrics."""
    iteration = _count(metrics.get("iteration"))
    parts = [f"iteration {progress.done if iteration is None else iteration}/{progress.total}"]
    reward = metrics.get("reward")
    if isinstance(reward, Mapping):
        parts += [f"reward {_interval(reward)}", *_since(progress, "batch", reward)]
    if isinstance(metrics.get("evaluation"), Mapping):
        parts += [f"held-out {_interval(progress.held_out)}", *_since(progress, "held-out", progress.held_out)]
        parts += _watched(progress.held_out)
    if iteration != 0:
        parts += _health(progress.metrics)
        if (remaining := progress.remaining) is not None:
            parts.append(f"{clock(remaining)} left")
    return "  ".join(parts)


def held_out_line(progress: Progress) -> Text:
    """The latest evaluation on one line, for the record above a live panel."""
    value = progress.held_out
    words = "  ".join([_interval(value), *_since(progress, "held-out", value), *_watched(value)])
    return Text(f"evaluated at iteration {progress.evaluated_at}  ", style="dim").append(words, style="not dim bold")


def panel_rows(progress: Progress, phase: tuple[str, int, int], ascii_only: bool = False) -> list[RenderableType]:
    """The rows of the live panel: where the run is, rewards, gain per step, health. Missing numbers leave no row."""
    rows: list[RenderableType] = [_position(progress, phase)]
    for kind, value in (("held-out", progress.held_out), ("batch", progress.metrics.get("reward"))):
        if isinstance(value, Mapping) and value:
            text = _line(f"{kind:<9} ").append(_interval(value), style="bold" if kind == "held-out" else "")
            rows.append(text.append("  " + "  ".join(_since(progress, kind, value)), style="dim"))
    rows += gain_rows(progress.metrics.get("gain_mean"), ascii_only)
    if health := _health(progress.metrics):
        rows.append(_line("  ".join(health), style="dim"))
    return rows


def gain_rows(gains: object, ascii_only: bool = False) -> list[Text]:
    """Mean gain by step: a row of bars for gains and one of hanging bars for losses; none where nothing is known."""
    values = [_number(gain) for gain in gains] if isinstance(gains, Sequence) and not isinstance(gains, str) else []
    known = {step: value for step, value in enumerate(values) if value is not None}
    if not known:
        return []
    largest = max(map(abs, known.values())) or 1.0
    up, down = (ASCII_BLOCKS, ASCII_HANGING) if ascii_only else (BLOCKS, HANGING)
    width = 2 if len(values) <= 20 else 1
    above, below = _line("gain/step "), _line(" " * 10)
    for value in values:
        share = 0.0 if value is None else value / largest
        above.append((_level(share, up) if share > 0 else " ") * width, style="green")
        below.append((_level(-share, down) if share < 0 else " ") * width, style="red")
    top, low = max(known, key=known.__getitem__), min(known, key=known.__getitem__)
    above.append(f"  highest {known[top]:+.3f} at step {top}", style="dim")
    below.append(f"  lowest  {known[low]:+.3f} at step {low}", style="dim")
    return [above, below]


def _level(share: float, ramp: str) -> str:
    """The bar for a share in (0, 1]: anything above zero shows."""
    return ramp[max(1, round(share * (len(ramp) - 1)))]


def _position(progress: Progress, phase: tuple[str, int, int]) -> Table:
    name, done, total = phase
    row = Table.grid(padding=(0, 2, 0, 0))
    for k in range(4):
        row.add_column(no_wrap=k != 1, max_width=20 if k == 1 else None)  # a narrow terminal shortens the bar first
    inside = f"{clean(name)} {done}/{total}" if total > 0 else f"{clean(name)} {done}" if done else clean(name)
    remaining = progress.remaining
    left = f", about {clock(remaining)} left" if remaining is not None and name else ""
    row.add_row(
        Text(f"iteration {progress.done}/{progress.total}", style="bold"),
        ProgressBar(
            total=max(progress.total, 1), completed=progress.done, complete_style="cyan", finished_style="green"
        ),
        Text(inside, style="cyan"),
        Text(f"{clock(progress.elapsed)} elapsed{left}", style="dim"),
    )
    return row


def _line(text: str, style: str = "") -> Text:
    return Text(text, style=style, no_wrap=True, overflow="ellipsis")


def _since(progress: Progress, kind: str, value: Mapping[str, Any]) -> list[str]:
    """Change since the start and the best so far, in words."""
    mean, first = _number(value.get("mean")), progress.first.get(kind)
    words = []
    change = value.get("change")
    if isinstance(change, Mapping) and _number(change.get("mean")) is not None:
        words.append(f"{_interval(change, '+')} since start")
    elif mean is not None and first is not None and kind in progress.best:
        about = "about " if kind == "held-out" and value.get("prompts") != progress.first_prompts else ""
        words.append(f"{about}{mean - first:+.3f} since start")
    if kind in progress.best:
        best, iteration = progress.best[kind]
        words.append(f"best {best:.3f} at {iteration}")
    return words


def _watched(evaluation: Mapping[str, Any]) -> list[str]:
    """What the watched reward says of the same images, where there is one."""
    watched = evaluation.get("watched")
    return [f"watched {_interval(watched)}"] if isinstance(watched, Mapping) else []


def _health(metrics: Mapping[str, Any]) -> list[str]:
    """What tells a sane run from a sick one, in a few words each."""
    degenerate, groups = _count(metrics.get("degenerate_groups")), _count(metrics.get("groups"))
    ratio, norm, memory = (_number(metrics.get(key)) for key in ("ratio_deviation", "grad_norm", "memory_mb"))
    failed, seconds = _count(metrics.get("failed_samples")), _number(metrics.get("seconds"))
    words = [
        f"no signal in {degenerate}/{groups} groups" if degenerate is not None and groups is not None else "",
        f"ratio deviation {ratio:.1e}" if ratio is not None else "",
        f"grad norm {norm:.3g}" if norm is not None else "",
        f"{failed} samples failed" if failed else "",
        f"{memory:.0f} MB" if memory is not None else "",
        f"{seconds:.2g} s each" if seconds is not None else "",
    ]
    return [word for word in words if word]


def _interval(value: Mapping[str, Any], sign: str = "") -> str:
    mean, low, high = (_number(value.get(key)) for key in ("mean", "low", "high"))
    if mean is None:
        return "not known"
    bounds = "" if low is None or high is None else f" [{low:{sign}.3f}, {high:{sign}.3f}]"
    return f"{mean:{sign}.3f}{bounds}"


def clock(seconds: float) -> str:
    """``0:07``, ``12:34``, ``3:04:05``."""
    whole = max(0, round(seconds))
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"


def _entry(value: object, *keys: str) -> object:
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _number(value: object) -> float | None:
    """A finite number, or None."""
    whole = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if whole else None  # type: ignore[arg-type]


def _count(value: object) -> int | None:
    number = _number(value)
    return None if number is None else int(number)
