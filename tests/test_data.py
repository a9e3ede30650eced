"""Corpora: from a file, a server, and Python's standard library."""

import contextlib
import hashlib
import http.server
import importlib
import threading

import pytest
import torch

from fwlab.data import CORPORA, Characters, CorpusError, corpus

module = importlib.import_module("fwlab.data.corpus")
TEXT = b"To be, or not to be, that is the question.\n" * 40


@contextlib.contextmanager
def server(body, status=200):
    """A web server on this machine that answers everything with `body`."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as httpd:
        threading.Thread(target=httpd.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{httpd.server_port}/text"
        finally:
            httpd.shutdown()


@pytest.fixture
def small(monkeypatch, tmp_path):
    """A world where Shakespeare wrote 40 lines and the cache is empty."""
    pytest.importorskip("pooch")
    monkeypatch.delenv("FWLAB_DATA", raising=False)
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "127.0.0.1")
    monkeypatch.setattr("pooch.os_cache", lambda name: tmp_path / "cache")

    def at(url):
        source = module._Source("tiny.txt", url, hashlib.sha256(TEXT).hexdigest())
        monkeypatch.setitem(CORPORA, "shakespeare", source)
        return tmp_path / "cache"

    return at


def test_download_is_kept(small):
    with server(TEXT) as url:
        cache = small(url)
        assert corpus("shakespeare").encode() == TEXT
    assert [p.name for p in cache.iterdir()] == ["tiny.txt"]
    assert corpus("shakespeare").encode() == TEXT  # the server is gone
    assert corpus().encode() == TEXT


@pytest.mark.parametrize(
    ("body", "status"), [(TEXT[:-1], 200), (b"", 200), (b"<html>", 404)]
)
def test_corrupt_download_leaves_nothing(small, body, status):
    with server(body, status) as url:
        cache = small(url)
        with pytest.raises(CorpusError, match="FWLAB_DATA") as info:
            corpus("shakespeare")
    assert "\n" not in str(info.value)
    assert not [p for p in cache.glob("*") if p.is_file()]


def test_no_network(small, capsys):
    small("http://127.0.0.1:9/nobody-listens-here")
    with pytest.raises(CorpusError, match="cannot download the corpus 'shakespeare'"):
        corpus("shakespeare")
    assert corpus() == corpus("python")
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "using the 'python' corpus" in said


def test_wrong_text_is_not_replaced_silently(small):
    """A server with the wrong file is an error, not a missing network."""
    with server(TEXT * 2) as url:
        small(url)
        with pytest.raises(CorpusError, match="SHA-256"):
            corpus()


def test_folder_wins(small, monkeypatch, tmp_path):
    small("http://127.0.0.1:9/")
    folder = tmp_path / "data"
    folder.mkdir()
    monkeypatch.setenv("FWLAB_DATA", str(folder))
    for name in ("shakespeare", None):
        with pytest.raises(CorpusError, match=r"cannot read .*tiny\.txt: no such file"):
            corpus(name)
    (folder / "tiny.txt").write_bytes(b"")
    with pytest.raises(CorpusError, match=r"tiny\.txt is empty"):
        corpus()
    (folder / "tiny.txt").write_bytes(TEXT + b"!")
    with pytest.raises(
        CorpusError,
        match=r"tiny\.txt is not the corpus 'shakespeare': expected SHA-256",
    ):
        corpus()
    (folder / "tiny.txt").write_bytes(TEXT)
    assert corpus().encode() == TEXT


def test_own_file(tmp_path):
    path = tmp_path / "own.txt"
    path.write_text("schön\n", encoding="utf-8")
    assert corpus(str(path)) == "schön\n"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(CorpusError, match="not UTF-8"):
        corpus(str(path))
    with pytest.raises(CorpusError, match="cannot read"):
        corpus(str(tmp_path))
    with pytest.raises(CorpusError, match=r"'shakespeare'.* got 'shakespear'"):
        corpus("shakespear")


def test_standard_library():
    text = corpus("python")
    assert text.isascii()
    assert len(text) > 1_000_000
    assert "def " in text


def test_characters():
    characters = Characters("hello")
    assert characters.alphabet == "ehlo"
    tokens = characters.encode("hole")
    assert tokens.dtype == torch.int64
    assert characters.decode(tokens) == "hole"
    assert characters.encode("").shape == (0,)
    with pytest.raises(ValueError, match="got 'z'"):
        characters.encode("zoo")
