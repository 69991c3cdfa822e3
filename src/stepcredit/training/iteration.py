"""One iteration, from prompts to new weights: the corridor read top to bottom."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from stepcredit import advantage as advantages
from stepcredit import credit as credits_
from stepcredit.rewards.asking import Asking
from stepcredit.rollout import Groups
from stepcredit.training import cells, distributed, trust
from stepcredit.training.collect import Earned, Sampled, gathered, sample_cell, score_cell
from stepcredit.training.gradients import summed as summed_gradients
from stepcredit.training.guards import spike_limit
from stepcredit.training.recipe import Recipe
from stepcredit.training.setup import DENSE, Setup
from stepcredit.training.state import TrainState, learning_rate
from stepcredit.training.stats import bootstrap
from stepcredit.training.update import UpdateStats, accumulate, apply, combined, loss_scale

Progress = Callable[[str, int, int], None]
"""``progress(phase, done, total)``."""


def iterate(parts: Setup, state: TrainState, progress: Progress) -> dict[str, Any]:
    """Make the next iteration and return its line for metrics.jsonl.

    A cell's rewards are asked for as soon as it is sampled, and it keeps from then on the states that its update
    replays, no others. Of several processes each samples, scores and replays its own cells of the batch, and all make
    the same updates.
    Raises RewardError or FloatingPointError with a sentence that helps, or PeerLostError; the weights are then as after
    the last good update. An update whose gradient is not finite or a spike is skipped and counted.
    """
    recipe, policy = parts.recipe, parts.policy
    iteration = state.iteration + 1
    clock = Clock()

    with clock("rollout"):
        prompts, groups = parts.batch(iteration)
        cut = parts.cells(groups)  # of every update
        mine = cells.owned(len(cut[0]), distributed.rank(), distributed.world())
        numbers = torch.arange(groups.count).view(len(cut), len(cut[0]), -1)
    steps = _counted(progress, "rollout", len(cut) * len(mine) * recipe.steps)
    sampled: list[list[Sampled]] = []
    asked: list[Callable[[], Earned]] = []
    with Asking(parts.reward) as asking:  # a server may judge one cell while the next is sampled
        for u, update in enumerate(cut):
            sampled.append([])
            for k in mine:
                with clock("rollout"):
                    cell = sample_cell(parts, iteration, prompts, update[k], numbers[u, k], steps)
                progress("scoring", len(asked), len(cut) * len(mine))
                with clock("scoring"):
                    asked.append(score_cell(parts, asking, cell))
                    cell = cell.for_update(recipe)  # nothing holds the other states while the next cell is sampled
                sampled[-1].append(cell)
        with clock("scoring"):
            R, failed, components = gathered(parts, prompts, [earned() for earned in asked])

    credit = credit_of(recipe, R, groups.trained)
    advantage = getattr(advantages, recipe.advantage)(credit, groups.trained, global_std=recipe.global_std)

    progress("update", 0, 0)
    with clock("update"):
        updates: list[UpdateStats] = []
        moved: list[trust.Moved] = []
        parameters = list(state.parameters.values())
        dtype = getattr(policy, "dtype", torch.float32)  # of the network behind a pipeline
        chunks = _counted(progress, "update", 0)
        for whole, own in zip(cut, sampled, strict=True):
            for group in state.optimiser.param_groups:
                group["lr"] = learning_rate(recipe, state.updates)
            pairs = torch.stack([cell.layout.noisy.sum(0) for cell in whole]).sum(0)
            scale = loss_scale(dtype, int(pairs.sum()), torch.Size(policy.latent_shape).numel())
            with summed_gradients(parameters):
                shares = [
                    accumulate(
                        cell.velocity,
                        cell.reference,
                        cell.trajectory,
                        advantage[cell.numbers].flatten(0, 1),
                        pairs,
                        parts.weights,
                        recipe.micro_batch,
                        clip=recipe.clip,
                        kl_beta=recipe.kl_beta,
                        kl=recipe.kl,
                        normalised_ratio=recipe.ratio == "normalised",
                        reduce=recipe.log_prob,
                        progress=chunks,
                        scale=scale,
                    )
                    for cell in own
                ]
            stats = combined(shares)
            updates.append(stats)
            unit = recipe.optimiser == "sgd"
            spike = spike_limit(state.guards.norms, recipe.spike_factor)
            step = partial(apply, state.optimiser, parameters, stats, recipe.grad_clip, scale, unit, spike)
            if recipe.trust_kl is None:
                made = step()
            else:
                probes = [trust.Probe(cell.velocity, cell.trajectory, cell.groups.leaders) for cell in own]
                moved.append(trust.step_within(recipe.trust_kl, parameters, probes, recipe.micro_batch, step))
                made = moved[-1].made
            state.guards.note(stats.grad_norm, stats.skip)
            state.updates += 1
            if made:
                state.ema.update()

    state.iteration = iteration
    state.model_evaluations += parts.cost.model_evaluations
    state.seconds += sum(clock.seconds.values())
    degenerate = int(advantages.degenerate(credit, groups.trained).sum())
    return {
        "iteration": iteration,
        **_reward_metrics(R, groups),
        "components": components,
        **(_credit_metrics(R, groups) if recipe.credit in DENSE else {}),
        "advantage_abs": _per_step(advantage.abs(), groups.trained),
        "trained": groups.layout.noisy.any(0).tolist(),
        "degenerate_groups": degenerate,
        "groups": groups.count,
        "failed_samples": failed,
        "ratio_deviation": updates[0].ratio_deviation,
        "ratio_deviation_max": max(u.ratio_deviation for u in updates),
        "clip_fraction": _mean_of([u.clip_fraction for u in updates]),
        "kl": _mean_of([u.kl for u in updates]) if recipe.kl_beta > 0 else None,
        "grad_norm": sum(u.grad_norm for u in updates) / len(updates),
        "update_kl": sum(one.kl for one in moved) / len(moved) if moved else None,
        "update_share": sum(one.share for one in moved) / len(moved) if moved else None,
        "skipped_updates": sum(u.skip is not None for u in updates),
        "loss": sum(u.loss for u in updates) / len(updates),
        "lr": learning_rate(recipe, state.updates - 1),
        "stale_share": 1 - 1 / len(updates),
        "seconds": sum(clock.seconds.values()),
        "phase_seconds": clock.seconds,
        "model_evaluations": state.model_evaluations,
    }


def credit_of(recipe: Recipe, R: Tensor, trained: Tensor) -> Tensor:
    """Credit ``[groups, G, T]`` of rewards ``[groups, G, T + 1]`` by the recipe's scheme.

    A member with a failed sample at any trained step has NaN credit at all steps: it leaves its group.
    """
    credit = _scheme(recipe, R, trained)
    failed = (credit.isnan() & trained).any(-1, keepdim=True)
    return torch.where(failed, torch.nan, credit)


def _scheme(recipe: Recipe, R: Tensor, trained: Tensor) -> Tensor:
    match recipe.credit:
        case "gain":
            return credits_.gain(R)
        case "turning_point":
            return credits_.turning_point(R, recipe.strict, recipe.balance, trained)
        case "turning_point_smooth":
            return credits_.turning_point_smooth(R, recipe.temperature)
        case "gae":
            return credits_.gae(R, recipe.lam)
        case "uniform" | "tempflow":
            return credits_.uniform(R)


class Clock:
    """Seconds spent in each phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Time a block under the name of its phase."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - started


def _counted(progress: Progress, phase: str, total: int) -> Callable[[int], None]:
    """Progress of a phase as the number of calls, whatever each of its parts counts."""
    calls = itertools.count(1)
    return lambda _: progress(phase, next(calls), total)


def _reward_metrics(R: Tensor, groups: Groups) -> dict[str, Any]:
    final = R[..., -1].flatten()
    return {
        "reward": bootstrap(final.double().numpy(), groups.prompt.tolist()).as_dict(),
        "R_mean": [float(r) for r in R.flatten(0, 1).nanmean(0)],
    }


def _credit_metrics(R: Tensor, groups: Groups) -> dict[str, Any]:
    d = credits_.gain(R)
    spread = (d - d.nanmean(-2, keepdim=True)).square().nanmean(-2).sqrt().nanmean(0)
    return {
        "gain_mean": [float(g) for g in d.flatten(0, 1).nanmean(0)],
        "gain_spread": [float(s) for s in spread],
        "turning_share": _per_step(credits_.turning_points(R).double(), groups.trained),
    }


def _per_step(values: Tensor, trained: Tensor) -> list[float]:
    """Mean over trained members at every step, NaN where none is trained."""
    flat, mask = values.double().flatten(0, 1), trained.flatten(0, 1)
    return [float(m) for m in torch.where(mask, flat, 0.0).sum(0) / mask.sum(0)]


def _mean_of(steps: list[Tensor]) -> list[float]:
    return [float(m) for m in torch.stack(steps).mean(0)]
