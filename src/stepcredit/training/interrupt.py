"""Ctrl-C and SIGTERM: a run ends after the iteration in hand, saved."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from stepcredit.training import distributed


@dataclass
class Stop:
    """Why a run should end after the iteration in hand."""

    reason: str | None = None
    signal: int | None = None
    noted: int | None = None
    """A signal that this process has received."""

    def settle(self) -> None:
        """Make a noted signal the reason to stop, also one that another process has noted.

        All processes call this at the same points of a run, so that they stop at the same. Raises PeerLostError.
        """
        number = int(distributed.largest(self.noted or 0))
        if number and self.signal is None:
            self.signal, self.reason = number, _name(number)


def _name(number: int) -> str:
    return "interrupted" if number == signal.SIGINT else "terminated"


@contextmanager
def interruptible(stop: Stop, tell: Callable[[str], None]) -> Iterator[None]:
    """The first Ctrl-C or SIGTERM is noted in ``stop``; a second Ctrl-C raises KeyboardInterrupt at once."""

    def handle(number: int, frame: object) -> None:
        if stop.noted is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        stop.noted = number
        tell(f"{_name(number)}: ending after this iteration, which is saved (Ctrl-C again: at once)")

    old: dict[signal.Signals, Any] = {}
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            old[number] = signal.signal(number, handle)
    except ValueError:  # not in the main thread: signals belong to the caller
        pass
    try:
        yield
    finally:
        for number, previous in old.items():
            signal.signal(number, previous)
