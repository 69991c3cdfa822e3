"""What is audited: recipes as credit schemes, grouped by the rollouts that they can share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from stepcredit import advantage as advantages
from stepcredit import objective
from stepcredit.errors import UserError
from stepcredit.training import recipe as recipes
from stepcredit.training.iteration import credit_of
from stepcredit.training.recipe import Recipe
from stepcredit.training.setup import DENSE, POLICY, Setup, setup

ROLLOUT = (
    *("group_size", "steps", "kernel", "level", "latent_dtype", "shared_noise", "window", "window_size", "branch"),
)
"""Keys on which trajectories depend: recipes that agree in them share their rollouts."""
ESTIMATE = ("estimate", "substeps", "spacing")
STANDARD: Mapping[str, Mapping[str, Any]] = {
    "uniform": {"credit": "uniform", "advantage": "group"},
    "gain, centred": {"credit": "gain", "advantage": "centred"},
    "gain, joint": {"credit": "gain", "advantage": "joint"},
    "gain, per_step": {"credit": "gain", "advantage": "per_step"},
    "gae .5, centred": {"credit": "gae", "lam": 0.5, "advantage": "centred"},
    "gae .9, centred": {"credit": "gae", "lam": 0.9, "advantage": "centred"},
    "gae 1, centred": {"credit": "gae", "lam": 1.0, "advantage": "centred"},
    "turning point, centred": {"credit": "turning_point", "strict": True, "advantage": "centred"},
    "turning point, per_step": {"credit": "turning_point", "strict": True, "advantage": "per_step"},
    "turning point loose, centred": {"credit": "turning_point", "strict": False, "advantage": "centred"},
    "turning point smooth, centred": {"credit": "turning_point_smooth", "advantage": "centred"},
}
"""The schemes of ``--all-schemes``: keys put in place of a recipe's own."""


@dataclass(frozen=True)
class Scheme:
    """One row of an audit: a recipe, cut down to one prompt a rollout, and what it costs."""

    label: str
    recipe: Recipe
    """As it would be trained."""
    parts: Setup
    """Of the same recipe with one prompt a rollout."""

    @property
    def groups_per_update(self) -> int:
        """Prompts behind one optimiser step in training."""
        return self.recipe.prompts_per_iteration // self.recipe.updates_per_rollout

    @property
    def cost(self) -> float:
        """Model evaluations of one prompt, a trained one counted as three (forward and backward)."""
        return self.parts.cost.model_evaluations + 3.0 * self.parts.cost.trained_evaluations

    @property
    def weights(self) -> Tensor:
        """Weight of the gradient of each step's log-prob, float32 ``[T]``: the loss weight and that of the ratio."""
        normalised = self.recipe.ratio == "normalised"  # its gradient is std times that of the plain ratio
        return (self.parts.weights * (self.parts.kernel.std if normalised else 1.0)).float()

    def advantage(self, R: Tensor, trained: Tensor) -> Tensor:
        """Advantage ``[groups, G, T]`` of rewards ``[groups, G, T + 1]``, as in training on these groups alone."""
        credit = credit_of(self.recipe, R, trained)
        normalise = getattr(advantages, self.recipe.advantage)
        return torch.as_tensor(normalise(credit, trained, global_std=self.recipe.global_std))


@dataclass(frozen=True)
class Shape:
    """Schemes whose trajectories are the same, and the estimates of states that they ask for."""

    schemes: tuple[Scheme, ...]
    scored_by: tuple[Setup, ...]
    """One setup for every distinct estimate; the first is the reference's."""
    estimate_of: tuple[int, ...]
    """For every scheme the entry of ``scored_by`` whose rewards it takes."""
    reference_weights: Tensor
    """Weight of the reference's gradient at each step, float32 ``[T]``."""


def standard(recipe: Recipe) -> dict[str, Recipe]:
    """The standard table of schemes on a recipe's kernel, window, estimate and weights. Raises UserError for branches.

    Schemes that this recipe's other keys forbid are left out.
    """
    if recipe.branch:
        raise UserError("--all-schemes needs a recipe without branch: true, which allows the final reward alone")
    return {label: recipes.build({**recipe.model_dump(), **keys}) for label, keys in STANDARD.items()}


def prepare(named: Mapping[str, Recipe], groups: int, seed: int) -> list[Scheme]:
    """Everything that is needed to audit recipes, by label, on the policy of the first. Raises UserError.

    The model, the reward and the prompts are loaded once: recipes that name others are refused.
    """
    first_label, first = next(iter(named.items()))
    schemes: list[Scheme] = []
    for label, recipe in named.items():
        differing = [key for key in recipes.changed(first, recipe) if key in POLICY]
        if differing:
            key = differing[0]
            raise UserError(
                f"an audit looks at one policy, prompts and reward, but {key} is {getattr(first, key)!r} in "
                f"{first_label!r} and {getattr(recipe, key)!r} in {label!r}; audit them one by one"
            )
        small = _one_prompt(recipe, groups, seed)
        if not schemes:
            parts = setup(small)
        else:
            shared = schemes[0].parts
            parts = replace(
                setup(small, weights=False), policy=shared.policy, reward=shared.reward, train=shared.train, heldout=()
            )
        schemes.append(Scheme(label, recipe, parts))
    return schemes


def shapes(schemes: Sequence[Scheme], plain: bool = False) -> list[Shape]:
    """Schemes by the rollouts that they share, in order of first appearance.

    The reference, the unbiased policy gradient, is weighted by step as the first recipe asks, everywhere: one yardstick
    for all. ``plain``: not weighted, so that it is the gradient of the expected reward itself, in which the last noisy
    steps' noise drowns the rest.
    """
    first = schemes[0].recipe
    by_key: dict[tuple[Any, ...], list[Scheme]] = {}
    for scheme in schemes:
        by_key.setdefault(tuple(getattr(scheme.recipe, key) for key in ROLLOUT), []).append(scheme)
    return [_shape(some, "none" if plain else first.step_weight, first.step_table) for some in by_key.values()]


def reference_advantage(R: Tensor, trained: Tensor) -> Tensor:
    """Advantage ``[groups, G, T]`` of the unbiased policy gradient: ``R[T] - R[i]`` less its mean over the others.

    Neither ``R[i]``, a function of the state before the step, nor the other members' mean moves the expectation; there
    is no scaling, so that the mean over members of advantage times gradient of the log-prob, summed over steps, is the
    gradient of the expected reward through the noisy steps. NaN (a failed sample) leaves its step.
    """
    to_end = R[..., -1:] - R[..., :-1]
    valid = trained & ~to_end.isnan()
    value = torch.where(valid, to_end.double(), 0.0)
    count = valid.sum(-2, keepdim=True)
    deviation = value - value.sum(-2, keepdim=True) / count.clamp(min=1)
    # n / (n - 1): the mean of all holds a share of the member itself
    return torch.where(valid, deviation * count / (count - 1).clamp(min=1), 0.0).float()


def _one_prompt(recipe: Recipe, groups: int, seed: int) -> Recipe:
    size = recipe.group_size
    micro_batch = max(n for n in range(1, min(size, recipe.micro_batch) + 1) if size % n == 0)
    cut = {
        "prompts_per_iteration": 1,
        "updates_per_rollout": 1,
        "micro_batch": micro_batch,
        "iterations": groups,
        "seed": seed,
        "replay": "recompute",  # gradients are taken member by member, not from the rollout's graphs
    }
    return recipes.build({**recipe.model_dump(), **cut})


def _shape(schemes: Sequence[Scheme], weight: objective.StepWeight, weight_table: tuple[float, ...] | None) -> Shape:
    scored_by: list[Setup] = []
    keys: list[tuple[Any, ...]] = []
    for scheme in schemes:
        key = tuple(getattr(scheme.recipe, name) for name in ESTIMATE)
        if scheme.recipe.credit in DENSE and key not in keys:
            keys.append(key)
            scored_by.append(scheme.parts)
    if not scored_by:  # the reference's baseline needs some estimate of the states: the free one
        # DENSE schemes score every state; which one it is does not matter to the plan
        dense = {"credit": "gain", "advantage": "centred", "estimate": "tweedie", "branch": False}
        recipe = recipes.build({**schemes[0].parts.recipe.model_dump(), **dense})
        scored_by.append(replace(schemes[0].parts, recipe=recipe))
    own = [tuple(getattr(scheme.recipe, name) for name in ESTIMATE) for scheme in schemes]
    estimate_of = [
        keys.index(key) if scheme.recipe.credit in DENSE else 0 for scheme, key in zip(schemes, own, strict=True)
    ]
    lead = schemes[0].parts
    if weight_table is not None and len(weight_table) != lead.kernel.steps:
        weight = "none"  # another number of steps than the table's
    start, stop = lead.recipe.window or (0, lead.recipe.steps)
    noisy = torch.zeros_like(lead.kernel.trainable)
    noisy[start:stop] = lead.kernel.trainable[start:stop]
    weights = objective.step_weights(weight, lead.kernel, noisy, weight_table).float()
    return Shape(tuple(schemes), tuple(scored_by), tuple(estimate_of), weights)
