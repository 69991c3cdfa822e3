"""``stepcredit pretrain``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
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
    if args.task == "prefer":
        return pretrain_scorer.run(args.to or Path("prefer.safetensors"), args.steps, args.seed, args.threads)
    try:
        shipped = pretrain.shipped(args.task)
    except ValueError as error:
        raise UserError(str(error)) from error
    to = args.to or Path(f"{args.task}.safetensors")
    if to.exists():
        raise UserError(f"{str(to)!r} exists and is not overwritten; give another --to")
    torch.set_num_threads(args.threads)
    config = replace(shipped, steps=shipped.steps if args.steps is None else args.steps, seed=args.seed)
    out = console()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=out, disable=not out.is_terminal) as bar:
        job = bar.add_task("flow matching", total=config.steps)

        def report(progress: pretrain.Progress) -> None:
            bar.update(job, completed=progress.step, description=f"loss {progress.loss:.4f}")
            if progress.exact is not None:
                line = f"step {progress.step:>6}  loss {progress.loss:.4f}  held-out reward {progress.reward:.3f}"
                out.print(f"{line}  exact {progress.exact:.1%}")

        try:
            policy = pretrain.pretrain(config, report)
        except ValueError as error:
            raise UserError(str(error)) from error
    to.parent.mkdir(parents=True, exist_ok=True)
    policy.save(to, pretrain.metadata(config))
    out.print(f"wrote {to}; train from it with: stepcredit train {args.task}-stepwise --model {to}")
    return 0
