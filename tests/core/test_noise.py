"""Noise that is a pure function of its name."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest
import torch

from stepcredit import noise


def test_equal_keys_give_equal_noise_whatever_happened_before() -> None:
    first = noise.normal((3, 4), "step", 0, 7, 1, 2, 3)
    torch.manual_seed(123)
    torch.randn(17)
    noise.normal((5,), "step", 0, 7, 1, 2, 4)
    assert torch.equal(noise.normal((3, 4), "step", 0, 7, 1, 2, 3), first)
    assert first.dtype == torch.float32
    assert first.device.type == "cpu"


def test_the_global_generator_is_left_alone() -> None:
    before = torch.get_rng_state()
    noise.normal((100,), "step", 1)
    assert torch.equal(torch.get_rng_state(), before)


def test_another_process_draws_the_same() -> None:
    code = "from stepcredit import noise; print(noise.normal((4,), 'step', 3, 1, 4, 1, 5).tolist())"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == str(noise.normal((4,), "step", 3, 1, 4, 1, 5).tolist())


def test_every_part_of_the_key_counts() -> None:
    base = ("step", 0, 1, 2, 3, 4)
    keys = [base, ("initial", 0, 1, 2, 3, 4), base[:-1], (*base, 0)]
    keys += [(*base[:k], base[k] + 1, *base[k + 1 :]) for k in range(1, 6)]
    keys += [("step", 0, 12, 3, 4), ("step", 0, 1, 23, 4), ("step", 0, 1, 2, 34), ("step", "0", 1, 2, 3, 4)]
    draws = [noise.normal((4,), *key).tolist() for key in keys]
    assert len({tuple(draw) for draw in draws}) == len(keys)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (("step", 0, 17, 5, 5, 8), ("step", 0, 21, 3, 14, 1)),
        (("step", 0, 30, 7, 2, 3), ("step", 0, 49, 4, 8, 5)),
        (("step", 0, 22, 7, 13, 5), ("step", 0, 83, 2, 10, 4)),
    ],
)
def test_keys_of_one_run_do_not_collide(first: tuple[str | int, ...], second: tuple[str | int, ...]) -> None:
    # The blake2b hashes of these names agree in their low 32 bits, all that torch's CPU generator takes of a seed.
    assert not torch.equal(noise.normal((8,), *first), noise.normal((8,), *second))


def test_it_is_standard_gaussian_within_and_across_keys() -> None:
    long = noise.normal((100_000,), "long", 0)
    across = torch.stack([noise.normal((2,), "step", 0, p, m, s) for p, m, s in itertools.product(range(20), repeat=3)])
    for sample in (long, across[:, 0], across[:, 1]):
        n = len(sample)
        assert abs(sample.mean()) < 4 / n**0.5
        assert abs(sample.var() - 1) < 4 * (2 / n) ** 0.5
        assert abs((sample.abs() < 0.6745).float().mean() - 0.5) < 4 * 0.5 / n**0.5
    # neighbours in the key are not correlated
    grid = across[:, 0].reshape(20, 20, 20)
    for left, right in ((grid[1:], grid[:-1]), (grid[:, 1:], grid[:, :-1]), (grid[..., 1:], grid[..., :-1])):
        assert abs((left * right).mean()) < 4 / left.numel() ** 0.5
    assert abs((across[:, 0] * across[:, 1]).mean()) < 4 / len(across) ** 0.5
