"""One iteration, from prompts to new weights: the corridor read top to bottom."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stepcredit import advantage as advantages
from stepcredit import credit as credits_
from stepcredit.policies.base import Conditioning
from stepcredit.rewards.base import Judgement, RewardError, join, judge, require_finite
from stepcredit.rollout import Groups, Trajectory, Velocity, rollout
from stepcredit.scoring import clean_estimates
from stepcredit.tasks import Prompt
from stepcredit.training.guards import spike_limit
from stepcredit.training.recipe import Recipe
from stepcredit.training.setup import DENSE, Setup, velocity_of
from stepcredit.training.state import TrainState, learning_rate
from stepcredit.training.stats import bootstrap
from stepcredit.training.update import UpdateStats, accumulate, apply, loss_scale

Progress = Callable[[str, int, int], None]
"""``progress(phase, done, total)``."""


def iterate(parts: Setup, state: TrainState, progress: Progress) -> dict[str, Any]:
    """Make the next iteration and return its line for metrics.jsonl.

    Raises RewardError or FloatingPointError with a sentence that helps; the weights are then as after the last good
    update. An update whose gradient is not finite or a spike is skipped and counted.
    """
    recipe, policy = parts.recipe, parts.policy
    iteration = state.iteration + 1
    clock = Clock()

    with clock("rollout"):
        sampled = sample(parts, iteration, lambda done: progress("rollout", done, recipe.steps))
        groups, velocity, trajectory = sampled.groups, sampled.velocity, sampled.trajectory

    progress("scoring", 0, 1)
    with clock("scoring"):
        R, failed, components = scored(parts, sampled)
        progress("scoring", 1, 1)

    credit = credit_of(recipe, R, groups.trained)
    advantage = getattr(advantages, recipe.advantage)(credit, groups.trained, global_std=recipe.global_std)

    progress("update", 0, 0)
    with clock("update"):
        reference = velocity_of(policy, sampled.cond, groups.prompt, reference=True) if recipe.kl_beta > 0 else None
        updates: list[UpdateStats] = []
        pairs = int(groups.layout.noisy.sum()) // recipe.updates_per_rollout
        dtype = getattr(policy, "dtype", torch.float32)  # of the network behind a pipeline
        scale = loss_scale(dtype, pairs, torch.Size(policy.latent_shape).numel())
        for part in _parts(groups, recipe.updates_per_rollout):
            for group in state.optimiser.param_groups:
                group["lr"] = learning_rate(recipe, state.updates)
            stats = accumulate(
                velocity,
                reference,
                trajectory,
                advantage.flatten(0, 1),
                part,
                parts.weights,
                recipe.micro_batch,
                clip=recipe.clip,
                kl_beta=recipe.kl_beta,
                kl=recipe.kl,
                normalised_ratio=recipe.ratio == "normalised",
                reduce=recipe.log_prob,
                progress=lambda done: progress("update", done, 0),
                scale=scale,
            )
            updates.append(stats)
            parameters = list(state.parameters.values())
            unit = recipe.optimiser == "sgd"
            spike = spike_limit(state.guards.norms, recipe.spike_factor)
            made = apply(state.optimiser, parameters, stats, recipe.grad_clip, scale, unit, spike)
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
        "skipped_updates": sum(u.skip is not None for u in updates),
        "loss": sum(u.loss for u in updates) / len(updates),
        "lr": learning_rate(recipe, state.updates - 1),
        "stale_share": 1 - 1 / len(updates),
        "seconds": sum(clock.seconds.values()),
        "phase_seconds": clock.seconds,
        "model_evaluations": state.model_evaluations,
    }


class Sampled(NamedTuple):
    """Trajectories of an iteration, and what they are trajectories of."""

    prompts: list[Prompt]
    groups: Groups
    cond: Conditioning
    velocity: Velocity
    """Under the weights as they are whenever it is called."""
    trajectory: Trajectory


def sample(parts: Setup, iteration: int, progress: Callable[[int], None] | None = None) -> Sampled:
    """The rollout of an iteration; ``progress`` is called with the number of steps done.

    Raises FloatingPointError as :func:`stepcredit.rollout.rollout` does.
    """
    prompts, groups = parts.batch(iteration)
    cond = parts.policy.encode([prompt.text for prompt in prompts])
    velocity = velocity_of(parts.policy, cond, groups.prompt)
    trajectory = rollout(
        velocity,
        parts.initial_noise(iteration, groups).to(parts.policy.device),
        parts.kernel,
        groups.layout,
        parts.step_noise(iteration, groups),
        parts.recipe.micro_batch,
        parts.recipe.log_prob,
        progress,
        retain=parts.recipe.replay == "retain",
    )
    return Sampled(prompts, groups, cond, velocity, trajectory)


class Scored(NamedTuple):
    """What the states of some trajectories earned."""

    R: Tensor
    """float32 ``[groups, G, T + 1]``; NaN where a state is not scored or its sample failed."""
    failed: int
    """Samples without a reward."""
    components: dict[str, float]
    """Mean of every part of the reward over the final images."""


def scored(parts: Setup, sampled: Sampled) -> Scored:
    """Rewards of the states that the recipe's credit scheme asks for. Raises RewardError."""
    plan = parts.plan(sampled.groups)
    x_0 = clean_estimates(sampled.trajectory, plan, sampled.velocity, parts.recipe.micro_batch)
    asked = [sampled.prompts[p] for p in sampled.groups.prompt[plan.member].tolist()]
    judged = _judge(parts, x_0, asked)
    failed = _failures(parts.recipe, parts.reward.info.name, judged.score, asked)
    R = sampled.groups.grouped(plan.per_state(judged.score))
    return Scored(R, failed, _components(judged, plan.estimate[:, -1]))


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


def _judge(parts: Setup, x_0: Tensor, asked: list[Prompt]) -> Judgement:
    """Judgement of clean latents ``[N, ...]``, decoded and judged in the reward's own batches: ten thousand images of
    512 pixels, as a step-wise rollout has, would fill 30 GB at once.

    A reward that waits for a server (``concurrent`` requests at a time) is asked while the next batches are decoded.
    """

    def ask(images: Tensor, some: slice) -> Judgement:
        return judge(parts.reward, images, [p.text for p in asked[some]], [p.metadata for p in asked[some]])

    size = parts.reward.info.batch_size
    width = int(getattr(parts.reward, "concurrent", 1))
    done: list[Judgement] = []
    waiting: deque[Future[Judgement]] = deque()
    with ThreadPoolExecutor(width) as pool:
        for start in range(0, len(asked), size):
            some = slice(start, start + size)
            images = torch.cat([parts.policy.decode(part).cpu() for part in x_0[some].split(parts.recipe.micro_batch)])
            require_finite(images, [prompt.text for prompt in asked[some]])
            if width == 1:
                done.append(ask(images, some))
                continue
            waiting.append(pool.submit(ask, images, some))
            if len(waiting) >= width:  # no more images in memory than requests under way
                done.append(waiting.popleft().result())
        done += [future.result() for future in waiting]
    return join(done)


def _components(judged: Judgement, final: Tensor) -> dict[str, float]:
    """Mean of every component over the final images, whose estimates are numbered by ``final`` ``[B]``."""
    every = judged.components if judged.exact is None else {**judged.components, "exact": judged.exact}
    return {name: float(values[final].nanmean()) for name, values in every.items()}


def _parts(groups: Groups, updates: int) -> list[Tensor]:
    """Members of each update of a rollout, bool ``[B]``: equal shares of the prompts."""
    share = (int(groups.prompt.max()) + 1) // updates
    return [groups.prompt // share == k for k in range(updates)]


def _failures(recipe: Recipe, name: str, values: Tensor, asked: list[Prompt]) -> int:
    """Number of samples without a reward; RewardError if the recipe does not tolerate them, or if all failed."""
    bad = values.isnan().nonzero().flatten().tolist()
    if bad and (recipe.on_reward_failure == "fail" or len(bad) == len(values)):
        raise RewardError(
            f"reward {name!r} gave NaN for {len(bad)} of {len(values)} samples, first for prompt "
            f"{asked[bad[0]].text!r}; mend the reward, or set on_reward_failure: drop to leave such samples out of "
            "their groups"
        )
    return len(bad)


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
