"""``stepcredit eval``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import tyro
from rich.console import Console
from rich.progress import Progress

from stepcredit import tasks
from stepcredit.cli.common import console, parse, resolve, run_folder, table
from stepcredit.errors import UserError
from stepcredit.rewards.meter import costs
from stepcredit.tasks import suites
from stepcredit.training import recipe as recipes
from stepcredit.training.checkpoint import Checkpoint
from stepcredit.training.chosen import chosen
from stepcredit.training.evaluation import Evaluation, Slot, evaluate, slots
from stepcredit.training.files import write_text_atomic
from stepcredit.training.recipe import Recipe
from stepcredit.training.records import to_json
from stepcredit.training.setup import Setup, setup
from stepcredit.training.state import load_weights
from stepcredit.training.suite import (
    Metric,
    Outlook,
    compare,
    measured_deviation,
    outlook,
    per_tag,
    slots_of,
)


@dataclass
class Eval:
    """Evaluate base and trained weights of a run on the same held-out prompts and noise, by ODE sampling.

    By default on the run's own held-out prompts with its own reward, or on a suite. Prints what difference could be
    detected, then means with 95 % intervals over prompts, the paired change with a sign-flip test, corrected for the
    number of metrics, and statistics of the images that know no reward. Writes a JSON line per image and a result.
    """

    run: tyro.conf.Positional[str]
    """Name or folder of a run."""
    suite: str | None = None
    """geneval, ocr, pickscore-sfw, drawbench, or a desk task; the run's own held-out prompts by default."""
    rewards: tuple[str, ...] = ()
    """Rewards in place of the run's or the suite's own, by their registered names."""
    reward_options: dict[str, str | int | float | bool] = field(default_factory=dict)
    """Options of these rewards, as NAME.OPTION VALUE."""
    prompt_file: Path | None = None
    """File of prompts in place of the suite's own: .txt (one a line) or .jsonl."""
    out: Path = Path("runs")
    """Folder that holds the runs."""
    prompts: int | None = None
    """Prompts; 1,000 of a desk task, all of a published suite by default."""
    images: int | None = None
    """Images of each prompt; as the suite has it by default."""
    steps: int | None = None
    """ODE steps; as in the run's own evaluations by default."""
    weights: Literal["ema", "last"] = "ema"
    """The averaged weights, or the last ones."""
    checkpoint: str = "auto"
    """Of a run: latest, best, or an iteration; auto is the latest, or the best where a guard stopped the run."""
    to: Path | None = None
    """Folder for base.jsonl, tuned.jsonl and result.json; RUN/eval-IMAGES-STEPS, or eval-SUITE-IMAGES-STEPS."""
    json: bool = False
    """Print JSON."""


@dataclass(frozen=True)
class Plan:
    """What is evaluated: the parts, the slots, and how the values are averaged."""

    label: str
    parts: Setup
    on: list[Slot]
    macro: bool
    metric: str | None
    """Name of the reward; None for several, which have no common figure."""


def run(argv: Sequence[str]) -> int:
    """Run the command."""
    args = parse(Eval, "eval", argv)
    for key in ("prompts", "images", "steps"):
        least = 2 if key == "prompts" else 1
        if (value := getattr(args, key)) is not None and value < least:
            raise UserError(f"--{key} must be at least {least}, not {value}")
    folder = run_folder(args.run, args.out)
    own = resolve(str(folder))
    plan = _plan(args, own)
    saved = chosen(folder, args.checkpoint, console(stderr=True).print)
    steps = args.steps or plan.parts.eval_steps
    named = [plan.label] if args.suite or args.prompt_file else []
    target = args.to or folder / "-".join(["eval", *named, str(len(plan.on)), str(steps)])

    out = console()
    measured = measured_deviation(folder) if _reward(plan.parts.recipe) == _reward(own) else None
    expected = outlook(plan.on, plan.macro, plan.parts.reward, measured)
    if not args.json:
        out.print(str(expected))
    try:
        base, tuned = _both(out, plan, saved, steps, args.weights)
    except ValueError as error:  # a reward that cannot judge this model's images or these prompts
        raise UserError(str(error)) from error
    base.write(target / "base.jsonl")
    tuned.write(target / "tuned.jsonl")
    metrics = compare(base, tuned, plan.metric, plan.macro)
    told = summarise(plan, base, tuned, metrics, expected)
    told |= {"iteration": saved.iteration, "steps": steps, "weights": args.weights}
    text = to_json(told, indent=2)
    write_text_atomic(target / "result.json", text)
    if args.json:
        print(text)
        return 0
    _show(
        out,
        f"{folder.name}, {plan.label}: {expected.prompts} prompts, {expected.images} images, ODE in {steps} steps",
        told,
    )
    out.print(f"wrote {target}")
    return 0


def _both(
    out: Console, plan: Plan, saved: Checkpoint, steps: int, weights: Literal["ema", "last"]
) -> tuple[Evaluation, Evaluation]:
    """Evaluations of the base and of the trained weights, with a progress bar."""
    found: list[Evaluation] = []
    with Progress(console=out, transient=True, disable=not out.is_terminal) as bar:
        for which in ("base", "tuned"):
            if which == "tuned":
                load_weights(plan.parts.policy, saved, "ema" if weights == "ema" else "weights")
            task = bar.add_task(which, total=len(plan.on))
            result = evaluate(
                plan.parts.policy,
                plan.parts.reward,
                plan.on,
                steps,
                plan.parts.recipe.micro_batch,
                progress=lambda done, _, task=task: bar.update(task, completed=done),  # type: ignore[misc]
                base=found[0] if found else None,
            )
            found.append(result)
    return found[0], found[1]


def _plan(args: Eval, own: Recipe) -> Plan:
    """The parts and slots that the command line asks for. Raises UserError."""
    suite = suites.get(args.suite) if args.suite else None
    chosen = args.rewards or (suite.rewards if suite else ())
    keys: dict[str, Any] = {"watch": None, "watch_options": {}} if own.watch else {}
    if chosen:
        keys |= _reward_keys(chosen, own, args.reward_options)
    elif args.reward_options:
        raise UserError("--reward-options belongs to --rewards or --suite; the run's own reward keeps its own options")
    file = suite.file(args.prompt_file) if suite else args.prompt_file
    if file:  # the parts are then built without the files of the run's own task
        keys |= {"train_prompts": file, "heldout_prompts": file}
    if keys:
        # text encoders stay: the prompts are not those that the run had encoded
        own = recipes.build({**own.model_dump(), **keys, "embedding_cache": None}, "the evaluation")
    parts = setup(own)
    metric = None if own.reward == "composite" and len(chosen) > 1 else parts.reward.info.name
    if suite is None and args.prompt_file:
        suite = suites.Suite(args.prompt_file.stem, ())
    if suite is None:
        wanted = args.prompts or 1000
        drawn = slots(tasks.draw([slot.prompt for slot in parts.heldout], wanted, "heldout"))
        if wanted <= len(parts.heldout):
            drawn = list(parts.heldout[:wanted])
        if args.images not in (None, 1):
            raise UserError(
                "--images belongs to --suite or --prompt-file; a run's own evaluation has one of each prompt"
            )
        return Plan(own.task, parts, drawn, False, metric)
    prompts = suite.prompts(args.prompts, args.prompt_file)
    return Plan(suite.name, parts, slots_of(suite.name, prompts, args.images or suite.images), suite.macro, metric)


def _reward_keys(chosen: Sequence[str], own: Recipe, options: Mapping[str, Any]) -> dict[str, Any]:
    """Recipe keys for one reward or several; the run's own reward keeps its options. Raises UserError."""
    if len(set(chosen)) != len(chosen):
        raise UserError(f"--rewards names {next(name for name in chosen if chosen.count(name) > 1)!r} twice")
    if "composite" in chosen and (len(chosen) > 1 or own.reward != "composite"):
        raise UserError("--rewards composite stands for the run's own composite alone; name the parts instead")
    mine, _ = _reward(own)
    flat = {f"{mine}.{key}": value for key, value in own.reward_options.items()} if mine in chosen else {}
    flat |= options
    if len(chosen) > 1:
        return {"reward": "composite", "reward_options": {**dict.fromkeys(chosen, 1.0), **flat}}
    (name,) = chosen
    foreign = next((key for key in flat if not key.startswith(f"{name}.")), None)
    if foreign is not None:
        raise UserError(f"--reward-options {foreign!r} must be written {name}.OPTION, after the reward that it is for")
    return {"reward": name, "reward_options": {key.removeprefix(f"{name}."): value for key, value in flat.items()}}


def _reward(recipe: Recipe) -> tuple[str, dict[str, Any]]:
    return recipe.reward or tasks.get(recipe.task).reward, recipe.reward_options


def summarise(
    plan: Plan, base: Evaluation, tuned: Evaluation, metrics: Mapping[str, Metric], expected: Outlook
) -> dict[str, Any]:
    """Base, tuned and their paired comparison as JSON; the first metric is the headline."""
    first = next(iter(metrics.values()))
    return {
        "suite": plan.label,
        "prompts": expected.prompts,
        "images": expected.images,
        "mean": "of the tags' means" if plan.macro else "of all images",
        "base": {**base.as_dict(), **first.base.as_dict()},
        "tuned": {**tuned.as_dict(), **first.tuned.as_dict()},
        "change": first.change.as_dict(),
        "metrics": {key: metric.as_dict() for key, metric in metrics.items()},
        "per_tag": per_tag(base, tuned) if plan.metric else {},
        "expected": {**vars(expected), "detectable": expected.detectable},
        "reward_cost": costs(plan.parts.reward),
    }


def _show(out: Console, title: str, told: Mapping[str, Any]) -> None:
    rows = table(title, "", "base", "tuned", "change", "p", "p (Holm)")
    for key, metric in told["metrics"].items():
        rows.add_row(key, *(_interval(metric[part]) for part in ("base", "tuned")), _signed(metric["change"]),
                     _p(metric["p"]), _p(metric["p_holm"]))  # fmt: skip
    tags = told["per_tag"]
    for tag in tags if len(tags) > 1 else ():
        row = tags[tag]
        rows.add_row(f"  {tag or 'untagged'}", f"{row['base']['mean']:.3f}", f"{row['tuned']['mean']:.3f}",
                     _signed(row["change"]))  # fmt: skip
    out.print(rows)
    before, after = (told[which]["image_statistics"] for which in ("base", "tuned"))
    looks = table("\nwhat the images look like, whatever the reward says", "", "base", "tuned", "change")
    for name, value in before.items():
        relative = f"{after[name] / value - 1:+.1%}" if value else ""
        looks.add_row(name.replace("_", " "), f"{value:.3f}", f"{after[name]:.3f}", relative)
    out.print(looks)
    failed = max(metric["failed"] for metric in told["metrics"].values())
    if failed:
        out.print(f"{failed} of {told['images']} pairs could not be scored and were left out")
    first = next(iter(told["metrics"].values()))
    out.print(f"by the spread measured, a change of {first['detectable']:.3g} would have been found 4 times in 5")


def _interval(value: Mapping[str, float]) -> str:
    return f"{value['mean']:.3f} [{value['low']:.3f}, {value['high']:.3f}]"


def _signed(value: Mapping[str, float]) -> str:
    return f"{value['mean']:+.3f} [{value['low']:+.3f}, {value['high']:+.3f}]"


def _p(value: float) -> str:
    return f"{value:.4f}" if value >= 0.0001 else "< .0001"
