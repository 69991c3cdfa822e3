"""The reward of the desk task ``prefer``: a small learned scorer of picture and prompt, and as easily misled as one."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stepcredit.rewards.base import Metadata, RewardError, RewardInfo, SelfTest, to_uint8
from stepcredit.rewards.inputs import check_batch, scatter
from stepcredit.rewards.prefer_model import Scorer, load
from stepcredit.tasks.compose.render import SIZE, render


class PreferReward:
    """``scale * cos(picture, prompt)`` of a scorer trained on rendered pairs of ``compose``; images ``[B, 3, 24, 24]``.

    Smooth, and never wholly satisfied: rendered pictures score about 24 of 30 for their own prompt, and pictures made
    for the score have more. Differences for one prompt are log-odds that the first picture is the one meant. It hardly
    reads the order of words: see docs/prefer.md. ``weights``: a file that ``stepcredit pretrain prefer`` wrote, in
    place of the bundled one. Raises RewardError for a file that cannot be used.
    """

    def __init__(self, weights: str | None = None) -> None:
        try:
            self.scorer = bundled() if weights is None else load(Path(weights).expanduser())
        except (OSError, ValueError) as error:
            raise RewardError(f"reward 'prefer': {error}") from error
        scale = float(self.scorer.scale)
        self.info = RewardInfo(
            name="prefer",
            range=(-scale, scale),
            licence="none needed",
            description="a small contrastive scorer of picture and prompt, trained on rendered pairs; can be hacked",
            batch_size=256,
        )

    @torch.no_grad()
    def __call__(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Metadata]) -> Tensor:
        """Scores, float32 ``[B]``; NaN for an image that is not finite.

        Raises RewardError for images of another size than 24x24 and for words that ``compose`` does not have.
        """
        valid = check_batch("prefer", images, prompts, metadata)
        if images.shape[2:] != (SIZE, SIZE):
            raise RewardError(f"reward 'prefer': images must be {SIZE}x{SIZE}; got {tuple(images.shape[2:])}")
        texts = [prompt for prompt, ok in zip(prompts, valid.tolist(), strict=True) if ok]
        if not texts:
            return scatter(torch.empty(0), valid)
        pictures = to_uint8(images[valid.to(images.device)]).permute(0, 3, 1, 2).float() / 255
        unique = list(dict.fromkeys(texts))
        row = {text: k for k, text in enumerate(unique)}
        try:
            asked = self.scorer.embed_prompts(unique)[[row[text] for text in texts]]
        except ValueError as error:
            raise RewardError(f"reward 'prefer': {error}") from error
        return scatter(self.scorer.scale * (self.scorer.embed_pictures(pictures) * asked).sum(1), valid)

    def self_test(self) -> SelfTest:
        """A red circle with a blue square, against a red circle with a green one."""

        def pair(square: str) -> dict[str, Any]:
            clauses = [
                {"class": "circle", "count": 1, "color": "red"},
                {"class": "square", "count": 1, "color": square},
            ]
            text = f"a red circle and a {square} square on grey"
            return {"tag": "color_attr", "include": clauses, "prompt": text, "background": "grey"}

        asked = pair("blue")
        good, bad = render(asked, seed=0)[0], render(pair("green"), seed=0)[0]
        return SelfTest(good=good, bad=bad, prompt=asked["prompt"], metadata=asked, margin=2.0)


def bundled() -> Scorer:
    """The scorer that comes with the package."""
    with resources.as_file(resources.files("stepcredit") / "assets" / "prefer.safetensors") as path:
        return load(path)
