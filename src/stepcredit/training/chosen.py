"""Which checkpoint of a run is meant when its weights are used: the newest, or the best where a guard stopped it."""

from __future__ import annotations

from pathlib import Path

from stepcredit.errors import UserError
from stepcredit.training import checkpoint
from stepcredit.training.checkpoint import BEST, LATEST, Checkpoint, Warn
from stepcredit.training.manifest import step_name, step_of, steps

AUTO = "auto"


def chosen(run: Path, which: str, say: Warn) -> Checkpoint:
    """The checkpoint of a run's folder that ``which`` names: ``auto``, ``latest``, ``best`` or an iteration.

    ``auto`` is the newest good one, unless a guard stopped the run there: what made it stop is not what anybody wants,
    so it is then the one of the best evaluation, and ``say`` is told so. Raises UserError for a word that is none of
    these or an iteration without a checkpoint, and CheckpointError for one that is damaged.
    """
    folder = run / "checkpoints"
    if which == "best":
        if not (folder / BEST).exists():
            raise UserError(
                f"{run} has no best checkpoint, as nothing was evaluated while it trained; leave --checkpoint out"
            )
        return checkpoint.read(folder / BEST)
    if which.isdecimal():
        if not (folder / step_name(int(which))).is_dir():
            there = ", ".join(str(step_of(path.name)) for path in reversed(steps(folder)))
            raise UserError(f"{run} has no checkpoint of iteration {which}; there are those of {there or 'none'}")
        return checkpoint.read(folder / step_name(int(which)))
    if which not in (AUTO, LATEST):
        raise UserError(f"--checkpoint {which!r} is none of auto, latest, best and an iteration: give one of these")
    newest = checkpoint.load(folder, warn=say)
    fired = newest.state.get("guards", {}).get("fired")
    if which == LATEST or not fired or not (folder / BEST).exists():
        return newest
    best = checkpoint.read(folder / BEST)
    say(
        f"the guard {fired['guard']} stopped this run after iteration {newest.iteration}: taking the best checkpoint, "
        f"of iteration {best.iteration} (--checkpoint latest takes the last)"
    )
    return best


def require_run(source: str, which: str) -> None:
    """Raise UserError where a checkpoint is asked for of a recipe, which has none."""
    if which != AUTO:
        raise UserError(
            f"--checkpoint {which} belongs to the folder of a run, and {source!r} is a recipe, whose base model is "
            "shown; give the folder, or leave --checkpoint out"
        )
