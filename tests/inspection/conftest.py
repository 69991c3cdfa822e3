"""A small model, and a browser."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from browser import Browser, find

from stepcredit.policies.desk import DeskPolicy


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random desk model of compose, as a file."""
    policy = DeskPolicy.initial("compose", seed=1, hidden=16, depth=1, heads=2, height=24, width=24)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for _, parameter in policy.named_parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    path = tmp_path_factory.mktemp("model") / "tiny.safetensors"
    policy.save(path)
    return str(path)


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A headless Chromium; without one the tests that need it are skipped."""
    program = find()
    if program is None:
        pytest.skip("no Chromium is installed: pages are not tried in a browser")
    started = Browser(program, tmp_path_factory.mktemp("profile"))
    yield started
    started.close()
