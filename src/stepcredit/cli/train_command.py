"""``stepcredit train``."""

from __future__ import annotations

import json
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from stepcredit.cli.common import DEFAULT_RECIPE, Parsed, console, parse_with_recipe, run_folder
from stepcredit.errors import UserError
from stepcredit.training import distributed, rehearsal
from stepcredit.training import recipe as recipes
from stepcredit.training.files import safe_run_dir
from stepcredit.training.recipe import Recipe
from stepcredit.training.telemetry import Display, make_display
from stepcredit.training.trainer import stored_recipe, train


@dataclass
class Train:
    """Train a recipe: rollouts, step-wise credit, updates; evaluated before and after on held-out prompts.

    Writes runs/NAME/ with metrics.jsonl, summary.json, checkpoints and report.html. Ctrl-C saves; --resume continues.
    """

    recipe: tyro.conf.Positional[str] = DEFAULT_RECIPE
    """Bundled recipe (`stepcredit recipes`) or path of a YAML file; it comes first."""
    name: str | None = None
    """Name of the run; by default the recipe's, with a number if that is taken."""
    out: Path = Path("runs")
    """Folder that holds the runs."""
    resume: str | None = None
    """Continue this run (name or folder) from its newest good checkpoint."""
    rehearse: bool = False
    """Run the recipe whole on a tiny model: two iterations, evaluation, checkpoint, resume, export, in a minute."""
    quiet: bool = False
    """Show warnings and the result only."""


def run(argv: Sequence[str]) -> int:
    """Run the command, alone or as one of the processes of a launcher; 0, 1 if a guard stopped the run, 130 after
    Ctrl-C.
    """
    with distributed.processes():
        return _run(argv)


def _run(argv: Sequence[str]) -> int:
    resumed = _flag(argv, "--resume")
    if resumed is not None:
        folder = run_folder(resumed, Path(_flag(argv, "--out") or "runs"))
        parsed = parse_with_recipe(Train, "train", argv, base=_base_of(folder, argv))
        recipe = parsed.recipe
    else:
        parsed = parse_with_recipe(Train, "train", argv)
        recipe = parsed.recipe
        name = parsed.own.name
        if name is None:
            stem = Path(parsed.source).stem + ("-rehearsal" if parsed.own.rehearse else "")
            name = distributed.from_leader(_free_name(parsed.own.out, stem))
        folder = safe_run_dir(parsed.own.out, name)
    display = make_display(quiet=parsed.own.quiet)
    if parsed.own.rehearse:
        return _rehearse(parsed, folder, display)
    origin = None if resumed else json.dumps({"recipe": parsed.source, "overrides": _plain(parsed.overrides)})
    summary = train(recipe, folder, display, resume=resumed is not None, origin=origin)
    _print_result(folder, summary)
    return _exit_code(summary)


def _exit_code(summary: dict[str, Any]) -> int:
    if summary["signal"] is not None:
        return 130 if summary["signal"] == signal.SIGINT else 0
    return 1 if summary["guards"]["fired"] else 0


def _rehearse(parsed: Parsed[Train], folder: Path, display: Display) -> int:
    """The recipe on tiny parts: half of it, a resumption for the rest, and the export."""
    from stepcredit.training.export import export_run

    if distributed.joined():
        raise UserError("--rehearse is made by one process: start it without torchrun")
    if parsed.own.resume is not None:
        raise UserError("--rehearse makes a run of its own and resumes that; leave --resume out")
    out = console()
    small = rehearsal.rehearsed(parsed.recipe, parsed.overrides)
    out.print(rehearsal.LOUD, style="bold reverse")
    out.print(rehearsal.replaced(parsed.recipe, small))
    origin = json.dumps({"recipe": parsed.source, "overrides": _plain(parsed.overrides), "rehearsal": True})
    halfway = train(rehearsal.first_half(small), folder, display, origin=origin)
    if halfway["signal"] is not None:
        _print_result(folder, halfway)
        return 130
    summary = train(small, folder, display, resume=True)
    _print_result(folder, summary)
    exported = export_run(folder, folder / "export")
    out.print(f"exported to {folder / 'export'}: largest difference of an image opened again {exported.difference:.1e}")
    out.print(rehearsal.LOUD, style="bold reverse")
    return 0


def _base_of(folder: Path, argv: Sequence[str]) -> Recipe:
    """What a resumed run starts from: its own recipe, or the one named on the command line with the run's own flags."""
    if not argv or argv[0].startswith("-"):
        return stored_recipe(folder)
    path = folder / "origin.json"
    origin = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return recipes.load(argv[0], origin.get("overrides", {}))


def _free_name(out: Path, stem: str) -> str:
    names = [stem, *(f"{stem}-{k}" for k in range(2, 10_000))]
    return next(name for name in names if not (out / name).exists())


def _flag(argv: Sequence[str], name: str) -> str | None:
    for k, word in enumerate(argv):
        if word == name:
            if k + 1 == len(argv):
                raise UserError(f"{name} needs a value, for example {name} runs/my-run")
            return argv[k + 1]
        if word.startswith(name + "="):
            return word.removeprefix(name + "=")
    return None


def _plain(overrides: dict[str, Any]) -> dict[str, Any]:
    return {key: str(value) if isinstance(value, Path) else value for key, value in overrides.items()}


def _print_result(folder: Path, summary: dict[str, Any]) -> None:
    out = console()
    if summary["reward_after"] is None:
        out.print(f"{summary['stopped']} after {summary['iterations']} iterations, saved in {folder}")
        out.print(f"continue: stepcredit train --resume {folder}")
        return
    out.print(f"held-out reward  before  {_shown(summary['reward_before'])}")
    out.print(f"                 after   {_shown(summary['reward_after'])}")
    out.print(f"                 change  {_shown(summary['improvement'], signed=True)}")
    if summary["exact_after"] is not None:
        before, after = summary["exact_before"], summary["exact_after"]
        out.print(f"exactly right    {before['mean']:.1%} -> {after['mean']:.1%}")
    if summary["watched"] is not None:
        watched = summary["watched"]
        out.print(f"watched {watched['reward']}, not trained on")
        out.print(f"                 before  {_shown(watched['before'])}")
        out.print(f"                 after   {_shown(watched['after'])}")
        out.print(f"                 change  {_shown(watched['change'], signed=True)}")
        if watched["exact_after"] is not None:
            out.print(f"exactly right    {watched['exact_before']['mean']:.1%} -> {watched['exact_after']['mean']:.1%}")
    out.print(
        f"{summary['iterations']} iterations in {summary['seconds']:.0f} s of training, "
        f"{summary['model_evaluations']} model evaluations; intervals are 95 %, over prompts in their tags"
    )
    if summary["guards"]["fired"] and summary["best_iteration"]:
        best = folder / "checkpoints" / "best"
        out.print(f"the best evaluation during the run was that of iteration {summary['best_iteration']}: {best}")
    out.print(f"report: {folder / 'report.html'}")


def _shown(interval: dict[str, float], signed: bool = False) -> str:
    sign = "+" if signed else ""
    return f"{interval['mean']:{sign}.3f}  [{interval['low']:{sign}.3f}, {interval['high']:{sign}.3f}]"
