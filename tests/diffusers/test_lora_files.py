"""Adapter files of others: PEFT folders are converted, everything unsound is refused by name."""

from __future__ import annotations

import json
import re

import pytest
import torch

pytest.importorskip("diffusers", minversion="0.38")
pytest.importorskip("peft")

from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file

import stepcredit as sc
from stepcredit.policies import family_of, from_pipeline, lora_files, tiny
from stepcredit.policies.lora_files import LoraError

PROMPTS = ["a red circle above a blue square", "the word cat"]


@pytest.mark.parametrize("family", list(tiny.BUILDERS))
@pytest.mark.parametrize("rslora", [False, True])
def test_peft_folders_are_converted(family, tmp_path, rslora):
    original = tiny.build(family)
    targets = family_of(original).lora_targets
    config = LoraConfig(r=4, lora_alpha=12, target_modules=list(targets), use_rslora=rslora, init_lora_weights=False)
    torch.manual_seed(0)
    wrapped = get_peft_model(original.transformer, config)
    wrapped.save_pretrained(tmp_path / "checkpoint-60" / "lora")
    theirs = sc.sample(from_pipeline(original, height=32, width=32), PROMPTS, steps=3)

    lora_files.convert_peft(tmp_path / "checkpoint-60", tmp_path / "ours", tiny.build(family).transformer)
    fresh = tiny.build(family)
    base = sc.sample(from_pipeline(fresh, height=32, width=32), PROMPTS, steps=3)
    fresh.load_lora_weights(str(tmp_path / "ours"))
    ours = sc.sample(from_pipeline(fresh, height=32, width=32), PROMPTS, steps=3)
    assert (theirs - base).abs().max() > 1e-3
    assert (theirs - ours).abs().max() == 0


def test_a_peft_folder_that_cannot_be_converted_says_why(tmp_path):
    with pytest.raises(LoraError, match=r"has no adapter_config\.json"):
        lora_files.convert_peft(tmp_path, tmp_path / "out")
    (tmp_path / "adapter_config.json").write_text("{")
    with pytest.raises(LoraError, match=r"no adapter_model\.safetensors; pickled weights are not opened"):
        lora_files.convert_peft(tmp_path, tmp_path / "out")
    save_file({"base_model.model.x.lora_A.weight": torch.ones(1, 2)}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(LoraError, match="is not a JSON object"):
        lora_files.convert_peft(tmp_path, tmp_path / "out")


MODULE = "transformer_blocks.0.attn.to_q"
A, B = torch.ones(2, 64), torch.ones(64, 2)


def write_file(folder, tensors, config=None):
    metadata = (
        {} if config is None else {"lora_adapter_metadata": config if isinstance(config, str) else json.dumps(config)}
    )
    path = folder / "pytorch_lora_weights.safetensors"
    save_file({key: value.contiguous() for key, value in tensors.items()}, path, metadata=metadata)
    return path


def test_a_foreign_file_is_read(tmp_path, pipes):
    tensors = {f"transformer.{MODULE}.lora_A.weight": A, f"transformer.{MODULE}.lora_B.weight": B}
    config = {"transformer.r": 2, "transformer.lora_alpha": 3, "transformer.base_model_name_or_path": "x"}
    adapter = lora_files.read(write_file(tmp_path, tensors, config), pipes["sd3"].transformer)
    assert (adapter.rank, adapter.alpha, list(adapter.modules)) == (2, 3, [MODULE])
    assert lora_files.read(write_file(tmp_path, tensors)).alpha == 2  # no metadata: alpha is the rank


@pytest.mark.parametrize(
    ("halves", "config", "message"),
    [
        ({"lora_A": A}, None, "lora_A without its other half"),
        ({"lora_A": A, "lora_B": B[:, :1]}, None, "rank 2 in lora_A and 1 in lora_B"),
        ({"lora_A": A * float("nan"), "lora_B": B}, None, "lora_A.weight holds a value that is not finite"),
        ({"lora_A": A.long(), "lora_B": B}, None, "int64 tensor of shape .* not a matrix of floats"),
        ({"lora_A": A[0], "lora_B": B}, None, r"shape \(64,\), not a matrix"),
        (
            {"lora_A": A, "lora_B": B, "lora_magnitude_vector": torch.ones(2)},
            None,
            "lora_magnitude_vector.* is not of the form",
        ),
        ({"lora_A": A, "lora_B": B}, {"transformer.r": 4}, r"rank \[2\], its config 4"),
        ({"lora_A": A, "lora_B": B}, {"transformer.r": [2]}, r"rank \[2\], its config \[2\]"),
        ({"lora_A": A, "lora_B": B}, {"transformer.lora_alpha": "8"}, "'lora_alpha' is '8'"),
        ({"lora_A": A, "lora_B": B}, {"transformer.lora_alpha": -1}, "'lora_alpha' is -1"),
        ({"lora_A": A, "lora_B": B}, {"transformer.use_dora": True}, "'use_dora' is True; only plain LoRA"),
        ({"lora_A": A, "lora_B": B}, {"transformer.alpha_pattern": {"x": 1}}, "'alpha_pattern' is"),
        ({"lora_A": A, "lora_B": B}, {"transformer.not_yet_invented": 1}, "'not_yet_invented' is 1"),
        ({"lora_A": A, "lora_B": B}, "[1]", "is not a JSON object"),
        ({"lora_A": A, "lora_B": B}, "{", "is not a JSON object"),
        ({"lora_A": A[:, :8].clone(), "lora_B": B}, None, "maps 8 to 64 features, but this model's maps 64 to 64"),
    ],
)
def test_a_malformed_file_is_refused(tmp_path, pipes, halves, config, message):
    tensors = {f"transformer.{MODULE}.{half}.weight": tensor for half, tensor in halves.items()}
    path = write_file(tmp_path, tensors, config)
    with pytest.raises(LoraError, match=message):
        lora_files.read(path, pipes["sd3"].transformer)


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("transformer.single_transformer_blocks.0.attn.to_q", "SD3Transformer2DModel has no linear layer 'single_tr"),
        ("transformer.transformer_blocks.0.norm1", "has no linear layer 'transformer_blocks.0.norm1'"),
        ("base_model.model." + MODULE, "for a folder written by PEFT use convert_peft"),
        ("text_encoder.layers.0.q_proj", "adapters of text encoders are not supported"),
    ],
)
def test_an_adapter_of_something_else_is_refused(tmp_path, pipes, key, message):
    path = write_file(tmp_path, {f"{key}.lora_A.weight": A, f"{key}.lora_B.weight": B})
    with pytest.raises(LoraError, match=re.escape(message)):
        lora_files.read(path, pipes["sd3"].transformer)


def test_what_is_no_safetensors_file_is_refused(tmp_path):
    path = tmp_path / "pytorch_lora_weights.safetensors"
    with pytest.raises(LoraError, match="does not exist"):
        lora_files.read(path)
    path.write_bytes(b"\x80\x04pickled")
    with pytest.raises(LoraError, match="is not a readable safetensors file"):
        lora_files.read(path)
    save_file({}, path)
    with pytest.raises(LoraError, match="holds no LoRA weights"):
        lora_files.read(path)
