"""The memories of a GPU, with checks that a GPU does not make."""

import bisect

import numpy as np


class Fault(Exception):
    """What the hardware does not define, or does wrong without a word."""


class Tensors:
    """HBM: the tensors of a launch, far from each other."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.begins: list[int] = []
        self.bytes: list[np.ndarray] = []
        self.next = 1 << 32

    def add(self, data: np.ndarray, name: str) -> int:
        """The address of a tensor, given as its bytes."""
        self.names.append(name)
        self.begins.append(self.next)
        self.bytes.append(data)
        begin = self.next
        self.next += (data.nbytes + (1 << 24)) >> 12 << 12
        return begin

    def pieces(self, addresses: np.ndarray, width: int, what: str):
        """The accessed places of `width` bytes, by tensor.

        Yields which accesses, the tensor as rows of that width, and the
        numbers of its rows.
        """
        low = addresses.min()
        place = bisect.bisect_right(self.begins, int(low)) - 1
        if place < 0 or addresses.max() < self.begins[place] + self.bytes[place].size:
            yield slice(None), *self._rows(place, addresses, width, what)
            return
        places = np.searchsorted(self.begins, addresses, side="right") - 1
        for place in np.unique(places):
            own = places == place
            yield own, *self._rows(place, addresses[own], width, what)

    def _rows(self, place: int, addresses: np.ndarray, width: int, what: str):
        if place < 0:
            raise Fault(
                f"{what} at address {addresses.min():#x}, outside of all tensors"
            )
        data, offsets = self.bytes[place], addresses - self.begins[place]
        if offsets.max() + width > data.size:
            raise Fault(
                f"{what} outside of {self.names[place]}: bytes "
                f"{offsets.max()} to {offsets.max() + width} of {data.size}"
            )
        rows = offsets // width
        if (rows * width != offsets).any():
            raise Fault(f"{what} of {self.names[place]}, not aligned to {width} bytes")
        whole = data[: data.size // width * width]
        return whole.reshape(-1, width), rows

    def load(self, addresses: np.ndarray, width: int) -> np.ndarray:
        """`[accesses, width]` bytes."""
        found = np.empty((len(addresses), width), np.uint8)
        for which, rows, index in self.pieces(addresses, width, "load"):
            found[which] = _wide(rows)[index].view(np.uint8).reshape(-1, width)
        return found

    def store(self, addresses: np.ndarray, values: np.ndarray) -> None:
        """Store `[accesses, width]` bytes."""
        width = values.shape[1]
        for which, rows, index in self.pieces(addresses, width, "store"):
            rows[index] = values[which]
            if (rows[index] != values[which]).any():
                raise Fault("two threads store different values at one address")


def _wide(rows: np.ndarray) -> np.ndarray:
    """Rows of bytes as one item each, which is quicker to pick."""
    return rows.view(np.dtype((np.void, rows.shape[1])))[:, 0]


#: Who touched a byte is written as `phase * 64 + warp`, or as one of these.
SEVERAL = 62
IN_FLIGHT = 2**31 - 1


class Shared:
    """The shared memory of some blocks that run in lockstep.

    Time is counted in phases: a barrier or a proxy fence begins the next one. For each
    piece of `grain` bytes, the narrowest access of the kernel, this remembers the last
    write and the last read, and by which warp. Two accesses of different warps, at
    least one of them a write, need a barrier between them. Bytes that `cp.async` has
    yet to write, or `wgmma` to read, are in flight.
    """

    def __init__(self, blocks: int, size: int, grain: int) -> None:
        self.size, self.grain = size, grain
        self.stride = (size // 128 + 1) * 128
        self.data = np.full(blocks * self.stride, 255, np.uint8)  # NaN
        self.written = np.full(blocks * self.stride // grain, -1, np.int32)
        self.read = self.written.copy()
        self.phase = self.barrier = self.fence = 0

    def of(self, blocks: np.ndarray) -> "Shared":
        """A copy, for some of the blocks."""
        new = object.__new__(Shared)
        vars(new).update(vars(self))
        for name in ("data", "written", "read"):
            rows = getattr(self, name).reshape(len(self.data) // self.stride, -1)
            setattr(new, name, rows[blocks].reshape(-1))
        return new

    def moved(self, grains: np.ndarray, warps: np.ndarray, blocks: np.ndarray):
        """Pieces as `of` numbers them, and their warps."""
        block, place = np.divmod(grains, self.stride // self.grain)
        kept, number = blocks[block], np.cumsum(blocks) - 1
        moved = number[block] * (self.stride // self.grain) + place
        return moved[kept], warps[kept]

    def synchronize(self) -> None:
        """A barrier for all threads of a block."""
        self.phase += 1
        self.barrier = self.phase

    def proxy_fence(self) -> None:
        """From here on wgmma sees what ordinary stores have written."""
        self.phase += 1
        self.fence = self.phase

    def rows(self, addresses: np.ndarray, blocks: np.ndarray, width: int):
        """The numbers of the accessed rows of `width` bytes."""
        low, high = addresses.min(), addresses.max() + width
        if low < 0 or high > self.size:
            raise Fault(f"shared memory: bytes {low} to {high} of {self.size}")
        rows = addresses // width
        if (rows * width != addresses).any():
            raise Fault(f"shared memory: an access not aligned to {width} bytes")
        return rows + blocks * (self.stride // width)

    def load(self, rows: np.ndarray, width: int, warps: np.ndarray) -> np.ndarray:
        """Bytes `[..., width]`, read by these warps."""
        self.reading(self.grains(rows, width), warps[..., None])
        return _wide(self.data.reshape(-1, width))[rows][..., None].view(np.uint8)

    def store(self, rows: np.ndarray, values: np.ndarray, warps: np.ndarray):
        """Store bytes `[..., width]` from these warps; returns the grains."""
        width = values.shape[-1]
        grains = self.grains(rows, width)
        self.writing(grains, warps[..., None])
        data = self.data.reshape(-1, width)
        data[rows] = values
        # Copies of a sum in several threads of a warp may differ by rounding;
        # any of them is right.
        lost = (self.written[grains] & 63 != warps[..., None]).any(-1)
        if (data[rows[lost]] != values[lost]).any():
            raise Fault("two warps store different values at one shared address")
        return grains

    def grains(self, rows: np.ndarray, width: int) -> np.ndarray:
        """`[..., grains]` of rows of `width` bytes."""
        count = width // self.grain
        if count == 0:
            return rows[..., None] // (self.grain // width)
        return rows[..., None] * count + np.arange(count)

    def reading(self, grains: np.ndarray, warps: np.ndarray) -> None:
        """Check and note that these warps read."""
        last = self.written[grains]
        if self._clash(last, warps).any():
            self._explain(last, "a read after a write")
        since, now = self.barrier * 64, self.phase * 64 + warps
        last = self.read[grains]
        several = (last >= since) & (last & 63 != warps)
        now = np.where(several, self.phase * 64 + SEVERAL, now)
        now = np.where(last == IN_FLIGHT, IN_FLIGHT, now)
        self.read[grains] = now
        twice = self.read[grains] != now
        if twice.any():
            self.read[grains[twice]] = self.phase * 64 + SEVERAL

    def writing(self, grains: np.ndarray, warps: np.ndarray) -> None:
        """Check and note that these warps write."""
        last = self.written[grains]
        if self._clash(last, warps).any():
            self._explain(last, "a write after a write")
        last = self.read[grains]
        if self._clash(last, warps).any():
            self._explain(last, "a write after a read")
        self.written[grains] = self.phase * 64 + warps

    def _clash(self, last: np.ndarray, warps: np.ndarray) -> np.ndarray:
        return (last >= self.barrier * 64) & (last & 63 != warps)

    def _explain(self, last: np.ndarray, what: str) -> None:
        if (last == IN_FLIGHT).any():
            raise Fault(f"shared memory: {what} that is still in flight")
        raise Fault(f"shared memory: {what} of another warp without a barrier")

    def ask(self, grains: np.ndarray) -> None:
        """wgmma begins to read."""
        last = self.written[grains]
        if (last == IN_FLIGHT).any():
            raise Fault("wgmma reads what cp.async is still writing")
        if (last < 0).any():
            raise Fault("wgmma reads what nobody has written")
        if (last >= self.barrier * 64).any():
            raise Fault("wgmma reads what was written after the last barrier")
        if (last >= self.fence * 64).any():
            raise Fault("wgmma reads what was written after the last proxy fence")
        self.read[grains] = IN_FLIGHT

    def asked(self, grains: np.ndarray) -> None:
        """wgmma has read."""
        self.read[grains] = self.phase * 64 + SEVERAL

    def fetch(self, grains: np.ndarray) -> None:
        """cp.async begins to write."""
        self.written[grains] = IN_FLIGHT

    def fetched(self, grains: np.ndarray, warps: np.ndarray) -> None:
        """cp.async has written, on behalf of these warps."""
        self.written[grains] = self.phase * 64 + warps
