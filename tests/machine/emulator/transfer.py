"""Instructions that move data between registers and memories."""

import re

import numpy as np

from emulator.block import Action, Blocks, decodes, result, value
from emulator.formats import TYPES
from emulator.text import Instruction, members


def address(operand: str, kind: str):
    """How to get the addresses `[register + offset]` as int64."""
    inner = re.fullmatch(r"\[ ?([%\w]+) ?(?:\+ ?(-?\w+) ?)?\]", operand)
    base, offset = value(inner[1], kind), np.int64(int(inner[2] or "0", 0))

    def get(b: Blocks) -> np.ndarray:
        return np.broadcast_to(base(b).astype(np.int64) + offset, b.lanes.shape)

    return get


@decodes("ld")
def load(i: Instruction) -> Action:
    space, kind = i.parts[1], i.parts[-1]
    if space == "param":
        put = result(i.operands[0], kind)
        name = i.operands[1].strip("[] ")
        return lambda b: put(b, b.parameters[name])
    if space not in ("global", "shared"):
        raise i.unknown()
    i.allow(space, "v2", "v4")
    puts = [result(name, kind) for name in members(i.operands[0])]
    where = address(i.operands[1], "u32" if space == "shared" else "u64")
    dtype = np.dtype(TYPES[kind])
    width = dtype.itemsize * len(puts)

    def do(b: Blocks) -> None:
        active = b.active()
        places = where(b)[active]
        if space == "global":
            found = b.tensors.load(places, width)
        else:
            rows = b.shared.rows(places, b.block[active], width)
            found = b.shared.load(rows, width, b.warp[active])
        found = found.view(dtype)
        for place, put in enumerate(puts):
            x = np.ascontiguousarray(found[:, place])
            if b.mask is not None:
                whole = np.zeros(len(b.lanes), dtype)
                whole[active] = x
                x = whole
            put(b, x)

    return do


@decodes("st")
def store(i: Instruction) -> Action:
    space, kind = i.parts[1], i.parts[-1]
    if space not in ("global", "shared"):
        raise i.unknown()
    i.allow(space, "v2", "v4")
    values = [value(name, kind) for name in members(i.operands[1])]
    where = address(i.operands[0], "u32" if space == "shared" else "u64")
    dtype = np.dtype(TYPES[kind])

    def do(b: Blocks) -> None:
        active = b.active()
        data = np.empty((len(active), len(values)), dtype)
        for place, x in enumerate(values):
            data[:, place] = np.broadcast_to(x(b), b.lanes.shape)[active]
        data, places = data.view(np.uint8), where(b)[active]
        if space == "global":
            b.tensors.store(places, data)
        else:
            rows = b.shared.rows(places, b.block[active], data.shape[1])
            b.shared.store(rows, data, b.warp[active])

    return do


@decodes("cp")
def copy(i: Instruction) -> Action:
    """From HBM to shared memory, while the threads go on."""
    if i.parts[1] != "async":
        raise i.unknown()
    if i.parts[2:] == ("commit_group",):
        return _commit
    if i.parts[2:] == ("wait_group",):
        pending = int(i.operands[0], 0)
        return lambda b: _wait(b, pending)
    if i.parts[2:] not in (("cg", "shared", "global"), ("ca", "shared", "global")):
        raise i.unknown()
    to, source = address(i.operands[0], "u32"), address(i.operands[1], "u64")
    width = int(i.operands[2], 0)
    count = value(i.operands[3] if len(i.operands) > 3 else str(width), "u32")

    def do(b: Blocks) -> None:
        active = b.active()
        real = np.broadcast_to(count(b), b.lanes.shape)[active]
        if not np.isin(real, (0, width)).all():
            raise i.unknown()
        some = real > 0  # the others get zeros
        data = np.zeros((len(active), width), np.uint8)
        if some.any():
            data[some] = b.tensors.load(source(b)[active][some], width)
        warps = b.warp[active]
        rows = b.shared.rows(to(b)[active], b.block[active], width)
        grains = b.shared.store(rows, data, warps)
        b.shared.fetch(grains)
        warps = np.broadcast_to(warps[:, None], grains.shape)
        b.copying.append((grains.reshape(-1), warps.reshape(-1)))

    return do


def _commit(b: Blocks) -> None:
    b.copies.append(b.copying)
    b.copying = []


def _wait(b: Blocks, pending: int) -> None:
    done = len(b.copies) - pending
    for group in b.copies[: max(done, 0)]:
        for grains, warps in group:
            b.shared.fetched(grains, warps)
    b.copies = b.copies[max(done, 0) :]


@decodes("fence")
def fence(i: Instruction) -> Action:
    if i.name != "fence.proxy.async.shared::cta":
        raise i.unknown()
    return lambda b: b.shared.proxy_fence()
