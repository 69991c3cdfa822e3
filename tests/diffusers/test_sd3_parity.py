"""SD3: sampling, grid, guidance and decoding are the pipeline's own, on a tiny random one."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

pytest.importorskip("diffusers", minversion="0.38")

import stepcredit as sc
from stepcredit.policies import PipelineError, Policy, family_of, from_pipeline, tiny, tiny_text
from stepcredit.policies.diffusers_common import decode_kl

PROMPTS = ["a red circle above a blue square", "the word cat"]
SQUARE, WIDE = (32, 32), (24, 48)
TOLERANCE = 1e-5


@pytest.fixture
def pipe(pipes):
    return pipes["sd3"]


def policy_of(pipe, size=SQUARE, guidance=4.5, **options):
    return from_pipeline(pipe, height=size[0], width=size[1], guidance_scale=guidance, **options)


@pytest.mark.parametrize("guidance", [1.0, 4.5])
@pytest.mark.parametrize(("steps", "size"), [(1, SQUARE), (4, WIDE), (10, SQUARE)])
def test_sampling_equals_the_pipeline(pipe, by_pipeline, draw, steps, size, guidance):
    policy = policy_of(pipe, size, guidance)
    latents = draw(policy.latent_shape)
    ours = sc.sample(policy, PROMPTS, noise=latents, steps=steps)
    assert ours.shape == (2, 3, *size)
    assert ours.dtype == torch.float32
    theirs = by_pipeline(pipe, PROMPTS, latents, size, steps, guidance_scale=guidance)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=TOLERANCE)


def test_latents_are_those_of_prepare_latents(pipe):
    own = pipe.prepare_latents(2, 4, *WIDE, torch.float32, "cpu", torch.Generator().manual_seed(0))
    assert policy_of(pipe, WIDE).latent_shape == tuple(own.shape[1:]) == (4, 6, 12)


def test_random_pipeline_reacts_to_prompt_and_guidance(pipe, draw):
    """Without this, parity would prove nothing about encoding and guidance."""
    guided, plain = policy_of(pipe), policy_of(pipe, guidance=1.0)
    x = draw(guided.latent_shape)
    one, other = (sc.sample(guided, prompts, noise=x, steps=4) for prompts in (PROMPTS, PROMPTS[::-1]))
    assert (one - other).abs().max() > 1e-2
    assert (one - sc.sample(plain, PROMPTS, noise=x, steps=4)).abs().max() > 1e-2


def test_grid_is_the_scheduler_s(pipe):
    published = [1, 0.9601, 0.9133, 0.8577, 0.7904, 0.7073, 0.6022, 0.4649, 0.2780, 0.0089, 0]
    grid = policy_of(pipe).grid(10)
    assert grid.dtype == torch.float64
    assert grid.tolist() == pytest.approx(published, abs=5e-5)
    for steps in (1, 4, 10, 40):
        pipe.scheduler.set_timesteps(steps)
        assert torch.equal(policy_of(pipe).grid(steps), pipe.scheduler.sigmas.double())
        assert (sc.grids.shifted(steps, 3.0) - policy_of(pipe).grid(steps)).abs().max() < 1e-6


def test_asking_for_a_grid_leaves_the_scheduler_alone(pipe):
    pipe.scheduler.set_timesteps(7)
    policy_of(pipe).grid(3)
    assert len(pipe.scheduler.timesteps) == 7


def test_dynamic_shift_of_the_scheduler_counts(by_pipeline, draw):
    pipe = tiny.sd3(seed=1)
    pipe.scheduler.register_to_config(use_dynamic_shifting=True, max_shift=1.16)
    policy = policy_of(pipe, WIDE, 1.0)
    latents = draw(policy.latent_shape)
    theirs = by_pipeline(pipe, PROMPTS, latents, WIDE, 4, guidance_scale=1.0)
    assert torch.equal(policy.grid(4), pipe.scheduler.sigmas.double())
    torch.testing.assert_close(sc.sample(policy, PROMPTS, latents, steps=4), theirs, rtol=0, atol=TOLERANCE)


def test_is_a_policy(pipe):
    guided, plain = policy_of(pipe), policy_of(pipe, guidance=1.0)
    assert isinstance(guided, Policy)
    assert (guided.forwards_per_velocity, plain.forwards_per_velocity) == (2, 1)
    assert guided.name == "sd3:tiny-sd3-0"
    assert {len(tensor) for tensor in guided.encode(PROMPTS).values()} == {2}
    assert not any(tensor.requires_grad for tensor in guided.encode(PROMPTS).values())
    assert list(guided.named_parameters()) == []


def test_velocity_is_one_forward_at_a_thousand_t(pipe, draw):
    policy = policy_of(pipe, guidance=1.0)
    x, cond = draw(policy.latent_shape), policy.encode(PROMPTS)
    with torch.no_grad():
        expected = pipe.transformer(
            hidden_states=x,
            timestep=torch.tensor([250.0, 500.0]),
            encoder_hidden_states=cond["text"],
            pooled_projections=cond["pooled"],
        ).sample
        assert torch.equal(policy.velocity(x, torch.tensor([0.25, 0.5]), cond), expected)


def test_guidance_extrapolates_from_the_empty_prompt(pipe, draw):
    guided, plain = policy_of(pipe, guidance=3.0), policy_of(pipe, guidance=1.0)
    x, t = draw(guided.latent_shape), torch.tensor([0.9, 0.3])
    with torch.no_grad():
        c, u = (plain.velocity(x, t, plain.encode(prompts)) for prompts in (PROMPTS, ["", ""]))
        torch.testing.assert_close(guided.velocity(x, t, guided.encode(PROMPTS)), 3 * c - 2 * u, rtol=0, atol=2e-5)


def test_vae_scaling_and_shift_are_honoured(by_pipeline, draw):
    pipe = tiny.sd3()
    latents = draw(policy_of(pipe).latent_shape)
    before = by_pipeline(pipe, PROMPTS, latents, SQUARE, 2, guidance_scale=1.0)
    pipe.vae.register_to_config(scaling_factor=0.4, shift_factor=-0.5)
    theirs = by_pipeline(pipe, PROMPTS, latents, SQUARE, 2, guidance_scale=1.0)
    assert (before - theirs).abs().max() > 1e-2
    ours = sc.sample(policy_of(pipe, guidance=1.0), PROMPTS, latents, steps=2)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=TOLERANCE)
    pipe.vae.register_to_config(shift_factor=None)  # as in the autoencoder of SD 1
    assert torch.equal(decode_kl(pipe.vae, latents), pipe.vae.decode(latents / 0.4).sample)


def test_decoding_in_slices_changes_nothing(pipe, draw):
    x = torch.cat([draw((4, 8, 8), seed) for seed in range(3)])
    whole, sliced = (policy_of(pipe, decode_batch=n).decode(x) for n in (6, 4))
    assert whole.shape == (6, 3, 32, 32)
    assert 0 <= whole.min() < whole.max() <= 1
    torch.testing.assert_close(whole, sliced, rtol=0, atol=1e-6)


def test_sample_draws_its_own_noise_by_seed_and_index(pipe):
    policy = policy_of(pipe, guidance=1.0)
    images = sc.sample(policy, ["the sun"] * 3, steps=2, seed=5)
    assert (images[0] - images[1]).abs().max() > 1e-2
    assert torch.equal(images, sc.sample(policy, ["the sun"] * 3, steps=2, seed=5))
    alone = sc.sample(policy, "the sun", steps=2, seed=5)
    torch.testing.assert_close(alone[0], images[0], rtol=0, atol=TOLERANCE)
    in_parts = sc.sample(policy, ["the sun"] * 3, steps=2, seed=5, micro_batch=2)
    torch.testing.assert_close(in_parts, images, rtol=0, atol=TOLERANCE)
    assert not images.requires_grad


def test_sample_refuses_what_does_not_fit(pipe, draw):
    policy = policy_of(pipe)
    with pytest.raises(ValueError, match=r"noise has shape \(2, 4, 8, 4\).*need \(2, 4, 8, 8\)"):
        sc.sample(policy, PROMPTS, noise=draw((4, 8, 4)))
    with pytest.raises(ValueError, match="steps must be at least 1, not 0"):
        sc.sample(policy, PROMPTS, steps=0)
    with pytest.raises(ValueError, match="prompts is empty"):
        sc.sample(policy, [])
    with pytest.raises(ValueError, match="micro_batch must be at least 1, not 0"):
        sc.sample(policy, PROMPTS, micro_batch=0)


def test_half_precision_model_gives_float32_velocities(draw):
    exact, half = policy_of(tiny.sd3()), policy_of(tiny.sd3(), precision="bf16")
    assert half.pipe.transformer.dtype == half.encode(PROMPTS)["text"].dtype == torch.bfloat16
    assert half.pipe.vae.dtype == torch.float32
    assert family_of(half.pipe).precision == "fp16"
    x, t = draw(exact.latent_shape), torch.tensor([0.9, 0.3])
    with torch.no_grad():
        v, v_half = (policy.velocity(x, t, policy.encode(PROMPTS)) for policy in (exact, half))
    assert v_half.dtype == torch.float32
    assert 0 < (v - v_half).abs().max() < 0.1 * v.abs().max()


def test_a_wrong_size_is_refused_with_the_nearest_right_one(pipe):
    with pytest.raises(PipelineError, match="height is 30; this model makes multiples of 8 pixels, for example 32"):
        policy_of(pipe, (30, 32))
    with pytest.raises(PipelineError, match=r"width is 136; .* ends at 128 pixels"):
        policy_of(pipe, (32, 136))


def test_an_unknown_family_lists_the_known():
    class OtherPipeline:
        pass

    with pytest.raises(
        PipelineError,
        match=r"OtherPipeline is of no known family; .*StableDiffusion3Pipeline, FluxPipeline, Qwen",
    ):
        from_pipeline(OtherPipeline(), height=32, width=32)


def test_another_scheduler_is_refused():
    from diffusers import DDIMScheduler

    pipe = tiny.sd3()
    pipe.scheduler = DDIMScheduler()
    with pytest.raises(PipelineError, match=r"DDIMScheduler.*FlowMatchEulerDiscreteScheduler\.from_config"):
        policy_of(pipe)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"precision": "int8"}, "precision is 'int8'; choose one of fp32, bf16, fp16"),
        ({"decode_batch": 0}, "decode_batch must be at least 1, not 0"),
        ({"lora": 32}, "lora is 32; pass a LoraSpec"),
    ],
)
def test_bad_options_are_named(pipe, option, message):
    with pytest.raises(PipelineError, match=message):
        policy_of(pipe, **option)


def test_encode_wants_a_list_of_prompts(pipe):
    for prompts in ("a red circle", []):
        with pytest.raises(ValueError, match="prompts must be a list of at least one string"):
            policy_of(pipe).encode(prompts)


def test_tiny_pipelines_are_functions_of_their_seed():
    before = torch.random.get_rng_state()
    one, same, other = tiny.sd3(3), tiny.sd3(3), tiny.sd3(4)
    assert torch.equal(before, torch.random.get_rng_state())
    for name, weight in one.transformer.named_parameters():
        assert torch.equal(weight, same.transformer.get_parameter(name))
    assert not torch.equal(one.transformer.proj_out.weight, other.transformer.proj_out.weight)
    with pytest.raises(ValueError, match="no tiny pipeline of family 'sdxl'; there are sd3, flux, qwen-image, z-image"):
        tiny.build("sdxl")


def test_tiny_vocabularies_are_the_same_in_every_process(pipe):
    """Counted by hand: T5 has 4 marks and 94 characters before the words; CLIP 2 marks and twice 256 bytes."""
    words = {word: 98 + tiny_text.WORDS.index(word) for word in ("a", "red", "circle")}
    assert pipe.tokenizer_3("a red circle").input_ids == [*words.values(), 1]
    assert pipe.tokenizer_3("a q").input_ids == [98, 3, 4 + ord("q") - 33, 1]
    vocab = pipe.tokenizer.get_vocab()
    assert [vocab["an</w>"], vocab["an"], vocab["and</w>"]] == [514, 515, 516]  # of the words "an" and "and"
    assert pipe.tokenizer("an and").input_ids == [0, 514, 516, 1]


def test_importing_stepcredit_does_not_import_diffusers():
    code = "import sys, stepcredit.policies, stepcredit.sampling; print({'diffusers', 'peft'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "set()"
