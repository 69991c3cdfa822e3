"""The reward of the desk task ``compose``: GenEval's rules on what a small exact detector finds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from stepcredit.rewards import geneval_rules
from stepcredit.rewards.base import Metadata, RewardError, RewardInfo, SelfTest
from stepcredit.rewards.inputs import check_batch, scatter
from stepcredit.tasks.compose.detect import Detection, Detector, detect
from stepcredit.tasks.compose.render import render

Mode = Literal["partial", "official", "strict"]

_RULES: dict[Mode, Callable[[Sequence[Detection], Metadata], float]] = {
    "partial": geneval_rules.flow_grpo,
    "official": geneval_rules.official,
    "strict": geneval_rules.strict,
}


class ComposeReward:
    """Detects coloured shapes and applies GenEval's rules; images ``[B, 3, 24, 24]``, result in [0, 1].

    ``mode``: ``partial`` is Flow-GRPO's partial credit, each term bounded below at 0; ``official`` is 1 where GenEval
    calls the image correct (at least the asked count), ``strict`` asks for the exact count. ``partial`` is 1 exactly
    where ``strict`` is. Detections count when their score exceeds ``threshold``, for every tag: a blurred or
    half-formed object is not there yet. ``detector`` may be any callable that gives Detections.
    """

    def __init__(self, mode: Mode = "partial", threshold: float = 0.5, detector: Detector = detect) -> None:
        if mode not in _RULES:
            raise ValueError(f"compose: mode must be one of {', '.join(_RULES)}; got {mode!r}")
        if not 0 <= threshold < 1:
            raise ValueError(f"compose: threshold must lie in [0, 1); got {threshold}")
        self.mode, self.threshold, self.detector = mode, threshold, detector
        self.info = RewardInfo(
            name="compose",
            range=(0.0, 1.0),
            licence="none needed",
            description=f"GenEval's rules over coloured shapes, {mode}",
            batch_size=256,
        )

    def __call__(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Metadata]) -> Tensor:
        """Rewards, float32 ``[B]``; NaN for an image that is not finite.

        Raises ValueError for images of another size than 24x24 and RewardError for metadata without clauses.
        """
        return self._judge(images, prompts, metadata, self.mode)

    def exact(self, images: Tensor, metadata: Sequence[Metadata]) -> Tensor:
        """Whether each image shows what was asked, by the ``strict`` rule whatever the mode: bool ``[B]``."""
        prompts = [str(entry.get("prompt", "")) for entry in metadata]
        return self._judge(images, prompts, metadata, "strict") == 1

    def detections(self, images: Tensor) -> list[list[Detection]]:
        """The objects that count, surest first, for each image: for reports and for a look at what was seen."""
        return [self._confident(found) for found in self.detector(images)]

    def _confident(self, found: Sequence[Detection]) -> list[Detection]:
        return geneval_rules.confident(found, "", threshold=self.threshold)

    def _judge(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Metadata], mode: Mode) -> Tensor:
        valid = check_batch("compose", images, prompts, metadata, need_prompt=False)
        for index, entry in enumerate(metadata):
            if not entry.get("include"):
                raise RewardError(f"compose: metadata {index} has no 'include' clauses; pass the prompt's own metadata")
        asked = [entry for entry, ok in zip(metadata, valid.tolist(), strict=True) if ok]
        seen = self.detections(images[valid.to(images.device)]) if asked else []
        rule = _RULES[mode]
        scores = [float(rule(found, entry)) for found, entry in zip(seen, asked, strict=True)]
        return scatter(torch.tensor(scores, dtype=torch.float32), valid)

    def self_test(self) -> SelfTest:
        """A red circle with a blue square, against the same two with their colours exchanged."""

        def pair(circle: str, square: str) -> Metadata:
            clauses = [
                {"class": "circle", "count": 1, "color": circle},
                {"class": "square", "count": 1, "color": square},
            ]
            text = f"a {circle} circle and a {square} square on grey"
            return {"tag": "color_attr", "include": clauses, "prompt": text, "background": "grey"}

        asked = pair("red", "blue")
        good, bad = render(asked, seed=0)[0], render(pair("blue", "red"), seed=0)[0]
        return SelfTest(good=good, bad=bad, prompt=asked["prompt"], metadata=asked, margin=0.4)
