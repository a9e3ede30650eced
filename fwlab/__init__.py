"""fwlab: sequence layers beyond softmax attention, naive and efficient."""

import os
import sys

# Threads that have nothing to do sleep. If they were spinning, as is usual,
# one other busy program would slow down every parallel operation many times.
# PyTorch reads this once, when it is loaded: import fwlab first.
if "torch" not in sys.modules:
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from fwlab.ops.parts.state import detach

__version__ = "0.1.0"
"""The release of this package."""

__all__ = ["__version__", "detach"]
