"""A secret of the environment is in nothing that a run writes, prints or sends to a file."""

import base64
import threading

import pytest
import torch

from stepcredit.cli import main
from stepcredit.rewards import FunctionReward, RewardInfo, SelfTest
from stepcredit.rewards.server import TOKEN_ENV, RewardServer

SECRET = "canary-7f3a91c2d4e8b605"
NAMES = (
    TOKEN_ENV,
    "STEPCREDIT_API_KEY",
    "HF_TOKEN",
    "HUGGING_FACE_HUB_TOKEN",
    "AWS_SECRET_ACCESS_KEY",
    "WANDB_API_KEY",
)
TINY = ["--iterations", "1", "--prompts-per-iteration", "2", "--group-size", "4", "--micro-batch", "8",
        "--eval-prompts", "8", "--eval-prompts-during", "4"]  # fmt: skip


@pytest.fixture
def canary(monkeypatch, tmp_path):
    """A folder and a cache of its own, and the secret in every variable that may hold one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STEPCREDIT_CACHE", str(tmp_path / "cache"))
    for name in NAMES:
        monkeypatch.setenv(name, f"{SECRET}-{name.lower()}")
    return tmp_path


def found_in(folder):
    """Files that hold the secret, as it is or in base64."""
    shapes = [SECRET.encode(), *(base64.b64encode(b"x" * k + SECRET.encode())[4:-4] for k in range(3))]
    files = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    assert files
    return [path for path in files if any(shape in path.read_bytes() for shape in shapes)]


def test_the_search_would_find_it(tmp_path):
    (tmp_path / "plain").write_text(f"token={SECRET}")
    (tmp_path / "coded").write_bytes(base64.b64encode(f"Bearer {SECRET}".encode()))
    (tmp_path / "none").write_text("token=")
    assert {path.name for path in found_in(tmp_path)} == {"plain", "coded"}


def test_no_artefact_of_a_run_holds_a_secret(canary, capfd):
    pytest.importorskip("tensorboard")
    run = ["train", "compose-stepwise", *TINY, "--name", "run", "--tracker", "tensorboard"]
    assert main(run) == 0
    for command in (
        ["train", "--resume", "run", "--checkpoint-every", "1"],
        ["export", "run", "--to", "exported"],
        ["eval", "run", "--prompts", "8"],
        ["inspect", "runs/run", "--members", "4"],
        ["sample", "runs/run", "--count", "2"],
        ["check", "compose-stepwise", *TINY],
    ):
        assert main(command) == 0, command
    assert (canary / "exported" / "README.md").is_file()
    assert found_in(canary) == []
    told = capfd.readouterr()
    assert SECRET not in told.out + told.err


def test_a_served_reward_is_asked_with_the_token_and_nothing_keeps_it(canary, capfd, caplog):
    """Also when the token is wrong, and when the reward behind it breaks."""
    red = torch.zeros(3, 24, 24)
    red[0] = 1
    info = RewardInfo("red", (-1.0, 1.0), "none", "redness")
    whole = True

    def redness(images, prompts, metadata):
        return images[:, 0].mean(dim=(1, 2)) if whole else 1 / 0

    reward = FunctionReward(info, redness, SelfTest(red, red.flip(0), "", {}))
    with RewardServer(reward, port=0, token=f"{SECRET}-{TOKEN_ENV.lower()}") as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        train = ["train", "compose-stepwise", *TINY, "--reward", "remote", "--reward-options", "url", server.url]
        assert main([*train, "--name", "served"]) == 0
        server.token = "another-token-of-its-own"
        assert main([*train, "--name", "wrong"]) == 2
        server.token = f"{SECRET}-{TOKEN_ENV.lower()}"
        whole = False  # an error inside the server
        assert main([*train, "--name", "broken"]) == 2
        server.shutdown()
        thread.join()
    told = capfd.readouterr()
    assert "refuses the token" in told.err
    assert SECRET not in told.out + told.err + caplog.text
    assert found_in(canary) == []


def test_a_traceback_of_an_error_that_is_not_ours_shows_no_secret(canary, monkeypatch, capfd):
    """Tracebacks quote lines of code, and values only where an error's message has them."""
    from stepcredit.training import trainer

    def broken(*_, **__):
        raise ZeroDivisionError("of the test")

    monkeypatch.setattr(trainer, "evaluate", broken)
    with pytest.raises(ZeroDivisionError) as caught:
        main(["train", "compose-stepwise", *TINY, "--name", "run"])
    assert SECRET not in str(caught.getrepr(showlocals=False))
    assert found_in(canary) == []
