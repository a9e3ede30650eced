"""Store a reader's progress in the folder of the course."""

import json
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from fwlab.files import write_json

#: Name of the file for the progress, beside the notebooks.
FILE = "fwlab_progress.json"
#: Key in the file for the probabilities that a reader gave to predictions.
SURE = "sure"
_session: dict[str, bool] = {}
_sure: dict[str, float] = {}


def note(name: str, right: bool, sure: float | None = None) -> None:
    """Record a right answer, or the result of the first prediction.

    - `name`: name of an exercise, a question or a derivation.
    - `right`: True if the answer was right; later answers do not change this.
    - `sure`: the probability that the reader gave the prediction, if any.
    """
    if name not in done() and sure is not None:
        _sure[name] = sure
    _session.setdefault(name, right)
    if (file := place()) is not None:
        with suppress(OSError):  # The folder may be read-only.
            write_json(file, done() | ({SURE: given()} if given() else {}))


def done() -> dict[str, bool]:
    """Return all results so far, True (right) or False (wrong), by name."""
    file = place()
    return _session | (read(file) if file else {})


def given() -> dict[str, float]:
    """Return the probabilities that the reader gave to first predictions, by name."""
    file = place()
    kept = (_content(file).get(SURE) if file else None) or {}
    known = kept.items() if isinstance(kept, dict) else ()
    return _sure | {name: x for name, x in known if isinstance(x, float)}


def place() -> Path | None:
    """Return the file that stores progress, or None if progress is not stored.

    The file is in the folder of the open notebook; there is none in a test or
    in continuous integration. The environment variable `FWLAB_PROGRESS` names
    another file; empty = none.
    """
    if (asked := os.environ.get("FWLAB_PROGRESS")) is not None:
        return Path(asked) if asked else None
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    tested = {"CI", "PYTEST_VERSION"} & os.environ.keys()
    return Path.cwd() / FILE if hasattr(shell, "kernel") and not tested else None


def found(folder: Path) -> dict[str, bool]:
    """Read the progress that is stored in a folder or in its folder `notebooks`."""
    files = (place(), folder / FILE, folder / "notebooks" / FILE)
    return next((read(file) for file in files if file and file.is_file()), {})


def read(file: Path) -> dict[str, bool]:
    """Read the progress in a file, or return {} if the file cannot be read."""
    known = _content(file).items()
    return {name: right for name, right in known if isinstance(right, bool)}


def _content(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def overview(known: dict[str, bool]) -> str:
    """List all exercises, derivations and questions by notebook, with their status.

    - `known`: True if the answer was right, by name.
    """
    from fwlab.exercises import DERIVATIONS, EXERCISES, QUESTIONS

    kinds: dict[str, dict[str, Any]] = {
        "exercise": EXERCISES,
        "derivation": DERIVATIONS,
        "question": QUESTIONS,
    }
    notebooks: dict[str, list[str]] = {}
    minutes: dict[str, int] = {}
    for kind, named in kinds.items():
        for name, each in named.items():
            where = getattr(each, "asked", "") or each.notebook
            mark = {True: "✓", False: "✗", None: " "}[known.get(name)]
            notebooks.setdefault(where, []).append(
                f"{mark} {name:<26}{kind:<10}{each.difficulty:>12}"
                f"{each.importance:>12}{each.minutes:>9}"
            )
            minutes[where] = minutes.get(where, 0) + each.minutes
    lines = [f"{'':38}{'difficulty':>12}{'importance':>12}{'minutes':>9}"]
    for notebook in sorted(notebooks):
        lines += ["", f"{notebook or 'your own'}: {minutes[notebook]} minutes"]
        lines += notebooks[notebook]
    return "\n".join(lines)
