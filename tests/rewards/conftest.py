"""Tiny random models of the real classes, saved in folders as the hub would serve them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import string
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch


@pytest.fixture(scope="session")
def data() -> Path:
    """Files of other projects for tests: ``$STEPCREDIT_DATA``, else ``../shared/data`` beside the repository."""
    return Path(os.environ.get("STEPCREDIT_DATA", Path(__file__).resolve().parents[3] / "shared" / "data"))


def _clip_tokenizer() -> Any:
    """CLIP's tokenizer with single characters for tokens."""
    transformers = pytest.importorskip("transformers")
    characters = string.ascii_lowercase + string.digits + string.punctuation
    pieces = ["<|startoftext|>", "<|endoftext|>", *characters, *(f"{char}</w>" for char in characters)]
    return transformers.CLIPTokenizer(vocab={piece: index for index, piece in enumerate(pieces)}, merges=[])


@pytest.fixture(scope="session")
def clip_config() -> dict[str, Any]:
    """A CLIP of two layers; its end token is the tokenizer's, as in laion's configuration."""
    shared = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    text = {"vocab_size": 138, "max_position_embeddings": 77, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
    return {
        "projection_dim": 12,
        "text_config": {**shared, **text, "hidden_act": "gelu", "projection_dim": 12},
        "vision_config": {
            **shared,
            "hidden_size": 24,
            "image_size": 28,
            "patch_size": 14,
            "hidden_act": "gelu",
            "projection_dim": 12,
        },
    }


@pytest.fixture(scope="session")
def clip_folder(tmp_path_factory: pytest.TempPathFactory, clip_config: dict[str, Any]) -> Path:
    """A random CLIP with its tokenizer."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("clip")
    torch.manual_seed(0)
    model = transformers.CLIPModel(transformers.CLIPConfig(**clip_config))
    for name, parameter in model.named_parameters():
        if name != "logit_scale":  # larger than at initialisation, so that images differ in score
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    _clip_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def pictures() -> torch.Tensor:
    """Smooth random pictures, float32 ``[6, 3, 40, 56]`` in [0, 1]."""
    coarse = torch.rand(6, 3, 5, 7, generator=torch.Generator().manual_seed(3))
    return torch.nn.functional.interpolate(coarse, (40, 56), mode="bilinear").clamp(0, 1)


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No hub, and an empty cache of converted weights."""
    pytest.importorskip("transformers")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("STEPCREDIT_CACHE", str(tmp_path / "cache"))


class Script:
    """A server on the loopback that gives prepared answers, raw bytes each, and remembers the requests."""

    def __init__(self) -> None:
        self.answers: list[bytes | None] = []
        self.requests: list[tuple[str, bytes]] = []
        self.respond: Callable[[dict[str, Any]], object] | None = None
        """Answers a JSON message with another, when no answer is prepared."""
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        threading.Thread(target=self._run, daemon=True).start()

    def json(self, message: object, status: str = "200 OK") -> None:
        """Prepare a JSON answer."""
        self.raw(json.dumps(message).encode(), status)

    def raw(self, body: bytes, status: str = "200 OK", kind: str = "application/json", *headers: str) -> None:
        """Prepare an answer of any body and headers."""
        head = [f"HTTP/1.1 {status}", f"Content-Type: {kind}", f"Content-Length: {len(body)}", *headers]
        self.answers.append("\r\n".join(head).encode() + b"\r\n\r\n" + body)

    def _run(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            with connection, connection.makefile("rb") as stream:
                head = b"".join(iter(stream.readline, b"\r\n")).decode("latin-1")
                length = re.search(r"content-length: (\d+)", head, re.IGNORECASE)
                self.requests.append((head, stream.read(int(length[1])) if length else b""))
                if not self.answers and self.respond:
                    self.json(self.respond(json.loads(self.requests[-1][1])))
                answer = self.answers.pop(0) if self.answers else b""
                if answer is None:  # silence
                    stream.read(1)
                else:
                    with contextlib.suppress(OSError):
                        connection.sendall(answer)

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def script() -> Iterator[Script]:
    server = Script()
    yield server
    server.close()
