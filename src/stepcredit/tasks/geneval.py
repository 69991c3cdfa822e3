"""``geneval``: our own training prompts in GenEval's metadata format, none of which asks for a published test picture.

GenEval (Ghosh et al. 2023, arXiv 2310.11513) has 553 test prompts in six tags. All 80 single objects are test prompts,
so training has the five other tags. A line of metadata reads ``{tag, include, exclude?, prompt}``; in ``position`` the
second clause is placed against the first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import permutations
from typing import Any

from stepcredit import noise
from stepcredit.rewards.mask2former_names import COCO as OBJECTS
from stepcredit.tasks import data
from stepcredit.tasks.base import Prompt

COLORS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white")
MIRRORED = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}
COUNTS = {"two": 2, "three": 3, "four": 4}
LARGEST = 6000
"""Prompts of one tag; of those with more combinations, so many are drawn."""

_IRREGULAR = {"person": "people", "knife": "knives", "sheep": "sheep", "skis": "skis", "scissors": "scissors"}


def train_prompts() -> list[Prompt]:
    """Every training prompt, tag by tag, in a fixed order; ``apart`` takes out those that a test asks for."""
    return list(_train())


def test_prompts() -> list[Prompt]:
    """The published test prompts. Raises UserError if the file is absent."""
    return data.get("geneval").read()


def apart(train: Sequence[Prompt], heldout: Sequence[Prompt]) -> list[Prompt]:
    """Training prompts that ask for no picture of ``heldout``, whichever of its two objects comes first."""
    asked = {key(prompt) for prompt in heldout}
    return [prompt for prompt in train if key(prompt) not in asked]


def key(prompt: Prompt) -> str:
    """Text shared by prompts that ask for the same picture; for metadata of another form, the prompt itself."""
    clauses = prompt.metadata.get("include") or []
    try:
        if any("position" in clause for clause in clauses):
            target, placed = clauses
            relation, a, b = placed["position"][0], placed["class"], target["class"]
            return f"{b} {MIRRORED[relation]} {a}" if a > b else f"{a} {relation} {b}"
        parts = sorted(f"{clause['count']} {clause.get('color', '')} {clause['class']}" for clause in clauses)
    except (TypeError, KeyError, ValueError, AttributeError):
        parts = []
    return " and ".join(parts) or prompt.text.casefold()


def plural(name: str) -> str:
    """English plural of an object's name."""
    if name in _IRREGULAR:
        return _IRREGULAR[name]
    return name + ("es" if name.endswith(("s", "ch", "sh", "x")) else "s")


@cache
def _train() -> tuple[Prompt, ...]:
    makers: dict[str, Callable[[], Iterator[Prompt]]] = {
        "two_object": _two_object,
        "counting": _counting,
        "colors": _colors,
        "position": _position,
        "color_attr": _color_attr,
    }
    prompts: list[Prompt] = []
    for tag, make in makers.items():
        found = list({key(prompt): prompt for prompt in make()}.values())
        order = noise.generator("geneval", tag).permutation(len(found))[:LARGEST]
        prompts += [found[k] for k in sorted(order.tolist())]
    return tuple(prompts)


def _two_object() -> Iterator[Prompt]:
    for a, b in _pairs("two_object"):
        yield _prompt("two_object", f"{_article(a)} and {_article(b)}", [_clause(a), _clause(b)])


def _counting() -> Iterator[Prompt]:
    for word, count in COUNTS.items():
        for name in OBJECTS:
            exclude = [_clause(name, count + 1)]
            yield _prompt("counting", f"{word} {plural(name)}", [_clause(name, count)], exclude=exclude)


def _colors() -> Iterator[Prompt]:
    for color in COLORS:
        for name in OBJECTS:
            if name != "person":
                yield _prompt("colors", _article(f"{color} {name}"), [_clause(name, color=color)])


def _position() -> Iterator[Prompt]:
    relations = tuple(MIRRORED)
    for a, b in _pairs("position"):
        relation = relations[int(noise.generator("geneval", "relation", a, b).integers(len(relations)))]
        include = [_clause(b), _clause(a, position=[relation, 0])]
        yield _prompt("position", f"{_article(a)} {relation} {_article(b)}", include)


def _color_attr() -> Iterator[Prompt]:
    for a, b in _pairs("color_attr"):
        one, two = (COLORS[k] for k in noise.generator("geneval", "colors", a, b).permutation(len(COLORS))[:2].tolist())
        phrase = f"{_article(f'{one} {a}')} and {_article(f'{two} {b}')}"
        yield _prompt("color_attr", phrase, [_clause(a, color=one), _clause(b, color=two)])


def _pairs(tag: str) -> Iterator[tuple[str, str]]:
    """Ordered pairs of different objects; people are not coloured, and not placed."""
    names = [name for name in OBJECTS if name != "person" or tag == "two_object"]
    yield from permutations(names, 2)


def _article(phrase: str) -> str:
    if phrase in ("skis", "scissors") or phrase.endswith((" skis", " scissors")):
        return phrase
    return f"{'an' if phrase[0] in 'aeiou' else 'a'} {phrase}"


def _clause(name: str, count: int = 1, **extra: Any) -> dict[str, Any]:
    return {"class": name, "count": count, **extra}


def _prompt(tag: str, phrase: str, include: list[dict[str, Any]], **extra: Any) -> Prompt:
    text = f"a photo of {phrase}"
    return Prompt(text, {"tag": tag, "include": include, **extra, "prompt": text})
