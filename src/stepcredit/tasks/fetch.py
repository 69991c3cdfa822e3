"""Downloads of prompt files: https, the listed host alone, bounded in size and time, verified before they are kept."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import tempfile
import urllib.error
import urllib.request
from email.message import Message
from pathlib import Path
from typing import IO
from urllib.parse import urlsplit

from stepcredit.errors import UserError
from stepcredit.tasks.data import LARGEST, Published, digest

TIMEOUT = 30.0
"""Seconds without a byte after which a server is given up."""
_LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})


class UnacceptedError(UserError):
    """A file without a known checksum was fetched, looked at, and not kept."""


def fetch(file: Published, accept: str | None = None) -> Path:
    """Download a file into the cache and return its path; a good one that is there already is left alone.

    The file appears complete, verified and with a record of its source, or not at all. Where no checksum is known
    here, ``accept`` must give it: without, UnacceptedError tells the digest of what the server sent, and nothing is
    kept. Raises UserError, in a sentence, when the server cannot be reached, answers with an error, redirects to
    another host, sends too much or sends another file.
    """
    if accept is not None and (len(accept) != 64 or set(accept.lower()) - set("0123456789abcdef")):
        raise UserError(f"--accept-checksum must be a SHA-256 of 64 hex digits, not {accept!r}")
    accept = accept.lower() if accept else None
    if file.sha256 and accept and accept != file.sha256:
        raise UserError(f"the SHA-256 of {file.name} is known to be {file.sha256}, not {accept}; leave the flag out")
    expected = file.sha256 or accept
    if file.cached.is_file() and (expected is None or digest(file.cached.read_bytes()) == expected):
        with contextlib.suppress(UserError):
            if file.sha256 or file.accepted() == digest(file.cached.read_bytes()):
                return file.cached
    content = download(file.url)
    found = digest(content)
    if expected is None:
        lines = content.count(b"\n")
        raise UnacceptedError(
            f"no checksum of {file.name} is known here, so nothing was kept: {file.url} gave {len(content):,} bytes in "
            f"{lines:,} lines with SHA-256 {found} (licence: {file.licence}); look at the file there, then run "
            f"`stepcredit data get {file.name} --accept-checksum {found}`"
        )
    if found != expected:
        raise UserError(
            f"{file.url} sent another file than the one with SHA-256 {expected} (it has {found}); nothing was kept"
        )
    source = {"url": file.url, "licence": file.licence, "sha256": found}
    _write(file.record, json.dumps(source, indent=2).encode() + b"\n")
    _write(file.cached, content)
    return file.cached


def download(url: str, largest: int = LARGEST) -> bytes:
    """Body of ``url``, at most ``largest`` bytes. Raises UserError as ``fetch``."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    if parts.scheme != "https" and not (parts.scheme == "http" and host in _LOOPBACK):
        raise UserError(f"{url} is not an https address")
    opener = urllib.request.build_opener(_SameHost(host))
    request = urllib.request.Request(url, headers={"User-Agent": "stepcredit", "Accept-Encoding": "identity"})
    try:
        with opener.open(request, timeout=TIMEOUT) as answer:
            length = answer.headers.get("Content-Length")
            if length and length.isdigit() and int(length) > largest:
                raise UserError(f"{url} has {length} bytes, more than the {largest} of a file of prompts")
            content: bytes = answer.read(largest + 1)
    except urllib.error.HTTPError as error:
        raise UserError(f"{url} answers {error.code}: {error.reason}; the file may have been moved") from error
    except TimeoutError as error:
        raise UserError(f"{url} did not answer within {TIMEOUT:g} s; try again later") from error
    except urllib.error.URLError as error:
        if isinstance(error.reason, TimeoutError):
            raise UserError(f"{url} did not answer within {TIMEOUT:g} s; try again later") from error
        raise UserError(f"{host} cannot be reached ({error.reason}); is this machine online?") from error
    except (http.client.HTTPException, OSError) as error:
        raise UserError(f"the download of {url} broke off ({type(error).__name__}); try again") from error
    if len(content) > largest:
        raise UserError(f"{url} sends more than the {largest} bytes of a file of prompts")
    if length and length.isdigit() and len(content) != int(length):
        raise UserError(f"the download of {url} broke off after {len(content)} of {length} bytes; try again")
    return content


class _SameHost(urllib.request.HTTPRedirectHandler):
    """Follows redirects within the host that was asked, over the same scheme, and no others."""

    def __init__(self, host: str) -> None:
        self._host = host

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Message, newurl: str
    ) -> urllib.request.Request | None:
        target = urlsplit(newurl)
        if target.hostname != self._host or target.scheme != urlsplit(req.full_url).scheme:
            where = f"{target.scheme}://{target.hostname}"
            raise UserError(f"{req.full_url} redirects to {where}, which is not followed; nothing was kept")
        return super().redirect_request(req, fp, code, msg, headers, newurl)  # type: ignore[arg-type]


def _write(path: Path, content: bytes) -> None:
    """Write a file whole or not at all."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, draft = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as stream:
                stream.write(content)
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(draft, path)
        except BaseException:
            Path(draft).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise UserError(f"cannot write {str(path)!r}: {error}") from error
