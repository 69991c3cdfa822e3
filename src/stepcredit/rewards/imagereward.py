"""ImageReward v1.0 (Xu et al. 2023) on plain transformers: BLIP, its [CLS] feature, and an affine head."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stepcredit.rewards import weights as weights_module
from stepcredit.rewards.aesthetic import compose_affine, linear_layers
from stepcredit.rewards.base import Metadata, RewardError, RewardInfo, SelfTest
from stepcredit.rewards.clip_models import crop_preprocess, disc
from stepcredit.rewards.inputs import check_batch, scatter
from stepcredit.rewards.weights import Hub, cache_folder, pick_device, resolve

TOKENIZER = Hub("google-bert/bert-base-uncased", "86b5e0934494bd15c9632b12f734a8a67f723594")
MAX_TOKENS = 35
MEAN, DEVIATION = 0.16717362830052426, 1.0333394966054072
UNUSED = ("vision_proj.", "text_proj.", "itm_head.")  # of BlipForImageTextRetrieval

CONFIG: dict[str, Any] = {
    "vision_config": {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "image_size": 224,
        "patch_size": 16,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-6,
    },
    "text_config": {
        "vocab_size": 30524,
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-12,
        "encoder_hidden_size": 1024,
        "is_decoder": True,  # gives the layers their cross-attention
    },
}

_VISION = (
    (r"^cls_token$", "embeddings.class_embedding"),
    (r"^pos_embed$", "embeddings.position_embedding"),
    (r"^patch_embed\.proj\.", "embeddings.patch_embedding."),
    (r"^blocks\.", "encoder.layers."),
    (r"\.norm([12])\.", r".layer_norm\1."),
    (r"\.attn\.qkv\.", ".self_attn.qkv."),
    (r"\.attn\.proj\.", ".self_attn.projection."),
    (r"^norm\.", "post_layernorm."),
)


def rename(key: str) -> str | None:
    """The name in ``BlipForImageTextRetrieval`` of a key of ``ImageReward.pt``; None for a buffer it does not have."""
    if key.endswith("position_ids"):
        return None
    if key.startswith("blip.text_encoder."):
        return key.removeprefix("blip.")
    if key.startswith("blip.visual_encoder."):
        name = key.removeprefix("blip.visual_encoder.")
        for pattern, replacement in _VISION:
            name = re.sub(pattern, replacement, name)
        return "vision_model." + name
    raise ValueError(f"not a key of ImageReward.pt: {key!r}")


def convert(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """``ImageReward.pt`` as BLIP weights with transformers' names, plus ``head.weight`` [768] and ``head.bias`` [1].

    The five layers of the head have no activation between them; the published mean and deviation are folded in, so
    that the head gives the final score. Raises ValueError for an unknown key.
    """
    weight, bias = compose_affine(linear_layers(state, "mlp.layers."))
    result = {
        "head.weight": (weight[0] / DEVIATION).contiguous(),
        "head.bias": (bias - MEAN) / DEVIATION,
    }
    for key, tensor in state.items():
        if not key.startswith("mlp."):
            name = rename(key)
            if name is not None:
                result[name] = tensor.contiguous()
    return result


class ImageReward:
    """ImageReward v1.0: unbounded, nearly always in [-2, 2]; alone it is known to corrupt images.

    Sees the central square of the picture and 35 tokens of the prompt. ``weights``: folder of converted weights, by
    default where ``stepcredit rewards convert imagereward`` puts them. RewardError when they are absent.
    """

    def __init__(
        self, weights: str | Path | None = None, tokenizer: str | Path | None = None, device: str | None = None
    ) -> None:
        folder = resolve(weights, None, cache_folder("imagereward"))
        if isinstance(folder, Hub):
            raise ValueError(f"imagereward: weights must be a folder of converted weights; got {folder.id!r}")
        weights_module.need_converted("imagereward", folder)
        beside = (folder / "tokenizer.json").exists() or (folder / "vocab.txt").exists()
        source = folder if tokenizer is None and beside else resolve(tokenizer, None, TOKENIZER)
        self._tokenizer = weights_module.pretrained("imagereward", "BertTokenizer", source, "tokenizer")
        self._model, self._weight, self._bias = load(folder)
        device_ = pick_device(device)
        self._model, self._weight = self._model.to(device_), self._weight.to(device_)
        self.info = RewardInfo(
            name="imagereward",
            range=(-float("inf"), float("inf")),
            licence="Apache-2.0",
            description="ImageReward v1.0; sees the central square and 35 tokens",
            needs=("stepcredit[diffusers]", "zai-org/ImageReward (converted)", TOKENIZER.id),
        )

    @property
    def networks(self) -> tuple[Any, ...]:
        """What may wait elsewhere while it is idle."""
        return (self._model,)

    @torch.no_grad()
    def __call__(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Metadata]) -> Tensor:
        """Scores, float32 ``[B]``; NaN for an image that is not finite. Raises RewardError for an empty prompt."""
        valid = check_batch("imagereward", images, prompts, metadata)
        if not bool(valid.any()):
            return scatter(torch.empty(0), valid)
        device = self._weight.device
        wanted = [prompt for prompt, ok in zip(prompts, valid, strict=True) if ok]
        tokens = self._tokenizer(
            wanted, padding="max_length", truncation=True, max_length=MAX_TOKENS, return_tensors="pt"
        )
        pixels = crop_preprocess(images[valid.to(images.device)], self._model.config.vision_config.image_size)
        patches = self._model.vision_model(pixel_values=pixels.to(device)).last_hidden_state
        text = self._model.text_encoder(
            input_ids=tokens["input_ids"].to(device),
            attention_mask=tokens["attention_mask"].to(device),
            encoder_hidden_states=patches,
            encoder_attention_mask=torch.ones(patches.shape[:2], dtype=torch.long, device=device),
            is_decoder=False,
        )
        return scatter(text.last_hidden_state[:, 0] @ self._weight + self._bias, valid)

    def self_test(self) -> SelfTest:
        """A red disc on white against a blue one."""
        red, blue = disc((1.0, 0.0, 0.0)), disc((0.0, 0.0, 1.0))
        return SelfTest(good=red, bad=blue, prompt="a red circle on a white background", metadata={})


def load(folder: Path) -> tuple[Any, Tensor, float]:
    """BLIP in evaluation mode, the head's weight ``[hidden]`` and its bias, in float32.

    Raises RewardError unless the file holds exactly the weights that the score depends on.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    transformers = weights_module.library("imagereward")
    try:
        state = load_file(folder / "model.safetensors")
        config = transformers.BlipConfig.from_pretrained(folder, local_files_only=True)
        head = state.pop("head.weight").float(), float(state.pop("head.bias"))
        model = transformers.BlipForImageTextRetrieval(config)
        outcome = model.load_state_dict({key: tensor.float() for key, tensor in state.items()}, strict=False)
    except (OSError, SafetensorError, RuntimeError, KeyError, ValueError) as error:
        raise RewardError(weights_module.missing("imagereward", folder, weights_module.first_line(error))) from error
    absent = [key for key in outcome.missing_keys if not key.startswith(UNUSED) and not key.endswith("position_ids")]
    if absent or outcome.unexpected_keys:
        detail = f"absent: {absent[:1]}, unexpected: {outcome.unexpected_keys[:1]}"
        raise RewardError(weights_module.missing("imagereward", folder, detail))
    return model.eval().requires_grad_(False), *head
