"""``stepcredit eval``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro
from rich.progress import Progress

from stepcredit import tasks
from stepcredit.cli.common import console, parse, resolve, run_folder, table
from stepcredit.errors import UserError
from stepcredit.training import checkpoint
from stepcredit.training.evaluation import Evaluation, evaluate, paired, slots
from stepcredit.training.files import write_text_atomic
from stepcredit.training.setup import setup
from stepcredit.training.state import load_weights


@dataclass
class Eval:
    """Evaluate base and trained weights of a run on the same held-out prompts and noise, by ODE sampling.

    Prints means with 95 % intervals clustered by prompt, per tag, and the paired difference; writes one JSON line per
    (prompt, noise) for each of the two.
    """

    run: tyro.conf.Positional[str]
    """Name or folder of a run."""
    out: Path = Path("runs")
    """Folder that holds the runs."""
    prompts: int = 1000
    """Held-out prompts."""
    steps: int | None = None
    """ODE steps; as in the run's own evaluations by default."""
    weights: Literal["ema", "last"] = "ema"
    """The averaged weights, or the last ones."""
    to: Path | None = None
    """Folder for base.jsonl, tuned.jsonl and result.json; RUN/eval-PROMPTS-STEPS by default."""
    json: bool = False
    """Print JSON."""


def run(argv: Sequence[str]) -> int:
    """Run the command."""
    args = parse(Eval, "eval", argv)
    if args.prompts < 2:
        raise UserError(f"--prompts must be at least 2, not {args.prompts}")
    folder = run_folder(args.run, args.out)
    parts = setup(resolve(str(folder)))
    saved = checkpoint.load(folder / "checkpoints")
    steps = args.steps or parts.eval_steps
    target = args.to or folder / f"eval-{args.prompts}-{steps}"
    drawn = slots(tasks.draw([slot.prompt for slot in parts.heldout], args.prompts, "heldout"))
    if args.prompts <= len(parts.heldout):
        drawn = list(parts.heldout[: args.prompts])

    out = console()
    results: dict[str, Evaluation] = {}
    with Progress(console=out, transient=True, disable=not out.is_terminal) as bar:
        for which in ("base", "tuned"):
            if which == "tuned":
                load_weights(parts.policy, saved, "ema" if args.weights == "ema" else "weights")
            task = bar.add_task(which, total=len(drawn))
            results[which] = evaluate(
                parts.policy,
                parts.reward,
                drawn,
                steps,
                parts.recipe.micro_batch,
                progress=lambda done, total, task=task: bar.update(task, completed=done),  # type: ignore[misc]
            )
            results[which].write(target / f"{which}.jsonl")
    base, tuned = results["base"], results["tuned"]
    result = summarise(base, tuned, saved.iteration, steps)
    write_text_atomic(target / "result.json", json.dumps(result, indent=2))
    if args.json:
        print(json.dumps(result, indent=2))
        return 0
    rows = table(f"{folder.name}: {len(drawn)} held-out prompts, ODE in {steps} steps", "", "base", "tuned", "change")
    change = result["change"]
    shown = f"{change['mean']:+.3f} [{change['low']:+.3f}, {change['high']:+.3f}]"
    rows.add_row("reward", str(base.reward), str(tuned.reward), shown)
    if base.exact_rate and tuned.exact_rate:
        difference = tuned.exact_rate.mean - base.exact_rate.mean
        rows.add_row("exactly right", str(base.exact_rate), str(tuned.exact_rate), f"{difference:+.3f}")
    later = tuned.per_tag()
    for tag, mean in base.per_tag().items():
        rows.add_row(f"  {tag or 'all'}", f"{mean:.3f}", f"{later[tag]:.3f}", f"{later[tag] - mean:+.3f}")
    out.print(rows)
    out.print(f"wrote {target}")
    return 0


def summarise(base: Evaluation, tuned: Evaluation, iteration: int, steps: int) -> dict[str, Any]:
    """Base, tuned and their paired difference as JSON."""
    return {
        "iteration": iteration,
        "steps": steps,
        "base": base.as_dict(),
        "tuned": tuned.as_dict(),
        "change": paired(base, tuned).as_dict(),
    }
