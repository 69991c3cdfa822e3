"""`offload: idle` in a run: the same numbers, networks that come when they are needed, a smaller plan, refusals."""

import pytest
import torch
from torch import nn

from stepcredit.errors import UserError
from stepcredit.policies.placement import Placement
from stepcredit.training import checkpoint, iteration, models
from stepcredit.training import recipe as recipes
from stepcredit.training.evaluation import evaluate
from stepcredit.training.setup import setup
from stepcredit.training.state import fresh
from stepcredit.training.telemetry import make_display
from stepcredit.training.trainer import train

pytest.importorskip("diffusers")

SMALL = {
    "task": "ocr",
    "reward": "tiny_pickscore",
    "model": "tiny:sd3",
    "resolution": 32,
    "max_sequence_length": 16,
    "precision": "fp32",
    "prompts_per_iteration": 2,
    "group_size": 4,
    "micro_batch": 2,
    "steps": 3,
    "iterations": 1,
    "eval_prompts": 4,
    "eval_prompts_during": 2,
}
SD35 = {"task": "pickscore", "model": "stabilityai/stable-diffusion-3.5-medium", "micro_batch": 2, "decode_batch": 2,
        "prompts_per_iteration": 48, "group_size": 24, "gradient_checkpointing": True}  # fmt: skip


def recipe(**keys):
    return recipes.build({**SMALL, **keys})


def test_the_numbers_are_the_same(tmp_path):
    weights = {}
    for offload in ("none", "idle"):
        train(recipe(offload=offload), tmp_path / offload, make_display(quiet=True))
        weights[offload] = checkpoint.load(tmp_path / offload / "checkpoints").tensors["weights"]
    assert any(bool((tensor != 0).any()) for name, tensor in weights["none"].items() if ".lora_B." in name)
    assert weights["none"].keys() == weights["idle"].keys()
    assert all(torch.equal(tensor, weights["idle"][name]) for name, tensor in weights["none"].items())


class Counted(Placement):
    """Counts how often each network was sent for."""

    def __init__(self):
        super().__init__(torch.device("cpu"))
        self.sent: dict[nn.Module, int] = {}

    def visit(self, networks):
        networks = list(networks)
        for network in networks:
            self.sent[network] = self.sent.get(network, 0) + (network not in self._visits)
        return super().visit(networks)


def test_the_autoencoder_comes_once_to_the_scoring_of_a_cell_and_once_to_an_evaluation(monkeypatch):
    place = Counted()
    monkeypatch.setattr(models, "placement", lambda recipe, device: place)
    parts = setup(recipe(offload="idle"))
    pipe = parts.policy.pipe
    place.sent.clear()
    iteration.iterate(parts, fresh(parts.policy, parts.recipe), lambda *_: None)
    cells = len(parts.cells(parts.batch(1)[1])[0])
    assert cells == 2
    assert place.sent[pipe.vae] == cells  # each decodes 12 images or more, two at a time
    assert place.sent[pipe.text_encoder] == place.sent[pipe.text_encoder_3] == cells
    place.sent.clear()
    evaluate(parts.policy, parts.reward, parts.heldout, 2, 1)
    assert place.sent[pipe.vae] == 1
    assert place.sent[pipe.text_encoder] == 4  # one batch after the other


def test_a_plan_counts_what_is_on_the_gpu():
    def of(**keys):
        return setup(recipes.build({**SD35, **keys}), weights=False).budget

    resident, idle = of(), of(offload="idle")
    # by hand: 5.580 B of encoders in fp16, 83.8 M of VAE and 3.8 GiB of PickScore in fp32
    encoders, vae = 2 * 5.580e9 / 2**30, 4 * 0.0838e9 / 2**30
    assert resident.weights_gib - idle.weights_gib == pytest.approx(encoders + vae, rel=2e-3)
    assert (resident.visitors_gib, resident.reward_gib, idle.reward_gib) == (0, 3.8, 0)
    assert idle.visitors_gib == pytest.approx(vae + 3.8, rel=1e-3)
    # nothing trains while prompts are encoded, the encoders being larger than decoding with its visitors
    assert encoders > idle.decoding_gib + idle.visitors_gib > idle.activations_gib
    held = idle.weights_gib + idle.training_state_gib + idle.trajectories_gib
    assert idle.peak_gib == pytest.approx((held + encoders) * 1.1 + 0.8, rel=1e-3)
    cached = of(offload="idle", embedding_cache="auto")
    assert cached.peak_gib < min(idle.peak_gib, of(embedding_cache="auto").peak_gib + 0.1)


def test_on_a_cpu_nothing_would_be_gained():
    with pytest.raises(UserError, match=r"offload 'idle'.*the device is the CPU"):
        setup(recipes.build({**SD35, "offload": "idle", "device": "cpu"}))


def test_a_desk_model_has_nothing_to_offload():
    with pytest.raises(UserError, match="offload = 'idle' is for diffusers pipelines"):
        setup(recipes.build({"task": "compose", "offload": "idle"}))
