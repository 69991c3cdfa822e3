"""Stand-ins of rewards for rehearsals: the same code on tiny random models, so that no large weights are needed.

Their numbers mean nothing. What they prove is that a recipe's reward can be called from the first image to the last.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from stepcredit.rewards.base import Metadata, Reward, RewardInfo, SelfTest
from stepcredit.rewards.clip_models import ClipCosine
from stepcredit.rewards.geneval import ColourJudge, GenEval
from stepcredit.rewards.jpeg import JpegSize
from stepcredit.rewards.mask2former_names import COCO
from stepcredit.rewards.ocr import Ocr

DETECTOR_SIDE = 64
"""Short side, in pixels, of what the tiny detector is shown."""


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
        return _preferred(self, self._score.self_test())


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


class TinyGenEval:
    """GenEval with partial credit on a random detector of 80 classes and a random CLIP, plus the JPEG size.

    Sizes apart it is the whole reward: the network's input, masks and boxes, colours, and all three rules. The size of
    the file is there because most random pictures show nothing that was asked for.
    """

    def __init__(self) -> None:
        with _seeded():
            detector = _random_detector()
        colour = ColourJudge(*_random_clip())
        self._geneval = GenEval(detector, colour, mode="flow_grpo", short=DETECTOR_SIDE)
        self._size = JpegSize(goal="large", unit="bits_per_pixel")
        self.networks = self._geneval.networks
        self.info = replace(
            self._geneval.info,
            name="tiny_geneval",
            range=(0.0, float("inf")),
            licence="none needed",
            description="GenEval's code on tiny random models, plus JPEG size: for rehearsals",
            needs=("stepcredit[diffusers]",),
        )

    def __call__(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Metadata]) -> Tensor:
        """Scores, float32 ``[B]``. Raises RewardError for unusable metadata."""
        return self.components(images, prompts, metadata)["score"]

    def components(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Metadata]) -> dict[str, Tensor]:
        """As those of the real reward, its score raised by the JPEG size."""
        parts = self._geneval.components(images, prompts, metadata)
        return {**parts, "score": parts["score"] + self._size(images, prompts, metadata)}

    def self_test(self) -> SelfTest:
        """GenEval's pair, the good one being the one that these random networks happen to prefer."""
        return _preferred(self, self._geneval.self_test())


def _preferred(reward: Reward, test: SelfTest) -> SelfTest:
    """A pair of images with the one first that a reward scores higher."""
    pair = torch.stack([test.good, test.bad])
    good, bad = reward(pair, [test.prompt] * 2, [test.metadata] * 2).tolist()
    return test if good > bad else replace(test, good=test.bad, bad=test.good)


@contextmanager
def _seeded() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        yield


def _random_detector() -> Any:
    """A Mask2Former of 0.1 M parameters over COCO's classes, surer of what it sees than at initialisation."""
    transformers: Any = importlib.import_module("transformers")
    backbone = {
        "model_type": "swin",
        "embed_dim": 8,
        "depths": [1, 1, 1, 1],
        "num_heads": [1, 1, 2, 2],
        "window_size": 4,
        "out_features": ["stage1", "stage2", "stage3", "stage4"],
    }
    model = transformers.Mask2FormerForUniversalSegmentation(
        transformers.Mask2FormerConfig(
            backbone_config=backbone,
            feature_size=32,
            mask_feature_size=32,
            hidden_dim=32,
            encoder_feedforward_dim=16,
            dim_feedforward=32,
            encoder_layers=1,
            decoder_layers=2,
            num_attention_heads=2,
            num_queries=20,
            id2label=dict(enumerate(COCO)),
        )
    )
    for name, parameter in model.named_parameters():
        if "class_predictor" in name:
            torch.nn.init.normal_(parameter)
        elif "mask_embedder" in name:
            torch.nn.init.normal_(parameter, std=0.5)
    return model.eval().requires_grad_(False)


def _random_clip() -> tuple[Any, Any]:
    """A CLIP of two layers and its tokenizer."""
    from stepcredit.policies import tiny_text

    transformers: Any = importlib.import_module("transformers")
    tokenizer = tiny_text.clip_tokenizer()
    shared = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 32}
    with _seeded():
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
    return model.eval().requires_grad_(False), tokenizer


def _random_clip_score() -> ClipCosine:
    info = RewardInfo(
        name="tiny_pickscore",
        range=(-100.0, 100.0),
        licence="none needed",
        description="PickScore's code on a tiny random CLIP: for rehearsals",
    )
    return ClipCosine(info, *_random_clip(), scale=100.0)
