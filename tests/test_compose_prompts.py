"""Prompts of the desk task compose: GenEval's metadata, the tokens, a split that leaks nothing."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from stepcredit.tasks.base import Prompt
from stepcredit.tasks.compose import prompts as p

BY_TEXT = {prompt.text: prompt for prompt in p.all_prompts()}


def test_number_of_prompts_by_tag() -> None:
    # 6 shapes, 6 colours, 3 backgrounds, 4 relations; ordered pairs of unlike shapes: 30, of unlike colours: 30.
    assert Counter(prompt.tag for prompt in p.all_prompts()) == {
        "single_object": 6 * 3,
        "two_object": 30 * 3,
        "counting": 3 * 6 * 3,
        "colors": 6 * 6 * 3,
        "position": 30 * 4 * 3,
        "color_attr": 30 * 30 * 3,
    }
    assert len(BY_TEXT) == len(p.all_prompts())


@pytest.mark.parametrize(
    ("text", "tag", "include", "exclude"),
    [
        ("a circle on white", "single_object", [{"class": "circle", "count": 1}], None),
        (
            "a circle and a square on grey",
            "two_object",
            [{"class": "circle", "count": 1}, {"class": "square", "count": 1}],
            None,
        ),
        (
            "three crosses on black",
            "counting",
            [{"class": "cross", "count": 3}],
            [{"class": "cross", "count": 4}],
        ),
        ("an orange ring on white", "colors", [{"class": "ring", "count": 1, "color": "orange"}], None),
        (  # as GenEval's "a photo of a dog right of a teddy bear": the target first, the placed object second
            "a circle left of a square on white",
            "position",
            [{"class": "square", "count": 1}, {"class": "circle", "count": 1, "position": ["left of", 0]}],
            None,
        ),
        (
            "a red circle and a blue square on grey",
            "color_attr",
            [{"class": "circle", "count": 1, "color": "red"}, {"class": "square", "count": 1, "color": "blue"}],
            None,
        ),
    ],
)
def test_metadata_follows_geneval(text: str, tag: str, include: list[object], exclude: list[object] | None) -> None:
    metadata = BY_TEXT[text].metadata
    expected = {"tag": tag, "include": include, "prompt": text, "background": text.split()[-1]}
    assert metadata == (expected if exclude is None else {**expected, "exclude": exclude})


def test_every_prompt_can_be_tokenized_and_read_back() -> None:
    tokens = p.tokenize(list(BY_TEXT))
    assert tokens.shape == (len(BY_TEXT), 10)
    assert tokens.dtype == torch.int64
    words = p.vocabulary()
    assert len(set(words)) == len(words)
    for text, row in zip(BY_TEXT, tokens.tolist(), strict=True):
        assert " ".join(words[i] for i in row if i != 0) == text


def test_tokens_are_padded_with_zero_and_an_empty_text_is_all_padding() -> None:
    tokens = p.tokenize(["a circle on white", ""], length=6)
    assert (tokens[0] != 0).tolist() == [True] * 4 + [False] * 2
    assert tokens[1].tolist() == [0] * 6


def test_tokenize_names_the_word_it_does_not_know() -> None:
    with pytest.raises(ValueError, match=r"unknown word 'hexagon'; known words: a, an, .*circle"):
        p.tokenize(["a hexagon on white"])
    with pytest.raises(ValueError, match="unknown word '<pad>'"):
        p.tokenize(["<pad>"])
    with pytest.raises(ValueError, match="4 words; use at most 3"):
        p.tokenize(["a circle on white"], length=3)


def test_vocabulary_order_is_frozen() -> None:
    # Saved weights index this list: a change of order or length breaks the shipped model.
    assert " ".join(p.vocabulary()) == (
        "<pad> a an and on left right of above below two three four red green blue yellow purple orange "
        "circle square triangle cross diamond ring circles squares triangles crosses diamonds rings "
        "white black grey"
    )


def test_split_is_disjoint_complete_and_a_quarter_of_every_tag() -> None:
    train, heldout = p.train_prompts(), p.heldout_prompts()
    texts = {x.text for x in train}, {x.text for x in heldout}
    assert not texts[0] & texts[1]
    assert texts[0] | texts[1] == set(BY_TEXT)
    total, out = Counter(x.tag for x in p.all_prompts()), Counter(x.tag for x in heldout)
    for tag in p.TAGS:
        assert out[tag] / total[tag] == pytest.approx(0.25, abs=0.03)


def _mirror(prompt: Prompt) -> str | None:
    """The other way to ask for the same picture, built from the text alone."""
    phrase, background = prompt.text.rsplit(" on ", 1)
    swaps = {"left of": "right of", "right of": "left of", "above": "below", "below": "above", "and": "and"}
    for joint, other in swaps.items():
        first, found, second = phrase.partition(f" {joint} ")
        if found:
            return f"{second} {other} {first} on {background}"
    return None


def test_equivalent_prompts_fall_on_the_same_side() -> None:
    heldout = {x.text for x in p.heldout_prompts()}
    mirrored = [(x.text, _mirror(x)) for x in p.all_prompts()]
    pairs = [(text, other) for text, other in mirrored if other is not None]
    assert len(pairs) == 90 + 360 + 2700
    assert all((text in heldout) == (other in heldout) for text, other in pairs if other in BY_TEXT)
    assert all(other in BY_TEXT for _, other in pairs)
