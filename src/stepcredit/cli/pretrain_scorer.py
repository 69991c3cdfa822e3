"""``stepcredit pretrain prefer``: the scorer behind a desk task's learned reward."""

from __future__ import annotations

from pathlib import Path

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from stepcredit.cli.common import console, table
from stepcredit.errors import UserError
from stepcredit.rewards import prefer_model
from stepcredit.training import pretrain_prefer


def run(to: Path, steps: int | None, seed: int, threads: int) -> int:
    """Train the scorer and write it to ``to``; ``steps`` None makes the shipped one. Raises UserError."""
    if to.exists():
        raise UserError(f"{str(to)!r} exists and is not overwritten; give another --to")
    torch.set_num_threads(threads)
    default = pretrain_prefer.PreferConfig.steps
    config = pretrain_prefer.PreferConfig(steps=default if steps is None else steps, seed=seed)
    out = console()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=out, disable=not out.is_terminal) as bar:
        job = bar.add_task("contrastive", total=config.steps)

        def report(progress: pretrain_prefer.Progress) -> None:
            bar.update(job, completed=progress.step, description=f"loss {progress.loss:.3f}")
            if progress.accuracy is not None:
                rows = table("own picture above one that differs in one thing, held-out prompts", "pairs", "right")
                for name, share in progress.accuracy.items():
                    rows.add_row(name, f"{share:.1%}")
                out.print(rows)

        try:
            scorer = pretrain_prefer.pretrain(config, report)
        except ValueError as error:
            raise UserError(str(error)) from error
    to.parent.mkdir(parents=True, exist_ok=True)
    prefer_model.save(scorer, to, pretrain_prefer.metadata(config))
    out.print(f"wrote {to}; train with it: stepcredit train prefer-stepwise --reward-options weights {to}")
    return 0
