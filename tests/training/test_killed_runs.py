"""Runs under kill -9: resumed each time, they end with the bits of a run that nobody killed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from run_cases import KEYS, assert_equal, final, lines, run

from stepcredit.training import checkpoint
from stepcredit.training import recipe as recipes

LORA = {
    "task": "ocr", "model": "tiny:sd3", "reward": "jpeg_size", "resolution": 32, "precision": "fp32",
    "max_sequence_length": 16, "lora_rank": 2, "lora_alpha": 4.0, "group_size": 2, "micro_batch": 2, "steps": 3,
    "eval_prompts": 4, "eval_prompts_during": 2, "kl_beta": 0.01,
}  # fmt: skip


KILLS = {"desk": (20, 1, 20), "lora": (8, 3, 8)}
"""Iterations, one in how many kinds of act to be killed at, random moments."""


@pytest.fixture(scope="module", params=KILLS)
def killed(request, tmp_path_factory, tiny_model):
    """A recipe, the folder of its runs, and what was done to them."""
    iterations, one_in, moments = KILLS[request.param]
    if request.param == "lora":
        pytest.importorskip("diffusers")
    keys = {**KEYS, "model": str(tiny_model), **(LORA if request.param == "lora" else {}), "iterations": iterations}
    recipe, folder = recipes.load("compose-stepwise", keys), tmp_path_factory.mktemp(request.param)
    (folder / "recipe.yaml").write_text(recipes.dump(recipe))
    program = [sys.executable, str(Path(__file__).with_name("kill_cases.py")), str(folder / "recipe.yaml"), str(folder)]
    done = subprocess.run(
        [*program, str(one_in), str(moments)],
        check=True, stdout=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=400,
    )  # fmt: skip
    return recipe, folder, json.loads(done.stdout.splitlines()[-1])


def as_written(folder):
    """Bytes of the newest checkpoint's tensors, and the log without clocks."""
    latest = folder / "checkpoints" / "latest"
    return {path.name: path.read_bytes() for path in latest.glob("*.safetensors")}, lines(folder)


def test_the_kills_came_before_every_kind_of_act(killed):
    recipe, _, told = killed
    acts = set(told["acts"])
    if recipe.task != "compose":
        assert len([act for act in acts if act.startswith("step-N.tmp: ")]) >= 8
        return
    for name in ("weights.safetensors", "ema.safetensors", "optimizer.safetensors", "state.json", "manifest.json"):
        assert {f"step-N.tmp: {act} {name}" for act in ("open", "write", "fsync", "unlink")} <= acts
    assert acts >= {
        *("step-N.tmp: rename step-N.tmp to step-N", "step-N.tmp: rename latest.tmp to latest"),
        *("step-N.tmp: rename best.tmp to best", "step-N.tmp: rename step-N to step-N.tmp"),
        *("step-N.tmp: rmdir step-N.tmp", "run: rename recipe.yaml", "run: write metrics.jsonl"),
        *("run: rename iteration-N.jsonl", "run: rename metrics.jsonl", "run: rename summary.json"),
    }


def test_a_run_killed_and_resumed_ends_with_the_same_bits(killed):
    _, folder, told = killed
    summary = json.loads((folder / "whole" / "summary.json").read_text())
    for name in ("acts", *(f"clock-{k}" for k in range(told["clocks"]))):
        assert as_written(folder / name) == as_written(folder / "whole")
        assert_equal(final(folder / name), final(folder / "whole"))
        found = json.loads((folder / name / "summary.json").read_text())
        for key in ("reward_before", "reward_after", "improvement", "image_statistics", "best_iteration", "guards"):
            assert found[key] == summary[key]
        assert not list((folder / name / "checkpoints").glob("*.tmp"))


def test_it_is_the_state_that_was_carried_over_and_not_a_cold_start(killed, tmp_path):
    """The last two iterations from the base model, as a resume that lost its state would make them, end elsewhere."""
    recipe, folder, _ = killed
    run(recipe.model_copy(update={"iterations": 2}), tmp_path / "cold")
    carried = checkpoint.load(folder / "acts" / "checkpoints")
    assert carried.iteration == recipe.iterations
    for group in ("weights", "ema", "optimizer"):
        cold = final(tmp_path / "cold")[group]
        assert any(not torch.equal(tensor, cold[name]) for name, tensor in carried.tensors[group].items())
    trained = carried.tensors["weights"]
    assert recipe.task == "compose" or all(".lora_" in name for name in trained)
