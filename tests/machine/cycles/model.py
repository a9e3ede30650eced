"""A model of one multiprocessor of Hopper, in cycles.

Warps issue in order, one instruction per cycle and scheduler. An instruction
starts when the compiler's stall count has passed, the scoreboards that it waits
for are free, and its unit is. What the model leaves out: bank conflicts, the
instruction cache, contention in the caches and in HBM, registers read twice. So
ratios of similar kernels mean something, milliseconds less.

Where the constants come from: units per multiprocessor from the CUDA programming
guide (arithmetic throughput, compute capability 9.0) and NVIDIA's H100 white
paper; latencies are rounded values of published microbenchmarks.
"""

import heapq
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from cycles.sass import NO_BARRIER, Instruction, loops

#: Cycles per second, bytes per second, multiprocessors of an H100 SXM under load.
CLOCK, BANDWIDTH, CORES = 1.7e9, 3.0e12, 132
SCHEDULERS = 4
#: Registers, bytes of shared memory, warps and programs of a multiprocessor.
REGISTERS, SHARED, WARPS, PROGRAMS = 65536, 233472, 64, 32
#: Cycles from a load to its value, from global memory and from shared memory.
GLOBAL, LOCAL = 600, 26
#: Cycles from the end of an asynchronous product to its result, and of a barrier.
PRODUCT, BARRIER = 60, 20


class Cost(NamedTuple):
    """What an instruction occupies.

    - `unit`: its unit.
    - `shared`: whether all four schedulers share the unit.
    - `busy`: cycles until the unit takes the next one.
    - `latency`: cycles until the result is there, unless the compiler knows.
    """

    unit: str
    shared: bool
    busy: float
    latency: float = 6


def cost(one: Instruction) -> Cost:
    """The cost of an instruction for one warp."""
    name, op = one.name, one.op
    words = 4 if ".128" in op else 2 if ".64" in op else 1
    if name == "HGMMA":
        return Cost("tensor", False, _products(one))
    if name == "HMMA":  # mma.sync has two thirds of the rate of wgmma
        return Cost("tensor", False, 6.5, 18)
    if name in ("LDSM", "STSM"):
        words = 4 if ".4" in op else 2 if ".2" in op else 1
    if name in ("LDS", "LDSM", "STS", "STSM"):
        return Cost("memory", True, words, LOCAL + words)
    if name in ("LDL", "STL"):  # spills hit the first cache
        return Cost("memory", True, words, LOCAL + 8)
    if name in ("LDG", "LDGSTS"):
        words = 4 if name == "LDGSTS" else words
        return Cost("memory", True, words, GLOBAL)
    if name in ("STG", "RED", "ATOMG"):
        return Cost("memory", True, words, 30)
    if name == "SHFL":
        return Cost("memory", True, 1, 24)
    if name == "MUFU":
        return Cost("special", False, 8, 24)
    if name in ("F2FP", "I2F", "F2I", "I2FP", "F2F"):
        return Cost("convert", False, 2)
    if name in ("FADD", "FMUL", "FFMA"):
        return Cost("float", False, 1)
    if name == "IMAD":
        return Cost("float", False, 1 if "MOV" in op else 2)
    if name in ("S2R", "S2UR", "LDC", "ULDC", "R2UR", "CS2R"):
        return Cost("integer", False, 1, 30)
    return Cost("integer", False, 1 if name.startswith("U") else 2)


def _products(one: Instruction) -> float:
    """Cycles of a product of four warps: of its arithmetic or of its operands."""
    shape = re.match(r"HGMMA\.(\d+)x(\d+)x(\d+)\.F32(\.TF32)?", one.op)
    if shape is None:
        raise ValueError(f"unknown product {one.op} {one.operands}")
    n, k = int(shape[2]), int(shape[3])
    size, rate = (4, 1024) if shape[4] else (2, 2048)
    from_registers = one.operands.split(",")[1].strip().startswith("R")
    loaded = n * k + (0 if from_registers else 64 * k)
    return max(64 * n * k / rate, loaded * size / 128)


class Warp:
    """What one warp waits for."""

    def __init__(self, program: int) -> None:
        self.program, self.at, self.rounds = program, 0, dict[int, int]()
        self.scoreboards = [0.0] * 6
        self.products: list[float] = []  # groups of asynchronous products
        self.product = self.copied = 0.0
        self.copies: list[float] = []  # groups of asynchronous copies
        self.sums: dict[str, float] = {}  # accumulators in flight


def cycles(
    code: Sequence[Instruction],
    warps: int,
    programs: int,
    trips: Callable[[int], int],
    reloads: bool = False,
) -> float:
    """Cycles until the last warp has ended.

    - `warps`: warps per program.
    - `programs`: programs side by side on the multiprocessor.
    - `trips`: rounds of the loop that ends at this instruction.
    - `reloads`: whether its loops load what the program has loaded before.
    """
    costs = [cost(one) for one in code]
    for end in loops(code) if reloads else ():
        for at in range(code[end].target or 0, end):
            if code[at].name == "LDG":
                costs[at] = costs[at]._replace(latency=LOCAL + 8)
    skipped = _skipped(code)
    running = [Warp(w // warps) for w in range(warps * programs)]
    issue = [0.0] * SCHEDULERS
    free: dict[tuple[str, int], float] = {}
    waiting: dict[int, list[tuple[float, int]]] = {}
    order = [(0.0, w) for w in range(len(running))]
    last = 0.0
    while order:
        now, w = heapq.heappop(order)
        warp, quarter = running[w], w % SCHEDULERS
        one, price = code[warp.at], costs[warp.at]
        unit = (price.unit, -1 if price.shared else quarter)
        start = max(now, _ready(warp, one), issue[quarter], free.get(unit, 0.0))
        if start > now + 1e-9:
            heapq.heappush(order, (start, w))
            continue
        issue[quarter] = start + 1
        last = max(last, start)
        if one.name == "BAR" and "SYNC" in one.op:
            warp.at += 1
            arrived = waiting.setdefault(warp.program, [])
            arrived.append((start, w))
            if len(arrived) == warps:
                opened = max(arrived)[0] + BARRIER
                for _, other in arrived:
                    heapq.heappush(order, (opened, other))
                arrived.clear()
            continue
        free[unit] = start + price.busy
        _record(warp, one, start, price)
        if one.name == "EXIT" and not one.predicated:
            continue
        warp.at = _next(warp, code, skipped, trips)
        if warp.at < len(code):
            heapq.heappush(order, (start + max(1, one.stall), w))
    return last


def _ready(warp: Warp, one: Instruction) -> float:
    """When all that an instruction waits for is there."""
    waits = [warp.scoreboards[i] for i in range(6) if one.waits >> i & 1]
    if one.op.startswith("WARPGROUP.DEPBAR"):
        waits += _all_but(warp.products, one)
    elif one.name == "DEPBAR":
        waits += _all_but(warp.copies, one)
    elif one.name == "HMMA":
        waits.append(warp.sums.get(one.operands.rpartition(",")[2].strip(), 0.0))
    return max(waits, default=0.0)


def _all_but(groups: list[float], one: Instruction) -> list[float]:
    """The groups that must have ended: all but the last few."""
    few = int(re.search(r"0x([0-9a-f]+)\s*$", one.operands)[1], 16)
    return groups[: len(groups) - few]


def _record(warp: Warp, one: Instruction, start: float, price: Cost) -> None:
    """Keep when the result is there, and when the operands are free."""
    end = start + price.latency
    if one.name == "HMMA":
        warp.sums[one.operands.split(",")[0].strip()] = end
    elif one.name == "HGMMA":
        warp.product = start + price.busy + PRODUCT
        if "gsb0" in one.operands:
            warp.products = [*warp.products[-7:], warp.product]
    elif one.name == "LDGSTS":
        warp.copied = end
    elif one.name == "LDGDEPBAR":
        warp.copies = [*warp.copies[-15:], warp.copied]
    if one.writes != NO_BARRIER:
        warp.scoreboards[one.writes] = max(warp.scoreboards[one.writes], end)
    if one.reads != NO_BARRIER:
        read = start + min(price.latency, 20)
        warp.scoreboards[one.reads] = max(warp.scoreboards[one.reads], read)


def _next(
    warp: Warp,
    code: Sequence[Instruction],
    skipped: set[int],
    trips: Callable[[int], int],
) -> int:
    """The instruction after this one."""
    at, target = warp.at, code[warp.at].target
    if target is None:
        return at + 1
    if target < at:
        done = warp.rounds.get(at, 0) + 1
        warp.rounds[at] = done % trips(at)
        return target if done < trips(at) else at + 1
    if at in skipped or (not code[at].predicated and target != at):
        return target
    return at + 1


def _skipped(code: Sequence[Instruction]) -> set[int]:
    """Branches around the first of two alternatives: the second one runs.

    Other branches forward only guard against empty loops; they are not taken.
    """
    return {
        at
        for at, one in enumerate(code)
        if one.target is not None
        and one.predicated
        and one.target > at
        and any(
            other.target is not None
            and not other.predicated
            and other.target > one.target
            for other in code[at + 1 : one.target]
        )
    }


def side_by_side(registers: int, shared: int, warps: int) -> int:
    """Programs that a multiprocessor has room for."""
    per_thread = -(-registers // 8) * 8
    return min(
        REGISTERS // (per_thread * 32 * warps),
        SHARED // (shared + 1024),
        WARPS // warps,
        PROGRAMS,
    )


def computing(
    code: Sequence[Instruction],
    *,
    warps: int,
    registers: int,
    shared: int,
    programs: int,
    trips: Sequence[int],
    reloads: bool = False,
) -> float:
    """Microseconds of a launch by its instructions alone.

    - `programs`: programs of the launch.
    - `trips`: rounds of each loop, in the order of their ends.
    - `reloads`: as in `cycles`.
    """
    ends = loops(code)
    if len(ends) != len(trips):
        raise ValueError(f"expected rounds of {len(ends)} loops, got {list(trips)}")
    rounds = dict(zip(ends, trips, strict=True))
    fits = side_by_side(registers, shared, warps)
    together = min(fits, -(-programs // CORES))

    def first(most: int) -> float:
        """Cycles with this many rounds of the loops that are long."""
        short = {at: n if n <= LONG else most for at, n in rounds.items()}
        return cycles(code, warps, together, short.__getitem__, reloads)

    total = first(LONG)
    longest = max([LONG, *trips])
    if longest > LONG:  # the other rounds take as long as the last of these
        half = LONG // 2
        total += (total - first(half)) / half * (longest - LONG)
    waves = programs / (together * CORES)
    waves = waves if waves > 4 else -(-programs // (together * CORES))
    return total * waves / CLOCK * 1e6


def moving(bytes_moved: int, bandwidth: float = BANDWIDTH) -> float:
    """Microseconds that HBM needs for them at least."""
    return bytes_moved / bandwidth * 1e6


#: Rounds of a loop that are simulated; the 15 of a small inverse all are.
LONG = 16
