"""Which checkpoint of a run is used."""

import pytest
import torch

from stepcredit.errors import UserError
from stepcredit.training import checkpoint
from stepcredit.training.chosen import chosen

FIRED = {"guards": {"fired": {"guard": "max_kl", "reason": "too far", "iteration": 3}}}


def made(folder, fired, best):
    """A run's folder with checkpoints of iterations 1 to 3, the last with a guard's stop if ``fired``."""
    for iteration in (1, 2, 3):
        state = FIRED if fired and iteration == 3 else {"guards": {"fired": None}}
        tensors = {"weights": {"w": torch.full((2,), float(iteration))}}
        checkpoint.save(folder / "checkpoints", iteration, tensors, state, keep=3, best=best)
    return folder


@pytest.mark.parametrize(
    ("fired", "best", "which", "iteration"),
    [
        (False, 1, "auto", 3),
        (True, 1, "auto", 1),
        (True, None, "auto", 3),  # nothing better was ever seen
        (True, 1, "latest", 3),
        (False, 1, "best", 1),
        (False, 1, "2", 2),
    ],
)
def test_the_best_is_taken_where_a_guard_stopped_the_run_and_else_what_is_asked_for(
    tmp_path, fired, best, which, iteration
):
    said = []
    found = chosen(made(tmp_path, fired, best), which, said.append)
    assert found.iteration == iteration
    assert found.tensors["weights"]["w"].tolist() == [iteration, iteration]
    assert said == (
        [
            "the guard max_kl stopped this run after iteration 3: taking the best checkpoint, of iteration 1 "
            "(--checkpoint latest takes the last)"
        ]
        if (fired, which, iteration) == (True, "auto", 1)
        else []
    )


@pytest.mark.parametrize(
    ("which", "sentence"),
    [
        ("9", "has no checkpoint of iteration 9; there are those of 1, 2, 3"),
        ("best", "has no best checkpoint"),
        ("../x", "is none of auto, latest, best and an iteration"),
        ("-1", "is none of auto, latest, best and an iteration"),
    ],
)
def test_what_is_not_there_is_named(tmp_path, which, sentence):
    with pytest.raises(UserError, match=sentence):
        chosen(made(tmp_path, False, None), which, print)
