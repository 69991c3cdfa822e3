"""Gradients of many backward passes and processes, summed so that neither the order nor the number of them shows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from stepcredit.training import distributed, sharding

LARGEST_IN_FLOAT64 = 2**28
"""Trained parameters up to which gradients are summed in float64: 2 GiB; beyond, in float32."""


@contextmanager
def summed(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Backward passes within the block add up, over all processes, to the parameters' ``grad`` at its end.

    Gradients are added in one flat float64 buffer, which is reduced over the processes once. A parameter that no pass
    has reached on any process keeps ``grad`` None. Parameters that the processes share out have had their gradients
    reduced by every pass, and are added up part by part. Raises PeerLostError.
    """
    parts = [sharding.local(parameter) for parameter in parameters]
    size = sum(part.numel() for part in parts)
    device = parameters[0].device
    wide = size <= LARGEST_IN_FLOAT64 and device.type != "mps"
    # the gradients, then for every parameter how often one came
    flat = torch.zeros(size + len(parameters), dtype=torch.float64 if wide else torch.float32, device=device)
    sums = flat[:size].split([part.numel() for part in parts])
    handles = [
        parameter.register_post_accumulate_grad_hook(_collect(total, flat[size + k]))
        for k, (parameter, total) in enumerate(zip(parameters, sums, strict=True))
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
    distributed.add(flat[size:] if sharding.shared(parameters[0]) else flat)
    reached = flat[size:].cpu() > 0
    for parameter, total, came in zip(parameters, sums, reached.tolist(), strict=True):
        parameter.grad = sharding.as_part(total, parameter) if came else None


def _collect(total: Tensor, count: Tensor) -> Callable[[nn.Parameter], None]:
    def take(parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        total.add_(sharding.local(parameter.grad).flatten())
        count.add_(1)
        parameter.grad = None

    return take
