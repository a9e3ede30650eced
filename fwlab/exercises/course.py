"""What each notebook asks, beside its exercises: the files of the folder course.

A file is a notebook. A table with `blanks` is a derivation, any other one a question;
`Derivation` and `Question` say what their fields mean. Lines of a long text are joined
with spaces, except those of a derivation's `text`.
"""

import tomllib
from pathlib import Path
from typing import Any

_FILES = sorted(Path(__file__).with_suffix("").glob("*.toml"))


def asked(derivations: bool) -> dict[str, dict[str, Any]]:
    """The fields of all derivations, or of all questions, by name.

    - Each has `notebook`, the one that explains it, and `asked`, the one that asks:
      the same unless the file says otherwise.
    - Raises `ValueError` if two notebooks use the same name.
    """
    every: dict[str, dict[str, Any]] = {}
    for file in _FILES:
        for name, fields in tomllib.loads(file.read_text("utf-8")).items():
            if name in every:
                raise ValueError(f"{name}: in {every[name]['asked']} and {file.stem}")
            every[name] = {"notebook": file.stem, "asked": file.stem} | fields
    return {
        name: fields
        for name, fields in every.items()
        if ("blanks" in fields) == derivations
    }
