"""A place to type in, and finished runs of a desk model and of a tiny pipeline."""

from __future__ import annotations

from pathlib import Path

import pytest
from running import run
from table import TINY, TINY_REHEARSAL


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory with its own cache, no hub, no GPU and one thread; pages are followed in it."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("STEPCREDIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("STEPCREDIT_DATA", raising=False)
    return tmp_path / "here"


@pytest.fixture(scope="session")
def desk_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of compose-stepwise: the bundled model, one iteration of eight pictures."""
    out = tmp_path_factory.mktemp("desk")
    assert run(f"stepcredit train compose-stepwise --quiet --name made --out {out} {TINY}") == 0
    return out / "made"


@pytest.fixture(scope="session")
def pipeline_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished rehearsal of sd35-ocr-stepwise, on a tiny random SD3."""
    pytest.importorskip("diffusers")
    out = tmp_path_factory.mktemp("pipeline")
    command = f"stepcredit train sd35-ocr-stepwise --rehearse --quiet --name made --out {out} {TINY_REHEARSAL}"
    assert run(command) == 0
    return out / "made"
