"""The command line: ``stepcredit COMMAND``. Commands load when they are called, so that ``--help`` is instant."""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from collections.abc import Sequence

COMMANDS = {
    "train": "train a recipe, with live progress; ends with an evaluation and a report",
    "eval": "evaluate base and trained weights on the same prompts and noise",
    "sample": "write a PNG grid of images of a base model or a run",
    "inspect": "write a page that shows where in its trajectories a model earns its reward, and every scheme's credit",
    "plan": "what a recipe costs, counted before anything runs",
    "check": "prove on this machine that a recipe can be trained: ratio 1, level 0 = ODE, reward, one update",
    "compare": "train several recipes with the same seeds: curves, ratios to a target, intervals, a page",
    "audit": "which credit scheme, kernel and window has how much signal, measured without training",
    "recipes": "list, show or copy the bundled recipes",
    "data": "list or fetch prompt files that other projects published",
    "export": "write a run's weights so that others open them: a LoRA for diffusers, a card, a before/after grid",
    "rewards": "list the rewards, show one with its options, or convert published weights",
    "serve-reward": "serve a reward over HTTP for the reward `remote`",
    "pretrain": "rebuild the base model of a desk task",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 0, 1 for a failed check or a run that a guard stopped, 2 for bad input,
    130 after Ctrl-C.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_usage())
        return 0 if arguments else 2
    if arguments[0] in ("-V", "--version"):
        from stepcredit import __version__

        print(f"stepcredit {__version__}")
        return 0
    from stepcredit.errors import UserError, nearest
    from stepcredit.untrusted import clean

    command, *rest = arguments
    warnings.formatwarning = _plain_warning
    try:
        if command not in COMMANDS:
            raise UserError(
                f"unknown command {command!r}{nearest(command, COMMANDS) or '.'} `stepcredit --help` lists them"
            )
        module = importlib.import_module(f"stepcredit.cli.{command.replace('-', '_')}_command")
        return int(module.run(rest))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # the reader of our output has gone (`| head`): not an error, and nothing more can be said
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if not isinstance(error, UserError) and not _is_explained(error):
            raise
        print(f"error: {clean(error)}", file=sys.stderr)
        return 2


def _plain_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """A warning as a sentence for the user; where in our code it was given is of no use to anyone."""
    from stepcredit.untrusted import clean

    return f"warning: {clean(message)}\n"


def _is_explained(error: Exception) -> bool:
    """Errors of ours whose message is a sentence for the user; a traceback would only hide it."""
    from stepcredit.rewards.base import RewardError
    from stepcredit.training.checkpoint import CheckpointError

    return isinstance(error, (RewardError, CheckpointError, FloatingPointError))


def _usage() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {what}" for name, what in COMMANDS.items()]
    return "\n".join(
        [
            "usage: stepcredit COMMAND [...]",
            "",
            "Reinforcement learning on flow-matching image generators, with the credit for a reward assigned to each",
            "denoising step.",
            "",
            *lines,
            "",
            "`stepcredit COMMAND --help` explains a command. To begin: stepcredit train compose-stepwise",
        ]
    )
