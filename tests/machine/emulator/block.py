"""Blocks of threads that run a kernel in lockstep."""

from collections.abc import Callable
from functools import cache

import numpy as np

from emulator.check import fences
from emulator.formats import HALVES, TYPES, UNSIGNED
from emulator.memory import Fault, Shared, Tensors
from emulator.text import REGISTER, Instruction, Program

#: Threads that run side by side: NumPy takes as long for fewer.
TOGETHER = 2048

#: Bytes of a register, by the letters of its name.
SIZES = {"%rs": 2, "%r": 4, "%rd": 8, "%f": 4, "%fd": 8}

#: What an instruction does to blocks.
Action = Callable[["Blocks"], None]


def size(register: str) -> int:
    return SIZES[register.rstrip("0123456789")]


class Registers(dict):
    """Values of all threads. What was never set holds NaN."""

    def __init__(self, threads: int, *values) -> None:
        super().__init__(*values)
        self.threads = threads

    def __missing__(self, name: str) -> np.ndarray:
        if not REGISTER.fullmatch(name) or name.startswith("%p"):
            raise Fault(f"{name} is read before it is set")
        kind = UNSIGNED[size(name)]
        return np.full(self.threads, np.iinfo(kind).max, kind)


class Blocks:
    """Some blocks of a launch, after the same instructions.

    - `places`: `[blocks, 3]`, their places in `grid`.
    - `parameters`: name -> bits, as a scalar of NumPy.
    """

    def __init__(
        self,
        program: Program,
        places: np.ndarray,
        grid: tuple[int, int, int],
        parameters: dict[str, np.generic],
        tensors: Tensors,
        grain: int,
    ) -> None:
        self.count, self.threads = len(places), program.threads
        self.parameters, self.tensors = parameters, tensors
        lanes = np.arange(self.count * self.threads)
        thread = lanes % self.threads
        self.lanes, self.block = lanes, lanes // self.threads
        self.warp = thread // 32
        self.registers = Registers(
            len(lanes),
            {
                "%tid.x": thread.astype(np.uint32),
                "%laneid": (thread % 32).astype(np.uint32),
            },
        )
        for axis, letter in enumerate("xyz"):
            place = places[self.block, axis].astype(np.uint32)
            self.registers[f"%ctaid.{letter}"] = place
            extent = np.full(len(lanes), grid[axis], np.uint32)
            self.registers[f"%nctaid.{letter}"] = extent
        self.shared = Shared(self.count, program.shared, grain)
        self.at = 0
        self.mask: np.ndarray | None = None
        # cp.async: groups of (grains, warps), and the one not yet closed.
        self.copies: list[list] = []
        self.copying: list = []
        # wgmma likewise, with (grains, accumulators, fragments).
        self.products: list[list] = []
        self.multiplying: list = []

    def of(self, which: np.ndarray) -> "Blocks":
        """Some of the blocks, to go their own way."""
        if self.products or self.multiplying:
            raise Fault("blocks part ways while wgmma is in flight")
        new = object.__new__(Blocks)
        vars(new).update(vars(self))
        new.count = int(which.sum())
        threads = np.repeat(which, self.threads)
        values = {name: x[threads] for name, x in self.registers.items()}
        new.registers = Registers(new.count * self.threads, values)
        new.shared = self.shared.of(which)
        for name in ("lanes", "block", "warp"):
            setattr(new, name, getattr(self, name)[: len(threads[threads])])
        new.copying = [self.shared.moved(*copy, which) for copy in self.copying]
        new.copies = [
            [self.shared.moved(*copy, which) for copy in group] for group in self.copies
        ]
        new.products, new.multiplying = [], []
        return new

    def put(self, register: str, x: np.ndarray) -> None:
        """Set a register of the threads that take part."""
        if register == "_":
            return
        if not np.ndim(x):
            x = np.full(len(self.lanes), x)
        if self.mask is not None:
            new = register not in self.registers and x.dtype == np.bool_
            old = ~x if new else self.registers[register]
            x = np.where(self.mask, _bits(x), _bits(old))
        self.registers[register] = x

    def active(self) -> np.ndarray:
        """The numbers of the threads that take part."""
        return self.lanes if self.mask is None else np.flatnonzero(self.mask)


def _bits(x: np.ndarray) -> np.ndarray:
    return x if x.dtype == np.bool_ else x.view(UNSIGNED[x.dtype.itemsize])


def value(operand: str, kind: str) -> Callable[[Blocks], np.ndarray]:
    """How to get an operand as a number of this kind.

    Numbers of the 16-bit formats come as float32.
    """
    if kind in HALVES:
        bits, (widen, _) = value(operand, "u16"), HALVES[kind]
        return lambda b: widen(bits(b))
    dtype = np.dtype(TYPES[kind])
    if not operand.startswith("%"):
        constant = _constant(operand, dtype)
        return lambda b: constant
    if kind == "pred":
        return lambda b: b.registers[operand]
    if not REGISTER.fullmatch(operand) or size(operand) == dtype.itemsize:
        return lambda b: b.registers[operand].view(dtype)
    if size(operand) < dtype.itemsize:
        raise ValueError(f"{operand} is too short for {kind}")
    held, short = UNSIGNED[size(operand)], UNSIGNED[dtype.itemsize]
    return lambda b: b.registers[operand].view(held).astype(short).view(dtype)


def _constant(operand: str, dtype: np.dtype) -> np.generic:
    if operand[:2] in ("0f", "0d"):
        bits = UNSIGNED[4 if operand[1] == "f" else 8](int(operand[2:], 16))
    elif operand == "global_smem":  # the only symbol, at the beginning
        bits = UNSIGNED[dtype.itemsize](0)
    else:
        all_ones = (1 << 8 * dtype.itemsize) - 1
        bits = UNSIGNED[dtype.itemsize](int(operand, 0) & all_ones)
    return bits.astype(np.bool_) if dtype == np.bool_ else bits.view(dtype)


def result(operand: str, kind: str) -> Callable[[Blocks, np.ndarray], None]:
    """How to put a number of this kind into a register."""
    if kind in HALVES:
        _, narrow = HALVES[kind]
        bits = result(operand, "u16")
        return lambda b, x: bits(b, narrow(x))
    dtype = np.dtype(TYPES[kind])
    if kind == "pred" or operand == "_" or size(operand) == dtype.itemsize:
        return lambda b, x: b.put(operand, x)
    # Into a longer register: signed numbers keep their sign.
    longer = np.dtype(f"{'i' if dtype.kind == 'i' else 'u'}{size(operand)}")
    short = dtype if dtype.kind == "i" else UNSIGNED[dtype.itemsize]
    return lambda b, x: b.put(operand, x.view(short).astype(longer))


DECODERS: dict[str, Callable[[Instruction], Action]] = {}


def decodes(*roots: str):
    """Mark what turns instructions whose name begins so into actions."""

    def mark(decoder):
        DECODERS.update(dict.fromkeys(roots, decoder))
        return decoder

    return mark


@cache
def action(instruction: Instruction) -> Action:
    """What the instruction does, decoded once."""
    decoder = DECODERS.get(instruction.parts[0])
    if decoder is None:
        raise instruction.unknown()
    do = decoder(instruction)
    if instruction.predicate is None:
        return do
    predicate, negated = instruction.predicate, instruction.negated

    def masked(b: Blocks) -> None:
        mask = b.registers[predicate]
        mask = ~mask if negated else mask
        if mask.all():
            do(b)
        elif mask.any():
            b.mask = mask
            try:
                do(b)
            finally:
                b.mask = None

    return masked


def run(
    program: Program,
    grid: tuple[int, ...],
    parameters: dict[str, np.generic],
    tensors: Tensors,
) -> None:
    """Run all blocks of a launch."""
    grid = (*grid, 1, 1)[:3]
    fences(program)
    code = [(i, action(i)) for i in program.instructions]
    grain = _grain(program)
    every = np.array(list(np.ndindex(grid[::-1]))).reshape(-1, 3)[:, ::-1]
    step = max(1, TOGETHER // program.threads)
    with np.errstate(all="ignore"):
        for begin in range(0, len(every), step):
            places = every[begin : begin + step]
            first = Blocks(program, places, grid, parameters, tensors, grain)
            rest = [first]
            while rest:
                _run(program, code, rest)


def _run(program: Program, code: list, rest: list[Blocks]) -> None:
    """Run one of `rest` to its end; what parts from it joins `rest`."""
    blocks = rest.pop()
    while blocks.at < len(code):
        instruction, do = code[blocks.at]
        blocks.at += 1
        try:
            if instruction.parts[0] == "bra":
                _branch(program, instruction, blocks, rest)
            elif instruction.parts[0] == "ret":
                if instruction.predicate:
                    raise instruction.unknown()
                break
            else:
                if blocks.products or blocks.multiplying:
                    _untouched(instruction, blocks)
                do(blocks)
        except Fault as fault:
            where = (
                f"{program.name}, line {instruction.line}, {instruction.text[:90]!r}"
            )
            raise Fault(f"{where}: {fault}") from None


def _branch(
    program: Program, instruction: Instruction, blocks: Blocks, rest: list[Blocks]
) -> None:
    target = program.labels[instruction.operands[0]]
    if instruction.predicate is None:
        blocks.at = target
        return
    taken = blocks.registers[instruction.predicate].reshape(blocks.count, -1)
    taken = ~taken if instruction.negated else taken
    all_taken = taken.all(1)
    if (all_taken != taken.any(1)).any():
        raise Fault("the threads of a block part ways")
    if all_taken.all():
        blocks.at = target
    elif all_taken.any():
        other = blocks.of(all_taken)
        other.at = target
        here = blocks.of(~all_taken)
        vars(blocks).update(vars(here))
        rest.append(other)


def _untouched(instruction: Instruction, blocks: Blocks) -> None:
    """Registers of wgmma are its own until it is waited for."""
    if instruction.parts[0] == "wgmma":
        return
    for _, outputs, inputs in sum(blocks.products, blocks.multiplying):
        if outputs & instruction.registers or inputs & instruction.written:
            raise Fault("touches a register of a wgmma that is in flight")


def _grain(program: Program) -> int:
    """The narrowest access to shared memory."""
    widths = [16]
    for i in program.instructions:
        if i.parts[0] in ("ld", "st") and "shared" in i.parts:
            count = next((int(p[1:]) for p in i.parts if p in ("v2", "v4")), 1)
            widths.append(np.dtype(TYPES[i.parts[-1]]).itemsize * count)
        elif i.parts[:2] == ("cp", "async") and len(i.operands) > 2:
            widths.append(int(i.operands[2], 0))
    return min(widths)
