"""Report versions and devices of this machine, and which implementations run on it."""

import os
import platform

import torch

import fwlab
from fwlab import ops
from fwlab.ops import _triton
from fwlab.provenance import machine, version


def report() -> str:
    """Format versions, devices and usable implementations as a table."""
    rows = [
        ("fwlab", fwlab.__version__),
        ("python", platform.python_version()),
        ("torch", torch.__version__),
        ("triton", version("triton") or "not installed"),
        ("ptxas", _assembler()),
        ("machine", machine()),
        ("threads", f"{torch.get_num_threads()}, {_waiting()}"),
        ("devices", ", ".join(_devices())),
    ]
    for op in ops.TABLE:
        rows.append((op, _usable(op)))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def _waiting() -> str:
    """Return how OpenMP threads wait for each other, as set by OMP_WAIT_POLICY."""
    policy = os.environ.get("OMP_WAIT_POLICY", "").upper()
    return "asleep while they wait" if policy == "PASSIVE" else "awake while they wait"


def _assembler() -> str:
    """Describe Triton's ptxas: version, path and, if it is not used, the reason."""
    if (triton := version("triton")) is None:
        return "not installed"
    try:
        from triton.knobs import nvidia
    except ModuleNotFoundError:  # Triton 3.2 (PyTorch 2.6) lacks the module.
        return f"Triton {triton} does not say"

    here = torch.cuda.is_available()
    capability = torch.cuda.get_device_capability() if here else (0, 0)
    one = nvidia.ptxas if capability[0] <= _triton.HOPPER else nvidia.ptxas_blackwell
    reason = _triton.untrusted(capability)
    return f"{one.version}, {one.path}" + (f"; not used: {reason}" if reason else "")


def _usable(op: str) -> str:
    """Return the implementations that run here, and why a kernel does not run."""
    names, forms = ", ".join(ops.implementations(op)), ops.TABLE[op].forms
    kernel = forms.get("triton")
    if reason := kernel and kernel.why_not():
        return f"{names} (no triton: {reason})"
    return names


def _devices() -> list[str]:
    gpus = range(torch.cuda.device_count())
    names = [f"cuda:{i} ({torch.cuda.get_device_name(i)})" for i in gpus]
    return ["cpu", *names, *["mps"] * torch.backends.mps.is_available()]
