"""From clean latents to rewards: decoded and judged piece by piece."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import torch
from torch import Tensor

from stepcredit.policies.placement import at_hand
from stepcredit.rewards.base import Judgement, join, judge, require_finite
from stepcredit.rewards.composite import Composite
from stepcredit.tasks import Prompt
from stepcredit.training.setup import Setup


def judge_latents(parts: Setup, x_0: Tensor, asked: list[Prompt], of: Tensor) -> Judgement:
    """Judgement of clean latents ``[N, ...]``, decoded and judged in the reward's own batches: ten thousand images of
    512 pixels, as a step-wise rollout has, would fill 30 GB at once.

    ``of``: long ``[N]``, equal for latents that a composite compares with each other. Its parts are asked for such
    pieces too, and combined when all are there, since groups must not be cut.
    A reward that waits for a server (``concurrent`` requests at a time) is asked while the next pieces are decoded.
    Raises RewardError as ``judge``, FloatingPointError for an image that is not finite.
    """
    reward = parts.reward
    texts, metadata = [prompt.text for prompt in asked], [prompt.metadata for prompt in asked]

    def ask(images: Tensor, some: slice) -> Judgement:
        if isinstance(reward, Composite):
            unknown = torch.full((len(images),), torch.nan)
            return Judgement(unknown, reward.native(images, texts[some], metadata[some]), None)
        return judge(reward, images, texts[some], metadata[some])

    size = reward.piece if isinstance(reward, Composite) else reward.info.batch_size
    width = int(getattr(reward, "concurrent", 1))
    done: list[Judgement] = []
    waiting: deque[Future[Judgement]] = deque()
    with at_hand(parts.policy), ThreadPoolExecutor(width) as pool:
        for start in range(0, len(asked), size):
            some = slice(start, start + size)
            images = torch.cat([parts.policy.decode(part).cpu() for part in x_0[some].split(parts.recipe.micro_batch)])
            require_finite(images, texts[some])
            if width == 1:
                done.append(ask(images, some))
                continue
            waiting.append(pool.submit(ask, images, some))
            if len(waiting) >= width:  # no more images in memory than requests under way
                done.append(waiting.popleft().result())
        done += [future.result() for future in waiting]
    found = join(done)
    if isinstance(reward, Composite):
        return replace(
            found, score=reward.combined(found.components, [(of == k).nonzero().flatten() for k in of.unique()])
        )
    return found
