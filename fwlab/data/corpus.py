"""Corpora: a file, a checked download, or Python's standard library."""

import hashlib
import os
import sys
import sysconfig
from pathlib import Path
from typing import NamedTuple


class CorpusError(Exception):
    """The text is missing, empty, or not the expected one."""


class _Source(NamedTuple):
    file: str  # below $FWLAB_DATA, and in the download cache
    url: str
    sha256: str


CORPORA = {
    "shakespeare": _Source(
        "tinyshakespeare.txt",
        "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
        "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
    ),
    "wikitext-2-valid": _Source(
        "wikitext-2/valid.txt",
        "https://raw.githubusercontent.com/pytorch/examples/main/word_language_model/data/wikitext-2/valid.txt",
        "f0737ed31fc1329026e95cb8b98e19c2a182c39c240ab909dc31abf2f8af58e8",
    ),
    "wikitext-2-test": _Source(
        "wikitext-2/test.txt",
        "https://raw.githubusercontent.com/pytorch/examples/main/word_language_model/data/wikitext-2/test.txt",
        "d790b833ef8cf03a90db7bf1271b7520b83c45ce07ba3c1a9699df81e239eca0",
    ),
}
"""The corpora that can be downloaded, by name: the name of the file, its
address and its SHA-256."""


def corpus(name: str | None = None) -> str:
    """The text of a corpus.

    - `name`: "shakespeare" (Tiny Shakespeare, 1.1 million characters),
      "python" (the standard library of this interpreter, always
      available), "wikitext-2-valid", "wikitext-2-test", or the path of a
      UTF-8 text file. None = Shakespeare, or Python if Shakespeare is not
      available; one line on stderr then says so.
    - Returns the text.
    - Raises `CorpusError` if the text is not available, is empty, or is
      not the expected one (SHA-256).

    If `$FWLAB_DATA` is set, a corpus is loaded from that folder;
    otherwise it is downloaded once into the user's cache.
    """
    if name == "python":
        return _standard_library()
    if name is None:
        try:
            return corpus("shakespeare")
        except _Unreachable as error:
            print(f"fwlab: {error}; using the 'python' corpus", file=sys.stderr)
            return _standard_library()
    if name in CORPORA:
        return _known(name, CORPORA[name])
    if "/" in name or "\\" in name or Path(name).suffix or Path(name).exists():
        return _read(Path(name))
    known = ", ".join(map(repr, ["python", *CORPORA]))
    raise CorpusError(
        f"expected corpus to be {known} or the path of a text file, got {name!r}"
    )


class _Unreachable(CorpusError):
    """No network, or no library to download with: another text will do."""


def _known(name: str, source: _Source) -> str:
    folder = os.environ.get("FWLAB_DATA")
    path = Path(folder, source.file) if folder else _fetch(name, source)
    text = _read(path)
    digest = hashlib.sha256(text.encode()).hexdigest()
    if digest != source.sha256:
        raise CorpusError(
            f"{path} is not the corpus {name!r}: expected SHA-256 "
            f"{source.sha256[:12]}…, got {digest[:12]}…; delete or replace the file"
        )
    return text


def _fetch(name: str, source: _Source) -> Path:
    try:
        import pooch
    except ImportError:
        raise _Unreachable(
            f"cannot download the corpus {name!r}: pooch is not installed; run "
            f"pip install pooch, or put {source.file} into a folder and set "
            "FWLAB_DATA to that folder"
        ) from None
    # pooch writes to a temporary file, checks it, and then renames it.
    logger = pooch.get_logger()
    disabled, logger.disabled = logger.disabled, True
    try:
        return Path(
            pooch.retrieve(
                source.url,
                known_hash=f"sha256:{source.sha256}",
                fname=source.file.replace("/", "-"),
                path=pooch.os_cache("fwlab"),
            )
        )
    except ValueError:
        raise CorpusError(
            f"{source.url} did not send the corpus {name!r}: its SHA-256 differs, so "
            "nothing was kept; try again, or set FWLAB_DATA to a folder with the file"
        ) from None
    except OSError as error:
        raise _Unreachable(
            f"cannot download the corpus {name!r} ({type(error).__name__}); connect to "
            f"the network, or put {source.file} into a folder and set FWLAB_DATA to "
            "that folder"
        ) from None
    finally:
        logger.disabled = disabled


def _read(path: Path) -> str:
    try:
        text = path.read_bytes().decode("utf-8")
    except OSError as error:
        why = (error.strerror or type(error).__name__).lower()
        raise CorpusError(f"cannot read the corpus file {path}: {why}") from None
    except UnicodeDecodeError:
        raise CorpusError(f"the corpus file {path} is not UTF-8 text") from None
    if not text.strip():
        raise CorpusError(f"the corpus file {path} is empty")
    return text


def _standard_library() -> str:
    """The top level of the standard library, all files concatenated.

    Only ASCII files, so that the alphabet stays as small as a book's.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    files = (path.read_bytes() for path in sorted(folder.glob("*.py")))
    text = "\n".join(data.decode() for data in files if data.isascii())
    if not text.strip():
        raise CorpusError(
            f"expected Python files in the standard library {folder}, got none"
        )
    return text
