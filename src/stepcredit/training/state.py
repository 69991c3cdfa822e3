"""What changes during a run, and how it is saved and restored exactly."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from stepcredit.policies.base import Policy
from stepcredit.training import sharding
from stepcredit.training.checkpoint import Checkpoint, CheckpointError
from stepcredit.training.ema import EMA
from stepcredit.training.guards import GuardState
from stepcredit.training.recipe import Recipe


@dataclass
class TrainState:
    """Weights, optimiser, average and counters of a run. Noise and prompts need no state: they are keyed."""

    parameters: dict[str, nn.Parameter]
    optimiser: torch.optim.Optimizer
    ema: EMA
    iteration: int = 0
    """Iterations done."""
    updates: int = 0
    """Optimiser steps done."""
    model_evaluations: int = 0
    seconds: float = 0.0
    best: tuple[float, int] = (-math.inf, 0)
    """Best held-out reward during the run, and its iteration."""
    best_watched: tuple[float, int] = (-math.inf, 0)
    """The same of the watched reward."""
    guards: GuardState = field(default_factory=GuardState)

    def note(self, reward: float, watched: float | None) -> None:
        """Take note of the held-out means of an evaluation that was just made."""
        if reward > self.best[0]:
            self.best = (reward, self.iteration)
        if watched is not None and watched > self.best_watched[0]:
            self.best_watched = (watched, self.iteration)

    @property
    def best_iteration(self) -> int | None:
        """Iteration of the best evaluation during the run: by the watched reward where there is one, since the trained
        one can be hacked; None before there is any.
        """
        return self.best_watched[1] or self.best[1] or None

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """Everything a checkpoint holds as tensors: weights, EMA, optimiser moments by parameter name.

        All are whole. What processes share out is gathered, so all must ask, and the one that writes alone gets it.
        Raises PeerLostError.
        """
        moments: dict[str, Tensor] = {}
        for name, parameter in self.parameters.items():
            state = self.optimiser.state.get(parameter) or _untouched(self.optimiser, parameter)
            moments |= {f"{name}/{key}": value for key, value in state.items()}
        weights = {name: p.detach() for name, p in self.parameters.items()}
        groups = {"weights": weights, "ema": self.ema.shadow, "optimizer": moments}
        return {group: sharding.gathered(named) for group, named in groups.items()}

    def norm(self) -> float:
        """Norm of the weights, by which processes see that theirs are the same."""
        return sharding.norm(list(self.parameters.values()))

    def counters(self) -> dict[str, Any]:
        """Everything a checkpoint holds as JSON."""
        return {
            "iteration": self.iteration,
            "updates": self.updates,
            "ema_updates": self.ema.updates,
            "model_evaluations": self.model_evaluations,
            "seconds": self.seconds,
            "best": None if self.best[1] == 0 else list(self.best),
            "best_watched": None if self.best_watched[1] == 0 else list(self.best_watched),
            "guards": self.guards.as_dict(),
        }

    @torch.no_grad()
    def restore(self, checkpoint: Checkpoint) -> None:
        """Take everything from a checkpoint, or raise CheckpointError and take nothing."""
        weights = _matching(checkpoint, "weights", self.parameters)
        shadow = _matching(checkpoint, "ema", self.ema.shadow)
        moments: dict[str, dict[str, Tensor]] = {}
        for key, value in checkpoint.tensors.get("optimizer", {}).items():
            name, _, kind = key.rpartition("/")
            if name not in self.parameters:
                raise CheckpointError(f"{checkpoint.path}: optimizer state of an unknown parameter {name!r}")
            # AdamW counts steps on the CPU and keeps its moments beside the weights
            own = value if kind == "step" else sharding.part(value, self.parameters[name])
            moments.setdefault(name, {})[kind] = own.clone()
        if moments and set(moments) != set(self.parameters):
            missing = sorted(set(self.parameters) - set(moments))
            raise CheckpointError(f"{checkpoint.path}: no optimizer state for parameter {missing[0]!r}")
        for name, parameter in self.parameters.items():
            parameter.copy_(sharding.part(weights[name], parameter))
        for name, state in moments.items():
            self.optimiser.state[self.parameters[name]] = state
        counters = checkpoint.state
        own_shadow = {name: sharding.part(value, self.ema.shadow[name]) for name, value in shadow.items()}
        self.ema.load(own_shadow, counters["ema_updates"])
        self.iteration, self.updates = checkpoint.iteration, counters["updates"]
        self.model_evaluations, self.seconds = counters["model_evaluations"], counters["seconds"]
        self.best = _best(counters["best"])
        self.best_watched = _best(counters.get("best_watched"))  # absent in older checkpoints
        self.guards = GuardState.from_dict(counters.get("guards", {}))


def _best(saved: list[Any] | None) -> tuple[float, int]:
    return (-math.inf, 0) if saved is None else (saved[0], saved[1])


def _untouched(optimiser: torch.optim.Optimizer, parameter: nn.Parameter) -> dict[str, Tensor]:
    """An optimiser's state before its first step, so that a checkpoint has its full size from the beginning."""
    zeros = torch.zeros_like(parameter, memory_format=torch.preserve_format).detach()
    if isinstance(optimiser, torch.optim.SGD):
        return {"momentum_buffer": zeros}
    return {"step": torch.tensor(0.0), "exp_avg": zeros, "exp_avg_sq": zeros.clone()}


def fresh(policy: Policy, recipe: Recipe) -> TrainState:
    """The state of a run before its first iteration."""
    parameters = dict(policy.named_parameters())
    return TrainState(parameters, _optimiser(parameters, recipe), EMA(parameters, recipe.ema))


def _optimiser(parameters: Mapping[str, nn.Parameter], recipe: Recipe) -> torch.optim.Optimizer:
    if recipe.optimiser == "sgd":
        return torch.optim.SGD(parameters.values(), lr=recipe.lr, momentum=0.9, weight_decay=0.0)
    return torch.optim.AdamW(
        parameters.values(), lr=recipe.lr, betas=recipe.adam_betas, weight_decay=recipe.weight_decay
    )


def learning_rate(recipe: Recipe, update: int) -> float:
    """Learning rate of an optimiser step, counted from 0: a linear warm-up, then the recipe's decay towards 0."""
    total = recipe.iterations * recipe.updates_per_rollout
    rate = recipe.lr * min(1.0, (update + 1) / (recipe.warmup + 1))
    done = min(1.0, update / total)
    if recipe.lr_schedule == "linear":
        return rate * (1 - done)
    if recipe.lr_schedule == "cosine":
        return rate * 0.5 * (1 + math.cos(math.pi * done))
    return rate


@torch.no_grad()
def load_weights(policy: Policy, checkpoint: Checkpoint, group: str = "ema") -> None:
    """Give a policy the weights of a checkpoint: ``ema`` (those evaluated) or ``weights``. Raises CheckpointError."""
    parameters = dict(policy.named_parameters())
    found = _matching(checkpoint, group, parameters)
    for name, parameter in parameters.items():
        parameter.copy_(sharding.part(found[name], parameter))


def _matching(checkpoint: Checkpoint, group: str, like: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    found = checkpoint.tensors.get(group, {})
    if set(found) != set(like):
        odd = sorted(set(found) ^ set(like))
        raise CheckpointError(f"{checkpoint.path}: {group} do not fit this model; they differ in {odd[:3]}")
    for name, tensor in like.items():
        if found[name].shape != tensor.shape:
            raise CheckpointError(
                f"{checkpoint.path}: {group} {name!r} has shape {tuple(found[name].shape)}, "
                f"the model's is {tuple(tensor.shape)}"
            )
    return found
