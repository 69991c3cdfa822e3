"""The runs of a comparison: which they are, how far each has come, and how the missing ones are made."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from stepcredit.errors import UserError
from stepcredit.reports import folder as folders
from stepcredit.reports.folder import number
from stepcredit.rewards.base import RewardError
from stepcredit.training import recipe as recipes
from stepcredit.training.checkpoint import CheckpointError
from stepcredit.training.files import safe_run_dir, write_text_atomic
from stepcredit.training.interrupt import Stop
from stepcredit.training.recipe import MAY_CHANGE, Recipe
from stepcredit.training.telemetry import make_display
from stepcredit.training.trainer import never_started, stored_recipe, train

POLL = 0.2
"""Seconds between looks at the processes."""


@dataclass(frozen=True)
class Planned:
    """One run of a comparison."""

    label: str
    seed: int
    recipe: Recipe
    folder: Path

    @property
    def started(self) -> bool:
        """Whether there is anything to continue."""
        return (self.folder / "recipe.yaml").is_file() and not never_started(self.folder)

    @property
    def finished(self) -> bool:
        """Whether it came to its end, by itself or by a guard, and was evaluated; with these settings."""
        if not self.started or recipes.changed(stored_recipe(self.folder), self.recipe):
            return False
        summary = folders.read(self.folder).summary
        return summary.get("reward_after") is not None and summary.get("signal") is None


def plan(named: Mapping[str, Recipe], seeds: Sequence[int], folder: Path) -> list[Planned]:
    """All runs, seed by seed so that an interrupted comparison has whole pairs. Raises UserError.

    A folder that holds a run of other settings is refused, as ``train --resume`` refuses it.
    """
    planned = [
        Planned(label, seed, recipe.model_copy(update={"seed": seed}), safe_run_dir(folder, f"{label}-seed-{seed}"))
        for seed in seeds
        for label, recipe in named.items()
    ]
    for run in planned:
        if run.started:
            differing = recipes.changed(stored_recipe(run.folder), run.recipe)
            frozen = sorted(set(differing) - MAY_CHANGE)
            if frozen:
                was, now = differing[frozen[0]]
                raise UserError(
                    f"the run {str(run.folder)!r} was made with {frozen[0]} {was!r}, not {now!r}; "
                    "give the comparison another --name"
                )
    return planned


@dataclass(frozen=True)
class Status:
    """How far a run has come."""

    done: int
    total: int
    reward: float | None
    """The latest held-out mean."""
    seconds: float | None
    """Mean of an iteration."""
    evaluation: float | None
    """Seconds of the evaluation before it."""
    finished: bool


def status(run: Planned) -> Status:
    """Read from the run's folder."""
    if not run.started:
        return Status(0, run.recipe.iterations, None, None, None, False)
    read = folders.read(run.folder)
    means = [folders.mean_of(read.start), *read.series("evaluation", "mean")]
    if (after := number(folders.lookup(read.summary, "reward_after", "mean"))) is not None:
        means.append(after)
    seen = [m for m in means if m is not None]
    return Status(
        done=len(read.iterations),
        total=run.recipe.iterations,
        reward=seen[-1] if seen else None,
        seconds=folders.mean(read.series("seconds")),
        evaluation=_first_seconds(run.folder / "metrics.jsonl"),
        finished=run.finished,
    )


def execute(
    planned: Sequence[Planned], jobs: int, stop: Stop, console: Console, ended: Callable[[Planned], None]
) -> dict[str, str]:
    """Make the runs that are missing, and return what failed: run folder's name -> reason.

    One after another in this process, or ``jobs`` at a time in processes of one thread each. A run that fails does not
    keep the others from being made. Ends early when ``stop`` has a reason or a run was interrupted, each run in hand
    saved. ``ended`` is called after every run. Raises UserError if a recipe cannot be run.
    """
    missing = [run for run in planned if not run.finished]
    if jobs > 1:
        return _in_processes(missing, jobs, stop, ended)
    failed = {}
    for run in missing:
        stop.settle()
        if stop.reason is not None:
            break
        display = make_display(quiet=True, console=console)
        try:
            summary = train(run.recipe, run.folder, display, resume=run.started)
        except (RewardError, CheckpointError, FloatingPointError) as error:
            failed[run.folder.name] = str(error)
            continue
        finally:
            ended(run)
        if summary["signal"] is not None:
            stop.signal, stop.reason = summary["signal"], summary["stopped"]
    return failed


def _in_processes(
    missing: Sequence[Planned], jobs: int, stop: Stop, ended: Callable[[Planned], None]
) -> dict[str, str]:
    waiting, failed = list(missing), {}
    running: list[tuple[Planned, subprocess.Popen[bytes]]] = []
    told = False
    while running or (waiting and stop.reason is None):
        while waiting and len(running) < jobs and stop.reason is None:
            run = waiting.pop(0)
            running.append((run, _start(run)))
        stop.settle()
        if stop.reason is not None and not told:
            told = True
            for _, process in running:
                process.send_signal(signal.SIGTERM)
        time.sleep(POLL)
        for run, process in [pair for pair in running if pair[1].poll() is not None]:
            running.remove((run, process))
            if not run.finished and stop.reason is None:
                lines = _log(run).read_text(encoding="utf-8", errors="replace").strip().splitlines()
                failed[run.folder.name] = lines[-1] if lines else f"its process ended with {process.returncode}"
            ended(run)
    return failed


def _start(run: Planned) -> subprocess.Popen[bytes]:
    """A run in a process of its own, out of the terminal's reach: an interruption is passed on to it once."""
    source = run.folder.parent / "recipes" / f"{run.folder.name}.yaml"
    source.parent.mkdir(parents=True, exist_ok=True)
    write_text_atomic(source, recipes.dump(run.recipe))
    name = ["--resume", str(run.folder)] if run.started else ["--name", run.folder.name]
    command = [sys.executable, "-m", "stepcredit", "train", str(source), "--out", str(run.folder.parent), *name]
    with _log(run).open("wb") as log:
        return subprocess.Popen(
            [*command, "--quiet"],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _log(run: Planned) -> Path:
    return run.folder.parent / "recipes" / f"{run.folder.name}.log"


def _first_seconds(metrics: Path) -> float | None:
    for line in folders.lines(metrics):
        return number(line.get("seconds"))
    return None
