"""The network of the reward ``prefer``: two small towers whose embeddings of a picture and of a prompt are compared.

As CLIP (2103.00020) and PickScore (2305.01569) at the desk's scale: a convolutional network for 24x24 pictures, a small
transformer for prompts of ``compose``, and a learned scale on the cosine.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from stepcredit import model_files
from stepcredit.tasks.compose.prompts import MAX_WORDS, tokenize, vocabulary
from stepcredit.tasks.compose.render import SIZE
from stepcredit.untrusted import loads

KIND = model_files.Kind("stepcredit-prefer-1", "a scorer", "stepcredit pretrain prefer")
MAX_SCALE = 30.0
"""Largest factor of the cosine; the learned one is held to it."""
_GROUPS = 8


@dataclass(frozen=True)
class ScorerConfig:
    """Architecture of a scorer; stands in the header of its weights. Raises ValueError for what cannot be built."""

    width: int = 64
    """Channels of the convolutional tower where they are most."""
    words: int = 64
    """Width of the tower for prompts."""
    depth: int = 2
    """Blocks of the tower for prompts."""
    embedding: int = 96
    """Length of the embeddings that are compared."""

    def __post_init__(self) -> None:
        # bounded, since the header of a file is not to be trusted with the machine's time and memory
        for name, value, unit in (("width", self.width, 4 * _GROUPS), ("words", self.words, 16)):
            if type(value) is not int or not unit <= value <= 512 or value % 16:
                raise ValueError(f"{name} must be a multiple of 16 from {unit} to 512, not {value!r}")
        for name, value, most in (("depth", self.depth, 8), ("embedding", self.embedding, 512)):
            if type(value) is not int or not 1 <= value <= most:
                raise ValueError(f"{name} must be a whole number from 1 to {most}, not {value!r}")


class Scorer(nn.Module):
    """Scores pictures for prompts: ``scale * cos(picture, prompt)``. Initial weights are a function of (config, seed).

    Differences of two scores for one prompt are log-odds that the first picture is the one meant.
    """

    def __init__(self, config: ScorerConfig, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        w, D = config.width, config.embedding
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.picture = nn.Sequential(
                nn.Conv2d(3, 32, 4, stride=2, padding=1), nn.SiLU(),
                nn.Conv2d(32, w, 3, stride=2, padding=1), nn.GroupNorm(_GROUPS, w), nn.SiLU(),
                _Residual(w),
                nn.Conv2d(w, w, 3, stride=2, padding=1), nn.GroupNorm(_GROUPS, w), nn.SiLU(),
                nn.Flatten(), nn.Linear(w * (SIZE // 8) ** 2, 2 * D), nn.SiLU(), nn.Linear(2 * D, D),
            )  # fmt: skip
            self.words = nn.Embedding(len(vocabulary()), config.words)
            self.places = nn.Parameter(0.1 * torch.randn(MAX_WORDS, config.words))
            self.blocks = nn.ModuleList(_Block(config.words) for _ in range(config.depth))
            self.prompt = nn.Sequential(nn.LayerNorm(config.words), nn.Linear(config.words, D))
            self.log_scale = nn.Parameter(torch.tensor(math.log(10.0)))

    @property
    def scale(self) -> Tensor:
        """Factor of the cosine, a scalar in (0, MAX_SCALE]."""
        return self.log_scale.exp().clamp(max=MAX_SCALE)

    def embed_pictures(self, images: Tensor) -> Tensor:
        """Pictures ``[B, 3, 24, 24]`` in [0, 1] -> unit vectors ``[B, embedding]``."""
        return functional.normalize(self.picture(2 * images - 1), dim=1)

    def embed_prompts(self, prompts: Sequence[str]) -> Tensor:
        """Texts -> unit vectors ``[B, embedding]``. Raises ValueError for a word that ``compose`` does not have."""
        tokens = tokenize(prompts, length=MAX_WORDS).to(self.places.device)
        there = tokens != 0
        h = self.words(tokens) + self.places
        for block in self.blocks:
            h = block(h, there)
        mean = (h * there[..., None]).sum(1) / there.sum(1, keepdim=True).clamp(min=1)
        return functional.normalize(self.prompt(mean), dim=1)

    def forward(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """Score of each picture ``[B, 3, 24, 24]`` for its prompt: ``[B]`` in [-scale, scale]."""
        return self.scale * (self.embed_pictures(images) * self.embed_prompts(prompts)).sum(1)


class _Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.GroupNorm(_GROUPS, width), nn.SiLU())

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.body(x)
        return out


class _Block(nn.Module):
    """Self-attention over the words that are there, and an MLP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.merge = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 3 * width), nn.SiLU(), nn.Linear(3 * width, width))

    def forward(self, h: Tensor, there: Tensor) -> Tensor:
        B, N, D = h.shape
        q, k, v = self.qkv(self.before_attention(h)).view(B, N, 3, D // 16, 16).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=there[:, None, None, :])
        h = h + self.merge(mixed.transpose(1, 2).reshape(B, N, D))
        out: Tensor = h + self.mlp(self.before_mlp(h))
        return out


def save(scorer: Scorer, path: Path, metadata: Mapping[str, str] | None = None) -> None:
    """Write a scorer as float32 safetensors, in one rename; ``metadata`` joins the header.

    Raises ValueError for a weight that is not finite or a metadata key that the format uses itself.
    """
    KIND.save(
        path,
        scorer,
        {"config": json.dumps(asdict(scorer.config)), "vocabulary": json.dumps(vocabulary())},
        metadata,
    )


def load(path: Path) -> Scorer:
    """A scorer of a file that :func:`save` wrote, without gradients.

    Raises FileNotFoundError, or ValueError for a file that is damaged, of another kind, architecture or vocabulary, or
    holds a weight that is not finite.
    """
    header = KIND.header(path)
    try:
        config = ScorerConfig(**loads(header["config"]))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"the header of {path} does not describe a scorer: {error}") from error
    if header.get("vocabulary") != json.dumps(vocabulary()):
        raise ValueError(f"{path} was trained on another vocabulary; rebuild it with `stepcredit pretrain prefer`")
    scorer, tensors = Scorer(config), model_files.tensors_of(path)
    model_files.require_fit(tensors, scorer, path)
    scorer.load_state_dict(tensors)
    return scorer.requires_grad_(False).eval()


def read_metadata(path: Path) -> dict[str, str]:
    """Header of a scorer's file. Raises as :func:`load`."""
    return KIND.header(path)
