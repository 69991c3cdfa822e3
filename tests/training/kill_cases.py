"""Runs that are killed with SIGKILL again and again, and resumed each time, until one comes to its end.

Run as a program (``python kill_cases.py RECIPE FOLDER ONE_IN MOMENTS``), this file makes, in FOLDER: ``whole``, which
nobody kills; ``acts``, killed before each kind (or one in so many kinds) of act by which a start, an iteration, its
checkpoint, the pruning and the end of a run change the disk; ``clock-K``, killed at random moments, so many in all. All
are forked from one process, which has imported everything and built the parts of the run once; the last builds them
anew. It prints one JSON line of what it did.
"""

from __future__ import annotations

import json
import os
import random
import re
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from zlib import crc32

import torch

from stepcredit.training import files, trainer
from stepcredit.training import recipe as recipes
from stepcredit.training.recipe import Recipe
from stepcredit.training.setup import setup
from stepcredit.training.telemetry import make_display

Prepare = Callable[[], object]


def start(recipe: Recipe, folder: Path, prepare: Prepare = lambda: None) -> int:
    """Process id of a forked child that trains the recipe into the folder, or continues what is there."""
    pid = os.fork()
    if pid == 0:
        try:
            prepare()
            trainer.train(recipe, folder, make_display(quiet=True), resume=(folder / "recipe.yaml").exists())
            os._exit(0)
        except BaseException as error:
            print(repr(error), file=sys.stderr, flush=True)
            os._exit(1)
    return pid


def ended(pid: int) -> bool:
    """Wait for a child; whether it came to its end. Anything but that and SIGKILL is an error."""
    status = os.waitpid(pid, 0)[1]
    assert status == 0 or (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL), status
    return status == 0


def kill_at_acts(recipe: Recipe, folder: Path, one_in: int) -> list[str]:
    """Kill before each kind of act in turn, and return them: an act, its number blotted out, and what it is part of.

    ``one_in``: of the kinds only about one in so many, the same whenever it is asked.
    """
    killed: list[str] = []
    while True:
        reader, writer = os.pipe()

        def prepare(writer: int = writer) -> None:
            part = "run"

            def point(act: str) -> None:
                nonlocal part
                act = re.sub(r"\d{6}", "N", act)
                if act.startswith("mkdir "):
                    part = act.removeprefix("mkdir ")
                elif act.startswith("open ") and not act.endswith(".safetensors"):
                    part = "run" if "metrics" in act or act.endswith(".tmp") else part
                kind = f"{part}: {act}"
                if kind not in killed and crc32(kind.encode()) % one_in == 0:
                    os.write(writer, kind.encode())
                    os.kill(os.getpid(), signal.SIGKILL)

            files._point = point

        done = ended(start(recipe, folder, prepare))
        os.close(writer)
        with os.fdopen(reader) as pipe:
            killed.append(pipe.read())
        if done:
            return killed[:-1]


def kill_by_clock(recipe: Recipe, folder: Path, moments: int, longest: float) -> int:
    """Kill after random processor times up to ``longest`` seconds, ``moments`` times; a run that comes to its end
    before that is followed by another. Returns the number of runs, ``clock-0`` and so on.
    """
    draw, kills, runs = random.Random(0), 0, 1
    while kills < moments:
        target = folder / f"clock-{runs - 1}"
        pid, moment = start(recipe, target), draw.uniform(0.0, longest)
        while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None and processor_time(pid) < moment:
            time.sleep(0.002)
        os.kill(pid, signal.SIGKILL)
        if ended(pid):
            runs += 1
        else:
            kills += 1
    trainer.setup = setup  # the last one builds its parts anew
    assert ended(start(recipe, folder / f"clock-{runs - 1}"))
    return runs


def processor_time(pid: int) -> float:
    """Seconds of processor time that a process has used: a clock that other processes do not disturb."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main(recipe_file: Path, folder: Path, one_in: int, moments: int) -> None:
    """All runs."""
    torch.set_num_threads(1)
    os.fsync = lambda fd: None  # a kill loses no page cache
    recipe = recipes.parse(recipe_file.read_text(), "recipe")
    parts = setup(recipe)
    trainer.setup = lambda recipe: parts
    assert ended(start(recipe, folder / "whole"))
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    acts = kill_at_acts(recipe, folder / "acts", one_in)
    runs = kill_by_clock(recipe, folder, moments, 3 * (used.ru_utime + used.ru_stime) / recipe.iterations)
    print(json.dumps({"acts": acts, "clocks": runs}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
