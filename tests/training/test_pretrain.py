"""The base models: their loss falls, their making is deterministic, and the shipped ones are as documented."""

from dataclasses import replace

import pytest
import torch

from stepcredit import rewards, tasks
from stepcredit.policies.desk import DeskPolicy, read_metadata
from stepcredit.training.evaluation import evaluate, slots
from stepcredit.training.pretrain import CONFIGS, PretrainConfig, flow_matching_loss, metadata, pretrain

TINY = {"steps": 120, "batch": 16, "hidden": 32, "depth": 1, "heads": 2, "warmup": 5, "evaluate_every": 0}
TINY |= {"evaluate_prompts": 6}
SMALL = replace(CONFIGS["compose"], **TINY)


@pytest.mark.parametrize("task", ["compose", "spell"])
def test_the_loss_falls_and_the_weights_are_a_function_of_the_seed(task):
    small = replace(CONFIGS[task], **TINY)
    losses = []
    first = pretrain(small, lambda progress: losses.append(progress.loss))
    assert losses[-1] < 0.8 * losses[0]
    again = pretrain(small)
    for (_, a), (_, b) in zip(first.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_perfect_velocity_has_no_loss(monkeypatch):
    """v = x_1 - x_0 exactly: recovered from x_t, t and the known picture."""
    policy = DeskPolicy.initial("compose", height=24, width=24)
    prompts = tasks.draw(tasks.get("compose").train(), 16, "test")
    seen = {}

    def perfect(x, t, cond):
        return (x - seen["x_0"]) / t.view(-1, 1, 1, 1)

    import stepcredit.training.pretrain as module

    original, *size = module._RENDERERS["compose"]

    def remember(prompts, seed):
        pictures = original(prompts, seed)
        seen["x_0"] = 2 * pictures - 1
        return pictures

    monkeypatch.setitem(module._RENDERERS, "compose", (remember, *size))
    monkeypatch.setattr(policy, "velocity", perfect)
    assert float(flow_matching_loss(policy, prompts, SMALL, 0)) < 1e-6


@pytest.mark.parametrize("bad", [{"steps": 0}, {"batch": 0}])
def test_bad_settings_are_refused(bad):
    with pytest.raises(ValueError, match="at least 1"):
        pretrain(PretrainConfig(**{"steps": 5, "batch": 2, **bad}))


def test_the_shipped_base_is_as_documented():
    """40-65 % of held-out prompts exact: good enough to learn from, with room to improve."""
    policy = DeskPolicy.pretrained("compose")
    heldout = slots(tasks.draw(tasks.get("compose").heldout(), 300, "heldout"))
    result = evaluate(policy, rewards.get("compose"), heldout, steps=10, micro_batch=100)
    assert 0.35 < result.exact_rate.mean < 0.70


@pytest.mark.parametrize("task", CONFIGS)
def test_the_shipped_bases_name_the_command_and_the_settings_that_made_them(task):
    from importlib import resources

    with resources.as_file(resources.files("stepcredit") / "assets" / f"{task}.safetensors") as path:
        header = read_metadata(path)
    assert metadata(CONFIGS[task]).items() <= header.items()
    assert header["command"] == f"stepcredit pretrain {task}"


def test_all_shipped_weights_together_stay_small():
    from importlib import resources

    files = [entry for entry in (resources.files("stepcredit") / "assets").iterdir() if entry.is_file()]
    assert sum(len(entry.read_bytes()) for entry in files) < 12e6
