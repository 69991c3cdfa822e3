"""``stepcredit audit`` as a person uses it."""

import json
import signal

import pytest
import torch

from stepcredit.cli import audit_command, main
from stepcredit.policies.desk import DeskPolicy

FLAGS = ["--reward", "jpeg_size", "--group-size", "4", "--micro-batch", "4", "--steps", "5", "--window", "0", "4"]


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


def test_recipes_and_the_standard_table_on_one_policy(flags, tmp_path, capsys):
    to = tmp_path / "deep" / "audit.json"
    named = ["compose-stepwise", "compose-uniform", "compose-tempflow"]
    assert main(["audit", *named, "--groups", "5", "--all-schemes", "--json", "--to", str(to), *flags]) == 0
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert json.loads(to.read_text()) == found
    assert "5/5 groups" in printed.err
    assert found["groups"] == 5
    assert found["advice"].endswith(".")
    labels = [row["label"] for row in found["schemes"]]
    assert labels[:2] == named[:2]
    assert "gain, joint" in labels
    assert labels[-1] == "compose-tempflow"  # its branches are rollouts of their own
    rows = {row["label"]: row for row in found["schemes"]}
    assert rows["compose-stepwise"]["window"] == [0, 4]
    # gae with lam 1 is compose-stepwise's own scheme: the same numbers from the same rollouts
    assert rows["gae 1, centred"]["progress"] == rows["compose-stepwise"]["progress"]
    assert rows["compose-uniform"]["model_evaluations_per_trajectory"] < 5  # the shared first state is one
    assert len(rows["compose-stepwise"]["steps"]["gradient_norm"]) == 5
    assert rows["compose-stepwise"]["steps"]["gradient_norm"][4] == 0


def test_the_table_for_people_ends_with_advice(flags, capsys):
    assert main(["audit", "compose-stepwise", "compose-uniform", "--groups", "4", "--plain", *flags]) == 0
    printed = capsys.readouterr().out
    for word in ("4 groups", "alignment", "by step", "share of signal", "compose-uniform"):
        assert word in printed
    assert printed.rstrip().splitlines()[-1].startswith(("Take ", "No scheme's signal"))


def test_a_runs_tuned_weights_are_looked_at(flags, tmp_path, capsys):
    small = ["--eval-prompts", "4", "--eval-prompts-during", "4", "--prompts-per-iteration", "2", "--lr", "0.01"]
    train = ["train", "compose-stepwise", "--name", "run", "--out", str(tmp_path), "--iterations", "1", "--quiet"]
    assert main([*train, *flags, *small]) == 0
    capsys.readouterr()
    assert main(["audit", str(tmp_path / "run"), "--groups", "4", "--json"]) == 0
    tuned = json.loads(capsys.readouterr().out)
    assert main(["audit", "compose-stepwise", "--groups", "4", "--json", *flags, *small]) == 0
    base = json.loads(capsys.readouterr().out)
    assert tuned["weights"] == str(tmp_path / "run")
    assert base["weights"] == "base"
    assert tuned["schemes"][0]["steps"]["gradient_norm"] != base["schemes"][0]["steps"]["gradient_norm"]


def test_ctrl_c_gives_the_result_so_far(flags, capsys, monkeypatch):
    told = []

    def done(self, k, total):
        told.append(k)
        if k == 5:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(audit_command._Display, "done", done)
    assert main(["audit", "compose-uniform", "--groups", "40", "--json", *flags]) == 130
    found = json.loads(capsys.readouterr().out)
    assert told == [1, 2, 3, 4, 5]
    assert (found["groups"], found["asked_groups"], found["stopped"]) == (5, 40, "interrupted")


def test_bad_input_is_a_sentence(flags, capsys):
    for words, reason in (
        (["compose-stepwise", "--groups", "3"], "--groups must be at least 4, not 3"),
        (["compose-stepwise", "--dimensions", "0"], "--dimensions must be at least 1, not 0"),
        (["compose-tempflow", "--all-schemes"], "--all-schemes needs a recipe without branch"),
        (["compose-stepwise", "nothing-like-it"], "no recipe 'nothing-like-it'"),
        (["compose-stepwise", "compose-tempflow", "--advantage", "joint", "--no-branch"], "with the flags"),
    ):
        assert main(["audit", *words, *flags]) == 2
        assert reason in capsys.readouterr().err


def test_a_flag_that_repeats_the_first_recipes_value_is_set_in_all(flags, capsys):
    assert main(["audit", "compose-stepwise", "compose-stepwise-paper", "--groups", "4", "--json", *flags,
                 "--kernel", "flow_sde", "--substeps", "2", "--spacing", "grid"]) == 0  # fmt: skip
    rows = json.loads(capsys.readouterr().out)["schemes"]
    assert [row["kernel"] for row in rows] == ["flow_sde", "flow_sde"]
    assert {row["estimate"] for row in rows} == {"2 substeps"}
    assert [row["label"] for row in rows] == ["compose-stepwise", "compose-stepwise-paper"]
