"""``stepcredit pretrain``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
import tyro
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from stepcredit.cli import pretrain_scorer
from stepcredit.cli.common import console, parse
from stepcredit.errors import UserError
from stepcredit.training import pretrain


@dataclass
class Pretrain:
    """Rebuild the base model of a desk task by flow matching on rendered pictures, or the scorer of `prefer`.

    With the default settings and as many threads it gives the shipped file, byte for byte.
    """

    task: tyro.conf.Positional[str] = "compose"
    """Desk task: compose or spell, or prefer, whose reward is the model."""
    to: Path | None = None
    """File to write, TASK.safetensors by default; never overwritten."""
    steps: int | None = None
    """Optimiser steps; those of the shipped model by default."""
    seed: int = 0
    """Seed of weights, prompts, pictures, times and noise."""
    threads: int = 1
    """Threads of torch; the shipped file was made with 1."""


def run(argv: Sequence[str]) -> int:
    """Run the command."""
    args = parse(Pretrain, "pretrain", argv)
    to = args.to or Path(f"{args.task}.safetensors")
    if to.exists():
        raise UserError(f"{str(to)!r} exists and is not overwritten; give another --to")
    torch.set_num_threads(args.threads)
    out = console()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=out, disable=not out.is_terminal) as bar:
        make = pretrain_scorer.run if args.task == "prefer" else partial(_base_model, args.task)
        use = make(to, args.steps, args.seed, bar)
    out.print(f"wrote {to}; train with it: {use}")
    return 0


def _base_model(task: str, to: Path, steps: int | None, seed: int, bar: Progress) -> str:
    """Train the base model of a task, write it to ``to`` and say how to use it. Raises UserError."""
    try:
        shipped = pretrain.shipped(task)
        config = replace(shipped, steps=shipped.steps if steps is None else steps, seed=seed)
        job = bar.add_task("flow matching", total=config.steps)

        def report(progress: pretrain.Progress) -> None:
            bar.update(job, completed=progress.step, description=f"loss {progress.loss:.4f}")
            if progress.exact is not None:
                line = f"step {progress.step:>6}  loss {progress.loss:.4f}  held-out reward {progress.reward:.3f}"
                bar.console.print(f"{line}  exact {progress.exact:.1%}")

        policy = pretrain.pretrain(config, report)
    except ValueError as error:
        raise UserError(str(error)) from error
    to.parent.mkdir(parents=True, exist_ok=True)
    policy.save(to, pretrain.metadata(config))
    return f"stepcredit train {task}-stepwise --model {to}"
