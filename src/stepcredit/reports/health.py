"""Whether a run was sane and what it cost: health curves, time by phase, the ledger, image statistics."""

from __future__ import annotations

from dataclasses import dataclass

from markupsafe import Markup

from stepcredit.reports import figures, folder, style
from stepcredit.reports.figures import THIRD, Chart, Line, binned
from stepcredit.reports.folder import RunFolder, lookup, mapping, mean_of, number
from stepcredit.reports.svg import Values, known


def curves(run: RunFolder) -> list[Chart]:
    """The curves by which a run is judged sane, each with how to read it; one that never moves is a sentence alone."""
    x = [float(line["iteration"]) for line in run.iterations]
    if not x:
        return []

    def curve(title: str, values: Values, note: str, still: str, percent: bool = False) -> Chart:
        there = known(values)
        if not there:
            return Chart(title, Markup(""), "Not recorded.")
        if min(there) == max(there) and (there[0] == 0 or len(there) > 1):
            return Chart(title, Markup(""), still)
        label = f"{title} by iteration, between {style.number(min(there))} and {style.number(max(there))}"
        line = Line("late", *binned(x, values))
        return Chart(title, figures.lines([line], label, THIRD, percent=percent, from_zero=True), note)

    deviation, rate = run.series("ratio_deviation"), run.series("lr")
    largest = style.scientific(max(known(deviation), default=None))
    pairs = zip(run.series("degenerate_groups"), run.series("groups"), strict=True)
    silent = [d / n if d is not None and n else None for d, n in pairs]
    clip, kl = ([folder.mean(values) for values in run.per_step(key)] for key in ("clip_fraction", "kl"))
    limit = number(run.recipe.get("grad_clip"))
    every = "The same at every iteration."
    charts = [
        curve(
            "Gradient norm", run.series("grad_norm"), f"Before clipping at {limit:g}." if limit else "Unclipped.", every
        ),
        curve(
            "Groups without signal",
            silent,
            "Share of groups whose members all earned the same credit.",
            f"{style.percent(max(known(silent), default=None))} of the groups, at every iteration."
            if any(known(silent))
            else "None: every group had one, at every iteration.",
            percent=True,
        ),
        curve(
            "Ratio deviation",
            deviation,
            f"Largest |ratio − 1| at a first update, {largest} at most; on-policy it should be 0.",
            "|ratio − 1| was exactly 0 at every first update, as it must be on-policy."
            if largest == "0"
            else f"|ratio − 1| was {largest} at every first update; on-policy it should be 0.",
        ),
        curve(
            "Clip fraction",
            clip,
            "Share of terms whose ratio left the clip range, mean over trained steps.",
            "No ratio left the clip range." if known(clip) and not any(known(clip)) else every,
            percent=True,
        ),
        curve("KL to the base model", kl, "Mean over trained steps.", every)
        if known(kl) or number(run.recipe.get("kl_beta")) != 0
        else Chart("KL to the base model", Markup(""), "Not measured, since kl_beta is 0."),
        *(
            [curve("KL of an update", moved, "Between the policy before and after; trust_kl is its limit.", every)]
            if known(moved := run.series("update_kl"))
            else []
        ),
        curve("Learning rate", rate, "At the last update of an iteration.", f"Constant at {_first(rate)}."),
    ]
    return sorted(charts, key=lambda chart: not chart.figure)


def _first(values: Values) -> str:
    return style.scientific(next(iter(known(values)), None))


@dataclass(frozen=True)
class Cost:
    """Where the time went, and what a trajectory costs."""

    bar: Markup
    phases: tuple[tuple[str, float, float], ...]
    """(phase, seconds, share)."""
    ledger: tuple[tuple[str, float | None, float | None], ...]
    """(what, per trajectory, per iteration)."""
    rewards: tuple[RewardCost, ...]


@dataclass(frozen=True)
class RewardCost:
    """What was asked of one reward, and how long the answers took."""

    name: str
    calls: float
    images: float
    seconds: float
    hits: float | None
    """Images found in the cache; None without a cache."""


LEDGER = {
    "rollout_evaluations": "Model evaluations in the rollout",
    "scoring_evaluations": "Model evaluations for clean estimates",
    "model_evaluations": "Model evaluations, both",
    "decodes": "Decodes",
    "reward_calls": "Reward calls",
    "trained_evaluations": "Forward–backward passes of an update",
}


def cost(run: RunFolder) -> Cost:
    """Seconds by phase, summed over the run, and the ledger."""
    seconds: dict[str, float] = {}
    for line in run.iterations:
        for phase, value in mapping(line.get("phase_seconds")).items():
            seconds[phase] = seconds.get(phase, 0.0) + (number(value) or 0.0)
    parts = [(phase, value) for phase, value in seconds.items() if value > 0]
    total = sum(value for _, value in parts)
    label = "Share of time: " + ", ".join(f"{phase} {value / total:.0%}" for phase, value in parts) if parts else ""
    trajectories = number(run.ledger.get("trajectories"))
    rows = []
    for key, what in LEDGER.items():
        per = number(run.ledger.get(f"{key}_per_trajectory"))
        if per is not None:
            rows.append((what, per, per * trajectories if trajectories else None))
    phases = tuple((phase, value, value / total) for phase, value in parts)
    return Cost(figures.shares(parts, label), phases, tuple(rows), _reward_costs(run))


def _reward_costs(run: RunFolder) -> tuple[RewardCost, ...]:
    found = run.summary.get("reward_cost")
    rows = []
    for entry in found if isinstance(found, list) else ():
        row = mapping(entry)
        calls, images, seconds = (number(row.get(key)) for key in ("calls", "images", "seconds"))
        if calls is not None and images is not None and seconds is not None:
            rows.append(RewardCost(str(row.get("name", "")), calls, images, seconds, number(row.get("cache_hits"))))
    return tuple(rows)


def statistics(run: RunFolder) -> list[tuple[str, float, float, float | None]]:
    """Image statistics (name, before, after, relative change), of the base model and the latest evaluation."""
    before = mapping(run.start.get("image_statistics"))
    evaluations = [line["evaluation"] for line in run.iterations if mapping(line.get("evaluation"))]
    told = mapping(lookup(run.summary, "image_statistics", "after"))
    after = told or mapping(lookup(evaluations[-1], "image_statistics") if evaluations else None)
    rows = []
    for name, value in before.items():
        first, last = mean_of(value), mean_of(after.get(name))
        if first is not None and last is not None:
            rows.append((name.replace("_", " "), first, last, (last - first) / abs(first) if first else None))
    return rows
