"""The machine code of a compiled kernel, with what the compiler tells the hardware.

Since Volta, an instruction says itself how long its warp waits after it, and for
which earlier instructions: 21 bits of every 128 (Jia et al., "Dissecting the NVIDIA
Volta GPU Architecture via Microbenchmarking", arXiv:1804.06826, section 2).
"""

import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import triton

TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"

NO_BARRIER = 7


class Instruction(NamedTuple):
    """One instruction of one warp.

    - `op`: name with its suffixes, such as "LDS.128".
    - `operands`: the rest of its text.
    - `predicated`: whether it runs only where a predicate holds.
    - `stall`: cycles before the next instruction of the warp.
    - `writes`, `reads`: the scoreboard that is released when the result is
      there, or the operands have been read; 7 = none.
    - `waits`: scoreboards that must be free, as bits.
    - `target`: the instruction to which it branches, or None.
    """

    op: str
    operands: str
    predicated: bool
    stall: int
    writes: int
    reads: int
    waits: int
    target: int | None

    @property
    def name(self) -> str:
        """The name without suffixes."""
        return self.op.partition(".")[0]


def disassemble(cubin: bytes) -> list[Instruction]:
    """All instructions of a kernel, in order."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [TOOLS / "nvdisasm", "-c", "-hex", file.name],
            check=True,
            capture_output=True,
            encoding="utf-8",
        ).stdout
    return parse(text)


def parse(text: str) -> list[Instruction]:
    """The instructions in the output of `nvdisasm -c -hex`."""
    labels: dict[str, int] = {}
    found: list[tuple[str, int]] = []
    lines = iter(text.splitlines())
    for line in lines:
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(found)
        elif code := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;\s+/\* 0x", line):
            upper = re.search(r"/\* 0x([0-9a-f]+) \*/", next(lines))
            assert upper is not None, line
            found.append((code[1], int(upper[1], 16)))
    return [_instruction(code, upper, labels) for code, upper in found]


def _instruction(code: str, upper: int, labels: dict[str, int]) -> Instruction:
    predicate = re.match(r"@!?U?P\w+\s+", code)
    op, _, operands = code[predicate.end() if predicate else 0 :].partition(" ")
    control = upper >> 41
    target = re.search(r"`\((\.L_x_\d+)\)", operands)
    return Instruction(
        op=op,
        operands=operands.strip(),
        predicated=predicate is not None,
        stall=control & 15,
        writes=control >> 5 & 7,
        reads=control >> 8 & 7,
        waits=control >> 11 & 63,
        target=labels[target[1]] if target and op.startswith("BRA") else None,
    )


def loops(code: list[Instruction]) -> list[int]:
    """The branches that go back, each the end of a loop, in order.

    A branch to itself is what follows the end of a program.
    """
    return [
        at for at, one in enumerate(code) if one.target is not None and one.target < at
    ]


#: Column of the table -> the names of its instructions.
KINDS = {
    "tensor cores": ("HGMMA", "HMMA"),
    "arithmetic": ("FADD", "FMUL", "FFMA", "FMNMX", "FSEL", "HFMA2", "MUFU"),
    "shared memory": ("LDS", "LDSM", "STS", "STSM"),
    "global memory": ("LDG", "LDGSTS", "STG", "UTMALDG"),
    "spills": ("LDL", "STL"),
    "shuffles": ("SHFL",),
    "barriers": ("BAR", "WARPGROUP"),
}


def mix(code: list[Instruction]) -> dict[str, int]:
    """How many instructions of each kind there are, in the program's text."""
    names = Counter(one.name for one in code)
    counts = {kind: sum(names[n] for n in group) for kind, group in KINDS.items()}
    return {"instructions": len(code), **counts}
