"""``stepcredit serve-reward`` in a process of its own, asked by the ``remote`` reward."""

import subprocess
import sys

import torch

from stepcredit import rewards
from stepcredit.cli import main


def test_a_served_reward_gives_what_the_local_one_gives():
    command = [sys.executable, "-u", "-m", "stepcredit", "serve-reward", "jpeg_size", "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        line = process.stdout.readline()
        assert line.startswith("serving jpeg_size at http://127.0.0.1:")
        remote = rewards.get("remote", url=line.split()[-1], expect="jpeg_size")
        images = torch.rand(3, 3, 24, 24, generator=torch.Generator().manual_seed(0))
        there = remote(images, ["a", "b", "c"], [{}, {}, {}])
        here = rewards.get("jpeg_size")(images, ["a", "b", "c"], [{}, {}, {}])
        assert torch.equal(there, here)
    finally:
        process.terminate()  # a shell's background jobs ignore SIGINT, and so may this one
        process.wait(timeout=30)


def test_unknown_rewards_and_open_addresses_without_a_token_are_refused(capsys, monkeypatch):
    monkeypatch.delenv("STEPCREDIT_REWARD_TOKEN", raising=False)
    assert main(["serve-reward", "jpeg_sise"]) == 2
    assert "jpeg_size" in capsys.readouterr().err
    assert main(["serve-reward", "jpeg_size", "--host", "0.0.0.0", "--port", "0"]) == 2
    assert "token" in capsys.readouterr().err.lower()
