"""What a comparison found, gathered from its run folders, as plain JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import accumulate
from typing import Any

from stepcredit.comparison import curves
from stepcredit.comparison.curves import AXES, Curve
from stepcredit.comparison.runs import Planned
from stepcredit.reports import folder as folders
from stepcredit.reports import outcome
from stepcredit.reports.folder import RunFolder, estimate, lookup, mapping, mean_of, number
from stepcredit.training.stats import Interval, student


def curve_of(run: RunFolder) -> Curve:
    """A run's held-out rewards on the images that all its evaluations share, by iteration, evaluations and seconds."""
    held_out = outcome.held_out(run)
    done = [0, *(int(line["iteration"]) for line in run.iterations)]
    evaluations = [0.0, *(value or 0.0 for value in run.series("model_evaluations"))]
    seconds = list(accumulate((value or 0.0 for value in run.series("seconds")), initial=0.0))
    position = {iteration: k for k, iteration in enumerate(done)}
    at = [position[k] for k in held_out.x if k in position]
    return Curve(
        tuple(float(done[k]) for k in at),
        tuple(evaluations[k] for k in at),
        tuple(seconds[k] for k in at),
        tuple(point.mean for k, point in zip(held_out.x, held_out.estimates, strict=True) if k in position),
    )


def summarise(
    planned: Sequence[Planned],
    target: float | None = None,
    diversity: Mapping[str, float] | None = None,
    failed: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Everything found in the finished runs; seeds that not every recipe has finished are named and left out.

    ``target``: the held-out reward to reach; halfway to the first recipe's mean end by default. ``recipes``: for each,
    in order, ``curves`` (by axis), ``to_target`` and ``ratio`` (to the first, by axis), ``reward`` after training, its
    ``change`` and difference ``to_first`` (paired by seed), ``per_tag``, ``image_statistics``, ``runs``.
    """
    labels = list(dict.fromkeys(run.label for run in planned))
    by_seed = {seed: [run for run in planned if run.seed == seed] for seed in dict.fromkeys(r.seed for r in planned)}
    whole = [seed for seed, runs in by_seed.items() if all(run.finished for run in runs)]
    found: dict[str, Any] = {
        "seeds": whole,
        "unfinished_seeds": [seed for seed in by_seed if seed not in whole],
        "failed": dict(failed or {}),
        "task": planned[0].recipe.task,
        "recipes": [],
    }
    if not whole:
        return {**found, "target": target, "target_kind": "given" if target is not None else "none"}
    runs = {
        label: [(r, folders.read(r.folder)) for r in planned if r.label == label and r.seed in whole]
        for label in labels
    }
    drawn = {label: [curve_of(read) for _, read in some] for label, some in runs.items()}
    first = drawn[labels[0]]
    kind = "given" if target is not None else "halfway"
    if target is None:
        target = curves.halfway(first)
        kind = "none" if target is None else kind
    for label in labels:
        found["recipes"].append(
            {
                "label": label,
                "credit": runs[label][0][0].recipe.credit,
                "curves": {axis: _band(drawn[label], axis) for axis in AXES},
                **_to_target(drawn[label], first, target),
                **_rewards(runs[label], runs[labels[0]]),
                "per_tag": _per_tag([read for _, read in runs[label]]),
                "image_statistics": _statistics([read for _, read in runs[label]], diversity or {}),
                "seconds": folders.mean([number(read.summary.get("seconds")) for _, read in runs[label]]),
                "model_evaluations": folders.mean(
                    [number(read.summary.get("model_evaluations")) for _, read in runs[label]]
                ),
                "runs": [_run(run, read) for run, read in runs[label]],
            }
        )
    return {**found, "target": target, "target_kind": kind}


def _band(some: Sequence[Curve], axis: curves.Axis) -> dict[str, Any]:
    band = curves.band(some, axis)
    return {"x": list(band.x), **{key: [getattr(r, key) for r in band.reward] for key in ("mean", "low", "high")}}


def _to_target(own: Sequence[Curve], first: Sequence[Curve], target: float | None) -> dict[str, Any]:
    """Positions at the target by axis and seed (null: never reached), and the ratios to the first recipe."""
    if target is None:
        return {"to_target": None, "ratio": None}
    times, ratios = {}, {}
    for axis in AXES:
        mine = [curves.first_reaching(curve, target, axis) for curve in own]
        base = [(curves.first_reaching(curve, target, axis), curve.along(axis)[-1]) for curve in first]
        times[axis] = mine
        ratios[axis] = asdict(curves.ratio(mine, [curve.along(axis)[-1] for curve in own], base))
    return {"to_target": times, "ratio": ratios}


def _rewards(own: Sequence[tuple[Planned, RunFolder]], first: Sequence[tuple[Planned, RunFolder]]) -> dict[str, Any]:
    """Rewards of all held-out prompts before and after: means over seeds, differences paired by seed."""
    after, base = ([_after(read) for _, read in some] for some in (own, first))
    before = [_mean(read, "reward_before") for _, read in own]
    exact = [mean_of(read.summary.get("exact_after")) for _, read in own]
    one = len(own) == 1  # a single seed has the interval over its prompts
    change = estimate(own[0][1].summary.get("improvement")) if one else None
    reward = estimate(own[0][1].summary.get("reward_after")) if one else None
    return {
        "reward_before": before[0],
        "reward": (reward or student(after)).as_dict(),
        "change": (change or student([a - b for a, b in zip(after, before, strict=True)])).as_dict(),
        "to_first": student([a - b for a, b in zip(after, base, strict=True)]).as_dict(),
        "exact": student([e for e in exact if e is not None]).as_dict() if None not in exact else None,
    }


def _per_tag(reads: Sequence[RunFolder]) -> dict[str, Any]:
    """Mean reward by tag: of the base model, and after training as a mean over seeds."""
    result = {}
    for tag in mapping(reads[0].summary.get("per_tag")):
        values = [mean_of(lookup(read.summary, "per_tag", tag, "after")) for read in reads]
        before = mean_of(lookup(reads[0].summary, "per_tag", tag, "before"))
        known = [value for value in values if value is not None]
        result[tag] = {"before": before, "after": student(known).as_dict()}
    return result


def _statistics(reads: Sequence[RunFolder], diversity: Mapping[str, float]) -> dict[str, Any]:
    """Image statistics of base and tuned, means over seeds; ``diversity_within_prompt`` where it was measured."""
    before = mapping(lookup(reads[0].summary, "image_statistics", "before")) or mapping(
        reads[0].start.get("image_statistics")
    )
    result: dict[str, Any] = {}
    for name, value in before.items():
        after = folders.mean([number(lookup(read.summary, "image_statistics", "after", name)) for read in reads])
        result[name] = {"before": number(value), "after": after}
    own = [diversity.get(read.name) for read in reads]
    if "base" in diversity and any(value is not None for value in own):
        result["diversity_within_prompt"] = {"before": diversity["base"], "after": folders.mean(own)}
    return result


def _run(run: Planned, read: RunFolder) -> dict[str, Any]:
    fired = mapping(lookup(read.summary, "guards", "fired"))
    return {
        "name": read.name,
        "seed": run.seed,
        "iterations": len(read.iterations),
        "planned": run.recipe.iterations,
        "reward_after": _after(read),
        "stopped": read.summary.get("stopped"),
        "guard": fired.get("guard"),
        "skipped_updates": sum(int(n) for n in mapping(lookup(read.summary, "guards", "skipped_updates")).values()),
    }


def _after(read: RunFolder) -> float:
    return _mean(read, "reward_after")


def _mean(read: RunFolder, key: str) -> float:
    value = mean_of(read.summary.get(key))
    return math.nan if value is None else value


def interval(value: Mapping[str, Any]) -> Interval:
    """``{mean, low, high}`` as written here, as an Interval."""
    return Interval(*(math.nan if value[key] is None else float(value[key]) for key in ("mean", "low", "high")))
