"""A run from beginning to end: evaluate, iterate, evaluate again, and keep everything that a person may ask for."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from stepcredit.errors import UserError
from stepcredit.reports import run as report
from stepcredit.rewards import selftest
from stepcredit.rewards.base import RewardError
from stepcredit.training import checkpoint, distributed, pictures, sharding, trackers
from stepcredit.training import recipe as recipes
from stepcredit.training.account import header, summarise
from stepcredit.training.evaluation import Evaluation, Slot, evaluate, read
from stepcredit.training.files import (
    append_line,
    last_line,
    replace_last_line,
    sole_writer,
    truncate_lines_after,
    write_text_atomic,
)
from stepcredit.training.guards import Fired, after_evaluation, after_iteration, limits
from stepcredit.training.interrupt import Stop, interruptible
from stepcredit.training.iteration import Clock, iterate
from stepcredit.training.recipe import Recipe
from stepcredit.training.records import to_json
from stepcredit.training.setup import Setup, setup
from stepcredit.training.state import TrainState, fresh
from stepcredit.training.telemetry import Display, memory_mb

REPORT_IMAGES = 24
"""Images kept of the evaluation before and after, for the report."""


@dataclass
class Run:
    """A run in progress: its parts, its state, its folder, and who is told."""

    folder: Path
    parts: Setup
    state: TrainState
    display: Display
    before: Evaluation | None = None
    stop: Stop = field(default_factory=Stop)

    @property
    def metrics(self) -> Path:
        """The log, one JSON line per iteration."""
        return self.folder / "metrics.jsonl"


def train(
    recipe: Recipe, folder: Path, display: Display, resume: bool = False, origin: str | None = None
) -> dict[str, Any]:
    """Train a recipe into a run folder and return its summary.

    A new run needs a folder that does not exist; ``resume`` continues one from its newest good checkpoint and gives the
    weights that an uninterrupted run would have given, bit by bit. Ctrl-C and SIGTERM end the run after the iteration
    in hand, saved. ``origin`` (JSON: how the recipe came about) is kept as ``origin.json``. Of several processes each
    calls this, and all must see the folder; the first one alone writes. Raises UserError before anything is written if
    the recipe cannot be run, RewardError if its reward fails its self-test; PeerLostError.
    """
    with contextlib.ExitStack() as held:
        return _to_the_end(_begun(recipe, folder, display, resume, origin, held))


def _begun(
    recipe: Recipe, folder: Path, display: Display, resume: bool, origin: str | None, held: contextlib.ExitStack
) -> Run:
    """The run before its next iteration, its folder ``held`` against other processes and all settings written."""
    with distributed.together(RewardError):
        if resume:
            _hold(folder, held)
            recipe = _resumed_recipe(recipe, folder)
        elif distributed.leads() and folder.exists() and not never_started(folder):
            raise UserError(f"the run {str(folder)!r} exists; choose another --name, or continue it with --resume")
        trackers.require(recipe.tracker)
        parts = setup(recipe)
        selftest.require(parts.reward)
        if parts.watch is not None:
            selftest.require(parts.watch)
    if recipe.shard:
        sharding.shard(parts.policy)
    state = fresh(parts.policy, recipe)
    tensors = {} if resume else state.tensors()
    run = Run(folder, parts, state, display)
    with distributed.together(checkpoint.CheckpointError):
        if resume:
            _restore(run)
            _stay_stopped(run)
        elif distributed.leads():
            folder.mkdir(parents=True, exist_ok=True)
            _hold(folder, held)
            write_text_atomic(folder / "recipe.yaml", recipes.dump(recipe))
            if origin is not None:
                write_text_atomic(folder / "origin.json", origin)
            write_text_atomic(folder / "ledger.json", to_json({**vars(parts.cost), **parts.cost.per_trajectory()}))
            checkpoint.rehearse_write(folder / "checkpoints", tensors, state.counters(), keep=recipe.keep_checkpoints)
    distributed.same(state.norm(), "weights")
    if distributed.leads():
        run.display = trackers.tracked(recipe.tracker, folder, display)
    return run


def _hold(folder: Path, held: contextlib.ExitStack) -> None:
    """Keep other processes from writing into the folder, if it is there."""
    if distributed.leads() and folder.is_dir():
        held.enter_context(sole_writer(folder))


def _to_the_end(run: Run) -> dict[str, Any]:
    """Evaluate, iterate, evaluate; the summary."""
    recipe, parts, state, display = run.parts.recipe, run.parts, run.state, run.display
    display.start(recipe.iterations, state.iteration, header(parts))
    try:
        with interruptible(run.stop, display.message):
            _before(run)
            run.stop.settle()
            _catch_up(run)
            run.stop.settle()
            while state.iteration < recipe.iterations and run.stop.reason is None:
                line = iterate(parts, state, display.phase)
                deviation = line["ratio_deviation_max"]
                _stop(run, after_iteration(recipe, state.guards, state.iteration, line["kl"], deviation))
                run.stop.settle()
                done = state.iteration == recipe.iterations or run.stop.reason is not None
                line["memory_mb"] = memory_mb()
                line["gpu_memory_mb"] = torch.cuda.max_memory_allocated() / 1e6 if torch.cuda.is_available() else None
                line["evaluation"] = _during(run) if _due(recipe.eval_every, state.iteration) and not done else None
                if distributed.leads():
                    append_line(run.metrics, to_json(line))
                display.iteration(line)
                if done or _due(recipe.checkpoint_every, state.iteration) or line["evaluation"]:
                    _save(run)
            return _finish(run)
    finally:
        display.stop()


def never_started(folder: Path) -> bool:
    """Whether a folder holds nothing, or the settings of a run that ended before its first evaluation."""
    settings = ("recipe.yaml", "origin.json", "ledger.json")
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir()}
    return files <= {*settings, *(f"{name}.tmp" for name in settings)}  # killed while it was writing one


def _before(run: Run) -> None:
    """Evaluate the base model, or take that evaluation from the run being resumed."""
    path, statistics = _evaluation_file(run, 0), _base_statistics(run.metrics)
    if run.state.iteration > 0 or statistics is not None:
        run.before = replace(read(path, run.parts.heldout), statistics=statistics or {})
        return
    clock = Clock()
    with clock("evaluation"):
        run.before = _evaluate(run, run.parts.heldout)
    rewards = run.before.rewards
    if bool((rewards == rewards[0]).all()):
        raise RewardError(
            f"reward {run.parts.reward.info.name!r} gave {float(rewards[0]):g} to every one of {len(rewards)} images "
            "of the base model: a constant teaches nothing; check the reward with `stepcredit check` "
            "(docs/troubleshooting.md#every-picture-has-the-same-reward)"
        )
    line = {"iteration": 0, "evaluation": run.before.as_dict(), "seconds": clock.seconds["evaluation"]}
    if distributed.leads():
        run.before.write(path)
        pictures.save_grid(run.folder / "samples" / "before.png", run.before.images)
        append_line(run.metrics, to_json(line))
    run.display.iteration(line)
    run.display.images(0, run.before.images)


def _catch_up(run: Run) -> None:
    """Of a resumed run, the evaluation that was due when it ended, and that ending took the place of."""
    state, recipe = run.state, run.parts.recipe
    if not 0 < state.iteration < recipe.iterations or not _due(recipe.eval_every, state.iteration):
        return
    line = last_line(run.metrics)
    if run.stop.reason is not None or line.get("iteration") != state.iteration or line.get("evaluation") is not None:
        return
    line["evaluation"] = _during(run)
    distributed.barrier()  # all have read the line
    if distributed.leads():
        replace_last_line(run.metrics, to_json(line))
    run.display.iteration({key: line[key] for key in ("iteration", "evaluation")})  # the rest was told
    _save(run)


def _evaluation_file(run: Run, iteration: int) -> Path:
    return run.folder / "evaluations" / f"iteration-{iteration:06d}.jsonl"


def _base_statistics(metrics: Path) -> dict[str, float] | None:
    """Image statistics of the base model, from the first line of a run's log; None if it is not there."""
    if not metrics.is_file():
        return None
    with metrics.open(encoding="utf-8") as file:
        line = file.readline()
    entry = json.loads(line) if line.endswith("\n") else {}
    return dict(entry["evaluation"]["image_statistics"]) if entry.get("iteration") == 0 else None


def _during(run: Run) -> dict[str, Any]:
    """Evaluate the averaged weights on the smaller set, remember the best, and see what the guards say."""
    state, on = run.state, run.parts.heldout_during
    result = _evaluate(run, on)
    if distributed.leads():
        result.write(_evaluation_file(run, state.iteration))
    run.display.images(state.iteration, result.images)
    assert run.before is not None
    base = run.before.first(len(on))
    best, best_iteration = _best_so_far(run, base, state.best, base.reward.mean)
    watched = _best_so_far(run, base, state.best_watched, base.watched.reward.mean) if base.watched else None
    state.note(result.reward.mean, result.watched.reward.mean if result.watched else None)
    _stop(
        run,
        after_evaluation(run.parts.recipe, state.guards, state.iteration, result, best, best_iteration, base, watched),
    )
    return result.as_dict()


def _best_so_far(run: Run, base: Evaluation, noted: tuple[float, int], of_base: float) -> tuple[Evaluation, int]:
    """The best evaluation up to now, the base model's included, and its iteration; ``noted`` is that of the run."""
    mean, iteration = noted
    if mean > of_base:
        try:
            return read(_evaluation_file(run, iteration), run.parts.heldout_during), iteration
        except (OSError, ValueError):  # made on other slots, before eval_prompts_during changed
            pass
    return base, 0


def _stop(run: Run, fired: Fired | None) -> None:
    """End the run after this iteration if a guard says so."""
    if fired is not None and run.stop.reason is None:
        run.stop.reason = fired.reason
        run.display.message(f"stopped by the guard {fired.guard}: {fired.reason}")


def _stay_stopped(run: Run) -> None:
    """A run that a guard has stopped goes on only with other limits."""
    fired = run.state.guards.fired
    if fired is not None and fired.limits == limits(run.parts.recipe):
        _stop(run, fired)
    elif fired is not None:
        run.state.guards.lift()


def _evaluate(run: Run, slots: tuple[Slot, ...]) -> Evaluation:
    recipe = run.parts.recipe
    with run.state.ema.applied():
        return evaluate(
            run.parts.policy,
            run.parts.reward,
            slots,
            run.parts.eval_steps,
            recipe.micro_batch,
            keep_images=REPORT_IMAGES,
            progress=lambda done, total: run.display.phase("evaluation", done, total),
            base=run.before,
            watch=run.parts.watch,
        )


def _finish(run: Run) -> dict[str, Any]:
    """The evaluation after, the summary and the report; an interrupted run gets them as far as it came."""
    before = run.before
    assert before is not None
    after = _evaluate(run, run.parts.heldout) if run.stop.signal is None else None
    run.stop.settle()
    summary = summarise(run.folder.name, run.parts, run.state, run.stop, before, after)
    if not distributed.leads():
        return summary
    if after:
        run.display.images(run.state.iteration, after.images)
        after.write(run.folder / "evaluations" / "after.jsonl")
        pictures.save_grid(run.folder / "samples" / "after.png", after.images)
        pictures.save_index(run.folder / "samples" / "samples.json", before, after, REPORT_IMAGES)
    write_text_atomic(run.folder / "summary.json", to_json(summary, indent=2))
    try:
        report.write(run.folder)
    except Exception as error:  # a report must never cost a run
        run.display.message(f"the report could not be written ({type(error).__name__}: {error}); all data is saved")
    return summary


def _save(run: Run) -> None:
    state = run.state
    distributed.same(state.norm(), "weights")
    tensors = state.tensors()
    if not distributed.leads():
        return
    checkpoint.save(
        run.folder / "checkpoints",
        state.iteration,
        tensors,
        state.counters(),
        keep=run.parts.recipe.keep_checkpoints,
        best=state.best_iteration,
        warn=run.display.message,
    )


def _restore(run: Run) -> None:
    try:
        saved = checkpoint.load(run.folder / "checkpoints", warn=run.display.message)
    except checkpoint.CheckpointError as error:
        if checkpoint.steps(run.folder / "checkpoints"):
            raise UserError(str(error)) from error
        run.display.message("no checkpoint was written yet; starting from the beginning")
        _truncate(run, 0)
        return
    run.state.restore(saved)
    if distributed.leads():
        checkpoint.tidy(run.folder / "checkpoints", run.display.message)  # a run at its end saves no more
    _truncate(run, saved.iteration)


def _truncate(run: Run, iteration: int) -> None:
    """Drop the lines of the log that come after an iteration."""
    if distributed.leads():
        truncate_lines_after(run.metrics, lambda line: line.get("iteration", 0) <= iteration)


def _resumed_recipe(recipe: Recipe, folder: Path) -> Recipe:
    """The recipe of the run being resumed, with those keys changed that may change. Raises UserError otherwise."""
    old = stored_recipe(folder)
    differing = recipes.changed(old, recipe)
    frozen = set(differing) - recipes.MAY_CHANGE
    if recipe.lr_schedule != "constant" and "iterations" in differing:
        frozen.add("iterations")
    if frozen:
        keys = ", ".join(f"{key} (was {differing[key][0]!r}, now {differing[key][1]!r})" for key in sorted(frozen))
        raise UserError(f"the run {str(folder)!r} was made with other settings: {keys}; resume it without these flags")
    if differing and distributed.leads():
        write_text_atomic(folder / "recipe.yaml", recipes.dump(recipe))
    return recipe


def stored_recipe(folder: Path) -> Recipe:
    """The recipe of an existing run; UserError if there is none."""
    path = folder / "recipe.yaml"
    if not path.is_file():
        raise UserError(f"{str(folder)!r} is not a run: it has no recipe.yaml; give the folder that `train` wrote")
    return recipes.parse(path.read_text(encoding="utf-8"), str(path))


def _due(every: int, iteration: int) -> bool:
    return every > 0 and iteration % every == 0
