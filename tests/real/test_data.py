"""Prompt files of other projects: fetched whole and verified or not at all, and read where the user keeps them."""

import dataclasses
import hashlib
import http.server
import json
import socket
import threading

import pytest

from stepcredit.cli import main
from stepcredit.errors import UserError
from stepcredit.tasks import data as known
from stepcredit.tasks import fetch, ocr
from stepcredit.tasks.data import Published

CONTENT = b'a sign that says "one"\na sign that says "two"\n'
SHA = hashlib.sha256(CONTENT).hexdigest()


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.server.asked.append(self.path)
        status, headers, body = self.server.answers[self.path]
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    found = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found.asked, found.answers = [], {"/test.txt": (200, {}, CONTENT)}
    threading.Thread(target=found.serve_forever, daemon=True).start()
    yield found
    found.shutdown()
    found.server_close()


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache" / "data"


@pytest.fixture
def published(server, cache):
    url = f"http://127.0.0.1:{server.server_port}/test.txt"
    return Published("words", "words/test.txt", url, SHA, "MIT", "words to write")


def kept(cache):
    """Every file in the cache, drafts too."""
    return sorted(path.name for path in cache.rglob("*") if path.is_file())


def test_a_file_is_fetched_once_verified_and_recorded(published, server, cache):
    with pytest.raises(UserError, match=r"words/test.txt is absent.*stepcredit data get words.*heldout_prompts.*MIT"):
        published.read()
    path = fetch.fetch(published)
    assert path == cache / "words" / "test.txt"
    assert path.read_bytes() == CONTENT
    assert kept(cache) == ["test.txt", "test.txt.source.json"]
    assert json.loads(published.record.read_text()) == {"url": published.url, "licence": "MIT", "sha256": SHA}
    assert [prompt.text for prompt in published.read()] == CONTENT.decode().splitlines()
    fetch.fetch(published)
    assert server.asked == ["/test.txt"]
    path.write_bytes(b"something else\n")  # damaged: said when read, mended when fetched again
    with pytest.raises(UserError, match=rf"not the published file.*{SHA[:12]}.*get it again"):
        published.read()
    assert fetch.fetch(published).read_bytes() == CONTENT


def test_the_users_folder_goes_before_the_cache(published, tmp_path, monkeypatch):
    fetch.fetch(published)
    monkeypatch.setenv("STEPCREDIT_DATA", str(tmp_path / "mine"))
    assert published.place() == published.cached
    (tmp_path / "mine" / "words").mkdir(parents=True)
    own = tmp_path / "mine" / "words" / "test.txt"
    own.write_text("another\n")
    with pytest.raises(UserError, match="not the published file"):
        published.find()
    own.write_bytes(CONTENT)
    assert published.find() == own


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((404, {}, b"no"), "answers 404: Not Found"),
        ((500, {}, b"no"), "answers 500"),
        ((200, {}, b"<html>sign in</html>"), rf"sent another file than the one with SHA-256 {SHA}"),
        ((200, {"Content-Length": str(9 << 20)}, b""), "more than the 8388608 of a file of prompts"),
        ((200, {"Content-Length": "5000"}, CONTENT), "broke off"),
        ((302, {"Location": "https://elsewhere.example/test.txt"}, b""), "redirects to https://elsewhere.example"),
        ((302, {"Location": "file:///etc/passwd"}, b""), "answers 302: .*not allowed"),
    ],
)  # fmt: skip
def test_what_goes_wrong_is_said_and_leaves_nothing(published, server, cache, answer, words):
    server.answers["/test.txt"] = answer
    with pytest.raises(UserError, match=words) as caught:
        fetch.fetch(published)
    assert "\n" not in str(caught.value)
    assert kept(cache) == []


def test_a_redirect_within_the_host_is_followed(published, server):
    server.answers["/test.txt"] = (301, {"Location": "/moved.txt"}, b"")
    server.answers["/moved.txt"] = (200, {}, CONTENT)
    assert fetch.fetch(published).read_bytes() == CONTENT


def test_a_body_without_a_length_is_bounded(published, server):
    class Endless(Handler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"x" * 2000)

    server.RequestHandlerClass = Endless
    with pytest.raises(UserError, match="sends more than the 1000 bytes"):
        fetch.download(published.url, largest=1000)


def test_no_server_and_no_plain_http(published, cache):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    nobody = dataclasses.replace(published, url=f"http://127.0.0.1:{port}/test.txt")
    with pytest.raises(UserError, match=r"127.0.0.1 cannot be reached .*online"):
        fetch.fetch(nobody)
    for url in ("http://example.org/test.txt", "file:///etc/passwd", "ftp://example.org/x"):
        with pytest.raises(UserError, match="not an https address"):
            fetch.fetch(dataclasses.replace(published, url=url))
    assert kept(cache) == []


def test_a_file_without_a_known_checksum_is_shown_first_and_kept_when_accepted(published, cache):
    open_ended = dataclasses.replace(published, sha256=None)
    with pytest.raises(UserError, match=rf"nothing was kept.*2 lines.*--accept-checksum {SHA}"):
        fetch.fetch(open_ended)
    assert kept(cache) == []
    with pytest.raises(UserError, match="sent another file"):
        fetch.fetch(open_ended, accept="0" * 64)
    with pytest.raises(UserError, match="64 hex digits"):
        fetch.fetch(open_ended, accept="abc")
    with pytest.raises(UserError, match="leave the flag out"):
        fetch.fetch(published, accept="0" * 64)
    assert fetch.fetch(open_ended, accept=SHA.upper()) == open_ended.find()
    assert fetch.fetch(open_ended) == open_ended.cached  # there already, and as accepted
    open_ended.cached.write_text("changed\n")
    with pytest.raises(UserError, match="not the published file"):
        open_ended.find()
    open_ended.record.write_text("{}")
    with pytest.raises(UserError, match="remove both"):
        open_ended.find()


def test_the_users_own_file_needs_no_checksum(published, tmp_path, monkeypatch):
    monkeypatch.setenv("STEPCREDIT_DATA", str(tmp_path))
    (tmp_path / "words").mkdir()
    (tmp_path / "words" / "test.txt").write_text("mine\n")
    assert [prompt.text for prompt in dataclasses.replace(published, sha256=None).read()] == ["mine"]


def test_the_command(published, monkeypatch, capsys, cache):
    monkeypatch.setattr(known, "CATALOGUE", {"words": published})
    assert main(["data"]) == 0
    listed = capsys.readouterr().out
    assert "words to write" in listed
    assert "absent" in listed
    assert SHA[:12] in listed
    assert main(["data", "get", "words"]) == 0
    assert "2 prompts in" in capsys.readouterr().out
    assert main(["data", "get", "word"]) == 2
    assert "did you mean 'words'" in capsys.readouterr().err
    assert main(["data", "get"]) == 2
    assert "name the file to get: words" in capsys.readouterr().err


def test_every_entry_of_the_catalogue_can_be_asked_for():
    for name, entry in known.CATALOGUE.items():
        assert entry.name == name
        assert entry.url.startswith("https://raw.githubusercontent.com/")
        assert entry.sha256 is None or len(entry.sha256) == 64
        assert not entry.path.startswith("/")
        assert ".." not in entry.path
    assert len({entry.path for entry in known.CATALOGUE.values()}) == len(known.CATALOGUE)


@pytest.mark.parametrize(("name", "count"), [("geneval", 553), ("ocr", 1018)])
def test_the_published_files(name, count, data, monkeypatch):
    monkeypatch.setenv("STEPCREDIT_DATA", str(data))
    found = known.get(name).read()
    assert len(found) == len({prompt.text for prompt in found}) == count
    if name == "ocr":
        assert all(ocr.quoted(prompt.text) for prompt in found)
