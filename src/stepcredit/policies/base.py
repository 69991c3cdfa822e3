"""What a model must offer to be trained: the one seam between the corridor and any network."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

Conditioning = dict[str, Tensor]
"""Encoded prompts: named tensors whose first dimension is the batch. What is not per prompt stays in the policy."""


@runtime_checkable
class Policy(Protocol):
    """A velocity field conditioned on text, with the few methods that training and sampling need.

    ``x`` is a batch of latents ``[B, *latent_shape]``; ``t`` are flow times ``[B]`` in [0, 1], 1 being pure noise.
    A policy holds its own classifier-free guidance, if any: ``velocity`` returns the guided velocity.
    """

    name: str

    @property
    def latent_shape(self) -> tuple[int, ...]:
        """Shape of one sample's latents."""
        ...

    @property
    def forwards_per_velocity(self) -> int:
        """Network forwards behind one call of ``velocity`` per sample: 1, or 2 with classifier-free guidance."""
        ...

    @property
    def device(self) -> torch.device: ...

    def grid(self, steps: int) -> Tensor:
        """Time grid that this model is sampled on, float64 ``[steps + 1]``, from 1 down to 0."""
        ...

    def encode(self, prompts: Sequence[str]) -> Conditioning:
        """Conditioning of ``len(prompts)`` prompts."""
        ...

    def velocity(self, x: Tensor, t: Tensor, cond: Conditioning) -> Tensor:
        """Velocity ``E[x_1 - x_0 | x_t, c]`` of the trained model, ``[B, *latent_shape]``; carries gradients."""
        ...

    def reference_velocity(self, x: Tensor, t: Tensor, cond: Conditioning) -> Tensor:
        """The same under the untouched base model; never carries gradients."""
        ...

    def decode(self, x_0: Tensor) -> Tensor:
        """Images of clean latents: float32 ``[B, 3, H, W]`` in [0, 1]."""
        ...

    def named_parameters(self) -> Iterable[tuple[str, nn.Parameter]]:
        """The trained parameters alone (all of a small model, or the adapters of a large one), in a fixed order."""
        ...


def take(cond: Conditioning, index: Tensor) -> Conditioning:
    """Rows ``index`` (long ``[N]``) of every tensor of a conditioning."""
    return {name: tensor[index] for name, tensor in cond.items()}
