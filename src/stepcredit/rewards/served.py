"""Rewards that run in another process or on another machine: ``remote``, and ``deqa``, which only exists so."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from stepcredit.rewards import wire
from stepcredit.rewards.base import Metadata, RewardError, RewardInfo, SelfTest
from stepcredit.rewards.http_json import Endpoint
from stepcredit.rewards.inputs import check_batch, scatter

OnFailure = Literal["fail", "nan"]
TOKEN_ENV = "STEPCREDIT_REWARD_TOKEN"


class RemoteReward:
    """A reward behind ``stepcredit serve-reward``: images go as PNG, so the server sees them rounded to 8 bits.

    The server is asked for the reward's name, range and batch size when this object is built. ``expect``: the name
    that it must give. ``on_failure``: ``fail`` raises when the server cannot be used, ``nan`` warns and marks the
    samples of that call as failed. A reply that breaks the schema, in length, type or value, always raises. The
    token is read from the environment variable STEPCREDIT_REWARD_TOKEN. ``concurrent``: requests under way at a time
    while a run scores a rollout; it changes no result.
    """

    def __init__(
        self,
        url: str = "http://127.0.0.1:8765",
        expect: str | None = None,
        timeout: float = 120.0,
        retries: int = 3,
        on_failure: OnFailure = "fail",
        concurrent: int = 2,
        **advanced: Any,
    ) -> None:
        if on_failure not in ("fail", "nan"):
            raise ValueError(f"remote: on_failure must be 'fail' or 'nan'; got {on_failure!r}")
        if concurrent < 1:
            raise ValueError(f"remote: concurrent must be at least 1; got {concurrent}")
        self.concurrent = concurrent
        self._endpoint = Endpoint("remote", url, TOKEN_ENV, timeout, retries, **advanced)
        self._on_failure = on_failure
        self._limits = wire.Limits()
        told = self._parse(wire.InfoReply, self._endpoint.get("/v1/info"))
        if expect is not None and told.name != expect:
            raise RewardError(f"reward 'remote': {url} serves {told.name!r}, expected {expect!r}")
        self.served = told.name
        self.per_image = told.per_image
        self.info: RewardInfo = told.info(f"remote:{told.name}", (f"a reward server at {url}",))

    def __call__(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Metadata]) -> Tensor:
        """The server's scores, float32 ``[B]``; NaN where it could not score. Raises RewardError as the class says."""
        valid = check_batch(self.info.name, images, prompts, metadata, need_prompt=False)
        rows = valid.nonzero().flatten().tolist()
        if not rows:
            return scatter(torch.empty(0), valid)
        request = {
            "version": 1,
            "images": wire.encode_images(images[valid.to(images.device)]),
            "prompts": [prompts[row] for row in rows],
            "metadata": [dict(metadata[row]) for row in rows],
        }
        try:
            message = json.dumps(request, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise RewardError(f"reward {self.info.name!r}: the metadata must be JSON: {error}") from error
        try:
            data = self._endpoint.post("/v1/score", message.encode())
        except RewardError as error:
            if self._on_failure == "fail":
                raise
            warnings.warn(f"{error}; {len(rows)} samples are left out", stacklevel=2)
            return torch.full((len(images),), float("nan"))
        reply = self._parse(wire.ScoreReply, data)
        if reply.reward != self.served:
            raise RewardError(f"reward {self.info.name!r}: the server now answers as {reply.reward!r}")
        if len(reply.scores) != len(rows):
            raise RewardError(
                f"reward {self.info.name!r}: the server gave {len(reply.scores)} scores for {len(rows)} images; first "
                f"affected is sample {rows[min(len(reply.scores), len(rows) - 1)]}"
            )
        scores = [float("nan") if value is None else value for value in reply.scores]
        return scatter(torch.tensor(scores, dtype=torch.float32), valid)

    def self_test(self) -> SelfTest:
        """The pair that the served reward proposes."""
        reply = self._parse(wire.SelfTestReply, self._endpoint.get("/v1/self-test"))
        try:
            return reply.test(self._limits)
        except ValueError as error:
            raise RewardError(f"reward {self.info.name!r}: the server's self-test: {error}") from error

    def _parse(self, kind: type[wire.M], data: bytes) -> wire.M:
        try:
            return wire.parse(kind, data)
        except ValueError as error:
            raise RewardError(f"reward 'remote': {self._endpoint.url} answers against the protocol: {error}") from error


def deqa(url: str = "http://127.0.0.1:8766", **options: Any) -> RemoteReward:
    """DeQA-Score: technical image quality from 1 to 5, blind to the prompt.

    Its model needs its own code and an old transformers, so it runs in an environment of its own behind the ``remote``
    protocol, served under the name ``deqa``; docs/rewards.md shows how. Options are those of ``remote``.
    """
    return RemoteReward(url, expect="deqa", **options)
