"""`stepcredit rewards`: what is there, what a reward takes, and conversion in a process of its own."""

import hashlib
import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from stepcredit.cli import main
from stepcredit.rewards import names


def test_list_names_every_reward_in_a_line(capsys):
    assert main(["rewards"]) == 0
    printed = capsys.readouterr().out
    for name in names():
        assert any(line.split()[:1] == [name] for line in printed.splitlines()), name


def test_show_gives_documentation_options_and_weights(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("STEPCREDIT_CACHE", str(tmp_path))
    assert main(["rewards", "show", "imagereward"]) == 0
    printed = capsys.readouterr().out
    assert "ImageReward v1.0" in printed
    assert "  device: None" in printed
    kept = f"{tmp_path}/weights/imagereward/model.safetensors"
    assert f"converted: {kept} is absent: stepcredit rewards convert imagereward" in printed
    assert main(["rewards", "show", "jpeg_size"]) == 0
    assert "  goal: 'small'" in capsys.readouterr().out
    assert main(["rewards", "show", "jpegsize"]) == 2
    assert "did you mean 'jpeg_size'" in capsys.readouterr().err
    assert main(["rewards", "show"]) == 2
    assert "name the reward to show" in capsys.readouterr().err


def test_convert_a_published_file(capsys, tmp_path):
    widths, numbers = [768, 1024, 128, 64, 16, 1], [0, 2, 4, 6, 7]
    state = {}
    for number, before, after in zip(numbers, widths[:-1], widths[1:], strict=True):
        state[f"layers.{number}.weight"] = torch.zeros(after, before)
        state[f"layers.{number}.bias"] = torch.zeros(after)
    file = tmp_path / "head.pth"
    torch.save(state, file)
    assert main(["rewards", "convert", "aesthetic", str(file), "--to", str(tmp_path / "out")]) == 2
    assert f"has SHA-256 {hashlib.sha256(file.read_bytes()).hexdigest()}, expected 21dd590f" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert main(["rewards", "convert", "jpeg_size", str(file)]) == 2
    assert "known are aesthetic" in capsys.readouterr().err


def test_convert_the_real_head(capsys, tmp_path):
    data = Path(os.environ.get("STEPCREDIT_DATA", Path(__file__).resolve().parents[3] / "shared" / "data"))
    file = data / "aesthetic" / "sac+logos+ava1-l14-linearMSE.pth"
    if not file.is_file():
        pytest.skip(f"needs {file.name} of improved-aesthetic-predictor in $STEPCREDIT_DATA/aesthetic")
    assert main(["rewards", "convert", "aesthetic", str(file), "--to", str(tmp_path / "out")]) == 0
    assert "wrote" in capsys.readouterr().out
    assert load_file(tmp_path / "out" / "model.safetensors")["weight"].shape == (768,)
    assert json.loads((tmp_path / "out" / "source.json").read_text())["file"] == file.name
