"""Rewards of the CLIP family on tiny random models: preprocessing, batches, types, and conversion of HPS."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from stepcredit.rewards import RewardError, get, score
from stepcredit.rewards import hps as hps_module
from stepcredit.rewards.base import to_uint8
from stepcredit.rewards.clip_models import CLIP_MEAN, CLIP_STD, crop_preprocess
from stepcredit.rewards.hps import letterbox_preprocess
from stepcredit.rewards.inputs import to_pil

transformers = pytest.importorskip("transformers")

PROMPTS = ["a red dog", "a cat", "a red dog", "two birds on a wire", "a cat", "x"]


@pytest.mark.parametrize("shape", [(512, 512), (300, 451), (451, 300), (224, 224), (100, 120), (32, 32)])
def test_crop_is_clips_own_preprocessing(shape: tuple[int, int]) -> None:
    images = torch.rand(2, 3, *shape, generator=torch.Generator().manual_seed(0))
    processor = transformers.CLIPImageProcessor()
    expected = processor(images=to_pil(images), return_tensors="pt")["pixel_values"]
    found = crop_preprocess(images)
    assert found.shape == (2, 3, 224, 224)
    assert found.dtype == torch.float32
    assert (found - expected).abs().max() < 1e-5


def test_letterbox_shows_the_whole_picture() -> None:
    images = torch.rand(1, 3, 448, 224, generator=torch.Generator().manual_seed(0))
    found = letterbox_preprocess(images)
    assert found.shape == (1, 3, 224, 224)
    black = (-torch.tensor(CLIP_MEAN) / torch.tensor(CLIP_STD)).view(3, 1, 1)
    assert torch.allclose(found[0, :, :, :56], black.expand(3, 224, 56))
    assert torch.allclose(found[0, :, :, 168:], black.expand(3, 224, 56))
    assert not torch.allclose(found[0, :, :, 56:168], black.expand(3, 224, 112))
    # At the model's own size nothing but normalisation happens, and both ways agree.
    square = torch.rand(2, 3, 224, 224)
    assert torch.allclose(letterbox_preprocess(square), crop_preprocess(square), atol=1e-6)
    # On a smooth square picture the two differ by the 8-bit rounding after resizing alone.
    smooth = functional.interpolate(torch.rand(2, 3, 4, 4), (512, 512), mode="bilinear")
    assert (letterbox_preprocess(smooth) - crop_preprocess(smooth)).abs().mean() < 0.006


@pytest.mark.parametrize(("name", "preprocess"), [("pickscore", crop_preprocess), ("clip_l14_cos", crop_preprocess)])
def test_scores_are_scaled_cosines_of_the_model(
    name: str, preprocess: object, clip_folder: Path, pictures: Tensor
) -> None:
    reward = get(name, weights=clip_folder, device="cpu")
    found = score(reward, pictures, PROMPTS, [{}] * 6)
    model = transformers.CLIPModel.from_pretrained(clip_folder).eval()
    tokenizer = transformers.CLIPTokenizer.from_pretrained(clip_folder)
    pixels = crop_preprocess(pictures, 28)
    for row, prompt in enumerate(PROMPTS):  # one at a time, from the two towers, without padding
        with torch.no_grad():
            tokens = tokenizer([prompt], return_tensors="pt")
            image = model.visual_projection(model.vision_model(pixels[row : row + 1]).pooler_output)
            text = model.text_projection(model.text_model(**tokens).pooler_output)
            cosine = functional.cosine_similarity(image, text)
        scale = float(model.logit_scale.detach().exp()) if name == "pickscore" else 1.0
        assert float(found[row]) == pytest.approx(scale * float(cosine), abs=1e-5 * scale)
    assert found.std() > 1e-3
    low, high = reward.info.range
    assert low <= float(found.min()) <= float(found.max()) <= high


def test_batch_is_loop_and_order_follows_the_images(clip_folder: Path, pictures: Tensor) -> None:
    reward = get("clip_l14_cos", weights=clip_folder, device="cpu")
    found = reward(pictures, PROMPTS, [{}] * 6)
    alone = torch.cat([reward(pictures[k : k + 1], PROMPTS[k : k + 1], [{}]) for k in range(6)])
    assert torch.allclose(found, alone, atol=1e-6)
    order = [4, 0, 5, 2, 1, 3]
    permuted = reward(pictures[order], [PROMPTS[k] for k in order], [{}] * 6)
    assert torch.allclose(permuted, found[order], atol=1e-6)
    assert found.dtype == torch.float32
    half = reward(pictures.to(torch.bfloat16), PROMPTS, [{}] * 6)
    assert half.dtype == torch.float32  # bfloat16 pictures are rounded to bytes, then scored in float32
    assert not found.requires_grad


def test_weights_stored_in_half_precision_are_run_in_float32(clip_folder: Path, tmp_path: Path) -> None:
    model = transformers.CLIPModel.from_pretrained(clip_folder, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path)
    reward = get("clip_l14_cos", weights=tmp_path, tokenizer=clip_folder, device="cpu")
    assert {p.dtype for p in reward._model.parameters()} == {torch.float32}  # type: ignore[attr-defined]


def test_broken_images_are_nan_and_long_prompts_are_cut(clip_folder: Path, pictures: Tensor) -> None:
    reward = get("pickscore", weights=clip_folder, device="cpu")
    broken = pictures.clone()
    broken[2] = float("nan")
    found = reward(broken, PROMPTS, [{}] * 6)
    assert found.isnan().tolist() == [False, False, True, False, False, False]
    assert torch.allclose(found[3:], reward(pictures, PROMPTS, [{}] * 6)[3:], atol=1e-4)
    assert reward(torch.full((1, 3, 8, 8), float("nan")), ["x"], [{}]).isnan().all()
    long = "a " * 300
    assert torch.equal(reward(pictures[:1], [long], [{}]), reward(pictures[:1], [long + "dog"], [{}]))
    with pytest.raises(RewardError, match="prompt 1 is empty"):
        reward(pictures[:2], ["x", ""], [{}] * 2)


@pytest.mark.usefixtures("offline")
def test_absent_weights_are_explained(tmp_path: Path) -> None:
    with pytest.raises(
        RewardError, match=r"hf download yuvalkirstain/PickScore_v1 --revision a4e4367.*weights: FOLDER"
    ):
        get("pickscore")
    with pytest.raises(RewardError, match="cannot load weights from the folder"):
        get("pickscore", weights=tmp_path)
    with pytest.raises(ValueError, match="neither an existing folder nor a hub id"):
        get("pickscore", weights=tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"a revision .* belongs to a hub id"):
        get("pickscore", weights=tmp_path, revision="main")
    with pytest.raises(RewardError, match=r"stepcredit rewards convert hpsv2.1"):
        get("hpsv2.1")


def test_incomplete_weights_are_refused_not_initialised(clip_folder: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    state = load_file(clip_folder / "model.safetensors")
    del state["text_projection.weight"]
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((clip_folder / "config.json").read_text())
    with pytest.raises(RewardError, match=r"1 weights are absent.*text_projection.weight"):
        get("clip_l14_cos", weights=tmp_path, tokenizer=clip_folder)


def _open_clip_state(generator: torch.Generator) -> dict[str, Tensor]:
    """Random weights under open_clip's names, of the shapes of the tiny configuration."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * 0.2

    def block(prefix: str, width: int, hidden: int) -> dict[str, Tensor]:
        shapes = {
            "ln_1.weight": (width,),
            "ln_1.bias": (width,),
            "attn.in_proj_weight": (3 * width, width),
            "attn.in_proj_bias": (3 * width,),
            "attn.out_proj.weight": (width, width),
            "attn.out_proj.bias": (width,),
            "ln_2.weight": (width,),
            "ln_2.bias": (width,),
            "mlp.c_fc.weight": (hidden, width),
            "mlp.c_fc.bias": (hidden,),
            "mlp.c_proj.weight": (width, hidden),
            "mlp.c_proj.bias": (width,),
        }
        return {f"{prefix}.{k}.{name}": normal(*shape) for k in range(2) for name, shape in shapes.items()}

    return {
        "logit_scale": torch.tensor(4.6),
        "positional_embedding": normal(77, 16),
        "text_projection": normal(16, 12),
        "token_embedding.weight": normal(138, 16),
        "ln_final.weight": normal(16),
        "ln_final.bias": normal(16),
        "visual.class_embedding": normal(24),
        "visual.positional_embedding": normal(5, 24),
        "visual.proj": normal(24, 12),
        "visual.conv1.weight": normal(24, 3, 14, 14),
        "visual.ln_pre.weight": normal(24),
        "visual.ln_pre.bias": normal(24),
        "visual.ln_post.weight": normal(24),
        "visual.ln_post.bias": normal(24),
        **block("transformer.resblocks", 16, 32),
        **block("visual.transformer.resblocks", 24, 32),
    }


def _reference(state: dict[str, Tensor], pixels: Tensor, tokens: Tensor, end: int) -> Tensor:
    """Cosine of a CLIP computed straight from open_clip's names: fused projections, pre-norm blocks, causal text."""

    def norm(x: Tensor, name: str) -> Tensor:
        return functional.layer_norm(x, x.shape[-1:], state[f"{name}.weight"], state[f"{name}.bias"])

    def linear(x: Tensor, name: str) -> Tensor:
        return functional.linear(x, state[f"{name}.weight"], state[f"{name}.bias"])

    def tower(x: Tensor, prefix: str, causal: bool) -> Tensor:
        for k in range(2):
            name = f"{prefix}.{k}"
            qkv = functional.linear(
                norm(x, f"{name}.ln_1"), state[f"{name}.attn.in_proj_weight"], state[f"{name}.attn.in_proj_bias"]
            )
            q, k_, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in qkv.chunk(3, dim=-1))
            heads = functional.scaled_dot_product_attention(q, k_, v, is_causal=causal)
            x = x + linear(heads.transpose(1, 2).flatten(2), f"{name}.attn.out_proj")
            hidden = functional.gelu(linear(norm(x, f"{name}.ln_2"), f"{name}.mlp.c_fc"))
            x = x + linear(hidden, f"{name}.mlp.c_proj")
        return x

    patches = functional.conv2d(pixels, state["visual.conv1.weight"], stride=14).flatten(2).transpose(1, 2)
    start = state["visual.class_embedding"].expand(len(pixels), 1, -1)
    x = norm(torch.cat([start, patches], dim=1) + state["visual.positional_embedding"], "visual.ln_pre")
    image = norm(tower(x, "visual.transformer.resblocks", False)[:, 0], "visual.ln_post") @ state["visual.proj"]
    y = state["token_embedding.weight"][tokens] + state["positional_embedding"][: tokens.shape[1]]
    y = norm(tower(y, "transformer.resblocks", True), "ln_final")
    text = y[torch.arange(len(y)), (tokens == end).int().argmax(dim=1)] @ state["text_projection"]
    return functional.cosine_similarity(image, text)


def test_hps_conversion_gives_the_scores_of_the_original_names(
    clip_folder: Path, clip_config: dict[str, Any], pictures: Tensor, tmp_path: Path
) -> None:
    import json

    from safetensors.torch import save_file

    state = _open_clip_state(torch.Generator().manual_seed(7))
    save_file(hps_module.convert(state), tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "clip", **clip_config}))
    reward = get("hpsv2.1", weights=tmp_path, tokenizer=clip_folder, device="cpu")
    tokens = transformers.CLIPTokenizer.from_pretrained(clip_folder)(PROMPTS, padding=True, return_tensors="pt")
    expected = _reference(state, letterbox_preprocess(pictures, 28), tokens["input_ids"], end=1)
    assert torch.allclose(reward(pictures, PROMPTS, [{}] * 6), expected, atol=1e-5)
    with pytest.raises(ValueError, match=r"not a key of an open_clip model: 'visual\.head'"):
        hps_module.convert({"visual.head": torch.zeros(1)})


def test_the_full_hps_configuration_takes_every_converted_weight() -> None:
    with torch.device("meta"):
        model = transformers.CLIPModel(transformers.CLIPConfig(**hps_module.CONFIG))
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    assert shapes["vision_model.encoder.layers.31.mlp.fc1.weight"] == (5120, 1280)
    assert shapes["text_model.encoder.layers.23.self_attn.q_proj.weight"] == (1024, 1024)
    assert shapes["vision_model.embeddings.position_embedding.weight"] == (257, 1280)
    assert sum(torch.Size(shape).numel() for shape in shapes.values()) == 986_109_441  # CLIP-H/14


def test_pictures_go_through_bytes_once(pictures: Tensor) -> None:
    assert torch.equal(crop_preprocess(pictures), crop_preprocess(to_uint8(pictures).permute(0, 3, 1, 2) / 255))
