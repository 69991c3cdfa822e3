"""A run folder as reports see it: whatever is there, read leniently; what is missing or torn is None or empty."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepcredit.errors import UserError
from stepcredit.training.stats import Interval
from stepcredit.untrusted import load_yaml, loads

Object = Mapping[str, Any]


@dataclass(frozen=True)
class Row:
    """One image of an evaluation: a prompt, its tag, the number of its noise, what it earned."""

    prompt: str
    tag: str
    slot: int
    reward: float | None
    watched: float | None = None
    """What the watched reward said of it, and whether that called it wholly right (0 or 1)."""
    watched_exact: float | None = None


@dataclass(frozen=True)
class RunFolder:
    """The contents of a run folder; JSON objects are empty where the file is missing or cannot be read."""

    path: Path
    recipe_text: str
    recipe: Object
    origin: Object
    summary: Object
    ledger: Object
    start: Object
    """The evaluation before training, as in metrics.jsonl; empty if there was none."""
    iterations: tuple[Object, ...]
    """Lines of metrics.jsonl from iteration 1 on, in order, the last line of each iteration."""

    @property
    def name(self) -> str:
        """The run's name: that of its folder."""
        return self.path.resolve().name

    def evaluation(self, stem: str) -> tuple[Row, ...]:
        """The images of ``evaluations/STEM.jsonl``; empty if it is not there."""
        return tuple(
            Row(
                str(line.get("prompt", "")),
                str(line.get("tag") or ""),
                slot,
                number(line.get("reward")),
                number(lookup(line, "watched", "reward")),
                None if (exact := lookup(line, "watched", "exact")) is None else float(bool(exact)),
            )
            for line in lines(self.path / "evaluations" / f"{stem}.jsonl")
            if isinstance(slot := line.get("slot"), int)
        )

    def series(self, *keys: str) -> list[float | None]:
        """A number of every iteration, None where it is missing: ``series("reward", "mean")``."""
        return [number(lookup(line, *keys)) for line in self.iterations]

    def per_step(self, key: str) -> list[list[float | None]]:
        """A list of every iteration, empty where it is missing: ``per_step("gain_mean")``."""
        return [numbers(line.get(key)) for line in self.iterations]


def read(path: Path) -> RunFolder:
    """Read a run folder. Raises UserError if it holds neither a recipe nor metrics nor a summary."""
    if not any((path / name).is_file() for name in ("recipe.yaml", "metrics.jsonl", "summary.json")):
        raise UserError(f"{str(path)!r} is not a run: it has no recipe.yaml; give the folder that `train` wrote")
    by_iteration = {
        line["iteration"]: line for line in lines(path / "metrics.jsonl") if isinstance(line.get("iteration"), int)
    }
    recipe_text = _text(path / "recipe.yaml")
    return RunFolder(
        path=path,
        recipe_text=recipe_text,
        recipe=_recipe(recipe_text),
        origin=_object(path / "origin.json"),
        summary=_object(path / "summary.json"),
        ledger=_object(path / "ledger.json"),
        start=mapping(by_iteration.get(0, {}).get("evaluation")),
        iterations=tuple(by_iteration[k] for k in sorted(by_iteration) if k >= 1),
    )


def number(value: object) -> float | None:
    """A finite number, or None."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)


def numbers(value: object) -> list[float | None]:
    """A list of finite numbers, None where an entry is not one; booleans count as 0 and 1; empty if not a list."""
    if not isinstance(value, list):
        return []
    return [float(v) if isinstance(v, bool) else number(v) for v in value]


def mapping(value: object) -> Object:
    """A JSON object, or an empty one."""
    return value if isinstance(value, dict) else {}


def lookup(value: object, *keys: str) -> object:
    """The value at a path of keys, or None where the path breaks off."""
    for key in keys:
        value = mapping(value).get(key)
    return value


def estimate(value: object) -> Interval | None:
    """``{mean, low, high}`` as an Interval, its bounds NaN where they are missing; None without a mean."""
    mean, low, high = (number(lookup(value, key)) for key in ("mean", "low", "high"))
    if mean is None:
        return None
    return Interval(mean, *(math.nan if bound is None else bound for bound in (low, high)))


def mean_of(value: object) -> float | None:
    """A mean that may be written as a number or as ``{mean, low, high}``."""
    return number(lookup(value, "mean")) if isinstance(value, dict) else number(value)


def mean(values: Sequence[float | None]) -> float | None:
    """Mean of the numbers that are there; None if none is."""
    there = [v for v in values if v is not None]
    return sum(there) / len(there) if there else None


def step_means(lists: Sequence[Sequence[float | None]]) -> list[float | None]:
    """Mean over lists, entry by entry, of the numbers that are there."""
    length = max((len(entries) for entries in lists), default=0)
    return [mean([entries[i] for entries in lists if i < len(entries)]) for i in range(length)]


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _object(path: Path) -> Object:
    try:
        return mapping(loads(_text(path)))
    except ValueError:
        return {}


def _recipe(text: str) -> Object:
    try:
        return mapping(load_yaml(text))
    except ValueError:
        return {}


def lines(path: Path) -> list[Object]:
    """The JSON objects of a .jsonl file; a line torn by a crash is passed over."""
    found: list[Object] = []
    for line in _text(path).split("\n"):  # not splitlines: a prompt may hold U+2028
        try:
            entry = loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict):
            found.append(entry)
    return found
