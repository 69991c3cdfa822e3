"""One run on one process or several: the same weights and the same log, whole, resumed, and in its failures."""

from pathlib import Path

import pytest
import torch
from launching import alone, final, lines, torchrun

BROKEN = Path(__file__).parent / "broken_reward.py"


def assert_same(folder, other):
    """Weights, averages and moments to 1e-6, and everything in the log that is no clock."""
    (tensors, counters), (theirs, their_counters) = final(folder), final(other)
    assert tensors.keys() == theirs.keys()
    for name, tensor in tensors.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=0, atol=1e-6, msg=name)
    assert counters == their_counters
    assert len(lines(folder)) == len(lines(other))
    for mine, line in zip(lines(folder), lines(other), strict=True):
        assert_close(mine, line)


def assert_close(a, b):
    """Equal to 1e-6."""
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_close(a[key], b[key])
    elif isinstance(a, list):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_close(x, y)
    else:
        assert a == (pytest.approx(b, rel=1e-6, abs=1e-6) if isinstance(a, float) else b)


@pytest.fixture(scope="module")
def whole(recipe_file, tmp_path_factory):
    """An uninterrupted run of one process."""
    recipe, out = recipe_file(), tmp_path_factory.mktemp("one")
    alone("train", recipe, "--out", out, "--name", "whole")
    return recipe, out / "whole"


@pytest.fixture(scope="module")
def stopped(whole, tmp_path_factory):
    """The same run on two processes, of which one is sent SIGTERM in the first iteration."""
    recipe, _ = whole
    out = tmp_path_factory.mktemp("two")
    done = torchrun(2, "train", recipe, "--out", out, "--name", "cut", script=(BROKEN, "SIGTERM"))
    assert done.returncode == 0, done.stderr
    return out / "cut", done


def test_a_signal_to_one_process_stops_all_after_the_iteration_saved(stopped):
    folder, done = stopped
    assert final(folder)[1]["iteration"] == 1
    assert "terminated after 1 iterations" in done.stdout


def test_one_process_speaks_for_all(stopped):
    _, done = stopped
    assert done.stdout.count("iteration 1/2") == 1
    assert done.stdout.count("continue: ") == 1


def test_four_processes_give_the_weights_and_the_log_of_one(whole, tmp_path):
    recipe, folder = whole
    done = torchrun(4, "train", recipe, "--out", tmp_path, "--name", "four")
    assert done.returncode == 0, done.stderr
    assert_same(tmp_path / "four", folder)


def test_a_run_begun_on_two_processes_ends_on_one_as_if_it_had_always_been_on_one(whole, stopped):
    _, folder = whole
    cut, _ = stopped
    alone("train", "--resume", cut)
    resumed, straight = lines(cut), lines(folder)
    assert resumed[1]["evaluation"] is not None  # made up for, since the stop took its place
    assert_close(resumed, straight)
    for name, tensor in final(folder)[0].items():
        torch.testing.assert_close(final(cut)[0][name], tensor, rtol=0, atol=1e-6, msg=name)


def test_a_run_begun_on_one_process_ends_on_two(whole, tmp_path):
    recipe, folder = whole
    alone("train", recipe, "--out", tmp_path, "--name", "cut", "--iterations", "1")
    done = torchrun(2, "train", "--resume", tmp_path / "cut", "--iterations", "2")
    assert done.returncode == 0, done.stderr
    for name, tensor in final(folder)[0].items():
        torch.testing.assert_close(final(tmp_path / "cut")[0][name], tensor, rtol=0, atol=1e-6, msg=name)


def test_the_micro_batch_shows_in_neither_weights_nor_log(tmp_path):
    """On the desk's own model and settings."""
    size = ["--iterations", 2, "--prompts-per-iteration", 4, "--group-size", 8, "--eval-prompts", 8]
    for micro_batch in (4, 8, 16):
        flags = [*size, "--eval-prompts-during", 4, "--micro-batch", micro_batch, "--name", micro_batch]
        alone("train", "compose-stepwise", *flags, "--out", tmp_path)
    assert_same(tmp_path / "8", tmp_path / "4")
    assert_same(tmp_path / "16", tmp_path / "4")


def test_a_user_error_is_told_once_and_ends_every_process_with_2(recipe_file, tmp_path):
    done = torchrun(2, "train", recipe_file(prompts_per_iteration=3), "--out", tmp_path, "--name", "three")
    told = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(told) == 1, done.stderr
    assert "2 processes cannot share the 3 prompts" in told[0]
    assert done.stderr.count("exitcode  : 2 ") == 2, done.stderr
    assert not (tmp_path / "three").exists()


@pytest.mark.parametrize(("how", "shown"), [("raises", "ZeroDivisionError"), ("SIGKILL", "Signal 9 (SIGKILL)")])
def test_a_process_that_fails_ends_the_others(recipe_file, tmp_path, how, shown):
    done = torchrun(2, "train", recipe_file(), "--out", tmp_path, "--name", "run", script=(BROKEN, how))
    assert done.returncode != 0
    assert shown in done.stderr
    if how == "raises":  # its own traceback comes first, and is the only one
        assert done.stderr.count("]: Traceback") == done.stderr.count("[rank1]: Traceback") == 1
        assert done.stderr.index("ZeroDivisionError") < done.stderr.index("process 0 ends")


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"WORLD_SIZE": "2"}, "RANK is not set"),
        ({"WORLD_SIZE": "many", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "x", "MASTER_PORT": "1"}, "no number"),
        (
            {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1",
             "ACCELERATE_USE_DEEPSPEED": "true"},
            "DeepSpeed",
        ),
    ],
)  # fmt: skip
def test_an_environment_of_processes_that_cannot_be_joined_is_refused(capsys, monkeypatch, environment, words):
    from stepcredit.cli import main

    for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert main(["train", "compose-stepwise"]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert "torchrun" in error
