"""LoRA on tiny pipelines: what is trained, what stays, and what comes back from disk."""

from __future__ import annotations

import json
import warnings

import pytest
import torch

pytest.importorskip("diffusers", minversion="0.38")
pytest.importorskip("peft")

from safetensors import safe_open
from safetensors.torch import load_file, save_file

import stepcredit as sc
from stepcredit.policies import from_pipeline, lora, tiny
from stepcredit.policies.diffusers_common import PolicyWarning
from stepcredit.policies.lora import LoraSpec
from stepcredit.policies.lora_files import LoraError

PROMPTS = ["a red circle above a blue square", "the word cat"]
FAMILIES = ["sd3", "flux"]


def policy_of(pipe, spec=LoraSpec(rank=4, alpha=8), **options):  # noqa: B008, the spec is frozen
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PolicyWarning)
        return from_pipeline(pipe, height=32, width=32, lora=spec, **options)


def inputs(policy, seed=0):
    x = torch.randn(2, *policy.latent_shape, generator=torch.Generator().manual_seed(seed))
    return x, torch.tensor([0.9, 0.4]), policy.encode(PROMPTS)


def disturb(policy, seed=0):
    """Random weights in both halves of every adapter, as after much training."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, weight in policy.named_parameters():
            weight.copy_(0.3 * torch.randn(weight.shape, generator=generator))


@pytest.fixture(params=FAMILIES)
def family(request):
    return request.param


# ------------------------------------------------------------------------------------------------------------- attach


def test_a_new_adapter_changes_nothing(family):
    pipe = tiny.build(family)
    plain = from_pipeline(pipe, height=32, width=32)
    x, t, cond = inputs(plain)
    with torch.no_grad():
        before = plain.velocity(x, t, cond)
        policy = policy_of(pipe)
        assert torch.equal(policy.velocity(x, t, cond), before)
        assert torch.equal(policy.reference_velocity(x, t, cond), before)


def test_number_of_adapter_parameters_by_hand():
    """SD3: 2 blocks of 8 projections 64 -> 64, the last block without to_add_out; FLUX: see the lines below."""
    assert sum(weight.numel() for _, weight in policy_of(tiny.sd3()).named_parameters()) == 15 * 4 * (64 + 64)
    attention = 8 + 3  # the double block, and q, k, v of the single one
    feed_forward = 4 * 4 * (64 + 256)  # two layers for image and two for text, 64 <-> 256
    expected = attention * 4 * (64 + 64) + feed_forward
    assert sum(weight.numel() for _, weight in policy_of(tiny.flux()).named_parameters()) == expected


def test_parameter_counts_of_the_published_configurations():
    from diffusers import FluxTransformer2DModel, SD3Transformer2DModel

    from stepcredit.policies.diffusers_flux import Flux
    from stepcredit.policies.diffusers_sd3 import StableDiffusion3

    with torch.device("meta"):
        sd35_medium = SD3Transformer2DModel(
            num_layers=24,
            num_attention_heads=24,
            caption_projection_dim=1536,
            pos_embed_max_size=8,  # a table that has no part in the count
            sample_size=16,
            dual_attention_layers=tuple(range(13)),
            qk_norm="rms_norm",
        )
        flux_dev = FluxTransformer2DModel(guidance_embeds=True)
    assert lora.parameter_count(sd35_medium, StableDiffusion3.lora_targets, 32) == pytest.approx(18.8e6, rel=2e-3)
    assert lora.parameter_count(flux_dev, Flux.lora_targets, 32) == pytest.approx(89.7e6, rel=2e-3)


def test_the_start_is_a_function_of_the_seed(family):
    torch.manual_seed(1)
    one = dict(policy_of(tiny.build(family)).named_parameters())
    torch.manual_seed(2)
    two = dict(policy_of(tiny.build(family)).named_parameters())
    other = dict(policy_of(tiny.build(family), LoraSpec(4, 8, seed=1)).named_parameters())
    halves_a = [name for name in one if ".lora_A." in name]
    assert list(one) == list(two)
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert not any(torch.equal(one[name], other[name]) for name in halves_a)
    spread = torch.cat([one[name].detach().flatten() for name in halves_a]).std()
    assert float(spread) == pytest.approx(1 / 4, rel=0.05)  # Gaussian, standard deviation 1 / rank


def test_any_list_of_targets():
    policy = policy_of(tiny.sd3(), LoraSpec(2, 2, ["proj_out", "attn2.to_q"]))
    modules = {name.split(".lora_")[0] for name, _ in policy.named_parameters()}
    assert modules == {"proj_out", "transformer_blocks.0.attn2.to_q"}


def test_a_target_that_matches_nothing_is_refused_before_anything_changes():
    pipe = tiny.flux()
    with pytest.raises(LoraError, match=r"'attn\.qkv' matches no linear layer of FluxTransformer2DModel.*attn\.to_q"):
        policy_of(pipe, LoraSpec(4, 8, ["attn.to_q", "attn.qkv"]))
    assert not hasattr(pipe.transformer, "peft_config")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rank": 0}, "rank is 0"),
        ({"rank": 5000}, "rank is 5000"),
        ({"alpha": float("nan")}, "alpha is nan"),
        ({"alpha": -1}, "alpha is -1"),
        ({"targets": "attn.to_q"}, "targets are 'attn.to_q'; pass a list"),
        ({"targets": ()}, r"targets are \(\)"),
    ],
)
def test_bad_specs_are_named(fields, message):
    with pytest.raises(LoraError, match=message):
        LoraSpec(**fields)


def test_a_second_adapter_is_refused():
    pipe = tiny.sd3()
    policy_of(pipe)
    with pytest.raises(LoraError, match=r"already has the adapter default; merge it .* or pass lora=None"):
        policy_of(pipe)
    assert list(from_pipeline(pipe, height=64, width=32).named_parameters()) == []


# -------------------------------------------------------------------------------------------------------------- train


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradient_flows_into_the_adapters_and_nothing_else(family, checkpointing):
    policy = policy_of(tiny.build(family), gradient_checkpointing=checkpointing)
    disturb(policy)
    x, t, cond = inputs(policy)
    assert policy.pipe.transformer.is_gradient_checkpointing == checkpointing
    policy.velocity(x, t, cond).square().mean().backward()
    trained = dict(policy.named_parameters())
    # The text stream ends with the last double block: what only it reads has no gradient there.
    assert sum(bool(weight.grad is not None and weight.grad.abs().max() > 0) for weight in trained.values()) > 20
    for part in policy.pipe.components.values():
        if isinstance(part, torch.nn.Module):
            for name, weight in part.named_parameters():
                assert weight.grad is None or name in trained
    assert not policy.reference_velocity(x, t, cond).requires_grad


def test_gradient_checkpointing_gives_the_same_gradient(family):
    gradients = []
    for checkpointing in (False, True):
        policy = policy_of(tiny.build(family), gradient_checkpointing=checkpointing)
        disturb(policy)
        policy.velocity(*inputs(policy)).square().mean().backward()
        gradients.append(torch.cat([w.grad.flatten() for _, w in policy.named_parameters() if w.grad is not None]))
    torch.testing.assert_close(*gradients)


def test_the_reference_survives_an_update(family):
    policy = policy_of(tiny.build(family))
    x, t, cond = inputs(policy)
    before = policy.reference_velocity(x, t, cond)
    optimiser = torch.optim.SGD([weight for _, weight in policy.named_parameters()], lr=1.0)
    policy.velocity(x, t, cond).square().mean().backward()
    optimiser.step()
    assert torch.equal(policy.reference_velocity(x, t, cond), before)
    assert not torch.equal(policy.velocity(x, t, cond), before)
    assert all(weight.requires_grad for _, weight in policy.named_parameters())


def test_adapters_come_back_on_when_the_reference_fails():
    policy = policy_of(tiny.sd3())
    disturb(policy)
    x, t, cond = inputs(policy)
    with torch.no_grad():
        trained = policy.velocity(x, t, cond)
        with pytest.raises(KeyError):
            policy.reference_velocity(x, t, {})
        assert torch.equal(policy.velocity(x, t, cond), trained)


def test_a_policy_that_only_samples_leaves_the_trained_one_alone():
    pipe = tiny.sd3()
    policy = policy_of(pipe)
    from_pipeline(pipe, height=64, width=64)
    assert all(weight.requires_grad for _, weight in policy.named_parameters())


def test_adapters_are_float32_in_a_half_precision_model(family):
    policy = policy_of(tiny.build(family), precision="bf16")
    disturb(policy)
    assert {weight.dtype for _, weight in policy.named_parameters()} == {torch.float32}
    v = policy.velocity(*inputs(policy))
    v.square().mean().backward()
    assert v.dtype == torch.float32
    assert policy.dtype == torch.bfloat16


def test_full_fine_tuning_needs_a_copy_for_its_reference():
    policy = policy_of(tiny.sd3(), "full")
    x, t, cond = inputs(policy)
    everything = dict(policy.pipe.transformer.named_parameters())
    assert dict(policy.named_parameters()) == everything
    assert not any(weight.requires_grad for weight in policy.pipe.vae.parameters())
    with pytest.raises(RuntimeError, match=r"reference_copy=True.*or set the KL weight to 0"):
        policy.reference_velocity(x, t, cond)

    policy = policy_of(tiny.sd3(), "full", reference_copy=True)
    before = policy.reference_velocity(x, t, cond)
    assert torch.equal(policy.velocity(x, t, cond), before)
    disturb(policy)
    assert torch.equal(policy.reference_velocity(x, t, cond), before)
    assert not torch.equal(policy.velocity(x, t, cond), before)


def test_warnings_say_what_training_will_meet():
    def said(pipe, **options):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            from_pipeline(pipe, height=32, width=32, **options)
        return " / ".join(str(w.message) for w in caught if issubclass(w.category, PolicyWarning))

    spec = LoraSpec(4, 8)
    assert "classifier-free guidance is trained (guidance_scale=4.5)" in said(tiny.sd3(), lora=spec)
    assert said(tiny.sd3(), lora=spec, guidance_scale=1.0) == ""
    assert said(tiny.sd3()) == ""
    assert "guidance-distilled: it is trained at guidance_scale=3.5" in said(tiny.flux(), lora=spec)
    schnell = said(tiny.flux(guidance_embeds=False), lora=spec)
    assert "guidance_embeds=False" in schnell
    assert "tiny-flux-schnell-0 looks step-distilled" in schnell
    turbo = tiny.sd3()
    turbo.register_to_config(_name_or_path="stabilityai/stable-diffusion-3.5-large-turbo")
    assert "looks step-distilled" in said(turbo, lora=spec, guidance_scale=1.0)
    assert "loses small updates" in said(tiny.sd3(), lora="full", precision="bf16")


# ---------------------------------------------------------------------------------------------------- save and export


def test_saved_adapter_makes_the_same_images_in_a_fresh_pipeline(family, tmp_path):
    policy = policy_of(tiny.build(family))
    disturb(policy)
    path = lora.save(policy.pipe.transformer, tmp_path)
    ours = sc.sample(policy, PROMPTS, steps=3)

    fresh = tiny.build(family)
    base = sc.sample(from_pipeline(fresh, height=32, width=32), PROMPTS, steps=3)
    fresh.load_lora_weights(str(tmp_path), adapter_name="rl")
    theirs = sc.sample(from_pipeline(fresh, height=32, width=32), PROMPTS, steps=3)
    assert (ours - base).abs().max() > 1e-2
    assert (ours - theirs).abs().max() == 0
    assert (fresh.transformer.peft_config["rl"].r, fresh.transformer.peft_config["rl"].lora_alpha) == (4, 8)

    assert [file.name for file in tmp_path.iterdir()] == [path.name] == ["pytorch_lora_weights.safetensors"]
    with safe_open(path, "pt") as file:
        metadata = json.loads(file.metadata()["lora_adapter_metadata"])
    assert (metadata["transformer.r"], metadata["transformer.lora_alpha"]) == (4, 8)


def test_without_metadata_alpha_would_be_lost(tmp_path):
    """The reason why it is written: diffusers takes alpha = rank, and says nothing."""
    policy = policy_of(tiny.sd3())
    disturb(policy)
    path = lora.save(policy.pipe.transformer, tmp_path)
    save_file(load_file(path), path, metadata={"format": "pt"})
    fresh = tiny.sd3()
    fresh.load_lora_weights(str(tmp_path), adapter_name="rl")
    assert fresh.transformer.peft_config["rl"].lora_alpha == 4
    assert lora.image_difference(policy, tmp_path, PROMPTS, steps=2) > 1e-3


def test_image_difference_opens_the_file_beside_the_trained_adapter(family, tmp_path):
    policy = policy_of(tiny.build(family))
    disturb(policy)
    lora.save(policy.pipe.transformer, tmp_path)
    before = sc.sample(policy, PROMPTS, steps=2)
    assert lora.image_difference(policy, tmp_path, PROMPTS, steps=2) == 0
    assert list(policy.pipe.transformer.peft_config) == ["default"]
    assert all(weight.requires_grad for _, weight in policy.named_parameters())
    disturb(policy, seed=1)
    assert lora.image_difference(policy, tmp_path, PROMPTS, steps=2) > 1e-3
    disturb(policy, seed=0)
    assert torch.equal(sc.sample(policy, PROMPTS, steps=2), before)


def test_a_saved_adapter_loads_into_a_new_policy(family, tmp_path):
    policy = policy_of(tiny.build(family))
    disturb(policy)
    lora.save(policy.pipe.transformer, tmp_path)
    other = policy_of(tiny.build(family))
    lora.load(other.pipe.transformer, tmp_path)
    for (name, weight), (same, loaded) in zip(policy.named_parameters(), other.named_parameters(), strict=True):
        assert name == same
        assert torch.equal(weight, loaded)
    with pytest.raises(LoraError, match=r"has alpha 8\.0, the attached adapter 4\.0"):
        lora.load(policy_of(tiny.build(family), LoraSpec(4, 4)).pipe.transformer, tmp_path)
    with pytest.raises(LoraError, match="has rank 4, the attached adapter 2"):
        lora.load(policy_of(tiny.build(family), LoraSpec(2, 8)).pipe.transformer, tmp_path)
    with pytest.raises(LoraError, match="differ in module"):
        lora.load(policy_of(tiny.build(family), LoraSpec(4, 8, ["attn.to_q"])).pipe.transformer, tmp_path)


def test_non_finite_weights_are_never_written(tmp_path):
    policy = policy_of(tiny.sd3())
    next(iter(dict(policy.named_parameters()).values())).data[0, 0] = float("inf")
    with pytest.raises(LoraError, match=r"to_q\.lora_A\.weight|lora_A.* not finite"):
        lora.save(policy.pipe.transformer, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_saving_without_an_adapter_is_refused(tmp_path):
    with pytest.raises(LoraError, match="no adapter of ours"):
        lora.save(tiny.sd3().transformer, tmp_path)
