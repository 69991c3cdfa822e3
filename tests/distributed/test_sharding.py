"""A transformer shared out between two processes: the same run as on one that holds it whole, saved whole."""

import shutil
from pathlib import Path

import pytest
import torch
from launching import alone, final, lines, torchrun

from stepcredit.errors import UserError
from stepcredit.policies import tiny
from stepcredit.training import checkpoint, models
from stepcredit.training import recipe as recipes
from stepcredit.training.export import export_run

pytest.importorskip("diffusers")

REPORT = Path(__file__).parent / "report_shards.py"
FAMILIES = Path(__file__).parent / "family_shards.py"
BROKEN = Path(__file__).parent / "broken_reward.py"
KEYS = {
    "task": "ocr",
    "model": "tiny:sd3",
    "reward": "jpeg_size",
    "resolution": 32,
    "precision": "fp32",
    "max_sequence_length": 16,
    "lora_rank": 2,
    "lora_alpha": 4.0,
    "prompts_per_iteration": 4,
    "group_size": 4,
    "micro_batch": 4,
    "steps": 3,
    "window": None,
    "kl_beta": 0.01,
    "iterations": 2,
    "eval_prompts": 6,
    "eval_prompts_during": 4,
    "eval_every": 1,
    "checkpoint_every": 1,
    "lr": 1e-3,
    "lr_schedule": "constant",
}
FULL = {"tuning": "full", "gradient_checkpointing": True, "grad_clip": 0.02}
"""Gradients are clipped: their norm is about .07."""


def recipe_file(folder, name="recipe", **keys):
    path = folder / f"{name}.yaml"
    path.write_text(recipes.dump(recipes.load("compose-stepwise", {**KEYS, **keys})))
    return path


def at(folder, iteration):
    """All tensors of a checkpoint, by group and name."""
    saved = checkpoint.read(folder / "checkpoints" / f"step-{iteration:06d}")
    return {f"{group}/{name}": t for group, named in saved.tensors.items() for name, t in named.items()}


def assert_equal(tensors, others, atol=0.0):
    assert tensors.keys() == others.keys()
    for name, tensor in tensors.items():
        torch.testing.assert_close(tensor, others[name], rtol=0, atol=atol, msg=name)


def assert_close(a, b, rel):
    """Numbers of a log, to a relative difference."""
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_close(a[key], b[key], rel)
    elif isinstance(a, list):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_close(x, y, rel)
    else:
        assert a == (pytest.approx(b, rel=rel, abs=1e-7) if isinstance(a, float) else b)


def cut_after_the_first_iteration(folder, to):
    """A copy of a run that was killed after its first checkpoint."""
    shutil.copytree(folder, to, symlinks=True)
    shutil.rmtree(to / "checkpoints" / "step-000002")
    return to


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    """Full tuning with a KL penalty, shared between two processes: the run, and the launcher's process."""
    out = tmp_path_factory.mktemp("full")
    recipe = recipe_file(out, shard=True, **FULL)
    done = torchrun(2, "train", recipe, "--out", out, "--name", "shared", script=(REPORT,))
    assert done.returncode == 0, done.stderr
    return out / "shared", done


@pytest.fixture(scope="module")
def unshared(tmp_path_factory):
    """The same on one process."""
    out = tmp_path_factory.mktemp("unshared")
    alone("train", recipe_file(out, **FULL), "--out", out, "--name", "whole")
    return out / "whole"


def held(stdout, name):
    """By process: held and all of the base, held and all of the adapters."""
    rows = [line.split()[1:] for line in stdout.splitlines() if line.startswith("HELD ")]
    return {int(rank): [int(number) for number in numbers] for kind, rank, *numbers in rows if kind == name}


@pytest.mark.parametrize("name", ["transformer", "reference"])
def test_each_process_holds_about_half_of_what_is_shared(full, name):
    first, second = held(full[1].stdout, name).values()
    assert first[1] == second[1] == first[0] + second[0] > 100_000
    assert first[0] == pytest.approx(first[1] / 2, rel=0.01)  # a layer of odd size has a smaller half


def test_a_shared_update_is_that_of_a_whole_model(full, unshared):
    """Weights, averages and moments; the log, and the evaluation of the averaged weights."""
    shared = full[0]
    assert_equal(at(shared, 1), at(unshared, 1), atol=2e-6)
    mine, theirs = lines(shared)[:2], lines(unshared)[:2]
    assert mine[1]["grad_norm"] > 2 * FULL["grad_clip"]
    moved = abs(theirs[1]["evaluation"]["mean"] - theirs[0]["evaluation"]["mean"])
    assert mine[1].pop("evaluation")["mean"] == pytest.approx(theirs[1].pop("evaluation")["mean"], abs=moved / 20)
    assert_close(mine, theirs, rel=1e-5)


def test_weights_that_were_set_are_those_that_are_gathered_next(full):
    """Sampled just after an evaluation of the averaged weights, and replayed in an update."""
    assert [line["ratio_deviation_max"] for line in lines(full[0])[1:]] == [0, 0]


def test_what_a_shared_run_saves_is_whole(full, unshared):
    (tensors, _), (theirs, _) = final(full[0]), final(unshared)
    assert {name: (t.shape, t.dtype) for name, t in tensors.items()} == {
        name: (t.shape, t.dtype) for name, t in theirs.items()
    }


def test_a_shared_run_resumes_exactly(full, tmp_path):
    shared = full[0]
    cut = cut_after_the_first_iteration(shared, tmp_path / "cut")
    done = torchrun(2, "train", "--resume", cut)
    assert done.returncode == 0, done.stderr
    assert_equal(final(cut)[0], final(shared)[0])
    assert final(cut)[1] == final(shared)[1]
    assert lines(cut) == lines(shared)


def test_a_shared_run_resumes_whole_on_one_process(full, tmp_path, capsys):
    shared = full[0]
    cut = cut_after_the_first_iteration(shared, tmp_path / "cut")
    alone("train", "--resume", cut)
    assert "shard: there is one process" in capsys.readouterr().out
    assert lines(cut)[:2] == lines(shared)[:2]
    assert lines(cut)[2]["grad_norm"] == pytest.approx(lines(shared)[2]["grad_norm"], rel=1e-2)
    # a rounded picture may score otherwise, and AdamW then moves a weight by at most twice the learning rate
    assert_equal(at(cut, 2), at(shared, 2), atol=2 * KEYS["lr"])


def test_lora_over_a_shared_base_gives_the_bits_of_one_process_and_a_whole_adapter(tmp_path):
    """Also with the rollout's graphs retained while blocks are gathered and freed."""
    recipe = recipe_file(tmp_path)
    alone("train", recipe, "--out", tmp_path, "--name", "whole")
    cut = cut_after_the_first_iteration(tmp_path / "whole", tmp_path / "cut")
    done = torchrun(2, "train", "--resume", cut, "--shard", "--replay", "retain", script=(REPORT,))
    assert done.returncode == 0, done.stderr
    for base, all_of_base, adapters, all_adapters in held(done.stdout, "transformer").values():
        assert base == pytest.approx(all_of_base / 2, rel=0.01)
        assert adapters == all_adapters > 0
    assert_equal(final(cut)[0], final(tmp_path / "whole")[0])
    assert lines(cut) == lines(tmp_path / "whole")
    assert export_run(cut, tmp_path / "out").difference == 0


def test_every_family_computes_the_same_when_it_is_shared():
    """Velocity and reference to the last bit, and so the gradients of adapters; those of all weights to rounding."""
    done = torchrun(2, script=(FAMILIES,))
    assert done.returncode == 0, done.stderr
    compared = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("COMPARED ")]
    assert {family for family, *_ in compared} == set(tiny.BUILDERS)
    for family, tuning, precision, equal, gradients, worst in compared:
        assert (equal, int(gradients) >= 30) == ("1", True), (family, tuning, precision)
        assert float(worst) <= (1e-5 if tuning == "full" else 0), (family, tuning, precision)


def test_a_process_that_fails_beside_a_shared_transformer_ends_the_other(tmp_path):
    """Its traceback is the only one, though the other waits for its part of a block."""
    recipe = recipe_file(tmp_path, shard=True)
    done = torchrun(2, "train", recipe, "--out", tmp_path, "--name", "run", script=(BROKEN, "raises"))
    assert done.returncode != 0
    assert done.stderr.count("]: Traceback") == done.stderr.count("[rank1]: Traceback") == 1
    assert done.stderr.index("ZeroDivisionError") < done.stderr.index("process 0 ends: another process has ended")


def test_windows_that_give_processes_unequal_numbers_of_calls_are_refused():
    with pytest.raises(UserError, match="windows drawn by window_size 1 do not give"):
        recipes.build({**KEYS, "window_size": 1, "shard": True})


def test_a_desk_model_is_not_shared():
    with pytest.raises(UserError, match="shard = True is for diffusers pipelines"):
        models.sketch(recipes.load("compose-stepwise", {"shard": True}))
