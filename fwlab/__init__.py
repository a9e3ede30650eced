"""fwlab: sequence layers beyond softmax attention, naive and efficient."""

from fwlab.ops.states import detach

__version__ = "0.1.0"
"""The release of this package."""

__all__ = ["__version__", "detach"]
