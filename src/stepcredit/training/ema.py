"""Exponential moving average of the trained weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class EMA:
    """Shadow weights with decay ``min((1 + n) / (10 + n), highest)`` after n updates, in [0, 1).

    One update per optimiser step. Source: Flow-GRPO's published runs, highest = 0.9. With highest = 0 the shadow is the
    weights themselves.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], highest: float) -> None:
        self.highest = highest
        self.updates = 0
        self._parameters = dict(parameters)
        self.shadow = {name: p.detach().clone() for name, p in parameters.items()}

    @torch.no_grad()
    def update(self) -> None:
        """Move the shadow towards the weights, after an optimiser step."""
        decay = min((1 + self.updates) / (10 + self.updates), self.highest)
        self.updates += 1
        for name, parameter in self._parameters.items():
            self.shadow[name].lerp_(parameter.detach(), 1 - decay)

    def load(self, shadow: Mapping[str, Tensor], updates: int) -> None:
        """Take the shadow and the count of a checkpoint."""
        for name, tensor in self.shadow.items():
            tensor.copy_(shadow[name])
        self.updates = updates

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Within the block the model has the shadow weights; afterwards its own again, bit by bit."""
        own = {name: p.detach().clone() for name, p in self._parameters.items()}
        self._set(self.shadow)
        try:
            yield
        finally:
            self._set(own)

    @torch.no_grad()
    def _set(self, values: Mapping[str, Tensor]) -> None:
        for name, parameter in self._parameters.items():
            parameter.copy_(values[name])
