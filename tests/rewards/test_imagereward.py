"""ImageReward: conversion from the published names, checked against a forward pass written out under those names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

from stepcredit.rewards import RewardError, get, imagereward
from stepcredit.rewards.clip_models import crop_preprocess

transformers = pytest.importorskip("transformers")

CONFIG: dict[str, Any] = {
    "model_type": "blip",
    "image_text_hidden_size": 8,
    "vision_config": {
        "hidden_size": 24,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": 32,
        "patch_size": 16,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-6,
    },
    "text_config": {
        "vocab_size": 40,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-12,
        "encoder_hidden_size": 24,
        "is_decoder": True,
    },
}
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "red", "blue", "dog", "cat", "on", "the", "hill"]
PROMPTS = ["a red dog", "a cat on the hill", "the blue cat", "a dog", "a dog a dog", "hill"]


def _published(generator: torch.Generator) -> dict[str, Tensor]:
    """A random state dict of the tiny configuration under the names of ImageReward.pt."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * 0.5

    vision = {
        "cls_token": (1, 1, 24),
        "pos_embed": (1, 5, 24),
        "patch_embed.proj.weight": (24, 3, 16, 16),
        "patch_embed.proj.bias": (24,),
        "norm.weight": (24,),
        "norm.bias": (24,),
    }
    for k in range(2):
        for name, out, inside in (
            ("attn.qkv", 72, 24),
            ("attn.proj", 24, 24),
            ("mlp.fc1", 32, 24),
            ("mlp.fc2", 24, 32),
        ):
            vision[f"blocks.{k}.{name}.weight"] = (out, inside)
            vision[f"blocks.{k}.{name}.bias"] = (out,)
        for norm in ("norm1", "norm2"):
            vision[f"blocks.{k}.{norm}.weight"] = vision[f"blocks.{k}.{norm}.bias"] = (24,)
    text = transformers.BlipForImageTextRetrieval(transformers.BlipConfig(**CONFIG)).text_encoder
    state = {f"blip.visual_encoder.{name}": normal(*shape) for name, shape in vision.items()}
    state |= {f"blip.text_encoder.{name}": normal(*tensor.shape) for name, tensor in text.state_dict().items()}
    state["blip.text_encoder.embeddings.position_ids"] = torch.arange(512)[None]
    widths = [16, 12, 8, 6, 4, 1]
    for number, before, after in zip((0, 2, 4, 6, 7), widths[:-1], widths[1:], strict=True):
        state[f"mlp.layers.{number}.weight"] = normal(after, before)
        state[f"mlp.layers.{number}.bias"] = normal(after)
    return state


def _vision(state: dict[str, Tensor], pixels: Tensor) -> Tensor:
    """The published ViT: class token, learned positions, pre-norm blocks with fused projections, final norm."""
    s = {name.removeprefix("blip.visual_encoder."): tensor for name, tensor in state.items()}

    def norm(x: Tensor, name: str) -> Tensor:
        return functional.layer_norm(x, (24,), s[f"{name}.weight"], s[f"{name}.bias"], eps=1e-6)

    def linear(x: Tensor, name: str) -> Tensor:
        return functional.linear(x, s[f"{name}.weight"], s[f"{name}.bias"])

    patches = functional.conv2d(pixels, s["patch_embed.proj.weight"], s["patch_embed.proj.bias"], stride=16)
    x = torch.cat([s["cls_token"].expand(len(pixels), 1, 24), patches.flatten(2).transpose(1, 2)], dim=1)
    x = x + s["pos_embed"]
    for k in range(2):
        qkv = linear(norm(x, f"blocks.{k}.norm1"), f"blocks.{k}.attn.qkv").unflatten(-1, (3, 4, 6))
        q, key, v = qkv.permute(2, 0, 3, 1, 4)
        heads = functional.scaled_dot_product_attention(q, key, v).transpose(1, 2).flatten(2)
        x = x + linear(heads, f"blocks.{k}.attn.proj")
        hidden = functional.gelu(linear(norm(x, f"blocks.{k}.norm2"), f"blocks.{k}.mlp.fc1"))
        x = x + linear(hidden, f"blocks.{k}.mlp.fc2")
    return norm(x, "norm")


@pytest.fixture(scope="module")
def state() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return _published(torch.Generator().manual_seed(11))


@pytest.fixture
def folder(state: dict[str, Tensor], tmp_path: Path) -> Path:
    save_file(imagereward.convert(state), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    vocabulary = {word: index for index, word in enumerate(WORDS)}
    transformers.BertTokenizer(vocab=vocabulary).save_pretrained(tmp_path)
    return tmp_path


def test_score_is_that_of_the_published_layers(state: dict[str, Tensor], folder: Path, pictures: Tensor) -> None:
    reward = get("imagereward", weights=folder, device="cpu")
    found = reward(pictures, PROMPTS, [{}] * 6)
    model = transformers.BlipForImageTextRetrieval(transformers.BlipConfig(**CONFIG)).eval()
    prefix = "blip.text_encoder."
    text = {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix) and "position_ids" not in k}
    model.text_encoder.load_state_dict(text)
    for row, prompt in enumerate(PROMPTS):  # one at a time and without padding
        ids = [2, *(WORDS.index(word) for word in prompt.split()), 3]
        patches = _vision(state, crop_preprocess(pictures[row : row + 1], 32))
        with torch.no_grad():
            x = model.text_encoder(torch.tensor([ids]), encoder_hidden_states=patches).last_hidden_state[:, 0]
        for number in (0, 2, 4, 6, 7):
            x = functional.linear(x, state[f"mlp.layers.{number}.weight"], state[f"mlp.layers.{number}.bias"])
        expected = (float(x) - 0.16717362830052426) / 1.0333394966054072
        assert float(found[row]) == pytest.approx(expected, abs=1e-5)
    assert found.std() > 1e-3


def test_batch_order_and_broken_images(folder: Path, pictures: Tensor) -> None:
    reward = get("imagereward", weights=folder, device="cpu")
    found = reward(pictures, PROMPTS, [{}] * 6)
    alone = torch.cat([reward(pictures[k : k + 1], PROMPTS[k : k + 1], [{}]) for k in range(6)])
    assert torch.allclose(found, alone, atol=1e-5)
    order = [3, 1, 0, 5, 4, 2]
    assert torch.allclose(reward(pictures[order], [PROMPTS[k] for k in order], [{}] * 6), found[order], atol=1e-5)
    broken = pictures.clone()
    broken[4] = float("nan")
    assert reward(broken, PROMPTS, [{}] * 6).isnan().tolist() == [False] * 4 + [True, False]
    assert found.dtype == torch.float32
    long = "dog " * 60
    assert torch.equal(reward(pictures[:1], [long], [{}]), reward(pictures[:1], [long + "cat"], [{}]))


def test_incomplete_files_are_refused(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["text_encoder.encoder.layer.1.output.dense.weight"]
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(RewardError, match=r"absent: \['text_encoder.encoder.layer.1.output.dense.weight'\]"):
        get("imagereward", weights=folder)
    with pytest.raises(ValueError, match="not a key of ImageReward"):
        imagereward.rename("visual.head")


@pytest.mark.usefixtures("offline")
def test_absent_weights_are_explained() -> None:
    with pytest.raises(RewardError, match=r"stepcredit rewards convert imagereward"):
        get("imagereward")
    with pytest.raises(ValueError, match="must be a folder"):
        get("imagereward", weights="zai-org/ImageReward")


def test_the_full_configuration_has_the_shapes_of_the_published_model() -> None:
    with torch.device("meta"):
        model = transformers.BlipForImageTextRetrieval(transformers.BlipConfig(**imagereward.CONFIG))
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    assert shapes["vision_model.embeddings.position_embedding"] == (1, 197, 1024)
    assert shapes["text_encoder.embeddings.word_embeddings.weight"] == (30524, 768)
    assert shapes["text_encoder.encoder.layer.11.crossattention.self.key.weight"] == (768, 1024)
