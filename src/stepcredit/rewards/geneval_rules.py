"""GenEval's scoring rules, apart from any detector: the desk's verifier and the real GenEval reward share them.

Metadata is GenEval's: ``include`` clauses ``{class, count, color?, position?: [relation, index]}`` must all hold,
``exclude`` clauses ``{class, count}`` must not. Rules: Ghosh et al. 2023, GenEval; partial credit: Flow-GRPO (Liu et
al. 2025). The functions take detections that already passed the confidence threshold: see :func:`confident`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar

POSITION_THRESHOLD = 0.1
"""Share of the two objects' summed extent by which their offset must exceed on an axis to count at all."""
RELATION_THRESHOLD = 0.5
"""Least share of the offset along the axis of a relation (exclusive)."""
CONFIDENCE, COUNTING_CONFIDENCE, MAX_PER_CLASS = 0.3, 0.9, 16
"""GenEval's thresholds (exclusive) for Mask2Former's scores and its limit of detections per class."""

Box = tuple[float, float, float, float]
Metadata = Mapping[str, Any]


class Detected(Protocol):
    """One detected object; ``box`` is (x1, y1, x2, y2) with y downwards, ``color`` None where it was not judged."""

    @property
    def cls(self) -> str: ...
    @property
    def color(self) -> str | None: ...
    @property
    def score(self) -> float: ...
    @property
    def box(self) -> Box: ...


D = TypeVar("D", bound=Detected)


def confident(
    detections: Sequence[D],
    tag: str,
    threshold: float = CONFIDENCE,
    counting_threshold: float = COUNTING_CONFIDENCE,
    max_per_class: int = MAX_PER_CLASS,
) -> list[D]:
    """Detections above the threshold, surest first, at most ``max_per_class`` of a class; "counting" has its own."""
    least = counting_threshold if tag == "counting" else threshold
    kept: list[D] = []
    taken: dict[str, int] = {}
    for detection in sorted(detections, key=lambda d: -d.score):
        taken[detection.cls] = taken.get(detection.cls, 0) + 1
        if detection.score > least and taken[detection.cls] <= max_per_class:
            kept.append(detection)
    return kept


def relations(box: Box, other: Box) -> frozenset[str]:
    """Relations in which ``box`` stands to ``other``: none to two of "left of", "right of", "above", "below".

    The offset o of the centres is shrunk on each axis by 0.1 of the summed extents; a relation holds where the rest
    exceeds half of |o| along its axis.
    """
    offset, shrunk = [], []
    for low, high in ((0, 2), (1, 3)):
        o = (box[low] + box[high] - other[low] - other[high]) / 2
        slack = POSITION_THRESHOLD * (abs(box[high] - box[low]) + abs(other[high] - other[low]))
        offset.append(o)
        shrunk.append(math.copysign(max(abs(o) - slack, 0.0), o))
    if max(abs(shrunk[0]), abs(shrunk[1])) < 1e-3:
        return frozenset()
    dx, dy = (s / math.hypot(*offset) for s in shrunk)
    holds = {
        "left of": dx < -RELATION_THRESHOLD,
        "right of": dx > RELATION_THRESHOLD,
        "above": dy < -RELATION_THRESHOLD,
        "below": dy > RELATION_THRESHOLD,
    }
    return frozenset(name for name, true in holds.items() if true)


def official(detections: Sequence[Detected], metadata: Metadata) -> bool:
    """Whether GenEval calls the image correct.

    Each include clause needs at least ``count`` objects of its class; colour and position are judged on the ``count``
    surest ones; an exclude clause fails the image at ``count`` objects or more.
    """
    return _correct(detections, metadata, exact=False)


def strict(detections: Sequence[Detected], metadata: Metadata) -> bool:
    """As :func:`official`, but each include clause needs exactly ``count`` objects of its class: none too many."""
    return _correct(detections, metadata, exact=True)


def _of_class(detections: Sequence[Detected], cls: str) -> list[Detected]:
    return sorted((d for d in detections if d.cls == cls), key=lambda d: -d.score)


def _target(clause: Metadata, groups: Sequence[list[Detected] | None]) -> tuple[str, list[Detected] | None]:
    """Relation and target group of a position clause; None where the target's own clause failed."""
    relation, index = clause["position"]
    if not 0 <= index < len(groups):
        raise ValueError(f"position of {clause['class']!r} refers to clause {index}; it must be an earlier one")
    return relation, groups[index]


def _all_related(placed: Sequence[Detected], relation: str, targets: Sequence[Detected]) -> bool:
    return all(relation in relations(a.box, b.box) for a in placed for b in targets)


def _correct(detections: Sequence[Detected], metadata: Metadata, exact: bool) -> bool:
    groups: list[list[Detected] | None] = []
    for clause in metadata.get("include", ()):
        count, objects = clause["count"], _of_class(detections, clause["class"])
        group = objects[:count]
        matched = len(objects) == count if exact else len(objects) >= count
        if matched and "color" in clause:
            matched = all(d.color == clause["color"] for d in group)
        if matched and "position" in clause:
            relation, targets = _target(clause, groups)
            matched = targets is not None and _all_related(group, relation, targets)
        groups.append(group if matched else None)
    excluded = any(len(_of_class(detections, c["class"])) >= c["count"] for c in metadata.get("exclude", ()))
    return not excluded and all(group is not None for group in groups)


def flow_grpo(detections: Sequence[Detected], metadata: Metadata, reproduce_bug: bool = False) -> float:
    """Flow-GRPO's partial credit: the mean of one or two terms per include clause; exclude clauses are ignored.

    The count term is 1 - |n_req - n| / n_req over all n objects of the class. A clause with colour or position has a
    second term, 0 where the count is wrong; else 1 - |n_req - n_coloured| / n_req for a colour, and 1 or 0 for a
    position, judged between all objects (0 where the target's clause failed).

    Every term is bounded below at 0, so the reward lies in [0, 1] and is 1 where and only where the counts are exact
    and colours and positions right. ``reproduce_bug=True`` gives the published code: the count term unbounded below
    (one asked, three found: -1), and a wrong relation appends its 0 and then a 1 as well (.75 in place of .667).
    """
    floor = -math.inf if reproduce_bug else 0.0
    terms: list[float] = []
    groups: list[list[Detected] | None] = []
    for clause in metadata.get("include", ()):
        count, group = clause["count"], _of_class(detections, clause["class"])
        terms.append(max(1 - abs(count - len(group)) / count, floor))
        matched = len(group) == count
        if not matched and ("color" in clause or "position" in clause):
            terms.append(0.0)
        if matched and "color" in clause:
            right = sum(d.color == clause["color"] for d in group)
            terms.append(right / count)
            matched = right == count
        if matched and "position" in clause:
            relation, targets = _target(clause, groups)
            matched = targets is not None and _all_related(group, relation, targets)
            terms.append(float(matched))
            if reproduce_bug and not matched and targets is not None:
                terms.append(1.0)
        groups.append(group if matched else None)
    return sum(terms) / len(terms) if terms else 0.0


def accuracy_by_tag(correct: Sequence[bool | float], tags: Sequence[str]) -> dict[str, float]:
    """Mean of ``correct`` for each tag, in order of first appearance. Raises ValueError for unequal lengths."""
    if len(correct) != len(tags):
        raise ValueError(f"{len(correct)} results and {len(tags)} tags; the two must agree")
    by_tag: dict[str, list[float]] = {}
    for value, tag in zip(correct, tags, strict=True):
        by_tag.setdefault(tag, []).append(float(value))
    return {tag: sum(values) / len(values) for tag, values in by_tag.items()}


def macro_average(correct: Sequence[bool | float], tags: Sequence[str]) -> float:
    """GenEval's overall score: the mean of the tags' own accuracies, however many images each has; NaN for none."""
    accuracies = accuracy_by_tag(correct, tags).values()
    return sum(accuracies) / len(accuracies) if accuracies else math.nan
