"""``stepcredit export``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

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
    out: Path = Path("runs")
    """Folder that holds the runs."""
    weights: Literal["ema", "last"] = "ema"
    """The averaged weights that were evaluated, or the last ones."""
    seed: int = 0
    """Seed of the noise of the grid."""


def run(argv: Sequence[str]) -> int:
    """Run the command."""
    args = parse(Export, "export", argv)
    if (args.run is None) == (args.from_peft is None):
        raise UserError("give a run to export, or --from-peft and a folder, and not both")
    if args.to is None:
        raise UserError("name the folder to write: --to FOLDER")
    out = console()
    if args.from_peft is not None:
        from stepcredit.policies import lora_files

        if args.to.exists() and (not args.to.is_dir() or any(args.to.iterdir())):
            raise UserError(f"{str(args.to)!r} exists and is not empty; nothing is overwritten: give another --to")
        path = lora_files.convert_peft(args.from_peft, args.to)
        adapter = lora_files.read(path)
        out.print(f"wrote {path}: rank {adapter.rank}, alpha {adapter.alpha:g}, {len(adapter.modules)} layers")
        out.print(f'open it with: pipe.load_lora_weights("{args.to}")')
        return 0
    assert args.run is not None
    from stepcredit.training.export import export_run

    made = export_run(run_folder(args.run, args.out), args.to, args.weights, args.seed)
    for path in made.files:
        out.print(f"wrote {path}")
    out.print(f"opened again and compared: largest difference of an image {made.difference:.1e} ({made.dtype})")
    return 0
