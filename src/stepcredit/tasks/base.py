"""A task: prompts to train on, prompts held out, the reward that judges them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Prompt:
    """One prompt with what its reward needs to know, in GenEval's metadata format where that applies."""

    text: str
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def tag(self) -> str:
        """Category for per-tag results; empty where a task has none."""
        return str(self.metadata.get("tag", ""))
