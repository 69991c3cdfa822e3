"""Bad input: one clear sentence, exit code 2, nothing written."""

import pytest
import torch

from stepcredit.cli import main
from stepcredit.policies.desk import DeskPolicy
from stepcredit.rewards import FunctionReward, RewardInfo, SelfTest, registry
from stepcredit.training import recipe as recipes

SMALL = ["--prompts-per-iteration", "2", "--group-size", "4", "--micro-batch", "4", "--eval-prompts", "12",
         "--eval-prompts-during", "6", "--iterations", "1"]  # fmt: skip


def refused(capsys, *argv):
    """The one line on stderr of a command that must be refused with exit code 2."""
    assert main(list(argv)) == 2
    captured = capsys.readouterr()
    lines = [line for line in captured.err.splitlines() if line]
    assert len(lines) == 1, captured.err
    assert lines[0].startswith("error: ")
    return lines[0]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--kernel", "ddim", "--level", "1.5"], ["level 1.5", "'ddim'", "step 7", "1.177"]),
        (["--window", "3", "12"], ["window [3, 12)", "10 steps"]),
        (["--window", "5", "5"], ["window [5, 5)"]),
        (
            ["--kernel", "ddim", "--window", "9", "10"],
            ["window [9, 10)", "no trainable step", "[1, 2, 3, 4, 5, 6, 7, 8]"],
        ),
        (["--micro-batch", "48"], ["micro_batch 48", "512"]),
        (["--group-size", "1"], ["group_size", "1"]),
        (["--device", "abacus"], ["'abacus'"]),
        (["--task", "compos"], ["'compos'", "compose"]),
        (["--reward", "pikscore"], ["pikscore", "pickscore"]),
    ],
)
def test_settings_that_cannot_run(capsys, tmp_path, flags, words):
    line = refused(capsys, "train", "compose-stepwise", *flags, "--out", str(tmp_path / "runs"))
    for word in words:
        assert word in line
    assert not (tmp_path / "runs").exists()


def test_unknown_recipe(capsys):
    assert "did you mean 'compose-gae'" in refused(capsys, "train", "compose-gea")


def test_unknown_command(capsys):
    assert "did you mean 'train'" in refused(capsys, "trian")


def test_unknown_key_in_a_file_names_the_nearest(capsys, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(recipes.text("compose-uniform") + "\nlearning_rat: 1\nkernal: ddim\n")
    line = refused(capsys, "plan", str(path))
    assert "'kernal'; did you mean 'kernel'" in line


def test_unknown_flag_exits_with_2(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["train", "compose-stepwise", "--kernal", "ddim"])
    assert caught.value.code == 2


def test_empty_prompt_file(capsys, tmp_path):
    empty = tmp_path / "prompts.txt"
    empty.write_text("\n\n")
    assert "holds no prompt" in refused(capsys, "train", "compose-stepwise", "--train-prompts", str(empty))


def test_prompts_with_unknown_words_are_refused_before_training(capsys, tmp_path):
    foreign = tmp_path / "prompts.jsonl"
    foreign.write_text(
        '{"prompt": "a red elephant on white", "tag": "colors", "include": [{"class": "circle", "count": 1}]}\n'
    )
    assert "elephant" in refused(
        capsys, "train", "compose-stepwise", "--train-prompts", str(foreign), "--out", str(tmp_path)
    )


@pytest.mark.parametrize("name", ["../escape", "a/b", "", ".hidden", "x" * 200, "semi;colon"])
def test_run_names_stay_inside_the_runs_folder(capsys, tmp_path, name):
    refused(capsys, "train", "compose-stepwise", "--name", name, "--out", str(tmp_path / "runs"))
    assert list(tmp_path.rglob("*")) == []


def test_an_existing_run_is_never_overwritten(capsys, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "precious.txt").write_text("keep")
    line = refused(capsys, "train", "compose-stepwise", "--name", "mine", "--out", str(tmp_path), *SMALL)
    assert "exists" in line
    assert "--resume" in line
    assert (tmp_path / "mine" / "precious.txt").read_text() == "keep"


def test_resuming_what_is_not_a_run(capsys, tmp_path):
    assert "no run" in refused(capsys, "train", "--resume", "nothing", "--out", str(tmp_path))


@pytest.mark.parametrize(
    ("broken", "words", "begun"),
    [
        (lambda images: images.flatten(1).mean(1)[:-1], ["'mine'", "shape (1,) for 2 images"], False),
        (lambda images: [1] * (len(images) + 2), ["'mine'", "shape (4,) for 2 images"], False),
        (lambda images: torch.full((len(images),), float("nan")), ["'mine'", "FAILS its self-test", "nan"], False),
        (lambda images: torch.full((len(images),), float("inf")), ["'mine'", "infinite for sample 0"], False),
        (lambda images: torch.zeros(len(images)), ["'mine'", "FAILS its self-test", "good 0, bad 0"], False),
        # right on its own pair, and then not
        (
            lambda images: torch.where(images.flatten(1).mean(1) == 1, 1.0, 0.5),
            ["'mine'", "gave 0.5", "constant"],
            True,
        ),
        (
            lambda images: torch.where(images.flatten(1).std(1) == 0, images.flatten(1).mean(1), float("nan")),
            ["'mine'", "NaN for", "on_reward_failure: drop"],
            True,
        ),
    ],
    ids=["short", "long", "nan", "infinite", "constant", "constant later", "nan later"],
)
def test_a_reward_that_breaks_its_contract(capsys, tmp_path, monkeypatch, broken, words, begun):
    test = SelfTest(torch.ones(3, 4, 4), torch.zeros(3, 4, 4), "x", {})
    info = RewardInfo("mine", (0.0, 1.0), "own", "broken")
    reward = FunctionReward(info, lambda images, prompts, metadata: broken(images), test)
    monkeypatch.setitem(registry._registered, "mine", lambda: reward)
    policy = DeskPolicy.initial("compose", seed=1, hidden=16, depth=1, heads=2)
    policy.save(tmp_path / "tiny.safetensors")
    flags = ["--model", str(tmp_path / "tiny.safetensors"), "--reward", "mine", "--out", str(tmp_path / "runs"), *SMALL]
    line = refused(capsys, "train", "compose-stepwise", *flags, "--quiet")
    for word in words:
        assert word in line
    assert (tmp_path / "runs").exists() == begun


@pytest.mark.parametrize("command", ["train", "plan", "check", "recipes", "sample", "eval", "pretrain", "export"])
def test_every_command_explains_itself(capsys, command):
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert caught.value.code == 0
    assert f"stepcredit {command}" in capsys.readouterr().out


def test_usage_and_version(capsys):
    assert main([]) == 2
    assert main(["--help"]) == 0
    assert main(["--version"]) == 0
    assert "stepcredit 0." in capsys.readouterr().out


def test_recipes_list_show_copy(capsys, tmp_path):
    assert main(["recipes"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in recipes.names())
    assert main(["recipes", "show", "compose-gae"]) == 0
    assert capsys.readouterr().out == recipes.text("compose-gae")
    target = tmp_path / "mine.yaml"
    assert main(["recipes", "copy", "compose-gae", str(target)]) == 0
    assert target.read_text() == recipes.text("compose-gae")
    capsys.readouterr()
    assert "not overwritten" in refused(capsys, "recipes", "copy", "compose-gae", str(target))
