"""Load corpora from files, checked downloads or Python's standard library."""

import codecs
import hashlib
import os
import stat
import sys
import sysconfig
from pathlib import Path
from typing import NamedTuple

from fwlab.data.texts import Splits, Text


class CorpusError(ValueError):
    """Signal that the text of a corpus is missing, empty or not the expected one."""


class _Source(NamedTuple):
    file: str  # Path below $FWLAB_DATA and in the download cache.
    url: str
    hash: str  # Hash of the file, as "sha256:..." or "sha1:...".
    # Name of the file in its ZIP archive, and hash of the archive, if there is one.
    member: str = ""
    archive_hash: str = ""


#: Hashes of the archives of WikiText, as in Hugging Face's datasets library.
#: Only these corpora have published splits.
WIKITEXT = {
    "wikitext-2": "sha256:92675f1d63015c1c8b51f1656a52d5bdbc33aafa60cc47a218a66e7ee817488c",
    "wikitext-103": "sha256:242ba0f20b329cfdf1ccc61e9e9e5b59becf189db7f7a81cd2a0e2fc31539590",
}
#: Hashes of the files in the archives of WikiText, as in GluonNLP.
_FILES = {
    "wikitext-2-train": "sha1:863f29c46ef9d167fff4940ec821195882fe29d1",
    "wikitext-103-train": "sha1:b7497e2dfe77e72cfef5e3dbc61b7b53712ac211",
    "wikitext-103-valid": "sha1:c326ac59dc587676d58c422eb8a03e119582f92b",
    "wikitext-103-test": "sha1:8a5befc548865cec54ed4273cf87dbbad60d1e47",
}


def _archived(part: str) -> _Source:
    name, _, split = part.rpartition("-")
    # Use the copy of a WikiText author, since the original address is gone.
    archive = f"https://wikitext.smerity.com/{name}-v1.zip"
    member = f"{name}/wiki.{split}.tokens"
    return _Source(f"{name}/{split}.txt", archive, _FILES[part], member, WIKITEXT[name])


CORPORA = {
    "shakespeare": _Source(
        "tinyshakespeare.txt",
        "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
        "sha256:86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
    ),
    "wikitext-2-valid": _Source(
        "wikitext-2/valid.txt",
        "https://raw.githubusercontent.com/pytorch/examples/main/word_language_model/data/wikitext-2/valid.txt",
        "sha256:f0737ed31fc1329026e95cb8b98e19c2a182c39c240ab909dc31abf2f8af58e8",
    ),
    "wikitext-2-test": _Source(
        "wikitext-2/test.txt",
        "https://raw.githubusercontent.com/pytorch/examples/main/word_language_model/data/wikitext-2/test.txt",
        "sha256:d790b833ef8cf03a90db7bf1271b7520b83c45ce07ba3c1a9699df81e239eca0",
    ),
    **{part: _archived(part) for part in _FILES},
}
"""The corpora that can be downloaded, by name: the name of the file, its
address and its hash; for an archive, also the name in it, and its hash."""


#: Byte order marks of other encodings. Test UTF-32 first: it may begin like UTF-16.
OTHERS = {
    "UTF-32": (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE),
    "UTF-16": (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE),
}


def corpus(name: str | None = None) -> str:
    """Load the text of a corpus.

    - `name`: "shakespeare" (Tiny Shakespeare, 1.1 million characters), "python" (the
      standard library of this interpreter, always available), "wikitext-2" (2.5 million
      words), "wikitext-103" (103 million words), a part of these, as in
      "wikitext-2-valid", or the path of a UTF-8 text file or of a folder. None =
      Shakespeare, or Python if Shakespeare is not available; one line on stderr then
      says so.
    - Returns the text. That of a folder is the text of its files in the order of their
      paths; files whose names begin with a dot are left out, and files that are not
      UTF-8 text or contain a NUL character, which one line on stderr counts. Lines end
      with LF: those of a file may end with CRLF or CR, too. A byte order mark is
      dropped.
    - Raises `CorpusError` if the text is not available, is empty, or is not the
      expected one (its hash).

    If `$FWLAB_DATA` is set, a corpus is loaded from that folder (`tinyshakespeare.txt`,
    `wikitext-2/train.txt` and so on); otherwise it is downloaded once into the user's
    cache. The archives of WikiText are from https://wikitext.smerity.com; this download
    is tested with a server of our own only.

        >>> corpus("python").isascii()
        True
    """
    return "".join(_text(name).documents)


def splits(name: str | None = None) -> Splits:
    """Load a corpus as texts for training, validation and test.

    WikiText has its own splits. Every other corpus is cut: the last tenth of its
    characters is for validation, and there is no test text.

        >>> splits("python").test is None
        True

    - `name`: as for `corpus`.
    - Returns a `Splits`. A document is an article of WikiText, a file of a folder, or
      the whole text of any other corpus.
    - Raises `CorpusError` as `corpus` does.
    """
    if name in WIKITEXT:
        return Splits(*(_text(f"{name}-{split}") for split in Splits._fields))
    return Splits.of(_text(name))


def _text(name: str | None) -> Text:
    if name == "python":
        return Text((_standard_library(),))
    if name is None:
        try:
            return _text("shakespeare")
        except _Unreachable as error:
            print(f"fwlab: {error}; using the 'python' corpus", file=sys.stderr)
            return _text("python")
    if name in CORPORA:
        text = _known(name, CORPORA[name])
        return Text.of_articles(text) if name.startswith("wikitext") else Text((text,))
    if name in WIKITEXT:
        texts = (_text(f"{name}-{split}").documents for split in Splits._fields)
        return Text(sum(texts, ()))
    path = Path(name)
    if name and path.is_dir():  # An empty name would mean the current folder.
        return _folder(path)
    if name and ("/" in name or "\\" in name or path.suffix or path.exists()):
        return Text((_file(path),))
    known = ", ".join(map(repr, ["shakespeare", "python", *WIKITEXT]))
    raise CorpusError(
        f"expected corpus to be {known} or the path of a text file or a folder, "
        f"got {name!r}"
    )


class _Unreachable(CorpusError):
    """Signal that there is no network, or no library to download a corpus with."""


def _known(name: str, source: _Source) -> str:
    folder = os.environ.get("FWLAB_DATA")
    path = Path(folder, source.file) if folder else _fetch(name, source)
    text = _file(path)
    kind, _, expected = source.hash.partition(":")
    digest = hashlib.new(kind, path.read_bytes()).hexdigest()
    if digest != expected:
        raise CorpusError(
            f"{path} is not the corpus {name!r}: expected SHA-{kind[3:]} "
            f"{expected[:12]}…, got {digest[:12]}…; delete or replace the file"
        )
    return text


def _fetch(name: str, source: _Source) -> Path:
    what = source.file
    if source.member:
        what = f"{source.member} of {source.url} as {source.file}"
    by_hand = f"put {what} into a folder and set FWLAB_DATA to that folder"
    try:
        import pooch
    except ModuleNotFoundError as error:
        if error.name != "pooch":  # A dependency of pooch is missing.
            raise
        raise _Unreachable(
            f"cannot download the corpus {name!r}: pooch is not installed; run "
            f"pip install pooch, or {by_hand}"
        ) from None
    kept = source.url.rpartition("/")[2]
    if not source.member:
        kept = source.file.replace("/", "-")
    if source.member and not Path(pooch.os_cache("fwlab"), kept).exists():
        print(f"fwlab: downloading {source.url}", file=sys.stderr)
    # pooch writes to a temporary file, checks it, and then renames it.
    logger = pooch.get_logger()
    disabled, logger.disabled = logger.disabled, True
    try:
        fetched = pooch.retrieve(
            source.url,
            known_hash=source.archive_hash or source.hash,
            fname=kept,
            path=pooch.os_cache("fwlab"),
            processor=pooch.Unzip([source.member]) if source.member else None,
            # WikiText's server refuses the usual names of Python's libraries.
            downloader=pooch.HTTPDownloader(headers={"User-Agent": "fwlab"}),
        )
        return Path(fetched[0] if source.member else fetched)
    except ValueError:
        raise CorpusError(
            f"{source.url} did not send the corpus {name!r}: its SHA-256 differs, so "
            "nothing was kept; try again, or set FWLAB_DATA to a folder with the file"
        ) from None
    except OSError as error:
        raise _Unreachable(
            f"cannot download the corpus {name!r} ({type(error).__name__}); connect to "
            f"the network, or {by_hand}"
        ) from None
    finally:
        logger.disabled = disabled


def _file(path: Path) -> str:
    """Return the text of a file, or raise `CorpusError` if it is empty or not text."""
    text, wrong = _read(path)
    if wrong or not text.strip():
        raise CorpusError(f"the corpus file {path} {wrong or 'is empty'}")
    return text


def _folder(folder: Path) -> Text:
    """Return the text of all files below a folder, one document per file."""
    # Skip hidden files, such as the files of git.
    names = (path.relative_to(folder).parts for path in folder.rglob("*"))
    shown = sorted(
        parts for parts in names if not any(p.startswith(".") for p in parts)
    )
    files = [path for parts in shown if (path := folder.joinpath(*parts)).is_file()]
    found = [_read(path) for path in files]
    texts = tuple(text for text, wrong in found if text.strip() and not wrong)
    if not texts:
        raise CorpusError(
            f"expected UTF-8 text files in the folder {folder}, got none of "
            f"{len(files)} files"
        )
    if binary := sum(wrong != "" for _, wrong in found):
        print(
            f"fwlab: left out {binary} of {len(files)} files in {folder} that are not "
            "UTF-8 text or contain a NUL character",
            file=sys.stderr,
        )
    return Text(texts)


def _read(path: Path) -> tuple[str, str]:
    """Return the text of a file, and the reason why it is not text, or ""."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # Reading a pipe could block.
            raise CorpusError(
                f"expected the corpus {path} to be a file or a folder: it is a device "
                "or a pipe, so save its text first"
            )
        data = path.read_bytes()
        text = _unix_lines(data.decode("utf-8-sig"))
    except OSError as error:
        why = (error.strerror or type(error).__name__).lower()
        raise CorpusError(f"cannot read the corpus file {path}: {why}") from None
    except UnicodeDecodeError as error:
        for encoding, marks in OTHERS.items():
            if data.startswith(marks):
                return "", f"is {encoding}: save it as UTF-8"
        line = 1 + error.object.count(b"\n", 0, error.start)
        return "", f"is not UTF-8 text, from line {line} on"
    if "\0" in text:
        line = 1 + text.partition("\0")[0].count("\n")
        wanted = "expected text, and no binary data or UTF-16"
        return "", f"contains a NUL character, in line {line}: {wanted}"
    return text, ""


def _unix_lines(text: str) -> str:
    """Convert line endings to LF, as `open` does."""
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _standard_library() -> str:
    """Return the top level of the standard library, all files concatenated.

    Only ASCII files are read, so that the alphabet stays as small as a book's.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    files = (path.read_bytes() for path in sorted(folder.glob("*.py")))
    text = "\n".join(_unix_lines(data.decode()) for data in files if data.isascii())
    if not text.strip():
        raise CorpusError(
            f"expected Python files in the standard library {folder}, got none"
        )
    return text
