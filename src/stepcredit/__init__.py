"""Step-wise credit assignment for reinforcement learning on flow-matching image generators.

``import stepcredit as sc`` is cheap; modules load when first used: ``sc.grids``, ``sc.kernels``, ``sc.credit``,
``sc.advantage``, ``sc.objective``, ``sc.policies``, ``sc.rewards``, ``sc.sample``.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

# Threads that spin while they wait make torch many times slower on a busy machine. OpenMP reads this once, when torch
# is loaded, so it is set before any module of ours imports torch; a value of the user's own stands.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

__version__ = "0.1.0"

_MODULES = (
    "advantage", "credit", "grids", "interpolant", "kernels", "ledger", "noise", "objective",
    "policies", "rewards", "rollout", "scoring", "tasks", "training",
)  # fmt: skip
__all__ = ["__version__", "sample", *_MODULES]

if TYPE_CHECKING:
    from stepcredit import advantage as advantage
    from stepcredit import credit as credit
    from stepcredit import grids as grids
    from stepcredit import interpolant as interpolant
    from stepcredit import kernels as kernels
    from stepcredit import ledger as ledger
    from stepcredit import noise as noise
    from stepcredit import objective as objective
    from stepcredit import policies as policies
    from stepcredit import rewards as rewards
    from stepcredit import rollout as rollout
    from stepcredit import scoring as scoring
    from stepcredit import tasks as tasks
    from stepcredit import training as training
    from stepcredit.sampling import sample as sample


def __getattr__(name: str) -> Any:
    if name == "sample":
        return importlib.import_module("stepcredit.sampling").sample
    if name in _MODULES:
        return importlib.import_module(f"stepcredit.{name}")
    raise AttributeError(f"module 'stepcredit' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
