"""What travels between the ``remote`` reward and its server: JSON with PNG inside, checked strictly on both sides."""

from __future__ import annotations

import base64
import binascii
import contextlib
import io
import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self, TypeVar

import numpy as np
import torch
from PIL import Image
from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, model_validator
from torch import Tensor

from stepcredit import untrusted
from stepcredit.rewards.base import RewardInfo, SelfTest
from stepcredit.rewards.inputs import to_pil
from stepcredit.untrusted import clean


@dataclass(frozen=True)
class Limits:
    """What a server accepts of one request, and a client of one reply."""

    bytes: int = 256 << 20
    images: int = 1024
    pixels: int = 4 << 20
    """Of one image."""
    all_pixels: int = 128 << 20
    """Of the images of one request; 1.5 GiB once they are floats."""
    seconds: float = 60.0
    """For reading one request."""
    connections: int = 32


class _Message(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)
    version: Literal[1] = 1


Text = Annotated[str, Field(max_length=20_000)]
Label = Annotated[str, Field(max_length=500, pattern=r"^[^\x00-\x1f\x7f-\x9f]*$")]
"""A line for people: no control characters, which could rewrite a terminal."""
Finite = Annotated[float, Field(allow_inf_nan=False)]
_LARGEST = float(torch.finfo(torch.float32).max)
Score = Annotated[Finite, Field(ge=-_LARGEST, le=_LARGEST)]
"""Finite in float32 too, which scores are kept in."""


class ScoreRequest(_Message):
    """Images as base64 PNG, each with its prompt and metadata."""

    images: list[str]
    prompts: list[Text]
    metadata: list[dict[str, JsonValue]]


class ScoreReply(_Message):
    """One score per image, null for one that could not be scored."""

    reward: Label
    scores: list[Score | None]


class InfoReply(_Message):
    """What the reward is; an infinite end of its range is null."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_.:-]{0,63}$")]
    low: Finite | None
    high: Finite | None
    licence: Label
    description: Label
    direction: Literal["higher", "lower"]
    batch_size: Annotated[int, Field(ge=1, le=1 << 20)]
    per_image: bool

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.low is not None and self.high is not None and self.low > self.high:
            raise ValueError(f"low {self.low:g} is above high {self.high:g}")
        return self

    @classmethod
    def of(cls, info: RewardInfo, batch_size: int, per_image: bool) -> InfoReply:
        """The message for a reward's info; control characters in its texts become spaces."""
        low, high = (end if math.isfinite(end) else None for end in info.range)
        licence, description = (
            "".join(char if char.isprintable() else " " for char in text)[:500]
            for text in (info.licence, info.description)
        )
        return cls(
            name=info.name,
            low=low,
            high=high,
            licence=licence,
            description=description,
            direction=info.direction,
            batch_size=batch_size,
            per_image=per_image,
        )

    def info(self, name: str, needs: tuple[str, ...]) -> RewardInfo:
        """The reward's info on the client's side, under the client's name."""
        low = -math.inf if self.low is None else self.low
        high = math.inf if self.high is None else self.high
        return RewardInfo(
            name, (low, high), self.licence, self.description, self.direction, needs, batch_size=self.batch_size
        )


class SelfTestReply(_Message):
    """The known good and the known bad image, as base64 PNG."""

    good: str
    bad: str
    prompt: Text
    metadata: dict[str, JsonValue]
    margin: Finite

    @classmethod
    def of(cls, test: SelfTest) -> SelfTestReply:
        """The message for a reward's self-test."""
        good, bad = (encode_images(image[None])[0] for image in (test.good, test.bad))
        return cls(good=good, bad=bad, prompt=test.prompt, metadata=dict(test.metadata), margin=test.margin)

    def test(self, limits: Limits) -> SelfTest:
        """The self-test. Raises ValueError for images that are not PNG within the limits."""
        good, bad = (decode_image(image, limits) for image in (self.good, self.bad))
        return SelfTest(good, bad, self.prompt, self.metadata, self.margin)


M = TypeVar("M", bound=_Message)
_PNG_START = b"\x89PNG\r\n\x1a\n\x00\x00\x00\x0dIHDR"


def parse(kind: type[M], data: bytes) -> M:
    """A message of that kind. Raises ValueError, in one line, for what is not exactly one."""
    try:
        return kind.model_validate(loads(data), strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = clean(".".join(map(str, first["loc"])))[:120] or "the message"
        raise ValueError(f"{where}: {first['msg']}") from None


def loads(data: bytes) -> Any:
    """JSON as ``untrusted.loads`` reads it, from bytes. Raises ValueError."""
    try:
        return untrusted.loads(data.decode())
    except UnicodeDecodeError:
        raise ValueError("not UTF-8") from None


def encode_images(images: Tensor) -> list[str]:
    """Images ``[B, 3, H, W]`` in [0, 1] as base64 PNG: lossless after the one rounding to 8 bits."""
    return [encode_picture(picture) for picture in to_pil(images)]


def encode_picture(picture: Image.Image) -> str:
    """A picture as base64 PNG, compressed lightly."""
    buffer = io.BytesIO()
    picture.save(buffer, format="PNG", compress_level=1)
    return base64.b64encode(buffer.getvalue()).decode("ascii")


def decode_image(text: str, limits: Limits) -> Tensor:
    """Image ``[3, H, W]`` in [0, 1] of a base64 PNG. Raises ValueError for anything else; size first, then pixels."""
    return _unit(_pixels(_png(text, limits)))


def decode_images(texts: Sequence[str], limits: Limits) -> Tensor:
    """Images ``[B, 3, H, W]`` of one size.

    Raises ValueError naming the first that is none, or of another size, and for more pixels than the limits allow in
    all: sizes are summed up before any image is decoded, since a PNG may be a thousandth of its pixels.
    """
    files: list[tuple[bytes, tuple[int, int]]] = []
    arrays: list[np.ndarray[Any, Any]] = []
    for index, text in enumerate(texts):
        with _of_image(index):
            files.append(_png(text, limits))
        if files[index][1] != files[0][1]:
            raise ValueError(f"image {index} differs in size from the first; send images of one size")
    total = sum(width * height for _, (width, height) in files)
    if total > limits.all_pixels:
        raise ValueError(f"{len(files)} images of {total} pixels; at most {limits.all_pixels} are accepted at a time")
    for index, file in enumerate(files):
        with _of_image(index):
            arrays.append(_pixels(file))
    return _unit(np.stack(arrays))


@contextlib.contextmanager
def _of_image(index: int) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise ValueError(f"image {index}: {error}") from None


def _png(text: str, limits: Limits) -> tuple[bytes, tuple[int, int]]:
    """The bytes of a base64 PNG and the width and height in its header. Raises ValueError; nothing is decompressed."""
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise ValueError("not base64") from None
    if not data.startswith(_PNG_START) or len(data) < len(_PNG_START) + 8:
        raise ValueError("not a PNG")
    width, height = struct.unpack_from(">II", data, len(_PNG_START))
    if not 1 <= width * height <= limits.pixels:
        raise ValueError(f"{width} x {height} pixels; at most {limits.pixels} are accepted")
    return data, (width, height)


def _pixels(file: tuple[bytes, tuple[int, int]]) -> np.ndarray[Any, Any]:
    """uint8 ``[H, W, 3]``. Raises ValueError for what Pillow cannot read, or reads as of another size."""
    data, size = file
    try:
        with Image.open(io.BytesIO(data), formats=["PNG"]) as picture:
            if picture.size != size:  # a second header
                raise ValueError(f"not a PNG of {size[0]} x {size[1]} pixels throughout")
            if picture.mode != "RGB":
                raise ValueError(f"PNG of mode {picture.mode}; it must be 8-bit RGB")
            return np.array(picture)
    except ValueError:
        raise
    except Exception as error:  # a damaged file may raise anything in the decoder
        raise ValueError(f"not a PNG ({type(error).__name__})") from None


def _unit(pixels: np.ndarray[Any, Any]) -> Tensor:
    """uint8 ``[..., H, W, 3]`` as floats ``[..., 3, H, W]`` in [0, 1]."""
    return torch.from_numpy(pixels).movedim(-1, -3).float() / 255
