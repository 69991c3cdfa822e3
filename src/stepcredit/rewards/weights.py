"""Where weights come from: a local folder, or a hub repository pinned to a revision; safetensors only."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from stepcredit.folders import cache_root
from stepcredit.rewards.base import RewardError

# Repository code is never run and pickled weights are never read: both stay off by leaving the library's defaults
# alone and by asking for safetensors in every call below.


@dataclass(frozen=True)
class Hub:
    """A repository of the Hugging Face hub at one commit."""

    id: str
    revision: str | None


def cache_folder(name: str) -> Path:
    """Folder of converted weights: ``weights/<name>`` in the user's cache."""
    return cache_root() / "weights" / name


def library(reward: str) -> Any:
    """The transformers library, imported on first use; RewardError when it is absent."""
    try:
        return importlib.import_module("transformers")
    except ModuleNotFoundError as error:
        raise RewardError(f'reward {reward!r} needs transformers: pip install "stepcredit[diffusers]"') from error


def pick_device(device: str | None) -> torch.device:
    """The device asked for, else the first GPU, else the CPU."""
    return torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))


def resolve(weights: str | Path | None, revision: str | None, default: Hub | Path) -> Hub | Path:
    """What an option ``weights`` means: an existing folder, a hub id ``owner/name``, or None for the default.

    Raises ValueError for what is neither, and for a revision beside a folder.
    """
    if weights is None:
        return Hub(default.id, revision or default.revision) if isinstance(default, Hub) else default
    folder = Path(weights).expanduser()
    if folder.is_dir():
        if revision is not None:
            raise ValueError(f"weights {str(weights)!r} is a folder; a revision ({revision!r}) belongs to a hub id")
        return folder
    text = str(weights)
    if text.count("/") == 1 and not text.startswith((".", "/", "~")):
        return Hub(text, revision)
    raise ValueError(f"weights {text!r} is neither an existing folder nor a hub id 'owner/name'")


def pretrained(reward: str, kind: str, source: Hub | Path, option: str = "weights", **options: Any) -> Any:
    """``transformers.<kind>`` from ``source``, which the reward's ``option`` names.

    Raises RewardError naming the reward, the source and the remedy when the files are absent or do not fit.
    """
    loader = getattr(library(reward), kind)
    try:
        if isinstance(source, Hub):
            return loader.from_pretrained(source.id, revision=source.revision, **options)
        return loader.from_pretrained(source, local_files_only=True, **options)
    except (OSError, ValueError, RuntimeError) as error:
        raise RewardError(missing(reward, source, first_line(error), option)) from error


def model(
    reward: str,
    kind: str,
    source: Hub | Path,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    unused: tuple[str, ...] = (),
) -> Any:
    """A model in evaluation mode, without gradients, in float32 unless told otherwise.

    The library would keep the file's own type, and the differences inside a group are of the order of bfloat16's
    rounding. Raises RewardError as ``pretrained``, and when the file lacks weights that the model has, apart from
    those whose names contain one of ``unused``.
    """
    found, report = pretrained(reward, kind, source, dtype=dtype, use_safetensors=True, output_loading_info=True)
    bad = sorted(map(str, {*report["missing_keys"], *report["mismatched_keys"]}))
    bad = [key for key in bad if not any(part in key for part in unused)]
    if bad:
        raise RewardError(missing(reward, source, f"{len(bad)} weights are absent or of another shape, e.g. {bad[0]}"))
    return found.to(device).eval().requires_grad_(False)


def missing(reward: str, source: Hub | Path, detail: str, option: str = "weights") -> str:
    """The sentence to show when weights cannot be had, or what else the reward's ``option`` names."""
    if isinstance(source, Path):
        return f"reward {reward!r}: cannot load {option} from the folder {source}: {detail}"
    at = f" --revision {source.revision}" if source.revision else ""
    return (
        f"reward {reward!r}: no {option} of {source.id}: run 'hf download {source.id}{at}' on a machine with access, "
        f"or point at a folder with the option {option}: FOLDER ({detail})"
    )


def need_converted(reward: str, source: Hub | Path) -> None:
    """Raise RewardError, with the command to run, when converted weights are expected in a folder and absent."""
    if isinstance(source, Path) and not (source / "model.safetensors").is_file():
        raise RewardError(
            f"reward {reward!r}: no converted weights in {source}: run 'stepcredit rewards convert {reward}' "
            "once, or point at a folder that has them with the option weights: FOLDER"
        )


def first_line(error: BaseException) -> str:
    """The first line of an error's text, or its type."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
