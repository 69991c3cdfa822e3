"""Ctrl-C and SIGTERM: a run ends after the iteration in hand, saved."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass
class Stop:
    """Why a run should end after the iteration in hand."""

    reason: str | None = None
    signal: int | None = None


@contextmanager
def interruptible(stop: Stop, tell: Callable[[str], None]) -> Iterator[None]:
    """The first Ctrl-C or SIGTERM is noted in ``stop``; a second Ctrl-C raises KeyboardInterrupt at once."""

    def handle(number: int, frame: object) -> None:
        if stop.signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        stop.signal = number
        stop.reason = "interrupted" if number == signal.SIGINT else "terminated"
        tell(f"{stop.reason}: ending after this iteration, which is saved (Ctrl-C again: at once)")

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
