"""The README's picture, from the folder of a run: pictures before and after, the curve, and gains by step.

python benchmarks/figure.py runs/spell-stepwise docs/images/quickstart.png
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from PIL import Image

PAIRS, WIDTH = 8, 10.0
INK, PALE = "#33415c", "#9aa5b8"


def main(run: Path, target: Path) -> None:
    """Draw the figure."""
    index = json.loads((run / "samples" / "samples.json").read_text())
    before, after = (_tiles(run / "samples" / f"{name}.png", index) for name in ("before", "after"))
    # every tag in turn, the first pictures of each: not chosen by how they came out
    chosen = list(range(min(PAIRS, len(index["prompts"]))))
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((run / "summary.json").read_text())

    plt.rcParams.update({"font.size": 8, "font.family": "DejaVu Sans", "axes.edgecolor": PALE, "text.color": INK})
    tile = 0.88 * WIDTH / len(chosen) * before[0].shape[0] / before[0].shape[1]  # inches high; pictures may be wide
    titles, label, gap, curves = 0.4, 0.35, 0.4, 1.3
    height = titles + 2 * (tile + label) + gap + curves
    figure = plt.figure(figsize=(WIDTH, height), dpi=160)
    top, bottom = 1 - titles / height, 1 - (titles + 2 * tile + label) / height
    grid = figure.add_gridspec(2, len(chosen), top=top, bottom=bottom, hspace=label / tile, wspace=0.12)
    plots = figure.add_gridspec(1, 2, top=curves / height, bottom=0.0, wspace=0.16)
    for column, k in enumerate(chosen):
        for row, tiles in enumerate((before, after)):
            axis = figure.add_subplot(grid[row, column])
            axis.imshow(tiles[k], interpolation="nearest")
            axis.set_xticks([])
            axis.set_yticks([])
            reward = index["rewards_after" if row else "rewards_before"][k]
            axis.set_xlabel(f"{reward:.2f}", color=INK, labelpad=2)
            if row == 0:
                axis.set_title(_wrapped(index["prompts"][k]), fontsize=6.5, color=INK)
            if column == 0:
                axis.set_ylabel("after" if row else "before", color=INK)
    _curve(figure.add_subplot(plots[0]), lines, summary)
    _gains(figure.add_subplot(plots[1]), lines)
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, bbox_inches="tight", facecolor="white")


def _curve(axis: Any, lines: list[dict[str, Any]], summary: dict[str, Any]) -> None:
    points = [(0, summary["reward_before"]), *((e["iteration"], e["evaluation"]) for e in lines[1:] if e["evaluation"])]
    points.append((summary["iterations"], summary["reward_after"]))
    x = [iteration for iteration, _ in points]
    axis.fill_between(x, [p["low"] for _, p in points], [p["high"] for _, p in points], color=INK, alpha=0.15, lw=0)
    axis.plot(x, [p["mean"] for _, p in points], color=INK, marker="o", ms=3)
    axis.set_title("held-out reward by iteration (95 % interval over prompts)", color=INK, loc="left")
    axis.set_xticks(range(0, summary["iterations"] + 1, max(1, summary["iterations"] // 4)))
    axis.spines[["top", "right"]].set_visible(False)
    axis.tick_params(colors=INK)


def _gains(axis: Any, lines: list[dict[str, Any]]) -> None:
    spread = np.array([line["gain_spread"] for line in lines[1:]], dtype=float)
    steps = np.arange(spread.shape[1])
    width = 0.38
    axis.bar(steps - width / 2, spread[:5].mean(0), width, color=PALE, label="first 5 iterations")
    axis.bar(steps + width / 2, spread[-5:].mean(0), width, color=INK, label="last 5")
    axis.set_title("spread of gains within a group, by denoising step", color=INK, loc="left")
    axis.set_xticks(steps)
    axis.legend(frameon=False, fontsize=7)
    axis.spines[["top", "right"]].set_visible(False)
    axis.tick_params(colors=INK)


def _tiles(path: Path, index: dict[str, Any]) -> list[np.ndarray]:
    sheet = np.asarray(Image.open(path))
    height, width = index["size"]
    columns = index["columns"]
    return [
        sheet[k // columns * height :, k % columns * width :][:height, :width] for k in range(len(index["prompts"]))
    ]


def _wrapped(text: str) -> str:
    words, lines = text.split(), [""]
    for word in words:
        if len(lines[-1]) + len(word) > 17:
            lines.append("")
        lines[-1] += (" " if lines[-1] else "") + word
    return "\n".join(lines)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
