"""Read the times that a GPU has measured, and the compiler's report on memory use.

tests/machine/test_compiled.py writes the numbers of the compiler.
"""

from repository import ROOT

from fwlab.files import read_json
from fwlab.ops import TABLE
from fwlab.ops.linear.kernels import NARROW

#: The file of the calls that a GPU has timed, next to other libraries.
PEERS = "gpu-nvidia-h200.json"


def measured(*ops: str) -> dict:
    """Return times of `ops`, or of all operations, and other libraries' in our times.

    Times are those of the longest size, measured first; multiples cover all sizes.
    """
    run, rows, ratios = _read(PEERS), {}, {"fla": [], "efficient": []}
    for row in run["rows"]:
        if row["op"] not in (ops or TABLE):
            continue  # a measurement that has ended
        if row["side"] == "triton":
            case, ours = row["case"], row["ms"]
        else:
            ratios[row["side"]].append(row["ms"] / ours)
        first, times = rows.setdefault(row["op"], (row, {}))
        if case == first["case"]:
            times[row["side"]] = row["ms"]
    return {"run": run, "rows": rows, "ratios": ratios}


def places() -> dict:
    """Return the report of compiler and card on the kernel that is drawn."""
    use = _read("kernels.json")["kernels"]["delta 64"]["forward, sm_90"]
    return {"use": use, "chunk": NARROW.C, "card": _read(PEERS)["card"]}


def _read(name: str) -> dict:
    return read_json(ROOT / "docs" / "results" / name)
