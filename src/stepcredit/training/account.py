"""What a run says of itself: before it begins, and when it has ended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch

from stepcredit.rewards.meter import costs
from stepcredit.training import distributed
from stepcredit.training.evaluation import Evaluation, paired
from stepcredit.training.interrupt import Stop
from stepcredit.training.records import machine
from stepcredit.training.setup import Setup
from stepcredit.training.state import TrainState
from stepcredit.training.telemetry import memory_mb


def header(parts: Setup) -> list[str]:
    """What a run is about to do, in a few lines: the batch algebra and its cost."""
    recipe, cost = parts.recipe, parts.cost
    total = recipe.prompts_per_iteration * recipe.group_size
    per_update = cost.trajectories // recipe.updates_per_rollout
    per = cost.per_trajectory()
    steps = parts.weights.nonzero().flatten().tolist()
    lines = [
        f"{recipe.task}: credit {recipe.credit}, advantage {recipe.advantage}, kernel {recipe.kernel} "
        f"(level {parts.kernel.level:g}), lr {recipe.lr:g}",
        f"batch: {recipe.prompts_per_iteration} prompts x {recipe.group_size} members"
        + (f" x {cost.trajectories // total} branches" if recipe.branch else "")
        + f" = {cost.trajectories} trajectories, {per_update} per update, {recipe.micro_batch} at a time",
        f"each iteration: {cost.model_evaluations} model evaluations ({per['model_evaluations_per_trajectory']:.1f} a "
        f"trajectory), {cost.decodes} decodes and rewards, {cost.trained_evaluations} trained; steps {_spans(steps)}",
    ]
    if recipe.shard:
        alone = "shard: there is one process, which holds the whole transformer"
        lines.append(f"shard: the transformer over {distributed.world()} processes" if distributed.joined() else alone)
    return lines


def summarise(
    name: str, parts: Setup, state: TrainState, stop: Stop, before: Evaluation, after: Evaluation | None
) -> dict[str, Any]:
    """The summary of a run that has ended, for summary.json; ``after`` is None if it was interrupted."""
    recipe = parts.recipe
    return {
        "name": name,
        "task": recipe.task,
        "reward": parts.reward.info.name,
        "reward_before": before.reward.as_dict(),
        "reward_after": after.reward.as_dict() if after else None,
        "improvement": paired(before, after).as_dict() if after else None,
        "exact_before": _interval(before.exact_rate),
        "exact_after": _interval(after.exact_rate) if after else None,
        "per_tag": _per_tag(before, after),
        "watched": _watched(parts, state, before.watched, after.watched if after else None),
        "image_statistics": {"before": before.statistics, "after": after.statistics if after else None},
        "iterations": state.iteration,
        "updates": state.updates,
        "seconds": state.seconds,
        "model_evaluations": state.model_evaluations,
        "best_iteration": state.best_iteration,
        "stopped": stop.reason,
        "guards": {
            "fired": asdict(state.guards.fired) if state.guards.fired else None,
            "skipped_updates": state.guards.skipped,
        },
        "signal": stop.signal,
        "reward_cost": _reward_costs(parts),
        "memory_mb": memory_mb(),
        "machine": machine(),
    }


def _watched(
    parts: Setup, state: TrainState, before: Evaluation | None, after: Evaluation | None
) -> dict[str, Any] | None:
    """What the watched reward said of the same held-out images; None without one."""
    if parts.watch is None or before is None:
        return None
    return {
        "reward": parts.watch.info.name,
        "before": before.reward.as_dict(),
        "after": after.reward.as_dict() if after else None,
        "change": paired(before, after).as_dict() if after else None,
        "exact_before": _interval(before.exact_rate),
        "exact_after": _interval(after.exact_rate) if after else None,
        "per_tag": _per_tag(before, after),
        "best_iteration": state.best_watched[1] or None,
    }


def _reward_costs(parts: Setup) -> list[dict[str, Any]]:
    """Calls, images, seconds and hits of every reward, of all processes together."""
    rows = costs(parts.reward) + (costs(parts.watch) if parts.watch else [])
    for row in rows:
        counted = [key for key, value in row.items() if isinstance(value, int | float)]
        total = distributed.add(torch.tensor([row[key] for key in counted], dtype=torch.float64)).tolist()
        row |= {key: type(row[key])(value) for key, value in zip(counted, total, strict=True)}
    return rows


def _interval(value: Any) -> dict[str, float] | None:
    return None if value is None else value.as_dict()


def _per_tag(before: Evaluation, after: Evaluation | None) -> dict[str, dict[str, float | None]]:
    later: Mapping[str, float] = after.per_tag() if after else {}
    return {tag: {"before": mean, "after": later.get(tag)} for tag, mean in before.per_tag().items()}


def _spans(steps: list[int]) -> str:
    """``0-7, 9`` for [0, .., 7, 9]."""
    spans: list[list[int]] = []
    for step in steps:
        if spans and step == spans[-1][1] + 1:
            spans[-1][1] = step
        else:
            spans.append([step, step])
    return ", ".join(f"{a}-{b}" if b > a else str(a) for a, b in spans)
