"""Half precision: gradients must survive the network, and leave it unscaled."""

import pytest
import torch

from stepcredit.training import recipe as recipes
from stepcredit.training.iteration import iterate
from stepcredit.training.setup import setup
from stepcredit.training.state import fresh
from stepcredit.training.update import loss_scale

pytest.importorskip("diffusers")

KEYS = {
    "task": "pickscore",
    "reward": "jpeg_size",
    "model": "tiny:sd3",
    "resolution": 32,
    "max_sequence_length": 16,
    "lora_rank": 4,
    "prompts_per_iteration": 2,
    "group_size": 2,
    "micro_batch": 4,
    "steps": 3,
    "credit": "uniform",
    "advantage": "group",
    "iterations": 1,
    "eval_prompts": 4,
    "eval_prompts_during": 2,
    "lr": 1e-3,
}


def first_update(precision):
    """One iteration: its line of the log, and how the adapters moved (AdamW's first step is -lr sign(gradient))."""
    parts = setup(recipes.build({**KEYS, "precision": precision}))
    state = fresh(parts.policy, parts.recipe)
    before = {name: p.detach().clone() for name, p in state.parameters.items()}
    line = iterate(parts, state, lambda *_: None)
    moved = torch.cat([(p.detach() - before[n]).flatten() for n, p in state.parameters.items() if ".lora_B." in n])
    return line, moved


def test_loss_scale_by_hand():
    assert loss_scale(torch.float32, 8112, 65536) == loss_scale(torch.bfloat16, 8112, 65536) == 1.0
    assert loss_scale(torch.float16, 64, 64) == 64.0
    assert loss_scale(torch.float16, 1, 1) == 1.0
    scale = loss_scale(torch.float16, 8112, 65536)
    assert scale == 2.0**23  # 8112 * 65536 / 64 = 8.3e6, and 2^23 = 8.4e6
    assert 1 / (8112 * 65536) < 2.0**-24 < scale / (8112 * 65536)  # below float16's smallest before, far above it after


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_half_precision_learns_what_single_precision_learns(precision):
    single, wanted = first_update("fp32")
    half, moved = first_update(precision)
    assert half["ratio_deviation"] == 0
    assert half["grad_norm"] == pytest.approx(single["grad_norm"], rel=0.2)
    assert float((moved.sign() == wanted.sign()).double().mean()) > 0.8


def test_without_the_scale_the_gradient_vanishes(monkeypatch):
    """What the scale is for: with this batch as faint as one of 8112 pairs and 65536 dimensions, nothing is left.

    12 pairs of 256 dimensions here, so 2^-17 is the factor between the two.
    """
    from stepcredit.training import iteration

    monkeypatch.setattr(iteration, "loss_scale", lambda *_: 2.0**-17)
    assert first_update("fp16")[0]["grad_norm"] == 0.0
