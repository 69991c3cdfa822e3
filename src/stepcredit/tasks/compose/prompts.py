"""Prompts of ``compose``: GenEval's six tags and metadata format over shapes, colours and backgrounds.

A line of metadata reads ``{tag, include: [{class, count, color?, position?: [relation, index]}], exclude?, prompt}``
as in GenEval's ``evaluation_metadata.jsonl``: the clause that carries ``position`` is the object being placed, and
``index`` names the clause it is placed against. The key ``background`` is this task's own; the rules do not judge it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import permutations
from typing import Any

import torch
from torch import Tensor

from stepcredit.tasks.base import Prompt

TAGS = ("single_object", "two_object", "counting", "colors", "position", "color_attr")
COLORS = ("red", "green", "blue", "yellow", "purple", "orange")
SHAPES = ("circle", "square", "triangle", "cross", "diamond", "ring")
BACKGROUNDS = ("white", "black", "grey")
RELATIONS = ("left of", "right of", "above", "below")
COUNTS = {"two": 2, "three": 3, "four": 4}
PADDING = "<pad>"
MAX_WORDS = 10
HELDOUT_FRACTION = 0.25

_MIRRORED = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}


def plural(shape: str) -> str:
    """English plural of a shape's name."""
    return shape + ("es" if shape.endswith("s") else "s")


@cache
def vocabulary() -> tuple[str, ...]:
    """Every word a prompt may hold, in a fixed order; index 0 is the padding. Saved weights depend on this order."""
    glue = ("a", "an", "and", "on", "left", "right", "of", "above", "below")
    return (PADDING, *glue, *COUNTS, *COLORS, *SHAPES, *(plural(s) for s in SHAPES), *BACKGROUNDS)


@cache
def _index() -> dict[str, int]:
    return {word: i for i, word in enumerate(vocabulary()) if word != PADDING}


def tokenize(texts: Sequence[str], length: int = MAX_WORDS) -> Tensor:
    """Word indices of prompts: B texts -> int64 ``[B, length]``, padded with 0; an empty text is all padding.

    Raises ValueError for a word outside :func:`vocabulary` or a text of more than ``length`` words.
    """
    known = _index()
    tokens = torch.zeros(len(texts), length, dtype=torch.long)
    for row, text in enumerate(texts):
        words = text.lower().split()
        unknown = next((word for word in words if word not in known), None)
        if unknown is not None:
            raise ValueError(f"prompt {text!r} has the unknown word {unknown!r}; known words: {', '.join(known)}")
        if len(words) > length:
            raise ValueError(f"prompt {text!r} has {len(words)} words; use at most {length}")
        if words:
            tokens[row, : len(words)] = torch.tensor([known[word] for word in words])
    return tokens


def _article(phrase: str) -> str:
    return f"{'an' if phrase[0] in 'aeiou' else 'a'} {phrase}"


def _clause(shape: str, count: int = 1, **extra: Any) -> dict[str, Any]:
    return {"class": shape, "count": count, **extra}


def _prompt(tag: str, phrase: str, background: str, include: list[dict[str, Any]], **extra: Any) -> Prompt:
    text = f"{phrase} on {background}"
    return Prompt(text, {"tag": tag, "include": include, **extra, "prompt": text, "background": background})


def _enumerate(background: str) -> Iterator[Prompt]:
    """Every prompt on one background, tag by tag."""
    for shape in SHAPES:
        yield _prompt("single_object", _article(shape), background, [_clause(shape)])
    for a, b in permutations(SHAPES, 2):
        yield _prompt("two_object", f"{_article(a)} and {_article(b)}", background, [_clause(a), _clause(b)])
    for word, count in COUNTS.items():
        for shape in SHAPES:
            exclude = [_clause(shape, count + 1)]
            include = [_clause(shape, count)]
            yield _prompt("counting", f"{word} {plural(shape)}", background, include, exclude=exclude)
    for color in COLORS:
        for shape in SHAPES:
            yield _prompt("colors", _article(f"{color} {shape}"), background, [_clause(shape, color=color)])
    for placed, target in permutations(SHAPES, 2):
        for relation in RELATIONS:
            include = [_clause(target), _clause(placed, position=[relation, 0])]
            yield _prompt("position", f"{_article(placed)} {relation} {_article(target)}", background, include)
    for a, b in permutations(SHAPES, 2):
        for color_a, color_b in permutations(COLORS, 2):
            phrase = f"{_article(f'{color_a} {a}')} and {_article(f'{color_b} {b}')}"
            yield _prompt("color_attr", phrase, background, [_clause(a, color=color_a), _clause(b, color=color_b)])


def equivalence_key(prompt: Prompt) -> str:
    """Text shared by prompts that ask for the same picture: "a and b" is "b and a", "a left of b" is "b right of a"."""
    include, background = prompt.metadata["include"], prompt.metadata["background"]
    if prompt.tag == "position":
        target, placed = include
        relation = placed["position"][0]
        a, b = placed["class"], target["class"]
        if a > b:
            a, b, relation = b, a, _MIRRORED[relation]
        return f"{a} {relation} {b} on {background}"
    parts = sorted(f"{c['count']} {c.get('color', 'any')} {c['class']}" for c in include)
    return f"{' and '.join(parts)} on {background}"


@cache
def _splits() -> tuple[tuple[Prompt, ...], tuple[Prompt, ...]]:
    prompts = all_prompts()
    heldout: set[str] = set()
    for tag in TAGS:
        keys = {equivalence_key(p) for p in prompts if p.tag == tag}
        # Ranked by a hash: stable across machines and Python versions, unlike a shuffled list.
        ranked = sorted(keys, key=lambda key: hashlib.sha256(key.encode()).hexdigest())
        heldout |= {f"{tag}: {key}" for key in ranked[: round(HELDOUT_FRACTION * len(ranked))]}
    sides = [f"{p.tag}: {equivalence_key(p)}" in heldout for p in prompts]
    train = tuple(p for p, out in zip(prompts, sides, strict=True) if not out)
    return train, tuple(p for p, out in zip(prompts, sides, strict=True) if out)


@cache
def _all() -> tuple[Prompt, ...]:
    return tuple(p for background in BACKGROUNDS for p in _enumerate(background))


def all_prompts() -> list[Prompt]:
    """Every prompt of the task, in a fixed order."""
    return list(_all())


def train_prompts() -> list[Prompt]:
    """Prompts to train on: about 75 % of every tag."""
    return list(_splits()[0])


def heldout_prompts() -> list[Prompt]:
    """Prompts never trained on: about 25 % of every tag, with no equivalent among :func:`train_prompts`."""
    return list(_splits()[1])
