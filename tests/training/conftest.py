"""A model small enough to train many times in a test, and a recipe to go with it."""

import pytest
import torch
from run_cases import KEYS

from stepcredit.policies.desk import DeskPolicy
from stepcredit.training import recipe as recipes


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """Path of a random desk model whose output layer is not zero."""
    policy = DeskPolicy.initial("compose", seed=1, hidden=16, depth=1, heads=2)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for _, parameter in policy.named_parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    path = tmp_path_factory.mktemp("model") / "tiny.safetensors"
    policy.save(path)
    return path


@pytest.fixture
def small(tiny_model):
    """``small(name, **keys)``: a bundled recipe cut down to run in a second."""
    return lambda name="compose-stepwise", **keys: recipes.load(name, {**KEYS, "model": str(tiny_model), **keys})
