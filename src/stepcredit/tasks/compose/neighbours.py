"""Prompts of ``compose`` that differ in one thing: what a scorer must be able to tell apart."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from stepcredit.tasks.base import Prompt
from stepcredit.tasks.compose.prompts import BACKGROUNDS, COLORS, COUNTS, RELATIONS, SHAPES


class _Clause(NamedTuple):
    shape: str
    number: int
    color: str | None
    relation: str | None


class _Scene(NamedTuple):
    """A prompt without its wording; clauses in the order of the metadata."""

    tag: str
    background: str
    clauses: tuple[_Clause, ...]


Neighbours = Mapping[str, Mapping[str, tuple[Prompt, ...]]]
"""By a prompt's text and the kind of change."""
KINDS = ("background", "shape", "color", "count", "relation", "swap")
"""What may be changed; ``swap`` exchanges the colours or the places of two objects."""


def neighbours(pool: Sequence[Prompt]) -> Neighbours:
    """For each prompt's text, the prompts of the pool that ask for the same with one thing changed, by kind of change.

    Kinds for which the pool has no prompt are left out.
    """
    known = {_scene(prompt.metadata): prompt for prompt in pool}
    found: dict[str, dict[str, tuple[Prompt, ...]]] = {}
    for prompt in pool:
        by_kind = found.setdefault(prompt.text, {})
        for kind, scene in _changed(_scene(prompt.metadata)):
            if scene in known:
                by_kind[kind] = (*by_kind.get(kind, ()), known[scene])
    return found


def _scene(metadata: Mapping[str, Any]) -> _Scene:
    clauses = (
        _Clause(c["class"], c["count"], c.get("color"), c["position"][0] if "position" in c else None)
        for c in metadata["include"]
    )
    return _Scene(metadata["tag"], metadata["background"], tuple(clauses))


def _changed(scene: _Scene) -> Iterator[tuple[str, _Scene]]:
    """Scenes with one thing changed and the kind of change, whether or not the task has a prompt for them."""
    for ground in BACKGROUNDS:
        if ground != scene.background:
            yield "background", scene._replace(background=ground)
    for k, clause in enumerate(scene.clauses):
        others = [("shape", clause._replace(shape=shape)) for shape in SHAPES]
        if clause.color is not None:
            others += [("color", clause._replace(color=color)) for color in COLORS]
        if clause.number > 1:
            others += [("count", clause._replace(number=number)) for number in COUNTS.values()]
        if clause.relation is not None:
            others += [("relation", clause._replace(relation=relation)) for relation in RELATIONS]
        for kind, other in others:
            if other != clause:
                yield kind, scene._replace(clauses=(*scene.clauses[:k], other, *scene.clauses[k + 1 :]))
    if scene.tag == "color_attr":
        a, b = scene.clauses
        yield "swap", scene._replace(clauses=(a._replace(color=b.color), b._replace(color=a.color)))
    if scene.tag == "position":
        a, b = scene.clauses
        yield "swap", scene._replace(clauses=(a._replace(shape=b.shape), b._replace(shape=a.shape)))
