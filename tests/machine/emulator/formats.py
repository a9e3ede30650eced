"""Number formats that NumPy lacks. All take and give arrays."""

import numpy as np

TYPES = {
    "pred": np.bool_,
    **{f"b{bits}": getattr(np, f"uint{bits}") for bits in (8, 16, 32, 64)},
    **{f"u{bits}": getattr(np, f"uint{bits}") for bits in (8, 16, 32, 64)},
    **{f"s{bits}": getattr(np, f"int{bits}") for bits in (8, 16, 32, 64)},
    **{f"f{bits}": getattr(np, f"float{bits}") for bits in (16, 32, 64)},
}
UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def from_bfloat16(bits):
    """float32 of uint16."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def to_bfloat16(x):
    """uint16 of float32: to the nearest, ties to even."""
    bits = np.ascontiguousarray(x).view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    nearest = (bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)
    return np.where(np.isnan(x), np.uint32(0x7FFF), nearest).astype(np.uint16)


def from_half(bits):
    """float32 of uint16."""
    return bits.view(np.float16).astype(np.float32)


def to_half(x):
    """uint16 of float32: to the nearest, ties to even."""
    return x.astype(np.float16).view(np.uint16)


def to_tf32(x):
    """float32 with 10 bits of fraction: to the nearest, ties away from 0."""
    bits = np.ascontiguousarray(x).view(np.uint32)
    nearest = (bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000)
    return np.where(np.isnan(x), bits, nearest).view(np.float32)


def as_tf32(bits):
    """float32 of uint32: tensor cores ignore the bits that TF32 lacks."""
    return (bits & np.uint32(0xFFFFE000)).view(np.float32)


#: 16-bit formats: to float32, and back.
HALVES = {"bf16": (from_bfloat16, to_bfloat16), "f16": (from_half, to_half)}


def flush(x):
    """Without subnormal numbers."""
    return np.where(np.abs(x) < np.finfo(np.float32).tiny, np.copysign(0, x), x)
