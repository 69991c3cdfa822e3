"""GenEval's rules on hand-made detections: no detector, no image."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

import pytest

from stepcredit.rewards import geneval_rules as rules

Box = tuple[float, float, float, float]
Found = list["Seen"]


@dataclass(frozen=True)
class Seen:
    cls: str
    color: str | None = None
    score: float = 0.9
    box: Box = (0.0, 0.0, 10.0, 10.0)


def at(cls: str, x: float, y: float, size: float = 10.0, **more: Any) -> Seen:
    """An object of that size centred on (x, y)."""
    return Seen(cls, box=(x - size / 2, y - size / 2, x + size / 2, y + size / 2), **more)


# The lines are GenEval's own.
SINGLE = json.loads('{"tag": "single_object", "include": [{"class": "bench", "count": 1}], "prompt": ""}')
TWO = json.loads(
    '{"tag": "two_object", "include": [{"class": "bench", "count": 1}, {"class": "sports ball", "count": 1}]}'
)
COUNT = json.loads(
    '{"tag": "counting", "include": [{"class": "clock", "count": 2}], "exclude": [{"class": "clock", "count": 3}]}'
)
COLOR = json.loads('{"tag": "colors", "include": [{"class": "car", "count": 1, "color": "pink"}]}')
POSITION = json.loads(
    '{"tag": "position", "include": [{"class": "teddy bear", "count": 1}, '
    '{"class": "dog", "count": 1, "position": ["right of", 0]}]}'
)
ATTRIBUTES = json.loads(
    '{"tag": "color_attr", "include": [{"class": "wine glass", "count": 1, "color": "purple"}, '
    '{"class": "apple", "count": 1, "color": "black"}]}'
)
clocks = [Seen("clock") for _ in range(6)]
bear, dog_right, dog_left = at("teddy bear", 50, 50), at("dog", 80, 50), at("dog", 20, 50)


# Columns: official (at least the count), strict (exactly the count), Flow-GRPO's partial credit by hand.
CASES: list[tuple[str, Any, Found, bool, bool, float]] = [
    ("single", SINGLE, [Seen("bench")], True, True, 1.0),
    ("single, nothing there", SINGLE, [], False, False, 0.0),
    ("single, another class too", SINGLE, [Seen("bench"), Seen("cow")], True, True, 1.0),
    ("single, one too many", SINGLE, [Seen("bench")] * 2, True, False, 0.0),
    ("two", TWO, [Seen("bench"), Seen("sports ball")], True, True, 1.0),
    ("two, one missing", TWO, [Seen("bench")], False, False, 0.5),
    ("two, one doubled", TWO, [Seen("bench"), Seen("bench"), Seen("sports ball")], True, False, 0.5),
    ("count, right", COUNT, clocks[:2], True, True, 1.0),
    ("count, too few", COUNT, clocks[:1], False, False, 0.5),
    ("count, excluded at three", COUNT, clocks[:3], False, False, 0.5),
    ("count, none left of the credit", COUNT, clocks[:4], False, False, 0.0),
    ("count, bounded at zero", COUNT, clocks[:6], False, False, 0.0),
    ("colour", COLOR, [Seen("car", "pink")], True, True, 1.0),
    ("colour wrong", COLOR, [Seen("car", "red")], False, False, 0.5),
    ("colour missing object", COLOR, [Seen("bus", "pink")], False, False, 0.0),
    ("colour of the surest of two", COLOR, [Seen("car", "red", 0.5), Seen("car", "pink", 0.8)], True, False, 0.0),
    ("colour of the less sure one", COLOR, [Seen("car", "red", 0.8), Seen("car", "pink", 0.5)], False, False, 0.0),
    ("position", POSITION, [bear, dog_right], True, True, 1.0),
    ("position wrong", POSITION, [bear, dog_left], False, False, 2 / 3),
    ("position, no target", POSITION, [dog_right], False, False, 1 / 3),
    ("position, nothing placed", POSITION, [bear], False, False, 1 / 3),
    ("position, placed twice", POSITION, [bear, dog_right, dog_right], True, False, 1 / 3),
    ("attributes", ATTRIBUTES, [Seen("wine glass", "purple"), Seen("apple", "black")], True, True, 1.0),
    ("attributes, one wrong", ATTRIBUTES, [Seen("wine glass", "purple"), Seen("apple", "red")], False, False, 0.75),
    ("attributes, swapped", ATTRIBUTES, [Seen("wine glass", "black"), Seen("apple", "purple")], False, False, 0.5),
    ("attributes, one missing", ATTRIBUTES, [Seen("wine glass", "purple")], False, False, 0.5),
]


@pytest.mark.parametrize(("metadata", "found", "official", "strict", "partial"), [c[1:] for c in CASES],
                         ids=[c[0] for c in CASES])  # fmt: skip
def test_rules_by_hand(metadata: Any, found: Found, official: bool, strict: bool, partial: float) -> None:
    assert rules.official(found, metadata) is official
    assert rules.strict(found, metadata) is strict
    assert rules.flow_grpo(found, metadata) == pytest.approx(partial)
    assert (partial == 1) is strict


@pytest.mark.parametrize(
    ("metadata", "found", "published"),
    [
        (POSITION, [bear, dog_left], 0.75),  # terms 1, 1, 0 and the stray 1
        (POSITION, [bear, dog_right], 1.0),
        (POSITION, [dog_right], 1 / 3),  # the target failed: no stray 1
        (SINGLE, [Seen("bench")] * 3, -1.0),
        (SINGLE, [Seen("bench")] * 16, -14.0),
        (COLOR, [Seen("car", "pink")] * 3, -0.5),  # terms -1 and 0
        (ATTRIBUTES, [Seen("wine glass", "purple"), Seen("apple", "red")], 0.75),
    ],
)
def test_published_flow_grpo_behaviour(metadata: Any, found: Found, published: float) -> None:
    assert rules.flow_grpo(found, metadata, reproduce_bug=True) == pytest.approx(published)


def test_exclude_of_another_class_binds_official_and_strict_but_not_partial_credit() -> None:
    metadata = {**SINGLE, "exclude": [{"class": "cow", "count": 1}]}
    assert rules.official([Seen("bench")], metadata)
    found = [Seen("bench"), Seen("cow")]
    assert (rules.official(found, metadata), rules.strict(found, metadata)) == (False, False)
    assert rules.flow_grpo(found, metadata) == 1


def test_position_is_judged_between_all_pairs() -> None:
    metadata = {
        "include": [{"class": "bear", "count": 2}, {"class": "dog", "count": 1, "position": ["right of", 0]}],
    }
    assert rules.official([at("bear", 20, 20), at("bear", 20, 60), at("dog", 80, 40)], metadata)
    assert not rules.official([at("bear", 20, 20), at("bear", 95, 60), at("dog", 80, 40)], metadata)


def test_position_must_refer_to_an_earlier_clause() -> None:
    metadata = {"include": [{"class": "dog", "count": 1, "position": ["above", 1]}, {"class": "bear", "count": 1}]}
    with pytest.raises(ValueError, match="position of 'dog' refers to clause 1"):
        rules.official([at("dog", 1, 1), at("bear", 1, 9)], metadata)


@pytest.mark.parametrize(
    ("dx", "dy", "expected"),
    [
        (-30, 0, {"left of"}),
        (30, 0, {"right of"}),
        (0, -30, {"above"}),  # y grows downwards
        (0, 30, {"below"}),
        (30, 30, {"right of", "below"}),  # (30 - 2) / 42.4 = .66 on both axes
        (0, 0, set()),
        (2, 2, set()),  # two boxes of 10: an offset of .1 * (10 + 10) = 2 is slack
        # dx alone, |o| = |dx|: (dx - 2) / dx > .5 from dx > 4 on; at 4 the half is reached, not exceeded.
        (4, 0, set()),
        (4.01, 0, {"right of"}),
        (-4.01, 0, {"left of"}),
        # o = (4, 3), |o| = 5: (4 - 2) / 5 = .4 and (3 - 2) / 5 = .2
        (4, 3, set()),
        # o = (9, 12), |o| = 15: 7/15 = .467 and 10/15 = .667; divided by the shrunk norm x would count too (.573)
        (9, 12, {"below"}),
        # o = (12, -16), |o| = 20: 10/20 = .5 exactly and -14/20 = -.7
        (12, -16, {"above"}),
        (12.1, -16, {"right of", "above"}),
    ],
)
def test_relation_geometry_at_its_thresholds(dx: float, dy: float, expected: set[str]) -> None:
    other = at("target", 40, 40).box
    assert rules.relations(at("placed", 40 + dx, 40 + dy).box, other) == expected


def test_slack_grows_with_both_extents_on_each_axis() -> None:
    # Widths 10 and 30: slack 4 in x, so 8 is the limit there; heights 10 and 10: slack 2 in y.
    wide: Box = (-15.0, -5.0, 15.0, 5.0)
    assert rules.relations(at("a", 8, 0).box, wide) == frozenset()
    assert rules.relations(at("a", 8.1, 0).box, wide) == {"right of"}
    assert rules.relations(at("a", 0, 4.1).box, wide) == {"below"}


def test_confident_keeps_what_geneval_keeps() -> None:
    found = [Seen("clock", score=s) for s in (0.2, 0.95, 0.3, 0.31, 0.9)]
    assert [d.score for d in rules.confident(found, "colors")] == [0.95, 0.9, 0.31]
    assert [d.score for d in rules.confident(found, "counting")] == [0.95]
    many = [Seen("clock", score=0.5 + i / 100) for i in range(20)] + [Seen("cow", score=0.4)]
    kept = rules.confident(many, "single_object")
    assert [d.cls for d in kept].count("clock") == 16
    assert min(d.score for d in kept if d.cls == "clock") == pytest.approx(0.54)
    assert kept[-1].cls == "cow"


def test_macro_average_weighs_tags_not_images() -> None:
    correct = [True, True, True, False, False]
    tags = ["colors", "colors", "colors", "colors", "counting"]
    assert rules.accuracy_by_tag(correct, tags) == {"colors": 0.75, "counting": 0.0}
    assert rules.macro_average(correct, tags) == 0.375  # micro would be .6
    assert math.isnan(rules.macro_average([], []))
    with pytest.raises(ValueError, match="2 results and 1 tags"):
        rules.macro_average([True, False], ["colors"])
