"""Evaluation: held-out prompts, fixed noise, ODE sampling, intervals over prompts within their tags."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stepcredit import noise
from stepcredit.policies.base import Policy
from stepcredit.policies.placement import at_hand
from stepcredit.rewards.asking import Answer, Asking
from stepcredit.rewards.base import Judgement, Reward, join, require_finite, to_uint8
from stepcredit.rewards.composite import Composite
from stepcredit.sampling import sample
from stepcredit.tasks.base import Prompt
from stepcredit.training import comparison, distributed
from stepcredit.training.files import write_text_atomic
from stepcredit.training.image_stats import STATISTICS, Streamed
from stepcredit.training.records import to_json
from stepcredit.training.stats import Interval


@dataclass(frozen=True)
class Slot:
    """One held-out prompt with what names its noise: the same in every evaluation."""

    number: int
    prompt: Prompt
    key: tuple[noise.Key, ...] = ()
    """Names the noise where the number alone does not: suites name it by suite, prompt and repetition."""

    def noise(self, shape: tuple[int, ...]) -> Tensor:
        """The initial noise of the slot, float32 of ``shape``."""
        return noise.normal(shape, "evaluation", *(self.key or (self.number,)))


def slots(prompts: Sequence[Prompt]) -> list[Slot]:
    """Prompts with their numbers as slots; the same number always has the same noise."""
    return [Slot(number, prompt) for number, prompt in enumerate(prompts)]


@dataclass(frozen=True)
class Evaluation:
    """Rewards of images sampled from fixed slots."""

    slots: tuple[Slot, ...]
    rewards: Tensor
    """float32 ``[N]``; NaN for a failed sample."""
    exact: Tensor | None
    """float32 ``[N]``: 1 for wholly right, 0 for not, for rewards that can tell; NaN for a failed sample."""
    images: Tensor
    """uint8 ``[K, H, W, 3]``: the first K images, for the report."""
    statistics: dict[str, float]
    components: dict[str, Tensor] = field(default_factory=dict)
    """Parts of the reward by name, float32 ``[N]`` each."""
    watched: Evaluation | None = None
    """The same images judged by the recipe's ``watch``, without images and statistics of its own."""

    @property
    def reward(self) -> Interval:
        """Mean reward with its interval."""
        return _interval(self.rewards, self.slots)

    @property
    def exact_rate(self) -> Interval | None:
        """Share of exactly right images with its interval."""
        return None if self.exact is None else _interval(self.exact, self.slots)

    def per_tag(self) -> dict[str, float]:
        """Mean reward of every tag."""
        tags = sorted({slot.prompt.tag for slot in self.slots})
        member = {tag: torch.tensor([slot.prompt.tag == tag for slot in self.slots]) for tag in tags}
        return {tag: float(self.rewards[member[tag]].nanmean()) for tag in tags}

    def first(self, count: int) -> Evaluation:
        """The evaluation of the first ``count`` slots; its image statistics stay those of all."""
        return replace(
            self,
            slots=self.slots[:count],
            rewards=self.rewards[:count],
            exact=None if self.exact is None else self.exact[:count],
            images=self.images[:count],
            components={name: values[:count] for name, values in self.components.items()},
            watched=None if self.watched is None else self.watched.first(count),
        )

    def as_dict(self) -> dict[str, Any]:
        """For metrics.jsonl."""
        return {
            **self.judged(),
            "watched": None if self.watched is None else self.watched.judged(),
            "image_statistics": self.statistics,
            "prompts": len(self.slots),
        }

    def judged(self) -> dict[str, Any]:
        """What the reward said, as JSON."""
        exact = self.exact_rate
        return {
            **self.reward.as_dict(),
            "exact": exact.as_dict() if exact else None,
            "components": {name: float(values.nanmean()) for name, values in self.components.items()},
            "per_tag": self.per_tag(),
        }

    def write(self, path: Path) -> None:
        """One JSON line per slot: prompt, tag, slot, reward, exact, components; null for a sample that failed.

        With ``watched`` each line has that reward's own reward, exact and components under ``watched``.
        """
        lines = []
        for k, slot in enumerate(self.slots):
            entry = {"prompt": slot.prompt.text, "tag": slot.prompt.tag, "slot": slot.number, **self._row(k)}
            if self.watched is not None:
                entry["watched"] = self.watched._row(k)
            lines.append(to_json(entry))
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text_atomic(path, "\n".join(lines) + "\n")

    def _row(self, k: int) -> dict[str, Any]:
        return {
            "reward": float(self.rewards[k]),
            "exact": None if self.exact is None or self.exact[k].isnan() else bool(self.exact[k]),
            "components": {name: float(values[k]) for name, values in self.components.items()},
        }


def read(path: Path, on: Sequence[Slot]) -> Evaluation:
    """An evaluation written before, without its images. Raises ValueError if it was made on other slots."""
    entries = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]
    if [(entry["slot"], entry["prompt"]) for entry in entries] != [(s.number, s.prompt.text) for s in on]:
        raise ValueError(f"{path} holds an evaluation on other prompts than the recipe asks for")
    found = _of_rows(entries, on)
    watched = [entry["watched"] for entry in entries if entry.get("watched")]
    return replace(found, watched=_of_rows(watched, on)) if watched else found


def _of_rows(rows: Sequence[dict[str, Any]], on: Sequence[Slot]) -> Evaluation:
    exact = _column(row["exact"] for row in rows)
    parts = [row.get("components") or {} for row in rows]  # absent in older files
    return Evaluation(
        slots=tuple(on),
        rewards=_column(row["reward"] for row in rows),
        exact=None if bool(exact.isnan().all()) else exact,
        images=torch.empty(0, 0, 0, 3, dtype=torch.uint8),
        statistics={},
        components={name: _column(part.get(name) for part in parts) for name in (parts[0] if parts else ())},
    )


def _column(values: Iterable[float | None]) -> Tensor:
    return torch.tensor([float("nan") if value is None else float(value) for value in values])


def evaluate(
    policy: Policy,
    reward: Reward,
    on: Sequence[Slot],
    steps: int,
    micro_batch: int,
    keep_images: int = 0,
    progress: Callable[[int, int], None] | None = None,
    base: Evaluation | None = None,
    watch: Reward | None = None,
) -> Evaluation:
    """Sample one image per slot by the ODE in ``steps`` steps and score it.

    Noise depends on the slot alone, so evaluations of different weights are paired. Images are let go as soon as they
    are judged, but for the first ``keep_images``. ``progress(done, total)`` counts them. ``base``: evaluation of the
    base model, in whose units a composite of group z-scores is expressed; without it the evaluation is its own base.
    ``watch`` judges the same images. Several processes share the batches, equally many each, and all have the result;
    what one computes beyond the last batch is left out. Raises RewardError as
    :func:`stepcredit.rewards.base.judge` does, FloatingPointError for an image that is not finite, PeerLostError.
    """
    judged: list[Answer] = []
    seen: list[Answer] = []
    shown: list[Tensor] = []
    looks = Streamed()
    batches = [on[start : start + micro_batch] for start in range(0, len(on), micro_batch)]
    each = -(-len(batches) // distributed.world())
    first = distributed.rank() * each
    valid = sum(len(batch) for batch in batches[first : first + each])
    with contextlib.ExitStack() as at_work:
        at_work.enter_context(at_hand(policy))
        asking = at_work.enter_context(Asking(reward))
        watching = at_work.enter_context(Asking(watch)) if watch is not None else None
        for k in range(first, first + each):
            some = batches[min(k, len(batches) - 1)]
            decoded = _images(policy, some, steps)
            texts, metadata = [slot.prompt.text for slot in some], [slot.prompt.metadata for slot in some]
            require_finite(decoded, texts)
            judged.append(asking(decoded, texts, metadata))
            if watching is not None:
                seen.append(watching(decoded, texts, metadata))
            decoded = decoded if k < len(batches) else decoded[:0]
            looks.add(decoded)
            shown.append(decoded[: max(0, keep_images - sum(map(len, shown)))].clone())
            del decoded  # before the next ones are sampled
            if progress is not None:
                progress(min((k - first + 1) * micro_batch, valid), valid)
        found = _gathered(reward, [answer() for answer in judged], valid, on, base)
        if watch is not None:
            of_base = base.watched if base else None
            found = replace(found, watched=_gathered(watch, [answer() for answer in seen], valid, on, of_base))
    kept = torch.cat(shown)
    own = kept.new_empty(0, *kept.shape[1:]) if looks.last is None else looks.last[None]
    last = distributed.gather(own)  # of each process that has any: the image before the next one's first
    rows = looks.rows(before=last[distributed.rank() - 1 if valid else 0])
    statistics = distributed.gather(rows).double().mean(0).tolist()
    return replace(
        found,
        images=to_uint8(distributed.gather(kept)[:keep_images]),
        statistics=dict(zip(STATISTICS, statistics, strict=True)),
    )


def _images(policy: Policy, some: Sequence[Slot], steps: int) -> Tensor:
    """One image of each slot, float32 ``[B, 3, H, W]`` in [0, 1], on the CPU."""
    x_1 = torch.stack([slot.noise(policy.latent_shape) for slot in some])
    return sample(policy, [slot.prompt.text for slot in some], noise=x_1, steps=steps).cpu()


def _gathered(
    reward: Reward, judged: Sequence[Judgement], valid: int, on: Sequence[Slot], base: Evaluation | None
) -> Evaluation:
    """The judgements of all processes in the order of the slots, each process's first ``valid`` ones; no images."""
    own = join(judged)
    components = {name: distributed.gather(values[:valid]) for name, values in own.components.items()}
    exact = None if own.exact is None else distributed.gather(own.exact[:valid])
    rewards = distributed.gather(own.score[:valid])
    if isinstance(reward, Composite) and not reward.per_image:
        rewards = reward.standardised(components, base.components if base else components)
    return Evaluation(tuple(on), rewards, exact, torch.empty(0, 0, 0, 3, dtype=torch.uint8), {}, components)


def paired(before: Evaluation, after: Evaluation) -> Interval:
    """Improvement of the mean reward on the same prompts and noise. Raises ValueError if the slots differ."""
    if before.slots != after.slots:
        raise ValueError("only evaluations of the same slots can be compared")
    return _interval(after.rewards - before.rewards, before.slots)


def _interval(values: Tensor, on: Sequence[Slot]) -> Interval:
    """Mean with its interval: prompts are resampled within their tags, whose shares are fixed."""
    prompts, tags = [slot.prompt.text for slot in on], [slot.prompt.tag for slot in on]
    return comparison.over_prompts(values.double().numpy(), prompts, tags)
