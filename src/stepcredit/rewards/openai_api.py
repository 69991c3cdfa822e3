"""Questions about pictures to an OpenAI-compatible server (vLLM, SGLang, ...), on top of the careful HTTP client."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from stepcredit.rewards.base import RewardError
from stepcredit.rewards.http_json import Endpoint
from stepcredit.rewards.wire import loads
from stepcredit.untrusted import clean

TOKEN_ENV = "STEPCREDIT_API_KEY"
TOP = 20


class _Part(BaseModel):
    """What is read of an answer; such servers add fields of their own, which are ignored."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


class _Candidate(_Part):
    token: str
    logprob: float = Field(le=1e-3, allow_inf_nan=True)


class _Token(_Candidate):
    top_logprobs: list[_Candidate] = []


class _Logprobs(_Part):
    content: list[_Token] | None = None


class _Message(_Part):
    content: str | None = None


class _Choice(_Part):
    message: _Message
    logprobs: _Logprobs | None = None


class _Completion(_Part):
    choices: list[_Choice] = Field(min_length=1)


@dataclass(frozen=True)
class Token:
    """One generated token and the log-probabilities of its likeliest alternatives, itself among them."""

    text: str
    top: Mapping[str, float]


@dataclass(frozen=True)
class Answer:
    """A generated text, with its tokens where log-probabilities were asked for and given."""

    text: str
    tokens: tuple[Token, ...] = ()


@dataclass(frozen=True)
class Question:
    """One user message: PNG pictures, base64, then text."""

    pictures: tuple[str, ...]
    text: str
    max_tokens: int = 1
    logprobs: bool = True


@dataclass(frozen=True)
class Chat:
    """A model behind ``<url>/chat/completions``, asked greedily.

    ``extra`` joins every request, such as ``{"chat_template_kwargs": {"enable_thinking": False}}``. ``parallel``
    questions are under way at a time, whoever asks them. ``on_failure``: what becomes of a question that the server
    does not answer: ``fail`` raises, ``nan`` gives None in its place. An answer against the protocol always raises.
    """

    endpoint: Endpoint
    model: str
    parallel: int = 8
    on_failure: Literal["fail", "nan"] = "fail"
    extra: Mapping[str, Any] = field(default_factory=dict)
    _free: threading.Semaphore = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        name = self.endpoint.reward
        if self.parallel < 1:
            raise ValueError(f"{name}: parallel must be at least 1; got {self.parallel}")
        if self.on_failure not in ("fail", "nan"):
            raise ValueError(f"{name}: on_failure must be 'fail' or 'nan'; got {self.on_failure!r}")
        object.__setattr__(self, "_free", threading.Semaphore(self.parallel))

    def ask_all(self, questions: Sequence[Question]) -> list[Answer | None]:
        """Answers in the order of the questions."""
        if not questions:
            return []
        with ThreadPoolExecutor(min(self.parallel, len(questions))) as pool:
            return list(pool.map(self.ask, questions))

    def ask(self, question: Question) -> Answer | None:
        """The answer to one question. Raises RewardError, in one sentence."""
        images = [
            {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{picture}"}}
            for picture in question.pictures
        ]
        request: dict[str, Any] = {
            "model": self.model,
            "messages": [{"role": "user", "content": [*images, {"type": "text", "text": question.text}]}],
            "temperature": 0,
            "max_tokens": question.max_tokens,
            **({"logprobs": True, "top_logprobs": TOP} if question.logprobs else {}),
            **self.extra,
        }
        try:
            with self._free:
                data = self.endpoint.post("/chat/completions", json.dumps(request, allow_nan=False).encode())
        except RewardError:
            if self.on_failure == "nan":
                return None
            raise
        try:
            choice = _Completion.model_validate(loads(data), strict=True).choices[0]
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = clean(".".join(map(str, first["loc"])))[:120] or "the message"
            raise self._against(f"{where}: {first['msg']}") from None
        except ValueError as error:
            raise self._against(str(error)) from None
        tokens = choice.logprobs.content if choice.logprobs else None
        return Answer(
            choice.message.content or "",
            tuple(
                Token(one.token, {c.token: c.logprob for c in (*reversed(one.top_logprobs), one)})
                for one in tokens or ()
            ),
        )

    def _against(self, what: str) -> RewardError:
        return RewardError(f"reward {self.endpoint.reward!r}: {self.endpoint.url} answers against the protocol: {what}")
