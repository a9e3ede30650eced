"""Instructions of a warp, or of four, on tiles of matrices."""

import re
from functools import cache

import numpy as np

from emulator.block import Action, Blocks, decodes, value
from emulator.check import fragments
from emulator.formats import HALVES, TYPES, as_tf32
from emulator.memory import Fault
from emulator.text import Instruction, members
from emulator.transfer import address

LANE = np.arange(32)


def order(row: np.ndarray, column: np.ndarray) -> np.ndarray:
    """Where each entry of a tile is among the values of a warp.

    - `row`, `column`: of every value of the warp.
    """
    shape = row.max() + 1, column.max() + 1
    found = np.empty(shape, np.int64)
    found[row, column] = np.arange(row.size).reshape(row.shape)
    return found


@cache
def left(bits: int) -> np.ndarray:
    """A tile `[16, 256 / bits]` in four registers."""
    register, lane, part = np.ogrid[:4, :32, : 32 // bits]
    per = 32 // bits
    row = lane // 4 + 8 * (register % 2) + 0 * part
    return order(row, per * (lane % 4) + part + 4 * per * (register // 2))


@cache
def right(bits: int) -> np.ndarray:
    """A tile `[256 / bits, 8]` in two registers."""
    register, lane, part = np.ogrid[:2, :32, : 32 // bits]
    per = 32 // bits
    row = per * (lane % 4) + part + 4 * per * register
    return order(row, lane // 4 + 0 * row)


def tile(registers: list[str], kind: str, places: np.ndarray):
    """How to get the tile `[warps, rows, columns]` in these registers."""
    values = [value(name, "b32") for name in registers]

    def get(b: Blocks) -> np.ndarray:
        raw = np.stack([x(b).reshape(-1, 32) for x in values], 1)
        x = numbers(raw, kind)
        return x.reshape(len(x), -1)[:, places]

    return get


def numbers(bits: np.ndarray, kind: str) -> np.ndarray:
    """float32 of any array of bits that holds this format."""
    if kind == "tf32":
        return as_tf32(bits.view(np.uint32))
    return HALVES[kind][0](bits.view(np.uint16))


def whole(i: Instruction, b: Blocks) -> None:
    """Raise if not all threads take part."""
    if b.mask is not None:
        raise i.unknown()


@decodes("mma")
def multiply(i: Instruction) -> Action:
    """The product of two tiles, by one warp."""
    form = re.fullmatch(
        r"mma\.sync\.aligned\.m16n8k(8|16)\.row\.col\.f32\.(\w+)\.(\w+)\.f32", i.name
    )
    bits = {("8", "tf32"): 32, ("16", "bf16"): 16, ("16", "f16"): 16}
    if not form or form[2] != form[3] or (form[1], form[2]) not in bits:
        raise i.unknown()
    kind, per = form[2], bits[form[1], form[2]]
    to, a, b_, c = map(members, i.operands)
    a, b_ = tile(a, kind, left(per)), tile(b_, kind, right(per))
    sums = [value(name, "f32") for name in c]
    row = [LANE // 4 + 8 * (place // 2) for place in range(4)]
    column = [2 * (LANE % 4) + place % 2 for place in range(4)]

    def do(b: Blocks) -> None:
        whole(i, b)
        product = np.matmul(a(b), b_(b))
        for place, name in enumerate(to):
            own = product[:, row[place], column[place]].reshape(-1)
            b.put(name, own + sums[place](b))

    return do


@decodes("ldmatrix", "stmatrix")
def matrix(i: Instruction) -> Action:
    """Tiles of 8 x 8 16-bit numbers; thread l gives the address of row l."""
    form = re.fullmatch(
        r"(ld|st)matrix\.sync\.aligned\.m8n8\.x([124])(\.trans)?\.shared\.b16", i.name
    )
    if not form:
        raise i.unknown()
    loads, count, turned = form[1] == "ld", int(form[2]), bool(form[3])
    names = members(i.operands[0 if loads else 1])
    where = address(i.operands[1 if loads else 0], "u32")
    values = [] if loads else [value(name, "b32") for name in names]

    def do(b: Blocks) -> None:
        whole(i, b)
        places = where(b).reshape(-1, 32)[:, : 8 * count]
        block = b.block[::32, None]
        rows = b.shared.rows(places, block, 16)
        warps = np.broadcast_to(b.warp[::32, None], rows.shape)
        if loads:
            x = b.shared.load(rows, 16, warps).view(np.uint16)
            x = x.reshape(-1, count, 8, 8)
            x = x.swapaxes(2, 3) if turned else x
            x = np.ascontiguousarray(x).view(np.uint32).reshape(-1, count, 32)
            for place, name in enumerate(names):
                b.put(name, np.ascontiguousarray(x[:, place]).reshape(-1))
            return
        x = np.stack([get(b).reshape(-1, 32) for get in values], 1)
        x = x.view(np.uint16).reshape(-1, count, 8, 8)
        x = np.ascontiguousarray(x.swapaxes(2, 3)) if turned else x
        b.shared.store(rows, x.reshape(*rows.shape, 8).view(np.uint8), warps)

    return do


#: Bytes of a row before the pattern of a swizzle repeats, by its code.
SWIZZLES = {1: 128, 2: 64, 3: 32}


@cache
def places(
    descriptor: int, rows: int, columns: int, width: int, turned: bool
) -> np.ndarray:
    """Byte addresses of a matrix `[rows, columns]` in shared memory.

    - `width`: bytes of a number.
    - `turned`: whether neighbours in a column are neighbours in memory.
    """
    begin, leading, stride = (
        ((descriptor >> shift) & 0x3FFF) << 4 for shift in (0, 16, 32)
    )
    code = descriptor >> 62 & 3
    if code not in SWIZZLES or descriptor >> 49 & 7:
        raise Fault(f"wgmma: a descriptor that the emulator lacks, {descriptor:#x}")
    bytes_per_row = SWIZZLES[code]
    row, column = np.ogrid[:rows, :columns]
    if turned:
        per = bytes_per_row // width
        linear = row // per * leading + row % per * width
        linear = linear + column // 8 * stride + column % 8 * bytes_per_row
    else:
        linear = row // 8 * stride + row % 8 * bytes_per_row + column * width
        if columns * width > bytes_per_row:
            raise Fault("wgmma: rows that are wider than the swizzle")
    linear = linear + begin
    return linear ^ (linear >> 7 & bytes_per_row // 16 - 1) << 4


@decodes("wgmma")
def group(i: Instruction) -> Action:
    """The product of two tiles, by four warps, while they go on."""
    if i.name == "wgmma.fence.sync.aligned":  # see check.py
        return lambda b: None
    if i.name == "wgmma.commit_group.sync.aligned":
        return _commit
    if i.name == "wgmma.wait_group.sync.aligned":
        pending = int(i.operands[0], 0)
        return lambda b: _wait(b, pending)
    form = re.fullmatch(
        r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k(8|16)\.f32\.(\w+)\.(\w+)", i.name
    )
    if not form or form[3] != form[4] or form[3] not in ("tf32", *HALVES):
        raise i.unknown()
    columns, depth, kind = int(form[1]), int(form[2]), form[3]
    width = 4 if kind == "tf32" else 2
    to, a, b_, add, *flags = i.operands
    in_registers = a[0] == "{"
    if flags[:2] != ["1", "1"]:  # factors -1
        raise i.unknown()
    turned = [flag == "1" for flag in flags[2:]] or [False]
    factor = None
    if in_registers:
        factor = tile(members(a), kind, left(8 * width))
    else:
        a_at = value(a, "u64")
    b_at, adds = value(b_, "u64"), value(add, "pred")
    names = members(to)
    taken = (frozenset(names), fragments(i))
    row = [LANE // 4 + 8 * (place // 2 % 2) for place in range(len(names))]
    column = [
        8 * (place // 4) + 2 * (LANE % 4) + place % 2 for place in range(len(names))
    ]

    def fetch(b: Blocks, descriptors: np.ndarray, rows: int, turn: bool):
        """A matrix `[groups, rows, depth]` in shared memory."""
        of_group = descriptors.reshape(-1, 128)
        if (of_group != of_group[:, :1]).any():
            raise Fault("wgmma: the descriptor differs among threads")
        byte = np.stack(
            [places(int(d), rows, depth, width, turn) for d in of_group[:, 0]]
        )
        index = b.shared.rows(byte, b.block[::128, None, None], width)
        grains = np.unique(b.shared.grains(index, width))
        b.shared.ask(grains)
        x = b.shared.data.view(TYPES[f"u{8 * width}"])[index]
        return numbers(x, kind), grains

    def do(b: Blocks) -> None:
        whole(i, b)
        descriptors = np.broadcast_to(b_at(b), b.lanes.shape)
        second, grains = fetch(b, descriptors, columns, turned[-1])
        b.multiplying.append((grains, *taken))
        if factor is not None:
            first = factor(b).reshape(-1, 64, depth)
        else:
            descriptors = np.broadcast_to(a_at(b), b.lanes.shape)
            first, grains = fetch(b, descriptors, 64, turned[0])
            b.multiplying.append((grains, *taken))
        product = np.matmul(first, second.swapaxes(1, 2)).reshape(-1, 16, columns)
        keeps = np.broadcast_to(adds(b), b.lanes.shape)
        some = keeps.any()
        for place, name in enumerate(names):
            own = product[:, row[place], column[place]].reshape(-1)
            if some:
                old = b.registers[name].view(np.float32)
                own = own + np.where(keeps, old, np.float32(0))
            b.put(name, own)

    return do


def _commit(b: Blocks) -> None:
    b.products.append(b.multiplying)
    b.multiplying = []


def _wait(b: Blocks, pending: int) -> None:
    done = max(len(b.products) - pending, 0)
    for product in b.products[:done]:
        for grains, _, _ in product:
            b.shared.asked(grains)
    b.products = b.products[done:]
