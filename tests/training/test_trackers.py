"""Trackers: everything reaches them, resumed runs are not doubled, and a tracker that fails never costs a run."""

import os
import sys
import tempfile

import pytest
import torch
from run_cases import run

from stepcredit.errors import UserError
from stepcredit.training import trackers
from stepcredit.training.telemetry import make_display

# read when trackio is imported: the tests must not write into the store of whoever runs them
os.environ["TRACKIO_DIR"] = tempfile.mkdtemp(prefix="trackio-")


class Recording:
    """A tracker that keeps what it is told; it fails at the iteration it was given."""

    def __init__(self, failing=None):
        self.told, self.pictures, self.closed, self.failing = [], [], False, failing

    def scalars(self, values, iteration):
        if iteration == self.failing:
            raise OSError("the disk of the tracker is full")
        self.told.append((iteration, values))

    def image(self, name, pixels, iteration):
        self.pictures.append((name, pixels.shape, iteration))

    def close(self):
        self.closed = True


class Messages:
    """A display that keeps its messages and what it is passed."""

    def __init__(self):
        self.messages, self.calls = [], []

    def __getattr__(self, name):
        return lambda *args: self.messages.append(args[0]) if name == "message" else self.calls.append(name)


def test_numbers_are_named_by_their_place_and_all_else_is_left_out():
    line = {
        "iteration": 3,
        "reward": {"mean": 0.5, "low": None},
        "gain_mean": [0.25, None, -1],
        "trained": [True, False],
        "evaluation": {"per_tag": {"colors": 0.75}, "exact": None},
        "loss": float("nan"),
    }
    assert dict(trackers.flat(line)) == {
        "reward/mean": 0.5,
        "gain_mean/step-00": 0.25,
        "gain_mean/step-02": -1.0,
        "evaluation/per_tag/colors": 0.75,
    }


def test_a_tracked_display_passes_everything_on_and_tells_the_tracker(tmp_path):
    inner, tracker = Messages(), Recording()
    display = trackers.TrackedDisplay(inner, tmp_path, lambda folder, told: tracker, "recording")
    display.start(2, 0, ["a header"])
    display.phase("rollout", 1, 2)
    display.iteration({"iteration": 1, "loss": 0.5})
    display.images(1, torch.zeros(6, 16, 48, 3, dtype=torch.uint8))
    display.stop()
    assert inner.calls == ["start", "phase", "iteration", "images", "stop"]
    assert tracker.told == [(1, {"loss": 0.5})]
    # 6 pictures in 3 columns and 2 rows, 8 times as large, 2 pixels apart
    assert tracker.pictures == [("held-out", (2 * 130 - 2, 3 * 386 - 2, 3), 1)]
    assert tracker.closed


def test_nothing_is_opened_before_there_is_something_to_tell(tmp_path):
    opened = []
    display = trackers.TrackedDisplay(Messages(), tmp_path, lambda *_: opened.append(1) or Recording(), "recording")
    display.start(2, 0, [])
    display.stop()
    assert opened == []


def test_a_tracker_that_fails_says_so_once_and_is_left_alone(tmp_path):
    inner, tracker = Messages(), Recording(failing=2)
    display = trackers.TrackedDisplay(inner, tmp_path, lambda folder, told: tracker, "recording")
    display.start(3, 0, [])
    for iteration in (1, 2, 3):
        display.iteration({"iteration": iteration, "loss": 0.0})
    display.stop()
    assert [iteration for iteration, _ in tracker.told] == [1]
    assert len(inner.messages) == 1
    assert "the disk of the tracker is full" in inner.messages[0]
    assert inner.calls.count("iteration") == 3


def test_a_tracker_that_cannot_be_opened_costs_nothing(tmp_path, small, monkeypatch):
    def broken(folder, told):
        raise PermissionError("no")

    monkeypatch.setattr(trackers, "_TensorBoard", broken)
    monkeypatch.setattr(trackers, "require", lambda name: None)
    assert run(small(tracker="tensorboard"), tmp_path / "run")["iterations"] == 4


@pytest.mark.parametrize("name", ["tensorboard", "trackio"])
def test_a_tracker_that_is_not_installed_is_refused_before_the_run(tmp_path, small, monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UserError, match=r"pip install .stepcredit\[track\]"):
        run(small(tracker=name), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_tensorboard_has_every_iteration_once_also_after_a_resume(tmp_path, small):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = tmp_path / "run"
    run(small(tracker="tensorboard", iterations=3), folder)
    # as if it had been killed after iteration 3 was told and before it was saved
    for path in (folder / "checkpoints" / "step-000003").glob("*"):
        path.unlink()
    run(small(tracker="tensorboard", iterations=4), folder, resume=True)
    seen = EventAccumulator(str(folder / "tensorboard"), size_guidance={"images": 0, "scalars": 0}).Reload()
    assert [event.step for event in seen.Scalars("reward/mean")] == [1, 2, 3, 4]
    assert seen.Scalars("evaluation/mean")[0].step == 0
    assert {"gain_mean/step-00", "gain_spread/step-00", "lr", "evaluation/image_statistics/contrast"} <= set(
        seen.Tags()["scalars"]
    )
    assert 0 in [event.step for event in seen.Images("held-out")]
    assert seen.Images("held-out")[-1].step == 4


def test_trackio_has_every_iteration_once_also_after_a_resume(tmp_path, small, monkeypatch):
    trackio = pytest.importorskip("trackio")
    folder = tmp_path / "run"
    run(small(tracker="trackio", iterations=2), folder)
    first = (folder / "trackio.txt").read_text().strip()
    run(small(tracker="trackio", iterations=4), folder, resume=True)
    name = (folder / "trackio.txt").read_text().strip()
    found = [one.name for one in trackio.Api().runs(trackers.PROJECT)]
    assert name in found
    assert first not in found
    from trackio.sqlite_storage import SQLiteStorage

    logs = SQLiteStorage.get_logs(trackers.PROJECT, name)
    assert sorted(line["step"] for line in logs if "reward/mean" in line) == [1, 2, 3, 4]
    assert any("held-out" in line for line in logs)


def test_without_a_tracker_the_display_is_the_same_object(tmp_path):
    display = make_display(quiet=True)
    assert trackers.tracked("none", tmp_path, display) is display


def test_a_run_that_gets_tensorboard_when_it_is_resumed_is_told_from_its_beginning(tmp_path, small):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = tmp_path / "run"
    run(small(iterations=2), folder)
    run(small(iterations=3, tracker="tensorboard"), folder, resume=True)
    seen = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    assert [event.step for event in seen.Scalars("reward/mean")] == [1, 2, 3]
