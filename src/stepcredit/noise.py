"""Noise as a pure function of its name, so that results depend on no global state, batch or process.

Every Gaussian drawn in stepcredit is ``normal(shape, stream, seed, iteration, prompt, member, step)`` or a part of
that key. There is no generator state to save, and a member's noise is the same wherever it is computed.
"""

from __future__ import annotations

import hashlib
import json

import torch
from torch import Tensor

Key = int | str


def seed_of(*key: Key) -> int:
    """63-bit seed of a key of integers and strings, equal on every platform and in every process."""
    digest = hashlib.blake2b(json.dumps(key).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def generator(*key: Key) -> torch.Generator:
    """A CPU generator that stands at the beginning of the key's own stream."""
    return torch.Generator().manual_seed(seed_of(*key))


def normal(shape: tuple[int, ...], *key: Key) -> Tensor:
    """Standard Gaussian noise of a key, float32 on the CPU."""
    return torch.randn(shape, generator=generator(*key))
