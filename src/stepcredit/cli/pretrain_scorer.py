"""``stepcredit pretrain prefer``: the scorer behind a desk task's learned reward."""

from __future__ import annotations

from pathlib import Path

from rich.progress import Progress

from stepcredit.cli.common import table
from stepcredit.errors import UserError
from stepcredit.rewards import prefer_model
from stepcredit.training import pretrain_prefer


def run(to: Path, steps: int | None, seed: int, bar: Progress) -> str:
    """Train the scorer, write it to ``to`` and say how to use it; ``steps`` None makes the shipped one.

    Raises UserError.
    """
    default = pretrain_prefer.PreferConfig.steps
    config = pretrain_prefer.PreferConfig(steps=default if steps is None else steps, seed=seed)
    job = bar.add_task("contrastive", total=config.steps)

    def report(progress: pretrain_prefer.Progress) -> None:
        bar.update(job, completed=progress.step, description=f"loss {progress.loss:.3f}")
        if progress.accuracy is not None:
            rows = table("own picture above one that differs in one thing, held-out prompts", "pairs", "right")
            for name, share in progress.accuracy.items():
                rows.add_row(name, f"{share:.1%}")
            bar.console.print(rows)

    try:
        scorer = pretrain_prefer.pretrain(config, report)
    except ValueError as error:
        raise UserError(str(error)) from error
    to.parent.mkdir(parents=True, exist_ok=True)
    prefer_model.save(scorer, to, pretrain_prefer.metadata(config))
    return f"stepcredit train prefer-stepwise --reward-options weights {to}"
