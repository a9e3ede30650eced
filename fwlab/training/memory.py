"""Memory of a process: its peak, and what happens to what is freed."""

import contextlib
import ctypes
import platform
import sys
from pathlib import Path

#: Numbers in glibc's malloc.h.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3


class PeakMemory:
    """The peak resident memory of this process, from now on."""

    def __init__(self) -> None:
        with contextlib.suppress(OSError):  # Linux: forget the peak so far
            Path("/proc/self/clear_refs").write_text("5")
        self._before = _resident()[0]

    def mib(self) -> float | None:
        """The peak so far.

        - Returns MiB above the memory at construction, to one decimal;
          None if the system does not report it.
        """
        highest = _resident()[1]
        if highest is None or self._before is None:
            return None
        return round(highest - self._before, 1)


def keep_freed() -> None:
    """Let glibc, if it is there, keep freed memory for the next step.

    Returned to the system, it would come back page by page, each filled with
    zeros. This holds for the whole process.
    """
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_THRESHOLD, 2**25)  # the largest that glibc takes
        libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


def _resident() -> tuple[float, float] | tuple[None, None]:
    """Current and peak MiB; the peak for both if only that is known."""
    with contextlib.suppress(OSError, KeyError):
        rows = Path("/proc/self/status").read_text().splitlines()
        kib = {name: text.split() for name, _, text in (r.partition(":") for r in rows)}
        return int(kib["VmRSS"][0]) / 1024, int(kib["VmHWM"][0]) / 1024
    try:
        import resource
    except ImportError:
        return None, None
    unit = 2**20 if sys.platform == "darwin" else 2**10
    highest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit
    return highest, highest
