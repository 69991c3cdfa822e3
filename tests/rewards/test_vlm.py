"""Yes or no: locally on a tiny random model of a real class, and against a mock OpenAI-compatible server."""

from __future__ import annotations

import base64
import io
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from stepcredit.rewards import RewardError, get, score
from stepcredit.rewards.inputs import to_pil
from stepcredit.rewards.vlm import log_odds

WORDS = ["<pad>", "<unk>", "<image>", "user", "assistant", ":", "Yes", "No", "yes", "no", "?", "a", "red", "dog", "cat"]
TEMPLATE = (
    "{% for m in messages %}user : {% for c in m['content'] %}{% if c['type'] == 'image' %}<image> "
    "{% else %}{{ c['text'] }}{% endif %}{% endfor %}{% endfor %} assistant :"
)


def test_log_odds_by_hand() -> None:
    both = {"Yes": math.log(0.5), " yes": math.log(0.1), "No": math.log(0.2), "Maybe": math.log(0.2)}
    assert log_odds(both) == pytest.approx(math.log(0.6 / 0.2))
    # "No" is not listed, so it cannot exceed the least of those listed.
    assert log_odds({"Yes": math.log(0.9), "Sure": math.log(0.01)}) == pytest.approx(math.log(0.9 / 0.01))
    assert log_odds({"NO WAY": -1.0, "no": math.log(0.9), "x": math.log(0.05)}) == pytest.approx(math.log(0.05 / 0.9))
    assert math.isnan(log_odds({"Maybe": -0.1, "The": -2.0}))
    assert math.isnan(log_odds({}))


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {word: index for index, word in enumerate(WORDS)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", unk_token="<unk>", additional_special_tokens=["<image>"]
    )
    shared = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlavaConfig(
        vision_config={**shared, "image_size": 28, "patch_size": 14, "model_type": "clip_vision_model"},
        text_config={**shared, "num_key_value_heads": 4, "vocab_size": 32, "model_type": "llama"},
        image_token_index=2,
    )
    torch.manual_seed(0)
    model = transformers.LlavaForConditionalGeneration(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    processor = transformers.LlavaProcessor(
        image_processor=transformers.CLIPImageProcessor(size={"shortest_edge": 28}, crop_size=28),
        tokenizer=tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=TEMPLATE,
    )
    folder = tmp_path_factory.mktemp("llava")
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def test_local_scores_are_log_odds_of_the_last_position(llava: Path, pictures: Tensor) -> None:
    import transformers

    options = {"weights": llava, "question": "a {prompt} ?", "dtype": "float32", "device": "cpu"}
    reward = get("vlm_yes_no", **options)
    prompts = ["red dog", "cat", "a red cat"]
    found = score(reward, pictures[:3], prompts, [{}] * 3)
    model = transformers.LlavaForConditionalGeneration.from_pretrained(llava).eval()
    pixels = transformers.CLIPImageProcessor(size={"shortest_edge": 28}, crop_size=28)
    for row, prompt in enumerate(prompts):
        ids = [3, 5, 2, 2, 2, 2, 11, *(WORDS.index(word) for word in prompt.split()), 10, 4, 5]
        values = pixels(to_pil(pictures[row : row + 1]), return_tensors="pt")["pixel_values"]
        with torch.no_grad():
            last = model(input_ids=torch.tensor([ids]), pixel_values=values).logits[0, -1].double()
        yes, no = last[[6, 8]].exp().sum(), last[[7, 9]].exp().sum()
        assert float(found[row]) == pytest.approx(float((yes / no).log()), abs=1e-4)
    assert found.std() > 1e-3
    sure = get("vlm_yes_no", **options, output="probability")(pictures[:3], prompts, [{}] * 3)
    assert torch.allclose(sure, found.sigmoid())
    broken = pictures[:3].clone()
    broken[1] = math.nan
    assert reward(broken, prompts, [{}] * 3).isnan().tolist() == [False, True, False]


def _completion(top: dict[str, float], text: str = "") -> dict[str, Any]:
    listed = [{"token": token, "logprob": value, "bytes": None} for token, value in top.items()]
    first = {**listed[0], "top_logprobs": listed} if listed else None
    logprobs = {"content": [first] if first else []}
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "logprobs": logprobs}
    return {"id": "x", "object": "chat.completion", "choices": [choice], "usage": {}}


def _served(script: Any, **options: Any) -> Any:
    return get("vlm_yes_no", url=f"{script.url}/v1", model="tiny", sleep=lambda seconds: None, **options)


def test_the_server_is_asked_for_one_token_and_its_alternatives(
    script: Any, pictures: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STEPCREDIT_API_KEY", "key-of-the-server")

    def respond(message: dict[str, Any]) -> object:
        image, text = message["messages"][0]["content"]
        data = base64.b64decode(image["image_url"]["url"].removeprefix("data:image/png;base64,"))
        red = float(np.array(Image.open(io.BytesIO(data)))[..., 0].mean() / 255)
        if "none" in text["text"]:
            return _completion({"Maybe": -0.1, "The": -3.0})
        return _completion({"Yes": math.log(red), "No": math.log(1 - red)}, "Yes")

    script.respond = respond
    prompts = ["a", 'b "c"', "none", "d", "e", "f"]
    found = score(_served(script, extra={"seed": 3}), pictures, prompts, [{}] * 6)
    red = pictures[:, 0].mul(255).round().mean((1, 2)) / 255
    expected = (red / (1 - red)).log()
    expected[2] = math.nan
    assert torch.allclose(found, expected, atol=1e-5, equal_nan=True)  # in order, though asked in parallel
    head, body = script.requests[0]
    sent = json.loads(body)
    assert head.startswith("POST /v1/chat/completions HTTP/1.1")
    assert "Authorization: Bearer key-of-the-server" in head
    assert {k: sent[k] for k in ("model", "temperature", "max_tokens", "logprobs", "top_logprobs", "seed")} == {
        "model": "tiny",
        "temperature": 0,
        "max_tokens": 1,
        "logprobs": True,
        "top_logprobs": 20,
        "seed": 3,
    }
    asked = {json.loads(body)["messages"][0]["content"][1]["text"] for _, body in script.requests}
    assert 'Does this image show "b "c""? Answer the question with Yes or No.' in asked


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        ({"choices": []}, "choices"),
        ({"choices": [{"message": {"content": 3}}]}, "choices.0.message.content"),
        ({"error": "x"}, "choices: Field required"),
        ([], "valid dictionary"),
        (_completion({"Yes": 2.0}), "logprob"),
        ({"choices": [{"message": {"content": "Yes"}}]}, "gives no log-probabilities"),
    ],
)
def test_answers_against_the_protocol(script: Any, pictures: Tensor, reply: Any, message: str) -> None:
    script.json(reply)
    with pytest.raises(RewardError, match=message):
        _served(script, on_failure="nan")(pictures[:1], ["a"], [{}])


def test_failures_follow_the_policy(script: Any, pictures: Tensor) -> None:
    def two_of_three() -> None:
        script.json({"error": {"message": "overloaded"}}, "503 Service Unavailable")
        script.json(_completion({"Yes": math.log(0.8), "No": math.log(0.2)}))

    two_of_three()
    reward = _served(script, on_failure="nan", retries=0, parallel=1)
    found = reward(pictures[:2], ["a", "b"], [{}] * 2)
    assert found.isnan().tolist() == [True, False]
    assert float(found[1]) == pytest.approx(math.log(4), abs=1e-5)
    two_of_three()
    with pytest.raises(RewardError, match="answers 503: overloaded"):
        _served(script, retries=0, parallel=1)(pictures[:2], ["a", "b"], [{}] * 2)
    with pytest.raises(RewardError, match="prompt 0 is empty"):
        reward(pictures[:1], [" "], [{}])


@pytest.mark.parametrize(
    "options", [{"question": "what?"}, {"output": "p"}, {"dtype": "int8"}, {"parallel": 0, "url": "http://127.0.0.1"}]
)
def test_bad_options(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="vlm_yes_no: "):
        get("vlm_yes_no", **options)
