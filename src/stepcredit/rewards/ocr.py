"""OCR reward: does the image say what the prompt asks for? Text is read by RapidOCR (PP-OCR models, Apache-2.0)."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from stepcredit.rewards import ocr_rules
from stepcredit.rewards.base import Metadata, RewardError, RewardInfo, SelfTest, to_uint8
from stepcredit.rewards.inputs import check_batch
from stepcredit.rewards.ocr_rules import Line, OcrScore

Engine = Callable[[NDArray[np.uint8]], Sequence[Line]]
"""Reads one image, uint8 ``[H, W, 3]`` in *BGR* order, the order of every PP-OCR engine; lines top to bottom."""

_NAN = OcrScore(float("nan"), float("nan"), False, float("nan"), 0, float("nan"), "")


class RapidOcr:
    """The RapidOCR engine with the models of its wheel: no download, one thread.

    ``side``: smaller pictures are enlarged to this shortest side before text is looked for, which is most of the
    time; 320 reads small pictures six times faster than the engine's own 736. ``detect=False`` looks for nothing and
    reads the whole image as a single line. Lines are read 48 pixels high in a strip of ``strip`` pixels, or wider where
    a line is: 144 reads short words in half the time. One instance serves one thread at a time.
    """

    def __init__(self, detect: bool = True, side: int = 736, min_confidence: float = 0.5, strip: int = 320) -> None:
        try:
            from rapidocr import RapidOCR
        except ModuleNotFoundError as error:
            raise RewardError("reward 'ocr' needs RapidOCR: pip install \"stepcredit[ocr]\"") from error
        # The engine's switches stay as the last call left them, so they are set once and never passed to a call.
        self._engine: Any = RapidOCR(
            params={
                "Global.log_level": "error",
                "Global.text_score": min_confidence,
                "Global.use_det": detect,
                "Det.limit_side_len": side,
                "Rec.rec_img_shape": [3, 48, strip],
                "Global.use_cls": False,  # upside-down text is not what a prompt asks for
                "EngineConfig.onnxruntime.intra_op_num_threads": 1,
                "EngineConfig.onnxruntime.inter_op_num_threads": 1,
            }
        )

    def __call__(self, image: NDArray[np.uint8]) -> list[Line]:
        """Lines of text with their confidences; empty when there is none."""
        output = self._engine(image)
        if output.txts is None:
            return []
        return [(str(text), float(score)) for text, score in zip(output.txts, output.scores, strict=True) if text]


class Ocr:
    """How well the text in the image matches the quoted text of the prompt, in [0, 1].

    ``rule``: ``robust`` (see ``ocr_rules.robust``) or ``flow_grpo``, the published rule with its cliff, for comparison.
    The target is ``metadata["text"]`` if given, else every quoted span of the prompt (``flow_grpo``: always the first
    pair of straight quotes). ``missing``: what to do without a target, ``fail`` or ``nan``. ``detect``, ``side`` and
    ``strip``: see ``RapidOcr``. ``workers``: threads, by default as many as torch uses. ``engine``: another reader,
    best a different one in evaluation than in training.
    """

    def __init__(
        self,
        rule: Literal["robust", "flow_grpo"] = "robust",
        missing: Literal["fail", "nan"] = "fail",
        detect: bool = True,
        side: int = 736,
        strip: int = 320,
        single_quotes: bool = False,
        punctuation: Literal["keep", "drop"] = "keep",
        clutter: float = 0.15,
        min_confidence: float = 0.5,
        confidence_weight: bool = True,
        workers: int | None = None,
        engine: Engine | None = None,
    ) -> None:
        for field, value, allowed in (
            ("rule", rule, ("robust", "flow_grpo")),
            ("missing", missing, ("fail", "nan")),
            ("punctuation", punctuation, ("keep", "drop")),
        ):
            if value not in allowed:
                raise ValueError(f"ocr: {field} must be one of {', '.join(allowed)}; got {value!r}")
        for field, number in (("clutter", clutter), ("min_confidence", min_confidence)):
            if not 0 <= number <= 1:
                raise ValueError(f"ocr: {field} must lie in [0, 1]; got {number}")
        if workers is not None and workers < 1:
            raise ValueError(f"ocr: workers must be at least 1; got {workers}")
        self._rule, self._missing, self._single_quotes = rule, missing, single_quotes
        self._robust: dict[str, Any] = {
            "clutter": clutter,
            "min_confidence": min_confidence,
            "confidence_weight": confidence_weight,
            "punctuation": punctuation,
        }
        for field, pixels, least in (("side", side, 32), ("strip", strip, 48)):
            if pixels < least:
                raise ValueError(f"ocr: {field} must be at least {least}; got {pixels}")
        count = 1 if engine else workers or max(1, min(torch.get_num_threads(), os.cpu_count() or 1, 8))
        self._engines: list[Engine] = (
            [engine] if engine else [RapidOcr(detect, side, min_confidence, strip) for _ in range(count)]
        )
        self.info = RewardInfo(
            name="ocr",
            range=(0.0, 1.0),
            licence="Apache-2.0 (RapidOCR and the PP-OCR models)",
            description=f"text asked for against text read, rule {rule}; comparable only within one engine",
            needs=() if engine else ("stepcredit[ocr]",),
            batch_size=64,
        )

    def __call__(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Metadata]) -> Tensor:
        """Scores in [0, 1], float32 ``[B]``; NaN for an image that is not finite, or without a target if so chosen."""
        return torch.tensor([found.score for found in self.details(images, prompts, metadata)], dtype=torch.float32)

    def components(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Metadata]) -> dict[str, Tensor]:
        """The score and its parts, float32 ``[B]`` each: score, hit, exact, extra, lines, confidence."""
        found = self.details(images, prompts, metadata)
        parts = ("score", "hit", "exact", "extra", "lines", "confidence")
        return {part: torch.tensor([float(getattr(one, part)) for one in found]) for part in parts}

    def details(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Metadata]) -> list[OcrScore]:
        """What was read in each image and how it was judged; raises RewardError for a prompt without a target."""
        valid = check_batch("ocr", images, prompts, metadata, need_prompt=False)
        judges = [self._judge(prompt, entry) for prompt, entry in zip(prompts, metadata, strict=True)]
        wanted = torch.tensor([bool(ok) and judge is not None for ok, judge in zip(valid, judges, strict=True)])
        lines = iter(self.read(images[wanted]) if bool(wanted.any()) else [])
        return [
            judge(next(lines)) if bool(take) and judge is not None else _NAN
            for take, judge in zip(wanted, judges, strict=True)
        ]

    def read(self, images: Tensor) -> list[Sequence[Line]]:
        """The lines of text in each image ``[B, 3, H, W]``; the result does not depend on the number of workers."""
        arrays = [np.ascontiguousarray(array.numpy()[:, :, ::-1]) for array in to_uint8(images)]
        count = len(self._engines)

        def work(k: int) -> list[Sequence[Line]]:
            return [self._read_one(self._engines[k], index, arrays[index]) for index in range(k, len(arrays), count)]

        if count == 1:
            return work(0)
        result: list[Sequence[Line]] = [()] * len(arrays)
        with ThreadPoolExecutor(count) as pool:
            for k, found in enumerate(pool.map(work, range(count))):
                result[k::count] = found
        return result

    @staticmethod
    def _read_one(engine: Engine, index: int, image: NDArray[np.uint8]) -> Sequence[Line]:
        try:
            return engine(image)
        except Exception as error:
            raise RewardError(f"reward 'ocr': the engine failed on image {index}: {error}") from error

    def _judge(self, prompt: str, metadata: Metadata) -> Callable[[Sequence[Line]], OcrScore] | None:
        """The rule for one prompt, or None when it asks for no text and that is allowed."""
        try:
            if self._rule == "flow_grpo":
                ocr_rules.flow_grpo(prompt, [])
                return lambda lines: _flow_grpo(prompt, lines)
            spans = ocr_rules.target_spans(prompt, metadata, single_quotes=self._single_quotes)
            ocr_rules.robust(spans, [], **self._robust)
            return lambda lines: ocr_rules.robust(spans, lines, **self._robust)
        except TypeError as error:
            raise RewardError(f"reward 'ocr': {error}") from error
        except ValueError as error:
            if self._missing == "nan":
                return None
            raise RewardError(
                f"reward 'ocr': {error} (prompt {prompt!r}); put the text to write in double quotes or in "
                "metadata 'text', or set missing: nan to leave such prompts out"
            ) from error

    def self_test(self) -> SelfTest:
        """The word STEP, clearly printed, against a blank page."""
        return SelfTest(
            good=render_text("STEP"),
            bad=torch.ones(3, 128, 256),
            prompt='a sign that says "STEP"',
            metadata={},
            margin=0.5,
        )


spell = partial(Ocr, detect=False, strip=144)
"""The reward of the desk task ``spell``: its pictures are one line of text each, 48 pixels wide."""


def _flow_grpo(prompt: str, lines: Sequence[Line]) -> OcrScore:
    score = ocr_rules.flow_grpo(prompt, lines)
    confidence = sum(weight for _, weight in lines) / len(lines) if lines else 0.0
    read = " ".join(text for text, _ in lines)
    return OcrScore(score, score, score == 1.0, float("nan"), len(lines), confidence, read)


def render_text(text: str, height: int = 128, width: int = 256) -> Tensor:
    """A page ``[3, height, width]`` in [0, 1] with one line of black DejaVu Sans in its middle."""
    import matplotlib

    font = Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf"
    page = Image.new("RGB", (width, height), "white")
    ImageDraw.Draw(page).text(
        (width / 2, height / 2), text, fill="black", font=ImageFont.truetype(str(font), height // 3), anchor="mm"
    )
    return torch.from_numpy(np.array(page)).permute(2, 0, 1).float() / 255
