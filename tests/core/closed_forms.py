"""Data whose flow is known in closed form."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Mixture:
    """Data x_0 ~ sum_k weight_k N(mean_k, sigma_k^2), every coordinate independent; noise x_1 ~ N(0, 1).

    With one component it is the Gaussian whose marginals are N((1-t) m, (1-t)^2 c^2 + t^2).
    """

    means: tuple[float, ...]
    sigmas: tuple[float, ...]
    weights: tuple[float, ...] = (1.0,)

    def _components(self, x: Tensor, t: Tensor | float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        m, c, w = (torch.tensor(values, dtype=x.dtype) for values in (self.means, self.sigmas, self.weights))
        t = torch.as_tensor(t, dtype=x.dtype)[..., None]  # against the components
        variance = (1 - t) ** 2 * c**2 + t**2
        centred = x[..., None] - (1 - t) * m
        responsibility = torch.softmax(w.log() - variance.log() / 2 - centred**2 / (2 * variance), dim=-1)
        return centred, variance, responsibility, t

    def x_0(self, x: Tensor, t: Tensor | float) -> Tensor:
        """Posterior mean E[x_0 | x_t = x]."""
        centred, variance, responsibility, t = self._components(x, t)
        m, c = (torch.tensor(values, dtype=x.dtype) for values in (self.means, self.sigmas))
        return (responsibility * (m + (1 - t) * c**2 / variance * centred)).sum(-1)

    def x_1(self, x: Tensor, t: Tensor | float) -> Tensor:
        """Posterior mean E[x_1 | x_t = x]."""
        centred, variance, responsibility, t = self._components(x, t)
        return (responsibility * t / variance * centred).sum(-1)

    def velocity(self, x: Tensor, t: Tensor | float) -> Tensor:
        """The flow's velocity E[x_1 - x_0 | x_t = x], without dividing by t."""
        return self.x_1(x, t) - self.x_0(x, t)

    def mean(self, t: float) -> float:
        """Mean of the marginal at time t."""
        return (1 - t) * sum(w * m for w, m in zip(self.weights, self.means, strict=True))

    def variance(self, t: float) -> float:
        """Variance of the marginal at time t."""
        second = sum(w * (c**2 + m**2) for w, m, c in zip(self.weights, self.means, self.sigmas, strict=True))
        return (1 - t) ** 2 * second + t**2 - self.mean(t) ** 2
