"""What the keys of a recipe must agree on."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stepcredit.training.recipe import Recipe


def check(recipe: Recipe) -> None:
    """Raise ValueError, in a sentence that names the keys, their values and the remedy, for keys that disagree."""
    total = recipe.prompts_per_iteration * recipe.group_size
    if total % recipe.micro_batch:
        divisors = [n for k in range(1, math.isqrt(total) + 1) if total % k == 0 for n in (k, total // k)]
        fitting = max(n for n in divisors if n <= recipe.micro_batch)
        raise ValueError(
            f"micro_batch {recipe.micro_batch} does not divide prompts_per_iteration x group_size = "
            f"{recipe.prompts_per_iteration} x {recipe.group_size} = {total}; the largest that fits is {fitting}"
        )
    if recipe.prompts_per_iteration % recipe.updates_per_rollout:
        raise ValueError(
            f"updates_per_rollout {recipe.updates_per_rollout} does not divide prompts_per_iteration "
            f"{recipe.prompts_per_iteration}: every update takes an equal share of the prompts"
        )
    if recipe.replay == "retain" and recipe.updates_per_rollout > 1:
        raise ValueError(
            f"replay 'retain' holds the gradients of the policy that sampled, and with updates_per_rollout "
            f"{recipe.updates_per_rollout} all updates but the first are of another policy; use 'recompute'"
        )
    if recipe.shard and recipe.window_size is not None:
        raise ValueError(
            f"shard needs equally many model calls on every process, which windows drawn by window_size "
            f"{recipe.window_size} do not give; use a fixed window, or leave shard out"
        )
    if recipe.credit == "tempflow" and not recipe.branch:
        raise ValueError("credit 'tempflow' judges single steps, which needs branch: true")
    if recipe.branch and recipe.credit not in ("tempflow", "uniform"):
        raise ValueError(f"branch: true gives one noisy step a member, so credit is 'tempflow', not {recipe.credit!r}")
    if recipe.advantage == "group" and recipe.credit not in ("uniform", "tempflow"):
        raise ValueError(
            f"advantage 'group' needs credit that is equal over steps, which {recipe.credit!r} is not; "
            "use 'centred', 'joint' or 'per_step'"
        )
    if recipe.ratio == "normalised" and recipe.kernel != "flow_sde":
        raise ValueError(f"ratio 'normalised' is defined for kernel 'flow_sde' only, not {recipe.kernel!r}")
    if recipe.step_weight == "table" and (recipe.step_table is None or len(recipe.step_table) != recipe.steps):
        raise ValueError(f"step_weight 'table' needs a step_table of {recipe.steps} numbers, not {recipe.step_table}")
    if recipe.max_kl is not None and recipe.kl_beta == 0:
        raise ValueError(
            f"max_kl {recipe.max_kl:g} cannot be watched with kl_beta 0, since the KL is then not measured; set a "
            "small kl_beta, or watch the images with max_image_drift"
        )
    if recipe.max_image_drift is not None and recipe.eval_every == 0:
        raise ValueError(
            f"max_image_drift {recipe.max_image_drift:g} is looked at in evaluations during the run; set eval_every"
        )
    if recipe.watch_options and recipe.watch is None:
        raise ValueError("watch_options belong to the watched reward; name it with watch, or leave them out")
    if recipe.eval_prompts_during > recipe.eval_prompts:
        raise ValueError(
            f"eval_prompts_during {recipe.eval_prompts_during} is more than eval_prompts {recipe.eval_prompts}, "
            "of which it is a subset"
        )
