"""Rewards that are the cosine of a CLIP model between image and prompt: PickScore and CLIP ViT-L/14."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from stepcredit.rewards import weights as weights_module
from stepcredit.rewards.base import Metadata, RewardInfo, SelfTest
from stepcredit.rewards.inputs import check_batch, scatter, to_pil
from stepcredit.rewards.weights import Hub, pick_device, resolve

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
CLIP_L = Hub("openai/clip-vit-large-patch14", "32bd64288804d66eefd0ccbe215aa642df71cc41")
CLIP_H = Hub("laion/CLIP-ViT-H-14-laion2B-s32B-b79K", "1c2b8495b28150b8a4922ee1c8edee224c284c0c")
PICKSCORE = Hub("yuvalkirstain/PickScore_v1", "a4e4367c6dfa7288a00c550414478f865b875800")

Preprocess = Callable[[Tensor, int], Tensor]
"""Images ``[B, 3, H, W]`` in [0, 1] and a side in pixels -> normalised ``[B, 3, side, side]``."""


def normalise(images: Tensor) -> Tensor:
    """``(x - mean) / std`` per channel, with the mean and deviation of CLIP's training images."""
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (CLIP_MEAN, CLIP_STD))
    return (images - mean) / std


def crop_preprocess(images: Tensor, side: int = 224) -> Tensor:
    """CLIP's own preprocessing on 8-bit pictures: shortest side to ``side`` (bicubic), centre crop, normalise.

    Float32 ``[B, 3, side, side]`` on the CPU; equal to ``CLIPImageProcessor`` to 1e-5. What lies outside the central
    square of a picture that is not square is not seen.
    """
    return crop_pictures(to_pil(images), side)


def crop_pictures(pictures: Sequence[Image.Image], side: int = 224) -> Tensor:
    """The same for RGB pictures of any sizes."""
    return normalise(torch.stack([_resize_and_crop(picture, side) for picture in pictures]))


def _resize_and_crop(image: Image.Image, side: int) -> Tensor:
    short = min(image.size)
    width, height = (side if edge == short else int(side * edge / short) for edge in image.size)
    resized = np.array(image.resize((width, height), Image.Resampling.BICUBIC))
    top, left = (height - side) // 2, (width - side) // 2
    return torch.from_numpy(resized[top : top + side, left : left + side]).permute(2, 0, 1).float() / 255


class ClipCosine:
    """scale * cosine between the embeddings of image and prompt, in float32.

    ``model`` is a ``transformers.CLIPModel`` and ``tokenizer`` its tokenizer; prompts are cut at the model's length
    (77 tokens). Equal prompts of a batch are encoded once.
    """

    def __init__(
        self, info: RewardInfo, model: Any, tokenizer: Any, preprocess: Preprocess = crop_preprocess, scale: float = 1.0
    ) -> None:
        self.info, self.scale = info, scale
        self._model, self._tokenizer, self._preprocess = model, tokenizer, preprocess
        self._side: int = model.config.vision_config.image_size
        self._length: int = model.config.text_config.max_position_embeddings

    @property
    def networks(self) -> tuple[Any, ...]:
        """What may wait elsewhere while it is idle."""
        return (self._model,)

    @torch.no_grad()
    def __call__(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Metadata]) -> Tensor:
        """Scores, float32 ``[B]``; NaN for an image that is not finite. Raises RewardError for an empty prompt."""
        valid = check_batch(self.info.name, images, prompts, metadata)
        if not bool(valid.any()):
            return scatter(torch.empty(0), valid)
        wanted = [prompt for prompt, ok in zip(prompts, valid, strict=True) if ok]
        unique = list(dict.fromkeys(wanted))
        tokens = self._tokenizer(unique, padding=True, truncation=True, max_length=self._length, return_tensors="pt")
        device = self._model.device
        output = self._model(
            input_ids=tokens["input_ids"].to(device),
            attention_mask=tokens["attention_mask"].to(device),
            pixel_values=self._preprocess(images[valid.to(images.device)], self._side).to(device, self._model.dtype),
        )
        rows = torch.tensor([unique.index(prompt) for prompt in wanted], device=device)
        # The library has normalised both embeddings.
        cosine = (output.image_embeds.float() * output.text_embeds.float()[rows]).sum(dim=1)
        return scatter(self.scale * cosine, valid)

    def self_test(self) -> SelfTest:
        """A red disc on white against a blue one."""
        return SelfTest(
            good=disc((1.0, 0.0, 0.0)),
            bad=disc((0.0, 0.0, 1.0)),
            prompt="a red circle on a white background",
            metadata={},
        )


def pickscore(
    weights: str | Path | None = None,
    revision: str | None = None,
    tokenizer: str | Path | None = None,
    device: str | None = None,
) -> ClipCosine:
    """PickScore v1 (Kirstain et al. 2023): the learned scale, about 100, times the cosine of a tuned CLIP-H/14.

    Raw units as papers print them, about 19 to 25; some training code divides by 26. ``weights`` and ``tokenizer``
    are hub ids or folders. Raises RewardError when they are absent.
    """
    source = resolve(weights, revision, PICKSCORE)
    model = weights_module.model("pickscore", "CLIPModel", source, pick_device(device))
    scale = float(model.logit_scale.exp())
    info = RewardInfo(
        name="pickscore",
        range=(-scale, scale),
        licence="code MIT; none stated for the weights",
        description="PickScore v1, scale times cosine; sees the central square and 77 tokens",
        needs=("stepcredit[diffusers]", PICKSCORE.id),
    )
    return ClipCosine(info, model, clip_tokenizer("pickscore", tokenizer, source, CLIP_H), scale=scale)


def clip_l14_cos(
    weights: str | Path | None = None,
    revision: str | None = None,
    tokenizer: str | Path | None = None,
    device: str | None = None,
) -> ClipCosine:
    """The plain cosine of OpenAI CLIP ViT-L/14, in [-1, 1], about .24 to .29.

    Named so because "CLIPScore" means five different numbers: 2.5 * cos of ViT-B/32, 100 * cos, 100 * cos / 30, ...
    """
    source = resolve(weights, revision, CLIP_L)
    model = weights_module.model("clip_l14_cos", "CLIPModel", source, pick_device(device))
    info = RewardInfo(
        name="clip_l14_cos",
        range=(-1.0, 1.0),
        licence="MIT",
        description="cosine of CLIP ViT-L/14; sees the central square and 77 tokens",
        needs=("stepcredit[diffusers]", CLIP_L.id),
    )
    return ClipCosine(info, model, clip_tokenizer("clip_l14_cos", tokenizer, source, CLIP_L))


def clip_tokenizer(reward: str, chosen: str | Path | None, model: Hub | Path, default: Hub) -> Any:
    """The tokenizer asked for, else the one beside the model's weights in a folder, else the default."""
    beside = isinstance(model, Path) and any((model / name).exists() for name in ("tokenizer.json", "vocab.json"))
    source = model if chosen is None and beside else resolve(chosen, None, default)
    return weights_module.pretrained(reward, "CLIPTokenizer", source, "tokenizer")


def disc(colour: tuple[float, float, float], side: int = 256) -> Tensor:
    """A disc of that colour in the middle of a white page, ``[3, side, side]``."""
    line = torch.linspace(-1, 1, side)
    inside = line[:, None] ** 2 + line[None, :] ** 2 < 0.4
    return torch.where(inside, torch.tensor(colour).view(3, 1, 1), torch.ones(3, 1, 1))
