"""Text embeddings kept on disk, one safetensors file a prompt, so that the text encoders may leave memory."""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from stepcredit.policies.base import Conditioning
from stepcredit.policies.diffusers_common import pad_rows


@dataclass(frozen=True)
class EmbeddingCache:
    """Embeddings of prompts under one model: the key is ``identity`` (model, revision, ...) and the prompt itself."""

    folder: Path
    identity: tuple[str, ...]

    def path(self, prompt: str) -> Path:
        """File of a prompt."""
        key = hashlib.sha256(self._label(prompt).encode()).hexdigest()
        return self.folder / key[:2] / f"{key}.safetensors"

    def read(self, prompt: str) -> Conditioning | None:
        """The prompt's tensors without a batch dimension, or None; a damaged file counts as absent, with a warning."""
        path = self.path(prompt)
        if not path.exists():
            return None
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                if (file.metadata() or {}).get("key") == self._label(prompt):
                    return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, safe_open is no dict
        except (SafetensorError, OSError):
            pass
        warnings.warn(f"{path} is damaged or not of this prompt; it is made anew", stacklevel=2)
        return None

    def write(self, prompt: str, row: Conditioning) -> None:
        """Stores one prompt's tensors; a reader sees the whole file or none."""
        path = self.path(prompt)
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}.part")
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in row.items()}
        save_file(tensors, part, metadata={"key": self._label(prompt)})
        os.replace(part, path)

    def _label(self, prompt: str) -> str:
        return json.dumps([*self.identity, prompt])


def embed_cached(
    cache: EmbeddingCache, prompts: Sequence[str], embed: Callable[[Sequence[str]], Conditioning]
) -> Conditioning:
    """Conditioning of the prompts, in order; ``embed`` is called once, with the prompts that the cache lacks.

    Tensors are on the CPU; sequences of unequal length are padded with zeros. Raises whatever ``embed`` raises.
    """
    rows = {prompt: cache.read(prompt) for prompt in dict.fromkeys(prompts)}
    missing = [prompt for prompt, row in rows.items() if row is None]
    if missing:
        made = {name: tensor.cpu() for name, tensor in embed(missing).items()}
        for i, prompt in enumerate(missing):
            made_row = {name: tensor[i] for name, tensor in made.items()}
            cache.write(prompt, made_row)
            rows[prompt] = made_row
    found = [row for prompt in prompts if (row := rows[prompt]) is not None]
    return {name: pad_rows([row[name] for row in found]) for name in found[0]}
