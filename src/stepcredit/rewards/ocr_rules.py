"""How well the text read from an image matches the text that was asked for. Pure functions on strings."""

from __future__ import annotations

import itertools
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Line = tuple[str, float]
"""One line of recognised text and the recogniser's confidence in [0, 1]."""

_DOUBLE = re.compile(r'"([^"]*)"|“([^”]*)”')
# A single quote opens after a space or at the start and closes before a space or punctuation: not in "don't".
_SINGLE = re.compile(r"(?<!\w)'([^']+(?:'\w[^']*)*)'(?!\w)|‘([^’]+)’(?!\w)")
_EXHAUSTIVE_SPANS = 4


@dataclass(frozen=True)
class OcrScore:
    """A score and what it is made of."""

    score: float
    """In [0, 1]; 1 is the asked text and nothing else."""
    hit: float
    """Mean over the spans of 1 - distance / length, times the confidence of the text matched."""
    exact: bool
    """Every span was read without an error."""
    extra: float
    """Text that belongs to no span, as a multiple of the length of the spans."""
    lines: int
    confidence: float
    """Mean confidence of the lines that count; 0 without any."""
    read: str


def target_spans(prompt: str, metadata: Mapping[str, Any], *, single_quotes: bool = False) -> list[str]:
    """The texts to be written: ``metadata["text"]`` (a string or a list), else every quoted span of the prompt.

    Straight and curly double quotes count; single quotes only on request, since apostrophes look the same.
    Returns an empty list when nothing is asked for. Raises TypeError for ``text`` of another type.
    """
    text = metadata.get("text")
    if text is not None:
        spans = [text] if isinstance(text, str) else text
        if not isinstance(spans, Sequence) or not all(isinstance(span, str) for span in spans):
            raise TypeError(f"metadata 'text' must be a string or a list of strings; got {text!r}")
        return [span for span in spans if span.strip()]
    found = [(m.start(), m.group(1) or m.group(2) or "") for m in _DOUBLE.finditer(prompt)]
    if single_quotes:
        rest = _DOUBLE.sub(lambda m: " " * len(m.group(0)), prompt)
        found += [(m.start(), m.group(1) or m.group(2) or "") for m in _SINGLE.finditer(rest)]
    return [span.strip() for _, span in sorted(found) if span.strip()]


def normalise(text: str, punctuation: Literal["keep", "drop"] = "keep") -> str:
    """NFKC, case-folded, without whitespace and invisible characters; on request without punctuation."""
    folded = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
    dropped = ("Z", "C", "P") if punctuation == "drop" else ("Z", "C")
    return "".join(char for char in folded if unicodedata.category(char)[0] not in dropped)


def levenshtein(a: str, b: str) -> int:
    """Least number of insertions, deletions and substitutions that turn ``a`` into ``b``."""
    row = list(range(len(b) + 1))
    for i, char in enumerate(a, start=1):
        diagonal, row[0] = row[0], i
        for j, other in enumerate(b, start=1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (char != other))
    return row[-1]


def infix(target: str, text: str) -> tuple[int, int, int]:
    """The substring of ``text`` nearest to ``target``: (distance, start, stop).

    Semi-global alignment (Sellers 1980). Among equally near substrings the shortest is taken, then the first, so that
    a wrong letter at the end counts as text that was not asked for.
    """
    # One cell: (distance, -start) of the best alignment of a prefix of target that ends here in text.
    previous = [(0, -j) for j in range(len(text) + 1)]
    for i, char in enumerate(target, start=1):
        current = [(i, 0)]
        for j, other in enumerate(text, start=1):
            up, left, diagonal = previous[j], current[j - 1], previous[j - 1]
            current.append(
                min((up[0] + 1, up[1]), (left[0] + 1, left[1]), (diagonal[0] + (char != other), diagonal[1]))
            )
        previous = current
    stop = min(range(len(text) + 1), key=lambda j: (previous[j][0], j + previous[j][1], j))
    return previous[stop][0], -previous[stop][1], stop


def flow_grpo(prompt: str, lines: Sequence[Line]) -> float:
    """The rule of flow_grpo (Liu et al. 2025), in [0, 1], kept for comparison.

    The target is what stands between the first two straight quotes; 1 if it occurs anywhere in the text read, else
    1 - Levenshtein / length over *all* the text. Hence one wrong letter makes every sign in the background count:
    training on it removes backgrounds. Raises ValueError for a prompt without two quotes or with nothing in them.
    """
    parts = prompt.split('"')
    if len(parts) < 3:
        raise ValueError(f"no text between straight double quotes in {prompt!r}")
    target = parts[1].replace(" ", "").lower()
    if not target:
        raise ValueError(f"the quotes in {prompt!r} are empty")
    read = "".join(text for text, confidence in lines if confidence > 0).replace(" ", "").lower()
    distance = 0 if target in read else min(levenshtein(read, target), len(target))
    return 1 - distance / len(target)


def robust(
    spans: Sequence[str],
    lines: Sequence[Line],
    *,
    clutter: float = 0.15,
    min_confidence: float = 0.5,
    confidence_weight: bool = True,
    punctuation: Literal["keep", "drop"] = "keep",
) -> OcrScore:
    """Distance to the nearest part of the text read, with a small, bounded price for other text.

    score = mean over spans of hit * (1 - clutter * min(extra, 2) / 2), in [0, 1]. Each span claims its own part of the
    text: two spans never share a letter. Lines below ``min_confidence`` are not read; with ``confidence_weight`` the
    letters of the others count by their confidence, in hits and in clutter. Raises ValueError without a span.
    """
    targets = [target for target in (normalise(span, punctuation) for span in spans) if target]
    if not targets:
        raise ValueError("no text to look for")
    kept = [(normalise(text, punctuation), confidence) for text, confidence in lines if confidence >= min_confidence]
    text = "".join(line for line, _ in kept)
    weights = [confidence if confidence_weight else 1.0 for line, confidence in kept for _ in line]
    hits, distances, claimed = max(_claims(targets, text, weights), key=lambda claim: sum(claim[0]))
    length = sum(map(len, targets))
    extra = sum(weight for weight, taken in zip(weights, claimed, strict=True) if not taken) / length
    hit = sum(hits) / len(targets)
    return OcrScore(
        score=hit * (1 - clutter * min(extra, 2) / 2),
        hit=hit,
        exact=not any(distances),
        extra=extra,
        lines=len(kept),
        confidence=sum(confidence for _, confidence in kept) / len(kept) if kept else 0.0,
        read=" ".join(line for line, _ in lines),
    )


def _claims(
    targets: Sequence[str], text: str, weights: Sequence[float]
) -> list[tuple[list[float], list[int], list[bool]]]:
    """Ways of giving each target a part of the text: in every order for a few targets, else the longest first."""
    indices = range(len(targets))
    orders = (
        list(itertools.permutations(indices))
        if len(targets) <= _EXHAUSTIVE_SPANS
        else [tuple(sorted(indices, key=lambda k: -len(targets[k])))]
    )
    return [_claim([targets[k] for k in order], text, weights) for order in orders]


def _claim(targets: Sequence[str], text: str, weights: Sequence[float]) -> tuple[list[float], list[int], list[bool]]:
    claimed = [False] * len(text)
    hits: list[float] = []
    distances: list[int] = []
    for target in targets:
        best = (len(target), 0, 0)
        for start, stop in _free(claimed):
            distance, first, last = infix(target, text[start:stop])
            best = min(best, (distance, start + first, start + last), key=lambda found: (found[0], found[2] - found[1]))
        distance, first, last = best
        claimed[first:last] = [True] * (last - first)
        weight = sum(weights[first:last]) / (last - first) if last > first else 0.0
        hits.append((1 - distance / len(target)) * weight)
        distances.append(distance)
    return hits, distances, claimed


def _free(claimed: Sequence[bool]) -> list[tuple[int, int]]:
    """The stretches ``[start, stop)`` of text that no span has claimed yet."""
    stretches, start = [], 0
    for taken, run in itertools.groupby(claimed):
        stop = start + len(list(run))
        if not taken:
            stretches.append((start, stop))
        start = stop
    return stretches
