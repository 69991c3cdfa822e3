"""What a process samples and judges of a batch: its own cells, and the rewards of all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from stepcredit.rewards.asking import Asking
from stepcredit.rewards.base import RewardError
from stepcredit.rollout import Groups, Trajectory, Velocity, rollout
from stepcredit.scoring import clean_estimates
from stepcredit.tasks import Prompt
from stepcredit.training import distributed, holding
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

    def for_update(self, recipe: Recipe) -> Sampled:
        """The cell with those states alone that the update replays, once it has been scored."""
        return replace(self, trajectory=self.trajectory.keep(holding.for_update(recipe, self.groups.layout)))


def sample_cell(
    parts: Setup,
    iteration: int,
    prompts: Sequence[Prompt],
    cell: Groups,
    numbers: Tensor,
    progress: Callable[[int], None],
    lean: bool = True,
) -> Sampled:
    """Encode a cell's prompts, which are among the batch's ``prompts``, and sample its trajectories.

    ``lean`` keeps of them what scoring and the update will ask for, and nothing else. Raises FloatingPointError as
    :func:`stepcredit.rollout.rollout` does.
    """
    recipe, policy = parts.recipe, parts.policy
    first, last = int(cell.prompt[0]), int(cell.prompt[-1])
    cond = policy.encode([prompt.text for prompt in prompts[first : last + 1]])
    velocity = velocity_of(policy, cond, cell.prompt - first)
    keep = None
    if lean:
        keep = holding.for_update(recipe, cell.layout) | parts.plan(cell).needs(cell.layout)
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
        keep=keep,
    )
    reference = velocity_of(policy, cond, cell.prompt - first, reference=True) if recipe.kl_beta > 0 else None
    return Sampled(prompts, cell, numbers, trajectory, velocity, reference)


def sample(parts: Setup, iteration: int, progress: Callable[[int], None] = lambda _: None) -> Sampled:
    """The whole batch of an iteration as one cell, on this process alone, with all of its states; ``progress`` is told
    the steps done.

    Raises FloatingPointError as :func:`stepcredit.rollout.rollout` does.
    """
    prompts, groups = parts.batch(iteration)
    return sample_cell(parts, iteration, prompts, groups, torch.arange(groups.count), progress, lean=False)


class Earned(NamedTuple):
    """What the states of a cell earned, on this process alone."""

    numbers: Tensor
    """long ``[groups]``: numbers of the cell's groups in the batch."""
    R: Tensor
    """float32 ``[groups, G, T + 1]``; NaN where a state is not scored or its sample failed."""
    final: dict[str, Tensor]
    """Of every component, and of the verdict ``exact``, the values of the final images ``[groups, G]``."""
    failures: list[int]
    """Samples, those without a reward, and the prompt of the first such sample, -1 for none."""


class Scored(NamedTuple):
    """What the states of a batch earned."""

    R: Tensor
    """float32 ``[groups, G, T + 1]``, sorted by group; NaN where a state is not scored or its sample failed."""
    failed: int
    """Samples without a reward."""
    components: dict[str, float]
    """Mean of every component, and of the verdict ``exact``, over the final images."""


def score_cell(parts: Setup, asking: Asking, cell: Sampled) -> Callable[[], Earned]:
    """Clean estimates of a cell's states, decoded and asked for; what they earned is known when a server has answered.

    What is returned holds none of the cell's states. It and this raise RewardError and FloatingPointError as
    :func:`stepcredit.training.judging.judge_latents` does.
    """
    groups, numbers, plan = cell.groups, cell.numbers, parts.plan(cell.groups)
    x_0 = clean_estimates(cell.trajectory, plan, cell.velocity, parts.recipe.micro_batch)
    prompt = groups.prompt[plan.member]
    answer = judge_latents(parts, asking, x_0, [cell.prompts[p] for p in prompt.tolist()], prompt)

    def earned() -> Earned:
        judged = answer()
        every = judged.components if judged.exact is None else {**judged.components, "exact": judged.exact}
        bad = judged.score.isnan()
        return Earned(
            numbers,
            groups.grouped(plan.per_state(judged.score)),
            {name: groups.grouped(values[plan.estimate[:, -1]]) for name, values in every.items()},
            [len(bad), int(bad.sum()), int(prompt[bad][0]) if bool(bad.any()) else -1],
        )

    return earned


def gathered(parts: Setup, prompts: Sequence[Prompt], cells: Sequence[Earned]) -> Scored:
    """What all processes' cells of a batch of ``prompts`` have earned, keyed by group and sorted.

    Raises RewardError, on all processes alike, for samples without a reward that the recipe does not tolerate;
    PeerLostError.
    """
    counts = distributed.gather(torch.tensor([cell.failures for cell in cells]))
    failed = _failures(parts.recipe, parts.reward.info.name, counts, prompts)
    order = distributed.gather(torch.cat([cell.numbers for cell in cells])).argsort()
    names = dict.fromkeys(name for cell in cells for name in cell.final)
    final = {
        name: distributed.gather(torch.cat([cell.final[name] for cell in cells if name in cell.final]))[order]
        for name in names
    }
    components = {name: float(values.nanmean()) for name, values in final.items()}
    return Scored(distributed.gather(torch.cat([cell.R for cell in cells]))[order], failed, components)


def scored(parts: Setup, cells: Sequence[Sampled]) -> Scored:
    """Score this process's cells and gather what all have earned. Raises as ``score_cell`` and ``gathered``."""
    with Asking(parts.reward) as asking:
        asked = [score_cell(parts, asking, cell) for cell in cells]
        return gathered(parts, cells[0].prompts, [earned() for earned in asked])


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
