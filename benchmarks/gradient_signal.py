"""Where in a trajectory the gradient's signal is, and how much of it each credit scheme keeps.

Two independent halves of rollouts from the base model give two estimates of each scheme's policy gradient. Their cosine
says how much of an estimate is signal; their product with the other half of `uniform`, the unbiased scheme, says
whether that signal points along the true gradient. No weights are changed.

    python benchmarks/gradient_signal.py [--recipe compose-stepwise] [--iterations 8] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path

import torch
from torch import Tensor

from stepcredit import advantage as advantages
from stepcredit import credit, objective
from stepcredit.rewards.base import score
from stepcredit.rollout import chunks, replay, rollout
from stepcredit.scoring import clean_estimates
from stepcredit.training import recipe as recipes
from stepcredit.training.setup import Setup, setup, velocity_of

SCHEMES = {
    "uniform": (credit.uniform, advantages.group),
    "gain, centred": (credit.gain, advantages.centred),
    "gain, joint": (credit.gain, advantages.joint),
    "gain, per_step": (credit.gain, advantages.per_step),
    "gae .5, centred": (lambda R: credit.gae(R, 0.5), advantages.centred),
    "gae .9, centred": (lambda R: credit.gae(R, 0.9), advantages.centred),
    "turning point, centred": (credit.turning_point, advantages.centred),
}
Gradients = dict[str, dict[int, Tensor]]


def gradients(parts: Setup, iterations: range) -> Gradients:
    """Each scheme's gradient at each trained step, summed over the rollouts of some iterations."""
    policy, micro_batch = parts.policy, parts.recipe.micro_batch
    parameters = [parameter for _, parameter in policy.named_parameters()]
    total: Gradients = defaultdict(dict)
    for iteration in iterations:
        prompts, groups = parts.batch(iteration)
        velocity = velocity_of(policy, policy.encode([p.text for p in prompts]), groups.prompt)
        start, noise = parts.initial_noise(iteration, groups), parts.step_noise(iteration, groups)
        trajectory = rollout(velocity, start, parts.kernel, groups.layout, noise, micro_batch)
        plan = parts.plan(groups)
        images = policy.decode(clean_estimates(trajectory, plan, velocity, micro_batch))
        asked = [prompts[p] for p in groups.prompt[plan.member].tolist()]
        values = score(parts.reward, images, [p.text for p in asked], [p.metadata for p in asked])
        R = groups.grouped(plan.per_state(values))
        advantage = {
            name: normalise(scheme(R), groups.trained).flatten(0, 1) for name, (scheme, normalise) in SCHEMES.items()
        }
        for i in range(groups.layout.steps):
            for chunk in chunks(groups.layout, i, micro_batch):
                if not len(chunk.members):
                    continue
                log_prob = replay(velocity, trajectory, chunk).log_prob
                for k, (name, A) in enumerate(advantage.items()):
                    loss = -(A[chunk.members, i] * log_prob).sum() / groups.layout.members
                    parts_of = torch.autograd.grad(loss, parameters, retain_graph=k < len(advantage) - 1)
                    flat = torch.cat([g.flatten() for g in parts_of])
                    total[name][i] = total[name].get(i, torch.zeros_like(flat)) + flat
        print(f"iteration {iteration} done", flush=True)
    return total


def combined(of_step: dict[int, Tensor], weights: Tensor) -> Tensor:
    """Sum over steps of weighted gradients."""
    return torch.stack([float(weights[i]) * g for i, g in of_step.items()]).sum(0)


def cosine(a: Tensor, b: Tensor) -> float:
    """Cosine of two gradients."""
    return float(a @ b / (a.norm() * b.norm()))


def main() -> None:
    """Measure and print."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--recipe", default="compose-stepwise")
    arguments.add_argument("--window", type=int, nargs=2, default=(0, 9))
    arguments.add_argument("--estimate", default="substeps")
    arguments.add_argument("--substeps", type=int, default=2)
    arguments.add_argument("--iterations", type=int, default=8, help="rollouts in each half")
    arguments.add_argument("--json", type=Path)
    options = arguments.parse_args()
    changes = {"window": tuple(options.window), "estimate": options.estimate, "substeps": options.substeps}
    # every scheme is looked at, so the rollout must be one that scores all states
    shape = {"credit": "gain", "advantage": "centred", "micro_batch": 32, "prompts_per_iteration": 8, "group_size": 16}
    parts = setup(recipes.load(options.recipe, {**changes, **shape}))
    n = options.iterations
    halves = gradients(parts, range(1, n + 1)), gradients(parts, range(n + 1, 2 * n + 1))

    steps = sorted(halves[0]["uniform"])
    trained = torch.zeros(parts.kernel.steps, dtype=torch.bool)
    trained[steps] = True
    weights = {kind: objective.step_weights(kind, parts.kernel, trained) for kind in ("none", "std", "balanced")}
    noise = {i: float(halves[0]["uniform"][i].norm()) for i in steps}
    print("\nnorm of the uniform gradient by step: " + "  ".join(f"{i}: {v:.1e}" for i, v in noise.items()))
    print(f"\n{'scheme':<24} {'none':>6} {'std':>6} {'balanced':>9}   along uniform   cosine by step")
    true = [combined(half["uniform"], weights["balanced"]) for half in halves]
    rows = {}
    for name in SCHEMES:
        mine = [combined(half[name], weights["balanced"]) for half in halves]
        total = {kind: cosine(*(combined(half[name], w) for half in halves)) for kind, w in weights.items()}
        # each factor comes from another half, so that noise does not count as agreement
        crossed = float(mine[0] @ true[1] + mine[1] @ true[0]) / 2
        scale = float(mine[0] @ mine[1]) * float(true[0] @ true[1])
        along = crossed / scale**0.5 if scale > 0 else float("nan")
        by_step = [cosine(halves[0][name][i], halves[1][name][i]) for i in steps]
        rows[name] = {"cosine": total, "along_uniform": along, "by_step": by_step}
        shown = " ".join(f"{c:+.2f}" for c in by_step)
        print(
            f"{name:<24} {total['none']:>6.2f} {total['std']:>6.2f} {total['balanced']:>9.2f} {along:>15.2f}   {shown}"
        )
    if options.json:
        result = {"recipe": options.recipe, **changes, "iterations": n, "norm_by_step": noise, "schemes": rows}
        options.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
