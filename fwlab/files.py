"""Write files completely or not at all; read the results that the package contains."""

import contextlib
import json
import os
import secrets
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

#: The folder with the results that the package contains.
RESULTS = Path(__file__).parent / "data" / "results"
#: Kinds of files other than regular files, by the letters of `ls -l`.
OTHERS = {"d": "folder", "c": "device", "b": "device", "p": "pipe", "s": "socket"}
OTHERS["l"] = "symbolic link"


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path whose file replaces `path` after the block.

    Readers see the old file or the new one, also after a power failure; other writers
    do not interfere, and nothing is left behind if the block fails. A symbolic link
    stays, and the file it points to is replaced. A file keeps its mode; a new file has
    the mode of the umask.

    - Raises what `destination` raises.
    """
    target = destination(path)
    part = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    # A private file must stay private while it is written.
    part.touch(0o600 if target.exists() else 0o666, exist_ok=False)
    try:
        mode = (target if target.exists() else part).stat().st_mode
        yield part
        with part.open("rb+") as file:
            os.fsync(file.fileno())
        part.chmod(stat.S_IMODE(mode))
        os.replace(part, target)
    except OSError as error:
        if error.errno and not error.filename:  # For example, the disk is full.
            error.filename = str(path)
        raise
    finally:
        part.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # Not all systems can open a folder.
        folder = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def destination(path: Path) -> Path:
    """Return the file that a write to `path` replaces or creates, following all links.

    Its folder is created. A command that takes minutes calls this at its start.

    - Raises `OSError` if a file cannot be written there: something else is there, such
      as a device or a folder, or a file that is read-only.
    """
    with contextlib.suppress(FileNotFoundError):  # The path may not exist.
        kind = stat.filemode(path.stat().st_mode)[0]
        if kind != "-":
            raise OSError(f"expected {path} to be a file, got a {OTHERS[kind]}")
        if not os.access(path, os.W_OK):
            raise PermissionError(
                f"expected {path} to be writable, got a read-only file"
            )
    target = Path(os.path.realpath(path))
    check_writable(target.parent)
    return target


def write_json(path: Path, data: Any) -> None:
    """Write plain data to a file as indented JSON."""
    with replacing(path) as part:
        part.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def read_json(path: Path) -> Any:
    """Load plain data from a JSON file.

    - Raises `ValueError`, which names the file, if it is not JSON.
    """
    try:
        return json.loads(path.read_bytes())  # `loads` detects the encoding.
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: no JSON ({error})") from None


def check_writable(folder: Path) -> None:
    """Create a folder, and raise `OSError` if no file can be written there."""
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"expected {folder} to be a folder, got a file")
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        error.filename = str(folder)  # Name the folder, not the temporary file.
        raise


def result(name: str) -> Any:
    """Read a result that the package contains, from a JSON file in `RESULTS`.

    - `name`: name of the file, without its ending.
    - Returns the content of the file: settings and measurements.
    """
    return read_json(RESULTS / f"{name}.json")
