"""The methods that are compared and the claims that they are compared for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

ITERATIONS = 15
BASE: Mapping[str, Any] = {
    "iterations": ITERATIONS,
    "eval_every": 3,
    "eval_prompts": 560,
    "eval_prompts_during": 280,
    "checkpoint_every": 0,
}
"""Of every run: two pictures of each held-out word before and after, one of each during the run."""
RATES = (1.5e-4, 3e-4, 6e-4, 1.2e-3)
"""Learning rates that every method may choose from."""
LONGER: Mapping[str, Any] = {"iterations": 24}
PUBLISHED: Mapping[str, Any] = {"window": [0, 10], "step_weight": "none"}
"""All steps trained, each with the weight that it has by itself, which grows with |d mu / d v| / std."""
TRUST = 6e-5
"""Largest KL of an update per dimension: about that of the updates of `stepwise` at 6e-4 once it is under way."""
TUNING_ITERATIONS = 9
TUNING_SEED = 100
"""Shares no prompt batch and no noise with the seeds of the rows."""


@dataclass(frozen=True)
class Method:
    """A recipe with some keys changed."""

    name: str
    recipe: str
    own: Mapping[str, Any] = field(default_factory=dict)
    rate_of: str | None = None
    """Method whose learning rate it takes; by default its own is found."""
    rate: float | None = None
    """Its learning rate, if none is to be found."""

    @property
    def changes(self) -> dict[str, Any]:
        """Keys that differ from the bundled recipe."""
        return {**BASE, **self.own}


@dataclass(frozen=True)
class Row:
    """One claim: the first method is what the others are compared with."""

    name: str
    title: str
    claim: str
    methods: tuple[str, ...]


def _step(name: str, **own: Any) -> Method:
    return Method(f"stepwise-{name}", "spell-stepwise", own, rate_of="stepwise")


_METHODS = (
    Method("uniform", "spell-uniform"),
    Method("stepwise", "spell-stepwise"),
    Method("turning-point", "spell-turning-point"),
    Method("uniform-longer", "spell-uniform", LONGER, rate=RATES[1]),
    Method("stepwise-longer", "spell-stepwise", LONGER, rate=RATES[1]),
    Method("uniform-published", "spell-uniform", PUBLISHED),
    Method("stepwise-published", "spell-stepwise", PUBLISHED),
    Method("uniform-trust", "spell-uniform", {"trust_kl": TRUST}, rate=3e-3),
    Method("stepwise-trust", "spell-stepwise", {"trust_kl": TRUST}, rate=3e-3),
    Method("uniform-ddim", "spell-uniform", {"kernel": "ddim", "level": None}),
    Method("stepwise-ddim", "spell-stepwise", {"kernel": "ddim", "level": None}),
    _step("joint", advantage="joint"),
    _step("per-step", advantage="per_step"),
    _step("1-substep", substeps=1),
    _step("5-substeps", substeps=5),
    _step("8-substeps", substeps=8),
    _step("full", estimate="full"),
    _step("window-3", window=[0, 3]),
    _step("window-8", window=[0, 8]),
    _step("gae-.5", credit="gae", lam=0.5),
    _step("gae-1", credit="gae", lam=1.0),
    Method("turning-point-loose", "spell-turning-point", {"strict": False}, rate_of="turning-point"),
    Method("turning-point-balanced", "spell-turning-point", {"balance": True}, rate_of="turning-point"),
)
METHODS: Mapping[str, Method] = {method.name: method for method in _METHODS}

ROWS = (
    Row(
        "main",
        "Step-wise and turning-point credit against uniform credit",
        "Stepwise-Flow-GRPO (2603.28718): gains need two to three times fewer updates and 20 to 40 % less time than "
        "Flow-GRPO. TP-GRPO (2602.06422): on PickScore turning points need about a third of the updates.",
        ("uniform", "stepwise", "turning-point"),
    ),
    Row(
        "longer",
        "The same at half the rate, for 24 updates",
        "As above. A trial of nine updates favours high rates; what a lower one does in more updates was not in the "
        "choice.",
        ("uniform-longer", "stepwise-longer"),
    ),
    Row(
        "published",
        "The same with the published objective: all ten steps, none weighted",
        "As above. The papers train every step with the weight that it has by itself; here uniform credit is given the "
        "first six steps and balanced weights as well.",
        ("uniform-published", "stepwise-published"),
    ),
    Row(
        "trust",
        "Updates of one length in the policy, by a trust region",
        "Ours: at a learning rate that ruins every run, each update is shortened to one KL (`trust_kl`).",
        ("stepwise", "stepwise-trust", "uniform-trust"),
    ),
    Row(
        "normalisation",
        "Normalising jointly, centred jointly, or step by step",
        "Stepwise-Flow-GRPO: one normalisation over members and steps is clearly faster than one a step.",
        ("stepwise", "stepwise-joint", "stepwise-per-step"),
    ),
    Row(
        "substeps",
        "How good a clean estimate has to be",
        "Stepwise-Flow-GRPO: 2, 5 and 8 substeps are alike.",
        ("stepwise", "stepwise-1-substep", "stepwise-5-substeps", "stepwise-8-substeps", "stepwise-full"),
    ),
    Row(
        "kernel",
        "The DDIM-inspired kernel against flow_sde",
        "Stepwise-Flow-GRPO: the DDIM-inspired kernel learns faster than flow_sde.",
        ("uniform", "uniform-ddim", "stepwise", "stepwise-ddim"),
    ),
    Row(
        "window",
        "How many steps are trained",
        "No paper's claim: here the first six of ten steps are trained by default.",
        ("stepwise", "stepwise-window-3", "stepwise-window-8"),
    ),
    Row(
        "turning-points",
        "Strict against loose turning points, and balancing them",
        "TP-GRPO: strict is a little better than loose on GenEval, loose on OCR and PickScore.",
        ("turning-point", "turning-point-loose", "turning-point-balanced"),
    ),
    Row(
        "lambda",
        "From gains to the reward still to come",
        "No paper's claim: gae's lambda is 0 for gains and 1 for the long-term reward.",
        ("stepwise", "stepwise-gae-.5", "stepwise-gae-1"),
    ),
)
