"""A watched reward: it judges every evaluation, changes no training, and its fall stops the run."""

import dataclasses
import json

import pytest
import torch
from run_cases import assert_equal, final, lines, run

from stepcredit import rewards
from stepcredit.cli import main
from stepcredit.errors import UserError
from stepcredit.rewards import registry
from stepcredit.rewards.base import RewardError, RewardInfo, SelfTest
from stepcredit.rewards.registry import FunctionReward
from stepcredit.tasks import Prompt
from stepcredit.training import checkpoint, guards, rehearsal, trainer
from stepcredit.training import recipe as recipes
from stepcredit.training.evaluation import Evaluation, evaluate, read, slots
from stepcredit.training.guards import GuardState, after_evaluation
from stepcredit.training.setup import setup

WATCHING = {"watch": "redness", "watch_options": {"scale": 2.0}}
EVALUATED = {"eval_prompts": guards.FEWEST, "eval_prompts_during": guards.FEWEST, "eval_every": 1}


@pytest.fixture
def redness(monkeypatch):
    def factory(scale=1.0):
        def red(images, prompts, metadata):
            return scale * images[:, 0].mean(dim=(1, 2))

        test = SelfTest(torch.ones(3, 4, 4), torch.zeros(3, 4, 4), "x", {})
        return FunctionReward(RewardInfo("redness", (0.0, scale), "own", "mean of red"), red, test)

    monkeypatch.setitem(registry._registered, "redness", factory)


@pytest.fixture
def watched(small, redness, tmp_path):
    recipe = small(**WATCHING)
    return recipe, tmp_path / "watched", run(recipe, tmp_path / "watched")


def test_every_evaluation_and_the_summary_tell_what_the_watched_reward_said(watched):
    recipe, folder, summary = watched
    start, _, during, *_ = lines(folder)
    parts = setup(recipe)
    alone = evaluate(parts.policy, rewards.get("redness", scale=2.0), parts.heldout, parts.eval_steps, 4)
    assert start["evaluation"]["watched"]["mean"] == pytest.approx(alone.reward.mean, abs=1e-6)
    assert start["evaluation"]["watched"]["per_tag"] == pytest.approx(alone.per_tag())
    assert during["evaluation"]["watched"]["mean"] != start["evaluation"]["watched"]["mean"]
    assert summary["watched"]["reward"] == "redness"
    assert summary["watched"]["before"]["mean"] == pytest.approx(alone.reward.mean, abs=1e-6)
    change = summary["watched"]["after"]["mean"] - summary["watched"]["before"]["mean"]
    assert summary["watched"]["change"]["mean"] == pytest.approx(change, abs=1e-6)
    assert summary["watched"]["exact_after"] is None
    assert summary["best_iteration"] == summary["watched"]["best_iteration"] == 2  # the only evaluation during the run
    images = {row["name"]: row["images"] for row in summary["reward_cost"]}
    assert images["redness"] == 2 + 12 + 6 + 12  # self-test, before, during, after: none of training
    again = read(folder / "evaluations" / "iteration-000000.jsonl", parts.heldout)
    assert torch.equal(again.watched.rewards, alone.rewards)
    assert again.watched.exact is None
    page = (folder / "report.html").read_text()
    assert "Watched: redness" in page
    assert "Reward trained on" in page
    assert ">edge energy</th>" in page


def test_watching_changes_no_weight(watched, small, tmp_path):
    _, folder, _ = watched
    summary = run(small(), tmp_path / "alone")
    assert_equal(final(tmp_path / "alone"), final(folder))
    assert summary["watched"] is None
    assert lines(tmp_path / "alone")[0]["evaluation"]["watched"] is None
    assert "Watched" not in (tmp_path / "alone" / "report.html").read_text()


def test_a_run_resumed_goes_on_watching(watched, small, tmp_path):
    _, folder, summary = watched
    run(small(iterations=3, **WATCHING), tmp_path / "cut")
    again = run(small(**WATCHING), tmp_path / "cut", resume=True)
    assert lines(tmp_path / "cut")[2:] == lines(folder)[2:]
    assert again["watched"] == summary["watched"]
    with pytest.raises(UserError, match="watch \\(was 'redness', now None\\)"):
        run(small(), folder, resume=True)


def test_verdicts_of_a_watched_verifier_are_kept(small, tmp_path):
    recipe = small(model=None, watch="compose", iterations=1, eval_every=0)
    summary = run(recipe, tmp_path / "run")
    again = read(tmp_path / "run" / "evaluations" / "after.jsonl", setup(recipe).heldout)
    assert again.watched.exact_rate.mean == summary["watched"]["exact_after"]["mean"]
    assert "Exactly right" in (tmp_path / "run" / "report.html").read_text()


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"watch": "jpeg_size"}, "watch 'jpeg_size' is the reward that is trained on"),
        ({"watch": "jpeg_sise"}, "did you mean 'jpeg_size'"),
        ({"watch_options": {"goal": "large"}}, "name it with watch"),
        ({"watch": "jpeg_size", "watch_options": {"gaol": "large"}}, "its options are"),
    ],
)
def test_what_cannot_be_watched_is_refused(small, keys, message):
    with pytest.raises(UserError, match=message):
        setup(small(**keys))


def test_the_trained_reward_with_other_options_may_be_watched(small):
    assert setup(small(watch="jpeg_size", watch_options={"goal": "large"})).watch.info.name == "jpeg_size"


def test_a_watched_reward_that_fails_its_self_test_starts_no_run(small, monkeypatch, tmp_path):
    test = SelfTest(torch.ones(3, 4, 4), torch.zeros(3, 4, 4), "x", {})
    info = RewardInfo("flat", (0.0, 1.0), "own", "always zero")
    flat = FunctionReward(info, lambda images, prompts, metadata: torch.zeros(len(images)), test)
    monkeypatch.setitem(registry._registered, "flat", lambda: flat)
    with pytest.raises(RewardError, match="'flat' FAILS its self-test"):
        run(small(watch="flat"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


# --- the guard ------------------------------------------------------------------------------------------------------


def evaluation(rewards, watched):
    on = tuple(slots([Prompt(f"prompt {k}", {}) for k in range(len(rewards))]))
    none = torch.zeros(0, 1, 1, 3)
    inner = Evaluation(on, torch.tensor(watched), None, none, {})
    return Evaluation(on, torch.tensor(rewards), None, none, {}, watched=inner)


def test_the_watched_rewards_fall_is_judged_in_its_own_deviations_while_the_trained_one_rises():
    spread = [0.0, 2.0] * 8  # standard deviation 1
    base = evaluation(spread, spread)
    recipe = recipes.build({"watch": "compose", "reward": "jpeg_size", "max_watch_drop": 0.25, "patience": 2})
    state = GuardState()

    def judge(fall, iteration=1, since=0):
        now = evaluation([r + 9 for r in spread], [r - fall for r in spread])
        return after_evaluation(recipe, state, iteration, now, now, iteration, base, (base, since))

    assert judge(0.24) is None
    assert state.watch_falls == 0
    assert judge(0.3) is None
    assert state.watch_falls == 1
    restored = GuardState.from_dict(json.loads(json.dumps(state.as_dict())))
    assert restored == state
    assert judge(0.2) is None
    assert state.watch_falls == 0
    judge(0.3)
    fired = judge(0.3, iteration=7, since=3)
    assert (fired.guard, fired.iteration) == ("max_watch_drop", 7)
    assert "watched reward 'compose' is 0.3 [0.3, 0.3] below that of iteration 3" in fired.reason
    assert "0.25 (max_watch_drop = 0.25 standard deviations) in 2 evaluations running" in fired.reason
    assert "trained on moved by +9" in fired.reason
    assert fired.limits["max_watch_drop"] == 0.25
    assert state.falls == 0
    state.lift()
    assert state.watch_falls == 0
    off = recipes.build({"watch": "compose", "reward": "jpeg_size", "max_watch_drop": None, "patience": 1})
    now = evaluation(spread, [r - 99 for r in spread])
    assert after_evaluation(off, GuardState(), 1, now, now, 1, base, (base, 0)) is None


def test_a_hacked_run_is_stopped_and_its_best_checkpoint_is_the_watched_rewards(
    small, redness, tmp_path, monkeypatch, capsys
):
    original, calls = trainer.evaluate, []

    def hacked(*args, **kwargs):
        result = original(*args, **kwargs)
        k = len(calls)
        calls.append(k)
        inner = dataclasses.replace(result.watched, rewards=result.watched.rewards + [0, 1, 2, -5, -6, -7][k])
        return dataclasses.replace(result, rewards=result.rewards + k, watched=inner)

    monkeypatch.setattr(trainer, "evaluate", hacked)
    recipe = small(iterations=9, lr=1e-5, **WATCHING, **EVALUATED)
    (tmp_path / "recipe.yaml").write_text(recipes.dump(recipe))
    assert main(["train", str(tmp_path / "recipe.yaml"), "--name", "run", "--out", str(tmp_path)]) == 1
    printed = capsys.readouterr().out
    assert "stopped by the guard max_watch_drop" in printed
    assert "watched redness, not trained on" in printed
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["iterations"], summary["best_iteration"]) == (4, 2)
    assert summary["improvement"]["low"] > 0 > summary["watched"]["change"]["high"]
    assert checkpoint.read(tmp_path / "run" / "checkpoints" / "best").iteration == 2
    page = (tmp_path / "run" / "report.html").read_text()
    assert "became worse while the reward that was trained on rose: it was hacked" in page
    assert "The best checkpoint is that of iteration 2." in page


# --- other commands -------------------------------------------------------------------------------------------------


def test_eval_may_ask_for_the_watched_reward_itself(small, tmp_path, capsys):
    run(small(model=None, watch="compose", iterations=1, eval_every=0), tmp_path / "run")
    flags = ["--rewards", "compose", "--prompts", "6", "--json"]
    assert main(["eval", str(tmp_path / "run"), *flags]) == 0
    assert "compose" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("reward", "watch", "expected"),
    [
        ("pickscore", "clip_l14_cos", ("tiny_pickscore", "jpeg_size")),
        ("pickscore", "aesthetic", ("tiny_pickscore", "jpeg_size")),
        ("aesthetic", "pickscore", ("jpeg_size", "tiny_pickscore")),
        ("aesthetic", "imagereward", ("jpeg_size", "tiny_pickscore")),
        ("pickscore", None, ("tiny_pickscore", None)),
    ],
)
def test_a_rehearsal_watches_a_stand_in_of_its_own(reward, watch, expected):
    recipe = recipes.load("sd35-pickscore-uniform", {"reward": reward, "watch": watch})
    tiny = rehearsal.rehearsed(recipe)
    assert (tiny.reward, tiny.watch) == expected
