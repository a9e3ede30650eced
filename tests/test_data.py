"""Test corpora from a file, a server and the standard library, and number words."""

import codecs
import contextlib
import hashlib
import http.server
import importlib
import io
import threading
import zipfile

import pytest
import torch
from alike import refuses

from fwlab.data import CORPORA, Characters, CorpusError, corpus, number_words, splits

module = importlib.import_module("fwlab.data.corpus")
TEXT = b"To be, or not to be, that is the question.\n" * 40


@contextlib.contextmanager
def server(body, status=200):
    """Start a local web server that returns `body` for every request.

    Like the server of WikiText, it refuses the default user agent of a library.
    """

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(status if self.headers["User-Agent"] == "fwlab" else 403)
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
    """Replace the Shakespeare corpus by 40 lines, and its cache by an empty folder."""
    pytest.importorskip("pooch")
    monkeypatch.delenv("FWLAB_DATA", raising=False)
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "127.0.0.1")
    monkeypatch.setattr("pooch.os_cache", lambda name: tmp_path / "cache")

    def at(url):
        digest = hashlib.sha256(TEXT).hexdigest()
        source = module._Source("tiny.txt", url, f"sha256:{digest}")
        monkeypatch.setitem(CORPORA, "shakespeare", source)
        return tmp_path / "cache"

    return at


def test_download_is_kept(small):
    with server(TEXT) as url:
        cache = small(url)
        assert corpus("shakespeare").encode() == TEXT
    assert [p.name for p in cache.iterdir()] == ["tiny.txt"]
    assert corpus("shakespeare").encode() == TEXT  # The server is closed.
    assert corpus().encode() == TEXT


@pytest.mark.parametrize(
    ("body", "status"), [(TEXT[:-1], 200), (b"", 200), (b"<html>", 404)]
)
def test_corrupt_download_leaves_nothing(small, body, status):
    with server(body, status) as url:
        cache = small(url)
        refuses(lambda: corpus("shakespeare"), "FWLAB_DATA", CorpusError)
    assert not [p for p in cache.glob("*") if p.is_file()]


def test_no_network(small, capsys):
    small("http://127.0.0.1:9/nobody-listens-here")
    said = "cannot download the corpus 'shakespeare'"
    refuses(lambda: corpus("shakespeare"), said, CorpusError)
    assert corpus() == corpus("python")
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "using the 'python' corpus" in said


def test_wrong_text_is_not_replaced_silently(small):
    """A download with a wrong hash raises an error instead of using another text."""
    with server(TEXT * 2) as url:
        small(url)
        refuses(corpus, "SHA-256", CorpusError)


def test_folder_wins(small, monkeypatch, tmp_path):
    small("http://127.0.0.1:9/")
    path = tmp_path / "data" / "tiny.txt"
    path.parent.mkdir()
    monkeypatch.setenv("FWLAB_DATA", str(path.parent))
    refuses(lambda: corpus("shakespeare"), "no such file", CorpusError)
    for content, said in (
        (None, r"cannot read .*tiny\.txt: no such file"),
        (b"", r"tiny\.txt is empty"),
        (TEXT + b"!", r"tiny\.txt is not the corpus 'shakespeare': expected SHA-256"),
    ):
        if content is not None:
            path.write_bytes(content)
        refuses(corpus, said, CorpusError)
    path.write_bytes(TEXT)
    assert corpus().encode() == TEXT


def test_archive(small, monkeypatch, capsys):
    """A text in a ZIP archive is unpacked, and checked like an uncompressed text."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("wikitext-2/wiki.train.tokens", TEXT)
        archive.writestr("wikitext-2/wiki.test.tokens", TEXT * 2)
    real = CORPORA["wikitext-2-train"]
    with server(packed.getvalue()) as url:
        cache = small(url)
        source = real._replace(
            url=f"{url}/some.zip",
            hash=f"sha1:{hashlib.sha1(TEXT).hexdigest()}",
            archive_hash=f"sha256:{hashlib.sha256(packed.getvalue()).hexdigest()}",
        )
        monkeypatch.setitem(CORPORA, "wikitext-2-train", source)
        assert corpus("wikitext-2-train").encode() == TEXT
    assert capsys.readouterr().err == f"fwlab: downloading {url}/some.zip\n"
    assert corpus("wikitext-2-train").encode() == TEXT  # The server is closed.
    assert capsys.readouterr().err == ""
    (unpacked,) = (path for path in cache.rglob("*.tokens") if path.is_file())
    unpacked.write_bytes(TEXT[:-1])
    said = r"is not the corpus .*expected SHA-1 "
    refuses(lambda: corpus("wikitext-2-train"), said, CorpusError)
    (cache / "some.zip").unlink()
    said = "put wikitext-2/wiki.train.tokens of .*zip as wikitext-2/train.txt into"
    refuses(lambda: corpus("wikitext-2-train"), said, CorpusError)


def test_own_splits(monkeypatch, tmp_path):
    monkeypatch.setenv("FWLAB_DATA", str(tmp_path))
    (tmp_path / "wikitext-103").mkdir()
    for split in ("train", "valid", "test"):
        text = f" \n = {split} = \n \n a b \n".encode()
        (tmp_path / "wikitext-103" / f"{split}.txt").write_bytes(text)
        name = f"wikitext-103-{split}"
        hash = f"sha1:{hashlib.sha1(text).hexdigest()}"
        monkeypatch.setitem(CORPORA, name, CORPORA[name]._replace(hash=hash))
    texts = splits("wikitext-103")
    assert texts._fields == ("train", "valid", "test")
    for split, text in texts._asdict().items():
        assert "".join(text.pieces()) == corpus(f"wikitext-103-{split}")
        assert f"= {split} =" in corpus(f"wikitext-103-{split}")
    whole = corpus("wikitext-103")
    assert whole == "".join(corpus(f"wikitext-103-{split}") for split in texts._fields)
    assert texts.sha256() == hashlib.sha256(whole.encode()).hexdigest()
    (tmp_path / "wikitext-103" / "valid.txt").write_bytes(b"another\n")
    said = "is not the corpus 'wikitext-103-valid'"
    refuses(lambda: splits("wikitext-103"), said, CorpusError)


@pytest.mark.parametrize("name", ["python", "file"])
def test_other_texts_are_cut(tmp_path, name):
    if name == "file":
        name = str(tmp_path / "own.txt")
        (tmp_path / "own.txt").write_text("schöne Grüße\n" * 9, encoding="utf-8")
    whole = corpus(name)
    cut = int(0.9 * len(whole))
    train, valid, test = splits(name)
    assert "".join(train.pieces()) == whole[:cut]
    assert "".join(valid.pieces()) == whole[cut:]
    assert test is None


def test_folder(tmp_path, capsys):
    """Each text file in a folder is a document, in the order of the paths."""
    for file, text in {
        "b.txt": "bé\n",
        "a/z.txt": "z" * 20,
        "a/empty.txt": "",
        "blank.txt": " \n",
        "a.txt": "first\n",
        ".git/config": "hidden",
        "a/.hidden": "hidden",
    }.items():
        path = tmp_path / file
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert corpus(str(tmp_path)) == "z" * 20 + "first\nbé\n"
    assert capsys.readouterr().err == ""
    (tmp_path / "latin.txt").write_bytes("schön".encode("latin-1"))
    (tmp_path / "zeros").write_bytes(bytes(9))
    train, valid, test = splits(str(tmp_path))
    assert capsys.readouterr().err == (
        f"fwlab: left out 2 of 7 files in {tmp_path} that are not UTF-8 text "
        "or contain a NUL character\n"
    )
    documents = list(train.documents)
    assert documents == ["z" * 20, "first\n"]
    assert valid.documents == ("bé\n",)
    assert test is None
    for file in ("a/z.txt", "a.txt", "b.txt"):
        (tmp_path / file).unlink()
    refuses(lambda: corpus(str(tmp_path)), "got none of 4 files", CorpusError)


def test_own_file(tmp_path):
    path = tmp_path / "own.txt"
    path.write_text("schön\n", encoding="utf-8")
    assert corpus(str(path)) == "schön\n"
    for content, said in (
        (b" \n", "is empty"),
        (codecs.BOM_UTF8, "is empty"),
        ("first\r\nsch\xf6n".encode("latin-1"), "is not UTF-8 text, from line 2 on"),
        (b"first\nschoen\0", "a NUL character, in line 2: expected text, and no bin"),
        ("x".encode("utf-16"), "is UTF-16: save it as UTF-8"),
        ("x".encode("utf-32"), "is UTF-32: save it as UTF-8"),
    ):
        path.write_bytes(content)
        refuses(lambda: corpus(str(path)), said, CorpusError)
    refuses(lambda: corpus(str(tmp_path / "other.txt")), "cannot read", CorpusError)
    refuses(lambda: corpus(""), "got ''", CorpusError)
    refuses(lambda: corpus("shakespear"), r"'shakespeare'.* got 's.*pear'", CorpusError)


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_ends_of_lines_and_byte_order_marks(tmp_path, end):
    """Line ends and byte order marks change neither a text nor its splits."""
    text = "first é\n\n\nsecond\nthird \ufeff\n\n"
    for name in "ab":
        data = text.replace("\n", end).encode("utf-8-sig")
        (tmp_path / f"{name}.txt").write_bytes(data)
    assert corpus(str(tmp_path / "a.txt")) == text
    assert corpus(str(tmp_path)) == text * 2
    for size in range(1, len(text)):
        data = text[:size].replace("\n", end).encode("utf-8-sig")
        (tmp_path / "a.txt").write_bytes(data)
        train, valid, _ = splits(str(tmp_path / "a.txt"))
        begin, rest = ("".join(part.pieces()) for part in (train, valid))
        assert begin == text[: int(0.9 * size)] and begin + rest == text[:size]


def test_characters():
    characters = Characters("hello")
    assert characters.alphabet == "ehlo"
    tokens = characters.encode("hole")
    assert tokens.dtype == torch.int64
    assert characters.decode(tokens) == "hole"
    assert characters.encode("").shape == (0,)
    with pytest.raises(ValueError, match="got 'z'"):
        characters.encode("zoo")
    assert characters.vocabulary == ["e", "h", "l", "o"]
    for same in (Characters(characters.vocabulary), Characters.of(["he", "llo"])):
        assert same.alphabet == characters.alphabet


#: Numbers as English and German words.
WORDS = """
0 zero/null, 1 one/eins, 2 two/zwei, 7 seven/sieben, 10 ten/zehn, 11 eleven/elf,
12 twelve/zwölf, 13 thirteen/dreizehn, 15 fifteen/fünfzehn, 16 sixteen/sechzehn,
17 seventeen/siebzehn, 18 eighteen/achtzehn, 19 nineteen/neunzehn, 20 twenty/zwanzig,
21 twenty-one/einundzwanzig, 30 thirty/dreißig, 37 thirty-seven/siebenunddreißig,
42 forty-two/zweiundvierzig, 55 fifty-five/fünfundfünfzig, 60 sixty/sechzig,
66 sixty-six/sechsundsechzig, 70 seventy/siebzig, 77 seventy-seven/siebenundsiebzig,
81 eighty-one/einundachtzig, 99 ninety-nine/neunundneunzig, 100 one hundred/einhundert,
101 one hundred one/einhunderteins, 111 one hundred eleven/einhundertelf,
316 three hundred sixteen/dreihundertsechzehn, 600 six hundred/sechshundert,
421 four hundred twenty-one/vierhunderteinundzwanzig, 1000 one thousand/eintausend,
1001 one thousand one/eintausendeins, 2030 two thousand thirty/zweitausenddreißig,
1100 one thousand one hundred/eintausendeinhundert,
21000 twenty-one thousand/einundzwanzigtausend,
612017 six hundred twelve thousand seventeen/sechshundertzwölftausendsiebzehn
"""


def test_numbers_in_words():
    for entry in WORDS.replace("\n", " ").split(","):
        number, words = entry.strip().split(" ", 1)
        found = (number_words(int(number)), number_words(int(number), "german"))
        assert "/".join(found) == words


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ((-1,), "number to be from 0 to 999,999, got -1"),
        ((1_000_000,), "from 0 to 999,999, got 1000000"),
        ((1, "french"), "language to be 'english' or 'german', got 'french'"),
    ],
)
def test_what_has_no_words(call, said):
    with pytest.raises(ValueError, match=said):
        number_words(*call)
