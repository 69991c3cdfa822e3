"""Several rewards as one: each normalised inside its group before the weights apply."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from stepcredit.rewards.base import Metadata, Reward, RewardInfo, SelfTest, score
from stepcredit.rewards.inputs import group_rows

How = Literal["group_z", "weighted_sum"]
_RELATIVE_SPREAD = 1e-6  # spreads below this share of the largest value are rounding, not preference


def combine(
    rewards: Mapping[str, Tensor], weights: Mapping[str, float], how: How = "group_z", dims: tuple[int, ...] = (-1,)
) -> Tensor:
    """Weighted combination of rewards, float32, of the shape ``[..., G]`` that each reward has.

    ``group_z``: sum of weight * (r - mean) / std, with population statistics over ``dims`` (the members of a group;
    for states x members stacked as ``[..., G, T + 1]``, ``(-2, -1)`` gives all states one common scale). The units of
    the rewards cancel exactly; a reward without spread contributes 0. ``weighted_sum``: sum of weight * r in native
    units. A member with NaN in any reward is NaN and stays out of every statistic.
    Raises ValueError for names that differ, shapes that differ, weights that are not finite or all zero.
    Normalising each reward before summing: GDPO (Liu et al. 2026).
    """
    if how not in ("group_z", "weighted_sum"):
        raise ValueError(f"composite: how must be 'group_z' or 'weighted_sum'; got {how!r}")
    if set(rewards) != set(weights) or not rewards:
        raise ValueError(f"composite: rewards {sorted(rewards)} and weights {sorted(weights)} must name the same ones")
    if not all(math.isfinite(weight) for weight in weights.values()) or not any(weights.values()):
        raise ValueError(f"composite: weights must be finite and not all zero; got {dict(weights)}")
    shapes = {name: tuple(values.shape) for name, values in rewards.items()}
    if len(set(shapes.values())) != 1:
        raise ValueError(f"composite: rewards differ in shape: {shapes}")
    stacked = {name: values.detach().to(torch.float64) for name, values in rewards.items()}
    failed = torch.stack([values.isnan() for values in stacked.values()]).any(dim=0)
    total = torch.zeros_like(next(iter(stacked.values())))
    for name, values in stacked.items():
        total += weights[name] * (values if how == "weighted_sum" else _z_scores(values, ~failed, dims))
    return total.masked_fill(failed, float("nan")).to(torch.float32)


def _z_scores(values: Tensor, valid: Tensor, dims: tuple[int, ...]) -> Tensor:
    count = valid.sum(dims, keepdim=True).clamp(min=1)
    clean = values.masked_fill(~valid, 0.0)
    mean = clean.sum(dims, keepdim=True) / count
    centred = (clean - mean).masked_fill(~valid, 0.0)
    std = (centred.square().sum(dims, keepdim=True) / count).sqrt()
    scale = clean.abs().amax(dims, keepdim=True)
    return torch.where(std > _RELATIVE_SPREAD * scale, centred / std.clamp(min=torch.finfo(std.dtype).tiny), 0.0)


class Composite:
    """A weighted combination of rewards as a reward.

    ``group_z`` needs whole groups in every call: by default the images of one prompt (and equal metadata) are one
    group, wherever they stand; with ``group_size`` every run of that many images is. Its values say who is better
    within a group and nothing across groups: evaluate on ``components``. Rewards whose direction is ``lower`` are
    negated first.
    """

    def __init__(
        self,
        parts: Mapping[str, Reward],
        weights: Mapping[str, float],
        how: How = "group_z",
        group_size: int | None = None,
    ) -> None:
        self.parts, self.weights, self.how, self.group_size = dict(parts), dict(weights), how, group_size
        combine({name: torch.zeros(1) for name in self.parts}, self.weights, how)
        if group_size is not None and group_size < 2:
            raise ValueError(f"composite: group_size must be at least 2; got {group_size}")
        self.per_image = how == "weighted_sum"
        bound = _bounds(self.parts, self.weights) if self.per_image else (-math.inf, math.inf)
        self.info = RewardInfo(
            name="composite",
            range=bound,
            licence="; ".join(sorted({part.info.licence for part in self.parts.values()})),
            description=f"{how} of " + ", ".join(f"{self.weights[name]:g} {name}" for name in self.parts),
            needs=tuple(sorted({need for part in self.parts.values() for need in part.info.needs})),
            batch_size=1 << 30,  # groups must not be cut; each part is called in batches of its own size
        )

    def __call__(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Metadata]) -> Tensor:
        """The combination, float32 ``[B]``; NaN where any part is NaN."""
        return self.components(images, prompts, metadata)["score"]

    def components(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Metadata]) -> dict[str, Tensor]:
        """Every part in its native units, and the combination as ``score``, float32 ``[B]`` each."""
        native = {name: score(part, images, prompts, metadata) for name, part in self.parts.items()}
        oriented = {
            name: -values if self.parts[name].info.direction == "lower" else values for name, values in native.items()
        }
        if self.how == "weighted_sum":
            return {**native, "score": combine(oriented, self.weights, self.how)}
        result = torch.full((len(images),), float("nan"))
        for group in group_rows("composite", prompts, metadata, self.group_size):
            rows = torch.tensor(group)
            result[rows] = combine({name: values[rows] for name, values in oriented.items()}, self.weights, self.how)
        return {**native, "score": result}

    def self_test(self) -> SelfTest:
        """The pair of the part with the largest weight; ``selftest.run`` tries every part on its own pair."""
        heaviest = max(self.parts, key=lambda name: abs(self.weights[name]))
        return self.parts[heaviest].self_test()


def composite(
    rewards: Mapping[str, float | Mapping[str, Any]], how: How = "group_z", group_size: int | None = None
) -> Composite:
    """A composite by names, as recipes write it: ``{"ocr": 1.0, "pickscore": {"weight": 0.5, "device": "cuda"}}``.

    What stands beside ``weight`` goes to that reward as its options. Raises ValueError for unknown names or options.
    """
    from stepcredit.rewards.registry import get

    parts: dict[str, Reward] = {}
    weights: dict[str, float] = {}
    for name, entry in rewards.items():
        options = dict(entry) if isinstance(entry, Mapping) else {"weight": entry}
        weights[name] = float(options.pop("weight", 1.0))
        parts[name] = get(name, **options)
    return Composite(parts, weights, how, group_size)


def _bounds(parts: Mapping[str, Reward], weights: Mapping[str, float]) -> tuple[float, float]:
    low = high = 0.0
    for name, part in parts.items():
        weight = weights[name] * (-1 if part.info.direction == "lower" else 1)
        if weight:
            ends = sorted(weight * end for end in part.info.range)
            low, high = low + ends[0], high + ends[1]
    return low, high
