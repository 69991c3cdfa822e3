"""JPEG size on images whose order of size is certain."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from PIL import Image

from stepcredit.rewards import get, score


def _images() -> torch.Tensor:
    noise = torch.rand(3, 512, 512, generator=torch.Generator().manual_seed(0))
    return torch.stack([torch.full((3, 512, 512), 0.5), noise])


def test_sizes_are_those_of_pillow_and_near_the_published_ones() -> None:
    images = _images()
    found = get("jpeg_size", goal="large")(images, ["", ""], [{}, {}])
    for value, image in zip(found, images, strict=True):
        array = (image.permute(1, 2, 0).numpy() * 255).round().astype(np.uint8)
        buffer = io.BytesIO()
        Image.fromarray(array).save(buffer, "JPEG", quality=95)
        assert float(value) == pytest.approx(len(buffer.getvalue()) / 1000)
    # Flat grey 4.7 kB, noise 308 kB at 512 px; builds of the library differ a little.
    assert float(found[0]) == pytest.approx(4.7, rel=0.1)
    assert float(found[1]) == pytest.approx(308, rel=0.05)


def test_units_and_goals_agree() -> None:
    images = _images()
    kb = get("jpeg_size", goal="large")(images, ["", ""], [{}, {}])
    small = get("jpeg_size")(images, ["", ""], [{}, {}])
    flow = get("jpeg_size", unit="kb/500")(images, ["", ""], [{}, {}])
    bits = get("jpeg_size", goal="large", unit="bits_per_pixel")(images, ["", ""], [{}, {}])
    assert torch.equal(small, -kb)
    assert torch.allclose(flow, -kb / 500)
    assert torch.allclose(bits, kb * 8000 / 512**2)


def test_self_test_nan_and_empty_batch() -> None:
    for goal in ("small", "large"):
        reward = get("jpeg_size", goal=goal)
        test = reward.self_test()
        good, bad = score(reward, torch.stack([test.good, test.bad]), ["a", "a"], [{}, {}])
        assert good > bad
    images = torch.rand(2, 3, 8, 8)
    images[0] = float("inf")
    assert get("jpeg_size")(images, ["", ""], [{}, {}]).isnan().tolist() == [True, False]
    assert score(get("jpeg_size"), torch.empty(0, 3, 8, 8), [], []).shape == (0,)


@pytest.mark.parametrize("options", [{"goal": "tiny"}, {"unit": "mb"}, {"quality": 0}])
def test_bad_options(options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="jpeg_size: "):
        get("jpeg_size", **options)
