"""From the text of PTX to instructions."""

import re
from dataclasses import dataclass, replace
from functools import cached_property

REGISTER = re.compile(r"%(?:rs|rd|r|p|fd|f)\d+")


class Unknown(NotImplementedError):
    """An instruction that the emulator does not know."""


@dataclass(frozen=True)
class Instruction:
    """One instruction.

    - `text`: as it is written, `line`: where.
    - `name`: such as "ld.shared.v4.b32"; `operands`: as they are written.
    - `predicate`: the register that says which threads take part; None =
      all. With `negated`, those where it is false.
    """

    text: str
    line: int
    name: str
    operands: tuple[str, ...]
    predicate: str | None = None
    negated: bool = False

    @cached_property
    def parts(self) -> tuple[str, ...]:
        """The parts of the name: ("ld", "shared", "v4", "b32")."""
        return tuple(self.name.split("."))

    @cached_property
    def registers(self) -> frozenset[str]:
        """All registers that are mentioned."""
        return frozenset(REGISTER.findall(self.text))

    @cached_property
    def written(self) -> frozenset[str]:
        """The registers that get a value."""
        if self.parts[0] in ("st", "cp", "bar", "stmatrix", "bra", "ret", "fence"):
            return frozenset()
        return frozenset(REGISTER.findall(self.operands[0] if self.operands else ""))

    def unknown(self) -> Unknown:
        return Unknown(f"line {self.line}: the emulator does not know {self.text!r}")

    def allow(self, *modifiers: str) -> None:
        """Raise if the name has other parts between its first and its last."""
        if not set(self.parts[1:-1]) <= set(modifiers):
            raise self.unknown()


@dataclass(frozen=True)
class Program:
    """A kernel.

    - `parameters`: names, in their order.
    - `threads`: of a block.
    - `labels`: the index of the instruction that follows.
    - `shared`: bytes of shared memory of a block.
    """

    name: str
    parameters: tuple[str, ...]
    threads: int
    instructions: tuple[Instruction, ...]
    labels: dict[str, int]
    shared: int

    def without(self, index: int) -> "Program":
        """The same kernel with one instruction deleted."""
        kept = self.instructions[:index] + self.instructions[index + 1 :]
        labels = {name: at - (at > index) for name, at in self.labels.items()}
        return replace(self, instructions=kept, labels=labels)


def parse(ptx: str, shared: int) -> Program:
    """The only kernel of a file, which uses this much shared memory."""
    head, _, body = ptx.partition(".reqntid")
    name = re.search(r"\.entry\s+(\w+)", head)[1]
    parameters = re.findall(r"\.param [^,\n]*?(\w+)(?=[,\n])", head[head.index(name) :])
    lines = body.splitlines()
    instructions, labels = [], {}
    first = head.count("\n") + 1
    for number, line in enumerate(lines[1:], first + 1):
        line = line.split("//")[0].strip()
        if line.startswith(".section"):  # notes for debuggers
            break
        if label := re.fullmatch(r"(\$\w+):", line):
            labels[label[1]] = len(instructions)
        elif line and line[0] not in ".{}":
            for text in filter(None, map(str.strip, line.split(";"))):
                instructions.append(_instruction(text, number))
    threads = int(lines[0].split(",")[0])
    return Program(
        name, tuple(parameters), threads, tuple(instructions), labels, shared
    )


def _instruction(text: str, line: int) -> Instruction:
    text = re.sub(r"\s+", " ", text)
    guard = re.match(r"@(!?)(%p\d+) ", text)
    name, _, rest = text[guard.end() if guard else 0 :].partition(" ")
    return Instruction(
        text,
        line,
        name,
        tuple(split(rest)),
        guard and guard[2],
        bool(guard and guard[1]),
    )


def split(operands: str) -> list[str]:
    """At the commas outside of braces and brackets."""
    found = re.findall(r"(?:\{[^}]*\}|\[[^\]]*\]|[^,{\[])+", operands)
    return [x.strip() for x in found if x.strip()]


def members(operand: str) -> list[str]:
    """The registers of `{a, b}`, or the one register."""
    return [x.strip() for x in operand.strip("{} ").split(",")]
