"""Runs from beginning to end: what they write, that they can be cut anywhere, and that nothing changes for it."""

import json
import os
import shutil
import signal

import pytest
import torch
from run_cases import KEYS, assert_equal, final, lines, run
from safetensors.torch import load_file

from stepcredit.errors import UserError
from stepcredit.rewards import registry
from stepcredit.rewards.base import RewardError, RewardInfo
from stepcredit.training import checkpoint
from stepcredit.training import recipe as recipes
from stepcredit.training.files import sole_writer
from stepcredit.training.trainer import train


@pytest.fixture(scope="module")
def whole(tmp_path_factory, tiny_model):
    """An uninterrupted run."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    recipe = recipes.load("compose-stepwise", {**KEYS, "model": str(tiny_model)})
    return recipe, folder, run(recipe, folder)


def test_a_run_writes_what_the_documentation_promises(whole):
    _, folder, summary = whole
    assert {"recipe.yaml", "metrics.jsonl", "summary.json", "ledger.json", "report.html", "checkpoints", "samples"} <= {
        path.name for path in folder.iterdir()
    }
    assert (folder / "checkpoints" / "latest" / "weights.safetensors").is_file()
    stored = json.loads((folder / "summary.json").read_text())
    for key in ("reward_before", "reward_after"):
        assert stored[key]["low"] <= stored[key]["mean"] <= stored[key]["high"]
    assert stored["iterations"] == summary["iterations"] == 4
    assert stored["seconds"] > 0
    per_iteration = json.loads((folder / "ledger.json").read_text())["trajectories"]
    assert per_iteration == 8
    entries = lines(folder)
    assert [entry["iteration"] for entry in entries] == [0, 1, 2, 3, 4]
    assert stored["model_evaluations"] == entries[-1]["model_evaluations"]
    assert all(entry["ratio_deviation"] == 0 for entry in entries[1:])
    assert entries[2]["evaluation"]["prompts"] == 6


def test_gains_in_the_log_telescope(whole):
    _, folder, _ = whole
    for entry in lines(folder)[1:]:
        total = sum(entry["gain_mean"])
        assert total == pytest.approx(entry["R_mean"][-1] - entry["R_mean"][0], abs=1e-5)
        assert entry["reward"]["mean"] == pytest.approx(entry["R_mean"][-1], abs=1e-6)


def test_the_same_seed_gives_the_same_bytes_and_another_seed_does_not(whole, tmp_path):
    recipe, folder, _ = whole
    run(recipe, tmp_path / "again")
    assert lines(tmp_path / "again") == lines(folder)
    assert_equal(final(tmp_path / "again"), final(folder))
    run(recipe.model_copy(update={"seed": 1}), tmp_path / "other")
    assert lines(tmp_path / "other") != lines(folder)


def test_a_run_resumed_after_any_iteration_ends_with_the_same_bits(whole, tmp_path, small):
    _, folder, _ = whole
    for cut in (1, 2, 3):
        part = tmp_path / f"cut-{cut}"
        run(small(iterations=cut), part)
        run(small(), part, resume=True)
        assert_equal(final(part), final(folder))
        assert lines(part) == lines(folder)  # with the evaluation that the end of the shorter run stood in for
        mine, theirs = (checkpoint.load(one / "checkpoints").state for one in (part, folder))
        assert {**mine, "seconds": 0} == {**theirs, "seconds": 0}


def test_interrupted_runs_end_after_the_iteration_saved(tmp_path, small):
    class Interrupting:
        """A display that sends Ctrl-C to its own process once, in the middle of an iteration."""

        def __init__(self):
            self.sent = False
            self.messages = []

        def start(self, total, done, header): ...

        def phase(self, name, done, total):
            if name == "rollout" and not self.sent:
                self.sent = True
                os.kill(os.getpid(), signal.SIGINT)

        def iteration(self, metrics): ...

        def images(self, iteration, images): ...

        def message(self, text):
            self.messages.append(text)

        def stop(self): ...

    display = Interrupting()
    summary = train(small(), tmp_path / "run", display)
    assert summary["signal"] == signal.SIGINT
    assert summary["iterations"] == 1
    assert summary["reward_after"] is None
    assert "saved" in display.messages[0]
    assert checkpoint.load(tmp_path / "run" / "checkpoints").iteration == 1
    assert run(small(), tmp_path / "run", resume=True)["iterations"] == 4


def test_resume_refuses_another_recipe_and_names_the_keys(whole, tmp_path, small):
    _, folder, _ = whole
    with pytest.raises(UserError, match=r"lr \(was 0.01, now 0.002\)"):
        run(small(lr=2e-3), folder, resume=True)


@pytest.mark.parametrize("micro_batch", [1, 2, 8])
def test_the_micro_batch_changes_rounding_only(whole, tmp_path, small, micro_batch):
    _, folder, _ = whole
    run(small(micro_batch=micro_batch), tmp_path / "run")
    mine, theirs = final(tmp_path / "run")["weights"], final(folder)["weights"]
    for name, tensor in mine.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=0, atol=2e-3)
    first, other = lines(tmp_path / "run")[1], lines(folder)[1]
    assert first["R_mean"] == pytest.approx(other["R_mean"], abs=2e-3)
    assert first["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-3)


@pytest.mark.parametrize("name", [name for name in recipes.names() if name.startswith("compose-")])
def test_every_bundled_recipe_trains(tmp_path, small, name):
    recipe = recipes.load(name)
    window = (0, 4) if recipe.window else None
    summary = run(small(name, iterations=1, window=window), tmp_path / "run")
    assert summary["iterations"] == 1
    entry = lines(tmp_path / "run")[1]
    assert entry["ratio_deviation"] == 0
    assert entry["grad_norm"] > 0


def test_optional_parts_train_together(tmp_path, small):
    recipe = small(
        kl_beta=0.1, kl="velocity", updates_per_rollout=2, window_size=2, credit="turning_point_smooth",
        advantage="joint", global_std=True, lr_schedule="cosine", warmup=2, ema=0.0, step_weight="std", iterations=2,
    )  # fmt: skip
    run(recipe, tmp_path / "run")
    entries = lines(tmp_path / "run")
    assert entries[2]["stale_share"] == 0.5
    assert any(value for value in entries[2]["kl"] if value)


class Faulty:
    """jpeg_size with a fault."""

    def __init__(self, fault):
        self.inner = registry.get("jpeg_size")
        self.info = RewardInfo(name="faulty", range=(-100.0, 0.0), licence="", description="")
        self.fault = fault

    def __call__(self, images, prompts, metadata):
        return self.fault(self.inner(images, prompts, metadata))

    def self_test(self):
        return self.inner.self_test()


def constant(r):
    """Nothing but zeros, except for the self-test's pair."""
    return torch.zeros_like(r) if len(r) > 2 else r


FAULTS = {
    "wrong length": (lambda r: r[:-1], "shape"),
    "wrong type": (lambda r: r.tolist(), "list"),
    "infinite": (lambda r: torch.where(torch.arange(len(r)) == 1, torch.inf, r), "infinite"),
    "constant": (constant, "constant"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_rewards_that_break_their_contract_stop_the_run_with_a_sentence(tmp_path, small, monkeypatch, fault):
    function, word = FAULTS[fault]
    monkeypatch.setitem(registry._registered, "faulty", lambda: Faulty(function))
    with pytest.raises(RewardError, match=word) as caught:
        run(small(reward="faulty"), tmp_path / "run")
    assert "'faulty'" in str(caught.value)


def test_a_run_that_failed_before_it_began_may_be_begun_again_under_its_name(tmp_path, small, monkeypatch):
    monkeypatch.setitem(registry._registered, "faulty", lambda: Faulty(constant))
    with pytest.raises(RewardError):
        run(small(reward="faulty"), tmp_path / "run")
    run(small(iterations=1), tmp_path / "run")
    with pytest.raises(UserError, match="exists"):
        run(small(iterations=1), tmp_path / "run")


def test_failed_samples_end_the_run_or_leave_their_group(tmp_path, small, monkeypatch):
    monkeypatch.setitem(registry._registered, "faulty", lambda: Faulty(some_nan))
    with pytest.raises(RewardError, match="on_reward_failure"):
        run(small(reward="faulty"), tmp_path / "fail")
    run(small(reward="faulty", on_reward_failure="drop"), tmp_path / "drop")
    entries = lines(tmp_path / "drop")
    assert all(entry["failed_samples"] > 0 for entry in entries[1:])
    assert all(torch.isfinite(t).all() for t in final(tmp_path / "drop")["weights"].values())


def some_nan(rewards):
    return torch.where(torch.arange(len(rewards)) % 5 == 3, torch.nan, rewards)


def test_a_velocity_that_is_not_finite_names_the_step(tmp_path, small, monkeypatch):
    from stepcredit.policies.desk import DeskPolicy

    original = DeskPolicy.velocity

    def broken(self, x, t, cond):
        v = original(self, x, t, cond)
        return torch.where((t < 0.9).view(-1, 1, 1, 1), torch.nan, v) if torch.is_grad_enabled() else v

    monkeypatch.setattr(DeskPolicy, "velocity", broken)
    with pytest.raises(FloatingPointError, match="step 2 of the replay"):
        run(small(iterations=1), tmp_path / "run")


def test_weights_of_the_latest_checkpoint_are_plain_safetensors(whole):
    _, folder, _ = whole
    found = load_file(folder / "checkpoints" / "latest" / "weights.safetensors")
    assert all(torch.isfinite(tensor).all() for tensor in found.values())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_states_stored_in_half_precision_are_scored_as_stored(tmp_path, small, dtype):
    """The ratio is exactly 1 all the same, and the run is another one than in float32."""
    run(small(latent_dtype=dtype, iterations=1), tmp_path / "half")
    run(small(iterations=1), tmp_path / "full")
    half, full = lines(tmp_path / "half")[1], lines(tmp_path / "full")[1]
    assert half["ratio_deviation"] == 0
    assert half["R_mean"] != full["R_mean"]
    assert half["R_mean"] == pytest.approx(full["R_mean"], abs=0.1)


def test_reward_options_reach_the_reward(tmp_path, small):
    run(small(reward_options={"goal": "large"}, iterations=1), tmp_path / "large")
    run(small(iterations=1), tmp_path / "small")
    assert lines(tmp_path / "large")[0]["evaluation"]["mean"] == pytest.approx(
        -lines(tmp_path / "small")[0]["evaluation"]["mean"], rel=1e-6
    )
    with pytest.raises(UserError, match="goal"):
        run(small(reward_options={"goaal": "large"}), tmp_path / "wrong")


def test_a_run_has_one_writer(tmp_path, small):
    folder = tmp_path / "run"
    run(small(iterations=1), folder)
    before = (folder / "recipe.yaml").read_bytes(), (folder / "metrics.jsonl").read_bytes()
    with sole_writer(folder), pytest.raises(UserError, match=r"another process is training the run .* end it first"):
        run(small(iterations=2), folder, resume=True)
    assert before == ((folder / "recipe.yaml").read_bytes(), (folder / "metrics.jsonl").read_bytes())
    assert run(small(iterations=2), folder, resume=True)["iterations"] == 2


def test_a_folder_that_another_process_has_just_taken_is_left_to_it(tmp_path, small):
    folder = tmp_path / "run"
    folder.mkdir()
    with sole_writer(folder), pytest.raises(UserError, match="another process is training the run"):
        run(small(iterations=1), folder)
    assert list(folder.iterdir()) == []


def test_what_a_kill_at_the_very_end_left_is_tidied_by_a_resume(whole, tmp_path):
    recipe, folder, _ = whole
    shutil.copytree(folder, tmp_path / "run", symlinks=True)
    left = tmp_path / "run" / "checkpoints" / "step-000001.tmp"
    left.mkdir()
    run(recipe, tmp_path / "run", resume=True)
    assert not left.exists()
