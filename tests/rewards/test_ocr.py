"""The OCR reward: the rules on strings worked by hand, the engine on rendered text."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stepcredit.rewards import RewardError, get, ocr_rules, score, selftest
from stepcredit.rewards.ocr import Ocr, render_text

TARGET = "Forever Yours"
SIX = [
    # text read, robust, flow_grpo
    ("Forever Yours", 1.00, 1.00),
    ("Forever Yours" + "x" * 30, 0.85, 1.00),
    ("Forever Your5", 0.91, 0.92),
    ("Forever Your5 OPEN", 0.89, 0.58),
    ("Forever Your5 OPEN DAILY 9 TO 5 WELCOME", 0.80, 0.00),
    ("Forever Yours " * 3, 0.85, 1.00),
]


@pytest.mark.parametrize(("read", "robust", "flow_grpo"), SIX)
def test_the_six_strings_of_the_specification(read: str, robust: float, flow_grpo: float) -> None:
    lines = [(read, 1.0)]
    assert round(ocr_rules.robust([TARGET], lines).score, 2) == pytest.approx(robust)
    assert round(ocr_rules.flow_grpo(f'a sign "{TARGET}"', lines), 2) == pytest.approx(flow_grpo)


def test_robust_has_no_cliff_and_is_bounded_by_the_clutter_price() -> None:
    clean = ocr_rules.robust(["OPEN"], [("OPEN", 1.0)])
    littered = ocr_rules.robust(["OPEN"], [("OPEN", 1.0), ("z" * 500, 1.0)])
    assert (clean.score, clean.exact, clean.extra) == (1.0, True, 0.0)
    assert littered.score == pytest.approx(0.85)
    assert ocr_rules.robust(["OPEN"], []).score == 0.0


def test_text_broken_over_lines_and_unicode_forms_match() -> None:
    assert ocr_rules.robust(["Grand Opening"], [("GRAND", 1.0), ("opening", 1.0)]).score == 1.0
    assert ocr_rules.robust(["Café"], [("Cafe\u0301", 1.0)]).score == 1.0  # composed against combining accent
    assert ocr_rules.robust(["STRASSE"], [("straße", 1.0)]).score == 1.0  # case folding, not lower-casing
    assert ocr_rules.robust(["ABC"], [("ＡＢＣ", 1.0)]).score == 1.0  # full-width letters
    assert ocr_rules.robust(["ok"], [("o\u200bk", 1.0)]).score == 1.0  # a zero-width space
    assert ocr_rules.robust(["Hi!"], [("Hi", 1.0)], punctuation="drop").score == 1.0
    assert ocr_rules.robust(["Hi!"], [("Hi", 1.0)]).hit == pytest.approx(2 / 3)


def test_each_span_claims_its_own_letters() -> None:
    once = ocr_rules.robust(["OPEN", "OPEN"], [("OPEN", 1.0)])
    assert once.hit == pytest.approx(0.5)
    assert once.exact is False
    twice = ocr_rules.robust(["OPEN", "DAILY"], [("DAILY", 1.0), ("OPEN", 1.0)])
    assert (twice.score, twice.exact) == (1.0, True)
    # "CAT" could claim the end of "SCAT", but then "SCAT" would find three letters missing: the best order wins.
    assert ocr_rules.robust(["CAT", "SCAT"], [("SCAT CAT", 1.0)]).score == 1.0
    many = ["one", "two", "three", "four", "five", "six"]
    assert ocr_rules.robust(many, [(word, 1.0) for word in many]).score == 1.0


def test_confidence_drops_and_weights_lines() -> None:
    assert ocr_rules.robust(["OPEN"], [("OPEN", 0.49)]).score == 0.0
    assert ocr_rules.robust(["OPEN"], [("OPEN", 0.8)]).score == pytest.approx(0.8)
    assert ocr_rules.robust(["OPEN"], [("OPEN", 0.8)], confidence_weight=False).score == 1.0
    # Clutter of 4 letters at confidence .5 counts as 2 of 4: 1 - .15 * .5 / 2.
    assert ocr_rules.robust(["OPEN"], [("OPEN", 1.0), ("ZZZZ", 0.5)]).score == pytest.approx(1 - 0.15 * 0.25)


def test_infix_prefers_the_shortest_of_equal_substrings() -> None:
    assert ocr_rules.infix("abc", "xxabcxx") == (0, 2, 5)
    assert ocr_rules.infix("abc", "xxabxx") == (1, 2, 4)
    assert ocr_rules.infix("abc", "xyz") == (3, 0, 0)
    assert ocr_rules.infix("abc", "") == (3, 0, 0)


@given(st.text("ab", max_size=5), st.text("ab", max_size=7))
def test_infix_is_the_least_distance_over_all_substrings(target: str, text: str) -> None:
    spans = [(i, j) for i in range(len(text) + 1) for j in range(i, len(text) + 1)]
    best = min((ocr_rules.levenshtein(target, text[i:j]), j - i) for i, j in spans)
    distance, start, stop = ocr_rules.infix(target, text)
    assert (distance, stop - start) == best
    assert ocr_rules.levenshtein(target, text[start:stop]) == distance


@pytest.mark.parametrize(("a", "b", "distance"), [("kitten", "sitting", 3), ("", "ab", 2), ("flaw", "lawn", 2)])
def test_levenshtein(a: str, b: str, distance: int) -> None:
    assert ocr_rules.levenshtein(a, b) == distance == ocr_rules.levenshtein(b, a)


def test_spans_come_from_quotes_or_metadata() -> None:
    spans = ocr_rules.target_spans
    assert spans('a sign "OPEN" above “Daily News”', {}) == ["OPEN", "Daily News"]
    assert spans('a sign "OPEN"', {"text": "SHUT"}) == ["SHUT"]
    assert spans("two signs", {"text": ["A", "B"]}) == ["A", "B"]
    assert spans("the baker's 'Don't Stop' sign", {}) == []
    assert spans("the baker's 'Don't Stop' sign", {}, single_quotes=True) == ["Don't Stop"]
    assert spans('an empty "" sign', {}) == []
    with pytest.raises(TypeError, match="string or a list"):
        spans("x", {"text": 5})


def test_real_prompts_each_hold_one_span() -> None:
    root = Path(__file__).resolve().parents[2]
    data = Path(os.environ.get("STEPCREDIT_DATA", root.parent / "shared" / "data"))
    prompts = data / "ocr" / "test.txt"
    if not prompts.is_file():
        pytest.skip(f"needs {prompts.name} of flow_grpo in $STEPCREDIT_DATA/ocr")
    lines = prompts.read_text(encoding="utf-8").splitlines()
    assert len(lines) == 1018
    found = [ocr_rules.target_spans(line, {}) for line in lines]
    assert all(len(spans) == 1 for spans in found)
    for line, (span,) in zip(lines, found, strict=True):
        assert ocr_rules.robust([span], [(span, 1.0)]).score == 1.0
        assert ocr_rules.flow_grpo(line, [(span, 1.0)]) == 1.0


def test_no_target_is_an_error_or_nan_by_choice() -> None:
    images = torch.ones(2, 3, 8, 8)
    prompts, metadata = ['a sign "GO"', "a dog"], [{}, {}]
    with pytest.raises(RewardError, match=r"'a dog'.*double quotes"):
        Ocr(engine=lambda image: [("GO", 1.0)])(images, prompts, metadata)
    for rule in ("robust", "flow_grpo"):
        lenient = Ocr(rule=rule, missing="nan", engine=lambda image: [("GO", 1.0)])  # type: ignore[arg-type]
        found = score(lenient, images, prompts, metadata)
        assert found[0] == 1.0
        assert bool(found[1].isnan())


def test_the_engine_sees_bgr_and_a_broken_image_is_nan_not_read() -> None:
    seen: list[np.ndarray] = []

    def engine(image: np.ndarray) -> list[tuple[str, float]]:
        seen.append(image)
        return [("GO", 1.0)]

    images = torch.zeros(2, 3, 4, 4)
    images[0, 0] = 1.0  # red
    images[1, 1, 2, 2] = float("nan")
    found = Ocr(engine=engine)(images, ['"GO"', '"GO"'], [{}, {}])
    assert len(seen) == 1
    assert seen[0][0, 0].tolist() == [0, 0, 255]
    assert found[0] == 1.0
    assert bool(found[1].isnan())


def test_an_engine_that_fails_is_named() -> None:
    def engine(image: np.ndarray) -> list[tuple[str, float]]:
        raise OSError("out of order")

    with pytest.raises(RewardError, match="engine failed on image 0: out of order"):
        Ocr(engine=engine)(torch.ones(1, 3, 8, 8), ['"GO"'], [{}])


@pytest.mark.parametrize(
    "options",
    [
        {"rule": "exact"},
        {"missing": "zero"},
        {"clutter": 2.0},
        {"workers": 0},
        {"side": 8},
        {"strip": 40},
        {"punctuation": "some"},
    ],
)
def test_bad_options_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="ocr: "):
        get("ocr", **options)


def test_the_real_engine_reads_rendered_text() -> None:
    pytest.importorskip("rapidocr")
    reward = get("ocr", side=320, workers=2)
    assert isinstance(reward, Ocr)
    pages = torch.stack([render_text("STEP"), render_text("STOP"), torch.ones(3, 128, 256)])
    prompts = ['a sign that says "STEP"'] * 3
    found = reward.components(pages, prompts, [{}] * 3)
    assert found["exact"].tolist() == [1.0, 0.0, 0.0]
    assert float(found["score"][0]) > 0.9
    assert float(found["score"][1]) == pytest.approx(0.75, abs=0.1)  # one letter of four, times the confidence
    assert float(found["score"][2]) == 0.0
    alone = torch.cat([reward(pages[k : k + 1], prompts[:1], [{}]) for k in range(3)])
    assert torch.equal(found["score"], alone)
    (outcome,) = selftest.run(get("ocr", workers=1))  # at the engine's own size
    assert outcome.passed


def test_a_line_reader_skips_detection() -> None:
    pytest.importorskip("rapidocr")
    reward = get("ocr", detect=False, workers=1)
    page = torch.stack([render_text("hello", height=48, width=160), torch.ones(3, 48, 160)])
    found = reward(page, ['"hello"'] * 2, [{}] * 2)
    assert float(found[0]) > 0.9
    assert float(found[1]) == 0.0
