"""Published suites, read from the real files, on a run of a tiny pipeline."""

import json
from collections import Counter

import pytest

from stepcredit.cli import main
from stepcredit.tasks import suites
from stepcredit.training.suite import slots_of


def test_the_published_suites_have_their_published_sizes(data, monkeypatch):
    monkeypatch.setenv("STEPCREDIT_DATA", str(data))
    geneval = suites.get("geneval")
    prompts = geneval.prompts()
    assert Counter(prompt.tag for prompt in prompts) == {
        "single_object": 80, "two_object": 99, "counting": 80, "colors": 94, "position": 100, "color_attr": 100,
    }  # fmt: skip
    on = slots_of("geneval", prompts, geneval.images)
    assert len(on) == len({slot.key for slot in on}) == 2212
    assert Counter(prompt.tag for prompt in geneval.prompts(60)) == dict.fromkeys(
        ("single_object", "two_object", "counting", "colors", "position", "color_attr"), 10
    )
    ocr = suites.get("ocr")
    assert (len(ocr.prompts()), ocr.images) == (1018, 1)


@pytest.mark.filterwarnings("ignore::stepcredit.policies.diffusers_common.PolicyWarning")
def test_geneval_on_a_tiny_pipeline(data, tmp_path, monkeypatch, capsys):
    pytest.importorskip("diffusers")
    runs = tmp_path / "runs"
    flags = ["--iterations", "1", "--group-size", "2", "--micro-batch", "4", "--eval-prompts", "4"]
    flags += ["--eval-prompts-during", "2", "--quiet", "--out", str(runs)]
    assert main(["train", "sd35-geneval-uniform", "--rehearse", *flags]) == 0
    capsys.readouterr()
    command = [
        "eval",
        "sd35-geneval-uniform-rehearsal",
        "--out",
        str(runs),
        "--suite",
        "geneval",
        "--rewards",
        "jpeg_size",
    ]
    assert main([*command, "--prompts", "12", "--steps", "2"]) == 2
    assert "stepcredit data get geneval" in capsys.readouterr().err
    monkeypatch.setenv("STEPCREDIT_DATA", str(data))
    assert main([*command, "--prompts", "12", "--steps", "2", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["prompts"], result["images"], result["mean"]) == (12, 48, "of the tags' means")
    tags = result["per_tag"]
    assert {tag: row["images"] for tag, row in tags.items()} == dict.fromkeys(tags, 8)
    assert len(tags) == 6
    macro = sum(row["base"]["mean"] for row in tags.values()) / 6
    assert result["metrics"]["jpeg_size"]["base"]["mean"] == pytest.approx(macro, abs=1e-5)
