"""Names, options, and the gate that every reward's input passes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor

from stepcredit.rewards import FunctionReward, Reward, RewardError, RewardInfo, SelfTest, get, names, register, score
from stepcredit.rewards import registry as registry_module
from stepcredit.rewards.base import Metadata
from stepcredit.rewards.inputs import check_batch


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    yield
    registry_module._registered.clear()


def test_names_are_complete_and_importing_them_is_light() -> None:
    expected = {
        *(
            "compose",
            "prefer",
            "ocr",
            "jpeg_size",
            "pickscore",
            "clip_l14_cos",
            "aesthetic",
            "imagereward",
            "hpsv2.1",
            "hpsv3",
        ),
        "spell",
        *(
            "geneval",
            "geneval_partial",
            "vlm_yes_no",
            "unified_reward",
            "deqa",
            "remote",
            "composite",
            "tiny_pickscore",
            "tiny_ocr",
            "tiny_geneval",
        ),
    }
    assert set(names()) == expected
    heavy = "import sys, stepcredit.rewards; print({'transformers', 'rapidocr', 'cv2'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", heavy], capture_output=True, text=True).stdout.strip() == "set()"


def test_an_unknown_name_names_the_nearest() -> None:
    with pytest.raises(ValueError, match="'jpeg_sise'; did you mean 'jpeg_size'"):
        get("jpeg_sise")
    with pytest.raises(ValueError, match="known are compose, prefer"):
        get("0")


def test_an_unknown_option_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'jpeg_size'.*'gaol'.*goal, unit, quality"):
        get("jpeg_size", gaol="small")


def _redness(images: Tensor, prompts: Sequence[str], metadata: Sequence[Metadata]) -> list[float]:
    return [float(image[0].mean()) for image in images]


def _red() -> FunctionReward:
    red = torch.zeros(3, 4, 4)
    red[0] = 1
    info = RewardInfo("redness", (0.0, 1.0), "own", "mean of the red channel")
    return FunctionReward(info, _redness, SelfTest(good=red, bad=torch.zeros(3, 4, 4), prompt="red", metadata={}))


def test_a_users_function_becomes_a_reward() -> None:
    register("redness", _red)
    reward = get("redness")
    assert "redness" in names()
    assert isinstance(reward, Reward)
    test = reward.self_test()
    found = score(reward, torch.stack([test.good, test.bad]), ["red"] * 2, [{}] * 2)
    assert found.tolist() == [1.0, 0.0]
    assert found.dtype == torch.float32
    with pytest.raises(ValueError, match="taken"):
        register("redness", _red)
    with pytest.raises(ValueError, match="taken"):
        register("ocr", _red)
    with pytest.raises(ValueError, match="lower-case"):
        register("Red Ness", _red)


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (torch.zeros(1, 4, 8, 8), "must be a tensor \\[B, 3, H, W\\]; got shape"),
        (torch.zeros(3, 8, 8), "must be a tensor"),
        ("picture.png", "got str"),
        (torch.zeros(1, 3, 8, 8, dtype=torch.uint8), "divide it by 255"),
        (torch.full((1, 3, 8, 8), 1.5), "image 0 has values in \\[1.5, 1.5\\]"),
        (torch.full((1, 3, 8, 8), -1.0), "must lie in \\[0, 1\\]"),
        (torch.zeros(1, 3, 0, 8), "no pixels"),
    ],
)
def test_what_is_not_an_image_is_refused(images: Tensor, message: str) -> None:
    with pytest.raises(RewardError, match=message):
        check_batch("any", images, ["a"], [{}])


def test_prompts_and_lengths_are_checked() -> None:
    images = torch.zeros(2, 3, 4, 4)
    with pytest.raises(RewardError, match="prompt 1 is empty"):
        check_batch("any", images, ["a", "  "], [{}, {}])
    with pytest.raises(RewardError, match="2 images, 1 prompts and 2 metadata"):
        check_batch("any", images, ["a"], [{}, {}])


def test_an_image_with_nan_is_marked_not_turned_black() -> None:
    images = torch.rand(3, 3, 4, 4)
    images[1, 0, 0, 0] = float("nan")
    assert check_batch("any", images, ["a"] * 3, [{}] * 3).tolist() == [True, False, True]
