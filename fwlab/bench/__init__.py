"""Measure speed and memory: `operations` on a CPU, `kernels` on a GPU.

docs/tools/peers.py of the repository compares with others.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from fwlab.files import destination, write_json
from fwlab.provenance import provenance


def main(measure: Callable[[], dict[str, Any]], out: Path | None, command: str) -> None:
    """Measure, print, and write JSON to `out` unless that is None.

    - `measure`: prints its tables, and returns them as plain values.
    """
    if out is not None:
        destination(out)
    source = provenance(command)
    print(
        f"float32; torch {source['torch']}, {source['threads']} threads, "
        f"{source['machine']}\n"
    )
    result = measure()
    if out is not None:
        write_json(out, {"dtype": "float32", "seed": 0, **result, **source})
        print(f"\n{out}")
