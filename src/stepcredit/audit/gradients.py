"""Gradients by member and step: every scheme is a weighting of them, so one backward pass serves all."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from stepcredit import noise
from stepcredit.rollout import Trajectory, Velocity, evaluate


class Sketch:
    """A random linear map of gradients to ``dimensions`` numbers that keeps inner products in expectation.

    A count sketch (Charikar et al., 2002): every entry is added, with a random sign, to one random bucket. For two
    vectors the relative error of their product is about ``1 / sqrt(dimensions)`` of the product of their norms. The
    identity where there are no more parameters than dimensions. The same for the same sizes, everywhere.
    """

    def __init__(self, parameters: int, dimensions: int, device: torch.device | str = "cpu") -> None:
        self.exact = parameters <= dimensions
        self.dimensions = parameters if self.exact else dimensions
        if not self.exact:
            generator = noise.generator("sketch", parameters, dimensions)
            self._bucket = torch.from_numpy(generator.integers(0, dimensions, parameters)).to(device)
            self._sign = torch.from_numpy(generator.integers(0, 2, parameters).astype("float32") * 2 - 1).to(device)

    def __call__(self, gradient: Tensor) -> Tensor:
        """A gradient ``[parameters]`` as ``[dimensions]``, float32."""
        flat = gradient.float()
        return flat if self.exact else flat.new_zeros(self.dimensions).index_add_(0, self._bucket, flat * self._sign)


def member_gradients(
    velocity: Velocity,
    trajectory: Trajectory,
    step: int,
    members: Tensor,
    parameters: Sequence[nn.Parameter],
    sketch: Sketch,
) -> Tensor:
    """Sketched gradients of the log-prob (summed over dimensions) of some members' noisy step, ``[m, D]`` on the CPU.

    One member at a time: a backward pass of a batch costs as much as those of its samples, and any number of credit
    schemes are then weighted sums of the rows.
    """
    tree, kernel = trajectory.layout, trajectory.kernel
    rows = []
    for b in members.tolist():
        x = trajectory.states[step][tree.index[step][b]][None]
        x_next = trajectory.states[step + 1][tree.index[step + 1][b]][None]
        v = evaluate(velocity, x, kernel.grid[step], torch.tensor([b]), f"step {step} of the replay")
        log_prob = kernel.log_prob(x_next, x, v, step, "sum").sum()
        parts = torch.autograd.grad(log_prob, list(parameters), allow_unused=True)
        filled = [torch.zeros_like(p) if g is None else g for g, p in zip(parts, parameters, strict=True)]
        rows.append(sketch(torch.cat([g.flatten().float() for g in filled])).cpu())
    return torch.stack(rows)
