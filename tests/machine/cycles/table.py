"""Writes docs/results/kernels.json: what the kernels need, and their modelled times.

    PYTHONPATH=tests/machine python -m cycles.table [--fla]

`--fla` also models flash-linear-attention, which must be installed; without it,
the rows of an earlier run stay.
"""

import argparse
import importlib
import json
import math
from collections.abc import Callable
from importlib import metadata
from typing import Any, NamedTuple

import aot
import torch
import triton
from torch import Tensor

from cycles import host, model, peer, sass
from cycles.launches import Others, size
from cycles.rounds import RELOADS, rounds
from fwlab.files import write_json
from fwlab.provenance import provenance

#: Batch, steps, heads of the modelled problems.
SHAPE = (8, 4096, 16)


class Problem(NamedTuple):
    """A call of flash-linear-attention.

    - `function`: such as "delta_rule.chunk_delta_rule".
    - `gates`: how many it takes.
    - `width`: of keys and values.
    """

    function: str
    gates: int
    width: int
    shape: tuple[int, int, int] = SHAPE
    bandwidth: float = model.BANDWIDTH


DELTA = "delta_rule.chunk_delta_rule"
GATED_DELTA = "gated_delta_rule.chunk_gated_delta_rule"
#: By the case of `aot.CASES` that is the same.
THEIRS = {
    "delta 64": Problem(DELTA, 1, 64),
    "delta 128": Problem(DELTA, 1, 128),
    "gated delta 64": Problem(GATED_DELTA, 2, 64),
    "gated delta 128": Problem(GATED_DELTA, 2, 128),
}
#: The cases that the model knows: those with kernels for chunks.
MODELLED = [
    *THEIRS,
    "sum 64, normalized",
    "sum 128",
    "gated 64, normalized",
    "AFT-simple",
]
#: Bytes per second of an H200: 90 % of its data sheet.
H200 = 4.3e12


FLASH_QLA = "https://github.com/QwenLM/FlashQLA/blob/6e5d2ea1536f50485746caf7ff7fb4b846a85040/benchmark/benchmark_results_H200.txt"
#: The fastest kernels for a case that somebody has measured: milliseconds of
#: forward and backward on an H200; None = not published.
FASTEST = {
    "case": "gated delta 128",
    "source": FLASH_QLA,
    "milliseconds": {
        "fla 0.5.1": [0.978, 2.973],
        "FlashQLA": [0.318, 1.541],
        "FlashInfer": [0.225, None],
    },
}


class Published(NamedTuple):
    """Measured milliseconds, to compare the model with.

    - `what`: the card, and who measured.
    - `both`: forward and backward together.
    """

    what: str
    source: str
    problem: Problem
    forward: float
    both: float


LINEAR = "linear_attn.chunk_linear_attn"
PUBLISHED = [
    Published(
        "H200, FlashQLA's authors, fla 0.5.1",
        FLASH_QLA,
        Problem(GATED_DELTA, 2, 128, SHAPE, H200),
        0.978,
        0.978 + 2.973,
    ),
    Published(
        "H100, Helion's authors, 2026-06",
        "https://github.com/pytorch/helion/blob/fea89d20151c4b1c180eda5000cc79f6b13ed240/examples/fla/BENCHMARKS.md",
        Problem(LINEAR, 0, 128, (4, 4096, 64)),
        0.950,
        4.530,
    ),
    Published(
        "H100, Helion's authors, 2026-06",
        "https://github.com/pytorch/helion/blob/fea89d20151c4b1c180eda5000cc79f6b13ed240/examples/fla/BENCHMARKS.md",
        Problem(LINEAR, 0, 128, (1, 8192, 96)),
        0.726,
        3.367,
    ),
]


def row(
    name: str,
    code: list[sass.Instruction],
    use: aot.Use,
    warps: int,
    grid: tuple[int, ...],
    values: dict[str, Any],
    bandwidth: float = model.BANDWIDTH,
) -> dict[str, Any]:
    """Resources, instructions and modelled time of one launch on Hopper.

    - `values`: its arguments and constants, by name.
    """
    programs = math.prod(grid)
    moved = sum(size(x) for x in values.values() if isinstance(x, Tensor))
    computing = model.computing(
        code,
        warps=warps,
        registers=use.registers,
        shared=use.shared,
        programs=programs,
        trips=rounds(name, values, code),
        reloads=name in RELOADS,
    )
    return {
        **use._asdict(),
        "warps": warps,
        "programs": programs,
        "side_by_side": model.side_by_side(use.registers, use.shared, warps),
        **sass.mix(code),
        "bytes": moved,
        "computing": computing,
        "microseconds": max(computing, model.moving(moved, bandwidth)),
    }


def total(
    rows: list[dict[str, Any]], others: Others, bandwidth: float = model.BANDWIDTH
) -> dict[str, Any]:
    """A whole call, forward and backward.

    PyTorch's own launches take the time of their bytes. "computing" is the time
    of the instructions alone, without these launches.
    """
    moved = sum(one["bytes"] for one in rows) + others.bytes
    time = sum(one["microseconds"] for one in rows)
    return {
        "launches": len(rows),
        "torch": len(others.names),
        "bytes": moved,
        "computing": round(sum(one["computing"] for one in rows)),
        "microseconds": round(time + model.moving(others.bytes, bandwidth)),
    }


def ours(case: str) -> dict[str, Any]:
    """A case of `aot.CASES` on Hopper: its launches, and the whole call."""
    with Others() as others:
        launches = aot.launches(aot.CASES[case][0], aot.HOPPER)
    rows = []
    for launch in launches:
        kernel = aot.build(launch, aot.HOPPER)
        values = aot.values(launch)
        name = launch.kernel.__name__
        code = sass.disassemble(kernel.asm["cubin"])
        use = aot.use(kernel)
        found = row(name, code, use, launch.warps, launch.grid, values)
        rows.append({"kernel": name, **_rounded(found)})
    return {"rows": rows, **total(rows, others)}


def theirs(problem: Problem) -> dict[str, Any]:
    """The launches of a call of flash-linear-attention, and the whole call.

    `forward` counts those of the forward pass.
    """
    op, forward = _function(problem.function), 0

    def run(found: list[peer.Choice]) -> None:
        nonlocal forward
        shape, width = problem.shape, problem.width
        tensors = [
            torch.empty(
                *shape, *more, dtype=aot.BF16, device="meta", requires_grad=True
            )
            for more in [(width,)] * 3 + [()] * problem.gates
        ]
        # Its linear attention divides by the sum of the keys if not told.
        plain = {} if problem.gates else {"normalize": False}
        y, _ = op(*tensors, **plain)
        forward = len(found)
        aot.go_back(y)

    with peer.hopper(), Others() as others:
        choices = peer.recorded(run)
    rows: list[dict[str, Any]] = []
    known: dict[Any, dict[str, Any]] = {}
    for choice in choices:
        key = (choice.kernel.__name__, str(_constants(choice.values)))
        if key not in known:
            candidates = _candidates(choice, problem.bandwidth)
            known[key] = min(candidates, key=lambda x: x["microseconds"])
        rows.append({"kernel": choice.kernel.__name__, **_rounded(known[key])})
    whole = total(rows, others, problem.bandwidth)
    return {"rows": rows, "forward": forward, **whole}


def _function(name: str) -> Callable[..., Any]:
    module, _, function = name.rpartition(".")
    with peer.hopper():
        return getattr(importlib.import_module(f"fla.ops.{module}"), function)


def _constants(values: dict[str, Any]) -> dict[str, Any]:
    return {n: x for n, x in values.items() if not isinstance(x, Tensor)}


def _candidates(choice: peer.Choice, bandwidth: float) -> list[dict[str, Any]]:
    """A row for each configuration that compiles and fits."""
    found = []
    for one in choice.configurations:
        values = choice.values | one.kwargs
        for parameter in choice.kernel.params:
            if parameter.has_default:
                values.setdefault(parameter.name, parameter.default)
        options = {"num_warps": one.num_warps, "num_stages": one.num_stages}
        kernel = triton.compile(
            peer.source(choice.kernel, values), target=peer.HOPPER, options=options
        )
        use = aot.use(kernel)
        if use.shared > peer.ROOM:
            continue
        code = sass.disassemble(kernel.asm["cubin"])
        grid = choice.grid(values) if callable(choice.grid) else choice.grid
        name = choice.kernel.__name__
        found.append(row(name, code, use, one.num_warps, grid, values, bandwidth))
    return found


def _rounded(found: dict[str, Any]) -> dict[str, Any]:
    times = {name: round(found[name], 1) for name in ("computing", "microseconds")}
    return found | times


def peers() -> dict[str, Any]:
    """The rows of flash-linear-attention, and the model beside measured times."""
    with peer.hopper():  # it looks at the GPU when it is imported
        importlib.import_module("fla.ops")
    cases = {case: theirs(problem) for case, problem in THEIRS.items()}
    published = []
    for one in PUBLISHED:
        found = theirs(one.problem)
        forward = found["rows"][: found["forward"]]
        published.append(
            {
                "what": one.what,
                "source": one.source,
                "function": one.problem.function.rpartition(".")[2],
                "shape": [*one.problem.shape, one.problem.width],
                "forward": one.forward,
                "both": one.both,
                "modelled_forward": sum(x["microseconds"] for x in forward) / 1e3,
                "modelled_both": found["microseconds"] / 1e3,
            }
        )
    return {
        "version": metadata.version("fla-core"),
        **provenance("PYTHONPATH=tests/machine python -m cycles.table --fla"),
        "cases": cases,
        "published": published,
    }


def main() -> None:
    """Write the table."""
    parser = argparse.ArgumentParser(prog="python -m cycles.table")
    parser.add_argument("--fla", action="store_true")
    with_fla = parser.parse_args().fla
    old = json.loads(aot.TABLE.read_text("utf-8"))
    new = {
        "versions": aot.VERSIONS,
        **provenance("PYTHONPATH=tests/machine python -m cycles.table"),
        "kernels": aot.rows(),
        "modelled": {case: ours(case) for case in MODELLED},
        "fastest": FASTEST,
        "host": host.rows(),
        "before": old["before"],
        "fla": peers() if with_fla else old["fla"],
    }
    write_json(aot.TABLE, new)


if __name__ == "__main__":
    main()
