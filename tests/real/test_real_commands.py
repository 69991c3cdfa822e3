"""Every command on a run of a pipeline."""

import json

import pytest

from stepcredit.cli import main
from stepcredit.training import recipe as recipes

pytest.importorskip("diffusers")

FLAGS = [
    *("--task", "ocr", "--model", "tiny:flux", "--reward", "jpeg_size", "--resolution", "32", "--precision", "fp32"),
    *("--max-sequence-length", "16", "--prompts-per-iteration", "2", "--group-size", "2", "--micro-batch", "4"),
    *(
        "--steps",
        "3",
        "--window",
        "0",
        "3",
        "--iterations",
        "1",
        "--eval-prompts",
        "4",
        "--eval-prompts-during",
        "2",
        "--kl-beta",
        "0.1",
    ),
    *("--lora-targets", "attn.to_q", "attn.to_v", "--lr", "0.02"),
]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    assert main(["train", "compose-stepwise", *FLAGS, "--name", "real", "--quiet", "--out", str(folder)]) == 0
    return folder / "real"


def test_training_keeps_adapters_alone(run):
    stored = recipes.parse((run / "recipe.yaml").read_text(), "run")
    assert stored.lora_targets == ("attn.to_q", "attn.to_v")
    line = json.loads((run / "metrics.jsonl").read_text().splitlines()[1])
    assert line["ratio_deviation"] == 0
    assert line["kl"][1] == 0  # the adapters are still zero: the reference is the model itself
    # two blocks, q and v of 64 -> 64 at rank 32, as weights, average and two moments in float32, and step counts
    weights = 2 * 2 * 32 * (64 + 64)
    size = sum(file.stat().st_size for file in (run / "checkpoints" / "latest").glob("*.safetensors"))
    assert 4 * 4 * weights < size < 4 * 4 * weights + 20_000


def test_eval(run, capsys):
    assert main(["eval", str(run), "--prompts", "4", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["base"]["mean"] != result["tuned"]["mean"]


def test_sample_base_and_tuned(run, tmp_path, capsys):
    grids = {}
    for weights in ("base", "ema"):
        grids[weights] = tmp_path / f"{weights}.png"
        assert main(["sample", str(run), "--weights", weights, "--count", "2", "--to", str(grids[weights])]) == 0
    assert grids["base"].read_bytes() != grids["ema"].read_bytes()


def test_check(run, capsys):
    assert main(["check", str(run)]) == 0
    assert "ready to train" in capsys.readouterr().out


def test_plan_of_a_small_model(run, capsys):
    assert main(["plan", str(run), "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["trained_parameters"] == 2 * 2 * 32 * (64 + 64)
    assert plan["forwards_per_evaluation"] == 1


def test_plan_of_a_large_one_without_weights(capsys, offline):
    assert main(["plan", "sd35-ocr-uniform", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["model_evaluations_per_trajectory"] == 10  # independent noise: nothing is shared
    assert plan["decodes_per_trajectory"] == 1
    assert plan["trained_evaluations_per_trajectory"] == 9  # window [0, 9)
    assert plan["forwards_per_evaluation"] == 2
    assert plan["budget"]["trained_parameters"] == pytest.approx(18.8e6, rel=0.01)
    low, high = plan["budget"]["gpu_hours"]["A100"]
    assert 0 < low < high
    assert main(["plan", "sd35-ocr-uniform"]) == 0
    printed = capsys.readouterr().out
    assert "18.8 M trained" in printed
    assert "All estimated, none measured" in printed


def test_missing_weights_are_one_sentence_and_exit_code_2(capsys, offline, tmp_path):
    flags = ["--device", "cpu", "--no-check-memory", "--out", str(tmp_path / "runs")]
    assert main(["train", "sd35-ocr-uniform", *flags]) == 2
    captured = capsys.readouterr()
    assert len(captured.err.strip().splitlines()) == 1
    assert "stabilityai/stable-diffusion-3.5-medium" in captured.err
    assert not (tmp_path / "runs").exists()
