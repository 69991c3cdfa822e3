"""What a run depends on may fail: a reward server follows its policy, a report costs nothing."""

import json
import threading

import pytest
import torch
from run_cases import assert_equal, final, lines, run

from stepcredit.reports import run as report
from stepcredit.rewards import FunctionReward, registry
from stepcredit.rewards.base import RewardError
from stepcredit.rewards.server import RewardServer
from stepcredit.training import checkpoint
from stepcredit.training.setup import Setup
from stepcredit.training.trainer import train


class Faults:
    """Which requests the server fails: none, those of one iteration, or every fifth of them."""

    def __init__(self):
        self.iteration, self.broken, self.every, self.requests = 0, None, None, 0

    def __call__(self, images, prompts, metadata):
        self.requests += 1
        if self.iteration == self.broken or (self.every and self.requests % self.every == 0):
            raise RuntimeError("out of memory, with secrets in the traceback")
        return registry.get("jpeg_size")(images, prompts, metadata)


@pytest.fixture
def served(small, monkeypatch):
    """Faults of a reward server, and the recipe of runs that ask it."""
    faults, jpeg, original = Faults(), registry.get("jpeg_size"), Setup.batch

    def counting(parts, iteration):
        faults.iteration = iteration
        return original(parts, iteration)

    monkeypatch.setattr(Setup, "batch", counting)
    with RewardServer(FunctionReward(jpeg.info, faults, jpeg.self_test()), port=0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        options = {"url": server.url, "retries": 0}
        yield (
            faults,
            lambda **keys: small(
                reward="remote", eval_every=0, reward_options={**options, **keys.pop("reward_options", {})}, **keys
            ),
        )
        server.shutdown()
        thread.join()


def test_a_reward_server_that_fails_ends_the_run_which_then_goes_on_as_if_it_had_not(served, tmp_path):
    faults, recipe = served
    run(recipe(), tmp_path / "whole")
    faults.broken = 3
    with pytest.raises(RewardError, match="remote") as caught:
        run(recipe(), tmp_path / "run")
    assert "secrets" not in str(caught.value)
    assert checkpoint.load(tmp_path / "run" / "checkpoints").iteration == 2
    faults.broken = None
    run(recipe(), tmp_path / "run", resume=True)
    assert_equal(final(tmp_path / "run"), final(tmp_path / "whole"))
    assert lines(tmp_path / "run") == lines(tmp_path / "whole")


def test_samples_that_a_server_could_not_score_leave_their_groups_where_the_recipe_says_so(served, tmp_path):
    faults, recipe = served
    faults.every = 5
    tolerant = recipe(on_reward_failure="drop", reward_options={"on_failure": "nan"}, eval_prompts=80)
    with pytest.warns(UserWarning, match="samples are left out"):
        summary = run(tolerant, tmp_path / "run")
    assert summary["iterations"] == 4
    # no number stands for a missing one: means are over the samples that were scored
    rows = (tmp_path / "run" / "evaluations" / "after.jsonl").read_text().splitlines()
    scored = [row["reward"] for row in map(json.loads, rows) if row["reward"] is not None]
    assert 0 < len(scored) < 80
    assert summary["reward_after"]["mean"] == pytest.approx(sum(scored) / len(scored), rel=1e-6)
    assert all(bool(tensor.isfinite().all()) for tensor in final(tmp_path / "run")["weights"].values())


def test_a_report_that_fails_costs_nothing(small, tmp_path, monkeypatch):
    said = []

    class Told:
        start = phase = iteration = images = stop = lambda self, *arguments: None

        def message(self, text):
            said.append(text)

    def broken(folder):
        raise ZeroDivisionError("no such figure")

    monkeypatch.setattr(report, "write", broken)
    summary = train(small(iterations=1), tmp_path / "run", Told())
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["iterations"] == summary["iterations"] == 1
    assert said == ["the report could not be written (ZeroDivisionError: no such figure); all data is saved"]
    assert torch.isfinite(torch.tensor(summary["reward_after"]["mean"]))
