"""``stepcredit export``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro

from stepcredit.cli.common import console, parse, run_folder
from stepcredit.errors import UserError


@dataclass
class Export:
    """Write a run's trained weights in a form that others open, with a model card and a before/after grid.

    Of a pipeline: a LoRA that pipe.load_lora_weights opens, read back and compared by images from the same noise. Of a
    desk model: its safetensors. With --from-peft a folder that PEFT wrote (as flow_grpo does) is converted instead.
    """

    run: tyro.conf.Positional[str | None] = None
    """Name or folder of a run."""
    to: Path | None = None
    """Folder to write; it must be empty or absent."""
    from_peft: Path | None = None
    """Folder of PEFT's save_pretrained to convert to a LoRA of diffusers."""
    model: str | None = None
    """With --from-peft: hub id or folder of the pipeline that the adapter must fit; its weights are not needed."""
    out: Path = Path("runs")
    """Folder that holds the runs."""
    weights: Literal["ema", "last"] = "ema"
    """The averaged weights that were evaluated, or the last ones."""
    checkpoint: str = "auto"
    """Of a run: latest, best, or an iteration; auto is the latest, or the best where a guard stopped the run."""
    seed: int = 0
    """Seed of the noise of the grid."""


def run(argv: Sequence[str]) -> int:
    """Run the command."""
    args = parse(Export, "export", argv)
    if (args.run is None) == (args.from_peft is None):
        raise UserError("give a run to export, or --from-peft and a folder, and not both")
    if args.to is None:
        raise UserError("name the folder to write: --to FOLDER")
    if args.model is not None and args.from_peft is None:
        raise UserError("--model belongs to --from-peft: a run knows its own model")
    out = console()
    if args.from_peft is not None:
        from stepcredit.policies import lora_files

        if args.to.exists() and (not args.to.is_dir() or any(args.to.iterdir())):
            raise UserError(f"{str(args.to)!r} exists and is not empty; nothing is overwritten: give another --to")
        path = lora_files.convert_peft(args.from_peft, args.to, _transformer(args.model) if args.model else None)
        adapter = lora_files.read(path)
        out.print(f"wrote {path}: rank {adapter.rank}, alpha {adapter.alpha:g}, {len(adapter.modules)} layers")
        out.print(f'open it with: pipe.load_lora_weights("{args.to}")')
        return 0
    assert args.run is not None
    from stepcredit.training.export import export_run

    made = export_run(run_folder(args.run, args.out), args.to, args.weights, args.seed, args.checkpoint, out.print)
    for path in made.files:
        out.print(f"wrote {path}")
    out.print(f"opened again and compared: largest difference of an image {made.difference:.1e} ({made.dtype})")
    return 0


def _transformer(model: str) -> Any:
    """The transformer of a pipeline on the meta device: shapes without weights. Raises UserError."""
    from stepcredit.training import models
    from stepcredit.training import recipe as recipes

    recipe = recipes.build({"model": model}, "the command line")
    if models.is_desk(recipe):
        raise UserError(f"--model {model!r} is a desk model, which takes no adapters; name a pipeline")
    return models.blueprint(recipe).build().transformer
