"""Writing files completely or not at all."""

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path; after the block it replaces `path`.

    Readers see the old file or the new one, other writers do not
    interfere, and nothing is left behind if the block fails.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    os.close(handle)
    part = Path(name)
    try:
        yield part
        part.chmod(0o644)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def write_json(path: Path, data: Any) -> None:
    """Write plain data as JSON for people to read."""
    with replacing(path) as part:
        part.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def check_writable(folder: Path) -> None:
    """Make a folder, and raise `OSError` if no file can be written there."""
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"expected {folder} to be a folder, got a file")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass
