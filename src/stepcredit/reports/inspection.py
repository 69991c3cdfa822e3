"""The page of an inspection: one group's trajectories, with every scheme's numbers embedded for the page to switch."""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Decimal
from importlib import resources
from typing import Any

import numpy as np
from markupsafe import Markup
from torch import Tensor

from stepcredit.inspection import schemes
from stepcredit.inspection.collect import Inspection
from stepcredit.inspection.schemes import Numbers
from stepcredit.reports import pictures, style
from stepcredit.reports.curves import Ruler, curves
from stepcredit.reports.pictures import Layout
from stepcredit.training.recipe import Recipe

ESTIMATES: Mapping[str, str] = {
    "tweedie": "the image that the model expects at this point, read off its velocity at no cost; blurred early on",
    "substeps": "the state carried to the end by {n} noise-free {steps}",
    "full": "the state carried to the end by all remaining steps, without noise",
}
MINUS = "\N{MINUS SIGN}"


@dataclass(frozen=True)
class Shown:
    """A look ready for the template; numbers by member, and step or state."""

    title: str
    R: list[list[float]]
    gain: list[list[float]]
    loose: list[list[bool]]
    strict: list[list[bool]]
    sources: list[list[str]]
    """Data URIs of the pictures."""
    wide: Markup
    """Curves, for a wide page and for a phone."""
    narrow: Markup
    final: float
    alike: bool
    """All members have equal rewards throughout: nothing can be learned from them."""

    @property
    def turning(self) -> tuple[int, int]:
        """Numbers of strict turning points, and of those that are loose alone."""
        strict = sum(map(sum, self.strict))
        return strict, sum(map(sum, self.loose)) - strict


def render(seen: Inspection) -> str:
    """The page as HTML: one file, all text escaped, its one script named by its hash, no request."""
    numbers = [schemes.numbers(seen.recipe, look.R, seen.trained) for look in seen.looks]
    trained: list[list[bool]] = seen.trained.tolist()
    on = seen.trained.any(0).tolist()
    size = (int(seen.looks[0].images.shape[1]), int(seen.looks[0].images.shape[2]))
    layout = pictures.layout(size, len(on) + 1, len(seen.looks))
    script = _asset("inspection.js")
    return style.render(
        "inspection.html.j2",
        seen=seen,
        recipe=seen.recipe,
        shown=_shown(seen, numbers, layout),
        layout=layout,
        own=schemes.own(seen.recipe),
        schemes=schemes.schemes(seen.recipe),
        normalisations=schemes.NORMALISATIONS,
        estimate=estimate_in_words(seen.recipe),
        trained=trained,
        on=on,
        trained_said=spans([i for i, some in enumerate(on) if some]),
        facts=_facts(seen),
        cell=cell_text,
        strength=strength,
        largest=max(
            (abs(g) for made in numbers for g in made.gain.flatten().tolist() if math.isfinite(g)), default=0.0
        ),
        data=Markup(_embedded(payload(seen, numbers))),
        extra_style=_asset("inspection.css"),
        script=script,
        script_hash=_hash(script),
    )


def _shown(seen: Inspection, numbers: Sequence[Numbers], layout: Layout) -> list[Shown]:
    finite = [r for look in seen.looks for r in look.R.flatten().tolist() if math.isfinite(r)]
    steps, on = seen.trained.shape[1], seen.trained.any(0)
    rulers = [
        Ruler(side.label, side.pitch, steps, height) for side, height in zip(layout.sides, (210, 170), strict=True)
    ]
    shown = []
    for look, made, uris in zip(seen.looks, numbers, pictures.encode(seen.looks), strict=True):
        wide, narrow = (curves(look.R, made.loose, made.strict, on, finite, ruler, look.name) for ruler in rulers)
        shown.append(
            Shown(
                title=look.name,
                R=look.R.tolist(),
                gain=made.gain.tolist(),
                loose=made.loose.tolist(),
                strict=made.strict.tolist(),
                sources=uris,
                wide=wide,
                narrow=narrow,
                final=float(look.R[:, -1].nanmean()),
                alike=bool((look.R.nan_to_num().amax(0) == look.R.nan_to_num().amin(0)).all()),
            )
        )
    return shown


def payload(seen: Inspection, numbers: Sequence[Numbers]) -> dict[str, Any]:
    """Everything that the page switches between, as JSON values; numbers are float32 to the last digit, NaN is null."""
    return {
        "grid": seen.grid.tolist(),
        "std": seen.std.tolist(),
        "trained": seen.trained.tolist(),
        "schemes": {
            scheme.key: {
                "label": scheme.label,
                "text": scheme.text,
                "keys": _keys(scheme.options),
                "normalisations": scheme.normalisations,
            }
            for scheme in schemes.schemes(seen.recipe)
        },
        "normalisations": dict(schemes.NORMALISATIONS),
        "start": {"scheme": schemes.own(seen.recipe).key, "normalisation": seen.recipe.advantage},
        "looks": [
            {
                "name": look.name,
                "R": exact(look.R),
                "gain": exact(made.gain),
                "loose": made.loose.tolist(),
                "strict": made.strict.tolist(),
                "credit": {key: exact(value) for key, value in made.credit.items()},
                "advantage": {
                    key: {name: exact(value) for name, value in by_name.items()}
                    for key, by_name in made.advantage.items()
                },
            }
            for look, made in zip(seen.looks, numbers, strict=True)
        ],
    }


def exact(values: Tensor) -> Any:
    """Nested lists of a float32 tensor: the shortest decimals that read back as the same float32; None for NaN."""
    if values.ndim == 0:
        value = float(values)
        return float(str(np.float32(value))) if math.isfinite(value) else None
    return [exact(part) for part in values]


def cell_text(value: float, largest: float) -> str:
    """A signed number for a narrow cell, with digits that suit the largest on the map; 0 is ``0``.

    Ties round away from zero: the page's script, which writes all later numbers, does the same.
    """
    if not math.isfinite(value):
        return style.MISSING
    digits = Decimal(1).scaleb(-decimals(largest))
    rounded = Decimal(float(str(np.float32(value)))).quantize(digits, ROUND_HALF_UP)
    if rounded == 0:
        return "0"
    return f"{'+' if rounded > 0 else MINUS}{abs(rounded)}"


def decimals(largest: float) -> int:
    """Decimals of the cells of a map whose largest absolute value is this."""
    if not 0 < largest < math.inf:
        return 2
    return min(6, max(0 if largest >= 100 else 1 if largest >= 10 else 2, 1 - math.floor(math.log10(largest))))


def strength(value: float, largest: float) -> str:
    """Strength of a cell's colour in [0, 1]: the square root of its share of the largest."""
    return f"{math.sqrt(abs(value) / largest):.2f}" if largest > 0 and math.isfinite(value) else "0.00"


def estimate_in_words(recipe: Recipe) -> str:
    """What a clean estimate of this recipe is."""
    steps = "step" if recipe.substeps == 1 else "steps"
    return ESTIMATES[recipe.estimate].format(n=recipe.substeps, steps=steps)


def spans(steps: Sequence[int]) -> str:
    """Step numbers in words: ``0–5``, ``1–3 and 7``."""
    runs: list[list[int]] = []
    for step in steps:
        if runs and step == runs[-1][-1] + 1:
            runs[-1].append(step)
        else:
            runs.append([step])
    named = [str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs]
    return " and ".join([", ".join(named[:-1]), named[-1]] if len(named) > 1 else named)


def _keys(options: Mapping[str, Any]) -> str:
    return "\n".join(
        f"{key}: {json.dumps(value)}" if not isinstance(value, str) else f"{key}: {value}"
        for key, value in options.items()
    )


def _facts(seen: Inspection) -> list[tuple[str, str]]:
    recipe = seen.recipe
    start = "one noise for all members" if recipe.shared_noise else "a noise of its own for each member"
    return [
        ("Model", seen.model),
        ("Reward", seen.reward),
        ("Group", f"{seen.trained.shape[0]} members"),
        ("Kernel", f"{recipe.kernel}, level {seen.level:g}"),
        ("Estimate", recipe.estimate + (f", {recipe.substeps} substeps" if recipe.estimate == "substeps" else "")),
        ("Start", start),
        ("Seed", str(recipe.seed)),
    ]


def _embedded(value: Any) -> str:
    """JSON that cannot end the element it stands in."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False, ensure_ascii=True)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _asset(name: str) -> Markup:
    return Markup(resources.files("stepcredit.reports").joinpath("templates", name).read_text(encoding="utf-8"))


def _hash(script: str) -> str:
    """Content-Security-Policy source of a script."""
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
