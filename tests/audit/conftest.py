"""A desk model small enough to take gradients of in a test, and a recipe to go with it."""

import pytest
import torch

from stepcredit.policies.desk import DeskPolicy
from stepcredit.training import recipe as recipes


@pytest.fixture(scope="session")
def small(tmp_path_factory):
    """``small(**keys)``: compose-stepwise on a random model, five steps, four members, rewarded for file size."""
    policy = DeskPolicy.initial("compose", seed=1, hidden=16, depth=1, heads=2)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for _, parameter in policy.named_parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    path = tmp_path_factory.mktemp("model") / "tiny.safetensors"
    policy.save(path)
    base = {"model": str(path), "reward": "jpeg_size", "group_size": 4, "steps": 5, "window": None, "micro_batch": 4}
    return lambda **keys: recipes.load("compose-stepwise", {**base, **keys})
