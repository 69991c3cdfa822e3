"""Guards: what keeps an update from the weights, and what stops a run that is going wrong.

A gradient that is not finite, or far above the usual norm, is skipped. A run stops after too many skips in a row, and
where the KL to the base model, the ratio, the held-out reward or the held-out images pass a limit of the recipe. All
decisions are pure functions of what was measured and of ``GuardState``, which is part of a checkpoint.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from stepcredit.training.evaluation import Evaluation, paired
from stepcredit.training.recipe import Recipe
from stepcredit.training.stats import Interval

HISTORY = 32
"""Gradient norms of past updates whose median is the usual norm."""
WARM_UP = 8
"""Norms that must be known before an update can be a spike."""
FEWEST = 16
"""Held-out images during the run below which a fall of their reward is not judged: an interval of so few is no use."""
HACKED = "docs/troubleshooting.md#the-reward-rises-and-the-pictures-get-worse"
"""Where it is told what to do about a reward that is exploited."""
LIMITS = (
    *("max_skips", "max_kl", "max_ratio_deviation", "max_reward_drop", "max_watch_drop", "patience"),
    "max_image_drift",
)
"""Recipe keys that stop a run. They change no iteration already made, so a resumed run may change them."""

Skip = Literal["not_finite", "spike"]
"""Why an update was skipped."""


@dataclass(frozen=True)
class Fired:
    """A guard that stopped a run."""

    guard: str
    """The recipe key whose limit was passed."""
    iteration: int
    reason: str
    """One sentence."""
    limits: dict[str, float | None]
    """All limits at that time: a run that is resumed with others goes on."""


@dataclass
class GuardState:
    """What the guards remember from iteration to iteration."""

    norms: list[float] = field(default_factory=list)
    """Gradient norms of the latest ``HISTORY`` updates that were made."""
    in_a_row: int = 0
    """Updates skipped since the last one that was made."""
    skipped: dict[str, int] = field(default_factory=lambda: {"not_finite": 0, "spike": 0})
    """Updates skipped in the whole run, by reason."""
    falls: int = 0
    """Evaluations running whose reward was below the best by more than the limit."""
    watch_falls: int = 0
    """The same of the watched reward."""
    fired: Fired | None = None

    def note(self, norm: float, skip: Skip | None) -> None:
        """Take note of an update and of its gradient's norm before clipping."""
        if skip is None:
            self.norms = [*self.norms, norm][-HISTORY:]
            self.in_a_row = 0
        else:
            self.skipped[skip] += 1
            self.in_a_row += 1

    def as_dict(self) -> dict[str, Any]:
        """For a checkpoint, as JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> GuardState:
        """What :meth:`as_dict` saved; of an empty mapping (a checkpoint older than the guards) a fresh state."""
        state = cls(**{**saved, "fired": None})
        if saved.get("fired") is not None:
            state.fired = Fired(**saved["fired"])
        return state

    def lift(self) -> None:
        """Forget the stop and what led to it, so that the run may go on."""
        self.fired, self.in_a_row, self.falls, self.watch_falls = None, 0, 0, 0


def limits(recipe: Recipe) -> dict[str, float | None]:
    """The limits of a recipe by key; None where a guard is off."""
    return {key: getattr(recipe, key) for key in LIMITS}


def spike_limit(norms: Sequence[float], factor: float | None) -> float:
    """Largest gradient norm that is no spike: ``factor`` times the median of the past ``norms``.

    Infinite where ``factor`` is None, before ``WARM_UP`` norms are known, and where the median is 0 (most updates had
    no signal, so nothing is usual).
    """
    if factor is None or len(norms) < WARM_UP:
        return math.inf
    return factor * statistics.median(norms) or math.inf


def after_iteration(
    recipe: Recipe, state: GuardState, iteration: int, kl: Sequence[float] | None, ratio_deviation: float
) -> Fired | None:
    """The guard that an iteration sets off, if any, also kept as ``state.fired``.

    ``kl``: KL to the base model at each step in the recipe's form, NaN where none is trained, None where it was not
    measured. ``ratio_deviation``: largest |ratio - 1| of all updates of the iteration.
    """
    known = [value for value in kl or () if not math.isnan(value)]
    mean = sum(known) / len(known) if known else 0.0
    if state.in_a_row >= recipe.max_skips:
        return _fire(
            recipe, state, iteration, "max_skips",
            f"the last {state.in_a_row} updates were skipped because their gradient was not finite or far above the "
            "usual norm; lower lr, or use a wider dtype (docs/troubleshooting.md#updates-are-skipped)",
        )  # fmt: skip
    if recipe.max_kl is not None and not mean <= recipe.max_kl:
        return _fire(
            recipe, state, iteration, "max_kl",
            f"the KL to the base model reached {mean:.3g}, above max_kl = {recipe.max_kl:g}",
        )  # fmt: skip
    if recipe.max_ratio_deviation is not None and not ratio_deviation <= recipe.max_ratio_deviation:
        return _fire(
            recipe, state, iteration, "max_ratio_deviation",
            f"|ratio - 1| reached {ratio_deviation:.3g}, above max_ratio_deviation = {recipe.max_ratio_deviation:g}",
        )  # fmt: skip
    return None


def after_evaluation(
    recipe: Recipe,
    state: GuardState,
    iteration: int,
    now: Evaluation,
    best: Evaluation,
    best_iteration: int,
    base: Evaluation,
    best_watched: tuple[Evaluation, int] | None = None,
) -> Fired | None:
    """The guard that an evaluation during the run sets off, if any, also kept as ``state.fired``.

    ``best`` (made after ``best_iteration``) and ``base`` are evaluations of the slots of ``now``: the best so far, and
    the base model's. The reward has fallen if the paired interval of the change is below zero and the mean fall is
    above ``max_reward_drop`` times the standard deviation of the base model's rewards, which makes the limit one of
    effect size, whatever the reward's units; fewer than ``FEWEST`` images are not judged. ``best_watched`` is the best
    so far by the watched reward, with its iteration: that reward's fall is judged alike, by ``max_watch_drop``.
    ``base.statistics`` may be empty: then no statistic of the images is.
    """
    fall = _fall(recipe.max_reward_drop, now, best, base)
    state.falls = state.falls + 1 if fall.deep else 0
    if state.falls >= recipe.patience:
        return _fire(
            recipe, state, iteration, "max_reward_drop",
            f"the held-out reward is {fall.told(best_iteration)} (max_reward_drop = {recipe.max_reward_drop:g} "
            f"standard deviations) in {state.falls} evaluations running "
            "(docs/troubleshooting.md#the-reward-rises-then-collapses)",
        )  # fmt: skip
    if now.watched is not None and base.watched is not None and best_watched is not None:
        watched, since = best_watched
        assert watched.watched is not None
        fall = _fall(recipe.max_watch_drop, now.watched, watched.watched, base.watched)
        state.watch_falls = state.watch_falls + 1 if fall.deep else 0
        if state.watch_falls >= recipe.patience:
            return _fire(
                recipe, state, iteration, "max_watch_drop",
                f"the watched reward {recipe.watch!r} is {fall.told(since)} (max_watch_drop = "
                f"{recipe.max_watch_drop:g} standard deviations) in {state.watch_falls} evaluations running, while the "
                f"reward that is trained on moved by {paired(watched, now).mean:+.3g}: look whether it is being hacked "
                f"({HACKED})",
            )  # fmt: skip
    if recipe.max_image_drift is not None:
        for name, drift in image_drift(base.statistics, now.statistics).items():
            if not abs(drift) <= recipe.max_image_drift:
                return _fire(
                    recipe, state, iteration, "max_image_drift",
                    f"the {name.replace('_', ' ')} of the held-out images moved by {drift:+.0%} from the base "
                    f"model's, more than max_image_drift = {recipe.max_image_drift:g}: look whether the reward is "
                    f"being hacked ({HACKED})",
                )  # fmt: skip
    return None


@dataclass(frozen=True)
class _Fall:
    change: Interval
    """Of the reward since the best evaluation, paired."""
    allowed: float
    """Largest fall that is none, in the reward's units."""

    @property
    def deep(self) -> bool:
        return self.change.high < 0 and -self.change.mean > self.allowed

    def told(self, since: int) -> str:
        of = f"that of iteration {since}" if since else "the base model's"
        down = self.change
        return (
            f"{-down.mean:.3g} [{-down.high:.3g}, {-down.low:.3g}] below {of}, and was below by more than "
            f"{self.allowed:.3g}"
        )


def _fall(limit: float | None, now: Evaluation, best: Evaluation, base: Evaluation) -> _Fall:
    """How far a reward has fallen, and how far it may: ``limit`` standard deviations of the base model's rewards."""
    allowed = math.inf
    if limit is not None and len(base.rewards) >= FEWEST:
        allowed = limit * float(base.rewards[~base.rewards.isnan()].double().std(correction=0))
    return _Fall(paired(best, now), allowed)


def image_drift(base: Mapping[str, float], now: Mapping[str, float]) -> dict[str, float]:
    """Relative change of each image statistic, largest first; statistics that are 0 or unknown at the base are left
    out.
    """
    drift = {name: now[name] / value - 1 for name, value in base.items() if value and name in now}
    return dict(sorted(drift.items(), key=lambda item: -abs(item[1])))


def _fire(recipe: Recipe, state: GuardState, iteration: int, guard: str, reason: str) -> Fired:
    state.fired = Fired(guard, iteration, reason, limits(recipe))
    return state.fired
