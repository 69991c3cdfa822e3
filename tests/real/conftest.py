"""What the tests of real models share: the data of other projects, where present, and a cache of their own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def data() -> Path:
    """Files of other projects: ``$STEPCREDIT_DATA``, else ``../shared/data``; tests that need them are skipped."""
    folder = Path(os.environ.get("STEPCREDIT_DATA", Path(__file__).resolve().parents[3] / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"the data of other projects is not in {folder}")
    return folder


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is read from or written to the user's cache or data folder."""
    monkeypatch.setenv("STEPCREDIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("STEPCREDIT_DATA", raising=False)


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No hub, and an empty cache of it."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
