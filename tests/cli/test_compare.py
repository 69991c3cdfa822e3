"""``stepcredit compare`` as a person uses it."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from stepcredit.cli import main
from stepcredit.policies.desk import DeskPolicy

FLAGS = ["--reward", "jpeg_size", "--group-size", "4", "--prompts-per-iteration", "2", "--micro-batch", "4",
         "--steps", "4", "--window", "0", "4", "--eval-prompts", "8", "--eval-prompts-during", "4", "--eval-every", "1",
         "--checkpoint-every", "1", "--lr", "0.01"]  # fmt: skip


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    policy = DeskPolicy.initial("compose", seed=1, hidden=16, depth=1, heads=2)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for _, parameter in policy.named_parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    path = tmp_path_factory.mktemp("model") / "tiny.safetensors"
    policy.save(path)
    return [*FLAGS, "--model", str(path)]


@pytest.fixture(scope="module")
def done(flags, tmp_path_factory):
    """A finished comparison of two recipes on two seeds."""
    out = tmp_path_factory.mktemp("runs")
    assert main(["compare", "compose-stepwise", "compose-uniform", "--seeds", "2", "--iterations", "2", "--name", "c",
                 "--out", str(out), "--target", "-1.93", *flags]) == 0  # fmt: skip
    return out


def found(out):
    return json.loads((out / "c" / "comparison.json").read_text())


def test_every_run_is_an_ordinary_one_and_the_json_agrees_with_them(done):
    told = found(done)
    assert told["seeds"] == [0, 1]
    assert [recipe["label"] for recipe in told["recipes"]] == ["compose-stepwise", "compose-uniform"]
    for recipe in told["recipes"]:
        ends, evaluations = [], []
        for seed in (0, 1):
            run = done / "c" / f"{recipe['label']}-seed-{seed}"
            summary = json.loads((run / "summary.json").read_text())
            ends.append(summary["reward_after"]["mean"])
            evaluations.append(summary["model_evaluations"])
            assert f"seed: {seed}" in (run / "recipe.yaml").read_text()
            assert (run / "report.html").is_file()
        assert recipe["reward"]["mean"] == pytest.approx(sum(ends) / 2)
        curve = recipe["curves"]["evaluations"]
        assert curve["x"][0] == 0
        assert curve["x"][-1] == evaluations[0] == evaluations[1]
        assert recipe["curves"]["iterations"]["x"] == [0, 1, 2]
        assert recipe["image_statistics"]["diversity_within_prompt"]["before"] > 0
    first, second = told["recipes"]
    difference = second["reward"]["mean"] - first["reward"]["mean"]
    assert second["to_first"]["mean"] == pytest.approx(difference, abs=1e-9)
    assert first["to_first"]["mean"] == 0
    assert told["target"] == -1.93
    assert set(first["ratio"]) == {"iterations", "evaluations", "seconds"}
    assert (done / "c" / "comparison.html").is_file()


def test_the_same_command_keeps_what_is_finished_and_takes_more(done, flags, capsys):
    before = {path: path.stat().st_mtime_ns for path in done.glob("c/*/summary.json")}
    command = ["compare", "compose-stepwise", "compose-uniform", "--iterations", "2", "--name", "c", "--out", str(done)]
    assert main([*command, "--seeds", "2", "--json", *flags]) == 0
    printed = capsys.readouterr().out
    assert json.loads(printed)["target_kind"] in ("halfway", "none")
    assert {path: path.stat().st_mtime_ns for path in done.glob("c/*/summary.json")} == before
    assert main([*command, "--seeds", "3", *flags]) == 0
    printed = capsys.readouterr().out
    assert "compose-uniform seed 2" in printed
    assert "6 of 6 runs done" in printed
    assert found(done)["seeds"] == [0, 1, 2]
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert main([*command, "--seeds", "2", *flags, "--lr", "0.02"]) == 2
    assert "was made with lr 0.01, not 0.02; give the comparison another --name" in capsys.readouterr().err


def test_an_interrupted_comparison_goes_on_and_ends_as_one_that_was_not(done, flags, tmp_path):
    command = [sys.executable, "-m", "stepcredit", "compare", "compose-stepwise", "compose-uniform", "--seeds", "2",
               "--iterations", "2", "--name", "c", "--out", str(tmp_path), "--jobs", "2", *flags]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    begun = [tmp_path / "c" / f"compose-{name}-seed-0" / "metrics.jsonl" for name in ("stepwise", "uniform")]
    deadline = time.monotonic() + 120
    while not any(path.exists() for path in begun) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    printed, _ = process.communicate(timeout=120)
    assert process.returncode == 130, printed
    assert "the same command goes on from here" in printed
    code = main(["compare", "compose-stepwise", "compose-uniform", "--seeds", "2", "--iterations", "2", "--name", "c",
                 "--out", str(tmp_path), *flags])  # fmt: skip
    assert code == 0
    for label in ("compose-stepwise", "compose-uniform"):
        for seed in (0, 1):
            name = f"c/{label}-seed-{seed}/evaluations/after.jsonl"
            assert (tmp_path / name).read_text() == (done / name).read_text()


@pytest.mark.parametrize("leftover", ["checkpoints/.step-000000.partial/weights", "evaluations/iteration-000000.jsonl"])
def test_a_run_killed_before_its_first_line_is_made_again(done, flags, tmp_path, leftover):
    # at whatever moment before its first checkpoint, as by a power cut
    name = "compose-uniform-seed-0"
    recipe = (done / "c" / name / "recipe.yaml").read_text()
    torn = tmp_path / "c" / name / leftover
    torn.parent.mkdir(parents=True)
    torn.write_text("half")
    (tmp_path / "c" / name / "recipe.yaml").write_text(recipe)
    command = ["compare", "compose-uniform", "--seeds", "1", "--iterations", "2", "--name", "c", "--out", str(tmp_path)]
    assert main([*command, *flags]) == 0
    after = f"c/{name}/evaluations/after.jsonl"
    assert (tmp_path / after).read_text() == (done / after).read_text()


def test_bad_input_is_a_sentence_before_anything_is_written(flags, tmp_path, capsys):
    for words, reason in (
        (["compose-stepwise", "--seeds", "0"], "--seeds must be at least 1, not 0"),
        (["compose-stepwise", "--jobs", "0"], "--jobs must be at least 1, not 0"),
        (["compose-stepwise", "--seed", "-1"], "--seed must not be negative, and is -1"),
        (["compose-stepwise", "--name", "../x"], "run name"),
        (["compose-stepwise", "compose-stepwise-papr"], "no recipe 'compose-stepwise-papr'"),
        (["compose-stepwise", "compose-stepwise-paper", "--kernel", "cps", "--level", "0"], "trainable step"),
    ):
        assert main(["compare", *words, "--out", str(tmp_path / "runs"), *flags]) == 2
        assert reason in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()
