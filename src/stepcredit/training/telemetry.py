"""What a person sees while a run goes on: a live panel in a terminal, a plain line per iteration anywhere else."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text
from torch import Tensor

from stepcredit.training.progress import Progress, held_out_line, panel_rows, plain_line
from stepcredit.untrusted import clean


class Display(Protocol):
    """Where a run tells how it is getting on. No method raises because a metric is missing or null."""

    def start(self, total: int, done: int, header: Sequence[str]) -> None:
        """Begin: ``done`` of ``total`` iterations lie behind; ``header`` says what is about to happen."""

    def phase(self, name: str, done: int, total: int) -> None:
        """Progress inside an iteration, in units of the phase; ``total`` is 0 where it is not known. Cheap."""

    def iteration(self, metrics: Mapping[str, Any]) -> None:
        """A line of metrics.jsonl: an iteration has ended, or the base model has been evaluated (iteration 0)."""

    def images(self, iteration: int, images: Tensor) -> None:
        """Pictures of an evaluation, uint8 ``[N, H, W, 3]``; those of iteration 0 are the base model's."""

    def message(self, text: str) -> None:
        """A warning or a note, above the live region."""

    def stop(self) -> None:
        """End; harmless if repeated."""


def make_display(quiet: bool = False, console: Console | None = None) -> Display:
    """The display that suits a console: live in a terminal, plain lines elsewhere, messages alone if ``quiet``."""
    console = console or Console(file=sys.stdout)
    if quiet:
        return QuietDisplay(console)
    live = console.is_terminal and not console.is_dumb_terminal
    return LiveDisplay(console) if live else PlainDisplay(console)


def memory_mb() -> float:
    """Peak resident memory of this process in megabytes (10^6 bytes); NaN where the platform does not tell."""
    try:
        import resource
    except ImportError:
        return math.nan
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * (1 if sys.platform == "darwin" else 1024) / 1e6


class QuietDisplay:
    """Messages alone, as plain lines."""

    def __init__(self, console: Console) -> None:
        self._write = _line_writer(console)

    def start(self, total: int, done: int, header: Sequence[str]) -> None:
        """Nothing to show."""

    def phase(self, name: str, done: int, total: int) -> None:
        """Nothing to show."""

    def iteration(self, metrics: Mapping[str, Any]) -> None:
        """Nothing to show."""

    def images(self, iteration: int, images: Tensor) -> None:
        """Not shown: the report has them."""

    def message(self, text: str) -> None:
        """Write the message."""
        self._write(clean(text))

    def stop(self) -> None:
        """Nothing to end."""


class PlainDisplay:
    """One line per iteration, flushed, without control codes: for logs, pipes and notebooks."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._write = _line_writer(console)
        self._progress = Progress(clock)

    def start(self, total: int, done: int, header: Sequence[str]) -> None:
        """Write the header."""
        self._progress.start(total, done)
        for line in header:
            self._write(clean(line))

    def phase(self, name: str, done: int, total: int) -> None:
        """Not shown: a line is written when the iteration ends."""

    def iteration(self, metrics: Mapping[str, Any]) -> None:
        """Write the iteration's line."""
        self._progress.take(metrics)
        self._write(plain_line(self._progress, metrics))

    def images(self, iteration: int, images: Tensor) -> None:
        """Not shown: the report has them."""

    def message(self, text: str) -> None:
        """Write the message."""
        self._write(clean(text))

    def stop(self) -> None:
        """Nothing to end."""


class LiveDisplay:
    """A panel of a few lines that is redrawn in place; evaluations and messages scroll away above it."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._progress = Progress(clock)
        self._phase: tuple[str, int, int] = ("starting", 0, 0)
        self._live = Live(get_renderable=self.panel, console=console, refresh_per_second=4)

    def start(self, total: int, done: int, header: Sequence[str]) -> None:
        """Write the header and show the panel."""
        self._progress.start(total, done)
        for line in header:
            self._console.print(Text(clean(line), style="dim"))
        self._live.start()

    def phase(self, name: str, done: int, total: int) -> None:
        """Remember the phase; the panel's own thread draws it."""
        self._phase = (name, done, total)

    def iteration(self, metrics: Mapping[str, Any]) -> None:
        """Take the iteration's metrics; an evaluation also leaves a line above the panel."""
        self._progress.take(metrics)
        if isinstance(metrics.get("evaluation"), Mapping):
            self._console.print(held_out_line(self._progress))
        self._live.refresh()

    def images(self, iteration: int, images: Tensor) -> None:
        """Not shown: the report has them."""

    def message(self, text: str) -> None:
        """Write the message above the panel."""
        self._console.print(Text(clean(text), style="yellow"))

    def stop(self) -> None:
        """Leave the last panel on the screen and give the cursor back."""
        self._phase = ("", 0, 0)
        self._live.stop()

    def panel(self) -> Group:
        """The panel as it is now."""
        return Group(*panel_rows(self._progress, self._phase, self._console.options.ascii_only))


def _line_writer(console: Console) -> Callable[[str], None]:
    """Writes lines as they are, whatever the stream's encoding; a stream that has gone away never ends a run."""

    def write(line: str) -> None:
        encoding = getattr(console.file, "encoding", None) or "utf-8"
        try:
            console.file.write(line.encode(encoding, "replace").decode(encoding) + "\n")
            console.file.flush()
        except (OSError, ValueError, RuntimeError):  # closed, or re-entered by a signal in the middle of a write
            return

    return write
