"""A task: prompts to train on, prompts held out, the reward that judges them, the model that is trained."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from stepcredit import noise


@dataclass(frozen=True)
class Prompt:
    """One prompt with what its reward needs to know, in GenEval's metadata format where that applies."""

    text: str
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def tag(self) -> str:
        """Category for per-tag results; empty where a task has none."""
        return str(self.metadata.get("tag", ""))


@dataclass(frozen=True)
class Task:
    """Everything that is particular to one problem; prompts are made only when asked for."""

    name: str
    reward: str
    """Registered name of the reward."""
    model: str
    """Base model: the name of a bundled desk model, or the hub id of a pipeline."""
    train: Callable[[], Sequence[Prompt]]
    heldout: Callable[[], Sequence[Prompt]]
    """Shares no prompt with ``train``."""
    apart: Callable[[Sequence[Prompt], Sequence[Prompt]], Sequence[Prompt]] = lambda train, heldout: train
    """Training prompts without those that ask for what is held out, for tasks whose ``train`` does not see to it."""
    practice: Callable[[], Sequence[Prompt]] | None = None
    """Prompts of our own for a rehearsal, where ``train`` or ``heldout`` need files of others."""


def draw(prompts: Sequence[Prompt], n: int, *key: noise.Key) -> list[Prompt]:
    """``n`` prompts as a pure function of the key, tags in equal shares (to within one).

    Tags take turns in a random order; within a tag prompts come in a random order without repetition until all are
    used. Any prefix is balanced too. Raises ValueError when there is no prompt to draw from.
    """
    if not prompts:
        raise ValueError("there is no prompt to draw from")
    generator = noise.generator("prompts", *key)
    by_tag: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        by_tag.setdefault(prompt.tag, []).append(prompt)
    tags = sorted(by_tag)
    tags = [tags[k] for k in generator.permutation(len(tags))]
    queues: dict[str, list[int]] = {tag: [] for tag in tags}
    drawn = []
    for slot in range(n):
        tag = tags[slot % len(tags)]
        if not queues[tag]:
            queues[tag] = generator.permutation(len(by_tag[tag])).tolist()
        drawn.append(by_tag[tag][queues[tag].pop()])
    return drawn
