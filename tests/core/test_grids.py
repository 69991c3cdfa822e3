"""Time grids against hand-computed schedules."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stepcredit import grids


def test_linear_is_exact() -> None:
    assert grids.linear(4).tolist() == [1.0, 0.75, 0.5, 0.25, 0.0]


def test_shifted_gives_the_published_sd3_times(sd3_times: tuple[float, ...]) -> None:
    torch.testing.assert_close(
        grids.shifted(10), torch.tensor(sd3_times, dtype=torch.float64), atol=5e-5, rtol=0, check_dtype=True
    )


@pytest.mark.parametrize(("steps", "shift"), [(1, 3.0), (2, 3.0), (6, 3.0), (28, 3.0), (10, 1.0), (7, 5.5)])
def test_shifted_shifts_the_smallest_of_a_thousand_times_twice(steps: int, shift: float) -> None:
    # diffusers: the 1000 training times are shifted once; the sampling times, evenly spaced between the largest
    # (1) and the smallest of them, are shifted again.
    smallest = shift * 0.001 / (1 + (shift - 1) * 0.001)
    expected = []
    for k in range(steps):
        t = 1.0 if steps == 1 else 1.0 + (smallest - 1.0) * k / (steps - 1)
        expected.append(shift * t / (1 + (shift - 1) * t))
    grid = grids.shifted(steps, shift)
    assert grid.tolist() == pytest.approx([*expected, 0.0], abs=1e-14)
    assert grid[0] == 1
    assert grid[-1] == 0


def test_shift_one_on_two_steps_ends_at_the_smallest_training_time() -> None:
    assert grids.shifted(2, shift=1.0).tolist() == pytest.approx([1.0, 0.001, 0.0], abs=1e-15)


def test_resolution_by_hand() -> None:
    # 256 tokens: mu = .5. t -> e^mu / (e^mu + 1/t - 1) at t = 1, 3/4, 1/2, 1/4.
    e = math.exp(0.5)
    expected = [1.0, e / (e + 1 / 3), e / (e + 1), e / (e + 3), 0.0]
    assert grids.resolution(4, image_seq_len=256).tolist() == pytest.approx(expected, abs=1e-14)
    assert expected[2] == pytest.approx(0.62246, abs=1e-5)  # the logistic function at mu


@pytest.mark.parametrize(("tokens", "mu"), [(256, 0.5), (4096, 1.15), (2176, 0.825), (1024, 0.63)])
def test_resolution_mu_is_affine_in_the_number_of_tokens(tokens: int, mu: float) -> None:
    # The middle of an even grid is t = 1/2, which becomes the logistic function of mu: read mu back from there.
    middle = grids.resolution(2, image_seq_len=tokens)[1].item()
    assert math.log(middle / (1 - middle)) == pytest.approx(mu, abs=1e-12)


def test_resolution_takes_other_ranges() -> None:
    middle = grids.resolution(2, image_seq_len=30, base_shift=0.0, max_shift=1.0, base_seq_len=20, max_seq_len=40)[
        1
    ].item()
    assert math.log(middle / (1 - middle)) == pytest.approx(0.5, abs=1e-12)


@given(st.integers(1, 200), st.floats(0.05, 20))
def test_every_grid_is_float64_and_falls_from_one_to_zero(steps: int, shift: float) -> None:
    for grid in (grids.linear(steps), grids.shifted(steps, shift), grids.resolution(steps, 1024)):
        assert grid.dtype == torch.float64
        assert grid.shape == (steps + 1,)
        assert grid[0] == 1
        assert grid[-1] == 0
        assert bool((grid.diff() < 0).all())
        grids.validate(grid)


@pytest.mark.parametrize(
    "bad",
    [
        [1.0],
        [0.9, 0.5, 0.0],
        [1.0, 0.5, 0.1],
        [0.0, 0.5, 1.0],
        [1.0, 0.5, 0.5, 0.0],
        [1.0, 0.4, 0.6, 0.0],
        [1.0, math.nan, 0.0],
        [1.0, -0.5, 0.0],
        [[1.0, 0.0]],
        [],
    ],
)
def test_validate_refuses(bad: list[float]) -> None:
    with pytest.raises(ValueError, match="grid"):
        grids.validate(torch.tensor(bad, dtype=torch.float64))


@pytest.mark.parametrize("steps", [0, -3])
def test_a_grid_needs_a_step(steps: int) -> None:
    for make in (grids.linear, grids.shifted, lambda n: grids.resolution(n, 256)):
        with pytest.raises(ValueError, match="step"):
            make(steps)
