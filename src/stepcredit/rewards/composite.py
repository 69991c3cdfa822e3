"""Several rewards as one: each normalised inside its group before the weights apply."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from stepcredit.errors import nearest
from stepcredit.rewards.base import Judgement, Metadata, Reward, RewardInfo, SelfTest, judge
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
    group, wherever they stand; with ``group_size`` every run of that many images is; a training run tells its own
    groups. Its values say who is better within a group and nothing across groups: evaluate on ``components``. Rewards
    whose direction is ``lower`` are negated first.
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
        self.piece = max(part.info.batch_size for part in self.parts.values())
        bound = _bounds(self.parts, self.weights) if self.per_image else (-math.inf, math.inf)
        self.info = RewardInfo(
            name="composite",
            range=bound,
            licence="; ".join(sorted({part.info.licence for part in self.parts.values()})),
            description=f"{how} of " + ", ".join(f"{self.weights[name]:g} {name}" for name in self.parts),
            needs=tuple(sorted({need for part in self.parts.values() for need in part.info.needs})),
            batch_size=self.piece if self.per_image else 1 << 30,  # groups must not be cut
        )

    def __call__(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Metadata]) -> Tensor:
        """The combination, float32 ``[B]``; NaN where any part is NaN."""
        return self.components(images, prompts, metadata)["score"]

    def components(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Metadata]) -> dict[str, Tensor]:
        """Every part in its native units, and the combination as ``score``, float32 ``[B]`` each."""
        native = self.native(images, prompts, metadata)
        groups = group_rows("composite", prompts, metadata, self.group_size) if not self.per_image else ()
        return {"score": self.combined(native, [torch.tensor(group) for group in groups]), **native}

    def native(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Metadata]) -> dict[str, Tensor]:
        """Every part in its native units, float32 ``[B]`` each; what a part says of itself follows as ``part.name``.

        Unlike the combination this may be asked for pieces of a batch, ``piece`` images at a time.
        """
        return self.named({name: judge(part, images, prompts, metadata) for name, part in self.parts.items()})

    def named(self, judged: Mapping[str, Judgement]) -> dict[str, Tensor]:
        """The parts' judgements under one set of names, as ``native`` gives them."""
        native = {name: judged[name].score for name in self.parts}
        inner = {f"{name}.{key}": values for name, one in judged.items() for key, values in one.components.items()}
        inner |= {f"{name}.exact": one.exact for name, one in judged.items() if one.exact is not None}
        return {**native, **inner}

    def combined(self, native: Mapping[str, Tensor], groups: Sequence[Tensor]) -> Tensor:
        """The combination of native parts, float32 ``[B]``; ``groups``: their rows, for ``group_z``."""
        oriented = self._oriented({name: native[name] for name in self.parts})
        if self.how == "weighted_sum":
            return combine(oriented, self.weights, self.how)
        result = torch.full_like(next(iter(oriented.values())), float("nan"))
        for rows in groups:
            result[rows] = combine({name: values[rows] for name, values in oriented.items()}, self.weights, self.how)
        return result

    def standardised(self, components: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> Tensor:
        """Weighted sum of the parts in deviations of ``reference`` above its means, float32 ``[N]``.

        The score of an evaluation, where an image has no group: with the base model's components as the reference it
        is the weighted improvement in units of the base's own spread. A part without spread there contributes 0.
        """
        there = self._oriented({name: reference[name].double() for name in self.parts})
        here = self._oriented({name: components[name].double() for name in self.parts})
        failed = torch.stack([values.isnan() for values in here.values()]).any(0)
        total = torch.zeros_like(next(iter(here.values())))
        for name, known in there.items():
            known = known[~known.isnan()]
            std = known.std(correction=0) if len(known) else torch.zeros(())
            if std > _RELATIVE_SPREAD * known.abs().max():
                total += self.weights[name] * (here[name] - known.mean()) / std
        return total.masked_fill(failed, float("nan")).float()

    def _oriented(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The parts' values with the better ones higher."""
        return {name: -one if self.parts[name].info.direction == "lower" else one for name, one in values.items()}

    def self_test(self) -> SelfTest:
        """The pair of the part with the largest weight; ``selftest.run`` tries every part on its own pair."""
        heaviest = max(self.parts, key=lambda name: abs(self.weights[name]))
        return self.parts[heaviest].self_test()


def composite(
    rewards: Mapping[str, float | Mapping[str, Any]] | None = None,
    how: How = "group_z",
    group_size: int | None = None,
    **named: Any,
) -> Composite:
    """Several rewards as one, each z-scored within its group before the weights apply, or summed as they are.

    In Python: ``{"ocr": 1.0, "pickscore": {"weight": 0.5, "device": "cuda"}}``.

    What stands beside ``weight`` goes to that reward as its options. The flat form of recipes says the same with one
    key for a weight and one for an option: ``{"ocr": 1.0, "pickscore": 0.5, "pickscore.device": "cuda"}``. Raises
    ValueError for unknown names or options, a weight that is not a number, and an option of a reward without weight.
    """
    from stepcredit.rewards.registry import get

    parts: dict[str, Reward] = {}
    weights: dict[str, float] = {}
    for name, entry in {**(rewards or {}), **_nested(named)}.items():
        options = dict(entry) if isinstance(entry, Mapping) else {"weight": entry}
        weight = options.pop("weight", 1.0)
        if isinstance(weight, bool) or not isinstance(weight, int | float):
            raise ValueError(f"composite: the weight of {name!r} must be a number; got {weight!r}")
        weights[name] = float(weight)
        parts[name] = get(name, **options)
    if not parts:
        raise ValueError("composite: names no reward; give each its weight, such as ocr: 1.0 and pickscore: 0.5")
    return Composite(parts, weights, how, group_size)


def _nested(flat: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Flat keys as nested ones. Names of rewards may hold dots; the longest that has a weight is meant."""
    from stepcredit.rewards.registry import names

    known = [key for key in flat if key in names()]
    nested: dict[str, dict[str, Any]] = {}
    for key, value in flat.items():
        owner = key if key in known else max((n for n in known if key.startswith(f"{n}.")), key=len, default=None)
        if owner is None:
            raise ValueError(
                f"composite: write NAME: WEIGHT and NAME.OPTION: VALUE; {key!r} is neither a reward nor an option of "
                f"one that has a weight{nearest(key, names())}"
            )
        nested.setdefault(owner, {})["weight" if key == owner else key.removeprefix(f"{owner}.")] = value
    return nested


def _bounds(parts: Mapping[str, Reward], weights: Mapping[str, float]) -> tuple[float, float]:
    low = high = 0.0
    for name, part in parts.items():
        weight = weights[name] * (-1 if part.info.direction == "lower" else 1)
        if weight:
            ends = sorted(weight * end for end in part.info.range)
            low, high = low + ends[0], high + ends[1]
    return low, high
