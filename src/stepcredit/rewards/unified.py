"""UnifiedReward (Wang et al. 2025), served: single scores, three axes, or pairwise win rates within a group."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from PIL import Image
from torch import Tensor

from stepcredit.rewards import unified_rules as rules
from stepcredit.rewards.base import Metadata, RewardInfo, SelfTest
from stepcredit.rewards.clip_models import disc
from stepcredit.rewards.http_json import Endpoint
from stepcredit.rewards.inputs import check_batch, group_rows, scatter, to_pil
from stepcredit.rewards.openai_api import TOKEN_ENV, Answer, Chat, Question
from stepcredit.rewards.wire import encode_picture

Kind = Literal["single", "acs", "pairwise"]
_TEMPLATES: dict[Kind, str] = {"single": rules.SINGLE, "acs": rules.ACS, "pairwise": rules.PAIRWISE}


class UnifiedReward:
    """UnifiedReward behind an OpenAI-compatible server.

    ``kind``: ``single`` (1 to 5, the expected score where the server gives log-probabilities and ``use_logprobs``),
    ``acs`` (1 to 5, the mean of alignment, coherence and style, or weighted by ``weights``), ``pairwise`` (0 to 1, the
    share of duels won against the other images of the prompt, each duel fought in both orders; 2.0 models). A reply
    that cannot be read is NaN. ``template`` replaces the question, such as by the one the model was trained with; it
    holds {prompt}. ``side``: the longest side of the picture that is sent, in pixels; unchanged by default.
    The key comes from the environment variable STEPCREDIT_API_KEY. Raises ValueError for bad options.
    """

    concurrent = 2
    """Calls that may be under way; ``Chat`` bounds their questions together."""

    def __init__(
        self,
        url: str = "http://127.0.0.1:8080/v1",
        model: str = "UnifiedReward",
        kind: Kind = "single",
        template: str | None = None,
        weights: Mapping[str, float] | None = None,
        use_logprobs: bool = True,
        group_size: int | None = None,
        side: int | None = None,
        max_tokens: int = 512,
        timeout: float = 120.0,
        retries: int = 3,
        parallel: int = 8,
        on_failure: Literal["fail", "nan"] = "fail",
        extra: Mapping[str, Any] | None = None,
        **advanced: Any,
    ) -> None:
        if kind not in _TEMPLATES:
            raise ValueError(f"unified_reward: kind must be one of {', '.join(_TEMPLATES)}; got {kind!r}")
        self._template = template or _TEMPLATES[kind]
        if "{prompt}" not in self._template:
            raise ValueError(f"unified_reward: template must contain {{prompt}}; got {self._template[:80]!r}")
        chosen = {axis.lower(): 1.0 for axis in rules.AXES} if weights is None else dict(weights)
        if not set(chosen) <= {axis.lower() for axis in rules.AXES} or min(chosen.values(), default=-1) < 0:
            raise ValueError(
                f"unified_reward: weights must be non-negative, for alignment, coherence, style; got {chosen}"
            )
        if not sum(chosen.values()) > 0:
            raise ValueError(f"unified_reward: weights must not all be zero; got {chosen}")
        if side is not None and side < 32:
            raise ValueError(f"unified_reward: side must be at least 32; got {side}")
        self._kind, self._weights, self._logprobs = kind, chosen, use_logprobs and kind == "single"
        self._group_size, self._side, self._max_tokens = group_size, side, max_tokens
        endpoint = Endpoint("unified_reward", url, TOKEN_ENV, timeout, retries, **advanced)
        self._chat = Chat(endpoint, model, parallel, on_failure, extra or {})
        self.per_image = kind != "pairwise"
        resized = f", longest side {side}" if side else ""
        self.info = RewardInfo(
            name="unified_reward",
            range=(1.0, 5.0) if self.per_image else (0.0, 1.0),
            licence="MIT",
            description=f"UnifiedReward, {kind}{resized}, {'own' if template else 'default'} wording",
            needs=(f"{model} at {url}",),
            batch_size=64 if self.per_image else 1 << 30,
        )

    def __call__(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Metadata]) -> Tensor:
        """Scores, float32 ``[B]``; NaN where no score could be read. ``pairwise`` needs whole groups in one call."""
        return self.components(images, prompts, metadata)["score"]

    def components(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Metadata]) -> dict[str, Tensor]:
        """The score, and for ``acs`` its axes alignment, coherence and style."""
        valid = check_batch("unified_reward", images, prompts, metadata)
        if self._kind == "pairwise":
            return {"score": self._duels(images, prompts, metadata, valid)}
        rows = valid.nonzero().flatten().tolist()
        questions = [
            self._question((picture,), prompts[row])
            for picture, row in zip(self._pictures(images, valid), rows, strict=True)
        ]
        answers = self._chat.ask_all(questions)
        if self._kind == "single":
            return {"score": scatter(torch.tensor([self._single(answer) for answer in answers]), valid)}
        axes = [rules.acs(answer.text if answer else "") for answer in answers]
        parts = {axis.lower(): torch.tensor([one[axis] for one in axes]) for axis in rules.AXES}
        total = sum(self._weights.values())
        # An axis of weight zero may be absent: some models leave Style out.
        score = sum((parts[axis] * weight / total for axis, weight in self._weights.items() if weight), torch.zeros(1))
        named = {axis: scatter(values, valid) for axis, values in parts.items()}
        return {"score": scatter(score.expand(len(rows)), valid), **named}

    def _single(self, answer: Answer | None) -> float:
        if answer is None:
            return math.nan
        return rules.expected(answer.text, answer.tokens) if answer.tokens else rules.single(answer.text)

    def _duels(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Metadata], valid: Tensor) -> Tensor:
        pictures = dict(zip(valid.nonzero().flatten().tolist(), self._pictures(images, valid), strict=True))
        groups = group_rows("unified_reward", prompts, metadata, self._group_size)
        pairs = [pair for group in groups for pair in itertools.permutations([r for r in group if r in pictures], 2)]
        answers = self._chat.ask_all([self._question((pictures[i], pictures[j]), prompts[i]) for i, j in pairs])
        shares = [
            (i, j, rules.pairwise(answer.text) if answer else math.nan)
            for (i, j), answer in zip(pairs, answers, strict=True)
        ]
        return torch.tensor(rules.win_rates(len(prompts), shares), dtype=torch.float32)

    def _question(self, pictures: tuple[str, ...], prompt: str) -> Question:
        text = self._template.replace("{prompt}", prompt)
        return Question(pictures, text, self._max_tokens, logprobs=self._logprobs)

    def _pictures(self, images: Tensor, valid: Tensor) -> list[str]:
        found = to_pil(images[valid.to(images.device)]) if bool(valid.any()) else []
        return [encode_picture(self._resize(picture)) for picture in found]

    def _resize(self, picture: Image.Image) -> Image.Image:
        if self._side is None:
            return picture
        scale = self._side / max(picture.size)
        width, height = (max(1, round(edge * scale)) for edge in picture.size)
        return picture.resize((width, height), Image.Resampling.BICUBIC)

    def self_test(self) -> SelfTest:
        """A red disc on white against a blue one."""
        red, blue = disc((1.0, 0.0, 0.0)), disc((0.0, 0.0, 1.0))
        return SelfTest(good=red, bad=blue, prompt="a red circle on a white background", metadata={})
