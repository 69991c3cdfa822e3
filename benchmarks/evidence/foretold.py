"""Does the audit, made of the base model before any training, foretell which method learns faster?"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from evidence.page import area, shown
from stepcredit.training.stats import Interval, student

AUDIT = Path(__file__).parent.parent / "results" / "spell-audit.json"
SCHEMES = {
    "uniform": "uniform",
    "stepwise": "gain, centred",
    "stepwise-joint": "gain, joint",
    "stepwise-per-step": "gain, per_step",
    "stepwise-gae-.5": "gae .5, centred",
    "stepwise-gae-1": "gae 1, centred",
}
"""Method of the rows -> its label in the audit."""


def rise(result: Mapping[str, Any]) -> float:
    """Mean height of a learning curve above the base model."""
    return area(result["curve"]) - float(result["curve"]["reward"][0])


def ranks(values: Sequence[float]) -> list[float]:
    """Ranks from 0, equal values sharing the mean of theirs."""
    return [sum(w < v for w in values) + (sum(w == v for w in values) - 1) / 2 for v in values]


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> tuple[float, float]:
    """Spearman's correlation, and the share of all orders of ``b`` that correlate at least as well.

    Raises ValueError for fewer than 3 values, and where all are equal.
    """
    if len(a) < 3 or len(a) != len(b) or len(set(a)) == 1 or len(set(b)) == 1:
        raise ValueError("a rank correlation needs 3 pairs of values that differ")
    x, y = ranks(a), ranks(b)
    middle = (len(x) - 1) / 2

    def product(order: Sequence[float]) -> float:
        return sum((u - middle) * (v - middle) for u, v in zip(x, order, strict=True))

    size = (sum((u - middle) ** 2 for u in x) * sum((v - middle) ** 2 for v in y)) ** 0.5
    orders = [product(order) for order in itertools.permutations(y)]
    return product(y) / size, sum(one >= product(y) - 1e-9 for one in orders) / len(orders)


def section(found: Mapping[str, Sequence[Mapping[str, Any]]], audit: Path = AUDIT) -> list[str]:
    """The comparison in Markdown, of the methods and seeds that have been run; ``found``: results of every method."""
    lines = [
        "## Does the audit foretell the curves?",
        "",
        "> Ours: `stepcredit audit` says before training how far an update takes each scheme.",
        "",
        "```",
        "stepcredit audit spell-stepwise --all-schemes --groups 96 --to audit.json",
        "python benchmarks/papers.py --only main normalisation lambda",
        "```",
        "",
    ]
    told = {scheme["label"]: scheme for scheme in json.loads(audit.read_text(encoding="utf-8"))["schemes"]}
    there = [name for name in SCHEMES if found.get(name)]
    seeds = sorted(set.intersection(*({one["seed"] for one in found[name]} for name in there))) if there else []
    if len(there) < 3 or not seeds:
        return [*lines, "**Not run yet.**", ""]
    rises = {name: [rise(one) for one in found[name] if one["seed"] in seeds] for name in there}
    progress = {name: Interval(**told[SCHEMES[name]]["progress"]) for name in there}
    lines += [
        f"{len(seeds)} seed{'s' if len(seeds) > 1 else ''}, those that all methods have. The rise is the mean height "
        "of the learning curve above the base model; both are per update.",
        "",
        "| method | progress of an update, by the audit | rise of the held-out reward |",
        "|---|---|---|",
    ]
    for name in sorted(there, key=lambda name: -progress[name].mean):
        lines.append(f"| `{name}` | {shown(progress[name])} | {shown(student(rises[name]))} |")
    r, p = rank_correlation([progress[n].mean for n in there], [student(rises[n]).mean for n in there])
    verdict = "the audit's order is that of the curves" if r > 0 and p < 0.05 else "not shown"
    return [*lines, "", f"**Verdict: {verdict}.** Spearman's rank correlation {r:+.2f}, p = {p:.2f} of all orders.", ""]
