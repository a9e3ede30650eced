"""Versions and devices of this machine, and what runs on it."""

import importlib.metadata
import os
import platform

import torch

import fwlab
from fwlab import ops
from fwlab.ops.call import choice, fla, launcher
from fwlab.provenance import machine


def report() -> str:
    """Versions, devices and usable implementations, as a table."""
    rows = [
        ("fwlab", fwlab.__version__),
        ("python", platform.python_version()),
        ("torch", torch.__version__),
        ("triton", _version("triton")),
        ("ptxas", _assembler()),
        ("fla", _fla()),
        ("machine", machine()),
        ("threads", f"{torch.get_num_threads()}, {_waiting()}"),
        ("devices", ", ".join(_devices())),
    ]
    for op in ops.TABLE:
        rows.append((op, _usable(op)))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def _waiting() -> str:
    """Read from the environment how threads wait for each other."""
    policy = os.environ.get("OMP_WAIT_POLICY", "").upper()
    return "asleep while they wait" if policy == "PASSIVE" else "awake while they wait"


def _assembler() -> str:
    """The ptxas that Triton uses here, where it is, and why not."""
    if (triton := _version("triton")) == "not installed":
        return "not installed"
    try:
        from triton.knobs import nvidia
    except ModuleNotFoundError:  # as in Triton 3.2, which comes with PyTorch 2.6
        return f"Triton {triton} does not say"

    here = torch.cuda.is_available()
    capability = torch.cuda.get_device_capability() if here else (0, 0)
    one = nvidia.ptxas if capability[0] <= launcher.HOPPER else nvidia.ptxas_blackwell
    reason = launcher.untrusted(capability)
    return f"{one.version}, {one.path}" + (f"; not used: {reason}" if reason else "")


def _fla() -> str:
    """The version of flash-linear-attention."""
    version = fla.version()
    if not version:
        return "not installed"
    return f"flash-linear-attention {launcher.dotted(version)}"


def _usable(op: str) -> str:
    """The implementations that run here, and why not one of our kernels, or
    which one "auto" tries first.
    """
    names, table = ", ".join(ops.implementations(op)), ops.TABLE[op].implementations
    kernel = table.get("triton")
    if reason := kernel and launcher.why_not(kernel):
        return f"{names} (no triton: {reason})"
    if torch.cuda.is_available() and {"fla", "triton"} <= {*table}:
        first, *_ = choice.preferred(table)
        return f"{names} ({first} first)"
    return names


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _devices() -> list[str]:
    names = ["cpu"]
    names += [
        f"cuda:{i} ({torch.cuda.get_device_name(i)})"
        for i in range(torch.cuda.device_count())
    ]
    if torch.backends.mps.is_available():
        names.append("mps")
    return names
