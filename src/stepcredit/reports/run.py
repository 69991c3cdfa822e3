"""The report of one run: ``report.html``, a single page that needs nothing but itself."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from stepcredit.reports import figures, folder, health, outcome, style, tiles, trajectory, watched
from stepcredit.reports.folder import RunFolder, estimate, mapping, number
from stepcredit.reports.outcome import Comparison, Curve
from stepcredit.training.stats import Interval

LONGEST_RECIPE = 20_000
"""Characters of a recipe shown in full."""


def write(run_dir: Path) -> Path:
    """Write ``run_dir/report.html`` from what the run folder holds so far, and return its path.

    Missing parts (an interrupted run, a reward of final images alone) are said, not guessed. Raises UserError if the
    folder is not a run, OSError if the page cannot be written.
    """
    return style.write(run_dir / "report.html", render(folder.read(run_dir)))


def render(run: RunFolder) -> str:
    """The page of a run as HTML."""
    curve, comparison = outcome.held_out(run), outcome.comparison(run)
    moving = len(curve.x) > 1 or bool(run.iterations)
    wide, narrow = outcome.reward_curve(run, curve) if moving else (Markup(""), Markup(""))
    return style.render(
        "run.html.j2",
        run=run,
        recipe_name=_recipe_name(run),
        result=result(run, curve, comparison),
        facts=_facts(run),
        notices=_notices(run),
        curve=curve,
        curve_wide=wide,
        curve_narrow=narrow,
        components=outcome.components(run),
        watched=watched.section(run),
        samples=tiles.pairs(run.path / "samples"),
        comparison=comparison,
        steps=trajectory.steps(run),
        health=health.curves(run),
        cost=health.cost(run),
        statistics=health.statistics(run),
        recipe_text=run.recipe_text[:LONGEST_RECIPE],
        commands=_commands(run),
    )


@dataclass(frozen=True)
class Result:
    """The headline: held-out reward before and after, and a verdict in plain words."""

    before: Interval | None
    after: Interval | None
    iteration: int | None
    """Set where ``after`` is an evaluation during the run, since there is none after it."""
    kind: str
    """``clear``, ``flat``, ``worse`` or ``open``."""
    verdict: str
    figure: Markup
    exact_before: Interval | None
    exact_after: Interval | None


def result(run: RunFolder, curve: Curve, comparison: Comparison) -> Result:
    """The headline of a run; one that did not come to its end shows its latest evaluation, and says so."""
    before = estimate(run.summary.get("reward_before")) or estimate(run.start)
    after, iteration = estimate(run.summary.get("reward_after")), None
    improvement = estimate(run.summary.get("improvement"))
    if after is None and curve.x and curve.x[-1] > 0:
        before, after, iteration = curve.estimates[0], curve.estimates[-1], curve.x[-1]
        improvement = comparison.change
    kind, verdict = judge(improvement)
    if iteration is not None:
        verdict = f"At iteration {iteration}, the last one that was evaluated: {verdict[0].lower()}{verdict[1:]}"
    elif kind == "open":
        verdict = "There is no evaluation after training, so nothing can be said about an improvement."
    drawn = Markup("")
    if improvement is not None and kind != "open":
        said = f"Improvement {style.signed(improvement.mean)}, interval {style.bounds(improvement)}, against zero"
        drawn = figures.interval(improvement.mean, improvement.low, improvement.high, said)
    exact = [estimate(run.summary.get(key)) for key in ("exact_before", "exact_after")]
    return Result(before, after, iteration, kind, verdict, drawn, exact[0], exact[1])


def judge(improvement: Interval | None) -> tuple[str, str]:
    """What an improvement's interval allows to be said: (kind, sentence)."""
    if improvement is None or not (math.isfinite(improvement.low) and math.isfinite(improvement.high)):
        return "open", "There is no paired comparison of before and after."
    if improvement.low > 0:
        return (
            "clear",
            f"The improvement of {style.number(improvement.mean)} {style.bounds(improvement)} is clear of zero.",
        )
    if improvement.high < 0:
        fall = Interval(-improvement.mean, -improvement.high, -improvement.low)
        return "worse", f"The reward fell by {style.number(fall.mean)} {style.bounds(fall)}: the fall is clear of zero."
    return (
        "flat",
        f"The change of {style.signed(improvement.mean)} {style.bounds(improvement)} is not distinguishable from zero.",
    )


def _recipe_name(run: RunFolder) -> str:
    source = run.origin.get("recipe")
    return Path(source).stem if isinstance(source, str) else ""


def _facts(run: RunFolder) -> list[tuple[str, str]]:
    """The run in a few words and numbers; what was not recorded is left out."""
    recipe, last = run.recipe, run.iterations[-1] if run.iterations else {}
    planned, done = number(recipe.get("iterations")), len(run.iterations)
    seconds = number(run.summary.get("seconds")) or sum(s for s in run.series("seconds") if s is not None)
    evaluations = number(run.summary.get("model_evaluations")) or number(last.get("model_evaluations"))
    memory = number(run.summary.get("memory_mb")) or number(last.get("memory_mb"))
    batch = [number(recipe.get(key)) for key in ("prompts_per_iteration", "group_size")]
    kernel, level = recipe.get("kernel"), number(recipe.get("level"))
    best = number(run.summary.get("best_iteration"))
    facts = [
        ("Credit", recipe.get("credit")),
        ("Advantage", recipe.get("advantage")),
        ("Kernel", f"{kernel}, level {level:g}" if kernel and level is not None else kernel),
        ("Reward", run.summary.get("reward") or recipe.get("reward")),
        ("Iterations", f"{done:,}" + (f" of {planned:,.0f}" if planned and planned != done else "")),
        ("Batch", f"{batch[0]:.0f} prompts × {batch[1]:.0f} members" if batch[0] and batch[1] else None),
        ("Training time", style.duration(seconds) if seconds else None),
        ("Model evaluations", style.count(evaluations) if evaluations else None),
        ("Peak memory", f"{memory:,.0f} MB" if memory else None),
        ("Best evaluation during the run", f"iteration {best:.0f}" if best else None),
        ("Seed", recipe.get("seed")),
        ("Machine", _machine(run.summary.get("machine"))),
    ]
    return [(name, str(value)) for name, value in facts if value is not None and value != ""]


def _machine(value: object) -> str | None:
    if isinstance(value, str):
        return value
    told = mapping(value)
    cores = told.get("cores")
    parts = [told.get("gpu"), told.get("processor"), f"{cores} cores" if cores else None]
    versions = [f"{name} {told[name]}" for name in ("torch", "python") if told.get(name)]
    return ", ".join(str(part) for part in (*parts, *versions) if part) or None


def _notices(run: RunFolder) -> list[str]:
    """What a reader must know before reading on."""
    notices = []
    stopped = run.summary.get("stopped")
    planned, done = number(run.recipe.get("iterations")), len(run.iterations)
    if stopped:
        of = f" of {planned:.0f}" if planned else ""
        notices.append(f"This run stopped after {done}{of} iterations: {stopped}.")
    elif not run.summary:
        notices.append(f"This run is still going, or was cut off: {done} iterations are logged, and no summary.")
    guard = folder.lookup(run.summary, "guards", "fired", "guard")
    if guard:
        best = number(run.summary.get("best_iteration"))
        kept = f" The best checkpoint is that of iteration {best:.0f}." if best else ""
        notices.append(f"It was stopped by the guard {guard}.{kept}")
    skipped = sum(n for n in run.series("skipped_updates") if n is not None)
    if skipped:
        notices.append(
            f"{skipped:,.0f} updates were skipped, since their gradient was not finite or far above the usual norm."
        )
    failed = sum(n for n in run.series("failed_samples") if n is not None)
    if failed:
        notices.append(
            f"{failed:,.0f} samples could not be scored; they left their groups and no number stands for them."
        )
    return notices


def _commands(run: RunFolder) -> dict[str, str]:
    """Shell commands, for the folder that holds the runs folder: make the run again, or carry it on."""
    place = run.path.resolve()
    folder_name = f"{place.parent.name}/{place.name}"
    again = ["stepcredit", "train", f"{folder_name}/recipe.yaml", "--name", f"{place.name}-again"]
    commands = {"again": shlex.join(again)}
    if run.summary.get("stopped") or not run.summary:
        commands["resume"] = shlex.join(["stepcredit", "train", "--resume", folder_name])
    overrides: Mapping[str, Any] = mapping(run.origin.get("overrides"))
    commands["origin"] = ", ".join(f"{key} = {value}" for key, value in overrides.items())
    return commands
