"""Pictures of ``spell`` prompts: one word, in one of several fonts and inks, on light paper."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from stepcredit import noise
from stepcredit.tasks.base import Prompt

HEIGHT, WIDTH = 16, 48
"""Of a picture, in pixels."""
POINTS = 12
"""Height of a line of text, in pixels."""
FONTS = ("DejaVuSans", "DejaVuSerif", "STIXGeneralBol")
"""Files that matplotlib brings."""
INKS = ((0.05, 0.05, 0.08), (0.08, 0.16, 0.50), (0.50, 0.06, 0.10), (0.04, 0.32, 0.16))
PAPERS = ((1.0, 1.0, 1.0), (0.98, 0.95, 0.86), (0.90, 0.94, 0.99))
SUPERSAMPLE = 4


def render(metadata: Mapping[str, Any], seed: int) -> Tensor:
    """The word of one prompt as ``[3, 16, 48]`` in [0, 1]; font, ink and paper are a function of ``seed``."""
    random = noise.generator("spell picture", seed)
    font, ink, paper = (int(random.integers(len(choice))) for choice in (FONTS, INKS, PAPERS))
    ground, stroke = (np.array(colour, dtype=np.float32)[:, None, None] for colour in (PAPERS[paper], INKS[ink]))
    cover = coverage(str(metadata["text"]), font)
    return torch.from_numpy(ground + (stroke - ground) * cover)


def render_batch(prompts: Sequence[Prompt], seed: int) -> Tensor:
    """A picture for every prompt, ``[B, 3, 16, 48]`` in [0, 1], a function of (prompts, seed)."""
    seeds = noise.generator("spell batch", seed).integers(2**31, size=len(prompts))
    return torch.stack([render(prompt.metadata, int(one)) for prompt, one in zip(prompts, seeds, strict=True)])


def coverage(word: str, font: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """How much of every pixel the word's ink covers, float32 ``[16, 48]`` in [0, 1]."""
    page = Image.new("L", (WIDTH * SUPERSAMPLE, HEIGHT * SUPERSAMPLE), 0)
    ImageDraw.Draw(page).text((page.width / 2, page.height / 2), word, fill=255, font=_face(font), anchor="mm")
    return np.asarray(page.resize((WIDTH, HEIGHT), Image.Resampling.BOX), dtype=np.float32) / np.float32(255)


@cache
def _face(font: int) -> ImageFont.FreeTypeFont:
    import matplotlib

    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    return ImageFont.truetype(folder / f"{FONTS[font]}.ttf", POINTS * SUPERSAMPLE)
