"""Rewards asked without waiting: who judges where, how many at a time, and what becomes of failures."""

import threading

import pytest
import torch

from stepcredit.rewards.asking import Asking, at_a_time
from stepcredit.rewards.base import RewardError, RewardInfo, judge
from stepcredit.rewards.composite import Composite
from stepcredit.rewards.meter import metered

PATIENCE = 30  # seconds after which a test that waits has failed


class Shade:
    """Mean of the picture, by a server that takes ``concurrent`` calls; ``before`` is called in each."""

    per_image = True

    def __init__(self, concurrent=1, before=lambda: None, name="shade"):
        self.concurrent, self.before = concurrent, before
        self.info = RewardInfo(name, (0.0, 1.0), "own", "mean", batch_size=4)
        self.threads = []

    def __call__(self, images, prompts, metadata):
        self.threads.append(threading.get_ident())
        self.before()
        return images.mean(dim=(1, 2, 3))


def pieces(count, size=2):
    """Pieces of pictures whose mean is known: piece k has 0.1 k, then 0.1 k + 0.05."""
    for k in range(count):
        values = torch.tensor([0.1 * k + 0.05 * j for j in range(size)])
        yield values.view(-1, 1, 1, 1).expand(-1, 3, 2, 2), ["a"] * size, [{}] * size


def ask_all(reward, count):
    with Asking(reward) as asking:
        answers = [asking(*piece) for piece in pieces(count)]
        return [answer() for answer in answers]


def test_answers_come_in_the_order_of_the_questions():
    for concurrent in (1, 3):
        found = torch.cat([one.score for one in ask_all(Shade(concurrent), 7)])
        assert found.tolist() == pytest.approx([0.1 * k + 0.05 * j for k in range(7) for j in (0, 1)])


def test_a_reward_that_waits_for_nobody_is_asked_in_the_callers_thread():
    reward = Shade()
    ask_all(reward, 3)
    assert set(reward.threads) == {threading.get_ident()}


def test_calls_to_a_server_are_under_way_together_and_no_more_than_it_takes():
    together = threading.Barrier(3)
    lock, running, most = threading.Lock(), [0], [0]

    def count():
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        together.wait(PATIENCE)  # broken unless three are here at once
        with lock:
            running[0] -= 1

    reward = Shade(3, count)
    ask_all(reward, 9)
    assert most == [3]
    assert threading.get_ident() not in reward.threads


def test_the_images_held_are_those_of_the_calls_under_way():
    gate = threading.Semaphore(0)
    started = []
    reward = Shade(2, lambda: (started.append(1), gate.acquire(timeout=PATIENCE)))
    third_asked, answers = threading.Event(), []

    with Asking(reward) as asking:
        some = list(pieces(3))
        asking(*some[0]), asking(*some[1])

        def third():
            answers.append(asking(*some[2]))
            third_asked.set()

        thread = threading.Thread(target=third)
        thread.start()
        assert not third_asked.wait(0.2)  # two are under way
        gate.release(3)
        assert third_asked.wait(PATIENCE)
        thread.join()
        answers[0]()
    assert len(started) == 3


def test_a_failure_is_raised_to_whoever_waits_for_it():
    def fall():
        raise RewardError("reward 'shade': the server is down")

    with Asking(Shade(2, fall)) as asking:
        some = list(pieces(3))
        answer = asking(*some[0])
        asking(*some[1])
        with pytest.raises(RewardError, match="down"):
            asking(*some[2])
        with pytest.raises(RewardError, match="down"):
            answer()


def test_what_has_not_begun_when_it_is_left_is_dropped():
    gate, calls = threading.Event(), []
    parts = {name: Shade(2, lambda: (calls.append(1), gate.wait(PATIENCE)), name) for name in ("one", "other")}
    reward = Composite(parts, {"one": 1.0, "other": 1.0}, "weighted_sum")

    def interrupted():
        with Asking(reward) as asking:
            leave = asking._pool.shutdown

            def shutdown(**options):  # the running calls end once the others have been dropped
                leave(wait=False, **options)
                gate.set()
                leave()

            asking._pool.shutdown = shutdown
            for piece in pieces(2):
                asking(*piece)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert len(calls) == 2  # of two parts of two pieces


@pytest.mark.parametrize("how", ["weighted_sum", "group_z"])
def test_parts_of_a_composite_are_asked_each_in_its_own_way(how):
    here, there = Shade(), Shade(3, name="there")
    reward = Composite({"here": metered(here), "there": metered(there, cache=10)}, {"here": 2.0, "there": -0.5}, how)
    assert at_a_time(reward) == 3
    found = ask_all(reward, 4)
    assert set(here.threads) == {threading.get_ident()}
    assert threading.get_ident() not in there.threads
    for one, piece in zip(found, pieces(4), strict=True):
        alone = judge(reward, *piece)
        assert all(torch.equal(one.components[name], alone.components[name]) for name in ("here", "there"))
        if how == "weighted_sum":
            assert torch.equal(one.score, alone.score)
        else:
            assert bool(one.score.isnan().all())
