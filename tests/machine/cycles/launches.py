"""What PyTorch itself launches between the kernels."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

#: Operations that launch nothing: views, and room without values.
WITHOUT = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.new_empty_strided.default,
    torch.ops.aten.detach.default,
}


class Others(TorchDispatchMode):
    """Counts the operations that launch a kernel, and the bytes of their tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.bytes = 0

    def __torch_dispatch__(
        self,
        op: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = op(*args, **(kwargs or {}))
        if op not in WITHOUT and not op.is_view:
            self.names.append(op.name())
            tensors = [
                x for x in tree_leaves((args, kwargs, result)) if isinstance(x, Tensor)
            ]
            self.bytes += sum(map(size, tensors))
        return result


def size(x: Tensor) -> int:
    """Bytes of a tensor in HBM: those of a repeated scalar count once."""
    elements = 1
    for length, stride in zip(x.shape, x.stride(), strict=True):
        elements *= length if stride else 1
    return elements * x.element_size()
