"""Qwen-Image and Z-Image: sampling is the pipeline's own, on tiny random ones."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("diffusers", minversion="0.41")

import stepcredit as sc
from stepcredit.policies import Policy, from_pipeline, lora, tiny
from stepcredit.policies.diffusers_qwen import QwenImage
from stepcredit.policies.diffusers_zimage import ZImage

PROMPTS = ["a red circle above a blue square", "the word cat"]  # of different lengths, so that one is padded
SQUARE, WIDE = (32, 32), (24, 48)
TOLERANCE = 1e-5
PLAIN = {"qwen-image": 1.0, "z-image": 0.0}
"""The scale at which each family does not guide."""


@pytest.fixture(params=list(PLAIN))
def family(request):
    return request.param


def policy_of(pipe, size=SQUARE, guidance=4.0, **options):
    return from_pipeline(pipe, height=size[0], width=size[1], guidance_scale=guidance, **options)


def options_of(family, guidance):
    """How the pipeline's own call names its guidance."""
    if family == "z-image":
        return {"guidance_scale": guidance}
    return {"true_cfg_scale": guidance, "negative_prompt": [" ", " "]}


@pytest.mark.parametrize("guided", [False, True])
@pytest.mark.parametrize(("steps", "size"), [(2, SQUARE), (5, WIDE)])
def test_sampling_equals_the_pipeline(pipes, family, by_pipeline, draw, steps, size, guided):
    pipe, guidance = pipes[family], 4.0 if guided else PLAIN[family]
    policy = policy_of(pipe, size, guidance)
    assert isinstance(policy, Policy)
    assert policy.forwards_per_velocity == (2 if guided else 1)
    latents = draw(policy.latent_shape)
    ours = sc.sample(policy, PROMPTS, noise=latents, steps=steps)
    theirs = by_pipeline(pipe, list(PROMPTS), latents, size, steps, **options_of(family, guidance))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=TOLERANCE)
    assert torch.equal(policy.grid(steps), pipe.scheduler.sigmas.double())


def test_random_pipelines_react_to_prompt_and_guidance(pipes, family, draw):
    guided, plain = policy_of(pipes[family]), policy_of(pipes[family], guidance=PLAIN[family])
    x = draw(guided.latent_shape)
    one, other = (sc.sample(guided, prompts, noise=x, steps=2) for prompts in (PROMPTS, PROMPTS[::-1]))
    assert (one - other).abs().max() > 50 * TOLERANCE
    assert (one - sc.sample(plain, PROMPTS, noise=x, steps=2)).abs().max() > 50 * TOLERANCE


def test_latents_are_those_of_prepare_latents(pipes, family):
    own = pipes[family].prepare_latents(2, 4, *WIDE, torch.float32, "cpu", torch.Generator().manual_seed(0))
    assert policy_of(pipes[family], WIDE).latent_shape == tuple(own.shape[1:])


def test_padding_of_the_text_changes_nothing(pipes, family, draw):
    policy = policy_of(pipes[family])
    x, t = draw(policy.latent_shape)[:1], torch.tensor([0.6])
    alone = policy.encode(PROMPTS[1:])
    padded = {name: tensor[1:] for name, tensor in policy.encode(PROMPTS).items()}
    assert padded["text"].shape[1] > alone["text"].shape[1]
    with torch.no_grad():
        torch.testing.assert_close(
            policy.velocity(x, t, alone), policy.velocity(x, t, padded), rtol=0, atol=2 * TOLERANCE
        )


def test_guidance_formulas_by_hand():
    c, u = torch.tensor([[[3.0, 4.0]]]), torch.tensor([[[3.0, 0.0]]])
    # Qwen-Image: u + 2 (c - u) = (3, 8), brought back to the length 5 of c. Z-Image: c + 2 (c - u) = (3, 12).
    qwen = QwenImage.combine(fake(guidance_scale=2.0), c, u)
    torch.testing.assert_close(qwen, torch.tensor([[[3.0, 8.0]]]) * 5 / 73**0.5)
    assert ZImage.combine(fake(guidance_scale=2.0), c, u).tolist() == [[[3, 12]]]


def fake(**fields):
    return type("Fake", (), fields)()


def test_one_image_after_training_and_export(family, tmp_path, recwarn):
    policy = policy_of(tiny.build(family), guidance=PLAIN[family], lora=lora.LoraSpec(2, 4))
    x, t, cond = torch.randn(2, *policy.latent_shape), torch.tensor([0.9, 0.4]), policy.encode(PROMPTS)
    before = policy.reference_velocity(x, t, cond)
    optimiser = torch.optim.SGD([weight for _, weight in policy.named_parameters()], lr=10.0)
    policy.velocity(x, t, cond).square().mean().backward()
    optimiser.step()
    assert torch.equal(policy.reference_velocity(x, t, cond), before)
    assert not torch.equal(policy.velocity(x, t, cond), before)
    lora.save(policy.pipe.transformer, tmp_path)
    assert lora.image_difference(policy, tmp_path, PROMPTS, steps=2) == 0
