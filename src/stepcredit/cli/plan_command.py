"""``stepcredit plan``."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import tyro

from stepcredit.cli.common import DEFAULT_RECIPE, console, parse_with_recipe, table
from stepcredit.policies.base import take
from stepcredit.rewards.base import score
from stepcredit.training.account import header
from stepcredit.training.budget import PEAK_TFLOPS, Budget
from stepcredit.training.setup import Setup, evaluation_images, setup


@dataclass
class Plan:
    """What a recipe costs, counted from its layout before anything runs.

    Counts are per sample: a batched call on n images counts n. --calibrate measures the four unit costs once on this
    machine and estimates the time of the run.
    """

    recipe: tyro.conf.Positional[str] = DEFAULT_RECIPE
    """Bundled recipe, path of a YAML file, or folder of a run; it comes first."""
    json: bool = False
    """Print JSON."""
    calibrate: bool = False
    """Measure one rollout, trained evaluation, decode and reward call, and estimate seconds."""


def run(argv: Sequence[str]) -> int:
    """Run the command."""
    parsed = parse_with_recipe(Plan, "plan", argv)
    parts = setup(parsed.recipe, weights=parsed.own.calibrate)
    numbers = describe(parts)
    if parsed.own.calibrate:
        numbers["calibration"] = calibrate(parts)
    if parsed.own.json:
        print(json.dumps(numbers, indent=2))
    else:
        show(parts, numbers)
    return 0


def describe(parts: Setup) -> dict[str, Any]:
    """The ledger of an iteration, per trajectory, of the run and of its evaluations, and the batch algebra."""
    recipe, cost = parts.recipe, parts.cost
    trainings = recipe.iterations
    images = evaluation_images(recipe)
    return {
        "recipe": recipe.model_dump(mode="json"),
        **cost.per_trajectory(),
        "iteration": {**asdict(cost), "model_evaluations": cost.model_evaluations},
        "run": {
            "iterations": trainings,
            "updates": trainings * recipe.updates_per_rollout,
            "model_evaluations": trainings * cost.model_evaluations,
            "trained_evaluations": trainings * cost.trained_evaluations,
            "decodes": trainings * cost.decodes,
            "reward_calls": trainings * cost.reward_calls,
            "evaluation_images": images,
            "evaluation_model_evaluations": images * parts.eval_steps,
        },
        "forwards_per_evaluation": parts.policy.forwards_per_velocity,
        "trained_parameters": sum(p.numel() for _, p in parts.policy.named_parameters()),
        "trajectories_per_update": cost.trajectories // recipe.updates_per_rollout,
        "trained_steps": parts.weights.nonzero().flatten().tolist(),
        **({"budget": parts.budget.as_dict()} if parts.budget else {}),
    }


def calibrate(parts: Setup) -> dict[str, float]:
    """Measured seconds per sample of each unit cost, and what the run would take by them."""
    recipe, policy = parts.recipe, parts.policy
    n = recipe.micro_batch
    prompts = [parts.train[k % len(parts.train)] for k in range(n)]
    cond = policy.encode([prompt.text for prompt in prompts])
    x = torch.randn(n, *policy.latent_shape, generator=torch.Generator().manual_seed(0)).to(policy.device)
    t = torch.full((n,), 0.5, device=policy.device)
    images = policy.decode(x).cpu()

    def forward() -> None:
        with torch.no_grad():
            policy.velocity(x, t, take(cond, torch.arange(n)))

    def backward() -> None:
        policy.velocity(x, t, cond).square().mean().backward()
        for _, parameter in policy.named_parameters():
            parameter.grad = None

    def rewards() -> None:
        score(parts.reward, images, [p.text for p in prompts], [p.metadata for p in prompts])

    def decode() -> None:
        with torch.no_grad():
            policy.decode(x)

    forward_s, backward_s, decode_s, reward_s = (_per_call(f) / n for f in (forward, backward, decode, rewards))
    if recipe.replay == "retain":  # the rollout's forward is the trained one
        backward_s = max(backward_s - forward_s, 0.0)
    cost = parts.cost
    iteration = (
        cost.model_evaluations * forward_s
        + cost.trained_evaluations * backward_s
        + cost.decodes * decode_s
        + cost.reward_calls * reward_s
    )
    images_total = describe(parts)["run"]["evaluation_images"]
    evaluation = images_total * (parts.eval_steps * forward_s + decode_s + reward_s)
    return {
        "seconds_per_evaluation": forward_s,
        "seconds_per_trained_evaluation": backward_s,
        "seconds_per_decode": decode_s,
        "seconds_per_reward_call": reward_s,
        "seconds_per_iteration": iteration,
        "seconds_training": iteration * recipe.iterations,
        "seconds_evaluation": evaluation,
    }


def _per_call(function: Callable[[], None], repeats: int = 5) -> float:
    function()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        function()
        times.append(time.perf_counter() - started)
    return sorted(times)[repeats // 2]


def show(parts: Setup, numbers: dict[str, Any]) -> None:
    """Print the plan for a person."""
    out = console()
    for line in header(parts):
        out.print(line)
    rows = table("", "per sample", "a trajectory", "an iteration", "the run")
    total = numbers["run"]
    for key in ("rollout_evaluations", "scoring_evaluations", "model_evaluations", "trained_evaluations"):
        rows.add_row(*_row(key, numbers, total))
    for key in ("decodes", "reward_calls"):
        rows.add_row(*_row(key, numbers, total))
    out.print(rows)
    out.print(
        f"evaluations: {total['evaluation_images']} images in {parts.eval_steps} ODE steps each; "
        f"{numbers['trained_parameters']:,} trained parameters; {total['updates']} optimiser steps"
    )
    if parts.budget is not None:
        for line in budget_lines(parts.budget):
            out.print(line)
    if "calibration" in numbers:
        measured = numbers["calibration"]
        out.print(
            f"measured here: {1e3 * measured['seconds_per_evaluation']:.3f} ms an evaluation, "
            f"{1e3 * measured['seconds_per_trained_evaluation']:.3f} trained, "
            f"{1e3 * measured['seconds_per_decode']:.3f} a decode, "
            f"{1e3 * measured['seconds_per_reward_call']:.3f} a reward"
        )
        out.print(
            f"so {measured['seconds_per_iteration']:.1f} s an iteration, {measured['seconds_training']:.0f} s of "
            f"training and {measured['seconds_evaluation']:.0f} s of evaluation"
        )


def budget_lines(budget: Budget) -> list[str]:
    """Parameters, memory and hours of a pipeline, estimated without its weights."""
    parts = {
        "weights": budget.weights_gib,
        "training state": budget.training_state_gib,
        "trajectories": budget.trajectories_gib,
        "activations": budget.activations_gib,
        "or decoding": budget.decoding_gib,
        "reward": budget.reward_gib,
        **({"visitors": budget.visitors_gib} if budget.visitors_gib else {}),
    }
    hours = []
    for gpu, peak in PEAK_TFLOPS.items():
        low, high = budget.hours(peak)
        hours.append(f"{low:,.0f} to {high:,.0f} on one {gpu}")
    return [
        f"parameters: {budget.transformer_parameters / 1e9:.2f} B in the transformer, "
        f"{budget.trained_parameters / 1e6:.1f} M trained, {budget.text_encoder_parameters / 1e9:.2f} B to encode text",
        f"memory: about {budget.peak_gib:.0f} GiB at its peak ("
        + ", ".join(f"{name} {gib:.1f}" for name, gib in parts.items())
        + ")",
        f"operations: {budget.forward_tflop:.1f} TFLOP an evaluation, {budget.trained_tflop:.1f} trained, "
        f"{budget.decode_tflop:.1f} a decode, {budget.iteration_tflop / 1e3:,.0f} PFLOP an iteration",
        f"hours: {'; '.join(hours)}; without rewards, at 20 to 45 % of the peak. All estimated, none measured",
    ]


def _row(key: str, numbers: dict[str, Any], total: dict[str, Any]) -> list[str]:
    iteration = numbers["iteration"][key]
    run = total.get(key, iteration * total["iterations"])
    return [key.replace("_", " "), f"{numbers[f'{key}_per_trajectory']:.2f}", f"{iteration:,}", f"{run:,}"]
