"""Read kernel times measured on a GPU, and the compiler's report on memory use.

tests/machine/test_compiled.py writes the numbers of the compiler.
"""

from repository import ROOT

from fwlab.files import read_json
from fwlab.ops import TABLE
from fwlab.ops.linear.kernels import NARROW

#: The file with GPU times of our operations and of other libraries.
PEERS = "gpu-nvidia-h200.json"


def measured(*ops: str) -> dict:
    """Return times of `ops` (default: all), and other times relative to the kernels.

    Times are those of the longest size, measured first. Ratios cover all sizes.
    """
    run, rows, ratios = _read(PEERS), {}, {"fla": [], "efficient": []}
    for row in run["rows"]:
        if row["op"] not in (ops or TABLE):
            continue  # This operation is not shown, or no longer measured.
        if row["side"] == "triton":
            case, ours = row["case"], row["ms"]
        else:
            ratios[row["side"]].append(row["ms"] / ours)
        first, times = rows.setdefault(row["op"], (row, {}))
        if case == first["case"]:
            times[row["side"]] = row["ms"]
    return {"run": run, "rows": rows, "ratios": ratios}


def places() -> dict:
    """Return the compiler's report on the delta kernel, with chunk size and GPU."""
    use = _read("kernels.json")["kernels"]["delta 64"]["forward, sm_90"]
    return {"use": use, "chunk": NARROW.C, "card": _read(PEERS)["card"]}


def _read(name: str) -> dict:
    return read_json(ROOT / "docs" / "results" / name)
