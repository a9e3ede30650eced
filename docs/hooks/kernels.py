"""What a GPU has timed, and what the compiler says of its memories: results.py draws it.

tests/machine/test_compiled.py writes the numbers of the compiler.
"""

from repository import ROOT

from fwlab.files import read_json
from fwlab.ops import TABLE
from fwlab.ops.linear.kernels import NARROW

#: Calls that a GPU has timed, next to others.
PEERS = "gpu-nvidia-h200.json"


def measured() -> dict:
    """Return times of each operation at its longest, and those of others in ours.

    The longest size is measured first; multiples of our times are those of all sizes.
    """
    run, rows, ratios = _read(PEERS), {}, {"fla": [], "efficient": []}
    for row in run["rows"]:
        if row["op"] not in TABLE:
            continue  # one that has ended
        if row["side"] == "triton":
            case, ours = row["case"], row["ms"]
        else:
            ratios[row["side"]].append(row["ms"] / ours)
        first, times = rows.setdefault(row["op"], (row, {}))
        if case == first["case"]:
            times[row["side"]] = row["ms"]
    return {"run": run, "rows": rows, "ratios": ratios}


def places() -> dict:
    """Return what the compiler and the card say of the kernel that is drawn."""
    use = _read("kernels.json")["kernels"]["delta 64"]["forward, sm_90"]
    return {"use": use, "chunk": NARROW.C, "card": _read(PEERS)["card"]}


def _read(name: str) -> dict:
    return read_json(ROOT / "docs" / "results" / name)
