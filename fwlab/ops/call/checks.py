"""What every operation checks before it does any work."""

import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from fwlab import arguments

#: The dtypes that the operations compute with.
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

#: A constant, since `torch.compile` in PyTorch 2.6 cannot look it up.
LARGEST = sys.float_info.max


def shapes(op: str, **expected: tuple[Tensor, str | None]) -> dict[str, int]:
    """Match tensors with named dimensions, in the given order.

    `shapes("delta_rule", q=(q, "batch time heads key"), ...)` takes the
    size of a dimension from the first tensor that has it; later tensors
    must have the same. With None instead of dimensions, any shape fits.

    - Returns the size of every dimension, by name.
    - Raises `TypeError` for anything but a tensor, and `ValueError` for
      a shape that does not fit, naming the argument and both shapes.
    """
    sizes: dict[str, int] = {}
    for argument, (tensor, names) in expected.items():
        ordinary(op, argument, tensor)
        if names is None:
            continue
        dims, shape = names.split(), tensor.shape
        before = sizes.copy()
        fits = len(dims) == len(shape)
        for dim, size in zip(dims, shape, strict=False):
            # What is not known yet is whatever it is.
            fits = sizes.setdefault(dim, size) == size and fits
        if not fits:
            known = [before.get(dim, dim) for dim in dims]
            text = f"[{', '.join(map(str, known))}]"
            if any(isinstance(need, int) for need in known):
                text += f" ([{', '.join(dims)}])"
            raise ValueError(
                f"{op}: expected {argument} of shape {text}, got {list(shape)}"
            )
    return sizes


def ordinary(op: str, argument: str, x: Any) -> None:
    """Raise `TypeError` unless `x` is a tensor with all its entries.

    Sparse, nested and oneDNN tensors are not.
    """
    if not dense(x):
        wanted = "dense tensor" if isinstance(x, Tensor) else "tensor"
        raise TypeError(f"{op}: expected {argument} to be a {wanted}, got {_kind(x)}")


def dense(x: Any) -> bool:
    """Whether it is a tensor with all its entries.

    The shape of a nested tensor cannot even be asked for.
    """
    return isinstance(x, Tensor) and x.layout is torch.strided and not x.is_nested


def group(op: str, q: Any, k: Any) -> int:
    """How many consecutive heads of `q` share one head of `k`.

    - Returns 1 if a shape does not fit at all: `shapes` reports that.
    - Raises `ValueError` for heads that cannot be shared evenly.
    """
    if not all(dense(x) and x.dim() == 4 for x in (q, k)):
        return 1
    queries, keys = q.shape[2], k.shape[2]
    if queries == keys or not queries * keys:
        return 1
    if queries % keys:
        raise ValueError(
            f"{op}: expected the heads of q to be a multiple of the "
            f"{keys} heads of k, got {queries}"
        )
    return queries // keys


def scale(op: str, value: Any) -> None:
    """Check a factor: a finite number, or a tensor of one number."""
    text = f"{op}: expected scale to be a finite number"
    if isinstance(value, Tensor):
        ordinary(op, "scale", value)
        if value.numel() != 1 or value.is_complex() or value.dtype == torch.bool:
            raise ValueError(
                f"{text} or a tensor of one, got a {_name(value.dtype)} "
                f"tensor of shape {list(value.shape)}"
            )
    elif not arguments.number(value):
        raise TypeError(f"{text}, got {value!r}")
    elif not -LARGEST <= value <= LARGEST:
        raise ValueError(f"{text}, got {value!r}")


def compute_dtype(op: str, **tensors: Tensor) -> torch.dtype:
    """The precision of states and sums: float64 for float64, else float32.

    You may mix half precision and float32, as autocast does, but not
    float64 with either. All tensors must be on one device.
    """
    first, lead = next(iter(tensors.items()))
    kinds = {(x.dtype, x.device) for x in tensors.values()}
    if len(kinds) == 1 and lead.dtype in DTYPES:
        tensors = {}  # nothing can be wrong
    for argument, tensor in tensors.items():
        if not tensor.is_floating_point():
            raise TypeError(
                f"{op}: expected {argument} to be a floating-point tensor, "
                f"got {_name(tensor.dtype)}"
            )
        if tensor.dtype not in DTYPES:  # float8
            *names, last = map(_name, DTYPES)
            raise TypeError(
                f"{op}: expected {argument} in {', '.join(names)} or "
                f"{last}, got {_name(tensor.dtype)}"
            )
        if (tensor.dtype == torch.float64) != (lead.dtype == torch.float64):
            raise TypeError(
                f"{op}: expected {argument} in the precision of {first}, "
                f"{_name(lead.dtype)}, got {_name(tensor.dtype)}; float64 "
                "does not mix with lower precision"
            )
        same_device(op, argument, tensor, first, lead)
    return torch.float64 if lead.dtype == torch.float64 else torch.float32


def same_device(
    op: str, argument: str, tensor: Tensor, first: str, lead: Tensor
) -> None:
    """Raise `ValueError` unless two tensors are on one device."""
    if tensor.device != lead.device:
        raise ValueError(
            f"{op}: expected {argument} on {lead.device}, like {first}, "
            f"got {tensor.device}"
        )


def state_part(
    op: str,
    argument: str,
    tensor: Tensor,
    shape: Iterable[int],
    dtype: torch.dtype,
    like: Tensor,
) -> None:
    """Check the shape, dtype and device of one tensor of a state."""
    expected = list(shape)
    ordinary(op, argument, tensor)
    if list(tensor.shape) != expected:
        raise ValueError(
            f"{op}: expected {argument} of shape {expected}, got {list(tensor.shape)}"
        )
    if tensor.dtype != dtype:
        raise TypeError(
            f"{op}: expected {argument} in {_name(dtype)} for these inputs, "
            f"got {_name(tensor.dtype)}"
        )
    same_device(op, argument, tensor, "the inputs", like)


def state_kind(op: str, state: Any, kind: Any) -> None:
    """Check that a state is the named tuple `kind`, or a tuple as long."""
    names = kind._fields
    if not isinstance(state, tuple) or len(state) != len(names):
        raise TypeError(
            f"{op}: expected state to be a {kind.__name__} "
            f"({', '.join(names)}), got {type(state).__name__}"
        )


def fits(part: Any, shape: tuple[int, ...], like: Tensor) -> bool:
    """Whether it is a tensor of that shape, with the dtype and device of `like`."""
    return (
        dense(part)
        and part.shape == shape
        and part.dtype == like.dtype
        and part.device == like.device
    )


def time_of(part: Any, dims: int) -> int:
    """The number of steps in one part of a state.

    0 if it is not a tensor with `dims` dimensions.
    """
    fits = dense(part) and part.dim() == dims
    return part.shape[1] if fits else 0


def mask(op: str, argument: str, tensor: Tensor, like: Tensor, **sizes: int) -> None:
    """Check a mask; `sizes` are its dimensions by name, in order."""
    if not dense(tensor) or tensor.dtype != torch.bool:
        raise TypeError(
            f"{op}: expected {argument} to be a bool tensor "
            f"(True = real token), got {_kind(tensor)}"
        )
    expected = list(sizes.values())
    if list(tensor.shape) != expected:
        raise ValueError(
            f"{op}: expected {argument} of shape {expected} "
            f"([{', '.join(sizes)}]), got {list(tensor.shape)}"
        )
    same_device(op, argument, tensor, "the inputs", like)


def documents(op: str, cu_seqlens: Tensor, batch: int) -> int:
    """Check the borders of documents, except for their values.

    - Returns the number of documents.
    """
    if (
        not dense(cu_seqlens)
        or cu_seqlens.is_floating_point()
        or cu_seqlens.is_complex()
        or cu_seqlens.dtype == torch.bool
    ):
        raise TypeError(
            f"{op}: expected cu_seqlens to be a tensor of integers, "
            f"got {_kind(cu_seqlens)}"
        )
    shape = list(cu_seqlens.shape)
    if len(shape) != 1 or shape[0] < 2:
        raise ValueError(
            f"{op}: expected cu_seqlens of shape [documents + 1], for at "
            f"least 1 document, got {shape}"
        )
    if batch != 1:
        raise ValueError(f"{op}: expected a batch of 1 with cu_seqlens, got {batch}")
    return shape[0] - 1


def _kind(x: Any) -> str:
    """How a message names something unexpected: its dtype or type."""
    if isinstance(x, Tensor):
        if x.is_nested:
            return "a nested tensor"
        if x.layout is not torch.strided:
            return f"layout {_name(x.layout)}"
        return _name(x.dtype)
    return type(x).__name__


# A dtype or layout as people write it: "float32".
def _name(kind: torch.dtype | torch.layout) -> str:
    return str(kind).removeprefix("torch.")
