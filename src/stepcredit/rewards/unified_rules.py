"""What UnifiedReward is asked and how its answers are read. Pure functions on text.

The wording is our own; the literal answer lines are those that the models were trained to write.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from stepcredit.rewards.openai_api import Token

AXES = ("Alignment", "Coherence", "Style")
SINGLE = (
    "A text caption and an image generated from it are given. Judge the image by two criteria:\n"
    "1. Alignment with the caption: are the objects, their relations and their attributes as described?\n"
    "2. Overall quality: is it clear, detailed, natural in colour and pleasing?\n"
    "Give one score from 1 (worst) to 5 (best), written after 'Final Score:'.\n"
    "Text Caption: [{prompt}]"
)
ACS = (
    "An image generated from a text caption is given, with the caption. Rate it from 1 to 5 on three axes:\n"
    "- Alignment Score: how well its content agrees with the caption.\n"
    "- Coherence Score: how consistent it is in itself, free of glitches and distorted objects.\n"
    "- Style Score: how pleasing it looks, whatever the caption.\n"
    "Answer in this format:\n\n"
    "Alignment Score (1-5): X\nCoherence Score (1-5): Y\nStyle Score (1-5): Z\n\n"
    "Text Caption: [{prompt}]"
)
PAIRWISE = (
    "Two images generated from one text caption are given, Image 1 and Image 2, with the caption. Compare them on "
    "three axes:\n"
    "- Alignment Score: how well the content agrees with the caption.\n"
    "- Coherence Score: how consistent the image is in itself, free of glitches and distorted objects.\n"
    "- Style Score: how pleasing it looks, whatever the caption.\n"
    "On each axis give both images a number from 0 to 1, the better one the larger; the two must sum to 1.\n"
    "Answer in this format:\n\n"
    "Alignment Score:\n Image 1: X\n Image 2: Y\n\n"
    "Coherence Score:\n Image 1: X\n Image 2: Y\n\n"
    "Style Score:\n Image 1: X\n Image 2: Y\n\n"
    "Text Caption: [{prompt}]"
)

_NUMBER = r"\**\s*(\d+(?:\.\d+)?)"
_FINAL = re.compile(rf"Final Score:\s*{_NUMBER}")
_SUM_TOLERANCE = 0.02
_LEAST_MASS = 0.5


def single(text: str) -> float:
    """The number after the last ``Final Score:``; NaN without one or outside 1 to 5 ("10" is not 1)."""
    found = list(_FINAL.finditer(text))
    return _within(found[-1][1], 1, 5) if found else math.nan


def expected(text: str, tokens: Sequence[Token]) -> float:
    """The expected score, sum of k p(k) over the digits 1 to 5 at the place of the final score.

    Finer than the greedy digit, which leaves most groups without any spread. Falls back to ``single`` when the score
    is not a lone digit, the tokens do not spell the text, or the digits hold less than half of the probability.
    """
    greedy = single(text)
    found = list(_FINAL.finditer(text))
    if math.isnan(greedy) or len(found[-1][1]) > 1 or not "".join(t.text for t in tokens).startswith(text.rstrip()):
        return greedy
    place, end = found[-1].start(1), 0
    for token in tokens:
        end += len(token.text)
        if end > place:
            break
    if token.text.strip() != found[-1][1]:
        return greedy
    mass = dict.fromkeys(range(1, 6), 0.0)
    for candidate, logprob in token.top.items():
        if candidate.strip() in {"1", "2", "3", "4", "5"}:
            mass[int(candidate)] += math.exp(logprob)
    total = sum(mass.values())
    return sum(k * p for k, p in mass.items()) / total if total >= _LEAST_MASS else greedy


def acs(text: str) -> dict[str, float]:
    """The three axes, 1 to 5 each; NaN for an axis that is absent or out of range."""
    found = {axis: re.findall(rf"{axis} Score\s*\(1-5\):\s*{_NUMBER}", text) for axis in AXES}
    return {axis: _within(numbers[-1], 1, 5) if numbers else math.nan for axis, numbers in found.items()}


def pairwise(text: str) -> float:
    """Share of Image 1 in [0, 1], the mean over the axes; NaN when an axis is absent or its two do not sum to 1."""
    shares = []
    for axis in AXES:
        match = re.search(rf"{axis} Score:\s*Image 1:\s*{_NUMBER}\s*Image 2:\s*{_NUMBER}", text)
        if match is None:
            return math.nan
        one, two = _within(match[1], 0, 1), _within(match[2], 0, 1)
        if not abs(one + two - 1) <= _SUM_TOLERANCE:
            return math.nan
        shares.append(one / (one + two))
    return sum(shares) / len(shares)


def win_rates(count: int, shares: Sequence[tuple[int, int, float]]) -> list[float]:
    """Share of comparisons that each of ``count`` members wins; ties count half; NaN for one without a comparison.

    shares: (first, second, share of the first in [0, 1]); comparisons of the same two, in either order, are averaged
    before the winner is called, and NaN ones are left out.
    """
    together: dict[tuple[int, int], list[float]] = {}
    for first, second, share in shares:
        if not math.isnan(share):
            low, high = sorted((first, second))
            together.setdefault((low, high), []).append(share if first == low else 1 - share)
    wins: list[list[float]] = [[] for _ in range(count)]
    for (low, high), values in together.items():
        mean = sum(values) / len(values)
        won = 0.5 if abs(mean - 0.5) < 1e-9 else float(mean > 0.5)
        wins[low].append(won)
        wins[high].append(1 - won)
    return [sum(won) / len(won) if won else math.nan for won in wins]


def _within(number: str, low: float, high: float) -> float:
    value = float(number)
    return value if low <= value <= high else math.nan
