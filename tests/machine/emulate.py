"""Runs the kernels in the emulator, and writes what that has shown.

`python tests/machine/emulate.py` writes docs/results/emulator.json: the worst error of
every operation on compiled code, and for every barrier whether the emulator
notices that it is missing.
"""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

sys.path.append(str(Path(__file__).resolve().parents[1]))

import emulator
import numpy as np
import torch
import triton
from torch import Tensor

from fwlab.ops.call import launcher
from fwlab.ops.correcting import kernels as delta
from fwlab.provenance import provenance
from problems import ROWS, kernels
from problems.kernels import Problem

TABLE = Path(__file__).resolve().parents[2] / "docs/results/emulator.json"

HOPPER, AMPERE = (9, 0), (8, 0)


class Case(NamedTuple):
    """One problem in one precision.

    - `few`: whether the heads leave most of the GPU idle; then there are
      more and smaller programs.
    - `short`: up to this many steps the delta rules go step by step.
    """

    problem: Problem
    dtype: str
    capability: tuple[int, int]
    few: bool = False
    short: int = delta.SHORT

    @property
    def key(self) -> str:
        notes = [self.problem.key, self.dtype, target(self.capability)]
        notes += ["few heads"] * self.few
        return ", ".join(notes + ["step by step"] * (self.short > delta.SHORT))


def target(capability: tuple[int, int]) -> str:
    """As in "sm_90"."""
    return f"sm_{capability[0]}{capability[1]}"


#: The delta rules also go step by step through a problem of this length.
MANY = 50
#: Longer problems run the same code more often.
STEPS = {"feedback": 40, "aft_simple": 700}


def cases() -> Iterator[Case]:
    """The problems of the kernels that are short enough.

    All of them in bfloat16 on Hopper; a few of each operation in the other
    precisions, on Ampere, and with few heads.
    """
    half = "bfloat16"
    for _, group in groupby(kernels.PROBLEMS, lambda problem: problem.op):
        fitting = [p for p in group if p.time <= STEPS.get(p.op, 200)]
        for place, problem in enumerate(fitting):
            yield Case(problem, half, HOPPER)
            if place < 2:
                yield Case(problem, half, AMPERE)
            if place == 0 and "rule" in problem.op:
                yield Case(problem, half, HOPPER, few=True)
            for dtype in ("float32", "float16"):
                if dtype == "float32" and problem.name == "dpfp-delta 3":
                    continue  # too wide for a kernel
                if place == 0:
                    yield Case(problem, dtype, AMPERE)
                if place < 2 or "large keys" in problem.name:
                    yield Case(problem, dtype, HOPPER)
            if problem.time == MANY and problem.op != "dpfp_delta_rule":
                yield Case(problem, half, HOPPER, short=MANY)


@contextmanager
def machine(case: Case) -> Iterator[None]:
    """A GPU for this case: with few multiprocessors, all are busy."""
    cores = 132 if case.few else 1
    with (
        mock.patch.object(launcher, "multiprocessors", lambda device: cores),
        mock.patch.object(delta, "SHORT", case.short),
        launcher.standing_in(emulator.stand_in(case.capability)),
    ):
        yield


def check(case: Case) -> float:
    """The maximum relative error against naive in float64."""
    with machine(case):
        return max(case.problem.errors(case.dtype))


#: What keeps accesses in order; and why nothing is noticed without one of
#: them, which is what the emulator has then shown for this run.
ORDERS = {
    "bar.sync": "the accesses that it separates touch different bytes, "
    "or another barrier separates them",
    "fence.proxy.async": "another fence is between each store and the wgmma "
    "that reads it",
    "cp.async.wait_group": "nothing that it waits for is read before another wait",
    "wgmma.wait_group": "another wait comes before any use of the registers and "
    "of the shared memory",
}


class Kept(NamedTuple):
    """A launch, with what its tensors held before and after."""

    program: emulator.Program
    launch: launcher.Launch
    before: list[Tensor]
    after: list[Tensor]


def kept(case: Case) -> list[Kept]:
    """The launches of a case, one for each compiled kernel."""
    found: dict[int, Kept] = {}
    of = emulator.Emulator(case.capability)

    def run(launch: launcher.Launch) -> None:
        program, before = of.program(launch), _tensors(launch)
        of.run(launch)
        found.setdefault(id(program), Kept(program, launch, before, _tensors(launch)))

    with (
        machine(case),
        launcher.standing_in(launcher.StandIn(case.capability, "cpu", run)),
    ):
        error = max(case.problem.errors(case.dtype))
    assert error <= kernels.LIMITS[case.dtype], error
    return list(found.values())


def _tensors(launch: launcher.Launch) -> list[Tensor]:
    return [x.clone() for x in launch.arguments if isinstance(x, Tensor)]


def orders(program: emulator.Program) -> Iterator[tuple[int, str]]:
    """Where a program has barriers and the like, and of which kind."""
    for place, instruction in enumerate(program.instructions):
        for kind in ORDERS:
            if instruction.name.startswith(kind):
                yield place, kind


def noticed(one: Kept, place: int) -> bool:
    """Whether it shows that this instruction is missing."""
    fresh = iter([x.clone() for x in one.before])
    arguments = [
        next(fresh) if isinstance(x, Tensor) else x for x in one.launch.arguments
    ]
    launch = one.launch._replace(arguments=tuple(arguments))
    try:
        emulator.execute(one.program.without(place), launch)
    except emulator.Fault:
        return True
    return not all(map(_same, _tensors(launch), one.after))


def _same(a: Tensor, b: Tensor) -> bool:
    return np.array_equal(a.contiguous().view(torch.uint8), b.view(torch.uint8))


def _rule(name: str, width: int) -> Problem:
    (op,) = {p.op for p in kernels.PROBLEMS if p.name == name}
    sizes = {"K": width, "V": width, "H": 1}
    return Problem(op, name, ROWS[name], 130, sizes, batch=1)


#: Shipped forms whose barriers are deleted one by one.
DELETED: dict[str, Problem] = {
    "delta 64": _rule("delta", 64),
    "delta 128": _rule("delta", 128),
    "gated delta 64": _rule("gated-delta", 64),
    "sum 64, normalized": _rule("sum-normalized", 64),
    "gated 64, normalized": _rule("gated-normalized", 64),
}


def deletions(case: Case) -> dict[str, dict[str, Any]]:
    """For each kernel and kind: how many there are, how many are noticed."""
    found: dict[str, dict[str, Any]] = {}
    for one in kept(case):
        row = found.setdefault(one.program.name, {"deleted": {}, "unnoticed": []})
        for place, kind in orders(one.program):
            count = row["deleted"].setdefault(kind, [0, 0])
            seen = noticed(one, place)
            count[0] += 1
            count[1] += seen
            if not seen:
                text = one.program.instructions[place].text
                row["unnoticed"].append(f"{text}, {place}: {ORDERS[kind]}")
    return found


def row(case: Case) -> dict[str, Any]:
    """The row of a case in the table."""
    return {
        "op": case.problem.op,
        "case": case.key,
        "dtype": case.dtype,
        "target": target(case.capability),
        "error": float(f"{check(case):.1e}"),
    }


def main() -> None:
    """Run everything, and write the table."""
    torch.use_deterministic_algorithms(True)  # new memory holds NaN
    torch.set_num_threads(1)
    rows, barriers = [], {}
    for case in cases():
        rows.append(row(case))
        print(f"{case.key}: {rows[-1]['error']:.1e}", flush=True)
    for name, problem in DELETED.items():
        for capability in (HOPPER, AMPERE):
            key = f"{name}, {target(capability)}"
            barriers[key] = deletions(Case(problem, "bfloat16", capability))
            print(f"{key}: {barriers[key]}", flush=True)
    table = {
        "provenance": provenance("python tests/machine/emulate.py"),
        "triton": triton.__version__,
        "limits": kernels.LIMITS,
        "cases": rows,
        "barriers": barriers,
    }
    TABLE.write_text(json.dumps(table, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
