"""Versions and devices of this machine, and what runs on it."""

import importlib.metadata
import os
import platform

import torch

import fwlab
from fwlab import ops
from fwlab.ops import compiler, dispatch, fla, gpu
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
    """The ptxas that compiles kernels here, where it is, and why this one."""
    here = torch.cuda.is_available()
    capability = torch.cuda.get_device_capability() if here else (0, 0)
    one, reason = compiler.assembler(capability)
    if one is None:
        return reason or "not installed"
    return f"{one}, {one.path}" + (f"; not used: {reason}" if reason else "")


def _fla() -> str:
    """The version of flash-linear-attention."""
    version = fla.version()
    if not version:
        return "not installed"
    return f"flash-linear-attention {compiler.said(version)}"


def _usable(op: str) -> str:
    """The implementations that run here, and why not one of our kernels, or
    why it comes first, or second.
    """
    names, table = ", ".join(ops.implementations(op)), ops.TABLE[op].implementations
    kernel = table.get("triton")
    if reason := kernel and gpu.why_not(kernel):
        return f"{names} (no triton: {reason})"
    if torch.cuda.is_available():
        (first, *_), why = dispatch.preferred(op, table, torch.device("cuda", 0))
        if why:
            return f"{names} ({first} first: {why})"
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
