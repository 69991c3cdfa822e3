"""Base against tuned on a suite: what is compared, with which statistics, and what could have been seen."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from stepcredit.rewards.base import Reward
from stepcredit.tasks.base import Prompt
from stepcredit.training import comparison
from stepcredit.training.comparison import Design, Floats
from stepcredit.training.evaluation import Evaluation, Slot
from stepcredit.training.stats import Interval


def slots_of(suite: str, prompts: Sequence[Prompt], images: int) -> list[Slot]:
    """``images`` slots for each prompt, whose noise is a function of (suite, prompt, number of the image) alone.

    It depends neither on the order nor on the number of the prompts. Raises ValueError for fewer than one image.
    """
    if images < 1:
        raise ValueError(f"images must be at least 1 a prompt, not {images}")
    keyed = [(prompt, k) for prompt in prompts for k in range(images)]
    return [Slot(number, prompt, ("suite", suite, prompt.text, k)) for number, (prompt, k) in enumerate(keyed)]


@dataclass(frozen=True)
class Metric:
    """One quantity of base and tuned images, compared in pairs of the same prompt and noise."""

    base: Interval
    tuned: Interval
    change: Interval
    p: float
    """Of a two-sided sign-flip test over prompts."""
    p_holm: float
    """Adjusted for all metrics of the evaluation."""
    detectable: float
    """Smallest true change found four times in five, by the spread that was measured."""
    in_base_deviations: float
    """The change in standard deviations of the base over prompts; NaN where the base does not vary."""
    failed: int
    """Pairs left out since either image could not be scored."""

    def as_dict(self) -> dict[str, Any]:
        """As plain JSON."""
        intervals = {key: getattr(self, key).as_dict() for key in ("base", "tuned", "change")}
        return {**vars(self), **intervals}


def compare(base: Evaluation, tuned: Evaluation, name: str | None, macro: bool = False) -> dict[str, Metric]:
    """Every metric of two evaluations of the same slots: the reward under ``name`` (None leaves it out), exactly
    right images, and the reward's components.

    A metric whose values are those of an earlier one is left out: it would count twice in the family of tests. Raises
    ValueError if the slots differ.
    """
    if base.slots != tuned.slots:
        raise ValueError("only evaluations of the same slots can be compared")
    of = design_of(base.slots, macro)
    pairs: dict[str, tuple[Floats, Floats]] = {}
    for key, before in _values(base, name).items():
        pair = (before, _values(tuned, name)[key])
        if not any(
            all(np.array_equal(a, b, equal_nan=True) for a, b in zip(pair, q, strict=True)) for q in pairs.values()
        ):
            pairs[key] = pair
    changes = {key: after - before for key, (before, after) in pairs.items()}
    p = {key: _p_value(change, of) for key, change in changes.items()}
    adjusted = dict(zip(p, comparison.holm(list(p.values())), strict=True))
    result = {}
    for key, (before, after) in pairs.items():
        change = changes[key]
        paired = np.isnan(change)
        before, after = (np.where(paired, math.nan, values) for values in (before, after))
        spread = comparison.paired_deviation(before, of)
        mean = comparison.estimate(change, of)
        result[key] = Metric(
            base=comparison.interval(before, of),
            tuned=comparison.interval(after, of),
            change=comparison.interval(change, of),
            p=p[key],
            p_holm=adjusted[key],
            detectable=comparison.detectable(comparison.standard_error(change, of)),
            in_base_deviations=mean / spread if spread > 0 else math.nan,
            failed=int(paired.sum()),
        )
    return result


def per_tag(base: Evaluation, tuned: Evaluation) -> dict[str, dict[str, Any]]:
    """Reward of base and tuned and their change, with intervals, of the images of every tag."""
    tags = [slot.prompt.tag for slot in base.slots]
    result = {}
    for tag in sorted(set(tags)):
        rows = np.flatnonzero(np.array([one == tag for one in tags]))
        of = design_of([base.slots[row] for row in rows], macro=False)
        before, after = (_floats(each.rewards)[rows] for each in (base, tuned))
        lost = np.isnan(after - before)
        values = {"base": before, "tuned": after, "change": after - before}
        told = {key: comparison.interval(np.where(lost, math.nan, one), of).as_dict() for key, one in values.items()}
        result[tag] = {"images": len(rows), **told}
    return result


@dataclass(frozen=True)
class Outlook:
    """What an evaluation can detect, known before it is made."""

    prompts: int
    images: int
    error_share: float
    """Standard error of the change in units of the paired deviation of prompts."""
    deviation: float | None
    """Paired deviation of prompts, in the reward's units; None where nothing is known of it."""
    source: str

    @property
    def detectable(self) -> float | None:
        """The smallest change found four times in five, in the reward's units."""
        return None if self.deviation is None else comparison.detectable(self.error_share * self.deviation)

    def __str__(self) -> str:
        size = f"{self.prompts} prompts, {self.images} pairs of images"
        if self.detectable is None:
            unit = comparison.detectable(self.error_share)
            return f"{size}: a change of {unit:.2f} deviations of the paired differences would be found 4 times in 5"
        return (
            f"{size}: a change of {self.detectable:.3g} would be found 4 times in 5 (two-sided, 5 %), if the paired "
            f"differences of prompts deviate by {self.deviation:.3g} ({self.source})"
        )


def outlook(on: Sequence[Slot], macro: bool, reward: Reward, measured: float | None) -> Outlook:
    """What a comparison on these slots will be able to detect.

    The paired deviation is ``measured``, else assumed: .5 for a reward in [0, 1], which is that of a verdict that
    changes for a quarter of the prompts; for any other range nothing is assumed.
    """
    of = design_of(on, macro)
    share = comparison.planned_error(1.0, of)
    low, high = reward.info.range
    if measured is not None and math.isfinite(measured):
        deviation, source = measured, "measured in this run's own evaluations"
    elif low >= 0 and high <= 1:
        deviation, source = 0.5, "assumed"
    else:
        deviation, source = None, "unknown"
    return Outlook(len(of.stratum), len(on), share, deviation, source)


def measured_deviation(folder: Path) -> float | None:
    """Paired deviation of prompts in a run's own evaluations before and after; None where either is missing."""
    found: list[Mapping[tuple[int, str], Mapping[str, Any]]] = []
    for name in ("iteration-000000", "after"):
        path = folder / "evaluations" / f"{name}.jsonl"
        if not path.is_file():
            return None
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]
        found.append({(row["slot"], row["prompt"]): row for row in rows if row["reward"] is not None})
    both = sorted(found[0].keys() & found[1].keys())
    if not both:
        return None
    change = np.array([found[1][key]["reward"] - found[0][key]["reward"] for key in both], dtype=np.float64)
    of = comparison.design([prompt for _, prompt in both], [found[0][key]["tag"] for key in both])
    deviation = comparison.paired_deviation(change, of)
    return deviation if deviation > 0 else None


def design_of(on: Sequence[Slot], macro: bool) -> Design:
    """Prompts as clusters, tags as strata."""
    return comparison.design([slot.prompt.text for slot in on], [slot.prompt.tag for slot in on], macro)


def _values(of: Evaluation, name: str | None) -> dict[str, Floats]:
    values = {name: _floats(of.rewards)} if name else {}
    if of.exact is not None:
        values["exactly right"] = _floats(of.exact)
    prefix = f"{name}." if name else ""
    return {**values, **{f"{prefix}{key}": _floats(part) for key, part in of.components.items()}}


def _p_value(change: Floats, of: Design) -> float:
    return comparison.sign_flip(comparison.contributions(change, of))


def _floats(values: Tensor) -> Floats:
    return values.double().numpy()
