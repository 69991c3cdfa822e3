"""A vision-language model asked yes or no: how sure is it that the image shows the prompt?"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from PIL import Image
from torch import Tensor

from stepcredit.rewards import weights as weights_module
from stepcredit.rewards.base import Metadata, RewardError, RewardInfo, SelfTest
from stepcredit.rewards.clip_models import disc
from stepcredit.rewards.http_json import Endpoint
from stepcredit.rewards.inputs import check_batch, scatter, to_pil
from stepcredit.rewards.openai_api import TOKEN_ENV, Answer, Chat, Question
from stepcredit.rewards.weights import Hub, pick_device, resolve
from stepcredit.rewards.wire import encode_images

Output = Literal["log_odds", "probability"]
QWEN = Hub("Qwen/Qwen2.5-VL-7B-Instruct", "cc594898137f460bfe9f0759e9844b3ce807cfb5")
QUESTION = 'Does this image show "{prompt}"? Answer the question with Yes or No.'
YES = ("Yes", "yes", " Yes", " yes")
NO = ("No", "no", " No", " no")


def log_odds(top: Mapping[str, float]) -> float:
    """log P(yes) - log P(no) from the log-probabilities of one token's likeliest alternatives.

    Every spelling counts. NaN when neither word is listed. When one is not, its probability is taken to be that of the
    least likely alternative listed, which it cannot exceed: the odds are then a lower bound of their size.
    """
    yes = [top[form] for form in YES if form in top]
    no = [top[form] for form in NO if form in top]
    if not yes and not no:
        return math.nan
    floor = min(top.values())
    return _logsumexp(yes or [floor]) - _logsumexp(no or [floor])


def _logsumexp(values: Sequence[float]) -> float:
    high = max(values)
    return high if math.isinf(high) else high + math.log(sum(math.exp(value - high) for value in values))


class LocalYesNo:
    """The model in this process, through transformers: one forward per image, the logits of the last position.

    ``probability`` saturates at 0 and 1 where log-odds still tell members of a group apart.
    """

    def __init__(self, model: Any, processor: Any, question: str, output: Output, licence: str, source: str) -> None:
        self._model, self._processor, self._question, self._output = model, processor, question, output
        self._yes, self._no = (_token_ids(processor.tokenizer, forms) for forms in (YES, NO))
        self.info = _info(output, licence, f"{source}, {question}", ("stepcredit[diffusers]", source), 16)

    @torch.no_grad()
    def __call__(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Metadata]) -> Tensor:
        """Scores, float32 ``[B]``; NaN for an image that is not finite. Raises RewardError for an empty prompt."""
        valid = check_batch("vlm_yes_no", images, prompts, metadata)
        rows = valid.nonzero().flatten().tolist()
        pictures = to_pil(images[valid.to(images.device)]) if rows else []
        odds = [self._ask(picture, prompts[row]) for picture, row in zip(pictures, rows, strict=True)]
        return scatter(_output(torch.tensor(odds), self._output), valid)

    def _ask(self, picture: Image.Image, prompt: str) -> float:
        content = [{"type": "image"}, {"type": "text", "text": self._question.replace("{prompt}", prompt)}]
        # Thinking would put other words where the answer is expected.
        thinking = {"enable_thinking": False} if "enable_thinking" in str(self._processor.chat_template) else {}
        text = self._processor.apply_chat_template(
            [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False, **thinking
        )
        inputs = self._processor(text=[text], images=[picture], return_tensors="pt").to(self._model.device)
        if "pixel_values" in inputs:
            inputs["pixel_values"] = inputs["pixel_values"].to(self._model.dtype)
        logits = self._model(**inputs).logits[0, -1].float()
        return float(logits[self._yes].logsumexp(0) - logits[self._no].logsumexp(0))

    def self_test(self) -> SelfTest:
        """A red disc on white against a blue one."""
        return _self_test()


class ServedYesNo:
    """The model behind an OpenAI-compatible server: one token, with its twenty likeliest alternatives."""

    concurrent = 2
    """Calls that may be under way; ``Chat`` bounds their questions together."""

    def __init__(self, chat: Chat, question: str, output: Output) -> None:
        self._chat, self._question, self._output = chat, question, output
        where = f"{chat.model} at {chat.endpoint.url}"
        self.info = _info(output, "that of the served model", f"{where}, {question}", (where,), 64)

    def __call__(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Metadata]) -> Tensor:
        """Scores, float32 ``[B]``; NaN where neither yes nor no was among the alternatives."""
        valid = check_batch("vlm_yes_no", images, prompts, metadata)
        rows = valid.nonzero().flatten().tolist()
        pictures = encode_images(images[valid.to(images.device)]) if rows else []
        questions = [
            Question((picture,), self._question.replace("{prompt}", prompts[row]))
            for picture, row in zip(pictures, rows, strict=True)
        ]
        odds = [self._odds(answer) for answer in self._chat.ask_all(questions)]
        return scatter(_output(torch.tensor(odds), self._output), valid)

    def _odds(self, answer: Answer | None) -> float:
        if answer is None:
            return math.nan
        if not answer.tokens:
            raise RewardError(
                f"reward 'vlm_yes_no': {self._chat.endpoint.url} gives no log-probabilities; start the server with them"
            )
        return log_odds(answer.tokens[0].top)

    def self_test(self) -> SelfTest:
        """A red disc on white against a blue one."""
        return _self_test()


def vlm_yes_no(
    url: str | None = None,
    model: str = QWEN.id,
    weights: str | Path | None = None,
    revision: str | None = None,
    question: str = QUESTION,
    output: Output = "log_odds",
    device: str | None = None,
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16",
    timeout: float = 120.0,
    retries: int = 3,
    parallel: int = 8,
    on_failure: Literal["fail", "nan"] = "fail",
    extra: Mapping[str, Any] | None = None,
    **advanced: Any,
) -> LocalYesNo | ServedYesNo:
    """VQAScore with a general model (Lin et al. 2024): log-odds, or probability, of "yes" to a question.

    With ``url`` (such as http://127.0.0.1:8000/v1) the server's ``model`` is asked, with the key in the environment
    variable STEPCREDIT_API_KEY if any; without it ``weights`` run here. ``question`` holds {prompt}; scores of
    different questions do not compare. Raises ValueError for bad options, RewardError for absent weights.
    """
    if "{prompt}" not in question:
        raise ValueError(f"vlm_yes_no: question must contain {{prompt}}; got {question!r}")
    if output not in ("log_odds", "probability"):
        raise ValueError(f"vlm_yes_no: output must be 'log_odds' or 'probability'; got {output!r}")
    if url is not None:
        endpoint = Endpoint("vlm_yes_no", url, TOKEN_ENV, timeout, retries, **advanced)
        return ServedYesNo(Chat(endpoint, model, parallel, on_failure, extra or {}), question, output)
    if dtype not in ("float32", "bfloat16", "float16"):
        raise ValueError(f"vlm_yes_no: dtype must be float32, bfloat16 or float16; got {dtype!r}")
    source = resolve(weights, revision, QWEN)
    processor = weights_module.pretrained("vlm_yes_no", "AutoProcessor", source)
    network = weights_module.model(
        "vlm_yes_no", "AutoModelForImageTextToText", source, pick_device(device), getattr(torch, dtype)
    )
    name = source.id if isinstance(source, Hub) else source.name
    licence = "Apache-2.0" if source == QWEN else "that of the model"
    return LocalYesNo(network, processor, question, output, licence, name)


def _token_ids(tokenizer: Any, forms: Sequence[str]) -> Tensor:
    """Ids of the spellings that are one token; RewardError when there is none."""
    encoded = [tokenizer.encode(form, add_special_tokens=False) for form in forms]
    unknown = tokenizer.unk_token_id
    ids = sorted({one[0] for one in encoded if len(one) == 1 and one[0] != unknown})
    if not ids:
        raise RewardError(f"reward 'vlm_yes_no': the model's tokenizer has no single token for {forms[0]!r}")
    return torch.tensor(ids)


def _output(odds: Tensor, output: Output) -> Tensor:
    return odds.float().sigmoid() if output == "probability" else odds.float()


def _info(output: Output, licence: str, source: str, needs: tuple[str, ...], batch_size: int) -> RewardInfo:
    bounds = (0.0, 1.0) if output == "probability" else (-math.inf, math.inf)
    return RewardInfo("vlm_yes_no", bounds, licence, f"{output} of yes: {source}", needs=needs, batch_size=batch_size)


def _self_test() -> SelfTest:
    red, blue = disc((1.0, 0.0, 0.0)), disc((0.0, 0.0, 1.0))
    return SelfTest(good=red, bad=blue, prompt="a red circle on a white background", metadata={})
