"""Shared by the tests of the numerical core: one thread, repeatable examples, two sets of data with a known flow."""

from __future__ import annotations

import hypothesis
import pytest
import torch
from closed_forms import Mixture

hypothesis.settings.register_profile("core", deadline=None, derandomize=True, max_examples=50)
hypothesis.settings.load_profile("core")

# Time grid of SD3 (shift 3, diffusers schedule) at T = 10, to four digits, as published.
SD3_TIMES = (1.0, 0.9601, 0.9133, 0.8577, 0.7904, 0.7073, 0.6022, 0.4649, 0.2780, 0.0089, 0.0)


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def sd3_times() -> tuple[float, ...]:
    return SD3_TIMES


@pytest.fixture(scope="session")
def gaussian() -> Mixture:
    """Gaussian data away from the origin and narrower than the noise."""
    return Mixture(means=(0.8,), sigmas=(0.5,))


@pytest.fixture(scope="session")
def mixture() -> Mixture:
    """Two unequal modes."""
    return Mixture(means=(-1.2, 0.9), sigmas=(0.3, 0.5), weights=(0.35, 0.65))
