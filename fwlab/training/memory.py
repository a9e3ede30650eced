"""How much memory a run takes."""

import sys
from pathlib import Path


class PeakMemory:
    """Resident memory of this process at its highest, from now on."""

    def __init__(self) -> None:
        try:  # forget the peak so far, where Linux allows it
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:
            pass
        self._before = _resident()[0]

    def mib(self) -> float | None:
        """MiB over what it was when this was made; None where the system
        does not tell.
        """
        highest = _resident()[1]
        if highest is None or self._before is None:
            return None
        return round(highest - self._before, 1)


def _resident() -> tuple[float, float] | tuple[None, None]:
    """MiB now, and at the highest; the same where only that is known."""
    try:
        rows = Path("/proc/self/status").read_text().splitlines()
        fields = dict(row.split(":", 1) for row in rows)
        return tuple(int(fields[f].split()[0]) / 1024 for f in ("VmRSS", "VmHWM"))
    except (OSError, KeyError):
        pass
    try:
        import resource
    except ImportError:
        return None, None
    unit = 2**20 if sys.platform == "darwin" else 2**10
    highest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit
    return highest, highest
