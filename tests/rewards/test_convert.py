"""Conversion of published pickles: verified first, in a process of its own, complete or not at all."""

from __future__ import annotations

import hashlib
import json
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from stepcredit.rewards import RewardError, convert
from stepcredit.rewards.aesthetic import compose_affine, linear_layers

AESTHETIC = "aesthetic/sac+logos+ava1-l14-linearMSE.pth"


@pytest.fixture
def published(data: Path) -> Path:
    file = data / AESTHETIC
    if not file.is_file():
        pytest.skip(f"needs {file.name} of improved-aesthetic-predictor in $STEPCREDIT_DATA/aesthetic")
    return file


def _five_layers(seed: int = 0) -> dict[str, Tensor]:
    """A head of the published shape with random weights."""
    generator = torch.Generator().manual_seed(seed)
    widths, numbers = [768, 1024, 128, 64, 16, 1], [0, 2, 4, 6, 7]
    state = {}
    for number, before, after in zip(numbers, widths[:-1], widths[1:], strict=True):
        state[f"layers.{number}.weight"] = torch.randn(after, before, generator=generator) / before**0.5
        state[f"layers.{number}.bias"] = torch.randn(after, generator=generator)
    return state


def _network(state: dict[str, Tensor], x: Tensor) -> Tensor:
    for number in (0, 2, 4, 6, 7):
        x = x @ state[f"layers.{number}.weight"].double().T + state[f"layers.{number}.bias"].double()
    return x


def test_the_published_aesthetic_head_is_affine(published: Path) -> None:
    recipe = convert.RECIPES["aesthetic"]
    assert recipe.sha256 is not None
    state = convert.read(published, recipe.sha256)
    head = recipe.convert(state)
    x = torch.nn.functional.normalize(torch.randn(64, 768, dtype=torch.float64), dim=1)
    assert (_network(state, x)[:, 0] - (x @ head["weight"] + head["bias"])).abs().max() < 1e-8
    assert float(head["weight"].norm()) == pytest.approx(17.9956, abs=1e-4)
    assert float(head["bias"]) == pytest.approx(5.23664584, abs=1e-8)


def test_it_runs_in_a_process_of_its_own_and_is_kept(published: Path, tmp_path: Path) -> None:
    folder = convert.run("aesthetic", published, tmp_path / "head")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["head"]
    assert sorted(path.name for path in folder.iterdir()) == ["model.safetensors", "source.json"]
    source = json.loads((folder / "source.json").read_text())
    assert source["sha256"] == convert.RECIPES["aesthetic"].sha256
    assert source["converted_sha256"] == hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    head = load_file(folder / "model.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in head.items()} == {"weight": (768,), "bias": (1,)}
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert convert.convert_here("aesthetic", published, folder, None) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == before


def test_affine_composition_of_random_layers() -> None:
    state = _five_layers()
    weight, bias = compose_affine(linear_layers(state, "layers."))
    x = torch.randn(8, 768, dtype=torch.float64)
    assert torch.allclose(_network(state, x), x @ weight.T + bias, atol=1e-10)


class _Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (Path.touch, (Path("stepcredit-was-here"),))  # type: ignore[return-value]


def _save(obj: object, file: Path) -> str:
    torch.save(obj, file)
    return hashlib.sha256(file.read_bytes()).hexdigest()


def test_wrong_or_dangerous_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "file.pth"
    wrong = _save(_five_layers(), file)
    with pytest.raises(RewardError, match=rf"has SHA-256 {wrong}, expected 21dd590f.*download it again"):
        convert.convert_here("aesthetic", file, tmp_path / "out", None)
    with pytest.raises(RewardError, match="not a plain file of weights"):
        convert.read(file, _save({"layers.0.weight": _Evil()}, file))
    assert not (tmp_path / "stepcredit-was-here").exists()
    file.write_bytes(pickle.dumps(_Evil()))
    with pytest.raises(RewardError, match="not a plain file of weights"):
        convert.read(file, convert.digest(file))
    assert not (tmp_path / "stepcredit-was-here").exists()
    for held, message in (
        ([torch.zeros(1)], "holds list"),
        ({"a": 1}, "'a' is int, not a tensor"),
        ({"a": torch.tensor(float("nan"))}, "'a' is not finite"),
    ):
        with pytest.raises(RewardError, match=message):
            convert.read(file, _save(held, file))
    assert not (tmp_path / "out").exists()


def test_nested_state_dicts_are_unwrapped(tmp_path: Path) -> None:
    file = tmp_path / "file.pt"
    sha256 = _save({"epoch": 3, "state_dict": {"a": torch.ones(2)}}, file)
    assert convert.read(file, sha256)["a"].tolist() == [1, 1]


def test_files_without_a_known_checksum_need_one(tmp_path: Path) -> None:
    file = tmp_path / "ImageReward.pt"
    sha256 = _save({"mlp.layers.0.weight": torch.ones(1, 768), "mlp.layers.0.bias": torch.zeros(1)}, file)
    with pytest.raises(RewardError, match=rf"yours is {sha256}.*--sha256"):
        convert.convert_here("imagereward", file, tmp_path / "out", None)
    folder = convert.convert_here("imagereward", file, tmp_path / "out", sha256)
    assert json.loads((folder / "config.json").read_text())["model_type"] == "blip"
    (folder / "source.json").write_text("{}")
    with pytest.raises(RewardError, match="exists and holds something else"):
        convert.convert_here("imagereward", file, folder, sha256)


@pytest.mark.usefixtures("offline")
def test_messages_of_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert convert.main(["aesthetic"]) == 1
    assert "give the file: download sac+logos" in capsys.readouterr().err
    assert convert.main(["hpsv2.1"]) == 1
    assert "cannot download HPS_v2.1_compressed.pt from xswu/HPSv2" in capsys.readouterr().err
    assert convert.main(["aesthetic", str(tmp_path / "none.pth")]) == 1
    assert "no file" in capsys.readouterr().err
    with pytest.raises(ValueError, match="known are aesthetic"):
        convert.run("pickscore")
    with pytest.raises(RewardError, match="no file"):
        convert.run("aesthetic", tmp_path / "none.pth")
