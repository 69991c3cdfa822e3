"""Commands that must give one trajectory: other numbers for how it is computed, the same for what is computed."""

import json

import pytest
import torch

from stepcredit import rollout
from stepcredit.cli import main
from stepcredit.policies.desk import DeskPolicy
from stepcredit.training import checkpoint
from stepcredit.training import recipe as recipes

CLOCKS = ("seconds", "phase_seconds", "memory_mb")
KEYS = {
    "reward": "jpeg_size", "iterations": 3, "prompts_per_iteration": 4, "group_size": 4, "micro_batch": 4, "steps": 5,
    "window": (1, 4), "eval_prompts": 8, "eval_prompts_during": 6, "eval_every": 2, "checkpoint_every": 1, "lr": 1e-3,
    "kl_beta": 0.01, "lr_schedule": "constant",
}  # fmt: skip


@pytest.fixture(scope="module")
def recipe_file(tmp_path_factory):
    """A recipe of a random desk model; its window leaves out the first step, which members of a prompt share."""
    policy = DeskPolicy.initial("compose", seed=1, hidden=16, depth=1, heads=2, height=24, width=24)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for _, parameter in policy.named_parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    folder = tmp_path_factory.mktemp("recipe")
    policy.save(folder / "tiny.safetensors")
    recipe = recipes.load("compose-stepwise", {**KEYS, "model": str(folder / "tiny.safetensors")})
    (folder / "recipe.yaml").write_text(recipes.dump(recipe))
    return folder / "recipe.yaml"


def train(out, *arguments):
    assert main(["train", *map(str, arguments), "--quiet", "--out", str(out)]) == 0


def outcome(folder):
    """All tensors of the newest checkpoint in one, and the log without clocks."""
    groups = checkpoint.load(folder / "checkpoints").tensors
    tensors = {f"{group}/{name}": tensor for group, named in groups.items() for name, tensor in named.items()}
    entries = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return tensors, [{key: value for key, value in entry.items() if key not in CLOCKS} for entry in entries]


@pytest.fixture(scope="module")
def whole(recipe_file, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs")
    train(out, recipe_file, "--name", "whole")
    return outcome(out / "whole")


def assert_same(found, expected):
    """To the last bit."""
    assert found[1] == expected[1]
    assert found[0].keys() == expected[0].keys()
    assert all(torch.equal(tensor, expected[0][name]) for name, tensor in found[0].items())


def assert_close(found, expected):
    """Up to the order of floating-point sums: 1e-6 in every tensor, 1e-4 of every number of the log."""
    assert found[0].keys() == expected[0].keys()
    for name, tensor in found[0].items():
        torch.testing.assert_close(tensor, expected[0][name], rtol=1e-5, atol=1e-6, msg=name)
    assert len(found[1]) == len(expected[1])
    for mine, theirs in zip(found[1], expected[1], strict=True):
        assert mine.keys() == theirs.keys()
        for key in ("reward", "R_mean", "gain_mean", "advantage_abs", "kl", "grad_norm", "evaluation"):
            near(mine.get(key), theirs.get(key))


def near(a, b):
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            near(a[key], b[key])
    elif isinstance(a, list):
        for x, y in zip(a, b, strict=True):
            near(x, y)
    else:
        assert a == (pytest.approx(b, rel=1e-4, abs=1e-6) if isinstance(b, float) else b)


@pytest.mark.parametrize("micro_batch", [8, 16])
def test_gradient_accumulation(recipe_file, whole, tmp_path, micro_batch):
    train(tmp_path, recipe_file, "--name", "run", "--micro-batch", micro_batch)
    assert_close(outcome(tmp_path / "run"), whole)


def test_graphs_retained_or_recomputed(recipe_file, whole, tmp_path):
    train(tmp_path, recipe_file, "--name", "run", "--replay", "retain")
    assert_same(outcome(tmp_path / "run"), whole)


@pytest.mark.parametrize("replay", ["recompute", "retain"])
def test_resume_points(recipe_file, whole, tmp_path, replay):
    """Cut after its first iteration; continued as it was begun, or with the other replay."""
    train(tmp_path, recipe_file, "--name", "run", "--iterations", 1)
    train(tmp_path, "--resume", tmp_path / "run", "--iterations", 3, "--replay", replay)
    assert_same(outcome(tmp_path / "run"), whole)


def test_a_shared_prefix_is_what_each_member_would_compute(recipe_file, whole, tmp_path, monkeypatch):
    original, shared, own = rollout.layout, [], []

    def alone(root, noisy):
        shared.append(original(root, noisy))
        own.append(original(torch.arange(len(root)), noisy))
        return own[-1]

    monkeypatch.setattr(rollout, "layout", alone)
    train(tmp_path, recipe_file, "--name", "run")
    assert sum(tree.rows(1) for tree in own) == 4 * sum(tree.rows(1) for tree in shared)
    mine, theirs = outcome(tmp_path / "run"), whole
    assert mine[1][1]["model_evaluations"] > theirs[1][1]["model_evaluations"]
    assert_close(mine, theirs)


def test_what_is_computed_does_change_the_outcome(recipe_file, whole, tmp_path):
    """The comparisons above can fail: another seed, or members that start apart, end elsewhere."""
    for flags in (("--seed", 1), ("--no-shared-noise",)):
        train(tmp_path, recipe_file, "--name", "run" + flags[0], *flags)
        with pytest.raises(AssertionError):
            assert_close(outcome(tmp_path / ("run" + flags[0])), whole)
