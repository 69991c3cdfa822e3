"""Every credit scheme with every normalisation that suits it, computed by the functions that training calls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from stepcredit import advantage as advantages
from stepcredit import credit as credits_
from stepcredit.training.iteration import credit_of
from stepcredit.training.recipe import Recipe

LAMBDAS = (0.25, 0.5, 0.75, 0.9, 1.0)
"""Decays of ``gae`` that are shown, beside the recipe's own."""
NORMALISATIONS: Mapping[str, str] = {
    "group": "compares final rewards: minus the group's mean, divided by its deviation",
    "joint": "minus the mean over members and steps together, divided by their common deviation",
    "per_step": "every step by itself: minus the mean over members there, divided by their deviation there",
    "centred": "minus the mean over members at each step, divided by one deviation for all steps",
}
"""What each normalisation does, in words."""


@dataclass(frozen=True)
class Scheme:
    """A credit scheme with its options."""

    key: str
    label: str
    text: str
    """What it credits a step with, in words."""
    options: Mapping[str, Any]
    """The recipe keys that choose it."""

    @property
    def normalisations(self) -> tuple[str, ...]:
        """Names of the normalisations that may follow; ``group`` needs credit that is equal over steps."""
        return tuple(name for name in NORMALISATIONS if name != "group" or self.options["credit"] == "uniform")


@dataclass(frozen=True)
class Numbers:
    """What the library makes of the rewards of one group, all tensors ``[G, T]``."""

    gain: Tensor
    loose: Tensor
    """bool: loose turning points, at trained steps and others."""
    strict: Tensor
    """bool: strict ones, a subset of the loose."""
    credit: Mapping[str, Tensor]
    """By key of the scheme."""
    advantage: Mapping[str, Mapping[str, Tensor]]
    """By key of the scheme and name of the normalisation; 0 at steps that are not trained."""


def schemes(recipe: Recipe) -> tuple[Scheme, ...]:
    """All schemes that a page can show, with the recipe's own decay and temperature among them."""
    found = [
        Scheme("uniform", "uniform", "every step gets the reward of the final image", {"credit": "uniform"}),
        Scheme("gain", "gain", "a step gets what it added to the reward: its own gain", {"credit": "gain"}),
    ]
    for lam in sorted({*LAMBDAS, recipe.lam} - {0.0}):
        text = (
            "a step gets all that was still to come: the final reward minus that of the estimate before the step"
            if lam == 1
            else f"a step gets its own gain and those that follow, each {lam:g} times as much as the one before"
        )
        found.append(Scheme(f"gae_{lam:g}", f"gae, λ = {lam:g}", text, {"credit": "gae", "lam": lam}))
    for balance in (False, True):
        for strict in (True, False):
            kind = "strict" if strict else "loose"
            found.append(
                Scheme(
                    f"turning_point_{kind}" + ("_balanced" if balance else ""),
                    f"turning point, {kind}" + (", balanced" if balance else ""),
                    f"a step gets its gain, but at {kind} turning points all that was still to come"
                    + (", of which as many raise as lower the reward" if balance else ""),
                    {"credit": "turning_point", "strict": strict, "balance": balance},
                )
            )
    smooth = {"credit": "turning_point_smooth", "temperature": recipe.temperature}
    text = f"between gain and all that was still to come, by the size of the turn (temperature {recipe.temperature:g})"
    return (*found, Scheme("turning_point_smooth", "turning point, smooth", text, smooth))


def own(recipe: Recipe) -> Scheme:
    """The scheme that a recipe trains with; TempFlow-GRPO's credit has the numbers of ``uniform``."""
    name = {"tempflow": "uniform"}.get(recipe.credit, recipe.credit)
    if name == "gae" and recipe.lam == 0:
        name = "gain"
    options = {"lam": recipe.lam, "strict": recipe.strict, "balance": recipe.balance}
    return next(
        scheme
        for scheme in schemes(recipe)
        if scheme.options["credit"] == name
        and all(options.get(key, value) == value for key, value in scheme.options.items())
    )


def numbers(recipe: Recipe, R: Tensor, trained: Tensor) -> Numbers:
    """Gains, turning points, credit and advantage of one group, as training would compute them.

    R ``[G, T + 1]`` rewards, NaN where a sample has none; trained bool ``[G, T]``. The group is taken by itself:
    ``global_std`` over one group is that group's own deviation.
    """
    groups, mask = R[None], trained[None]
    credit, advantage = {}, {}
    for scheme in schemes(recipe):
        value = credit_of(recipe.model_copy(update=dict(scheme.options)), groups, mask)
        credit[scheme.key] = value[0]
        advantage[scheme.key] = {name: getattr(advantages, name)(value, mask)[0] for name in scheme.normalisations}
    return Numbers(
        gain=credits_.gain(R),
        loose=credits_.turning_points(R, strict=False),
        strict=credits_.turning_points(R, strict=True),
        credit=credit,
        advantage=advantage,
    )
