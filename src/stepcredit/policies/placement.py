"""Networks that wait in the CPU's memory, and come to the device for as long as they are used."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import nn

CPU = torch.device("cpu")


class Placement:
    """Where the idle networks of a run wait, and where they work. Weights are moved, never changed: results stay."""

    def __init__(self, work: torch.device, idle: torch.device = CPU) -> None:
        self.work, self.idle = work, idle
        self._visits: Counter[nn.Module] = Counter()
        self._scoring: list[nn.Module] = []

    def park(self, networks: Iterable[nn.Module], scoring: bool = False) -> None:
        """Moves networks to where they wait. ``scoring``: what turns clean latents into rewards; ``at_hand`` keeps all
        of these at work together.
        """
        for network in networks:
            network.to(self.idle)
            if scoring:
                self._scoring.append(network)

    @contextmanager
    def visit(self, networks: Iterable[nn.Module]) -> Iterator[None]:
        """Networks at work within the block; those that no enclosing block needs go back after it."""
        networks = list(networks)
        try:
            for network in networks:
                self._visits[network] += 1
                if self._visits[network] == 1:
                    network.to(self.work)
            yield
        finally:
            for network in networks:
                if network not in self._visits:  # the device had no room for one before it
                    continue
                self._visits[network] -= 1
                if self._visits[network] == 0:
                    del self._visits[network]
                    network.to(self.idle)

    def scoring(self) -> AbstractContextManager[None]:
        """``visit`` of all networks that were parked as scoring."""
        return self.visit(self._scoring)


def at_hand(policy: object) -> AbstractContextManager[None]:
    """What decodes and judges a policy's latents stays at work within the block, where it would come and go with every
    piece; nothing for a policy without a ``placement``.
    """
    placement = getattr(policy, "placement", None)
    return placement.scoring() if isinstance(placement, Placement) else nullcontext()
