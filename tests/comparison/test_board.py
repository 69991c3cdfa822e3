"""How much longer a comparison takes."""

import pytest

from stepcredit.comparison.board import remaining
from stepcredit.comparison.runs import Status

DONE = Status(10, 10, 0.7, 3.0, 6.0, True)
HALF = Status(4, 10, 0.6, 2.0, 6.0, False)
WAITING = Status(0, 10, None, None, None, False)


def test_what_is_left_is_iterations_at_each_recipes_own_speed_and_the_evaluations():
    assert remaining([(("a", 0), DONE)], 1) == 0.0
    # six iterations of 2 s and the evaluation after
    assert remaining([(("a", 0), HALF)], 1) == pytest.approx(18.0)
    # a seed of b not begun: ten of b's own 2 s, and two evaluations
    runs = [(("a", 0), DONE), (("b", 0), HALF), (("b", 1), WAITING)]
    assert remaining(runs, 1) == pytest.approx(18.0 + 20.0 + 12.0)
    assert remaining(runs, 2) == pytest.approx(25.0)
    # a recipe never begun is taken to be as fast as the median of the others
    assert remaining([(("a", 0), DONE), (("b", 0), HALF), (("c", 0), WAITING)], 1) == pytest.approx(18.0 + 25.0 + 12.0)
    assert remaining([(("a", 0), WAITING)], 1) is None
