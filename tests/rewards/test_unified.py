"""UnifiedReward: reading answers by hand-worked cases, and the three kinds against a mock server."""

from __future__ import annotations

import base64
import io
import math
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from stepcredit.rewards import get, score, unified_rules
from stepcredit.rewards.cache import Cached
from stepcredit.rewards.openai_api import Token

NAN = math.nan


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("Final Score: 4", 4.0),
        ("dog (object): 1\nFinal Score: 3.5\n", 3.5),
        ("**Final Score:** 4", 4.0),
        ("Final Score: 2. Final Score: 5", 5.0),
        ("Final Score: 10", NAN),
        ("Final Score: 0", NAN),
        ("Final", NAN),
        ("Score: 4", NAN),
        ("", NAN),
    ],
)
def test_single_scores(text: str, value: float) -> None:
    assert unified_rules.single(text) == pytest.approx(value, nan_ok=True)


def test_three_axes() -> None:
    text = "Alignment Score (1-5): 2.6947\nCoherence Score (1-5): 4\nStyle Score (1-5): nan"
    assert unified_rules.acs(text) == pytest.approx({"Alignment": 2.6947, "Coherence": 4.0, "Style": NAN}, nan_ok=True)
    assert all(math.isnan(value) for value in unified_rules.acs("Alignment Score (1-5): 7").values())


def _pair(*firsts: float, off: float = 0.0) -> str:
    axes = zip(unified_rules.AXES, firsts, strict=True)
    return "\n".join(f"{axis} Score:\n Image 1: {first}\n Image 2: {1 - first + off}\n" for axis, first in axes)


def test_pairs() -> None:
    assert unified_rules.pairwise(_pair(0.5, 0.25, 0.75)) == pytest.approx(0.5)
    assert unified_rules.pairwise(_pair(0.9, 0.8, 1.0)) == pytest.approx(0.9)
    assert math.isnan(unified_rules.pairwise(_pair(0.9, 0.8, 1.0, off=0.1)))
    assert math.isnan(unified_rules.pairwise("Alignment Score:\n Image 1: 0.4\n Image 2: 0.6"))


def test_win_rates_average_both_orders_and_leave_out_what_failed() -> None:
    # 0 beats 1 in both orders; 0 and 2 tie once averaged; 1 against 2 failed.
    shares = [(0, 1, 0.7), (1, 0, 0.4), (0, 2, 0.6), (2, 0, 0.6), (1, 2, NAN), (2, 1, NAN)]
    assert unified_rules.win_rates(4, shares) == pytest.approx([0.75, 0.0, 0.5, NAN], nan_ok=True)


def _tokens(score: dict[str, float], end: str = "") -> list[Token]:
    head = [Token(text, {text: 0.0}) for text in ("Final", " Score", ":", " ")]
    digit = max(score, key=lambda token: score[token])
    tail = [Token(end, {end: 0.0})] if end else []
    return [*head, Token(digit, {token: math.log(p) for token, p in score.items()}), *tail]


def test_the_expected_score_is_finer_than_the_greedy_digit() -> None:
    spread = {"4": 0.6, "3": 0.2, "5": 0.1, "x": 0.1}
    expected = (4 * 0.6 + 3 * 0.2 + 5 * 0.1) / 0.9
    assert unified_rules.expected("Final Score: 4", _tokens(spread)) == pytest.approx(expected)
    assert unified_rules.expected("Final Score: 4", _tokens(spread, "<|end|>")) == pytest.approx(expected)
    # A decimal is taken as written, and so is a digit that hardly any probability stands behind.
    assert unified_rules.expected("Final Score: 4.5", _tokens(spread, ".5")) == 4.5
    assert unified_rules.expected("Final Score: 4", _tokens({"4": 0.3, "x": 0.29, "y": 0.2})) == 4.0
    # Tokens of some other text prove nothing.
    assert unified_rules.expected("Well. Final Score: 4", _tokens(spread)) == 4.0
    assert math.isnan(unified_rules.expected("Final Score: 9", _tokens({"9": 1.0})))


def _red(image: dict[str, Any]) -> float:
    data = base64.b64decode(image["image_url"]["url"].removeprefix("data:image/png;base64,"))
    return float(np.array(Image.open(io.BytesIO(data)))[..., 0].mean() / 255)


def _message(text: str, tokens: list[Token] | None = None) -> dict[str, Any]:
    content = [
        {
            "token": token.text,
            "logprob": max(token.top.values()),
            "top_logprobs": [{"token": text, "logprob": value} for text, value in token.top.items()],
        }
        for token in tokens or ()
    ]
    return {"choices": [{"message": {"content": text}, "logprobs": {"content": content} if tokens else None}]}


def _reward(script: Any, **options: Any) -> Any:
    return get("unified_reward", url=f"{script.url}/v1", sleep=lambda seconds: None, **options)


def test_single_kind_uses_log_probabilities_where_given(script: Any, pictures: Tensor) -> None:
    script.json(_message("Final Score: 4", _tokens({"4": 0.75, "5": 0.25})))
    script.json(_message("Final Score: 4"))
    script.json(_message("I cannot say."))
    found = score(_reward(script, parallel=1), pictures[:3], ["a", "b", "c"], [{}] * 3)
    assert torch.allclose(found, torch.tensor([4.25, 4.0, NAN]), equal_nan=True)
    assert b"Text Caption: [a]" in script.requests[0][1]


def test_axes_kind_is_a_weighted_mean_and_lists_its_parts(script: Any, pictures: Tensor) -> None:
    full = "Alignment Score (1-5): 2\nCoherence Score (1-5): 3\nStyle Score (1-5): 4"
    for text in (full, full.replace("Style", "Stile")) * 2:
        script.json(_message(text))
    parts = _reward(script, kind="acs", parallel=1).components(pictures[:2], ["a", "b"], [{}] * 2)
    assert torch.allclose(parts["score"], torch.tensor([3.0, NAN]), equal_nan=True)
    assert torch.allclose(parts["style"], torch.tensor([4.0, NAN]), equal_nan=True)
    weighted = _reward(script, kind="acs", parallel=1, weights={"alignment": 3, "coherence": 1, "style": 0})
    assert torch.allclose(weighted(pictures[:2], ["a", "b"], [{}] * 2), torch.tensor([2.25, 2.25]))


def test_pairwise_kind_ranks_the_members_of_a_group(script: Any, pictures: Tensor) -> None:
    def respond(message: dict[str, Any]) -> object:
        one, two, _ = message["messages"][0]["content"]
        share = _red(one) / (_red(one) + _red(two))
        return _message(_pair(share, share, share))

    script.respond = respond
    images = torch.stack([torch.full((3, 32, 48), value) for value in (0.2, 0.9, 0.5, 0.4, 0.8)])
    images[3, 0, 0, 0] = NAN
    reward = _reward(script, kind="pairwise")
    found = score(reward, images, ["p", "p", "p", "p", "q"], [{}] * 5)
    # Of the three that can be shown under p: two wins, one, none; the lone image under q has no opponent.
    assert torch.allclose(found, torch.tensor([0.0, 1.0, 0.5, NAN, NAN]), equal_nan=True)
    assert len(script.requests) == 6
    with pytest.raises(ValueError, match="compares images within a group"):
        Cached(reward)


def test_pictures_are_resized_only_on_request(script: Any) -> None:
    sizes = []

    def respond(message: dict[str, Any]) -> object:
        url = message["messages"][0]["content"][0]["image_url"]["url"]
        sizes.append(Image.open(io.BytesIO(base64.b64decode(url.split(",")[1]))).size)
        return _message("Final Score: 3")

    script.respond = respond
    image = torch.rand(1, 3, 40, 80)
    _reward(script)(image, ["a"], [{}])
    _reward(script, side=160)(image, ["a"], [{}])
    assert sizes == [(80, 40), (160, 80)]


@pytest.mark.parametrize(
    "options",
    [
        {"kind": "triple"},
        {"template": "no place"},
        {"weights": {"beauty": 1.0}},
        {"weights": {"style": -1.0}},
        {"weights": {"style": 0.0}},
        {"side": 4},
        {"on_failure": "zero"},
    ],
)
def test_bad_options(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="unified_reward: "):
        get("unified_reward", **options)
