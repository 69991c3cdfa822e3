"""Trackers: TensorBoard or trackio as further displays of a run; views of metrics.jsonl, which stays the truth."""

from __future__ import annotations

import contextlib
import importlib
import io
import math
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from stepcredit.errors import UserError
from stepcredit.reports.folder import lines
from stepcredit.training.files import write_text_atomic
from stepcredit.training.pictures import grid
from stepcredit.training.telemetry import Display

Name = Literal["none", "tensorboard", "trackio"]
Lines = Sequence[Mapping[str, Any]]
"""Of metrics.jsonl."""
PROJECT = "stepcredit"
"""Project of every run in trackio."""
_GAP, _ENLARGED = 2, 128
"""Pixels between pictures, and the height up to which small ones are enlarged."""


class Tracker(Protocol):
    """What keeps the numbers and pictures of a run elsewhere."""

    def scalars(self, values: Mapping[str, float], iteration: int) -> None:
        """Keep numbers by name."""

    def image(self, name: str, pixels: NDArray[np.uint8], iteration: int) -> None:
        """Keep a picture, uint8 ``[H, W, 3]``."""

    def close(self) -> None:
        """Write what is not yet written."""


def require(name: Name) -> None:
    """Raise UserError unless the tracker's package is installed."""
    if name == "none":
        return
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise UserError(
            f'tracker {name!r} needs the package {error.name!r}: pip install "stepcredit[track]", or set tracker: none'
        ) from error


def tracked(name: Name, folder: Path, display: Display) -> Display:
    """``display`` itself, or one that tells a tracker too.

    What the run's log holds already (of a run that is resumed) is told again or kept, never doubled.
    """
    if name == "none":
        return display
    make: Callable[[Path, Lines], Tracker] = _TensorBoard if name == "tensorboard" else _Trackio
    return TrackedDisplay(display, folder, make, name)


def flat(metrics: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """The numbers of a line of metrics.jsonl with names like ``evaluation/per_tag/colors`` and ``gain_mean/step-03``.

    What is null, not finite, no number or the iteration itself is left out.
    """
    for key, value in metrics.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from flat(value, f"{name}/")
        elif isinstance(value, list):
            yield from flat({f"step-{k:02d}": item for k, item in enumerate(value)}, f"{name}/")
        elif type(value) in (int, float) and math.isfinite(value) and name != "iteration":
            yield name, float(value)


class TrackedDisplay:
    """A display that tells a tracker everything too. A tracker that fails says so once and is left alone."""

    def __init__(self, display: Display, folder: Path, make: Callable[[Path, Lines], Tracker], name: str) -> None:
        self._display, self._folder, self._make, self._name = display, folder, make, name
        self._told: Lines = ()
        self._tracker: Tracker | None = None
        self._failed = False

    def start(self, total: int, done: int, header: Sequence[str]) -> None:
        """Pass on, and see what the log holds already."""
        self._display.start(total, done, header)
        self._told = lines(self._folder / "metrics.jsonl")

    def phase(self, name: str, done: int, total: int) -> None:
        """Pass on."""
        self._display.phase(name, done, total)

    def iteration(self, metrics: Mapping[str, Any]) -> None:
        """Pass on, and track the line's numbers."""
        self._display.iteration(metrics)
        self._tell(lambda tracker: tracker.scalars(dict(flat(metrics)), int(metrics["iteration"])))

    def images(self, iteration: int, images: Tensor) -> None:
        """Pass on, and track the pictures as one grid, small ones enlarged without blur."""
        self._display.images(iteration, images)
        if len(images):
            sheet = np.asarray(grid(images, _GAP, max(1, _ENLARGED // images.shape[1])))
            self._tell(lambda tracker: tracker.image("held-out", sheet, iteration))

    def message(self, text: str) -> None:
        """Pass on."""
        self._display.message(text)

    def stop(self) -> None:
        """Close the tracker, and pass on."""
        if self._tracker is not None:
            self._tell(lambda tracker: tracker.close())
        self._tracker = None
        self._display.stop()

    def _tell(self, what: Callable[[Tracker], None]) -> None:
        """Tell the tracker, opened at the first word: until then the folder is a run that never started."""
        if self._failed:
            return
        try:
            if self._tracker is None:
                self._tracker = self._make(self._folder, self._told)
            what(self._tracker)
        except Exception as error:  # whatever a tracker does, it must never cost a run
            self._failed, self._tracker = True, None
            self._display.message(
                f"the tracker {self._name} failed and is not told any more ({type(error).__name__}: {error}); "
                "metrics.jsonl has everything"
            )


class _TensorBoard:
    """Event files in the run's folder ``tensorboard``."""

    def __init__(self, folder: Path, told: Lines) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # steps from here on that an earlier process wrote after its last checkpoint are hidden by the reader
        events = folder / "tensorboard"
        known = events.is_dir()
        purge = int(told[-1]["iteration"]) + 1 if told else 0
        self._writer: Any = SummaryWriter(str(events), purge_step=purge if known else None)
        for line in () if known else told:  # a run that had no tracker before
            self.scalars(dict(flat(line)), int(line["iteration"]))

    def scalars(self, values: Mapping[str, float], iteration: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, iteration)
        self._writer.flush()

    def image(self, name: str, pixels: NDArray[np.uint8], iteration: int) -> None:
        self._writer.add_image(name, pixels, iteration, dataformats="HWC")

    def close(self) -> None:
        self._writer.close()


class _Trackio:
    """A run of the project ``stepcredit`` in trackio's own local store (its ``TRACKIO_DIR``)."""

    def __init__(self, folder: Path, told: Lines) -> None:
        import trackio

        self._trackio: Any = trackio
        note = folder / "trackio.txt"
        with contextlib.redirect_stdout(io.StringIO()):  # it greets
            if note.is_file():  # it can hide no steps, so the run is told anew from its log
                before = note.read_text(encoding="utf-8").strip()
                for run in [run for run in trackio.Api().runs(PROJECT) if run.name == before]:
                    run.delete()
            # a name that no other run has, so that nothing of another folder is ever mixed in or deleted
            name = f"{folder.resolve().name}-{secrets.token_hex(4)}"
            trackio.init(project=PROJECT, name=name, auto_log_gpu=False, auto_log_cpu=False)
        write_text_atomic(note, name + "\n")
        for line in told:
            self.scalars(dict(flat(line)), int(line["iteration"]))

    def scalars(self, values: Mapping[str, float], iteration: int) -> None:
        self._trackio.log(dict(values), step=iteration)

    def image(self, name: str, pixels: NDArray[np.uint8], iteration: int) -> None:
        self._trackio.log({name: self._trackio.Image(pixels, caption=f"iteration {iteration}")}, step=iteration)

    def close(self) -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            self._trackio.finish()
