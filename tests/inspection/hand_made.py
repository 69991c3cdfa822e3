"""An inspection with rewards chosen by hand."""

from __future__ import annotations

import torch

from stepcredit import grids, kernels
from stepcredit.inspection.collect import Inspection, Look
from stepcredit.tasks import Prompt
from stepcredit.training import recipe as recipes

R_BASE = [[0.0, 0.5, 0.25, 1.0, 0.75], [0.0, 0.25, 0.5, 0.5, 0.5], [0.0, 0.125, 0.0, 0.0, 0.0]]
R_TUNED = [[0.25, 0.5, 0.5, 1.0, 1.0], [0.25, 0.0, 0.75, 0.5, 1.0], [0.25, 0.25, 0.125, 0.0, 0.5]]
EVIL = (
    '</script><script>window.hacked = 1</script><img src="https://example.org/x" onerror="hacked=2"> & "two" {{ 7*7 }}'
)


def inspection(
    prompt: str = "a red circle", size: int = 8, looks: int = 2, members: int = 3, steps: int = 4
) -> Inspection:
    """Three members of four steps with known rewards, the last step untrained; or larger, with random ones."""
    generator = torch.Generator().manual_seed(0)
    kernel = kernels.make("flow_sde", grids.shifted(steps), 0.7)
    trained = torch.ones(members, steps, dtype=torch.bool)
    trained[:, -1] = False
    made = []
    for name, given in (("Base model", R_BASE), ("Tuned: averaged weights after iteration 2", R_TUNED))[:looks]:
        small = (members, steps) == (3, 4)
        R = torch.tensor(given) if small else torch.rand(members, steps + 1, generator=generator)
        count = members * (steps + 1)
        images = torch.randint(0, 256, (count, size, size, 3), generator=generator, dtype=torch.uint8)
        made.append(Look(name, R, images, torch.arange(count).reshape(members, steps + 1)))
    recipe = recipes.build(
        {"steps": steps, "window": (0, steps - 1), "group_size": members, "prompts_per_iteration": 1,
         "micro_batch": members, "credit": "gae", "lam": 0.3, "advantage": "joint"}
    )  # fmt: skip
    return Inspection(
        Prompt(prompt), recipe, kernel.grid, kernel.level, kernel.std, trained, tuple(made), "compose", "compose"
    )
