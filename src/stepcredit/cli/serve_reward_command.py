"""``stepcredit serve-reward``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import tyro

from stepcredit import rewards
from stepcredit.cli.common import console, parse
from stepcredit.errors import UserError
from stepcredit.rewards import selftest, server


@dataclass
class ServeReward:
    """Serve a reward over HTTP (JSON and PNG, no pickles) for runs that name the reward `remote`.

    It listens on this machine alone. Any other address needs a token in STEPCREDIT_REWARD_TOKEN, for the server and for
    its clients. The reward's self-test runs first. Ctrl-C ends the server.
    """

    name: tyro.conf.Positional[str]
    """Registered name of the reward: ocr, pickscore, ..."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 8765
    """Port to listen on."""


def run(argv: Sequence[str]) -> int:
    """Run the command."""
    args = parse(ServeReward, "serve-reward", argv)
    out = console()
    try:
        reward = rewards.get(args.name)
        selftest.require(reward)
        server.serve(reward, args.host, args.port, ready=lambda url: out.print(f"serving {args.name} at {url}"))
    except (ValueError, OSError) as error:
        raise UserError(str(error)) from error
    return 0
