"""Noise as a pure function of its name, so that results depend on no global state, batch or process.

Every Gaussian drawn in stepcredit is ``normal(shape, stream, seed, iteration, prompt, member, step)`` or a part of
that key. There is no generator state to save, and a member's noise is the same wherever it is computed. Philox is used
with the whole 128-bit hash of the key: torch's CPU generator keeps 32 bits of a seed, few enough for two steps of one
run to share their noise.
"""

from __future__ import annotations

import hashlib
import json

import numpy as np
import torch
from torch import Tensor

Key = int | str


def generator(*key: Key) -> np.random.Generator:
    """A generator that stands at the beginning of the key's own stream, equal in every process."""
    digest = hashlib.blake2b(json.dumps(key).encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))


def normal(shape: tuple[int, ...], *key: Key) -> Tensor:
    """Standard Gaussian noise of a key, float32 on the CPU."""
    return torch.from_numpy(generator(*key).standard_normal(shape, dtype=np.float32))
