"""The remote reward and its server: the same scores as in one process, and what happens when either side misbehaves."""

from __future__ import annotations

import base64
import http.client
import io
import json
import math
import socket
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor

from stepcredit.rewards import FunctionReward, RewardError, RewardInfo, SelfTest, get, score, selftest, wire
from stepcredit.rewards.cache import Cached
from stepcredit.rewards.http_json import Endpoint
from stepcredit.rewards.server import RewardServer
from stepcredit.rewards.wire import Limits

TOKEN = "a-token-of-sufficient-length"
INFO = {
    "version": 1,
    "name": "red",
    "low": 0.0,
    "high": None,
    "licence": "own",
    "description": "red",
    "direction": "higher",
    "batch_size": 4,
    "per_image": True,
}


def _red(function: Callable[..., Any] | None = None, batch_size: int = 4) -> FunctionReward:
    def mean(images: Tensor, prompts: Sequence[str], metadata: Sequence[Any]) -> Tensor:
        values = images[:, 0].mean((1, 2)) + torch.tensor([float(entry.get("add", 0)) for entry in metadata])
        return values.masked_fill(torch.tensor(["bad" in prompt for prompt in prompts]), math.nan)

    info = RewardInfo("red", (0.0, math.inf), "own", "mean red\x1b[31m", batch_size=batch_size)
    test = SelfTest(torch.ones(3, 6, 8), torch.zeros(3, 6, 8), "red", {"add": 0}, margin=0.5)
    return FunctionReward(info, function or mean, test)


@contextmanager
def _serving(reward: FunctionReward, **options: Any) -> Iterator[RewardServer]:
    with RewardServer(reward, port=0, **options) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def _remote(url: str, **options: Any) -> Any:
    return get("remote", url=url, sleep=lambda seconds: None, **options)


@pytest.fixture
def images() -> Tensor:
    return torch.randint(0, 256, (10, 3, 6, 8), generator=torch.Generator().manual_seed(0)) / 255


def test_the_same_scores_as_in_one_process(images: Tensor) -> None:
    metadata = [{"add": k} for k in range(10)]
    prompts = ["a", "bad", *["b ☃"] * 8]
    with _serving(_red()) as server:
        remote = _remote(server.url)
        assert (remote.info.name, remote.info.range, remote.info.batch_size) == ("remote:red", (0.0, math.inf), 4)
        assert "\x1b" not in remote.info.description
        found = score(remote, images, prompts, metadata)
        expected = score(_red(), images, prompts, metadata)
        assert torch.allclose(found, expected, atol=1e-6, equal_nan=True)
        broken = images.clone()
        broken[3] = math.inf
        assert score(remote, broken, prompts, metadata).isnan().nonzero().flatten().tolist() == [1, 3]
        (outcome,) = selftest.run(remote)
        assert outcome.passed
        assert (outcome.good, outcome.bad, outcome.margin) == (1.0, 0.0, 0.5)


def test_clients_at_the_same_time_take_turns(images: Tensor) -> None:
    inside = 0

    def careful(batch: Tensor, prompts: Sequence[str], metadata: Sequence[Any]) -> Tensor:
        nonlocal inside
        inside += 1
        assert inside == 1
        time.sleep(0.002)
        inside -= 1
        return batch[:, 0].mean((1, 2))

    with _serving(_red(careful)) as server:
        remote = _remote(server.url)
        with ThreadPoolExecutor(6) as pool:
            found = list(pool.map(lambda _: score(remote, images, ["a"] * 10, [{}] * 10), range(6)))
    assert all(torch.equal(one, found[0]) for one in found)
    assert torch.allclose(found[0], images[:, 0].mean((1, 2)), atol=1e-6)


def test_tokens(images: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STEPCREDIT_REWARD_TOKEN", raising=False)
    with _serving(_red(), token=TOKEN) as server:
        with pytest.raises(RewardError, match=r"refuses the token \(401\).*STEPCREDIT_REWARD_TOKEN") as caught:
            _remote(server.url)
        assert TOKEN not in str(caught.value)
        monkeypatch.setenv("STEPCREDIT_REWARD_TOKEN", TOKEN[:-1])
        with pytest.raises(RewardError, match="refuses the token"):
            _remote(server.url)
        monkeypatch.setenv("STEPCREDIT_REWARD_TOKEN", TOKEN)
        remote = _remote(server.url)
        assert TOKEN not in repr(remote._endpoint)
        assert remote(images, ["a"] * 10, [{}] * 10).shape == (10,)
        assert _request(server, "GET", "/v1/health")[0] == 200
    with pytest.raises(ValueError, match="opens the reward to the network"):
        RewardServer(_red(), host="0.0.0.0", port=0)
    with pytest.raises(ValueError, match="16 or more"):
        RewardServer(_red(), host="0.0.0.0", port=0, token="short")


def _request(
    server: RewardServer, method: str, path: str, body: bytes | None = None, **headers: str
) -> tuple[int, dict[str, Any]]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=10)
    sent = {"Content-Type": "application/json"} | {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request(method, path, body, sent)
    response = connection.getresponse()
    data = response.read()
    connection.close()
    assert response.headers["Content-Type"] == "application/json"
    return response.status, json.loads(data)


def _message(**changes: Any) -> bytes:
    picture = wire.encode_images(torch.zeros(1, 3, 4, 4))[0]
    return json.dumps({"version": 1, "images": [picture], "prompts": ["a"], "metadata": [{}], **changes}).encode()


def _png(mode: str, size: tuple[int, int] = (4, 4)) -> str:
    buffer = io.BytesIO()
    Image.new(mode, size).save(buffer, "PNG")
    return base64.b64encode(buffer.getvalue()).decode()


def _bomb() -> str:
    """A PNG that claims 60000 x 60000 pixels in a few bytes."""
    header = (60000).to_bytes(4, "big") * 2 + bytes([8, 2, 0, 0, 0])

    def chunk(kind: bytes, data: bytes) -> bytes:
        return len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")

    data = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")
    return base64.b64encode(data).decode()


def _jpeg() -> str:
    buffer = io.BytesIO()
    Image.new("RGB", (4, 4)).save(buffer, "JPEG")
    return base64.b64encode(buffer.getvalue()).decode()


@pytest.mark.parametrize(
    ("body", "status", "error"),
    [
        (b"", 400, "Expecting value"),
        (b"not json", 400, "Expecting value"),
        (b"\xff\xfe", 400, "not UTF-8"),
        (b"[" * 100_000, 400, "nested too deeply"),
        (b"[]", 400, "valid dictionary"),
        (_message(version=2), 400, "version"),
        (_message(extra=1), 400, "extra"),
        (_message(prompts="a"), 400, "prompts"),
        (_message(prompts=[1]), 400, "prompts.0"),
        (_message(prompts=["a", "b"]), 400, "1 images, 2 prompts"),
        (_message(images=[], prompts=[], metadata=[]), 400, "0 images"),
        (_message(images=["!!"]), 400, "image 0: not base64"),
        (_message(images=["AAAA"]), 400, "image 0: not a PNG"),
        (_message(images=[_jpeg()]), 400, "image 0: not a PNG"),
        (_message(images=[_png("RGBA")]), 400, "mode RGBA"),
        (_message(images=[_bomb()]), 400, "image 0"),
        (_message(images=[_png("RGB", (300, 300))]), 400, "at most 65536"),
        (_message(images=[_png("RGB"), _png("RGB", (5, 4))], prompts=["a"] * 2, metadata=[{}] * 2), 400, "one size"),
        (_message().replace(b"{}", b'{"add": NaN}'), 400, "NaN is not JSON"),
        (_message(metadata=[{"add": "x"}]), 500, "see the server's log"),
        (_message(images=[_png("RGB")] * 9, prompts=["a"] * 9, metadata=[{}] * 9), 400, "1 to 8"),
        (b" " * 300_000, 413, "at most 262144 bytes"),
    ],
)
def test_bad_requests_get_one_sentence_and_no_traceback(body: bytes, status: int, error: str) -> None:
    with _serving(_red(), limits=Limits(bytes=1 << 18, images=8, pixels=1 << 16)) as server:
        if status == 413:  # refused before the body is read: only the headers are sent
            found, message = _request(server, "POST", "/v1/score", b"", Content_Length=str(len(body)))
        else:
            found, message = _request(server, "POST", "/v1/score", body)
        assert (found, set(message)) == (status, {"error"})
        assert error in message["error"]
        assert "Traceback" not in message["error"]
        assert _request(server, "POST", "/v1/score", _message())[0] == 200  # still alive


def test_routes_methods_and_headers_are_strict() -> None:
    with _serving(_red()) as server:
        assert _request(server, "GET", "/v1/score")[0] == 404
        assert _request(server, "GET", "/../etc/passwd")[0] == 404
        assert _request(server, "DELETE", "/v1/score")[0] == 501
        assert _request(server, "POST", "/v1/score", _message(), Content_Type="text/plain")[0] == 415
        assert _request(server, "POST", "/v1/score", b"", Transfer_Encoding="chunked")[0] == 411
        assert _request(server, "POST", "/v1/score", b"", Content_Length="-1")[0] == 411
        assert _request(server, "POST", "/v1/score", b"", Content_Length="9" * 40)[0] == 411
        assert _request(server, "GET", "/v1/info", Host="evil.example:80")[0] == 403
        assert _request(server, "GET", "/v1/info", Host="[::1]:80")[0] == 200


def test_a_reward_that_refuses_is_quoted_and_one_that_breaks_is_not(images: Tensor) -> None:
    def refuse(batch: Tensor, prompts: Sequence[str], metadata: Sequence[Any]) -> Tensor:
        raise RewardError("reward 'red': prompt 0 is empty")

    def crash(batch: Tensor, prompts: Sequence[str], metadata: Sequence[Any]) -> Tensor:
        raise KeyError("/home/me/secret")

    with _serving(_red(refuse)) as server, pytest.raises(RewardError, match=r"answers 422.*prompt 0 is empty"):
        _remote(server.url)(images, ["a"] * 10, [{}] * 10)
    with _serving(_red(crash)) as server, pytest.raises(RewardError, match=r"answers 500.*see the server's log") as e:
        _remote(server.url, retries=0)(images, ["a"] * 10, [{}] * 10)
    assert "secret" not in str(e.value)


def test_a_slow_sender_is_cut_off_and_connections_are_bounded() -> None:
    with _serving(_red(), limits=Limits(seconds=0.2, connections=2)) as server:
        address = ("127.0.0.1", server.server_address[1])
        slow = [socket.create_connection(address) for _ in range(2)]
        for connection in slow:
            connection.sendall(b"POST /v1/score HTTP/1.1\r\n")
        deadline = time.monotonic() + 5
        while server.slots._value and time.monotonic() < deadline:  # type: ignore[attr-defined]
            time.sleep(0.005)
        assert _status_of(address) == 503
        for connection in slow:
            connection.settimeout(10)
            assert connection.recv(1) == b""  # closed by the server
            connection.close()
        while server.slots._value < 2 and time.monotonic() < deadline:  # type: ignore[attr-defined]
            time.sleep(0.005)
        assert _request(server, "GET", "/v1/info")[0] == 200


def _status_of(address: tuple[str, int]) -> int:
    with socket.create_connection(address) as connection:
        return int(connection.makefile("rb").readline().split()[1])


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    message=st.recursive(
        st.none() | st.booleans() | st.floats(allow_nan=False) | st.text(max_size=8),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from(["version", "images", "prompts", "metadata", "x"]), inner, max_size=4)
        ),
        max_leaves=12,
    )
)
def test_any_other_message_is_refused(message: object) -> None:
    body = json.dumps(message).encode()
    with pytest.raises(ValueError, match=r"\A[^\n]+\Z"):
        wire.decode_images(wire.parse(wire.ScoreRequest, body).images or ["-"], Limits())


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        ({"version": 1, "reward": "red", "scores": [1.0]}, r"1 scores for 2 images; first affected is sample 1"),
        ({"version": 1, "reward": "red", "scores": [1.0, "2"]}, r"against the protocol: scores.1"),
        ({"version": 1, "reward": "red", "scores": [1.0, True]}, r"scores.1"),
        ({"version": 1, "reward": "red", "scores": [[1.0], 2.0]}, r"scores.0"),
        ({"version": 1, "reward": "blue", "scores": [1.0, 2.0]}, r"now answers as 'blue'"),
        ({"version": 1, "reward": "red", "scores": [1.0, 2.0], "more": 0}, r"more: Extra inputs"),
        ({"version": 3, "reward": "red", "scores": [1.0, 2.0]}, r"version"),
        ([1.0, 2.0], r"valid dictionary"),
        (b'{"version": 1, "reward": "red", "scores": [1.0, NaN]}', r"NaN is not JSON"),
        (b'{"version": 1, "reward": "red", "scores": [1.0, 1e999]}', r"1e999 is not a finite number"),
        (b"{", r"against the protocol"),
    ],
)
def test_a_lying_server_is_an_error_not_a_score(script: Any, images: Tensor, reply: Any, message: str) -> None:
    script.json(INFO)
    remote = _remote(script.url, on_failure="nan")  # the policy covers a server that fails, not one that lies
    script.raw(reply if isinstance(reply, bytes) else json.dumps(reply).encode())
    with pytest.raises(RewardError, match=message):
        remote(images[:2], ["a", "b"], [{}, {}])


def _answers(script: Any, kind: str) -> None:
    if kind == "html":
        script.raw(b"<html>hello</html>", kind="text/html")
    elif kind == "redirect":
        script.raw(b"", "302 Found", "application/json", "Location: http://127.0.0.1:1/elsewhere")
    elif kind == "huge":
        script.raw(b"[" + b"0," * 3_000 + b"0]")
    elif kind == "endless":
        script.answers.append(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n" + b"0" * 9_000)
    elif kind == "forbidden":
        script.json({"error": "no"}, "403 Forbidden")
    elif kind == "not found":
        script.json({"error": "no such\x1b[31m route"}, "404 Not Found")


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("html", "answers text/html, not JSON; is the url right"),
        ("redirect", "answers a redirect .302.; redirects are not followed"),
        ("huge", "answers more than 4096 bytes"),
        ("endless", "answers more than 4096 bytes"),
        ("forbidden", "refuses the token"),
        ("not found", r"answers 404: no such route"),
    ],
)
def test_answers_that_no_retry_can_mend(script: Any, kind: str, message: str) -> None:
    _answers(script, kind)
    with pytest.raises(RewardError, match=message):
        _remote(script.url, max_bytes=4096)
    assert len(script.requests) == 1


def test_passing_troubles_are_retried_with_growing_pauses(script: Any) -> None:
    pauses: list[float] = []
    script.json({"error": "busy"}, "503 Service Unavailable")
    script.answers.append(b"")  # hangs up without an answer
    script.answers.append(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 999\r\n\r\n{")
    script.json(INFO)
    remote = get("remote", url=script.url, sleep=pauses.append, retries=3, backoff=0.5)
    assert remote.info.name == "remote:red"
    assert pauses == [0.5, 1.0, 2.0]
    for _ in range(4):
        script.json({"error": "busy"}, "503 Service Unavailable")
    with pytest.raises(RewardError, match=r"answers 503: busy \(4 attempts\)"):
        remote(torch.zeros(1, 3, 4, 4), ["a"], [{}])


def test_silence_ends_at_the_timeout_and_the_policy_is_followed(script: Any, images: Tensor) -> None:
    script.json(INFO)
    script.answers += [None, None]
    remote = _remote(script.url, timeout=0.15, retries=0, on_failure="nan")
    with pytest.warns(UserWarning, match=r"did not answer within 0.15 s; 2 samples are left out"):
        assert remote(images[:2], ["a", "b"], [{}, {}]).isnan().all()
    remote._on_failure = "fail"
    with pytest.raises(RewardError, match=r"did not answer within 0.15 s"):
        remote(images[:2], ["a", "b"], [{}, {}])


def test_a_server_that_drips_is_cut_at_the_timeout() -> None:
    stop = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def drip() -> None:
            connection, _ = listener.accept()
            with connection:
                try:
                    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n")
                    while not stop.wait(0.02):
                        connection.sendall(b" ")
                except OSError:
                    pass

        thread = threading.Thread(target=drip, daemon=True)
        thread.start()
        endpoint = Endpoint("x", f"http://127.0.0.1:{listener.getsockname()[1]}", "NO_TOKEN", timeout=0.3, retries=0)
        with pytest.raises(RewardError, match=r"did not answer within 0.3 s"):
            endpoint.get("/")
        stop.set()
        thread.join(5)


def test_a_server_that_is_down_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(RewardError, match=rf"http://127.0.0.1:{port} cannot be reached: is the server running.*2 att"):
        _remote(f"http://127.0.0.1:{port}", retries=1)


def test_hosts_must_be_allowed_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STEPCREDIT_ALLOWED_HOSTS", raising=False)
    with pytest.raises(ValueError, match=r"'rewards.example' is not this machine.*STEPCREDIT_ALLOWED_HOSTS"):
        Endpoint("remote", "https://rewards.example/base", "X")
    monkeypatch.setenv("STEPCREDIT_ALLOWED_HOSTS", "other.example, rewards.example:8443")
    with pytest.raises(ValueError, match="not this machine"):
        Endpoint("remote", "https://rewards.example", "X")
    Endpoint("remote", "https://rewards.example:8443", "X")
    Endpoint("remote", "http://[::1]:9", "X")
    for url in (
        "ftp://127.0.0.1",
        "127.0.0.1:80",
        "http://a:b@127.0.0.1",
        "http://127.0.0.1/?q=1",
        "http://127.0.0.1:x",
    ):
        with pytest.raises(ValueError, match="remote: "):
            Endpoint("remote", url, "X")
    for options in ({"timeout": 0}, {"retries": -1}, {"backoff": -1.0}):
        with pytest.raises(ValueError, match="timeout must be positive"):
            Endpoint("remote", "http://127.0.0.1", "X", **options)  # type: ignore[arg-type]


def test_expectation_deqa_and_caching(script: Any) -> None:
    script.json(INFO)
    with pytest.raises(RewardError, match="serves 'red', expected 'deqa'"):
        get("deqa", url=script.url)
    script.json(INFO | {"per_image": False})
    with pytest.raises(ValueError, match="compares images within a group"):
        Cached(_remote(script.url))
    for change in ({"name": "Bad Name"}, {"description": "\x1b[2J"}, {"batch_size": 0}, {"direction": "up"}):
        script.json(INFO | change)
        with pytest.raises(RewardError, match="against the protocol"):
            _remote(script.url)


def test_metadata_that_is_not_json_is_named(script: Any, images: Tensor) -> None:
    for entry in ({"a": object()}, {"a": math.nan}):
        script.json(INFO)
        with pytest.raises(RewardError, match="the metadata must be JSON"):
            _remote(script.url)(images[:1], ["a"], [entry])


def test_pictures_survive_the_wire_bit_for_bit(images: Tensor) -> None:
    assert torch.equal(wire.decode_images(wire.encode_images(images), Limits()), images)
