"""The commands, used as a person uses them, on a model small enough for a test."""

import json

import pytest
import torch
from PIL import Image

from stepcredit.cli import main
from stepcredit.policies.desk import DeskPolicy

FLAGS = [
    "--reward",
    "jpeg_size",
    "--prompts-per-iteration",
    "2",
    "--group-size",
    "4",
    "--micro-batch",
    "4",
    "--steps",
    "5",
    "--eval-prompts",
    "12",
    "--eval-prompts-during",
    "6",
    "--eval-every",
    "2",
    "--lr",
    "0.01",
    "--lr-schedule",
    "constant",
    "--window",
    "0",
    "5",
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    policy = DeskPolicy.initial("compose", seed=1, hidden=16, depth=1, heads=2, height=24, width=24)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for _, parameter in policy.named_parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    path = tmp_path_factory.mktemp("model") / "tiny.safetensors"
    policy.save(path)
    return str(path)


@pytest.fixture(scope="module")
def out(tmp_path_factory, model):
    """A folder with one finished run, `first`."""
    folder = tmp_path_factory.mktemp("runs")
    code = main(["train", "compose-stepwise", "--name", "first", "--out", str(folder), "--iterations", "2",
                 "--model", model, *FLAGS])  # fmt: skip
    assert code == 0
    return folder


def test_train_says_before_after_and_where_the_report_is(out, model, capsys):
    assert main(["train", "compose-uniform", "--out", str(out), "--iterations", "1", "--model", model, *FLAGS]) == 0
    printed = capsys.readouterr().out
    for word in ("2 prompts x 4 members = 8 trajectories", "iteration 1/1", "before", "after", "report.html"):
        assert word in printed
    assert (out / "compose-uniform" / "summary.json").is_file()
    assert main(["train", "compose-uniform", "--out", str(out), "--iterations", "1", "--model", model, *FLAGS]) == 0
    assert (out / "compose-uniform-2" / "summary.json").is_file()


def test_resume_continues_a_finished_run_with_more_iterations(out, capsys):
    assert main(["train", "--resume", str(out / "first"), "--iterations", "3"]) == 0
    lines = [json.loads(line) for line in (out / "first" / "metrics.jsonl").read_text().splitlines()]
    assert [line["iteration"] for line in lines] == [0, 1, 2, 3]
    capsys.readouterr()
    assert main(["train", "--resume", "first", "--out", str(out), "--lr", "0.5"]) == 2
    assert "lr (was 0.01, now 0.5)" in capsys.readouterr().err
    assert main(["train", "compose-uniform", "--resume", "first", "--out", str(out)]) == 2
    assert "credit (was 'gae', now 'uniform')" in capsys.readouterr().err


def test_plan_is_json_with_the_promised_names(model, capsys):
    assert main(["plan", "compose-uniform", "--json", "--model", model]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert 9 < plan["model_evaluations_per_trajectory"] < 10  # members share their first state
    assert plan["decodes_per_trajectory"] == plan["reward_calls_per_trajectory"] == 1
    whole = ["--no-shared-noise", "--window", "0", "10"]
    assert main(["plan", "compose-uniform", "--json", "--model", model, *whole]) == 0
    assert json.loads(capsys.readouterr().out)["trained_evaluations_per_trajectory"] == 10
    assert main(["plan", "compose-stepwise", "--json", "--model", model, *whole, "--substeps", "5"]) == 0
    assert json.loads(capsys.readouterr().out)["model_evaluations_per_trajectory"] == 40
    assert main(["plan", "compose-turning-point", "--json", "--model", model, *whole]) == 0
    assert json.loads(capsys.readouterr().out)["model_evaluations_per_trajectory"] == 55


def test_plan_counts_what_training_then_uses(out, capsys):
    assert main(["plan", str(out / "first"), "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    line = json.loads((out / "first" / "metrics.jsonl").read_text().splitlines()[1])
    assert line["model_evaluations"] == plan["iteration"]["model_evaluations"]


def test_plan_for_people_with_measured_times(model, capsys):
    assert main(["plan", "compose-stepwise", "--model", model, "--calibrate"]) == 0
    printed = capsys.readouterr().out
    assert "model evaluations" in printed
    assert "s of training" in printed


def test_check_passes_and_fails_with_what_to_do(model, capsys):
    assert main(["check", "compose-stepwise", "--model", model, *FLAGS]) == 0
    assert capsys.readouterr().out.count("pass") == 5
    # the untrained model draws nothing that the compose reward would credit: no group has any signal
    flags = [flag if flag != "jpeg_size" else "compose" for flag in FLAGS]
    assert main(["check", "compose-stepwise", "--model", model, *flags]) == 1
    printed = capsys.readouterr().out
    assert "FAIL" in printed
    assert "nothing can be learned" in printed


def test_eval_compares_base_and_tuned_on_the_same_slots(out, capsys):
    assert main(["eval", "first", "--out", str(out), "--prompts", "12", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    summary = json.loads((out / "first" / "summary.json").read_text())
    assert result["base"]["mean"] == pytest.approx(summary["reward_before"]["mean"], abs=1e-4)
    assert result["tuned"]["mean"] == pytest.approx(summary["reward_after"]["mean"], abs=1e-4)
    assert result["change"]["mean"] == pytest.approx(result["tuned"]["mean"] - result["base"]["mean"], abs=1e-6)
    folder = out / "first" / "eval-12-5"
    base = [json.loads(line) for line in (folder / "base.jsonl").read_text().splitlines()]
    tuned = [json.loads(line) for line in (folder / "tuned.jsonl").read_text().splitlines()]
    assert [(e["slot"], e["prompt"]) for e in base] == [(e["slot"], e["prompt"]) for e in tuned]
    assert main(["eval", "first", "--out", str(out), "--prompts", "12"]) == 0
    assert "exactly right" not in capsys.readouterr().out


def test_sample_writes_a_grid_and_never_overwrites(out, model, tmp_path, capsys):
    target = tmp_path / "grid.png"
    flags = ["--count", "6", "--enlarge", "2", "--to", str(target)]
    assert main(["sample", str(out / "first"), *flags]) == 0
    tuned = Image.open(target).copy()
    assert tuned.size == (3 * 48 + 2 * 2, 2 * 48 + 2)
    assert main(["sample", str(out / "first"), *flags]) == 2
    assert "--force" in capsys.readouterr().err
    assert main(["sample", str(out / "first"), "--weights", "base", *flags, "--force"]) == 0
    assert Image.open(target).tobytes() != tuned.tobytes()
    assert main(["sample", str(out / "first"), *flags, "--force", "--prompt", "a purple elephant"]) == 2
    assert "elephant" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["eval", "sample", "inspect", "export"])
def test_a_checkpoint_that_is_not_there_is_refused_and_those_that_are_are_named(out, tmp_path, capsys, command):
    to = [] if command == "eval" else ["--to", str(tmp_path / "made")]
    assert main([command, str(out / "first"), *to, "--checkpoint", "99"]) == 2
    assert "has no checkpoint of iteration 99; there are those of " in capsys.readouterr().err
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("command", ["sample", "inspect"])
def test_a_checkpoint_of_a_recipe_is_refused(tmp_path, capsys, command):
    to = str(tmp_path / "file")
    assert main([command, "compose-uniform", "--to", to, "--checkpoint", "best"]) == 2
    said = capsys.readouterr().err
    assert "--checkpoint best belongs to the folder of a run, and 'compose-uniform' is a recipe" in said
    assert not (tmp_path / "file").exists()


def test_pretrain_writes_a_model_that_trains_and_is_the_same_twice(tmp_path, capsys):
    flags = ["--steps", "3", "--threads", "1"]
    assert main(["pretrain", "compose", "--to", str(tmp_path / "a.safetensors"), *flags]) == 0
    assert "wrote" in capsys.readouterr().out
    assert main(["pretrain", "compose", "--to", str(tmp_path / "b.safetensors"), *flags]) == 0
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()
    assert main(["pretrain", "compose", "--to", str(tmp_path / "a.safetensors"), *flags]) == 2
    assert "not overwritten" in capsys.readouterr().err
    assert main(["pretrain", "spel", *flags]) == 2
    assert "task 'spel' has no desk model; did you mean 'spell'?" in capsys.readouterr().err
