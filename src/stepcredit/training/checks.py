"""What must hold before hours are spent: each check runs the real parts of a recipe and says pass or what to do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from stepcredit import kernels
from stepcredit.interpolant import euler
from stepcredit.rewards import selftest
from stepcredit.rewards.base import RewardError
from stepcredit.rollout import chunks, replay, rollout
from stepcredit.sampling import sample
from stepcredit.training.account import header
from stepcredit.training.iteration import iterate
from stepcredit.training.setup import Setup, velocity_of
from stepcredit.training.state import fresh


@dataclass(frozen=True)
class Result:
    """Outcome of one check: what was seen, or what to do."""

    name: str
    passed: bool
    detail: str


def run_checks(parts: Setup) -> Iterator[Result]:
    """All checks of a recipe, in the order in which they make sense. The policy's weights change in the last one."""
    named: list[tuple[str, Callable[[Setup], str]]] = [
        ("batch algebra", _algebra),
        ("level 0 is the ODE", _level_zero),
        ("reward tells good from bad", _reward),
        ("ratio is exactly 1", _ratio),
        ("one update", _one_update),
    ]
    for name, check in named:
        try:
            yield Result(name, True, check(parts))
        except (CheckError, RewardError, FloatingPointError, ValueError) as error:
            yield Result(name, False, str(error))


class CheckError(Exception):
    """A check did not hold; the message says what to do."""


def _algebra(parts: Setup) -> str:
    return header(parts)[1].removeprefix("batch: ")


def _level_zero(parts: Setup) -> str:
    """At level 0 every kernel is the Euler step of the model's own velocities, bit by bit."""
    policy, grid = parts.policy, parts.kernel.grid
    cond = policy.encode([parts.train[0].text])
    x = parts.initial_noise(0, parts.batch(0)[1])[:1].to(policy.device)
    for i in range(parts.kernel.steps):
        with torch.no_grad():
            v = policy.velocity(x, grid[i].to(x.device, torch.float32).expand(1), cond).float()
        step = euler(x, v, grid[i], grid[i + 1])
        for name in kernels.KERNELS:
            moved = kernels.make(name, grid, 0.0).step(x, v, i, torch.ones_like(x))
            if not torch.equal(moved, step):
                raise CheckError(
                    f"kernel {name!r} at level 0 differs from the ODE at step {i}: this is a bug, report it"
                )
        x = step
    return f"{len(kernels.KERNELS)} kernels, {parts.kernel.steps} steps, difference 0"


def _reward(parts: Setup) -> str:
    """The reward's own known good image scores above its known bad one, for every part of a combination."""
    outcomes = selftest.run(parts.reward) + (selftest.run(parts.watch) if parts.watch else [])
    for outcome in outcomes:
        if not outcome.passed:
            raise CheckError(
                f"reward {outcome.name!r} gives {outcome.good:.3f} to its known good image and {outcome.bad:.3f} to "
                "its known bad one; its weights or its engine are not installed right"
            )
    return "; ".join(f"{outcome.name}: good {outcome.good:.3f}, bad {outcome.bad:.3f}" for outcome in outcomes)


def _ratio(parts: Setup) -> str:
    """Replaying what was just sampled gives the very log-probs of the sampling."""
    prompts, groups = parts.batch(0)
    recipe, policy = parts.recipe, parts.policy
    cond = policy.encode([prompt.text for prompt in prompts])
    velocity = velocity_of(policy, cond, groups.prompt)
    x = parts.initial_noise(0, groups).to(policy.device)
    noise = parts.step_noise(0, groups)
    trajectory = rollout(velocity, x, parts.kernel, groups.layout, noise, recipe.micro_batch, recipe.log_prob)
    worst, pairs = 0.0, 0
    for i in range(groups.layout.steps):
        for chunk in chunks(groups.layout, i, recipe.micro_batch):
            if len(chunk.members):
                new = replay(velocity, trajectory, chunk, recipe.log_prob).log_prob.detach().cpu()
                worst = max(worst, float(((new - trajectory.log_prob[chunk.members, i]).exp() - 1).abs().max()))
                pairs += len(chunk.members)
    if worst > 0:
        raise CheckError(
            f"max |ratio - 1| is {worst:.1e} on {pairs} pairs, before any update: the model gives other velocities "
            "with gradients than without (dropout, another kernel, half precision); make it deterministic "
            "(docs/troubleshooting.md#the-ratio-is-not-1-before-the-first-update)"
        )
    return f"max |ratio - 1| = 0 on {pairs} (member, step) pairs"


def _one_update(parts: Setup) -> str:
    """One iteration moves the weights and the images, with a finite gradient."""
    state = fresh(parts.policy, parts.recipe)
    before = {name: parameter.detach().clone() for name, parameter in state.parameters.items()}
    prompts = [prompt.text for prompt in parts.train[:2]]
    images = sample(parts.policy, prompts, steps=parts.eval_steps)
    line = iterate(parts, state, lambda phase, done, total: None)
    if line["degenerate_groups"] == line["groups"]:
        raise CheckError(
            f"in all {line['groups']} groups the members had equal rewards, so nothing can be learned; use more "
            "members, easier prompts or a finer reward (docs/troubleshooting.md#no-signal-in-groups)"
        )
    if line["skipped_updates"]:
        raise CheckError("the gradient of the first update is not finite: use a wider dtype (precision, latent_dtype)")
    moved = max(float((p.detach() - before[name]).abs().max()) for name, p in state.parameters.items())
    changed = float((sample(parts.policy, prompts, steps=parts.eval_steps) - images).abs().max())
    if not moved > 0 or not changed > 0:
        raise CheckError(
            f"after one update the weights moved by {moved:.1e} and the images by {changed:.1e}: raise lr, or look "
            "whether the trained parameters are those that the model uses"
        )
    return (
        f"gradient norm {line['grad_norm']:.3g}, weights moved by up to {moved:.1e}, pixels by up to {changed:.1e}, "
        f"{line['seconds']:.1f} s"
    )
