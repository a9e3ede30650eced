"""What a reader has done, remembered in the folder of the course."""

import json
import os
import sys
from contextlib import suppress
from pathlib import Path

from fwlab.files import write_json

#: The file, beside the notebooks.
FILE = "fwlab_progress.json"
_session: dict[str, bool] = {}


def note(name: str, right: bool) -> None:
    """Remember a right answer, or how the first prediction came out.

    - `name`: of an exercise, a question or a derivation.
    - `right`: later answers do not change it.
    """
    _session.setdefault(name, right)
    if (file := place()) is not None:
        with suppress(OSError):  # a folder that cannot be written to
            write_json(file, done())


def done() -> dict[str, bool]:
    """What was right and what was not, by name, in this session and before."""
    file = place()
    return _session | (read(file) if file else {})


def place() -> Path | None:
    """Where this session remembers; None = only until it ends.

    It is the folder of a notebook that somebody works in: not one of a test or
    of continuous integration. The environment variable `FWLAB_PROGRESS` names
    another file; empty = none.
    """
    if (asked := os.environ.get("FWLAB_PROGRESS")) is not None:
        return Path(asked) if asked else None
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    tested = {"CI", "PYTEST_VERSION", "PYTEST_CURRENT_TEST"} & os.environ.keys()
    return Path.cwd() / FILE if hasattr(shell, "kernel") and not tested else None


def read(file: Path) -> dict[str, bool]:
    """What a file remembers; nothing if it cannot be read."""
    try:
        content = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    known = content.items() if isinstance(content, dict) else ()
    return {name: right for name, right in known if isinstance(right, bool)}
