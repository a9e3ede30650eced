"""Peak memory of a process: of training, and of benchmarks."""

import contextlib
import sys
from pathlib import Path


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
