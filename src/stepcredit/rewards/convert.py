"""Turn a published pickle of weights into safetensors, once: ``stepcredit rewards convert NAME [FILE]``.

The only module that reads a pickle. It does so in a process of its own, which ``run`` starts, after the file's SHA-256
has been verified, with the loader that builds tensors and plain containers and nothing else. Of HPSv3, whose weights
are no pickle, it is the question that is read so, from the source of the published package.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stepcredit.errors import UserError
from stepcredit.rewards import aesthetic, hps, hpsv3, imagereward, mask2former_names
from stepcredit.rewards.base import RewardError
from stepcredit.rewards.weights import Hub, cache_folder
from stepcredit.tasks.fetch import download


@dataclass(frozen=True)
class Recipe:
    """One published file and what becomes of it."""

    file: str
    origin: str
    """Where a user finds the file, for messages."""
    sha256: str | None
    """Digest of the file, where it was published; else it must be given."""
    hub: Hub | None
    convert: Callable[[Mapping[str, Tensor]], dict[str, Tensor]] | None
    """From the weights in the file to those that are kept; None where the file holds none."""
    config: Mapping[str, Any] | None = None
    """config.json to write beside the weights."""
    text: Callable[[Path], str] | None = None
    """The text in the file that is kept, where it holds no weights."""
    url: str | None = None
    """Address of the file, where it is not on the hub."""

    @property
    def product(self) -> str:
        """Name of what is kept in the folder."""
        return hpsv3.QUESTION if self.text else "model.safetensors"


RECIPES = {
    "aesthetic": Recipe(
        "sac+logos+ava1-l14-linearMSE.pth",
        "github.com/christophschuhmann/improved-aesthetic-predictor",
        "21dd590f3ccdc646f0d53120778b296013b096a035a2718c9cb0d511bff0f1e0",
        None,
        aesthetic.convert,
    ),
    "hpsv2.1": Recipe(
        "HPS_v2.1_compressed.pt",
        "huggingface.co/xswu/HPSv2",
        "c57a38fb4a2f7e7c15bf00da2ea377cdf165448b4dd1052a484c215a998c9837",
        Hub("xswu/HPSv2", "697403c78157020a1ae59d23f111aa58ced35b0a"),
        hps.convert,
        {"model_type": "clip", **hps.CONFIG},
    ),
    "imagereward": Recipe(
        "ImageReward.pt",
        "huggingface.co/zai-org/ImageReward",
        None,
        Hub("zai-org/ImageReward", "5736be03b2652728fb87788c9797b0570450ab72"),
        imagereward.convert,
        {"model_type": "blip", **imagereward.CONFIG},
    ),
    "geneval": Recipe(
        mask2former_names.FILE,
        "huggingface.co/tsbpp/geneval_mask2former",
        mask2former_names.SHA256,
        Hub("tsbpp/geneval_mask2former", "22b5a198cedf6b45e45165cf1c865d58de4a2832"),
        mask2former_names.convert,
        mask2former_names.CONFIG,
    ),
    "hpsv3": Recipe(
        "hpsv3-1.0.0-py3-none-any.whl",
        "pypi.org/project/hpsv3",
        "1a1b3ed1f538315ddf0e90c55b9f5c8ab3248d772cd713c11f7dfe35bf867ab3",
        None,
        None,
        text=hpsv3.question_of,
        url="https://files.pythonhosted.org/packages/20/ed/6feb979b0086f57dc7a8b545693e1dbeffd60c8d942971e0445c65fcf438"
        "/hpsv3-1.0.0-py3-none-any.whl",
    ),
}


def run(name: str, file: Path | None = None, out: Path | None = None, sha256: str | None = None) -> Path:
    """Convert in a process of its own and return the folder written.

    ``file`` is fetched from the hub when it is None and the hub has it. Raises ValueError for an unknown name and
    RewardError, with the sentence of the other process, when anything is wrong with the file.
    """
    if name not in RECIPES:
        raise ValueError(f"nothing to convert for {name!r}; known are {', '.join(RECIPES)}")
    command = [sys.executable, "-m", "stepcredit.rewards.convert", name]
    command += [str(file)] if file else []
    command += ["--out", str(out)] if out else []
    command += ["--sha256", sha256] if sha256 else []
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        raise RewardError(lines[-1] if lines else f"converting {name} ended with status {done.returncode}")
    return Path(done.stdout.strip().splitlines()[-1])


def digest(file: Path) -> str:
    """SHA-256 of a file, as 64 hex digits."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def verify(file: Path, sha256: str) -> None:
    """Raise RewardError unless the file's digest is ``sha256``."""
    found = digest(file)
    if found != sha256:
        raise RewardError(f"{file.name} has SHA-256 {found}, expected {sha256}: download it again")


def read(file: Path, sha256: str) -> dict[str, Tensor]:
    """The state dict in a pickled file whose digest is ``sha256``.

    Raises RewardError for another digest, before the file is opened as a pickle, and for a file that holds anything
    but named finite tensors.
    """
    verify(file, sha256)
    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        raise RewardError(f"{file.name} is not a plain file of weights: {str(error).splitlines()[0]}") from error
    while isinstance(state, dict) and isinstance(state.get("state_dict"), Mapping):
        state = state["state_dict"]
    if not isinstance(state, Mapping) or not state:
        raise RewardError(f"{file.name} holds {type(state).__name__}, not named tensors")
    for key, tensor in state.items():
        if not isinstance(key, str) or not isinstance(tensor, Tensor):
            raise RewardError(f"{file.name}: {key!r} is {type(tensor).__name__}, not a tensor")
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise RewardError(f"{file.name}: {key!r} is not finite")
    return dict(state)


def convert_here(name: str, file: Path | None, out: Path | None, sha256: str | None) -> Path:
    """Convert in this process: verify, read, write what is kept with ``config.json`` and ``source.json``.

    The folder appears complete or not at all. An existing one is kept if it came of the same file, and never replaced.
    """
    recipe = RECIPES[name]
    with tempfile.TemporaryDirectory() as scratch:
        if file is None:
            file, published = fetch(name, recipe, Path(scratch))
            sha256 = sha256 or published
        if not file.is_file():
            raise RewardError(f"no file {file}; {recipe.file} is published at {recipe.origin}")
        expected = recipe.sha256 or sha256
        if expected is None:
            raise RewardError(
                f"no published checksum of {recipe.file} is known here; yours is {digest(file)}: compare it with the "
                f"one shown at {recipe.origin} and give it with --sha256"
            )
        folder = out or cache_folder(name)
        if folder.exists():
            try:
                same = json.loads((folder / "source.json").read_text())["sha256"] == expected
            except (OSError, ValueError, KeyError, TypeError):
                same = False
            if same:
                return folder
            raise RewardError(f"{folder} exists and holds something else; move it away or choose another --out")
        draft = folder.with_name(f"{folder.name}.tmp-{os.getpid()}")
        draft.mkdir(parents=True)
        try:
            _keep(recipe, file, expected, draft)
            draft.rename(folder)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise
    return folder


def _keep(recipe: Recipe, file: Path, expected: str, folder: Path) -> None:
    """Write what a file comes to, and where it is from, into a folder. Raises RewardError."""
    from safetensors.torch import save_file

    product = folder / recipe.product
    try:
        if recipe.convert:
            save_file(recipe.convert(read(file, expected)), product, metadata={"format": "pt"})
        if recipe.text:
            verify(file, expected)
            product.write_text(recipe.text(file), encoding="utf-8")
    except (ValueError, KeyError) as error:
        raise RewardError(f"{file.name} is not {recipe.file}: {error}") from error
    if recipe.config:
        (folder / "config.json").write_text(json.dumps(recipe.config, indent=2) + "\n")
    source = {"file": recipe.file, "origin": recipe.origin, "sha256": expected, "converted_sha256": digest(product)}
    (folder / "source.json").write_text(json.dumps(source, indent=2) + "\n")


def fetch(name: str, recipe: Recipe, scratch: Path) -> tuple[Path, str | None]:
    """The published file, and the digest that the hub states.

    From the hub at the pinned revision, into its client's cache; from an address into ``scratch``. Raises RewardError
    for a file that has neither, and when it cannot be reached.
    """
    if recipe.url:
        try:
            (scratch / recipe.file).write_bytes(download(recipe.url))
        except UserError as error:
            raise RewardError(
                f"cannot download {recipe.file} ({error}); fetch it elsewhere, as by `pip download --no-deps`, and "
                f"give it: stepcredit rewards convert {name} FILE"
            ) from error
        return scratch / recipe.file, None
    if recipe.hub is None:
        raise RewardError(f"give the file: download {recipe.file} from {recipe.origin}, then convert {name} FILE")
    import huggingface_hub as hub

    repository, revision = recipe.hub.id, recipe.hub.revision
    try:
        etag = hub.get_hf_file_metadata(hub.hf_hub_url(repository, recipe.file, revision=revision)).etag
        file = Path(hub.hf_hub_download(repository, recipe.file, revision=revision))
    except Exception as error:
        detail = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise RewardError(
            f"cannot download {recipe.file} from {recipe.hub.id}: fetch it elsewhere and give the file ({detail})"
        ) from error
    return file, etag if etag and len(etag) == 64 else None


def main(arguments: Sequence[str] | None = None) -> int:
    """What the process that ``run`` starts does; prints the folder written, or one sentence on what is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=list(RECIPES))
    parser.add_argument("file", nargs="?", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--sha256")
    chosen = parser.parse_args(arguments)
    try:
        print(convert_here(chosen.name, chosen.file, chosen.out, chosen.sha256))
    except (RewardError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
