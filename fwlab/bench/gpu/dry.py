"""A dry run: the whole plan on a CPU, with an emulator in place of a GPU.

`python -m fwlab.bench.gpu.dry` is the worker of such a run. It compiles
the kernels for Hopper and lets the emulator of the repository run what
the compiler made. Cases and problems are small enough for that. What it
measures are times of the emulator, which say nothing about a GPU.
"""

import importlib
import sys
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch

import fwlab
from fwlab.bench.gpu import cases, correctness, measure, problems, worker
from fwlab.ops.call import gpu

COMMAND = (sys.executable, "-u", "-m", "fwlab.bench.gpu.dry")

#: The GPU whose machine code is emulated.
CAPABILITY = (9, 0)
CARD: dict[str, Any] = {
    "name": "dry run, no GPU",
    "slug": "dry-run",
    "capability": list(CAPABILITY),
    "multiprocessors": None,
    "memory_gib": None,
    "free_gib": None,
    "driver": None,
    "cuda": None,
}
#: Arguments of `measure.rates`.
SIZES = {"copied": 2**20, "width": 64, "rounds": 2}

CASES = {
    case.key: case
    for case in (
        cases._rule("delta_rule", 1, 20, 1, 16),
        cases._rule("gated_delta_rule", 1, 20, 1, 16),
        cases._rule("sum_rule", 1, 20, 1, 16),
        cases._dpfp(1, 24, 1, 8, 1),
        cases._aft("aft_simple", 2, 24, 16),
        cases._aft("aft_full", 2, 24, 16),
        cases._aft("aft_local", 2, 24, 16, 4),
        cases._aft("aft_conv", 2, 24, 16, 4, 2),
        cases._feedback(2, 6, 2, 16, 2),
    )
}

NOTES = {"sum_rule": ("normalised", ""), "gated_rule": ("normalised", "")}

#: A few of each: ragged, with K != V, and one step. A dry run takes the
#: first of each operation.
PROBLEMS = {
    **{
        op: [
            problem
            for note in NOTES.get(op, ("",))
            for problem in (
                # Up to 64 steps the delta rules take another kernel.
                problems._rule(
                    op, note, 1, 70 if op == "delta_rule" else 37, 1, 16, 24
                ),
                problems._rule(op, note, 2, 1, 1, 16, 16),
            )
        ]
        for op in ("delta_rule", "gated_delta_rule", "sum_rule", "gated_rule")
    },
    "dpfp_delta_rule": [problems._features(1, 37, 1, 8, 16, 1)],
    **{
        op: [problems._aft_problem(op, "", 1, 37, 24, 8)]
        for op in ("aft_simple", "aft_full", "aft_local")
    },
    "aft_conv": [problems._aft_problem("aft_conv", "", 1, 37, 24, 8, heads=2)],
    "feedback": [problems._stack(1, 9, 2, 2, 16, 2)],
}


def install(each: int | None = 1) -> None:
    """Replace the real cases by these, with one call per turn.

    - `each`: the number of problems of each operation; None = all.
    """
    torch.set_num_threads(1)
    measure.TURN, measure.LONG, correctness.RUNS = 0.0, 0.0, 1
    cases.CASES.clear()
    cases.CASES.update(CASES)
    problems.PROBLEMS.clear()
    for op, mine in PROBLEMS.items():
        problems.PROBLEMS[op] = partial(islice, mine, each)


def stand_in() -> gpu.StandIn:
    """The emulator.

    - Raises `ValueError` outside a clone of the repository.
    """
    tests = Path(fwlab.__file__).parents[1] / "tests"
    if not (tests / "emulator" / "__init__.py").exists():
        raise ValueError(
            "bench --gpu --dry-run needs the emulator, which is in tests/emulator "
            "of the repository"
        )
    if str(tests) not in sys.path:
        sys.path.append(str(tests))
    return importlib.import_module("emulator").stand_in(CAPABILITY)


def main() -> None:
    """The worker, with the emulator."""
    install()
    with gpu.standing_in(stand_in()):
        worker.main()


if __name__ == "__main__":
    main()
