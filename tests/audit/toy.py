"""A policy whose policy gradient is known in closed form: v(x, t) = theta[0] + (4t - 2) theta[1], reward linear."""

from __future__ import annotations

import torch
from torch import nn

from stepcredit import grids, kernels, objective, rollout, scoring
from stepcredit.audit.schemes import Scheme
from stepcredit.ledger import ledger
from stepcredit.rewards.base import RewardInfo, SelfTest
from stepcredit.rewards.registry import FunctionReward
from stepcredit.tasks import Prompt
from stepcredit.training import recipe as recipes
from stepcredit.training.setup import Setup

SHAPE = (3, 1, 2)
U = torch.tensor([1.0, -0.5, 0.3, 0.0, 2.0, -1.0])
STEPS = 4


class Linear:
    """The toy policy; it has no conditioning and its images are its latents."""

    name = "linear"
    latent_shape = SHAPE
    forwards_per_velocity = 1
    device = torch.device("cpu")

    def __init__(self):
        self.theta = nn.Parameter(torch.zeros(2, *SHAPE))

    def grid(self, steps):
        return grids.linear(steps)

    def encode(self, prompts):
        return {"none": torch.zeros(len(prompts), 1)}

    def velocity(self, x, t, cond):
        return self.theta[0] + (4 * t.view(-1, 1, 1, 1) - 2) * self.theta[1] + 0 * x

    def reference_velocity(self, x, t, cond):
        return 0 * x

    def decode(self, x_0):
        return x_0

    def named_parameters(self):
        return [("theta", self.theta)]


def scheme(label: str, seed: int = 0, policy: Linear | None = None, **keys) -> Scheme:
    """A scheme on the toy, of eight prompts an update."""
    base = {"group_size": 4, "steps": STEPS, "kernel": "flow_sde", "estimate": "full", "seed": seed}
    recipe = recipes.build({**base, "micro_batch": 4, "prompts_per_iteration": 8, **keys})
    small = recipes.build({**recipe.model_dump(), "prompts_per_iteration": 1})
    policy = policy or Linear()
    kernel = kernels.make(recipe.kernel, policy.grid(recipe.steps), recipe.level)
    grey = torch.full((3, 1, 2), 0.5)
    reward = FunctionReward(
        RewardInfo("linear", (-9.0, 9.0), "none", "a linear reward"),
        lambda images, prompts, metadata: images.flatten(1) @ U,
        SelfTest(grey, grey, "", {}),
    )
    window = recipe.window or (0, STEPS)
    groups = rollout.groups([window], recipe.group_size, kernel.trainable, recipe.shared_noise, recipe.branch)
    trained = groups.layout.noisy.any(0)
    weights = objective.step_weights(recipe.step_weight, kernel, trained, recipe.step_table)
    cost = ledger(groups.layout, scoring.plan(groups.layout, kernel.grid, recipe.estimate, recipe.substeps), 4)
    prompts = [Prompt("a"), Prompt("b")]
    return Scheme(label, recipe, Setup(small, policy, reward, kernel, weights, prompts, (), (), cost))


def true_gradient(window: tuple[int, int] = (0, STEPS)) -> tuple[torch.Tensor, torch.Tensor]:
    """d E[U . x_0] / d theta through the noisy steps, ``[12]``, and by step ``[T, 12]``: flow_sde 0.7 by its formula.

    A noisy step moves its mean by ``a_i v``, and every noisy step after it multiplies the state by
    ``1 - g^2 D / (2 s)``.
    """
    t = torch.linspace(1, 0, STEPS + 1).tolist()
    a, b = [], []
    for i in range(STEPS):
        s, D = t[i], t[i] - t[i + 1]
        g = 0.7 * (s / (1 - t[1] if i == 0 else 1 - s)) ** 0.5
        a.append(-D * (1 + g**2 * (1 - s) / (2 * s)))
        b.append(1 - g**2 * D / (2 * s))
    rows = torch.zeros(STEPS, 12)
    for i in range(*window):
        carried = 1.0
        for j in range(i + 1, window[1]):
            carried *= b[j]
        rows[i] = torch.cat([U, (4 * t[i] - 2) * U]) * a[i] * carried
    return rows.sum(0), rows
