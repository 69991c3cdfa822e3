"""Rewards by name: what a recipe may ask for, and how a user's own reward joins them."""

from __future__ import annotations

import difflib
import importlib
import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stepcredit.rewards.base import Metadata, Reward, RewardError, RewardInfo, SelfTest

Factory = Callable[..., Reward]

# Strings, so that asking for one reward imports that reward's dependencies alone.
_BUILT_IN = {
    "compose": "stepcredit.rewards.compose:ComposeReward",
    "prefer": "stepcredit.rewards.prefer:PreferReward",
    "ocr": "stepcredit.rewards.ocr:Ocr",
    "spell": "stepcredit.rewards.ocr:spell",
    "jpeg_size": "stepcredit.rewards.jpeg:JpegSize",
    "pickscore": "stepcredit.rewards.clip_models:pickscore",
    "clip_l14_cos": "stepcredit.rewards.clip_models:clip_l14_cos",
    "aesthetic": "stepcredit.rewards.aesthetic:Aesthetic",
    "imagereward": "stepcredit.rewards.imagereward:ImageReward",
    "hpsv2.1": "stepcredit.rewards.hps:hpsv21",
    "hpsv3": "stepcredit.rewards.hpsv3:HPSv3",
    "geneval": "stepcredit.rewards.geneval:geneval",
    "geneval_partial": "stepcredit.rewards.geneval:partial",
    "vlm_yes_no": "stepcredit.rewards.vlm:vlm_yes_no",
    "unified_reward": "stepcredit.rewards.unified:UnifiedReward",
    "deqa": "stepcredit.rewards.served:deqa",
    "remote": "stepcredit.rewards.served:RemoteReward",
    "composite": "stepcredit.rewards.composite:composite",
    "tiny_pickscore": "stepcredit.rewards.tiny:TinyPickscore",
    "tiny_ocr": "stepcredit.rewards.tiny:TinyOcr",
    "tiny_geneval": "stepcredit.rewards.tiny:TinyGenEval",
}
_registered: dict[str, Factory] = {}


def names() -> tuple[str, ...]:
    """Every name that ``get`` knows: the built-in ones, then those registered by the user."""
    return (*_BUILT_IN, *_registered)


def register(name: str, factory: Factory) -> None:
    """Make ``get(name, **options)`` call ``factory(**options)``.

    Raises ValueError for a name that is taken or is not made of lower-case letters, digits, ``_``, ``-`` and ``.``.
    """
    if not re.fullmatch(r"[a-z0-9][a-z0-9_.-]*", name):
        raise ValueError(f"reward name {name!r} must be lower-case letters, digits, '_', '-' and '.'")
    if name in _BUILT_IN or name in _registered:
        raise ValueError(f"reward name {name!r} is taken; choose another")
    if not callable(factory):
        raise ValueError(f"reward {name!r}: the factory must be callable; got {type(factory).__name__}")
    _registered[name] = factory


def get(name: str, **options: Any) -> Reward:
    """The reward of that name, built with its own options.

    Raises ValueError for an unknown name (naming the nearest) or an unknown option (naming the known ones), and
    RewardError when the packages or weights that the reward needs are absent.
    """
    make = factory(name)
    signature = inspect.signature(make)
    try:
        signature.bind(**options)
    except TypeError as error:
        known = ", ".join(signature.parameters) or "none"
        raise ValueError(f"reward {name!r}: {error}; its options are: {known}") from None
    return make(**options)


def factory(name: str) -> Factory:
    """What ``get`` calls for a name, with its module imported and nothing loaded. Raises as ``get``."""
    return _registered.get(name) or _load(name)


def _load(name: str) -> Factory:
    if name not in _BUILT_IN:
        near = difflib.get_close_matches(name, names(), n=1, cutoff=0.4)
        hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(names())}"
        raise ValueError(f"unknown reward {name!r}; {hint}")
    module, _, attribute = _BUILT_IN[name].partition(":")
    try:
        found: Factory = getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError as error:
        raise RewardError(f"reward {name!r} needs the package {error.name!r}, which is not installed") from error
    return found


@dataclass(frozen=True)
class FunctionReward:
    """A reward made of a plain function: ``function(images, prompts, metadata) -> [B]`` numbers.

    The function gets float images ``[B, 3, H, W]`` in [0, 1] and returns a float tensor or a sequence of B floats,
    with NaN where it cannot judge. ``test`` is the pair of images that ``check`` tries it on.
    """

    info: RewardInfo
    function: Callable[[Tensor, Sequence[str], Sequence[Metadata]], Tensor | Sequence[float]]
    test: SelfTest

    def __call__(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Metadata]) -> Tensor:
        """Scores as float32 ``[B]``, in the units of the function."""
        scores = self.function(images, prompts, metadata)
        if isinstance(scores, Tensor):
            return scores.detach().to("cpu", torch.float32)
        return torch.tensor([float(score) for score in scores], dtype=torch.float32)

    def self_test(self) -> SelfTest:
        """The pair of images given at construction."""
        return self.test
