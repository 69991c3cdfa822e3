"""What an audit found: numbers with intervals as plain JSON, and one sentence of advice."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np

from stepcredit.audit import estimators
from stepcredit.audit.estimators import Array, Products, Replicated
from stepcredit.audit.measure import Sums, describe_estimate
from stepcredit.audit.schemes import Scheme, Shape
from stepcredit.training.setup import DENSE

FEWEST = 4
"""Groups below which nothing is estimated: intervals would be wider than any finding."""
BIASED = 0.9
"""An alignment whose whole interval is below this is called a bias."""
LOUD = 0.5
"""A step with more than this share of the noise is named."""
WORTH = 1.1
"""A window is worth proposing if it promises this many times the progress."""


def summarise(shapes: Sequence[Shape], sums: Sequence[Sums]) -> dict[str, Any]:
    """Everything found, as plain JSON; numbers that are not resolved are NaN.

    ``schemes``, in the order of the shapes, each with ``signal_to_noise`` (of one prompt), ``signal_per_evaluation``
    (the same for 1,000 model evaluations), ``alignment``, ``progress`` (of an update as the recipe makes it),
    ``progress_at_equal_cost`` (at the first scheme's cost), ``difference`` and ``ratio`` (that to the first scheme's,
    paired by prompt; a ratio to what is not resolved is NaN), ``behind_best``: ``{mean, low, high}`` each; and
    ``steps``: norms and shares by step.
    """
    first = shapes[0].schemes[0]
    budget = first.groups_per_update * first.cost
    baseline: Replicated | None = None
    if sums[0].groups == 0:
        return {"groups": 0, "budget": budget, "shapes": [], "schemes": [], "advice": advice({"groups": 0})}
    rows: list[dict[str, Any]] = []
    equals: list[Replicated] = []
    for number, (shape, kept) in enumerate(zip(shapes, sums, strict=True)):
        reference = kept.gradients(-1)
        for k, scheme in enumerate(shape.schemes):
            p = estimators.products(kept.gradients(k), reference)
            equal = estimators.progress(p, budget / scheme.cost)
            baseline = baseline or equal
            equals.append(equal)
            silent = math.nan if kept.silent is None else float(kept.silent[k]) / kept.groups
            row = {**_about(scheme), "shape": number, "silent_groups": silent}
            rows.append({**row, **_figures(scheme, p, equal, baseline), "steps": _steps(kept, k)})
    best = max(equals, key=lambda equal: equal.value)
    for row, equal in zip(rows, equals, strict=True):
        row["behind_best"] = best.map(np.subtract, equal).interval().as_dict()
    found = {
        "groups": sums[0].groups,
        "budget": budget,
        "shapes": [_rollouts(shape, kept) for shape, kept in zip(shapes, sums, strict=True)],
        "schemes": rows,
    }
    return {**found, "advice": advice(found)}


def advice(found: Mapping[str, Any]) -> str:
    """One sentence: what to train with, as far as the intervals allow to say."""
    if found["groups"] < FEWEST:
        return f"Too few groups ({found['groups']}) to say anything; {FEWEST} are the least, 64 a good beginning."
    rows = found["schemes"]
    known = [row for row in rows if row["progress_at_equal_cost"]["low"] > 0]
    if not known:
        return (
            f"No scheme's signal stands out of the noise of {found['groups']} groups: take more --groups, or a reward "
            f"that tells the members of a group apart{_loud(rows[0])}."
        )
    best = max(known, key=lambda row: row["progress_at_equal_cost"]["mean"])
    window = best["window"] or (0, best["sampler_steps"])
    take = (
        f"Take {best['label']}: credit {best['credit']}, advantage {best['advantage']}, kernel {best['kernel']} "
        f"{best['level']:g}, window [{window[0]}, {window[1]})"
        + (f", {best['estimate']}" if best["credit"] in DENSE else "")
    )
    words = [take, _against_first(rows, best, found["groups"]), _ties(rows, best)]
    if best["alignment"]["high"] < BIASED:
        words.append(
            f"its expected gradient is biased, with a cosine of {_shown(best['alignment'])} to the unbiased one, so "
            "watch the held-out reward"
        )
    if best["steps"]["proposed_window"] is not None:
        a, b = best["steps"]["proposed_window"]
        words.append(f"audit it again with --window {a} {b}, outside of which its steps bring more noise than signal")
    return "; ".join(word for word in words if word) + _loud(best) + "."


def _loud(row: Mapping[str, Any]) -> str:
    """The step that brings most of the noise, where one does: it hides the signal of all others."""
    shares = row["steps"]["share_of_noise"]
    if sum(share > 0 for share in shares) < 3 or not max(shares) > LOUD:
        return ""
    step = int(np.argmax(shares))
    return (
        f"; in {row['label']} step {step} alone brings {shares[step]:.0%} of the noise, so leave it out of the window "
        "or set step_weight to balanced"
    )


def _against_first(rows: Sequence[Mapping[str, Any]], best: Mapping[str, Any], groups: int) -> str:
    first, ratio = rows[0], best["ratio"]
    if best is first:
        others = [row for row in rows[1:] if row["ratio"]["high"] < 1]
        return (
            f"none of the others gains more at equal cost, and {len(others)} of {len(rows) - 1} gain clearly less"
            if rows[1:]
            else ""
        )
    if math.isfinite(ratio["mean"]):
        told, clear = (
            f"at equal cost an update gains {_shown(ratio)} times what {first['label']} gains",
            ratio["low"] > 1,
        )
    else:
        more = best["difference"]
        told, clear = f"at equal cost an update gains {_shown(more)} more than {first['label']}", more["low"] > 0
    return told if clear else f"{told}, which {groups} groups do not tell from the same"


def _ties(rows: Sequence[Mapping[str, Any]], best: Mapping[str, Any]) -> str:
    """Rows other than the first that are as good as the best within their intervals."""
    alike = [row["label"] for row in rows[1:] if row is not best and row["behind_best"]["low"] <= 0]
    return f"not told from it: {', '.join(alike)}" if alike else ""


def _shown(value: Mapping[str, float]) -> str:
    return f"{value['mean']:.2f} [{value['low']:.2f}, {value['high']:.2f}]"


def _about(scheme: Scheme) -> dict[str, Any]:
    recipe, kernel, cost = scheme.recipe, scheme.parts.kernel, scheme.parts.cost
    return {
        "label": scheme.label,
        "credit": f"gae (lam {recipe.lam:g})" if recipe.credit == "gae" else recipe.credit,
        "advantage": recipe.advantage,
        "estimate": describe_estimate(recipe) if recipe.credit in DENSE else "final image",
        "kernel": recipe.kernel,
        "level": kernel.level,
        "window": list(recipe.window) if recipe.window else None,
        "sampler_steps": recipe.steps,
        "step_weight": recipe.step_weight,
        "model_evaluations_per_trajectory": cost.model_evaluations / cost.trajectories,
        "trained_evaluations_per_trajectory": cost.trained_evaluations / cost.trajectories,
        "cost_per_group": scheme.cost,
        "groups_per_update": scheme.groups_per_update,
    }


def _figures(scheme: Scheme, p: Products, equal: Replicated, baseline: Replicated) -> dict[str, Any]:
    signal = estimators.signal_to_noise(p)
    resolved = baseline.interval().low > 0
    ratio = equal.map(lambda a, b: np.asarray(a / b if resolved else a * np.nan), baseline)
    per = signal.map(lambda s: np.asarray(1000 * s / scheme.cost))
    return {
        "signal_to_noise": signal.interval().as_dict(),
        "signal_per_evaluation": per.interval().as_dict(),
        "alignment": estimators.alignment(p).interval().as_dict(),
        "progress": estimators.progress(p, scheme.groups_per_update).interval().as_dict(),
        "progress_at_equal_cost": equal.interval().as_dict(),
        "difference": equal.map(np.subtract, baseline).interval().as_dict(),
        "ratio": ratio.interval().as_dict(),
    }


def _steps(kept: Sums, k: int) -> dict[str, Any]:
    """Of every step: the norm of a group's gradient, its share of the signal along the reference, and of the noise."""
    assert kept.powers is not None
    power = kept.powers[k] / kept.groups
    reference = kept.by_block(-1)
    along = [estimators.pair_mean(kept.by_block(k, i) @ reference.T) for i in range(len(power))]
    total = estimators.pair_mean(kept.by_block(k) @ reference.T)
    # shares of a total that is not clear of zero would be noise over noise
    resolved = total.interval().low > 0
    shares = [a.map(lambda part, whole: np.asarray(part / whole), total).interval() for a in along]
    unknown = {"mean": math.nan, "low": math.nan, "high": math.nan}
    noise = power / power.sum() if power.sum() > 0 else power * math.nan
    proposed = _window(np.array([share.mean for share in shares]), noise) if resolved else None
    return {
        "gradient_norm": np.sqrt(power).tolist(),
        "share_of_signal": [share.as_dict() if resolved else unknown for share in shares],
        "share_of_noise": noise.tolist(),
        "proposed_window": proposed,
    }


def _window(signal: Array, noise: Array) -> list[int] | None:
    """The window of these steps whose signal over the root of its noise is largest, if that is worth a try.

    Noise of different steps is taken as uncorrelated. None if all trained steps together are about as good.
    """
    trained = np.flatnonzero(noise > 0)
    if len(trained) < 2:
        return None
    spans = list(combinations(range(trained[0], trained[-1] + 2), 2))
    value = [signal[a:b].sum() / math.sqrt(noise[a:b].sum()) if noise[a:b].sum() > 0 else -math.inf for a, b in spans]
    best = int(np.argmax(value))
    return [int(edge) for edge in spans[best]] if value[best] > WORTH else None


def _rollouts(shape: Shape, kept: Sums) -> dict[str, Any]:
    """What the schemes of a shape share: the sampler's steps, and the gains by estimate."""
    lead = shape.schemes[0].parts
    spreads = np.stack(kept.spreads) if kept.spreads else np.zeros((0, 0, 0))
    with np.errstate(invalid="ignore"):
        seen = ~np.isnan(spreads)
        gains = np.where(seen, spreads, 0).sum(0) / seen.sum(0)
    return {
        "kernel": lead.recipe.kernel,
        "level": lead.kernel.level,
        "times": lead.kernel.grid.tolist(),
        "std": lead.kernel.std.tolist(),
        "gain_spread": {describe_estimate(s.recipe): list(g) for s, g in zip(shape.scored_by, gains, strict=False)},
        "reward": float(np.nanmean(kept.rewards)) if kept.rewards else math.nan,
    }
