"""From a recipe to the parts of a run: everything that can be wrong is found here, before the first hour is spent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stepcredit import kernels, noise, objective, rewards, rollout, scoring, tasks
from stepcredit.errors import UserError
from stepcredit.kernels import Kernel
from stepcredit.ledger import Ledger, ledger, total
from stepcredit.policies.base import Policy, take
from stepcredit.policies.diffusers_policy import DiffusersPolicy
from stepcredit.rewards.base import Reward, RewardInfo, SelfTest
from stepcredit.rewards.meter import metered
from stepcredit.rewards.parked import parked
from stepcredit.rollout import Groups, Layout, Velocity
from stepcredit.tasks import Prompt
from stepcredit.training import cells, distributed, models
from stepcredit.training.budget import Budget, budget, check_memory
from stepcredit.training.evaluation import Slot, slots
from stepcredit.training.recipe import Recipe

DENSE = frozenset({"gain", "turning_point", "turning_point_smooth", "gae"})
"""Credit schemes that need the reward of every state; the others need the final image's alone."""
POLICY = (
    *("task", "model", "reward", "reward_options", "train_prompts", "revision", "resolution", "guidance_scale"),
    *("max_sequence_length", "tuning", "lora_rank", "lora_alpha", "lora_targets", "precision", "device"),
)
"""Keys that name the policy, its prompts and its reward."""


@dataclass(frozen=True)
class Setup:
    """The parts of a run, built from its recipe and checked against each other."""

    recipe: Recipe
    policy: Policy
    reward: Reward
    """What is trained on."""
    kernel: Kernel
    weights: Tensor
    """Loss weight of every step, float64 ``[T]``."""
    train: Sequence[Prompt]
    heldout: tuple[Slot, ...]
    """Slots of the evaluation before and after."""
    heldout_during: tuple[Slot, ...]
    """The subset used while training."""
    cost: Ledger
    """Of one iteration."""
    watch: Reward | None = None
    """Judges held-out images beside the reward, and trains nothing."""
    budget: Budget | None = None
    """Memory and operations, for pipelines whose sizes are known without their weights."""

    @property
    def eval_steps(self) -> int:
        """ODE steps of an evaluation."""
        return self.recipe.eval_steps or self.recipe.steps

    def batch(self, iteration: int) -> tuple[list[Prompt], Groups]:
        """Prompts and groups of an iteration, a pure function of (seed, iteration)."""
        recipe = self.recipe
        prompts = tasks.draw(self.train, recipe.prompts_per_iteration, recipe.seed, iteration)
        return prompts, _groups(recipe, self.kernel, iteration)

    def cells(self, groups: Groups) -> list[list[Groups]]:
        """The groups of an iteration cut into the cells of each update, in the order of the prompts."""
        return _cells(self.recipe, groups)

    def plan(self, groups: Groups) -> scoring.ScoringPlan:
        """The clean estimates that the recipe's credit scheme needs."""
        return _plan(self.recipe, groups, self.kernel)

    def initial_noise(self, iteration: int, groups: Groups) -> Tensor:
        """x[0] of every root, ``[roots, *latent]`` in the storage dtype, keyed by (seed, iteration, prompt, member)."""
        leaders = groups.layout.first[0]
        members = [0 if self.recipe.shared_noise else int(groups.member[b]) for b in leaders]
        key = ("initial", self.recipe.seed, iteration)
        shape = self.policy.latent_shape
        keyed = zip(groups.prompt[leaders].tolist(), members, strict=True)
        stacked = torch.stack([noise.normal(shape, *key, prompt, member) for prompt, member in keyed])
        return stacked.to(getattr(torch, self.recipe.latent_dtype))

    def step_noise(self, iteration: int, groups: Groups) -> rollout.StepNoise:
        """Noise of a step for some members, keyed by (seed, iteration, prompt, member, step)."""
        key, shape = ("step", self.recipe.seed, iteration), self.policy.latent_shape

        def draw(step: int, members: Tensor) -> Tensor:
            names = zip(groups.prompt[members].tolist(), groups.member[members].tolist(), strict=True)
            return torch.stack([noise.normal(shape, *key, prompt, member, step) for prompt, member in names])

        return draw


def velocity_of(policy: Policy, cond: dict[str, Tensor], prompt: Tensor, reference: bool = False) -> Velocity:
    """The policy's velocity as a function of members, whose prompts are rows of ``cond``."""
    field = policy.reference_velocity if reference else policy.velocity

    def velocity(x: Tensor, t: Tensor, member: Tensor) -> Tensor:
        return field(x, t, take(cond, prompt[member].to(policy.device)))

    return velocity


def setup(recipe: Recipe, weights: bool = True) -> Setup:
    """Build and check everything that a recipe names; what is large comes last. Raises UserError that helps.

    Without ``weights`` nothing large is loaded: for pipelines there are then no prompts, the reward is a name, and the
    policy is on the meta device, enough to plan with.
    """
    device = torch_device(recipe.device)
    try:
        task = tasks.get(recipe.task)
        policy = models.sketch(recipe)
        kernel = kernels.make(recipe.kernel, policy.grid(recipe.steps), recipe.level)
        groups = _groups(recipe, kernel, 1)
        trained = groups.layout.noisy.any(0)
        if recipe.window_size is not None:  # windows are drawn anew: any of these steps may be trained
            start, stop = recipe.window or (0, recipe.steps)
            trained = torch.zeros_like(kernel.trainable)
            trained[start:stop] = kernel.trainable[start:stop]
        step_weights = objective.step_weights(recipe.step_weight, kernel, trained, recipe.step_table)
        cut = [[(cell.layout, _plan(recipe, cell, kernel)) for cell in up] for up in _cells(recipe, groups)]
        cost = total([ledger(*cell, recipe.micro_batch) for update in cut for cell in update])
        mine = cells.owned(len(cut[0]), distributed.rank(), distributed.world())
        needed = _budget(recipe, policy, cost, [update[k] for update in cut for k in mine])
        name = recipe.reward or task.reward
        _apart(recipe, name)
        if not weights and needed is not None:
            watched = _named(recipe.watch) if recipe.watch else None
            return Setup(recipe, policy, _named(name), kernel, step_weights, (), (), (), cost, watched, needed)
        place = models.placement(recipe, device) if needed is not None else None
        if needed is not None:
            if recipe.check_memory:
                check_memory(needed, device)
            models.locate(recipe)
        train, heldout = tasks.prompts_of(
            task, recipe.train_prompts, recipe.heldout_prompts, practice=models.is_tiny(recipe)
        )
        reward = metered(parked(rewards.get(name, **recipe.reward_options), place), recipe.reward_cache)
        watch = metered(parked(rewards.get(recipe.watch, **recipe.watch_options), place)) if recipe.watch else None
        if needed is not None:
            policy = models.load_policy(recipe, device, place)
        policy.encode([prompt.text for prompt in (*train[:1], *heldout[:1])])
    except (ValueError, OSError) as error:
        raise UserError(str(error)) from error
    drawn = slots(tasks.draw(heldout, recipe.eval_prompts, "heldout"))
    parts = Setup(
        recipe=recipe,
        policy=policy,
        reward=reward,
        kernel=kernel,
        weights=step_weights,
        train=train,
        heldout=tuple(drawn),
        heldout_during=tuple(drawn[: recipe.eval_prompts_during]),
        cost=cost,
        watch=watch,
        budget=needed,
    )
    with distributed.leader_first():
        _free_encoders(parts)
    return parts


def evaluation_images(recipe: Recipe) -> int:
    """Images that the evaluations of a run sample: before, after, and during."""
    during = (recipe.iterations - 1) // recipe.eval_every if recipe.eval_every else 0
    return 2 * recipe.eval_prompts + during * recipe.eval_prompts_during


def _apart(recipe: Recipe, reward: str) -> None:
    """Raise ValueError for a watched reward that is the trained one: it would see nothing that training does not."""
    if recipe.watch == reward and recipe.watch_options == recipe.reward_options:
        raise ValueError(f"watch {reward!r} is the reward that is trained on; watch another, or leave watch out")


def _budget(
    recipe: Recipe, policy: Policy, cost: Ledger, own: Sequence[tuple[Layout, scoring.ScoringPlan]]
) -> Budget | None:
    """The budget of a pipeline that is a sketch so far; None for small models, which are there already."""
    if policy.device.type != "meta" or not isinstance(policy, DiffusersPolicy):
        return None
    encoders = models.blueprint(recipe).encoder_parameters
    return budget(recipe, policy, cost, own, encoders, evaluation_images(recipe))


def _named(name: str) -> Reward:
    """A reward that is known by name and not loaded. Raises ValueError for an unknown name."""
    rewards.factory(name)

    def absent(*_: object) -> list[float]:
        raise ValueError(f"reward {name!r} was not loaded: this is a plan")

    grey = torch.full((3, 8, 8), 0.5)
    info = RewardInfo(name, (-float("inf"), float("inf")), "see docs/rewards.md", "not loaded")
    return rewards.FunctionReward(info, absent, SelfTest(grey, grey, "", {}))


def _free_encoders(parts: Setup) -> None:
    """With an embedding cache, encode every prompt that the run will ask for, then free the text encoders."""
    policy, recipe = parts.policy, parts.recipe
    if not isinstance(policy, DiffusersPolicy) or recipe.embedding_cache is None:
        return
    asked = [slot.prompt.text for slot in parts.heldout] + [prompt.text for prompt in parts.train[:2]]
    for iteration in range(recipe.iterations + 1):
        drawn = tasks.draw(parts.train, recipe.prompts_per_iteration, recipe.seed, iteration)
        asked += [prompt.text for prompt in drawn]
    texts = list(dict.fromkeys(asked))
    for start in range(0, len(texts), 16):
        policy.encode(texts[start : start + 16])
    policy.release_encoders()


def torch_device(name: str) -> torch.device:
    """The device of a recipe; UserError if it is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UserError(f"device {name!r} is unknown; use 'cpu', 'cuda' or 'auto'") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError("device 'cuda' was asked for, but torch finds no CUDA GPU; use device 'cpu' or 'auto'")
    return device


def _groups(recipe: Recipe, kernel: Kernel, iteration: int) -> Groups:
    start, stop = recipe.window or (0, recipe.steps)
    windows = [(start, stop)] * recipe.prompts_per_iteration
    if recipe.window_size is not None:
        first = _window_starts(start, stop, recipe.window_size, kernel)
        draws = [noise.generator("window", recipe.seed, iteration, p) for p in range(recipe.prompts_per_iteration)]
        starts = [first[int(generator.integers(len(first)))] for generator in draws]
        windows = [(w0, w0 + recipe.window_size) for w0 in starts]
    return rollout.groups(windows, recipe.group_size, kernel.trainable, recipe.shared_noise, recipe.branch)


def _window_starts(start: int, stop: int, size: int, kernel: Kernel) -> list[int]:
    """Where a window of this size may start: within [start, stop), with at least one trainable step in it."""
    starts = [w0 for w0 in range(start, stop - size + 1) if bool(kernel.trainable[w0 : w0 + size].any())]
    if not starts:
        raise ValueError(f"no window of window_size {size} in [{start}, {stop}) holds a trainable step")
    return starts


def _cells(recipe: Recipe, groups: Groups) -> list[list[Groups]]:
    prompts = recipe.prompts_per_iteration // recipe.updates_per_rollout
    members = len(groups.prompt) // recipe.prompts_per_iteration
    number = cells.per_update(prompts, members, recipe.micro_batch, distributed.world())
    size = prompts // number
    return [
        [groups.of_prompts(start, start + size) for start in range(first, first + prompts, size)]
        for first in range(0, recipe.prompts_per_iteration, prompts)
    ]


def _plan(recipe: Recipe, groups: Groups, kernel: Kernel) -> scoring.ScoringPlan:
    states = None if recipe.credit in DENSE else ()
    return scoring.plan(groups.layout, kernel.grid, recipe.estimate, recipe.substeps, recipe.spacing, states)
