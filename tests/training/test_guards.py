"""Guards: what is injected never reaches the weights, and limits stop a run, with a sentence, the best kept."""

import dataclasses
import json
import math

import pytest
import torch
from run_cases import KEYS, assert_equal, final, lines, run

from stepcredit.cli import main
from stepcredit.errors import UserError
from stepcredit.policies.desk import DeskPolicy
from stepcredit.rewards import registry
from stepcredit.rewards.base import RewardError, RewardInfo
from stepcredit.tasks import Prompt
from stepcredit.training import checkpoint, guards, iteration
from stepcredit.training import recipe as recipes
from stepcredit.training.evaluation import Evaluation, slots
from stepcredit.training.guards import GuardState, after_evaluation, after_iteration, spike_limit
from stepcredit.training.setup import Setup, setup
from stepcredit.training.update import UpdateStats, apply

# --- decisions ------------------------------------------------------------------------------------------------------


def test_a_spike_is_far_above_the_median_of_the_norms_before_it():
    norms = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 80.0]
    assert spike_limit(norms, 10.0) == 45.0  # ten times the mean of 4 and 5: the outlier has no say
    assert spike_limit(norms[1:], 10.0) == math.inf  # seven norms are too few
    assert spike_limit(norms, None) == math.inf
    assert spike_limit([0.0] * 6 + [1.0, 2.0], 10.0) == math.inf  # without a usual norm nothing is unusual


def test_skipped_updates_leave_the_memory_of_norms_alone_and_old_norms_leave_it():
    state = GuardState()
    for k in range(guards.HISTORY + 3):
        state.note(float(k), None)
    state.note(1e9, "spike")
    state.note(math.nan, "not_finite")
    assert state.norms == [float(k) for k in range(3, guards.HISTORY + 3)]
    assert (state.in_a_row, state.skipped) == (2, {"not_finite": 1, "spike": 1})
    state.note(1.0, None)
    assert state.in_a_row == 0
    again = GuardState.from_dict(json.loads(json.dumps(state.as_dict())))
    assert again == state
    assert GuardState.from_dict({}) == GuardState()


@pytest.mark.parametrize("optimiser", [torch.optim.AdamW, torch.optim.SGD])
def test_a_spike_moves_neither_weights_nor_moments(optimiser):
    parameter = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    made = optimiser([parameter], lr=0.1)

    def step(gradient, spike):
        parameter.grad = torch.tensor(gradient)
        stats = UpdateStats(0.0, 0.0, torch.zeros(1), torch.zeros(1))
        return apply(made, [parameter], stats, 1.0, unit_length=optimiser is torch.optim.SGD, spike=spike), stats

    done, stats = step([3.0, 4.0], spike=5.0)  # a norm of 5 is not above 5
    assert (done, stats.skip, stats.grad_norm) == (True, None, 5.0)
    before = parameter.detach().clone(), json.dumps(made.state_dict()["state"], default=lambda t: t.tolist())
    for gradient, skip in (([3.0, 4.001], "spike"), ([math.inf, 0.0], "not_finite"), ([math.nan, 0.0], "not_finite")):
        done, stats = step(gradient, spike=5.0)
        assert (done, stats.skip) == (False, skip)
        assert torch.equal(parameter.detach(), before[0])
        assert json.dumps(made.state_dict()["state"], default=lambda t: t.tolist()) == before[1]
        assert parameter.grad is None


def test_limits_on_kl_and_ratio_fire_above_them_and_name_the_number():
    recipe = recipes.build({"kl_beta": 0.1, "max_kl": 0.2, "max_ratio_deviation": 1e-3})
    state = GuardState()
    assert after_iteration(recipe, state, 7, [math.nan, 0.1, 0.3], 1e-3) is None  # a mean of 0.2 is allowed
    assert after_iteration(recipe, state, 7, None, 0.0) is None
    fired = after_iteration(recipe, state, 7, [math.nan, 0.1, 0.32], 0.0)
    assert (fired.guard, fired.iteration) == ("max_kl", 7)
    assert "0.21" in fired.reason
    assert state.fired == fired
    fired = after_iteration(recipe, state, 8, [0.0], 2e-3)
    assert fired.guard == "max_ratio_deviation"
    assert "0.002" in fired.reason
    assert after_iteration(recipe, state, 9, [0.0], math.inf).guard == "max_ratio_deviation"


def evaluation(rewards, **statistics):
    prompts = [Prompt(f"prompt {k}", {}) for k in range(len(rewards))]
    return Evaluation(tuple(slots(prompts)), torch.tensor(rewards), None, torch.zeros(0, 1, 1, 3), statistics)


def test_a_fall_of_the_held_out_reward_is_paired_lasting_and_measured_in_deviations():
    base = evaluation([0.0, 2.0] * 8)  # standard deviation 1
    recipe, state = recipes.build({"max_reward_drop": 0.5, "patience": 2}), GuardState()

    def judge(now, best=base, iteration=1):
        return after_evaluation(recipe, state, iteration, now, best, 0, base)

    slight, deep = (evaluation([r - fall for r in [0.0, 2.0] * 8]) for fall in (0.45, 0.55))
    uneven = evaluation([-13.0 if k == 0 else r + 0.4 for k, r in enumerate([0.0, 2.0] * 8)])
    assert judge(slight) is None
    assert state.falls == 0  # below the limit
    assert judge(deep) is None
    assert state.falls == 1  # once is not enough
    assert judge(slight) is None
    assert state.falls == 0  # it has to last
    assert judge(uneven, best=evaluation([r + 0.2 for r in [0.0, 2.0] * 8])) is None
    assert state.falls == 0  # 0.64 below on average, but one prompt is all of it: the interval reaches above 0
    assert judge(deep) is None
    fired = judge(deep, iteration=40)
    assert (fired.guard, fired.iteration) == ("max_reward_drop", 40)
    assert "0.55 [0.55, 0.55] below the base model's" in fired.reason
    assert "0.5 (max_reward_drop = 0.5 standard deviations)" in fired.reason
    few = evaluation([0.0, 2.0] * 7 + [1.0]), evaluation([-1.0, 1.0] * 7 + [0.0])
    assert all(after_evaluation(recipe, GuardState(falls=1), 1, few[1], few[0], 0, few[0]) is None for _ in range(3))
    off = recipes.build({"max_reward_drop": None, "patience": 1})
    assert after_evaluation(off, GuardState(), 1, evaluation([-99.0] * 16), base, 0, base) is None


def test_images_that_move_away_from_the_base_models_are_named_by_the_statistic_that_moved_most():
    base = evaluation([0.0, 1.0], contrast=0.2, diversity=0.4, brightness=0.0)
    now = evaluation([0.0, 1.0], contrast=0.15, diversity=0.1, brightness=0.5)
    assert guards.image_drift(base.statistics, now.statistics) == pytest.approx({"diversity": -0.75, "contrast": -0.25})
    recipe = recipes.build({"max_image_drift": 0.7})
    fired = after_evaluation(recipe, GuardState(), 3, now, base, 0, base)
    assert fired.guard == "max_image_drift"
    assert "diversity of the held-out images moved by -75%" in fired.reason
    assert after_evaluation(recipes.build({"max_image_drift": 0.8}), GuardState(), 3, now, base, 0, base) is None


@pytest.mark.parametrize(("keys", "word"), [({"max_kl": 0.1}, "kl_beta 0"), ({"max_image_drift": 0.1}, "eval_every")])
def test_limits_on_what_is_not_measured_are_refused(keys, word):
    with pytest.raises(UserError, match=word):
        recipes.build({"eval_every": 0, **keys})


# --- injected faults ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory, tiny_model):
    """An uninterrupted run, every checkpoint kept."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    recipe = recipes.load("compose-stepwise", {**KEYS, "model": str(tiny_model), "keep_checkpoints": 9})
    run(recipe, folder)
    return recipe, folder


class At:
    """Counts iterations, and faults in one of them."""

    def __init__(self, monkeypatch, iteration_number):
        self.now, self.wanted = 0, iteration_number
        original = Setup.batch

        def counting(parts, number):
            self.now += 1
            return original(parts, number)

        monkeypatch.setattr(Setup, "batch", counting)

    def __bool__(self):
        return self.now == self.wanted


@pytest.mark.parametrize("value", [math.nan, math.inf], ids=["nan", "inf"])
@pytest.mark.parametrize(("step", "replayed"), [(0, False), (3, False), (2, True)])
def test_an_activation_that_is_not_finite_names_iteration_and_step_and_never_reaches_the_weights(
    whole, tmp_path, value, step, replayed
):
    recipe, folder = whole
    grid = DeskPolicy.initial("compose", hidden=16, depth=1, heads=2).grid(recipe.steps).float()
    with pytest.MonkeyPatch.context() as patch:
        at, original = At(patch, 3), DeskPolicy.velocity

        def broken(self, x, t, cond):
            v = original(self, x, t, cond)
            bad = at and torch.is_grad_enabled() == replayed and float(t[0]) == float(grid[step])
            return v.index_fill(0, torch.tensor(0), value) if bad else v

        patch.setattr(DeskPolicy, "velocity", broken)
        with pytest.raises(FloatingPointError, match=f"step {step}" + (" of the replay" if replayed else "")):
            run(recipe, tmp_path / "run")
    assert checkpoint.load(tmp_path / "run" / "checkpoints").iteration == 2
    run(recipe, tmp_path / "run", resume=True)
    assert_equal(final(tmp_path / "run"), final(folder))
    assert lines(tmp_path / "run") == lines(folder)


@pytest.mark.parametrize("value", [math.nan, -math.inf], ids=["nan", "inf"])
def test_a_reward_that_is_not_finite_never_reaches_the_weights(whole, tmp_path, monkeypatch, value):
    recipe, folder = whole
    with monkeypatch.context() as patch:
        at, original = At(patch, 2), registry.get("jpeg_size")

        class Faulty:
            info = RewardInfo(name="faulty", range=(-100.0, 0.0), licence="", description="")
            self_test = original.self_test

            def __call__(self, images, prompts, metadata):
                rewards = original(images, prompts, metadata)
                return rewards.index_fill(0, torch.tensor(2), value) if at else rewards

        patch.setitem(registry._registered, "jpeg_size", Faulty)
        with pytest.raises(RewardError, match="faulty"):
            run(recipe, tmp_path / "run")
    assert checkpoint.load(tmp_path / "run" / "checkpoints").iteration == 1
    run(recipe, tmp_path / "run", resume=True)
    assert_equal(final(tmp_path / "run"), final(folder))


@pytest.mark.parametrize("fault", [math.nan, math.inf, 1e6], ids=["nan", "inf", "spike"])
def test_a_gradient_fault_is_skipped_counted_and_leaves_everything_as_it_was(whole, tmp_path, monkeypatch, fault):
    recipe, _ = whole
    monkeypatch.setattr(guards, "WARM_UP", 2)
    at, original = At(monkeypatch, 3), iteration.apply

    def faulty(optimiser, parameters, *args):
        if at:
            parameters[2].grad.view(-1)[0] = fault
        return original(optimiser, parameters, *args)

    monkeypatch.setattr(iteration, "apply", faulty)
    summary = run(recipe, tmp_path / "run")
    kind = "spike" if math.isfinite(fault) else "not_finite"
    assert summary["guards"]["skipped_updates"] == {"spike": 0, "not_finite": 0, kind: 1}
    assert summary["guards"]["fired"] is summary["stopped"] is None
    assert [line["skipped_updates"] for line in lines(tmp_path / "run")[1:]] == [0, 0, 1, 0]
    steps = [checkpoint.read(path).tensors for path in reversed(checkpoint.steps(tmp_path / "run" / "checkpoints"))]
    assert len(steps) == 4
    assert_equal(steps[2], steps[1])  # weights, average and moments
    assert any(not torch.equal(t, steps[2]["weights"][name]) for name, t in steps[3]["weights"].items())
    assert "1 updates were skipped" in (tmp_path / "run" / "report.html").read_text()


# --- runs that are stopped ------------------------------------------------------------------------------------------


@pytest.fixture
def always_nan(monkeypatch):
    original = iteration.apply

    def faulty(optimiser, parameters, *args):
        parameters[0].grad.fill_(math.nan)
        return original(optimiser, parameters, *args)

    monkeypatch.setattr(iteration, "apply", faulty)


def test_skips_in_a_row_stop_the_run_and_their_count_survives_a_resume(tmp_path, small, always_nan):
    assert run(small(iterations=2, max_skips=3), tmp_path / "run")["guards"]["fired"] is None
    summary = run(small(iterations=9, max_skips=3), tmp_path / "run", resume=True)
    assert summary["iterations"] == 3
    assert summary["guards"]["fired"]["guard"] == "max_skips"
    assert summary["stopped"] == summary["guards"]["fired"]["reason"]
    assert "the last 3 updates were skipped" in summary["stopped"]


def test_a_run_that_a_guard_stopped_stays_stopped_until_a_limit_changes(tmp_path, small):
    keys = {"updates_per_rollout": 2, "max_ratio_deviation": 1e-9}
    first = run(small(**keys), tmp_path / "run")
    assert first["iterations"] == 1
    assert first["guards"]["fired"]["guard"] == "max_ratio_deviation"
    assert checkpoint.load(tmp_path / "run" / "checkpoints").iteration == 1
    again = run(small(**keys), tmp_path / "run", resume=True)
    assert {key: again[key] for key in ("iterations", "stopped", "guards", "reward_after", "image_statistics")} == {
        key: first[key] for key in ("iterations", "stopped", "guards", "reward_after", "image_statistics")
    }
    more = run(small(**keys | {"max_ratio_deviation": None}), tmp_path / "run", resume=True)
    assert (more["iterations"], more["stopped"], more["guards"]["fired"]) == (4, None, None)
    run(small(**keys | {"max_ratio_deviation": None}), tmp_path / "straight")
    assert_equal(final(tmp_path / "run"), final(tmp_path / "straight"))


def test_the_kl_limit_stops_a_run(tmp_path, small):
    summary = run(small(kl_beta=0.01, max_kl=1e-12), tmp_path / "run")
    assert summary["guards"]["fired"]["guard"] == "max_kl"
    assert summary["iterations"] == 2  # at the first iteration the model is still the base model


EVALUATED = {"eval_prompts": guards.FEWEST, "eval_prompts_during": guards.FEWEST}


def test_a_held_out_reward_that_keeps_falling_stops_the_run_with_the_best_checkpoint_kept(
    tmp_path, tiny_model, monkeypatch, capsys
):
    from stepcredit.training import trainer

    evaluate, calls = trainer.evaluate, []

    def falling(*args, **kwargs):
        result = evaluate(*args, **kwargs)
        calls.append(len(calls))
        offset = [0, 1, 2, -5, -6, -7][calls[-1]]
        return dataclasses.replace(result, rewards=result.rewards + offset)

    monkeypatch.setattr(trainer, "evaluate", falling)
    recipe = recipes.load(
        "compose-stepwise", {**KEYS, "model": str(tiny_model), "eval_every": 1, "iterations": 9, **EVALUATED}
    )
    (tmp_path / "recipe.yaml").write_text(recipes.dump(recipe))
    code = main(["train", str(tmp_path / "recipe.yaml"), "--name", "run", "--out", str(tmp_path)])
    assert code == 1
    printed = capsys.readouterr().out
    assert "stopped by the guard max_reward_drop" in printed
    assert "that of iteration 2" in printed
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["iterations"], summary["best_iteration"]) == (4, 2)
    assert "below that of iteration 2" in summary["stopped"]
    assert checkpoint.read(tmp_path / "run" / "checkpoints" / "best").iteration == 2
    page = (tmp_path / "run" / "report.html").read_text()
    assert "max_reward_drop" in page
    assert "The best checkpoint is that of iteration 2." in page
    assert main(["export", str(tmp_path / "run"), "--to", str(tmp_path / "out")]) == 0
    assert "taking the best checkpoint, of iteration 2" in capsys.readouterr().out
    card = (tmp_path / "out" / "README.md").read_text()
    assert "2 iterations of" in card
    assert "| after | not measured |" in card  # the summary's figure is of the last weights


def test_image_drift_stops_a_run_also_after_a_resume(tmp_path, small):
    keys = {"max_image_drift": 1e-9, "eval_every": 2}
    run(small(iterations=1, **keys), tmp_path / "run")
    summary = run(small(iterations=6, **keys), tmp_path / "run", resume=True)
    assert (summary["iterations"], summary["guards"]["fired"]["guard"]) == (2, "max_image_drift")
    assert set(summary["image_statistics"]["before"]) == set(summary["image_statistics"]["after"])


def test_images_of_a_policy_that_are_not_finite_are_not_scored(small, monkeypatch):
    from stepcredit.rewards.base import require_finite
    from stepcredit.training.evaluation import evaluate

    images = torch.rand(3, 3, 8, 8)
    require_finite(images, ["a", "b", "c"])
    images[1, 0, 0, 0] = math.nan
    with pytest.raises(FloatingPointError, match=r"image of sample 1 \(prompt 'b'\)"):
        require_finite(images, ["a", "b", "c"])
    parts = setup(small())
    decode = type(parts.policy).decode
    monkeypatch.setattr(type(parts.policy), "decode", lambda self, x: decode(self, x).fill_(math.nan))
    with pytest.raises(FloatingPointError, match="image of sample 0"):
        evaluate(parts.policy, parts.reward, parts.heldout[:4], 2, 4)
