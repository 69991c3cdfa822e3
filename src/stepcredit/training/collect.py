"""What a process samples and judges of a batch: its own cells, and the rewards of all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from stepcredit.rewards.base import RewardError
from stepcredit.rollout import Groups, Trajectory, Velocity, rollout
from stepcredit.scoring import clean_estimates
from stepcredit.tasks import Prompt
from stepcredit.training import distributed
from stepcredit.training.judging import judge_latents
from stepcredit.training.recipe import Recipe
from stepcredit.training.setup import Setup, velocity_of


@dataclass(frozen=True)
class Sampled:
    """A cell with its trajectories and what replays them."""

    prompts: Sequence[Prompt]
    """Of the whole batch."""
    groups: Groups
    numbers: Tensor
    """long ``[groups.count]``: numbers of the cell's groups in the batch."""
    trajectory: Trajectory
    velocity: Velocity
    """Under the weights as they are whenever it is called."""
    reference: Velocity | None
    """Velocity of the base model, where the recipe has a KL penalty."""


def sample_cell(
    parts: Setup,
    iteration: int,
    prompts: Sequence[Prompt],
    cell: Groups,
    numbers: Tensor,
    progress: Callable[[int], None],
) -> Sampled:
    """Encode a cell's prompts, which are among the batch's ``prompts``, and sample its trajectories.

    Raises FloatingPointError as :func:`stepcredit.rollout.rollout` does.
    """
    recipe, policy = parts.recipe, parts.policy
    first, last = int(cell.prompt[0]), int(cell.prompt[-1])
    cond = policy.encode([prompt.text for prompt in prompts[first : last + 1]])
    velocity = velocity_of(policy, cond, cell.prompt - first)
    trajectory = rollout(
        velocity,
        parts.initial_noise(iteration, cell).to(policy.device),
        parts.kernel,
        cell.layout,
        parts.step_noise(iteration, cell),
        recipe.micro_batch,
        recipe.log_prob,
        progress,
        retain=recipe.replay == "retain",
    )
    reference = velocity_of(policy, cond, cell.prompt - first, reference=True) if recipe.kl_beta > 0 else None
    return Sampled(prompts, cell, numbers, trajectory, velocity, reference)


def sample(parts: Setup, iteration: int, progress: Callable[[int], None] = lambda _: None) -> Sampled:
    """The whole batch of an iteration as one cell, on this process alone; ``progress`` is told the steps done.

    Raises FloatingPointError as :func:`stepcredit.rollout.rollout` does.
    """
    prompts, groups = parts.batch(iteration)
    return sample_cell(parts, iteration, prompts, groups, torch.arange(groups.count), progress)


class Scored(NamedTuple):
    """What the states of a batch earned."""

    R: Tensor
    """float32 ``[groups, G, T + 1]``, sorted by group; NaN where a state is not scored or its sample failed."""
    failed: int
    """Samples without a reward."""
    components: dict[str, float]
    """Mean of every component, and of the verdict ``exact``, over the final images."""


def scored(parts: Setup, cells: Sequence[Sampled]) -> Scored:
    """Score this process's cells of a batch and gather what all have earned, keyed by group and sorted.

    Raises RewardError, on all processes alike, for samples without a reward that the recipe does not tolerate;
    PeerLostError.
    """
    R: list[Tensor] = []
    last: dict[str, list[Tensor]] = {}
    failures = []
    for cell in cells:
        plan = parts.plan(cell.groups)
        x_0 = clean_estimates(cell.trajectory, plan, cell.velocity, parts.recipe.micro_batch)
        prompt = cell.groups.prompt[plan.member]
        judged = judge_latents(parts, x_0, [cell.prompts[p] for p in prompt.tolist()], prompt)
        R.append(cell.groups.grouped(plan.per_state(judged.score)))
        every = judged.components if judged.exact is None else {**judged.components, "exact": judged.exact}
        for name, values in every.items():
            last.setdefault(name, []).append(cell.groups.grouped(values[plan.estimate[:, -1]]))
        bad = judged.score.isnan()
        failures.append([len(bad), int(bad.sum()), int(prompt[bad][0]) if bool(bad.any()) else -1])
    counts = distributed.gather(torch.tensor(failures))
    failed = _failures(parts.recipe, parts.reward.info.name, counts, cells[0].prompts)
    order = distributed.gather(torch.cat([cell.numbers for cell in cells])).argsort()
    final = {name: distributed.gather(torch.cat(values))[order] for name, values in last.items()}
    components = {name: float(values.nanmean()) for name, values in final.items()}
    return Scored(distributed.gather(torch.cat(R))[order], failed, components)


def _failures(recipe: Recipe, name: str, counts: Tensor, prompts: Sequence[Prompt]) -> int:
    """Number of samples without a reward; RewardError if the recipe does not tolerate them, or if all failed.

    ``counts`` has a row of each cell: samples, those without a reward, and the first such sample's prompt.
    """
    samples, bad = counts[:, 0].sum().item(), int(counts[:, 1].sum())
    if bad and (recipe.on_reward_failure == "fail" or bad == samples):
        first = int(counts[counts[:, 1] > 0][0, 2])
        raise RewardError(
            f"reward {name!r} gave NaN for {bad} of {samples} samples, first for prompt {prompts[first].text!r}; "
            "mend the reward, or set on_reward_failure: drop to leave such samples out of their groups"
        )
    return bad
