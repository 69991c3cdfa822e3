"""A careful HTTP client for JSON: bounded time, size and retries, no redirects, no proxies, known hosts only."""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from stepcredit.rewards.base import RewardError
from stepcredit.rewards.wire import loads
from stepcredit.untrusted import clean

ALLOWED_HOSTS = "STEPCREDIT_ALLOWED_HOSTS"
_RETRY = {429, 500, 502, 503, 504}


@dataclass(frozen=True)
class Endpoint:
    """A server by its base URL.

    Hosts other than this machine must be listed in the environment variable ``STEPCREDIT_ALLOWED_HOSTS`` (names or
    name:port, separated by commas): a recipe alone cannot make a run talk to a stranger. The token, if any, comes from
    the environment variable ``token_env``. Raises ValueError for a URL or a number that cannot be meant.
    """

    reward: str
    """For messages."""
    url: str
    token_env: str
    timeout: float = 120.0
    """Seconds for one attempt, from connecting to the last byte."""
    retries: int = 3
    """Further attempts after one that failed for a passing reason."""
    backoff: float = 0.5
    """Seconds before the first retry; doubled for each further one, up to 30."""
    max_bytes: int = 64 << 20
    sleep: Callable[[float], None] = field(default=time.sleep, repr=False)

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{self.reward}: url must be http://HOST[:PORT] or https://...; got {self.url!r}")
        if parts.username or parts.password or parts.query or parts.fragment:
            raise ValueError(f"{self.reward}: url must not hold credentials, a query or a fragment; got {self.url!r}")
        if not self.timeout > 0 or self.retries < 0 or self.backoff < 0:
            raise ValueError(
                f"{self.reward}: timeout must be positive, retries and backoff not negative; got "
                f"{self.timeout}, {self.retries}, {self.backoff}"
            )
        try:
            port = parts.port
        except ValueError:
            raise ValueError(f"{self.reward}: the port in {self.url!r} is not a number up to 65535") from None
        if not is_loopback(parts.hostname):
            allowed = {entry.strip().lower() for entry in os.environ.get(ALLOWED_HOSTS, "").split(",")}
            if not {parts.hostname, f"{parts.hostname}:{port}"} & allowed:
                raise ValueError(
                    f"{self.reward}: host {parts.hostname!r} is not this machine; allow it by setting {ALLOWED_HOSTS}="
                    f"{parts.hostname}"
                )

    def get(self, path: str) -> bytes:
        """Body of the answer to GET. Raises RewardError as ``post``."""
        return self._with_retries("GET", path, None)

    def post(self, path: str, message: bytes) -> bytes:
        """Body of the JSON answer to a JSON message.

        Raises RewardError, in one sentence, when the server cannot be reached, answers too late or too much, redirects,
        refuses, or answers anything but JSON. Only passing troubles are retried.
        """
        return self._with_retries("POST", path, message)

    def _with_retries(self, method: str, path: str, body: bytes | None) -> bytes:
        for attempt in range(self.retries + 1):
            try:
                return self._once(method, path, body)
            except _PassingError as error:
                if attempt == self.retries:
                    tries = f" ({attempt + 1} attempts)" if attempt else ""
                    raise RewardError(f"reward {self.reward!r}: {self.url} {error}{tries}") from error
                self.sleep(min(self.backoff * 2**attempt, 30.0))
        raise AssertionError("unreachable")

    def _once(self, method: str, path: str, body: bytes | None) -> bytes:
        parts = urlsplit(self.url)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(parts.hostname or "", parts.port, timeout=self.timeout)
        headers = {"Accept": "application/json", "Connection": "close"}
        if body is not None:
            headers["Content-Type"] = "application/json"
        if token := os.environ.get(self.token_env):
            if not (token.isascii() and token.isprintable()):  # http.client's own error would quote it
                raise RewardError(
                    f"reward {self.reward!r}: the token in the environment variable {self.token_env} must be printable "
                    "ASCII in one line; see whether a line break was copied with it"
                )
            headers["Authorization"] = f"Bearer {token}"
        late = threading.Event()
        sockets: list[socket.socket] = []  # the connection forgets its socket while an answer without length is read
        # The socket's own timeout starts anew with every byte; this one does not.
        watchdog = threading.Timer(self.timeout, _cut, (sockets, late))
        watchdog.daemon = True
        try:
            watchdog.start()
            connection.connect()
            sockets.append(connection.sock)
            connection.request(method, parts.path.rstrip("/") + path, body, headers)
            data = self._read(connection.getresponse())
            if late.is_set():  # an answer without a length looks complete when it is cut
                raise TimeoutError
            return data
        except (OSError, http.client.HTTPException) as error:
            if late.is_set() or isinstance(error, TimeoutError):
                raise _PassingError(f"did not answer within {self.timeout:g} s") from error
            if isinstance(error, ConnectionRefusedError | socket.gaierror):
                raise _PassingError("cannot be reached: is the server running?") from error
            raise _PassingError(f"broke off: {type(error).__name__}") from error
        finally:
            watchdog.cancel()
            connection.close()

    def _read(self, response: http.client.HTTPResponse) -> bytes:
        data = response.read(self.max_bytes + 1)
        if len(data) > self.max_bytes:
            raise self._error(f"answers more than {self.max_bytes} bytes")
        if response.status in _RETRY:
            raise _PassingError(f"answers {response.status}{_reason(data)}")
        if 300 <= response.status < 400:
            raise self._error(f"answers a redirect ({response.status}); redirects are not followed")
        if response.status in (401, 403):
            raise self._error(f"refuses the token ({response.status}); set the environment variable {self.token_env}")
        if response.status != 200:
            raise self._error(f"answers {response.status}{_reason(data)}")
        kind = response.headers.get_content_type()
        if kind != "application/json":
            raise self._error(f"answers {kind}, not JSON; is the url right?")
        if response.length:
            raise _PassingError("broke off in the middle of its answer")
        return data

    def _error(self, what: str) -> RewardError:
        return RewardError(f"reward {self.reward!r}: {self.url} {what}")


class _PassingError(Exception):
    """A trouble that may be gone at the next attempt."""


def _cut(sockets: list[socket.socket], late: threading.Event) -> None:
    late.set()
    for one in sockets:
        with contextlib.suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)


def _reason(data: bytes) -> str:
    """The server's own ``error`` text, made safe to print and short; empty without one."""
    try:
        message = loads(data)
    except ValueError:
        return ""
    text = message.get("error") if isinstance(message, dict) else None
    if isinstance(text, dict):  # as OpenAI-compatible servers write it
        text = text.get("message")
    if not isinstance(text, str):
        return ""
    return f": {clean(text[:1000])[:300]}"


def is_loopback(host: str) -> bool:
    """Whether a host name means this machine."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
