"""FLUX.1: packed latents, resolution-dependent grid, embedded guidance, on a tiny random pipeline."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("diffusers", minversion="0.38")

import stepcredit as sc
from stepcredit.policies import PipelineError, Policy, from_pipeline, tiny
from stepcredit.policies.diffusers_common import unpack

PROMPTS = ["a red circle above a blue square", "the word cat"]
SQUARE, WIDE = (32, 32), (24, 48)
TOLERANCE = 1e-5


@pytest.fixture
def pipe(pipes):
    return pipes["flux"]


def policy_of(pipe, size=SQUARE, guidance=3.5, **options):
    return from_pipeline(pipe, height=size[0], width=size[1], guidance_scale=guidance, **options)


@pytest.mark.parametrize("guidance", [1.0, 3.5])
@pytest.mark.parametrize(("steps", "size"), [(1, SQUARE), (4, WIDE), (10, SQUARE)])
def test_sampling_equals_the_pipeline(pipe, by_pipeline, draw, steps, size, guidance):
    policy = policy_of(pipe, size, guidance)
    latents = draw(policy.latent_shape)
    ours = sc.sample(policy, PROMPTS, noise=latents, steps=steps)
    assert ours.shape == (2, 3, *size)
    theirs = by_pipeline(pipe, PROMPTS, latents, size, steps, guidance_scale=guidance)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=TOLERANCE)


def test_sampling_equals_a_pipeline_without_embedded_guidance(by_pipeline, draw):
    pipe = tiny.flux(guidance_embeds=False)
    pipe.scheduler = type(pipe.scheduler)(shift=1.0)  # FLUX.1-schnell shifts nothing
    policy = policy_of(pipe, WIDE)
    latents = draw(policy.latent_shape)
    theirs = by_pipeline(pipe, PROMPTS, latents, WIDE, 4)
    torch.testing.assert_close(sc.sample(policy, PROMPTS, latents, steps=4), theirs, rtol=0, atol=TOLERANCE)
    assert policy.grid(4).tolist() == [1, 0.75, 0.5, 0.25, 0]


def test_shorter_text_sequences_are_the_pipeline_s_too(pipe, by_pipeline, draw):
    policy = policy_of(pipe, max_sequence_length=16)
    latents = draw(policy.latent_shape)
    theirs = by_pipeline(pipe, PROMPTS, latents, SQUARE, 2, guidance_scale=3.5, max_sequence_length=16)
    torch.testing.assert_close(sc.sample(policy, PROMPTS, latents, steps=2), theirs, rtol=0, atol=TOLERANCE)
    assert policy.encode(PROMPTS)["text"].shape[1] == 16
    assert policy_of(pipe).encode(PROMPTS)["text"].shape[1] == 512  # the pipeline's default


def test_random_pipeline_reacts_to_prompt_and_guidance(pipe, draw):
    strong, weak = policy_of(pipe), policy_of(pipe, guidance=1.0)
    x = draw(strong.latent_shape)
    one, other = (sc.sample(strong, prompts, noise=x, steps=4) for prompts in (PROMPTS, PROMPTS[::-1]))
    assert (one - other).abs().max() > 1e-3
    assert (one - sc.sample(weak, PROMPTS, noise=x, steps=4)).abs().max() > 1e-3


def test_grid_depends_on_the_resolution(pipe):
    grids = {}
    for size in (SQUARE, WIDE, (128, 256)):
        policy = policy_of(pipe, size)
        tokens = policy.latent_shape[0]
        assert tokens == size[0] * size[1] // 64
        for steps in (1, 6, 28):
            grid = policy.grid(steps)
            mu = 0.5 + (tokens - 256) * (1.15 - 0.5) / (4096 - 256)
            pipe.scheduler.set_timesteps(sigmas=torch.linspace(1, 1 / steps, steps).tolist(), mu=mu)
            assert (grid - pipe.scheduler.sigmas).abs().max() < 2e-7
            assert (sc.grids.resolution(steps, tokens) - grid).abs().max() < 1e-6
            grids[size, steps] = grid
    assert (grids[SQUARE, 6] - grids[(128, 256), 6]).abs().max() > 1e-2


def test_grid_equals_the_sigmas_of_a_call(pipe, by_pipeline, draw):
    policy = policy_of(pipe, WIDE)
    by_pipeline(pipe, PROMPTS, draw(policy.latent_shape), WIDE, 7)
    assert torch.equal(policy.grid(7), pipe.scheduler.sigmas.double())


def test_latents_are_packed_as_by_prepare_latents(pipe):
    own, image_ids = pipe.prepare_latents(2, 4, *WIDE, torch.float32, "cpu", torch.Generator().manual_seed(0))
    policy = policy_of(pipe, WIDE)
    assert policy.latent_shape == tuple(own.shape[1:]) == (18, 16)
    assert torch.equal(policy.family._image_ids, image_ids)
    assert torch.equal(unpack(own, 6, 12), pipe._unpack_latents(own, *WIDE, pipe.vae_scale_factor))


def test_unpack_by_hand():
    """One token holds a 2x2 patch, channel by channel: tokens run along rows."""
    tokens = torch.tensor([[[1.0, 2, 3, 4], [5, 6, 7, 8]]])
    assert unpack(tokens, 2, 4).tolist() == [[[[1, 2, 5, 6], [3, 4, 7, 8]]]]


def test_is_a_policy_of_one_forward(pipe, draw):
    policy = policy_of(pipe)
    assert isinstance(policy, Policy)
    assert policy.forwards_per_velocity == 1
    assert set(policy.encode(PROMPTS)) == {"text", "pooled"}
    x, t = draw(policy.latent_shape), torch.tensor([0.25, 0.5])
    with torch.no_grad():
        cond = policy.encode(PROMPTS)
        one_by_one = [
            policy.velocity(x[i : i + 1], t[i : i + 1], {k: c[i : i + 1] for k, c in cond.items()}) for i in (0, 1)
        ]
        torch.testing.assert_close(policy.velocity(x, t, cond), torch.cat(one_by_one), rtol=0, atol=1e-5)


def test_guidance_default_is_the_published_one(pipe, pipes):
    assert from_pipeline(pipe, height=32, width=32).family.guidance_scale == 3.5
    assert from_pipeline(pipes["sd3"], height=32, width=32).family.guidance_scale == 4.5


def test_half_precision_rounds_time_as_the_pipeline_does(draw):
    pipe = tiny.flux()
    policy = policy_of(pipe, precision="bf16")
    x, t = draw(policy.latent_shape), torch.tensor([0.9133, 0.9133])
    seen = {}
    pipe.transformer.register_forward_pre_hook(lambda module, args, kwargs: seen.update(kwargs), with_kwargs=True)
    with torch.no_grad():
        v = policy.velocity(x, t, policy.encode(PROMPTS))
    assert v.dtype == torch.float32
    assert seen["hidden_states"].dtype == torch.bfloat16
    assert torch.equal(seen["timestep"], torch.tensor([913.3] * 2, dtype=torch.bfloat16) / 1000)


def test_a_wrong_size_is_refused(pipe):
    with pytest.raises(PipelineError, match="width is 36; this model makes multiples of 8 pixels, for example 32"):
        policy_of(pipe, (32, 36))
