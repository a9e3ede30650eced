"""Instructions that every thread runs on its own registers."""

from collections.abc import Callable

import numpy as np

from emulator.block import Action, Blocks, decodes, result, size, value
from emulator.formats import HALVES, TYPES, UNSIGNED, flush, to_tf32
from emulator.text import Instruction, members


def _whole(x, y, divide):
    """Division as in C: towards zero."""
    x, y, kind = x.astype(np.int64), y.astype(np.int64), x.dtype
    safe = np.where(y == 0, 1, y)  # undefined
    quotient = np.sign(x) * np.sign(safe) * (np.abs(x) // np.abs(safe))
    return (quotient if divide else x - quotient * safe).astype(kind)


def _divide(x, y):
    if x.dtype.kind == "f":
        return x / y
    return _whole(x, y, True) if x.dtype.kind == "i" else x // np.maximum(y, 1)


def _remainder(x, y):
    return _whole(x, y, False) if x.dtype.kind == "i" else x % np.maximum(y, 1)


def _shift_left(x, count):
    bits = 8 * x.dtype.itemsize
    shifted = x << np.minimum(count, bits - 1).astype(x.dtype)
    return np.where(count < bits, shifted, x.dtype.type(0))


def _shift_right(x, count):
    """Signed numbers keep their sign."""
    bits = 8 * x.dtype.itemsize
    shifted = x >> np.minimum(count, bits - 1).astype(x.dtype)
    return shifted if x.dtype.kind == "i" else np.where(count < bits, shifted, 0)


BINARY = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": _divide,
    "rem": _remainder,
    "min": np.fmin,
    "max": np.fmax,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "shl": _shift_left,
    "shr": _shift_right,
}
UNARY = {
    "neg": np.negative,
    "abs": np.abs,
    "not": np.invert,
    "ex2": np.exp2,
    "lg2": np.log2,
    "rcp": lambda x: np.float32(1) / x,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: np.float32(1) / np.sqrt(x),
}


@decodes(*UNARY)
def unary(i: Instruction) -> Action:
    i.allow("approx", "ftz", "rn")
    kind = i.parts[-1]
    function = np.logical_not if kind == "pred" else UNARY[i.parts[0]]
    ftz = "ftz" in i.parts
    put, x = result(i.operands[0], kind), value(i.operands[1], kind)

    def do(b: Blocks) -> None:
        found = function(flush(x(b)) if ftz else x(b))
        put(b, flush(found) if ftz else found)

    return do


@decodes(*BINARY)
def binary(i: Instruction) -> Action:
    root, kind = i.parts[0], i.parts[-1]
    if root == "mul" and i.parts[1] in ("wide", "hi"):
        return multiply(i)
    if kind.endswith("x2"):
        return two(i)
    i.allow("lo", "rn", "full", "approx", "ftz", "NaN")
    function = BINARY[root]
    if "NaN" in i.parts:
        function = {"min": np.minimum, "max": np.maximum}[root]
    ftz = "ftz" in i.parts
    put, x = result(i.operands[0], kind), value(i.operands[1], kind)
    y = value(i.operands[2], "u32" if root in ("shl", "shr") else kind)

    def do(b: Blocks) -> None:
        if ftz:
            put(b, flush(function(flush(x(b)), flush(y(b)))))
        else:
            put(b, function(x(b), y(b)))

    return do


def halves(operand: str, kind: str) -> Callable[[Blocks], np.ndarray]:
    """The two numbers of 16 bits in a register, as float32 `[threads, 2]`."""
    bits, (widened, _) = value(operand, "b32"), HALVES[kind]

    def get(b: Blocks) -> np.ndarray:
        whole = np.ascontiguousarray(np.broadcast_to(bits(b), b.lanes.shape))
        return widened(whole.view(np.uint16).reshape(-1, 2))

    return get


def two(i: Instruction) -> Action:
    """Both numbers of a register, each computed in float32 and rounded."""
    root, kind = i.parts[0], i.parts[-1].removesuffix("x2")
    i.allow("rn")
    if root not in ("add", "sub", "mul") or kind not in HALVES:
        raise i.unknown()
    put, (_, rounded) = result(i.operands[0], "b32"), HALVES[kind]
    x, y = (halves(operand, kind) for operand in i.operands[1:3])

    def do(b: Blocks) -> None:
        found = BINARY[root](x(b), y(b))
        put(b, rounded(found).reshape(-1).view(np.uint32))

    return do


def compare_two(i: Instruction) -> Action:
    """Both numbers of a register, into two predicates."""
    kind = i.parts[2].removesuffix("x2")
    if kind not in HALVES:
        raise i.unknown()
    function = COMPARISONS[i.parts[1]]
    puts = [result(name, "pred") for name in i.operands[0].split("|")]
    x, y = (halves(operand, kind) for operand in i.operands[1:3])

    def do(b: Blocks) -> None:
        found = function(x(b), y(b))
        for place, put in enumerate(puts):
            put(b, found[:, place])

    return do


#: Integers to their products in full.
WIDE = {"s16": np.int32, "u16": np.uint32, "s32": np.int64, "u32": np.uint64}


@decodes("mad")
def multiply(i: Instruction) -> Action:
    """Products of integers in full, or their upper half; with a sum."""
    root, part, kind = i.parts
    if part not in ("lo", "wide") and (root, part) != ("mul", "hi"):
        raise i.unknown()
    if part != "lo" and kind not in WIDE:
        raise i.unknown()
    wide = np.dtype(TYPES[kind] if part == "lo" else WIDE[kind])
    narrow = np.dtype(TYPES[kind])
    x, y = (value(operand, kind) for operand in i.operands[1:3])
    of = {"i": "s", "u": "u"}[wide.kind] + str(8 * wide.itemsize)
    put = result(i.operands[0], kind if part == "hi" else of)
    z = value(i.operands[3], of) if root == "mad" else None

    def do(b: Blocks) -> None:
        found = x(b).astype(wide) * y(b).astype(wide)
        if part == "hi":
            found = (found >> wide.type(8 * narrow.itemsize)).astype(narrow)
        put(b, found if z is None else found + z(b))

    return do


@decodes("fma")
def fused(i: Instruction) -> Action:
    """In float64 the product of two float32 is exact."""
    i.allow("rn", "ftz")
    if i.parts[-1].removesuffix("x2") in HALVES:
        return fused_two(i)
    if i.parts[-1] != "f32":
        raise i.unknown()
    ftz = flush if "ftz" in i.parts else lambda x: x
    put = result(i.operands[0], "f32")
    x, y, z = (value(operand, "f32") for operand in i.operands[1:])

    def do(b: Blocks) -> None:
        exact = ftz(x(b)).astype(np.float64) * ftz(y(b)) + ftz(z(b))
        put(b, ftz(exact.astype(np.float32)))

    return do


def fused_two(i: Instruction) -> Action:
    """Both numbers of a register, computed in float64 and rounded."""
    kind = i.parts[-1].removesuffix("x2")
    if kind == i.parts[-1] or "ftz" in i.parts:
        raise i.unknown()
    put, (_, rounded) = result(i.operands[0], "b32"), HALVES[kind]
    x, y, z = (halves(operand, kind) for operand in i.operands[1:])

    def do(b: Blocks) -> None:
        exact = x(b).astype(np.float64) * y(b) + z(b)
        put(b, rounded(exact.astype(np.float32)).reshape(-1).view(np.uint32))

    return do


def _ordered_not_equal(x, y):
    return (x < y) | (x > y)


COMPARISONS = {
    "eq": np.equal,
    "ne": _ordered_not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    # True if one of them is NaN.
    "equ": lambda x, y: ~_ordered_not_equal(x, y),
    "neu": np.not_equal,
    "ltu": lambda x, y: ~(x >= y),
    "leu": lambda x, y: ~(x > y),
    "gtu": lambda x, y: ~(x <= y),
    "geu": lambda x, y: ~(x < y),
    "num": lambda x, y: ~(np.isnan(x) | np.isnan(y)),
    "nan": lambda x, y: np.isnan(x) | np.isnan(y),
}


@decodes("setp")
def compare(i: Instruction) -> Action:
    if len(i.parts) != 3 or i.parts[1] not in COMPARISONS:
        raise i.unknown()
    function, kind = COMPARISONS[i.parts[1]], i.parts[2]
    if kind.endswith("x2"):
        return compare_two(i)
    if "|" in i.operands[0]:
        raise i.unknown()
    put = result(i.operands[0], "pred")
    x, y = (value(operand, kind) for operand in i.operands[1:])
    return lambda b: put(b, function(x(b), y(b)))


@decodes("selp")
def select(i: Instruction) -> Action:
    i.allow()
    kind = f"b{8 * size(i.operands[0])}"
    put, choose = result(i.operands[0], kind), value(i.operands[3], "pred")
    x, y = (value(operand, kind) for operand in i.operands[1:3])
    return lambda b: put(b, np.where(choose(b), x(b), y(b)))


@decodes("mov")
def move(i: Instruction) -> Action:
    """Also packs registers into a longer one, and unpacks them."""
    i.allow()
    target, source = i.operands
    kind = i.parts[-1]
    if target[0] == "{":
        names = members(target)
        short = f"u{8 * TYPES[kind]().itemsize // len(names)}"
        puts, x = [result(name, short) for name in names], value(source, kind)

        def unpack(b: Blocks) -> None:
            pieces = np.ascontiguousarray(x(b)).view(TYPES[short])
            for place, put in enumerate(puts):
                put(b, pieces[place :: len(puts)].copy())

        return unpack
    put = result(target, kind)
    if source[0] == "{":
        names = members(source)
        short = f"u{8 * TYPES[kind]().itemsize // len(names)}"
        pieces = [value(name, short) for name in names]

        def pack(b: Blocks) -> None:
            whole = np.empty((len(b.lanes), len(pieces)), TYPES[short])
            for place, piece in enumerate(pieces):
                whole[:, place] = piece(b)
            put(b, whole.view(UNSIGNED[TYPES[kind]().itemsize])[:, 0])

        return pack
    x = value(source, kind)
    return lambda b: put(b, x(b))


@decodes("cvt")
def convert(i: Instruction) -> Action:
    to, of = i.parts[-2:]
    how = i.parts[1:-2]
    if to in ("bf16x2", "f16x2") and of == "f32" and how == ("rn",):
        _, narrow = HALVES[to[:-2]]
        put = result(i.operands[0], "b32")
        high, low = (value(operand, of) for operand in i.operands[1:])

        def pair(b: Blocks) -> None:
            upper = narrow(high(b)).astype(np.uint32) << np.uint32(16)
            put(b, upper | narrow(low(b)))

        return pair
    integers = to[0] in "su" and of[0] in "su" and not how
    known = integers or (to, of, how) in {
        ("f32", "bf16", ()),
        ("f32", "f16", ()),
        ("bf16", "f32", ("rn",)),
        ("f16", "f32", ("rn",)),
        ("tf32", "f32", ("rna",)),
        ("f32", "s32", ("rn",)),
        ("f32", "u32", ("rn",)),
    }
    if not known:
        raise i.unknown()
    put = result(i.operands[0], "f32" if to == "tf32" else to)
    x = value(i.operands[1], of)
    if to == "tf32":
        return lambda b: put(b, to_tf32(x(b)))
    if to in HALVES or of in HALVES:  # which "value" and "result" convert
        return lambda b: put(b, x(b))
    return lambda b: put(b, x(b).astype(TYPES[to]))


@decodes("bfe")
def extract(i: Instruction) -> Action:
    """Some bits of a number."""
    kind = i.parts[-1]
    if kind not in ("u32", "s32"):
        raise i.unknown()
    put, x = result(i.operands[0], kind), value(i.operands[1], kind)
    place, count = (int(operand, 0) for operand in i.operands[2:])
    left = np.uint32(32 - place - count)
    right = TYPES[kind](32 - count)
    return lambda b: put(b, (x(b) << left.astype(x(b).dtype)) >> right)


@decodes("prmt")
def permute(i: Instruction) -> Action:
    """Any four of eight bytes."""
    if i.parts[1:] != ("b32",):
        raise i.unknown()
    put = result(i.operands[0], "b32")
    low, high, which = (value(operand, "b32") for operand in i.operands[1:])

    def do(b: Blocks) -> None:
        both = np.empty((len(b.lanes), 2), np.uint32)
        both[:, 0], both[:, 1] = low(b), high(b)
        nibbles = np.broadcast_to(which(b), b.lanes.shape)
        nibbles = nibbles[:, None] >> np.arange(0, 16, 4, dtype=np.uint32)
        picked = np.take_along_axis(both.view(np.uint8), nibbles & 7, 1)
        sign = np.where(picked > 127, 255, 0)
        picked = np.where(nibbles & 8, sign, picked).astype(np.uint8)
        put(b, picked.view(np.uint32)[:, 0])

    return do


REDUCTIONS = {"max": np.maximum, "min": np.minimum, "add": np.add}


@decodes("redux")
def reduce(i: Instruction) -> Action:
    """One value of all threads of the warp."""
    _, sync, operation, kind = i.parts
    if sync != "sync" or operation not in REDUCTIONS or kind not in ("s32", "u32"):
        raise i.unknown()
    members = value(i.operands[2], "s32")
    put, x = result(i.operands[0], kind), value(i.operands[1], kind)

    def do(b: Blocks) -> None:
        if b.mask is not None or (members(b) != -1).any():
            raise i.unknown()
        threads = np.broadcast_to(x(b), b.lanes.shape).reshape(-1, 32)
        # The sum, too, is one of 32 bits.
        whole = REDUCTIONS[operation].reduce(threads, 1, dtype=threads.dtype)
        put(b, whole.repeat(32))

    return do


@decodes("shfl")
def shuffle(i: Instruction) -> Action:
    """Values of other threads of the warp."""
    _, sync, mode, kind = i.parts
    if (sync, kind) != ("sync", "b32") or i.operands[4] not in ("-1", "0xffffffff"):
        raise i.unknown()
    if "|" in i.operands[0]:
        raise i.unknown()
    put, x = result(i.operands[0], kind), value(i.operands[1], kind)
    by, clamp = value(i.operands[2], "s32"), value(i.operands[3], "s32")
    lane = np.arange(32)

    def do(b: Blocks) -> None:
        if b.mask is not None:
            raise i.unknown()
        step, bound = (np.broadcast_to(y(b), b.lanes.shape) for y in (by, clamp))
        step, bound = step.reshape(-1, 32) & 31, bound.reshape(-1, 32)
        group = (bound >> 8) & 31
        least, most = lane & group, (lane & group) | (bound & 31 & ~group)
        if mode == "up":
            other, inside = lane - step, lane - step >= most
        else:
            other = {"down": lane + step, "bfly": lane ^ step}.get(
                mode, least | (step & ~group)
            )
            inside = other <= most
        other = np.where(inside, other, lane)
        put(b, np.take_along_axis(x(b).reshape(-1, 32), other, 1).reshape(-1))

    return do


@decodes("bar")
def barrier(i: Instruction) -> Action:
    if i.name == "bar.warp.sync":  # threads of a warp run in lockstep here
        return lambda b: None
    if i.name != "bar.sync" or i.operands != ("0",):
        raise i.unknown()

    def do(b: Blocks) -> None:
        if b.mask is not None:
            raise i.unknown()
        b.shared.synchronize()

    return do


@decodes("bra", "ret")
def jump(i: Instruction) -> Action:
    """The loop over instructions does it."""
    return lambda b: None
