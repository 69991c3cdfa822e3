"""What happened inside the trajectories of a run: reward, gains and turning points by step, early and late."""

from __future__ import annotations

import math
from dataclasses import dataclass

from markupsafe import Markup

from stepcredit.reports import figures
from stepcredit.reports.figures import NARROW, WIDE, Chart, Line
from stepcredit.reports.folder import Object, RunFolder, step_means
from stepcredit.reports.svg import known

COLUMNS = 48
"""Most columns of the heat map."""


@dataclass(frozen=True)
class Steps:
    """Credit by step: charts, a heat map, and the same numbers as rows; ``missing`` says why there are none."""

    charts: tuple[Chart, ...] = ()
    heat: tuple[str, str] | None = None
    """Mean gain by step and iteration, for a wide page and for a phone."""
    early: str = ""
    late: str = ""
    partly: bool = False
    """Some steps are not trained, or not always."""
    rows: tuple[Object, ...] = ()
    missing: str = ""


def steps(run: RunFolder) -> Steps:
    """Gains, their spread, the reward along the trajectory and turning points, early and late in the run."""
    if not run.iterations:
        return Steps(missing="No iteration has been logged yet.")
    gains = run.per_step("gain_mean")
    if not known(*gains):
        credit = run.recipe.get("credit")
        named = f"Credit “{credit}” judges" if isinstance(credit, str) else "The credit of this run judges"
        return Steps(
            missing=f"{named} final images alone, so no intermediate state was scored and there are no gains to show."
        )
    n = len(run.iterations)
    quarter = max(1, n // 4)
    early, late = (slice(0, quarter), slice(n - quarter, n)) if n > 1 else (slice(0, 0), slice(0, 1))
    names = [_span(run, part) for part in (early, late)]

    def halves(key: str) -> tuple[list[float | None], list[float | None]]:
        lists = run.per_step(key)
        return step_means(lists[early]), step_means(lists[late])

    trained = step_means(run.per_step("trained"))
    strip = trained if known(trained) and min(known(trained)) < 1 else None
    spread, turning, path = halves("gain_spread"), halves("turning_share"), halves("R_mean")

    def bars(both: tuple[list[float | None], list[float | None]], label: str, percent: bool = False) -> Markup:
        pairs = [("early", names[0], both[0]), ("late", names[1], both[1])]
        return figures.step_bars([p for p in pairs if known(p[2])], label, strip, percent)

    curves = [Line(role, range(len(y)), y, dots=True) for role, y in zip(("early", "late"), path, strict=True)]
    mean_gain = halves("gain_mean")
    charts = [
        Chart(
            "Reward of the clean estimate",
            figures.lines(curves, "Mean reward of the clean estimate of each state", x_label="state"),
            "Mean reward of the image that each state is heading for; state 0 is noise, the last is the final image.",
        ),
        Chart(
            "Mean gain",
            bars(mean_gain, "Mean gain of each step"),
            "What a step adds to that reward on average.",
        ),
        Chart(
            "Spread of gains within a group",
            bars(spread, "Standard deviation of gains within a group, by step"),
            "How differently members of one group fare at a step: where it is zero there is nothing to learn from.",
        ),
        Chart(
            "Turning points",
            bars(turning, "Share of members that turn at each step", percent=True),
            "Share of members whose step goes against what came before and with all that follows.",
        ),
    ]
    columns = [values for values in gains if values]
    x, size = [float(line["iteration"]) for line in run.iterations], max(1, math.ceil(n / COLUMNS))
    cells = [step_means(gains[c : c + size]) for c in range(0, n, size)]
    names_of_cells = [f"{x[c]:.0f}" for c in range(0, n, size)]
    heat = [
        figures.heat_map(cells, names_of_cells, "Mean gain by step and iteration", (width, 220))
        for width in (WIDE[0], NARROW[0])
    ]
    T = max(len(values) for values in columns)
    table = {
        "gain_early": mean_gain[0], "gain_late": mean_gain[1], "spread_early": spread[0], "spread_late": spread[1],
        "turning": turning[1], "trained": trained,
    }  # fmt: skip
    rows = tuple(
        {"step": i} | {key: values[i] if i < len(values) else None for key, values in table.items()} for i in range(T)
    )
    return Steps(
        tuple(c for c in charts if c.figure),
        (heat[0], heat[1]) if n > 2 and heat[0] else None,
        names[0],
        names[1],
        strip is not None,
        rows,
    )


def _span(run: RunFolder, part: slice) -> str:
    some = [line["iteration"] for line in run.iterations[part]]
    if not some:
        return ""
    return f"iteration {some[0]}" if len(some) == 1 else f"iterations {some[0]}–{some[-1]}"
