"""Prompts of the tasks of real models: the format, and that nothing held out is trained on."""

import json
from collections import Counter

import pytest

from stepcredit import tasks
from stepcredit.errors import UserError
from stepcredit.rewards.ocr_rules import target_spans
from stepcredit.tasks import Prompt, geneval, ocr


def clause(name, **extra):
    return {"class": name, "count": 1, **extra}


def meta(tag, *include):
    return Prompt("p", {"tag": tag, "include": list(include), "prompt": "p"})


def test_geneval_grammar_speaks_the_metadata_format():
    prompts = geneval.train_prompts()
    tags = Counter(prompt.tag for prompt in prompts)
    # 80 * 79 / 2 unordered pairs; 3 counts of 80; 10 colours of 79 objects without people; 79 * 78 / 2 or capped
    assert tags["two_object"] == 3160
    assert tags["counting"] == 240
    assert tags["colors"] == 790
    assert 3081 <= tags["position"] <= geneval.LARGEST
    assert tags["color_attr"] == geneval.LARGEST
    for prompt in prompts:
        assert prompt.metadata["prompt"] == prompt.text
        assert prompt.text.startswith("a photo of ")
        assert all(clause["class"] in geneval.OBJECTS for clause in prompt.metadata["include"])
        assert ("exclude" in prompt.metadata) == (prompt.tag == "counting")
    texts = {prompt.text: prompt.metadata for prompt in prompts}
    three = texts["a photo of three knives"]
    assert three["include"] == [{"class": "knife", "count": 3}]
    assert three["exclude"] == [{"class": "knife", "count": 4}]
    placed = next(prompt for prompt in prompts if prompt.tag == "position")
    target, other = placed.metadata["include"]
    assert other["position"][1] == 0
    assert placed.text.endswith(target["class"])


@pytest.mark.parametrize(
    ("one", "two", "same"),
    [
        ((clause("cat"), clause("dog")), (clause("dog"), clause("cat")), True),
        ((clause("cat", color="red"), clause("dog", color="blue")),
         (clause("dog", color="blue"), clause("cat", color="red")), True),
        ((clause("cat", color="red"), clause("dog", color="blue")),
         (clause("cat", color="blue"), clause("dog", color="red")), False),
        ((clause("dog"), clause("cat", position=["left of", 0])),
         (clause("cat"), clause("dog", position=["right of", 0])), True),
        ((clause("dog"), clause("cat", position=["left of", 0])),
         (clause("dog"), clause("cat", position=["right of", 0])), False),
        ((clause("dog"), clause("cat", position=["above", 0])),
         (clause("cat"), clause("dog", position=["below", 0])), True),
        (({"class": "cat", "count": 2},), ({"class": "cat", "count": 3},), False),
    ],
)  # fmt: skip
def test_pictures_are_the_same_in_either_order(one, two, same):
    assert (geneval.key(meta("t", *one)) == geneval.key(meta("t", *two))) is same
    left = geneval.apart([meta("t", *one)], [meta("t", *two)])
    assert left == ([] if same else [meta("t", *one)])


def test_geneval_with_the_published_test(data, monkeypatch):
    monkeypatch.setenv("STEPCREDIT_DATA", str(data))
    names = (data / "geneval" / "object_names.txt").read_text().split("\n")
    assert list(geneval.OBJECTS) == [name for name in names if name]
    train, held = tasks.prompts_of(tasks.get("geneval"))
    assert len(held) == 553
    assert not {geneval.key(p) for p in train} & {geneval.key(p) for p in held}
    # by hand, from the published file: every two-object test prompt has its pair, in any order, nowhere in training
    pairs = {frozenset(c["class"] for c in p.metadata["include"]) for p in held if p.tag == "two_object"}
    assert not pairs & {frozenset(c["class"] for c in p.metadata["include"]) for p in train if p.tag == "two_object"}
    assert len(train) > 10_000


def test_ocr_prompts_quote_their_words():
    prompts = ocr.train_prompts()
    assert len({prompt.text for prompt in prompts}) == len(prompts) == ocr.COUNT
    for prompt in prompts[:200]:
        assert prompt.text.count('"') == 2
        assert [span.casefold() for span in target_spans(prompt.text, {})] == [ocr.quoted(prompt.text)]


def test_ocr_with_the_published_test(data, monkeypatch):
    monkeypatch.setenv("STEPCREDIT_DATA", str(data))
    train, held = tasks.prompts_of(tasks.get("ocr"))
    assert len(held) == 1018
    assert not {ocr.quoted(p.text) for p in train} & {ocr.quoted(p.text) for p in held}
    assert ocr.apart([Prompt('A sign "spring  COLLECTION 2024"')], held) == []


@pytest.mark.parametrize(
    ("task", "words"),
    [
        (
            "geneval",
            [
                "geneval/evaluation_metadata.jsonl",
                "stepcredit data get geneval",
                "djghosh13/geneval",
                "STEPCREDIT_DATA",
            ],
        ),
        ("ocr", ["ocr/test.txt", "stepcredit data get ocr", "flow_grpo", "heldout_prompts"]),
        ("pickscore", ["pickscore/test.txt", "heldout_prompts", "STEPCREDIT_DATA"]),
    ],
)
def test_absent_data_names_the_file_and_how_to_get_it(task, words, tmp_path, monkeypatch):
    monkeypatch.setenv("STEPCREDIT_DATA", str(tmp_path))
    monkeypatch.setenv("STEPCREDIT_CACHE", str(tmp_path / "cache"))
    with pytest.raises(UserError) as caught:
        tasks.prompts_of(tasks.get(task))
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_another_file_under_the_published_name_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("STEPCREDIT_DATA", str(tmp_path))
    (tmp_path / "geneval").mkdir()
    (tmp_path / "geneval" / "evaluation_metadata.jsonl").write_text(json.dumps({"prompt": "a photo of a bench"}))
    with pytest.raises(UserError, match=r"not the published file.*5c48e0813e81.*heldout_prompts"):
        tasks.prompts_of(tasks.get("geneval"))


def test_own_files_take_the_place_of_the_published_ones(tmp_path):
    held = tmp_path / "held.jsonl"
    entry = {"tag": "counting", "include": [{"class": "cat", "count": 2}], "prompt": "a photo of two cats"}
    held.write_text(json.dumps(entry) + "\n")
    train, heldout = tasks.prompts_of(tasks.get("geneval"), heldout=held)
    assert [p.text for p in heldout] == ["a photo of two cats"]
    assert len(train) == len(geneval.train_prompts()) - 1


@pytest.mark.parametrize("task", ["geneval", "ocr", "pickscore"])
def test_rehearsals_need_no_file(task):
    train, held = tasks.prompts_of(tasks.get(task), practice=True)
    assert len(train) >= 8
    assert len(held) >= 8
    assert not {p.text for p in train} & {p.text for p in held}
