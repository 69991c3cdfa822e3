"""Names of Mask2Former's weights: from mmdetection's to those under which transformers stores them.

Complete for the Swin instance model that GenEval uses. Two things are more than renaming: mmdetection fuses query, key
and value of the windowed and of the self-attention, and its patch merging orders the inputs channel by channel (as
``Unfold`` does) where transformers has pixel after pixel, column by column.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

FILE = "mask2former_swin-s-p4-w7-224_lsj_8x2_50e_coco.pth"
SHA256 = "743b7d99015f1224c6d57fd4b14d04b15cc8ec72ae7ee7831e7c71d8873b7a54"

# COCO's 80 classes in the order of their numbers, with GenEval's names for mouse, remote and keyboard.
# fmt: off
COCO = (
    "person", "bicycle", "car", "motorcycle", "airplane", "bus", "train", "truck", "boat", "traffic light",
    "fire hydrant", "stop sign", "parking meter", "bench", "bird", "cat", "dog", "horse", "sheep", "cow", "elephant",
    "bear", "zebra", "giraffe", "backpack", "umbrella", "handbag", "tie", "suitcase", "frisbee", "skis", "snowboard",
    "sports ball", "kite", "baseball bat", "baseball glove", "skateboard", "surfboard", "tennis racket", "bottle",
    "wine glass", "cup", "fork", "knife", "spoon", "bowl", "banana", "apple", "sandwich", "orange", "broccoli",
    "carrot", "hot dog", "pizza", "donut", "cake", "chair", "couch", "potted plant", "bed", "dining table", "toilet",
    "tv", "laptop", "computer mouse", "tv remote", "computer keyboard", "cell phone", "microwave", "oven", "toaster",
    "sink", "refrigerator", "book", "clock", "vase", "scissors", "teddy bear", "hair drier", "toothbrush",
)
# fmt: on

CONFIG: dict[str, Any] = {
    "model_type": "mask2former",
    "backbone_config": {
        "model_type": "swin",
        "embed_dim": 96,
        "depths": [2, 2, 18, 2],
        "num_heads": [3, 6, 12, 24],
        "window_size": 7,
        "drop_path_rate": 0.3,
        "out_features": ["stage1", "stage2", "stage3", "stage4"],
    },
    "num_queries": 100,
    "id2label": {str(index): name for index, name in enumerate(COCO)},
}

UNUSED = ("pixel_level_module.encoder.swin.layernorm.", "criterion.")
"""Weights of the transformers class that no output depends on; mmdetection has no counterpart."""

_BACKBONE, _PIXEL, _TRANSFORMER = (
    "model.pixel_level_module.encoder",
    "model.pixel_level_module.decoder",
    "model.transformer_module",
)
_RULES = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"^backbone\.patch_embed\.projection\.", f"{_BACKBONE}.embeddings.patch_embeddings.projection."),
        (r"^backbone\.patch_embed\.norm\.", f"{_BACKBONE}.embeddings.norm."),
        (r"^backbone\.stages\.", f"{_BACKBONE}.encoder.layers."),
        (r"^backbone\.norm(\d)\.", lambda m: f"{_BACKBONE}.hidden_states_norms.stage{int(m[1]) + 1}."),
        (r"(blocks\.\d+)\.norm1\.", r"\1.layernorm_before."),
        (r"(blocks\.\d+)\.norm2\.", r"\1.layernorm_after."),
        (r"\.attn\.w_msa\.proj\.", ".attention.output.dense."),
        (r"\.attn\.w_msa\.", ".attention.self."),
        (r"(blocks\.\d+)\.ffn\.layers\.0\.0\.", r"\1.intermediate.dense."),
        (r"(blocks\.\d+)\.ffn\.layers\.1\.", r"\1.output.dense."),
        (r"^panoptic_head\.pixel_decoder\.level_encoding\.weight$", f"{_PIXEL}.level_embed"),
        (r"^panoptic_head\.pixel_decoder\.mask_feature\.", f"{_PIXEL}.mask_projection."),
        (r"^panoptic_head\.pixel_decoder\.", f"{_PIXEL}."),
        (r"^panoptic_head\.transformer_decoder\.post_norm\.", f"{_TRANSFORMER}.decoder.layernorm."),
        (r"^panoptic_head\.transformer_decoder\.", f"{_TRANSFORMER}.decoder."),
        (r"^panoptic_head\.query_embed\.", f"{_TRANSFORMER}.queries_embedder."),
        (r"^panoptic_head\.query_feat\.", f"{_TRANSFORMER}.queries_features."),
        (r"^panoptic_head\.level_embed\.", f"{_TRANSFORMER}.level_embed."),
        (r"^panoptic_head\.cls_embed\.", "class_predictor."),
        (
            r"^panoptic_head\.mask_embed\.(\d)\.",
            lambda m: f"{_TRANSFORMER}.decoder.mask_predictor.mask_embedder.{int(m[1]) // 2}.0.",
        ),
        # Convolutions with group norm: projections from low to high resolution in both; one extra level, stage 1.
        (r"\.input_convs\.(\d+)\.conv\.", r".input_projections.\1.0."),
        (r"\.input_convs\.(\d+)\.gn\.", r".input_projections.\1.1."),
        (r"\.lateral_convs\.0\.conv\.", ".adapter_1.0."),
        (r"\.lateral_convs\.0\.gn\.", ".adapter_1.1."),
        (r"\.output_convs\.0\.conv\.", ".layer_1.0."),
        (r"\.output_convs\.0\.gn\.", ".layer_1.1."),
        (r"(layers\.\d+)\.ffns\.0\.layers\.0\.0\.", r"\1.fc1."),
        (r"(layers\.\d+)\.ffns\.0\.layers\.1\.", r"\1.fc2."),
        # Pixel decoder: deformable self-attention, then the network. Transformer decoder: cross before self.
        (rf"^({re.escape(_PIXEL)}.*)\.attentions\.0\.", r"\1.self_attn."),
        (rf"^({re.escape(_PIXEL)}.*)\.norms\.0\.", r"\1.self_attn_layer_norm."),
        (rf"^({re.escape(_PIXEL)}.*)\.norms\.1\.", r"\1.final_layer_norm."),
        (r"\.attentions\.0\.attn\.", ".cross_attn."),
        (r"\.attentions\.1\.attn\.", ".self_attn."),
        (r"\.norms\.0\.", ".cross_attn_layer_norm."),
        (r"\.norms\.1\.", ".self_attn_layer_norm."),
        (r"\.norms\.2\.", ".final_layer_norm."),
    )
)


def rename(key: str) -> str:
    """The stored name in transformers of an mmdetection key. Raises ValueError for a key of another model."""
    name = key
    for pattern, replacement in _RULES:
        name = pattern.sub(replacement, name)
    if not name.startswith(("model.", "class_predictor.")):
        raise ValueError(f"not a key of mmdetection's Mask2Former: {key!r}")
    return name


def convert(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state dict of ``FILE`` under the names that ``Mask2FormerForUniversalSegmentation`` loads.

    Raises ValueError for an unknown key.
    """
    result: dict[str, Tensor] = {}
    for key, tensor in state.items():
        if key.endswith("relative_position_index") or ".loss_" in key:  # constants
            continue
        name = rename(key)
        if ".attention.self.qkv." in name:
            parts = zip(("query", "key", "value"), tensor.chunk(3), strict=True)
            result |= {name.replace(".qkv.", f".{part}."): chunk for part, chunk in parts}
        elif ".self_attn.in_proj_" in name:
            stem, _, kind = name.partition(".in_proj_")
            parts = zip(("q_proj", "k_proj", "v_proj"), tensor.chunk(3), strict=True)
            result |= {f"{stem}.{part}.{kind}": chunk for part, chunk in parts}
        elif ".downsample." in name:
            result[name] = merge_order(tensor)
        else:
            result[name] = tensor
    return {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in result.items()}


def merge_order(tensor: Tensor) -> Tensor:
    """Reorder the last dimension, of size 4 C, from ``Unfold`` order to that of transformers' patch merging.

    Unfold: channel, then row, then column inside the 2 x 2 patch. transformers: column, then row, then channel.
    """
    merged: Tensor = tensor.unflatten(-1, (-1, 2, 2)).transpose(-3, -1).flatten(-3)
    return merged
