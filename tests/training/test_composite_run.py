"""Runs with several rewards: what is logged of each, on what scale they are evaluated, and what they cost."""

import json
import math
import threading

import pytest
import torch

from stepcredit.rewards import registry
from stepcredit.rewards.base import RewardError, RewardInfo, SelfTest
from stepcredit.rewards.registry import FunctionReward
from stepcredit.training import iteration, rehearsal
from stepcredit.training import recipe as recipes
from stepcredit.training.evaluation import read
from stepcredit.training.telemetry import make_display
from stepcredit.training.trainer import train

OPTIONS = {"jpeg_size": 1.0, "redness": 0.5, "redness.scale": 3.0}


class Redness:
    """``scale`` times the mean of the red channel, in batches of three, by a reward that may be asked concurrently."""

    per_image = True

    def __init__(self, scale=1.0, concurrent=1):
        self.scale, self.concurrent = scale, concurrent
        self.info = RewardInfo("redness", (0.0, scale), "own", "mean of red", batch_size=3)
        self.threads = set()

    def __call__(self, images, prompts, metadata):
        self.threads.add(threading.get_ident())
        return self.scale * images[:, 0].mean(dim=(1, 2))

    def self_test(self):
        red = torch.zeros(3, 8, 8)
        red[0] = 1
        return SelfTest(red, torch.zeros(3, 8, 8), "red", {})


@pytest.fixture
def redness(monkeypatch):
    made = []

    def factory(**options):
        made.append(Redness(**options))
        return made[-1]

    monkeypatch.setitem(registry._registered, "redness", factory)
    return made


def run(recipe, folder):
    return train(recipe, folder, make_display(quiet=True))


def test_a_composite_run_logs_every_part(small, redness, tmp_path):
    recipe = small(reward="composite", reward_options=OPTIONS, iterations=2)
    assert recipes.parse(recipes.dump(recipe), "test") == recipe
    summary = run(recipe, tmp_path / "run")
    start, *lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        assert set(line["components"]) == {"jpeg_size", "redness"}
        assert 0 < line["components"]["redness"] < 3
        assert line["components"]["jpeg_size"] < 0  # kilobytes, the fewer the better, in native units
        assert line["degenerate_groups"] == 0
    # the base is the unit in which composites are evaluated: mean 0 before
    assert start["evaluation"]["mean"] == pytest.approx(0, abs=1e-6)
    assert summary["reward_after"]["mean"] == pytest.approx(summary["improvement"]["mean"], abs=1e-6)

    rows = [json.loads(x) for x in (tmp_path / "run" / "evaluations" / "after.jsonl").read_text().splitlines()]
    base = [
        json.loads(x) for x in (tmp_path / "run" / "evaluations" / "iteration-000000.jsonl").read_text().splitlines()
    ]
    expected = 0.0
    for name, weight in (("jpeg_size", 1.0), ("redness", 0.5)):
        known = torch.tensor([row["components"][name] for row in base]).double()
        mean = sum(row["components"][name] for row in rows) / len(rows)
        expected += weight * (mean - float(known.mean())) / float(known.std(correction=0))
    assert summary["reward_after"]["mean"] == pytest.approx(expected, abs=1e-4)

    costs = {row["name"]: row for row in summary["reward_cost"]}
    ledger = json.loads((tmp_path / "run" / "ledger.json").read_text())
    images = 2 + 12 + 2 * ledger["reward_calls"] + 12  # self-test, before, two rollouts, after
    assert costs["jpeg_size"]["images"] == costs["redness"]["images"] == images
    page = (tmp_path / "run" / "report.html").read_text()
    assert "Parts of the reward" in page
    assert ">redness</th>" in page


def test_evaluations_are_read_back_with_their_parts(small, redness, tmp_path):
    from stepcredit.training.setup import setup

    recipe = small(reward="composite", reward_options=OPTIONS, iterations=1, eval_every=0)
    run(recipe, tmp_path / "run")
    again = read(tmp_path / "run" / "evaluations" / "after.jsonl", setup(recipe).heldout)
    assert set(again.components) == {"jpeg_size", "redness"}
    assert again.exact is None
    assert len(again.components["redness"]) == 12


def test_a_composite_is_judged_in_pieces_and_combined_in_whole_groups(small, redness):
    from stepcredit.rewards.asking import Asking
    from stepcredit.rewards.base import judge
    from stepcredit.training.judging import judge_latents
    from stepcredit.training.setup import setup

    parts = setup(small(reward="composite", reward_options={"redness": 1.0, "jpeg_size": 0.5}))
    parts.reward.piece = 3
    asked = [parts.train[k % 2] for k in range(10)]  # groups lie across the pieces
    x_0 = torch.rand(10, *parts.policy.latent_shape, generator=torch.Generator().manual_seed(0))
    with Asking(parts.reward) as asking:
        found = judge_latents(parts, asking, x_0, asked, torch.arange(10) % 2)()
    texts, metadata = [prompt.text for prompt in asked], [prompt.metadata for prompt in asked]
    whole = judge(parts.reward, parts.policy.decode(x_0), texts, metadata)
    assert torch.equal(found.score, whole.score)
    assert torch.equal(found.components["redness"], whole.components["redness"])
    for group in (found.score[::2], found.score[1::2]):
        assert float(group.mean()) == pytest.approx(0, abs=1e-5)


def test_asking_while_decoding_changes_nothing(small, redness, tmp_path):
    written = []
    for concurrent in (1, 3):
        options = {"concurrent": concurrent}
        run(small(reward="redness", reward_options=options, iterations=2), tmp_path / f"run{concurrent}")
        lines = [json.loads(x) for x in (tmp_path / f"run{concurrent}" / "metrics.jsonl").read_text().splitlines()]
        written.append([(line.get("reward"), line.get("R_mean"), line.get("grad_norm")) for line in lines])
    assert written[0] == written[1]
    assert len(redness[0].threads) == 1
    assert len(redness[1].threads) > 1


def test_a_server_judges_one_cell_while_the_next_is_sampled(small, monkeypatch, tmp_path):
    sampling, begun, judged = iteration.sample_cell, [], []

    class Slow(Redness):
        """Judges the pieces of the first cell only when the next is being sampled."""

        def __call__(self, images, prompts, metadata):
            if begun:
                judged.append(begun[0].wait(30))
            return super().__call__(images, prompts, metadata)

    def sample_cell(*args, **options):
        if len(begun) == 1:
            begun[0].set()
        begun.append(threading.Event())
        return sampling(*args, **options)

    monkeypatch.setattr(iteration, "sample_cell", sample_cell)
    monkeypatch.setitem(registry._registered, "redness", lambda: Slow(concurrent=1000))
    run(small(reward="redness", iterations=1), tmp_path / "run")
    assert len(begun) > 1
    assert judged
    assert all(judged)  # none waited in vain


def test_a_failure_while_decoding_is_the_runs(small, monkeypatch, tmp_path):
    calls = []

    class Falling(Redness):
        def __call__(self, images, prompts, metadata):
            calls.append(len(images))
            if len(calls) > 8:  # the evaluation before needs four, the self-test one
                raise RewardError("reward 'redness': the server is down")
            return super().__call__(images, prompts, metadata)

    monkeypatch.setitem(registry._registered, "redness", lambda: Falling(concurrent=2))
    with pytest.raises(RewardError, match="the server is down"):
        run(small(reward="redness", iterations=1), tmp_path / "run")


def test_a_reward_that_fails_its_self_test_starts_no_run(small, monkeypatch, tmp_path):
    def flat(images, prompts, metadata):
        return torch.zeros(len(images))

    test = SelfTest(torch.ones(3, 4, 4), torch.zeros(3, 4, 4), "x", {})
    info = RewardInfo("flat", (0.0, 1.0), "own", "always zero")
    monkeypatch.setitem(registry._registered, "flat", lambda: FunctionReward(info, flat, test))
    with pytest.raises(RewardError, match="'flat' FAILS its self-test: good 0, bad 0"):
        run(small(reward="flat"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_composites_are_rehearsed_part_by_part():
    options = {"ocr": 1.0, "pickscore": 0.5, "imagereward": 0.25, "aesthetic": 0.5, "how": "group_z", "ocr.side": 320}
    recipe = recipes.load("sd35-ocr-uniform", {"reward": "composite", "reward_options": options})
    small = rehearsal.rehearsed(recipe)
    assert small.reward == "composite"
    assert small.reward_options["tiny_pickscore"] == 0.5
    assert small.reward_options["how"] == "group_z"
    assert math.isclose(sum(v for v in small.reward_options.values() if isinstance(v, float)), 2.25)
    assert "ocr.side" not in small.reward_options
