"""HPSv2.1: the cosine of a CLIP-H/14 tuned on human preferences (Wu et al. 2023)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stepcredit.rewards import weights as weights_module
from stepcredit.rewards.base import RewardInfo, to_uint8
from stepcredit.rewards.clip_models import CLIP_H, ClipCosine, clip_tokenizer, normalise
from stepcredit.rewards.weights import cache_folder, pick_device, resolve


def letterbox_preprocess(images: Tensor, side: int = 224) -> Tensor:
    """HPS's own preprocessing: longest side to ``side`` (bicubic on floats), black borders to a square, normalise.

    Unlike CLIP's centre crop this shows the whole picture. Float32 ``[B, 3, side, side]`` on the CPU.
    """
    floats = to_uint8(images).permute(0, 3, 1, 2).float() / 255
    height, width = floats.shape[-2:]
    scale = side / max(height, width)
    size = (round(height * scale), round(width * scale))
    if size != (height, width):
        floats = torch.nn.functional.interpolate(floats, size, mode="bicubic", align_corners=False, antialias=True)
    top, left = side - size[0], side - size[1]
    floats = torch.nn.functional.pad(floats, (left // 2, left - left // 2, top // 2, top - top // 2))
    return normalise(floats)


def hpsv21(
    weights: str | Path | None = None,
    revision: str | None = None,
    tokenizer: str | Path | None = None,
    device: str | None = None,
) -> ClipCosine:
    """HPSv2.1 as plain cosine, about .20 to .31 (leaderboards print it times 100).

    The published file is a pickle with open_clip's names: convert it once with ``stepcredit rewards convert
    hpsv2.1``, or give a folder of converted weights. Raises RewardError when they are absent.
    """
    source = resolve(weights, revision, cache_folder("hpsv2.1"))
    weights_module.need_converted("hpsv2.1", source)
    model = weights_module.model("hpsv2.1", "CLIPModel", source, pick_device(device))
    info = RewardInfo(
        name="hpsv2.1",
        range=(-1.0, 1.0),
        licence="Apache-2.0",
        description="HPSv2.1, cosine; sees the whole picture in a square and 77 tokens; likes glossy, saturated images",
        needs=("stepcredit[diffusers]", "xswu/HPSv2 (converted)"),
    )
    return ClipCosine(
        info, model, clip_tokenizer("hpsv2.1", tokenizer, source, CLIP_H), preprocess=letterbox_preprocess
    )


CONFIG: dict[str, Any] = {
    "projection_dim": 1024,
    "text_config": {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "vocab_size": 49408,
        "max_position_embeddings": 77,
        "hidden_act": "gelu",
        "projection_dim": 1024,
        "bos_token_id": 49406,
        "eos_token_id": 49407,
        "pad_token_id": 0,
    },
    "vision_config": {
        "hidden_size": 1280,
        "intermediate_size": 5120,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "image_size": 224,
        "patch_size": 14,
        "hidden_act": "gelu",
        "projection_dim": 1024,
    },
}

_TOP = {
    "logit_scale": "logit_scale",
    "text_projection": "text_projection.weight",
    "positional_embedding": "text_model.embeddings.position_embedding.weight",
    "token_embedding.weight": "text_model.embeddings.token_embedding.weight",
    "visual.proj": "visual_projection.weight",
    "visual.class_embedding": "vision_model.embeddings.class_embedding",
    "visual.positional_embedding": "vision_model.embeddings.position_embedding.weight",
    "visual.conv1.weight": "vision_model.embeddings.patch_embedding.weight",
}
_PREFIXES = {
    "ln_final.": "text_model.final_layer_norm.",
    "transformer.resblocks.": "text_model.encoder.layers.",
    "visual.ln_pre.": "vision_model.pre_layrnorm.",
    "visual.ln_post.": "vision_model.post_layernorm.",
    "visual.transformer.resblocks.": "vision_model.encoder.layers.",
}
_BLOCK = {
    ".ln_1.": ".layer_norm1.",
    ".ln_2.": ".layer_norm2.",
    ".attn.out_proj.": ".self_attn.out_proj.",
    ".mlp.c_fc.": ".mlp.fc1.",
    ".mlp.c_proj.": ".mlp.fc2.",
}


def convert(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A CLIP state dict with open_clip's names as one with the names of ``transformers.CLIPModel``.

    The fused query-key-value projections are split, and the two output projections, which open_clip multiplies from
    the right, transposed. Raises ValueError for an unknown key.
    """
    result: dict[str, Tensor] = {}
    for key, tensor in state.items():
        if key == "attn_mask":  # a constant buffer
            continue
        if key in _TOP:
            result[_TOP[key]] = tensor.T if key in ("text_projection", "visual.proj") else tensor
            continue
        prefix = next((prefix for prefix in _PREFIXES if key.startswith(prefix)), None)
        if prefix is None:
            raise ValueError(f"not a key of an open_clip model: {key!r}")
        name = _PREFIXES[prefix] + key.removeprefix(prefix)
        if ".attn.in_proj_" in name:
            stem, _, kind = name.partition(".attn.in_proj_")
            for part, chunk in zip("qkv", tensor.chunk(3), strict=True):
                result[f"{stem}.self_attn.{part}_proj.{kind}"] = chunk
            continue
        for old, new in _BLOCK.items():
            name = name.replace(old, new)
        result[name] = tensor
    return {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in result.items()}
