"""HPSv3 on a tiny random model of its class, and against numbers of the published package's own."""

from __future__ import annotations

import json
import math
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from stepcredit.cli import main
from stepcredit.rewards import RewardError, convert, get, hpsv3, score
from stepcredit.rewards.inputs import to_pil

CONTROL = ["<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"]
WORDS = [
    "<pad>",
    "<unk>",
    "system",
    "You",
    "are",
    "a",
    "helpful",
    "assistant",
    ".",
    "user",
    "rate",
    "cat",
    "red",
    "dog",
    "now",
]
PAD, START, END, LOOK, LOOKED, PICTURE, REWARD = 0, 15, 16, 17, 18, 19, 20
QUESTION = "rate {text_prompt} now <|Reward|>\n"


def number(word: str) -> int:
    return WORDS.index(word)


def config(vocabulary: int, picture: int) -> Any:
    transformers = pytest.importorskip("transformers")
    sides = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    return transformers.Qwen2VLConfig(
        text_config={
            **sides,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": vocabulary,
            "bos_token_id": None,
            "eos_token_id": None,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [1, 1, 2]},
            "rms_norm_eps": 1e-5,
        },
        vision_config={"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "mlp_ratio": 2},
        image_token_id=picture,
    )


def fill(i: int, shape: tuple[int, ...]) -> Tensor:
    """Numbers in [-.5, .5) by integer arithmetic alone, the same everywhere."""
    v = torch.arange(1, math.prod(shape) + 1) * (2 * i + 3) * 2654435761 & 0xFFFFFFFF
    v = (v ^ (v >> 15)) * 2246822519 & 0xFFFFFFFF
    return ((v ^ (v >> 13)).double() / 2**32 - 0.5).float().view(shape)


def published(vocabulary: int, picture: int) -> dict[str, Tensor]:
    """A file of weights with the names that the published one has."""
    import transformers

    model = transformers.Qwen2VLModel(config(vocabulary, picture))
    shapes = {
        key.replace("language_model.", "model.", 1): tuple(value.shape) for key, value in model.state_dict().items()
    }
    shapes["lm_head.weight"] = (vocabulary, 32)
    for layer, (rows, columns) in {0: (1024, 32), 3: (16, 1024), 5: (2, 16)}.items():
        shapes |= {f"rm_head.{layer}.weight": (rows, columns), f"rm_head.{layer}.bias": (rows,)}
    return {key: fill(i, shapes[key]) for i, key in enumerate(sorted(shapes))}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<unk>"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", unk_token="<unk>")
    tokenizer.add_special_tokens({"additional_special_tokens": CONTROL})
    folder = tmp_path_factory.mktemp("hpsv3")
    tokenizer.save_pretrained(folder)
    config(REWARD + 1, PICTURE).save_pretrained(folder)
    save_file(published(REWARD + 1, PICTURE), folder / "HPSv3.safetensors")
    (folder / "question.txt").write_text(QUESTION)
    return {"weights": folder, "base": folder, "question": folder / "question.txt", "dtype": "float32", "device": "cpu"}


def test_the_numbers_of_the_published_package(tmp_path: Path) -> None:
    """Of Qwen2VLRewardModelBT in hpsv3 1.0.0 with transformers 4.45.2, on these weights, pictures and tokens."""
    save_file(published(40, 5), tmp_path / "HPSv3.safetensors")
    model, head = hpsv3.load(tmp_path, config(7, 5), torch.device("cpu"), torch.float32)
    cut = []
    for height, width in ((448, 448), (100, 80)):
        values = np.arange(height * width * 3) ** 2 * 7919 // 1009 % 256
        cut.append(hpsv3.patches(Image.fromarray(values.astype(np.uint8).reshape(height, width, 3))))
    assert [size for _, size in cut] == [(32, 32), (36, 30)]
    rows = [[1, 10, 3, *[5] * 256, 4, 11, 12, 13, 14, 39, 15, 2], [1, 10, 3, *[5] * 270, 4, 11, 39, 15, 2]]
    for row, (pixels, size), expected in zip(
        rows, cut, [(-3.9615347, 1.7428234), (-4.0617232, 1.7680457)], strict=True
    ):
        hidden = model(
            input_ids=torch.tensor([row]),
            position_ids=torch.arange(len(row)).expand(3, 1, -1),
            pixel_values=pixels,
            image_grid_thw=torch.tensor([(1, *size)]),
        ).last_hidden_state
        assert head(hidden[0, row.index(39)]).tolist() == pytest.approx(expected, abs=2e-4)


def test_scores_are_the_first_output_at_the_token_that_asks(tiny: dict[str, Any], pictures: Tensor) -> None:
    import transformers

    processor = pytest.importorskip("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")
    prompts = ["red dog", "a {cat}", "cat"]
    found = score(get("hpsv3", **tiny), pictures[:3], prompts, [{}] * 3)
    weights = published(REWARD + 1, PICTURE)
    model = transformers.Qwen2VLModel(config(REWARD + 1, PICTURE)).eval()
    renamed = {hpsv3.rename(key): value for key, value in weights.items()}
    model.load_state_dict({k: v for k, v in renamed.items() if k and not k.startswith("head.")})
    resize = processor.Qwen2VLImageProcessorPil(min_pixels=200704, max_pixels=200704)
    said = {"red dog": ["red", "dog"], "a {cat}": ["a", "<unk>", "cat", "<unk>"], "cat": ["cat"]}
    for row, (picture, prompt) in enumerate(zip(to_pil(pictures[:3]), prompts, strict=True)):
        seen = resize(images=[picture], return_tensors="pt")
        assert (hpsv3.patches(picture)[0] - seen["pixel_values"]).abs().max() < 1e-5
        system = [START, *map(number, ["system", "You", "are", "a", "helpful", "assistant", "."]), END]
        cells = [PICTURE] * (math.prod(seen["image_grid_thw"][0].tolist()) // 4)
        text = [number("rate"), *map(number, said[prompt]), number("now"), REWARD]
        ids = [*system, START, number("user"), LOOK, *cells, LOOKED, *text, END, START, number("assistant")]
        with torch.no_grad():
            hidden = model(
                input_ids=torch.tensor([ids]),
                position_ids=torch.arange(len(ids)).expand(3, 1, -1),
                pixel_values=seen["pixel_values"],
                image_grid_thw=seen["image_grid_thw"],
            ).last_hidden_state[0, ids.index(REWARD)]
            for layer in (0, 3, 5):
                hidden = nn.functional.linear(
                    hidden.relu() if layer else hidden,
                    weights[f"rm_head.{layer}.weight"],
                    weights[f"rm_head.{layer}.bias"],
                )
        assert float(found[row]) == pytest.approx(float(hidden[0]), abs=2e-4)
    assert found.std() > 1e-4


def test_a_batch_is_a_loop_in_any_order_and_type(tiny: dict[str, Any], pictures: Tensor) -> None:
    reward = get("hpsv3", **tiny)
    prompts = ["red dog", "cat", "a a a a red cat now", "dog"]
    found = reward(pictures[:4], prompts, [{}] * 4)
    assert found.dtype == torch.float32
    one_by_one = [float(reward(pictures[k : k + 1], prompts[k : k + 1], [{}])) for k in range(4)]
    assert found.tolist() == pytest.approx(one_by_one, abs=2e-4)
    assert reward(pictures[:4].flip(0), prompts[::-1], [{}] * 4).flip(0).tolist() == pytest.approx(
        found.tolist(), abs=2e-4
    )
    broken = pictures[:4].clone()
    broken[2] = math.nan
    assert reward(broken, prompts, [{}] * 4).isnan().tolist() == [False, False, True, False]
    half = get("hpsv3", **{**tiny, "dtype": "bfloat16"})(pictures[:4], prompts, [{}] * 4)
    assert half.dtype == torch.float32
    assert (half - found).abs().max() < 0.2
    assert [len(list(part.parameters())) > 0 for part in reward.networks] == [True, True]


def test_names_of_both_generations(tiny: dict[str, Any], pictures: Tensor, tmp_path: Path) -> None:
    old = load_file(tiny["weights"] / "HPSv3.safetensors")

    def newer(key: str) -> str:
        if key.startswith("visual."):
            return f"model.{key}"
        return key.replace("model.", "model.language_model.", 1) if key.startswith("model.") else key

    save_file({newer(key): value for key, value in old.items()}, tmp_path / "HPSv3.safetensors")
    again = get("hpsv3", **{**tiny, "weights": tmp_path})(pictures[:1], ["cat"], [{}])
    assert torch.equal(again, get("hpsv3", **tiny)(pictures[:1], ["cat"], [{}]))
    with pytest.raises(ValueError, match=r"'text_model\.norm'"):
        hpsv3.rename("text_model.norm")


@pytest.mark.parametrize(
    ("size", "shown"),
    [
        # of the published package's own function, with 256 * 28 * 28 pixels as the least and the most
        ((448, 448), (448, 448)),
        ((24, 24), (448, 448)),
        ((512, 512), (448, 448)),
        ((1024, 1024), (448, 448)),
        ((768, 1344), (336, 588)),
        ((333, 777), (280, 672)),
        ((100, 80), (504, 420)),
        ((1, 200), (56, 6356)),
    ],
)
def test_the_size_that_is_shown(size: tuple[int, int], shown: tuple[int, int]) -> None:
    assert hpsv3.shown_size(*size) == shown


def test_a_ribbon_is_refused(tiny: dict[str, Any]) -> None:
    with pytest.raises(RewardError, match="201x1 pixels is more than 200 times"):
        get("hpsv3", **tiny)(torch.zeros(1, 3, 1, 201), ["cat"], [{}])


@pytest.mark.parametrize("token", [*CONTROL, "<|Reward|>"])
def test_a_prompt_cannot_give_commands(tiny: dict[str, Any], pictures: Tensor, token: str) -> None:
    with pytest.raises(RewardError, match=r"holds <\|\w+\|>, which the model reads as a command"):
        get("hpsv3", **tiny)(pictures[:1], [f"cat {token} dog"], [{}])


def test_what_is_absent_or_wrong_is_told(tiny: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPCREDIT_CACHE", str(tmp_path / "cache"))
    with pytest.raises(RewardError, match="run 'stepcredit rewards convert hpsv3' once"):
        get("hpsv3")
    with pytest.raises(RewardError, match=r"from the folder .*: it has no HPSv3.safetensors"):
        get("hpsv3", **{**tiny, "weights": tmp_path})
    for bad in ({"dtype": "int8"}, {"batch_size": 0}):
        with pytest.raises(ValueError, match=f"hpsv3: {next(iter(bad))} must be"):
            get("hpsv3", **{**tiny, **bad})
    weights = load_file(tiny["weights"] / "HPSv3.safetensors")
    some = {
        "lacking": ({k: v for k, v in weights.items() if k != "model.norm.weight"}, "language_model.norm.weight"),
        "foreign": ({**weights, "text_model.norm": torch.zeros(1)}, "'text_model.norm'"),
        "unknown": ({**weights, "model.layers.7.norm": torch.zeros(1)}, "language_model.layers.7.norm"),
        "shape": ({**weights, "model.norm.weight": torch.zeros(3)}, "language_model.norm.weight"),
        "head": ({k: v for k, v in weights.items() if k != "rm_head.5.bias"}, "cannot load weights"),
        "few": ({**weights, "model.embed_tokens.weight": torch.zeros(REWARD, 32)}, "must be that of Qwen2-VL"),
    }
    for name, (state, message) in some.items():
        (tmp_path / name).mkdir()
        save_file(state, tmp_path / name / "HPSv3.safetensors")
        with pytest.raises(RewardError, match=message):
            get("hpsv3", **{**tiny, "weights": tmp_path / name})
    (tmp_path / "q.txt").write_text("rate {text_prompt}")
    with pytest.raises(
        RewardError, match=r"q.txt is not its question: .* must hold <\|Reward\|> once; it does 0 times"
    ):
        get("hpsv3", **{**tiny, "question": tmp_path / "q.txt"})


MEMBER = "hpsv3/dataset/data_collator_qwen.py"
SOURCE = 'import os\nos.abort()\nINSTRUCTION = """rate {text_prompt}\n"""\nprompt_with_special_token = "<|Reward|>"\n'


def wheel(path: Path, source: str = SOURCE, member: str = MEMBER) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(member, source)
    return path


def test_the_question_is_read_and_never_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = wheel(tmp_path / "a.whl")
    assert hpsv3.question_of(file) == "rate {text_prompt}\n<|Reward|>"
    with pytest.raises(RewardError, match=r"expected 1a1b3ed1.*download it again"):
        convert.convert_here("hpsv3", file, tmp_path / "out", None)
    assert not (tmp_path / "out").exists()

    monkeypatch.setenv("STEPCREDIT_CACHE", str(tmp_path / "cache"))
    mine = convert.RECIPES["hpsv3"].__class__(**{**vars(convert.RECIPES["hpsv3"]), "sha256": convert.digest(file)})
    monkeypatch.setitem(convert.RECIPES, "hpsv3", mine)
    asked: list[str] = []
    monkeypatch.setattr(convert, "download", lambda url: asked.append(url) or file.read_bytes())
    folder = convert.convert_here("hpsv3", None, None, None)
    assert asked[0].startswith("https://files.pythonhosted.org/")
    assert asked[0].endswith("/hpsv3-1.0.0-py3-none-any.whl")
    assert (folder / "question.txt").read_text() == "rate {text_prompt}\n<|Reward|>"
    assert json.loads((folder / "source.json").read_text())["sha256"] == mine.sha256
    assert main(["rewards", "show", "hpsv3"]) == 0
    assert "question.txt is there" in "".join(capsys.readouterr().out.split("\n"))


@pytest.mark.parametrize(
    ("source", "member", "message"),
    [
        (SOURCE, "other.py", "it holds no hpsv3/dataset"),
        ("INSTRUCTION = 1\n", MEMBER, "does not define INSTRUCTION and prompt_with_special_token"),
        (SOURCE.replace("{text_prompt}", ""), MEMBER, "must hold {text_prompt} once; it does 0 times"),
        (SOURCE.replace('"<|Reward|>"', "os.name"), MEMBER, "malformed node"),
        ("#" * (1 << 21), MEMBER, "larger than"),
        ("INSTRUCTION = (", MEMBER, "never closed"),
    ],
)
def test_another_wheel_is_refused(tmp_path: Path, source: str, member: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        hpsv3.question_of(wheel(tmp_path / "a.whl", source, member))


def test_what_is_no_archive_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.whl").write_text("not a zip")
    with pytest.raises(ValueError, match="holds no"):
        hpsv3.question_of(tmp_path / "a.whl")
