"""Stand-ins of rewards for rehearsals: the same code on tiny random models, so that no large weights are needed.

Their numbers mean nothing. What they prove is that a recipe's reward can be called from the first image to the last.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from stepcredit.rewards.base import Metadata, RewardInfo, SelfTest
from stepcredit.rewards.clip_models import ClipCosine
from stepcredit.rewards.jpeg import JpegSize
from stepcredit.rewards.ocr import Ocr


class TinyPickscore:
    """PickScore's class on a random CLIP of two layers; scores differ between images and prompts, and mean nothing."""

    def __init__(self) -> None:
        self._score = _random_clip_score()
        self.info = self._score.info

    @property
    def networks(self) -> tuple[Any, ...]:
        """What may wait elsewhere while it is idle."""
        return self._score.networks

    def __call__(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Metadata]) -> Tensor:
        """Scores, float32 ``[B]``."""
        return self._score(images, prompts, metadata)

    def self_test(self) -> SelfTest:
        """PickScore's pair, the good one being the one that this random network happens to prefer."""
        test = self._score.self_test()
        pair = torch.stack([test.good, test.bad])
        good, bad = self(pair, [test.prompt] * 2, [test.metadata] * 2).tolist()
        return test if good > bad else replace(test, good=test.bad, bad=test.good)


class TinyOcr:
    """The OCR reward, without its detector, plus the JPEG size, without which random pictures would all score 0."""

    def __init__(self) -> None:
        self._ocr, self._size = Ocr(missing="nan", detect=False), JpegSize(goal="large", unit="bits_per_pixel")
        self.info = RewardInfo(
            name="tiny_ocr",
            range=(0.0, float("inf")),
            licence="Apache-2.0 (RapidOCR and the PP-OCR models)",
            description="OCR plus JPEG size: for rehearsals, where pictures hold no text",
        )

    def __call__(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Metadata]) -> Tensor:
        """Scores, float32 ``[B]``."""
        return self._ocr(images, prompts, metadata) + self._size(images, prompts, metadata)

    def self_test(self) -> SelfTest:
        """As that of the OCR reward."""
        return self._ocr.self_test()


def _random_clip_score() -> ClipCosine:
    from stepcredit.policies import tiny_text

    transformers: Any = importlib.import_module("transformers")
    tokenizer = tiny_text.clip_tokenizer()
    shared = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 32}
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        model = transformers.CLIPModel(
            transformers.CLIPConfig(
                projection_dim=16,
                text_config={
                    **shared,
                    "vocab_size": len(tokenizer),
                    "max_position_embeddings": tokenizer.model_max_length,
                    "bos_token_id": tokenizer.bos_token_id,
                    "eos_token_id": tokenizer.eos_token_id,
                    "pad_token_id": tokenizer.pad_token_id,
                },
                vision_config={**shared, "image_size": 28, "patch_size": 14},
            )
        )
        for name, parameter in model.named_parameters():
            if name != "logit_scale":  # wider than at initialisation, so that images differ in score
                torch.nn.init.normal_(parameter, std=0.2)
    info = RewardInfo(
        name="tiny_pickscore",
        range=(-100.0, 100.0),
        licence="none needed",
        description="PickScore's code on a tiny random CLIP: for rehearsals",
    )
    return ClipCosine(info, model.eval().requires_grad_(False), tokenizer, scale=100.0)
