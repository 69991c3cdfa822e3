"""A recipe for runs of several processes: compose-stepwise on a random desk model, cut down to run in a second."""

import pytest
import torch

from stepcredit.policies.desk import DeskPolicy
from stepcredit.training import recipe as recipes

KEYS = {
    "reward": "jpeg_size",
    "iterations": 2,
    "prompts_per_iteration": 4,
    "group_size": 4,
    "micro_batch": 4,
    "steps": 5,
    "window": None,
    "eval_prompts": 12,
    "eval_prompts_during": 10,
    "eval_every": 1,
    "checkpoint_every": 1,
    "lr": 1e-2,
    "lr_schedule": "constant",
    "trust_kl": 1e-6,
}


@pytest.fixture(scope="session")
def recipe_file(tmp_path_factory):
    """``recipe_file(**keys)``: path of such a recipe."""
    folder = tmp_path_factory.mktemp("recipe")
    policy = DeskPolicy.initial("compose", seed=1, hidden=16, depth=1, heads=2)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for _, parameter in policy.named_parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    policy.save(folder / "tiny.safetensors")

    def write(**keys):
        recipe = recipes.load("compose-stepwise", {**KEYS, "model": str(folder / "tiny.safetensors"), **keys})
        path = folder / f"recipe-{len(list(folder.iterdir()))}.yaml"
        path.write_text(recipes.dump(recipe))
        return path

    return write
