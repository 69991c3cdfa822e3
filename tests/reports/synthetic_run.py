"""A made-up run folder in the format that training writes: small, deterministic, and shaped like a real run."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

from stepcredit.training.comparison import over_prompts

STEPS = 10
TAGS = ("single_object", "two_object", "counting", "colors", "position", "color_attr")
COLORS = {"red": (227, 51, 56), "green": (56, 168, 84), "blue": (41, 107, 230), "orange": (250, 135, 23)}
SIZE = 32
SHOWN = 24
RECIPE = """\
task: compose
model: null
seed: 0
iterations: {iterations}
prompts_per_iteration: 8
group_size: 16
micro_batch: 32
steps: 10
kernel: ddim
level: 0.7
shared_noise: true
window: null
estimate: substeps
substeps: 2
credit: {credit}
advantage: centred
clip: 0.0001
kl_beta: {kl_beta}
lr: 0.0003
grad_clip: 1.0
ema: 0.9
eval_every: 10
eval_prompts: 240
eval_prompts_during: 120
"""


def write_run(
    folder: Path,
    iterations: int = 40,
    credit: str = "gain",
    kl_beta: float = 0.0,
    finished: bool = True,
    lift: float = 0.12,
    prompts: int = 240,
    first_prompt: str | None = None,
) -> Path:
    """Write a run whose held-out reward rises by about ``lift``; an unfinished one has no summary and no samples."""
    rng = np.random.default_rng(7)
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").write_text(RECIPE.format(iterations=40, credit=credit, kl_beta=kl_beta))
    _json(folder / "origin.json", {"recipe": "compose-stepwise", "overrides": {"lr": 0.0003}})
    _json(folder / "ledger.json", _ledger())
    slots = [
        {"prompt": first_prompt if first_prompt and k == 0 else _prompt(k // 2), "tag": TAGS[k // 2 % 6], "slot": k}
        for k in range(prompts)
    ]
    base = np.clip(rng.normal(0.72 - 0.05 * np.array([TAGS.index(s["tag"]) for s in slots]), 0.22), 0, 1).round(3)
    gone = rng.normal(1, 0.9, prompts)
    lines: list[dict[str, Any]] = [{"iteration": 0, "evaluation": _evaluation(slots, base, 0.0), "seconds": 6.1}]
    _rows(folder, "iteration-000000", slots, base)
    for k in range(1, iterations + 1):
        line = _iteration(k, credit, kl_beta, lift, rng)
        if k % 10 == 0 and k < iterations:
            rewards = np.clip(base + lift * k / 40 * gone, 0, 1)[: prompts // 2]
            line["evaluation"] = _evaluation(slots[: prompts // 2], rewards, k / 40)
            _rows(folder, f"iteration-{k:06d}", slots[: prompts // 2], rewards)
        lines.append(line)
    text = "\n".join(json.dumps(line) for line in lines) + "\n"
    (folder / "metrics.jsonl").write_text(text)
    (folder / "samples").mkdir()
    if not finished:
        return folder
    after = np.clip(base + lift * gone, 0, 1)
    _rows(folder, "after", slots, after)
    _samples(folder / "samples", slots[:SHOWN], base, after, rng)
    _json(folder / "summary.json", _summary(folder.name, slots, base, after, lines))
    return folder


def _prompt(k: int) -> str:
    colors, shapes = list(COLORS), ("circle", "square", "triangle")
    return (
        f"a {colors[k % 4]} {shapes[k % 3]}",
        f"a {shapes[k % 3]} and a {shapes[(k + 1) % 3]}",
        f"three {colors[k % 4]} {shapes[k % 3]}s",
        f"a photo of a {colors[(k + 1) % 4]} {shapes[k % 3]} on black",
        f"a {shapes[k % 3]} to the left of a {shapes[(k + 2) % 3]}",
        f"a {colors[k % 4]} {shapes[k % 3]} and a {colors[(k + 2) % 4]} {shapes[(k + 1) % 3]}",
    )[k % 6] + f", number {k}"


def _ledger() -> dict[str, float]:
    counts = {
        "rollout_evaluations": 1160, "scoring_evaluations": 944, "decodes": 1160, "reward_calls": 1160,
        "trained_evaluations": 1024, "model_evaluations": 2104,
    }  # fmt: skip
    return {"trajectories": 128, **counts, **{f"{name}_per_trajectory": n / 128 for name, n in counts.items()}}


def _interval(values: Any, slots: list[dict[str, Any]]) -> dict[str, float]:
    prompts, tags = [slot["prompt"] for slot in slots], [slot["tag"] for slot in slots]
    return over_prompts(np.asarray(values, dtype=float), prompts, tags).as_dict()


def _evaluation(slots: list[dict[str, Any]], rewards: Any, progress: float) -> dict[str, Any]:
    per_tag = {t: float(np.mean([r for r, s in zip(rewards, slots, strict=True) if s["tag"] == t])) for t in TAGS}
    statistics = {"brightness": 0.61 + 0.02 * progress, "contrast": 0.21, "edge_energy": 0.054 + 0.01 * progress}
    return {
        **_interval(rewards, slots), "exact": _interval(np.asarray(rewards) > 0.75, slots), "per_tag": per_tag,
        "image_statistics": statistics, "prompts": len(slots),
    }  # fmt: skip


def _iteration(k: int, credit: str, kl_beta: float, lift: float, rng: np.random.Generator) -> dict[str, Any]:
    done = k / 40
    i = np.arange(STEPS)
    gains = 0.07 * np.exp(-((i - 4.2) ** 2) / 6) + rng.normal(0, 0.004, STEPS) + 0.02 * done
    gains[0], gains[9] = 0.0, -0.004
    final = 0.62 + lift * done + rng.normal(0, 0.02)
    states = np.concatenate([[final - gains.sum()], final - gains.sum() + gains.cumsum()])
    dense = {
        "gain_mean": gains.tolist(),
        "gain_spread": ((0.4 - 0.1 * done) * np.exp(-((i - 3) ** 2) / 14)).tolist(),
        "turning_share": (0.22 * np.exp(-((i - 3) ** 2) / 9)).tolist(),
    }
    scored = credit != "uniform"
    trained = [0 < step < 9 for step in range(STEPS)]
    return {
        "iteration": k,
        "reward": {"mean": final, "low": final - 0.04, "high": final + 0.04},
        "R_mean": states.tolist() if scored else [None] * STEPS + [final],
        **(dense if scored else {}),
        "advantage_abs": [0.8 if t else None for t in trained],
        "trained": trained,
        "degenerate_groups": int(rng.integers(0, 3)),
        "groups": 8,
        "failed_samples": 0,
        "ratio_deviation": 0.0,
        "clip_fraction": [0.0 if t else None for t in trained],
        "kl": [1e-4 * k if t else None for t in trained] if kl_beta else None,
        "grad_norm": 0.3 + 0.1 * math.sin(k) + rng.normal(0, 0.02),
        "loss": 1e-3,
        "lr": 3e-4,
        "seconds": 2.4,
        "phase_seconds": {"rollout": 0.7, "scoring": 0.9, "update": 0.8},
        "memory_mb": 812.0,
        "model_evaluations": 2104 * k,
        "evaluation": None,
    }


def _rows(folder: Path, stem: str, slots: list[dict[str, Any]], rewards: Any) -> None:
    (folder / "evaluations").mkdir(exist_ok=True)
    rows = [{**slot, "reward": float(r), "exact": bool(r > 0.75)} for slot, r in zip(slots, rewards, strict=True)]
    (folder / "evaluations" / f"{stem}.jsonl").write_text("\n".join(json.dumps(row) for row in rows) + "\n")


def _summary(name: str, slots: list[dict[str, Any]], before: Any, after: Any, lines: list[Any]) -> dict[str, Any]:
    first, last = _evaluation(slots, before, 0), _evaluation(slots, after, 1)
    return {
        "name": name, "task": "compose", "reward": "compose",
        "reward_before": _interval(before, slots), "reward_after": _interval(after, slots),
        "improvement": _interval(after - before, slots),
        "exact_before": first["exact"], "exact_after": last["exact"],
        "per_tag": {tag: {"before": first["per_tag"][tag], "after": last["per_tag"][tag]} for tag in TAGS},
        "iterations": len(lines) - 1, "seconds": 2.4 * (len(lines) - 1), "model_evaluations": 84_160,
        "best_iteration": 30, "stopped": None, "memory_mb": 812.0,
        "machine": {"processor": "x86_64", "cores": 2, "threads": 2, "gpu": None, "torch": "2.13.0"},
    }  # fmt: skip


def _samples(folder: Path, slots: list[dict[str, Any]], before: Any, after: Any, rng: np.random.Generator) -> None:
    columns = 6
    sheets = [Image.new("RGB", (columns * SIZE, math.ceil(len(slots) / columns) * SIZE), "white") for _ in range(2)]
    for k in range(len(slots)):
        clean = _drawing(k)
        for sheet, blur, noise in zip(sheets, (1.6, 0.5), (16, 5), strict=True):
            pixels = np.asarray(clean.filter(ImageFilter.GaussianBlur(blur)), dtype=float)
            pixels = np.clip(pixels + rng.normal(0, noise, pixels.shape), 0, 255).astype(np.uint8)
            sheet.paste(Image.fromarray(pixels), (k % columns * SIZE, k // columns * SIZE))
    sheets[0].save(folder / "before.png")
    sheets[1].save(folder / "after.png")
    index = {
        "prompts": [slot["prompt"] for slot in slots], "tags": [slot["tag"] for slot in slots],
        "rewards_before": before[: len(slots)].tolist(), "rewards_after": after[: len(slots)].tolist(),
        "columns": columns, "size": [SIZE, SIZE],
    }  # fmt: skip
    _json(folder / "samples.json", index)


def _drawing(k: int) -> Image.Image:
    image = Image.new("RGB", (SIZE * 4, SIZE * 4), ("white", "black", (158, 158, 158))[k % 3])
    draw = ImageDraw.Draw(image)
    for n in range(1 + k % 3):
        x, y, side = 10 + 38 * n, 12 + (k * 29 + n * 41) % 60, 36
        color = list(COLORS.values())[(k + n) % 4]
        if (k + n) % 2:
            draw.ellipse((x, y, x + side, y + side), fill=color)
        else:
            draw.polygon([(x, y + side), (x + side, y + side), (x + side // 2, y)], fill=color)
    return image.resize((SIZE, SIZE), Image.Resampling.BOX)


def _json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value))
