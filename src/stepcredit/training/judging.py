"""From clean latents to rewards: decoded piece by piece, and asked for without waiting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from stepcredit.policies.placement import at_hand
from stepcredit.rewards.asking import Answer, Asking
from stepcredit.rewards.base import Judgement, join, require_finite
from stepcredit.rewards.composite import Composite
from stepcredit.tasks import Prompt
from stepcredit.training.setup import Setup


def judge_latents(parts: Setup, asking: Asking, x_0: Tensor, asked: Sequence[Prompt], of: Tensor) -> Answer:
    """Judgement of clean latents ``[N, ...]``, decoded and judged in the reward's own batches: ten thousand images of
    512 pixels, as a step-wise rollout has, would fill 30 GB at once.

    ``of``: long ``[N]``, equal for latents that a composite compares with each other. Its parts are asked for such
    pieces too, and combined when all are there, since groups must not be cut. All is decoded when this returns; a
    server may still be judging. Raises RewardError as ``asking``, FloatingPointError for an image that is not finite.
    """
    reward = parts.reward
    texts, metadata = [prompt.text for prompt in asked], [prompt.metadata for prompt in asked]
    size = reward.piece if isinstance(reward, Composite) else reward.info.batch_size
    pieces: list[Answer] = []
    with at_hand(parts.policy):
        for start in range(0, len(asked), size):
            some = slice(start, start + size)
            images = torch.cat([parts.policy.decode(part).cpu() for part in x_0[some].split(parts.recipe.micro_batch)])
            require_finite(images, texts[some])
            pieces.append(asking(images, texts[some], metadata[some]))

    def answer() -> Judgement:
        found = join([piece() for piece in pieces])
        if isinstance(reward, Composite):
            rows = [(of == k).nonzero().flatten() for k in of.unique()]
            return replace(found, score=reward.combined(found.components, rows))
        return found

    return answer
