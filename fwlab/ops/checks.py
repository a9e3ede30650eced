"""What every operation checks before it does any work."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


def shapes(op: str, **expected: tuple[Tensor, str]) -> dict[str, int]:
    """Match tensors against named dimensions, in the order given.

    `shapes("delta_rule", q=(q, "batch time heads key"), ...)` gives each
    name the size at its first appearance, and holds later ones to it.

    - Returns the size of every name.
    - Raises `TypeError` for what is not a tensor, `ValueError` for a
      shape that does not fit, naming the argument and both shapes.
    """
    sizes: dict[str, int] = {}
    for argument, (tensor, names) in expected.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(
                f"{op}: {argument} must be a tensor, not {type(tensor).__name__}"
            )
        dims = names.split()
        found = list(tensor.shape)
        wanted = [sizes.get(dim, dim) for dim in dims]
        fits = len(found) == len(dims) and all(
            isinstance(want, str) or want == size
            for want, size in zip(wanted, found, strict=True)
        )
        if not fits:
            wanted_text = ", ".join(str(w) for w in wanted)
            raise ValueError(
                f"{op}: {argument} has shape {found}, but [{wanted_text}] was wanted "
                f"([{', '.join(dims)}])"
            )
        sizes.update(zip(dims, found, strict=True))
    return sizes


def compute_dtype(op: str, **tensors: Tensor) -> torch.dtype:
    """The precision of states and sums: float64 for float64, else float32.

    Half precision and float32 may be mixed, as autocast does; float64
    mixes with nothing. All tensors must be on one device.
    """
    first, lead = next(iter(tensors.items()))
    for argument, tensor in tensors.items():
        if not tensor.is_floating_point():
            raise TypeError(
                f"{op}: {argument} has dtype {_name(tensor.dtype)}, "
                "but a floating-point tensor was wanted"
            )
        if (tensor.dtype == torch.float64) != (
            lead.dtype == torch.float64
        ):
            raise TypeError(
                f"{op}: {argument} has dtype {_name(tensor.dtype)}, but {first} has "
                f"{_name(lead.dtype)}; float64 does not mix with lower precision"
            )
        same_device(op, argument, tensor, first, lead)
    return (
        torch.float64 if lead.dtype == torch.float64 else torch.float32
    )


def same_device(
    op: str, argument: str, tensor: Tensor, first: str, lead: Tensor
) -> None:
    if tensor.device != lead.device:
        raise ValueError(
            f"{op}: {argument} is on {tensor.device}, not on {lead.device} as {first}"
        )


def state_part(
    op: str,
    argument: str,
    tensor: Tensor,
    shape: Iterable[int],
    dtype: torch.dtype,
    like: Tensor,
) -> None:
    """Hold one tensor of a state to its exact shape, dtype and device."""
    wanted = list(shape)
    if not isinstance(tensor, Tensor):
        raise TypeError(
            f"{op}: {argument} must be a tensor, not {type(tensor).__name__}"
        )
    if list(tensor.shape) != wanted:
        raise ValueError(
            f"{op}: {argument} has shape {list(tensor.shape)}, but {wanted} was wanted"
        )
    if tensor.dtype != dtype:
        raise TypeError(
            f"{op}: {argument} has dtype {_name(tensor.dtype)}, but states are kept in "
            f"{_name(dtype)} for these inputs"
        )
    same_device(op, argument, tensor, "the inputs", like)


def state_kind(op: str, state: Any, kind: Any) -> None:
    """Hold a state to a named tuple, or to a tuple as long as it."""
    names = kind._fields
    if not isinstance(state, tuple) or len(state) != len(names):
        raise TypeError(
            f"{op}: state must be a {kind.__name__} ({', '.join(names)}), not "
            f"{type(state).__name__}"
        )


def steps(part: Any, dims: int) -> int:
    """Steps in a part of a state, if that is what it is; else 0."""
    fits = isinstance(part, Tensor) and part.dim() == dims
    return part.shape[1] if fits else 0


def mask(
    op: str, argument: str, tensor: Tensor, like: Tensor, **sizes: int
) -> None:
    """Hold a mask to its sizes, which are named as in messages."""
    if not isinstance(tensor, Tensor) or tensor.dtype != torch.bool:
        kind = (
            _name(tensor.dtype)
            if isinstance(tensor, Tensor)
            else type(tensor).__name__
        )
        raise TypeError(
            f"{op}: {argument} must be a bool tensor (True = real token), not {kind}"
        )
    wanted = list(sizes.values())
    if list(tensor.shape) != wanted:
        raise ValueError(
            f"{op}: {argument} has shape {list(tensor.shape)}, but "
            f"{wanted} was wanted ([{', '.join(sizes)}])"
        )
    same_device(op, argument, tensor, "the inputs", like)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
