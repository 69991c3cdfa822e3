"""Which model a recipe gets, and what is refused before anything large is read."""

import json

import pytest
import torch

from stepcredit.errors import UserError
from stepcredit.policies import tiny
from stepcredit.policies.diffusers_policy import DiffusersPolicy
from stepcredit.sampling import sample
from stepcredit.training import models
from stepcredit.training import recipe as recipes
from stepcredit.training.setup import setup

pytest.importorskip("diffusers")

SMALL = {
    "task": "ocr",
    "reward": "jpeg_size",
    "model": "tiny:sd3",
    "resolution": 32,
    "max_sequence_length": 16,
    "precision": "fp32",
    "prompts_per_iteration": 2,
    "group_size": 2,
    "micro_batch": 4,
    "steps": 3,
    "iterations": 2,
    "eval_prompts": 4,
    "eval_prompts_during": 2,
}


def recipe(**keys):
    return recipes.build({**SMALL, **keys})


def refused(**keys):
    """The one sentence with which ``setup`` refuses a recipe."""
    with pytest.raises(UserError) as caught:
        setup(recipe(**keys))
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny SD3 pipeline as a local folder, as ``hf download`` would leave it."""
    path = tmp_path_factory.mktemp("pipeline") / "tiny"
    tiny.build("sd3").save_pretrained(path, safe_serialization=True)
    return path


@pytest.fixture
def nothing_is_loaded(monkeypatch):
    """Weights of a pipeline must not be read."""
    import diffusers

    def load(*args, **options):
        raise AssertionError("the pipeline was loaded")

    monkeypatch.setattr(diffusers.DiffusionPipeline, "from_pretrained", load)


def test_a_local_folder_gives_the_pipeline_that_was_saved(folder):
    policy = models.load_policy(recipe(model=str(folder)))
    wanted = models.load_policy(recipe())
    prompts = ["a red circle", 'a sign "one"']
    assert torch.equal(sample(policy, prompts, steps=2), sample(wanted, prompts, steps=2))


def test_the_sketch_knows_all_sizes_without_weights(folder, nothing_is_loaded):
    sketch, real = models.sketch(recipe(model=str(folder))), models.load_policy(recipe())
    assert sketch.device.type == "meta"
    assert sketch.latent_shape == real.latent_shape
    assert torch.equal(sketch.grid(7), real.grid(7))
    shapes = [(name, tuple(p.shape)) for name, p in sketch.named_parameters()]
    assert shapes == [(name, tuple(p.shape)) for name, p in real.named_parameters()]


def test_only_adapters_are_trained_unless_all_is_asked_for():
    adapters = dict(models.load_policy(recipe(lora_rank=4, lora_targets=["attn.to_q"])).named_parameters())
    assert all(".lora_" in name for name in adapters)
    assert sum(p.numel() for p in adapters.values()) == 2 * 4 * (64 + 64)  # two blocks, to_q is 64 -> 64
    whole = models.load_policy(recipe(tuning="full", kl_beta=0.1))
    assert isinstance(whole, DiffusersPolicy)
    assert whole.reference is not None
    assert dict(whole.named_parameters()).keys() == dict(whole.pipe.transformer.named_parameters()).keys()


def test_an_embedding_cache_frees_the_encoders(tmp_path):
    parts = setup(recipe(embedding_cache=str(tmp_path / "kept")))
    assert parts.policy.pipe.text_encoder is None
    for iteration in (0, 1, 2):
        prompts, _ = parts.batch(iteration)
        parts.policy.encode([prompt.text for prompt in prompts])
    parts.policy.encode([slot.prompt.text for slot in parts.heldout])
    assert list((tmp_path / "kept").rglob("*.safetensors"))


def test_the_users_cache_is_where_the_environment_says(tmp_path, monkeypatch):
    monkeypatch.setenv("STEPCREDIT_CACHE", str(tmp_path / "mine"))
    assert models.cache_folder(recipe(embedding_cache="auto")) == tmp_path / "mine" / "embeddings"


# ------------------------------------------------------------------------------------------------------------ refusals


def test_a_missing_hub_model_names_the_id_what_was_looked_for_and_the_way_out(offline, nothing_is_loaded):
    said = refused(model="stabilityai/stable-diffusion-3.5-medium", resolution=512, check_memory=False)
    for word in ("stabilityai/stable-diffusion-3.5-medium", "model_index.json", "--local-dir FOLDER", "--model FOLDER"):
        assert word in said


def test_an_unknown_hub_id_and_a_revision(offline, nothing_is_loaded):
    said = refused(model="someone/something", revision="abc123")
    assert "'someone/something' at revision 'abc123'" in said
    assert "model_index.json" in said


@pytest.mark.parametrize("model", ["no-such-folder", "./none", "a/b/c"])
def test_what_is_neither_file_nor_folder_nor_id(model, nothing_is_loaded):
    said = refused(model=model)
    assert repr(model) in said
    assert "hub id" in said


def test_a_folder_that_is_no_pipeline(tmp_path, nothing_is_loaded):
    assert "no model_index.json" in refused(model=str(tmp_path))


def test_a_pipeline_of_an_unknown_family_lists_the_known(tmp_path, nothing_is_loaded):
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "LTXPipeline"}))
    said = refused(model=str(tmp_path))
    assert "LTXPipeline" in said
    assert "StableDiffusion3Pipeline, FluxPipeline" in said


def test_parts_of_other_libraries_are_not_opened(folder, tmp_path, nothing_is_loaded):
    index = json.loads((folder / "model_index.json").read_text())
    index["transformer"] = ["my_code", "Transformer"]
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    for part in ("transformer", "vae", "scheduler"):
        (tmp_path / part).symlink_to(folder / part)
    assert "my_code" in refused(model=str(tmp_path))


def test_a_lora_target_that_matches_nothing(nothing_is_loaded):
    said = refused(model="black-forest-labs/FLUX.1-dev", resolution=512, lora_targets=["attn.to_x"])
    assert "'attn.to_x'" in said
    assert "attn.to_q" in said


def test_an_image_size_that_the_model_cannot_make(nothing_is_loaded):
    assert "height is 500" in refused(model="stabilityai/stable-diffusion-3.5-medium", resolution=500)


def test_settings_that_cannot_run_are_found_on_the_sketch(nothing_is_loaded):
    said = refused(model="stabilityai/stable-diffusion-3.5-medium", resolution=512, window=[5, 9])
    assert "window [5, 9)" in said


@pytest.mark.parametrize("key", [{"resolution": 64}, {"precision": "bf16"}, {"lora_rank": 8}, {"revision": "x"}])
def test_a_desk_model_refuses_the_keys_of_pipelines(key):
    with pytest.raises(UserError, match=next(iter(key))):
        setup(recipes.build({"task": "compose", **key}))


def test_an_unknown_tiny_family_names_the_nearest():
    assert "did you mean 'sd3'" in refused(model="tiny:sd33")


def test_too_little_memory_is_refused_before_loading(monkeypatch, nothing_is_loaded):
    free = 8 * 2**30  # of a card that others use as well
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 24 * 2**30))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a small card")
    large = {"model": "black-forest-labs/FLUX.1-dev", "resolution": 512, "device": "cuda"}
    said = refused(**large)
    assert "a small card has 8 free" in said
    assert "micro_batch" in said
    assert "offload" in said
    with pytest.raises((UserError, AssertionError)) as caught:  # goes on to look for the model
        setup(recipe(**large, check_memory=False))
    assert "GiB" not in str(caught.value)
