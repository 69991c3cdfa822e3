"""Tiny pipelines for the tests of this folder, and the same pictures from the pipeline's own call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor


@pytest.fixture(scope="session")
def pipes() -> dict[str, Any]:
    """One pipeline of each family, shared: only for tests that leave them as they were."""
    from stepcredit.policies import tiny

    return {name: tiny.build(name) for name in tiny.BUILDERS}


@pytest.fixture
def by_pipeline() -> Callable[..., Tensor]:
    """Images ``[B, 3, H, W]`` in [0, 1] of ``pipe(...)``, the reference that sampling must equal."""

    def call(
        pipe: Any, prompts: list[str], latents: Tensor, size: tuple[int, int], steps: int, **options: Any
    ) -> Tensor:
        images = pipe(
            prompts,
            latents=latents,
            height=size[0],
            width=size[1],
            num_inference_steps=steps,
            output_type="np",
            **options,
        ).images
        return torch.from_numpy(images).permute(0, 3, 1, 2)

    return call


@pytest.fixture
def draw() -> Callable[..., Tensor]:
    """Latents ``[2, *shape]`` of a fixed seed."""
    return lambda shape, seed=0: torch.randn(2, *shape, generator=torch.Generator().manual_seed(seed))
