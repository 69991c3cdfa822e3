"""Serve one reward over HTTP, for the ``remote`` reward: strict in what it reads, silent about its own failures.

Built on the standard library: a handful of routes, and full control over bytes, time and connections before a body is
read, which is what a server of this kind is attacked through.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import logging
import os
import socket
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from pydantic import BaseModel

from stepcredit.rewards import wire
from stepcredit.rewards.base import Reward, RewardError, score
from stepcredit.rewards.http_json import is_loopback
from stepcredit.rewards.served import TOKEN_ENV
from stepcredit.rewards.wire import Limits

_log = logging.getLogger(__name__)
_LEAST_TOKEN = 16


class Refusal(Exception):  # noqa: N818 -- an answer, not an error of ours
    """A request that is not served, with the status and the sentence that it is answered by."""

    def __init__(self, status: HTTPStatus, message: str) -> None:
        super().__init__(message)
        self.status = status


class RewardServer(ThreadingHTTPServer):
    """An HTTP server for one reward; ``serve_forever`` runs it, ``url`` says where.

    Calls of the reward take turns; connections beyond ``limits.connections`` are answered 503. Without a token it binds
    to this machine only and answers only requests that were addressed to it as such (no page in a browser can reach
    it by a name of its own). Raises ValueError for another address without a token of 16 characters or more.
    """

    daemon_threads = True
    allow_reuse_address = True

    def __init__(
        self,
        reward: Reward,
        host: str = "127.0.0.1",
        port: int = 8765,
        token: str | None = None,
        limits: Limits | None = None,
    ) -> None:
        self.local = is_loopback(host)
        if not self.local and not token:
            raise ValueError(f"serving on {host!r} opens the reward to the network: set {TOKEN_ENV} to a secret token")
        if token is not None and (len(token) < _LEAST_TOKEN or not token.isascii() or not token.isprintable()):
            raise ValueError(f"the token must be {_LEAST_TOKEN} or more printable ASCII characters")
        self.reward, self.token, self.limits = reward, token, limits or Limits()
        self.turn = threading.Lock()
        self.slots = threading.BoundedSemaphore(self.limits.connections)
        if ":" in host:
            self.address_family = socket.AF_INET6
        super().__init__((host, port), _Handler)

    @property
    def url(self) -> str:
        """The base URL to give to ``remote``."""
        host, port = self.server_address[:2]
        name = host.decode() if isinstance(host, bytes | bytearray) else str(host)
        return f"http://[{name}]:{port}" if ":" in name else f"http://{name}:{port}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A connection that broke is a line in the log, not a traceback on the terminal."""
        _log.info("connection of %s ended early", client_address, exc_info=True)

    def info(self) -> wire.InfoReply:
        """What the reward is; its batches are capped by what one request may hold."""
        per_image = bool(getattr(self.reward, "per_image", True))
        size = self.reward.info.batch_size
        return wire.InfoReply.of(self.reward.info, min(size, self.limits.images) if per_image else size, per_image)

    def score(self, body: bytes) -> wire.ScoreReply:
        """The answer to a request. Raises Refusal with what is wrong with it, RewardError from the reward itself."""
        try:
            request = wire.parse(wire.ScoreRequest, body)
            count = len(request.images)
            if not count == len(request.prompts) == len(request.metadata):
                raise ValueError(
                    f"{count} images, {len(request.prompts)} prompts and {len(request.metadata)} metadata entries"
                )
            if not 1 <= count <= self.limits.images:
                raise ValueError(f"{count} images; 1 to {self.limits.images} are accepted")
            images = wire.decode_images(request.images, self.limits)
        except ValueError as error:
            raise Refusal(HTTPStatus.BAD_REQUEST, str(error)) from None
        with self.turn:
            values = score(self.reward, images, request.prompts, request.metadata).tolist()
        return wire.ScoreReply(
            reward=self.reward.info.name, scores=[None if value != value else value for value in values]
        )


class _Handler(BaseHTTPRequestHandler):
    server: RewardServer
    server_version, sys_version = "stepcredit", ""

    def setup(self) -> None:
        super().setup()
        # A client that sends a byte now and then would hold its thread for ever; this ends it.
        self._watchdog = threading.Timer(self.server.limits.seconds, self._cut)
        self._watchdog.daemon = True
        self._watchdog.start()

    def finish(self) -> None:
        self._watchdog.cancel()
        super().finish()

    def handle(self) -> None:
        if not self.server.slots.acquire(blocking=False):
            self.requestline, self.request_version, self.command = "", "HTTP/1.0", ""
            self._answer(HTTPStatus.SERVICE_UNAVAILABLE, {"error": "too many connections; try again"})
            return
        try:
            super().handle()
        finally:
            self.server.slots.release()

    def _cut(self) -> None:
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def do_GET(self) -> None:
        routes: dict[str, Callable[[], BaseModel | dict[str, Any]]] = {
            "/v1/health": lambda: {"ok": True},
            "/v1/info": self.server.info,
            "/v1/self-test": lambda: wire.SelfTestReply.of(self.server.reward.self_test()),
        }
        self._route(routes)

    def do_POST(self) -> None:
        self._route({"/v1/score": lambda: self.server.score(self._body())})

    def _route(self, routes: dict[str, Callable[[], BaseModel | dict[str, Any]]]) -> None:
        try:
            self._admit()
            if self.path not in routes:
                raise Refusal(HTTPStatus.NOT_FOUND, "no such route")
            reply = routes[self.path]()
        except Refusal as refusal:
            self._answer(refusal.status, {"error": str(refusal)})
        except RewardError as error:
            _log.warning("the reward refused a request: %s", error)
            self._answer(HTTPStatus.UNPROCESSABLE_ENTITY, {"error": str(error)})
        except (ConnectionError, TimeoutError):
            raise
        except Exception:
            _log.exception("the reward failed")
            self._answer(HTTPStatus.INTERNAL_SERVER_ERROR, {"error": "the reward failed; see the server's log"})
        else:
            self._answer(HTTPStatus.OK, reply)

    def _admit(self) -> None:
        """Refuse what is not addressed to this machine by its own name, or comes without the token."""
        if self.server.local:
            host = self.headers.get("Host", "").rsplit("]", 1)[0].lstrip("[")
            if not is_loopback(host.rsplit(":", 1)[0] if host.count(":") == 1 else host):
                raise Refusal(HTTPStatus.FORBIDDEN, "this server answers to this machine alone")
        token = self.server.token
        if token is not None and self.path != "/v1/health":
            given = self.headers.get("Authorization", "").encode("utf-8", "replace")
            if not hmac.compare_digest(given, f"Bearer {token}".encode()):
                raise Refusal(HTTPStatus.UNAUTHORIZED, "the token is missing or wrong")

    def _body(self) -> bytes:
        if self.headers.get_content_type() != "application/json":
            raise Refusal(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "send application/json")
        lengths = self.headers.get_all("Content-Length", [])
        if "Transfer-Encoding" in self.headers or len(lengths) != 1 or not _is_count(lengths[0]):
            raise Refusal(HTTPStatus.LENGTH_REQUIRED, "send one Content-Length")
        length = int(lengths[0])
        if length > self.server.limits.bytes:
            raise Refusal(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"at most {self.server.limits.bytes} bytes are accepted")
        body = self.rfile.read(length)
        if len(body) != length:
            raise Refusal(HTTPStatus.BAD_REQUEST, "the body ended early")
        self._watchdog.cancel()
        return body

    def _answer(self, status: HTTPStatus, reply: BaseModel | dict[str, Any]) -> None:
        message = reply.model_dump() if isinstance(reply, BaseModel) else reply
        data = json.dumps(message, allow_nan=False).encode()
        self.send_response(status)
        for name, value in (
            ("Content-Type", "application/json"),
            ("Content-Length", str(len(data))),
            ("X-Content-Type-Options", "nosniff"),
            ("Connection", "close"),
        ):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """The library's own refusals (a malformed request line, an unknown method), as JSON without an echo."""
        self._answer(HTTPStatus(code), {"error": HTTPStatus(code).phrase})

    def log_message(self, format: str, *args: Any) -> None:
        _log.debug("%s", " ".join(map(str, args)).encode("ascii", "backslashreplace").decode())


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 12


def serve(
    reward: Reward,
    host: str = "127.0.0.1",
    port: int = 8765,
    token: str | None = None,
    limits: Limits | None = None,
    ready: Callable[[str], None] | None = None,
) -> None:
    """Serve a reward until interrupted; ``ready`` gets the URL once requests are accepted.

    The token defaults to the environment variable STEPCREDIT_REWARD_TOKEN. Raises as ``RewardServer`` does.
    """
    with RewardServer(reward, host, port, token or os.environ.get(TOKEN_ENV) or None, limits) as server:
        if ready:
            ready(server.url)
        server.serve_forever()
