"""The contract of a reward: images, prompts and metadata in, one float32 per image out, in native units."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

Metadata = Mapping[str, Any]


@dataclass(frozen=True)
class RewardInfo:
    """What a user must know of a reward before trusting it."""

    name: str
    range: tuple[float, float]
    """Lowest and highest value that can occur, in the reward's own units; infinite where unbounded."""
    licence: str
    description: str
    direction: Literal["higher", "lower"] = "higher"
    needs: tuple[str, ...] = ()
    """Extras or weights that must be present, for messages: ``("stepcredit[ocr]",)``."""
    batch_size: int = 64


@dataclass(frozen=True)
class SelfTest:
    """A known good and a known bad image for one prompt: the good one must score higher by ``margin``."""

    good: Tensor
    """``[3, H, W]`` in [0, 1]."""
    bad: Tensor
    prompt: str
    metadata: Metadata
    margin: float = 0.0


@runtime_checkable
class Reward(Protocol):
    """Scores images. NaN marks a sample that could not be scored; it is never replaced by a number."""

    @property
    def info(self) -> RewardInfo: ...

    def __call__(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Metadata]) -> Tensor:
        """Reward of each image: images ``[B, 3, H, W]`` in [0, 1] -> float32 ``[B]``, native units."""
        ...

    def self_test(self) -> SelfTest:
        """The pair of images by which ``check`` proves that the reward works on this machine."""
        ...


class RewardError(RuntimeError):
    """A reward broke its contract; the message names the reward and the first bad sample."""


@dataclass(frozen=True)
class Judgement:
    """What a reward says of a batch of images."""

    score: Tensor
    """float32 ``[B]``; NaN for a sample that could not be scored."""
    components: dict[str, Tensor]
    """Named parts of the score, float32 ``[B]`` each; empty for a reward without parts."""
    exact: Tensor | None
    """float32 ``[B]``: 1 where the image is wholly right, 0 where not; None for rewards that cannot tell."""


def score(reward: Reward, images: Tensor, prompts: Sequence[str], metadata: Sequence[Metadata]) -> Tensor:
    """Call a reward in batches of its own size and hold it to its contract.

    images ``[B, 3, H, W]`` in [0, 1]; prompts and metadata of length B. Returns float32 ``[B]`` on the CPU; NaN marks
    samples that the reward could not score. Raises RewardError for a wrong length, a wrong type or an infinite value.
    """

    def ask(some: slice) -> dict[str, Tensor]:
        return {"score": reward(images[some], prompts[some], metadata[some])}

    return _in_batches(reward, images, prompts, metadata, ask)["score"]


def judge(reward: Reward, images: Tensor, prompts: Sequence[str], metadata: Sequence[Metadata]) -> Judgement:
    """``score`` with all that the reward can say beside it, from one look at the images where it has ``components``.

    A reward may have ``components(images, prompts, metadata) -> {"score": [B], name: [B], ...}``; one of them may be
    named ``exact``. A reward without may have ``exact(images, metadata) -> bool [B]``. Raises RewardError as ``score``.
    """
    tell = getattr(reward, "components", None)
    if tell is not None:

        def ask(some: slice) -> dict[str, Tensor]:
            return dict(tell(images[some], prompts[some], metadata[some]))

        found = _in_batches(reward, images, prompts, metadata, ask)
        values, exact = found.pop("score"), found.pop("exact", None)
    else:
        found, values = {}, score(reward, images, prompts, metadata)
        verdict = getattr(reward, "exact", None)
        exact = None if verdict is None else verdict(images, metadata).float().cpu()
    return Judgement(values, found, None if exact is None else exact.masked_fill(values.isnan(), float("nan")))


def join(parts: Sequence[Judgement]) -> Judgement:
    """Judgements of consecutive batches as one. Raises ValueError for an empty sequence."""
    if not parts:
        raise ValueError("there is no judgement to join")
    return Judgement(
        score=torch.cat([part.score for part in parts]),
        components={name: torch.cat([part.components[name] for part in parts]) for name in parts[0].components},
        exact=torch.cat([part.exact for part in parts if part.exact is not None])
        if parts[0].exact is not None
        else None,
    )


def _in_batches(
    reward: Reward,
    images: Tensor,
    prompts: Sequence[str],
    metadata: Sequence[Metadata],
    ask: Callable[[slice], dict[str, Tensor]],
) -> dict[str, Tensor]:
    """What ``ask`` says of every slice of the batch, each part checked, joined by name."""
    name, size = reward.info.name, reward.info.batch_size
    if not len(images) == len(prompts) == len(metadata):
        raise RewardError(
            f"reward {name!r}: {len(images)} images, {len(prompts)} prompts and {len(metadata)} metadata entries; "
            "the three must agree"
        )
    parts: dict[str, list[Tensor]] = {"score": []}
    for start in range(0, len(images), size):
        stop = min(start + size, len(images))
        for key, part in ask(slice(start, stop)).items():
            _check(name, part, prompts, start, stop)
            parts.setdefault(key, []).append(part.detach().to("cpu", torch.float32))
    joined = {key: torch.cat(some) if some else torch.empty(0) for key, some in parts.items()}
    short = next((key for key, values in joined.items() if len(values) != len(images)), None)
    if short is not None:
        raise RewardError(f"reward {name!r} gave its component {short!r} for some batches and not for others")
    return joined


def _check(name: str, part: Tensor, prompts: Sequence[str], start: int, stop: int) -> None:
    if not isinstance(part, Tensor) or not part.is_floating_point():
        kind = f"a {part.dtype} tensor" if isinstance(part, Tensor) else type(part).__name__
        raise RewardError(f"reward {name!r} returned {kind}; it must return a float tensor [B]")
    if part.shape != (stop - start,):
        raise RewardError(f"reward {name!r} returned shape {tuple(part.shape)} for {stop - start} images")
    if bool(part.isinf().any()):
        bad = start + int(part.isinf().nonzero()[0])
        raise RewardError(f"reward {name!r} is infinite for sample {bad} (prompt {prompts[bad]!r})")


def require_finite(images: Tensor, prompts: Sequence[str]) -> None:
    """Raise FloatingPointError for an image ``[B, 3, H, W]`` of a policy that is not finite.

    A reward would give it NaN, as one that it failed at, or, where it does not look, a number like any other.
    """
    finite = images.isfinite().flatten(1).all(1)
    if not bool(finite.all()):
        bad = int((~finite).nonzero()[0])
        raise FloatingPointError(
            f"the image of sample {bad} (prompt {prompts[bad]!r}) is not finite; lower the learning rate, or use a "
            "wider dtype for the model or its autoencoder"
        )


def to_uint8(images: Tensor) -> Tensor:
    """The one canonical image form: ``[B, 3, H, W]`` floats in [0, 1] -> uint8 ``[B, H, W, 3]``, rounded, RGB."""
    return (images.float().clamp(0, 1) * 255).round().to(torch.uint8).permute(0, 2, 3, 1).contiguous().cpu()
