"""HPSv3 (Ma et al. 2025): Qwen2-VL tuned on human preferences, with a head on the token that asks for the rating.

The question is long, and another wording would be another reward, so it is read from the published package, once, by
``stepcredit rewards convert hpsv3``. As there, every token has its place in the sequence as its position, those of the
picture too: the model was trained so, and not with the base model's positions in height and width.
"""

from __future__ import annotations

import ast
import math
import re
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from PIL import Image
from torch import Tensor, nn

from stepcredit.rewards import weights as weights_module
from stepcredit.rewards.base import Metadata, RewardError, RewardInfo, SelfTest
from stepcredit.rewards.clip_models import disc, normalise
from stepcredit.rewards.inputs import check_batch, scatter, to_pil
from stepcredit.rewards.weights import Hub, cache_folder, pick_device, resolve

WEIGHTS = Hub("MizzenAI/HPSv3", None)
BASE = Hub("Qwen/Qwen2-VL-7B-Instruct", None)
FILE = "HPSv3.safetensors"
QUESTION = "question.txt"
REWARD_TOKEN = "<|Reward|>"
PIXELS = 256 * 28 * 28
"""Of the picture that the model is shown: 448 x 448 of a square one."""
_CELL = 28  # pixels of a token's side: two patches of 14
_LARGEST_SOURCE = 1 << 20
_CHAT = (
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    "<|im_start|>user\n<|vision_start|>{picture}<|vision_end|>{question}<|im_end|>\n<|im_start|>assistant\n"
)
"""Qwen2-VL's chat format for one picture and one text."""


def question_of(wheel: Path) -> str:
    """The question in the published wheel: literals of its source, which is parsed and never run.

    Raises ValueError for a file that is no wheel of the package.
    """
    member, wanted = "hpsv3/dataset/data_collator_qwen.py", ("INSTRUCTION", "prompt_with_special_token")
    try:
        with zipfile.ZipFile(wheel) as archive:
            if archive.getinfo(member).file_size > _LARGEST_SOURCE:
                raise ValueError(f"{member} is larger than {_LARGEST_SOURCE} bytes")
            source = archive.read(member).decode()
    except (zipfile.BadZipFile, KeyError, UnicodeDecodeError) as error:
        raise ValueError(f"it holds no {member} ({error})") from error
    found: dict[str, Any] = {}
    try:
        for line in ast.parse(source).body:
            if isinstance(line, ast.Assign) and isinstance(line.targets[0], ast.Name) and line.targets[0].id in wanted:
                found[line.targets[0].id] = ast.literal_eval(line.value)
    except SyntaxError as error:
        raise ValueError(f"{member} is no Python source ({error})") from error
    texts = [found.get(name) for name in wanted]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError(f"{member} does not define {' and '.join(wanted)}")
    return require_question("".join(map(str, texts)))


def require_question(text: str) -> str:
    """The text itself. Raises ValueError unless it asks about a prompt, and for the rating, once each."""
    for part in ("{text_prompt}", REWARD_TOKEN):
        if text.count(part) != 1:
            raise ValueError(f"the question must hold {part} once; it does {text.count(part)} times")
    return text


def shown_size(height: int, width: int) -> tuple[int, int]:
    """Height and width at which the model is shown a picture: multiples of 28 whose product is near ``PIXELS``.

    Where rounding the picture's own sides gives more pixels than that, both are scaled down to less, else, where it
    gives fewer, up to more. Raises ValueError for a picture that is more than 200 times as long as wide.
    """
    if max(height, width) > 200 * min(height, width):
        raise ValueError(f"a picture of {width}x{height} pixels is more than 200 times as long as wide")
    own = [max(_CELL, round(edge / _CELL) * _CELL) for edge in (height, width)]
    if math.prod(own) == PIXELS:
        return own[0], own[1]
    to_multiple = math.floor if math.prod(own) > PIXELS else math.ceil
    scale = math.sqrt(PIXELS / (height * width))
    scaled = [to_multiple(edge * scale / _CELL) * _CELL for edge in (height, width)]
    return scaled[0], scaled[1]


def patches(picture: Image.Image) -> tuple[Tensor, tuple[int, int]]:
    """A picture as the model's patches, float32 ``[rows * columns, 3 * 2 * 14 * 14]``, with ``(rows, columns)``.

    The four patches of a token follow each other; each patch is there twice, since a picture is a film of two frames.
    """
    height, width = shown_size(picture.height, picture.width)
    resized = picture.resize((width, height), Image.Resampling.BICUBIC)
    data = torch.frombuffer(bytearray(resized.tobytes()), dtype=torch.uint8).view(height, width, 3)
    pixels = normalise(data.permute(2, 0, 1).float() / 255)
    rows, columns = height // 14, width // 14
    cut = pixels.view(3, rows // 2, 2, 14, columns // 2, 2, 14).permute(1, 4, 2, 5, 0, 3, 6)
    return cut.unsqueeze(5).expand(-1, -1, -1, -1, -1, 2, -1, -1).reshape(rows * columns, -1), (rows, columns)


def rename(key: str) -> str | None:
    """Our name of a published weight, of either generation of names; None for the unused language head."""
    if key.startswith("lm_head."):
        return None
    for old, new in (
        (r"^rm_head\.", "head."),
        (r"^(model\.)?visual\.", "visual."),
        (r"^model\.(language_model\.)?", "language_model."),
    ):
        name, count = re.subn(old, new, key)
        if count:
            return name
    raise ValueError(f"not a weight of HPSv3: {key!r}")


class HPSv3:
    """HPSv3: unbounded log-odds of preference, about 0 to 12 for generated pictures.

    Sees the whole picture at some 200,000 pixels and the whole prompt. ``weights``: folder with HPSv3.safetensors, or
    its repository on the hub. ``base``: folder or repository with config.json and tokenizer of Qwen2-VL-7B-Instruct.
    ``question``: file with the question, by default where ``stepcredit rewards convert hpsv3`` puts it. ``dtype``: of
    the network; the head is always float32. RewardError when any of these is absent.
    """

    def __init__(
        self,
        weights: str | Path | None = None,
        revision: str | None = None,
        base: str | Path | None = None,
        question: str | Path | None = None,
        dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16",
        batch_size: int = 8,
        device: str | None = None,
    ) -> None:
        if dtype not in ("float32", "bfloat16", "float16"):
            raise ValueError(f"hpsv3: dtype must be float32, bfloat16 or float16; got {dtype!r}")
        if batch_size < 1:
            raise ValueError(f"hpsv3: batch_size must be at least 1; got {batch_size}")
        self._question = _read_question(Path(question) if question else cache_folder("hpsv3") / QUESTION)
        source, from_base = resolve(weights, revision, WEIGHTS), resolve(base, None, BASE)
        self._tokenizer = weights_module.pretrained("hpsv3", "AutoTokenizer", from_base, "base")
        self._tokenizer.add_special_tokens({"additional_special_tokens": [REWARD_TOKEN]})
        self._reward_token = int(self._tokenizer.convert_tokens_to_ids(REWARD_TOKEN))
        config = weights_module.pretrained("hpsv3", "AutoConfig", from_base, "base")
        self._model, self._head = load(source, config, pick_device(device), getattr(torch, dtype))
        rows = len(self._model.get_input_embeddings().weight)
        if self._reward_token >= rows:
            raise RewardError(
                f"reward 'hpsv3': the tokenizer has {self._reward_token + 1} tokens and the weights {rows}; "
                "base must be that of Qwen2-VL-7B-Instruct"
            )
        self.info = RewardInfo(
            name="hpsv3",
            range=(-math.inf, math.inf),
            licence="MIT (Qwen2-VL: Apache-2.0)",
            description="HPSv3, log-odds of preference; sees the whole picture and prompt",
            needs=("stepcredit[diffusers]", WEIGHTS.id, BASE.id, "its question (converted)"),
            batch_size=batch_size,
        )

    @property
    def networks(self) -> tuple[Any, ...]:
        """What may wait elsewhere while it is idle."""
        return (self._model, self._head)

    @torch.no_grad()
    def __call__(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Metadata]) -> Tensor:
        """Scores, float32 ``[B]``; NaN for an image that is not finite.

        Raises RewardError for an empty prompt and for one that holds a control token of the model.
        """
        valid = check_batch("hpsv3", images, prompts, metadata)
        if not bool(valid.any()):
            return scatter(torch.empty(0), valid)
        wanted = [prompt for prompt, ok in zip(prompts, valid, strict=True) if ok]
        try:
            cut = [patches(picture) for picture in to_pil(images[valid.to(images.device)])]
        except ValueError as error:
            raise RewardError(f"reward 'hpsv3': {error}") from error
        ids = [self._tokens(prompt, math.prod(size) // 4) for prompt, (_, size) in zip(wanted, cut, strict=True)]
        longest, device = max(map(len, ids)), self._model.device
        tokens = torch.tensor([row + [self._tokenizer.pad_token_id] * (longest - len(row)) for row in ids])
        hidden = self._model(
            input_ids=tokens.to(device),
            attention_mask=torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in ids]).to(device),
            position_ids=torch.arange(longest, device=device).expand(3, len(ids), -1),
            pixel_values=torch.cat([pixels for pixels, _ in cut]).to(device, self._model.dtype),
            image_grid_thw=torch.tensor([(1, *size) for _, size in cut], device=device),
            use_cache=False,
        ).last_hidden_state
        at = torch.tensor([row.index(self._reward_token) for row in ids], device=device)
        mean_and_deviation = self._head(hidden[torch.arange(len(ids), device=device), at].float())
        return scatter(mean_and_deviation[:, 0], valid)

    def _tokens(self, prompt: str, cells: int) -> list[int]:
        """Token numbers of the whole message about a picture of so many cells."""
        control = next((token for token in self._tokenizer.get_added_vocab() if token in prompt), None)
        if control is not None:
            raise RewardError(
                f"reward 'hpsv3': the prompt {prompt[:80]!r} holds {control}, which the model reads as a command; "
                "write it otherwise"
            )
        question = self._question.replace("{text_prompt}", prompt)
        text = _CHAT.replace("{picture}", "<|image_pad|>" * cells).replace("{question}", question)
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def self_test(self) -> SelfTest:
        """A red disc on white against a blue one."""
        red, blue = disc((1.0, 0.0, 0.0)), disc((0.0, 0.0, 1.0))
        return SelfTest(good=red, bad=blue, prompt="a red circle on a white background", metadata={})


def load(source: Hub | Path, config: Any, device: torch.device, dtype: torch.dtype) -> tuple[Any, nn.Module]:
    """The network in ``dtype`` and its head in float32, in evaluation mode, without gradients.

    Raises RewardError unless the file holds exactly their weights.
    """
    from safetensors import SafetensorError, safe_open

    transformers = weights_module.library("hpsv3")
    file = _weights_file(source)
    try:
        state = {}
        with safe_open(file, framework="pt", device=str(device)) as weights:
            for key in weights.keys():  # noqa: SIM118, safe_open is no dict
                name = rename(key)
                if name is not None:
                    tensor = weights.get_tensor(key)
                    state[name] = tensor.float() if name.startswith("head.") else tensor.to(dtype)
        own = {name.removeprefix("head."): state.pop(name) for name in list(state) if name.startswith("head.")}
        config.text_config.vocab_size, hidden = state["language_model.embed_tokens.weight"].shape
        head = nn.Sequential(
            nn.Linear(hidden, 1024), nn.ReLU(), nn.Dropout(0.05), nn.Linear(1024, 16), nn.ReLU(), nn.Linear(16, 2)
        )
        head.load_state_dict(own)
        with torch.device("meta"):
            wanted = {name: value.shape for name, value in transformers.Qwen2VLModel(config).state_dict().items()}
        wrong = [k for k in sorted(wanted.keys() | state) if k not in state or state[k].shape != wanted.get(k)]
        if wrong:
            raise ValueError(f"{len(wrong)} weights are absent, unknown or of another shape, e.g. {wrong[0]}")
        model = transformers.Qwen2VLModel.from_pretrained(None, config=config, state_dict=state, dtype=dtype)
    except (OSError, SafetensorError, RuntimeError, KeyError, ValueError, AttributeError) as error:
        raise RewardError(weights_module.missing("hpsv3", source, weights_module.first_line(error))) from error
    return model.to(device).eval().requires_grad_(False), head.to(device).eval().requires_grad_(False)


def _weights_file(source: Hub | Path) -> Path:
    if isinstance(source, Path):
        if not (source / FILE).is_file():
            raise RewardError(weights_module.missing("hpsv3", source, f"it has no {FILE}"))
        return source / FILE
    import huggingface_hub as hub

    try:
        return Path(hub.hf_hub_download(source.id, FILE, revision=source.revision))
    except Exception as error:
        raise RewardError(weights_module.missing("hpsv3", source, weights_module.first_line(error))) from error


def _read_question(file: Path) -> str:
    if not file.is_file():
        raise RewardError(
            f"reward 'hpsv3': there is no {file}: run 'stepcredit rewards convert hpsv3' once, which reads "
            "the question from the published package, or name a file that holds it with the option question: FILE"
        )
    try:
        return require_question(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise RewardError(f"reward 'hpsv3': {file} is not its question: {error}") from error
