"""Muon, an optimiser for the matrices inside a network, in a precision of one's choice.

torch.optim.Muon orthogonalises in bfloat16 always, which a CPU without bfloat16 units emulates ten times slower than
it computes in float32; in bfloat16 this one gives torch's own bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic a x + b x^3 + c x^5, steep at 0 (Jordan 2024): it brings singular values to about 0.7-1.2."""
ITERATIONS = 5


def orthogonalised(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """A matrix with the singular vectors of ``matrix`` ``[A, B]`` and singular values of about 1, in ``dtype``.

    Newton-Schulz iteration on the matrix divided by its Frobenius norm. Source: Jordan, "Muon" (2024).
    """
    a, b, c = COEFFICIENTS
    x = matrix.to(dtype, copy=True)
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    x.div_(x.norm().clamp(min=1e-7))
    for _ in range(ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


class Muon(torch.optim.Optimizer):
    """Steps along the orthogonalised momentum of each matrix; Nesterov momentum 0.95, decoupled weight decay.

    A matrix ``[A, B]`` moves by ``lr * sqrt(max(1, A / B))``. Raises ValueError for a weight that is no matrix.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        lr: float,
        weight_decay: float,
        dtype: torch.dtype = torch.float32,
        momentum: float = 0.95,
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})
        self._dtype = dtype
        for group in self.param_groups:
            if any(weight.ndim != 2 for weight in group["params"]):
                raise ValueError("Muon is for matrices; give vectors and embeddings to AdamW")

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update of every weight that has a gradient; there is no ``closure``."""
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                momentum = state.setdefault("momentum_buffer", torch.zeros_like(weight))
                momentum.lerp_(weight.grad, 1 - group["momentum"])
                direction = orthogonalised(weight.grad.lerp(momentum, group["momentum"]), self._dtype)
                rows, columns = weight.shape
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                weight.add_(direction, alpha=-group["lr"] * math.sqrt(max(1, rows / columns)))
