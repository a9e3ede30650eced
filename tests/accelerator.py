"""A second device on any machine, whose tensors must not meet those of the CPU.

```python
with Accelerator():
    x = torch.zeros(2).to(DEVICE)
    x + torch.ones(2)  # raises RuntimeError, as on a GPU
```

All computations are those of the CPU. Only the bookkeeping is that of a GPU:
what is computed there stays there, `.cpu()` and `.item()` bring it back, and
NumPy cannot read it.
"""

import torch
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    return_and_correct_aliasing,
)
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

CPU, DEVICE = torch.device("cpu"), torch.device("cpu:1")
#: A GPU tensor takes indices from the CPU, too.
INDEXED = (
    torch.ops.aten.index.Tensor,
    torch.ops.aten.index_put_.default,
    torch.ops.aten.index_put.default,
)


class There(torch.Tensor):
    """A tensor on `DEVICE`, with its numbers in `here`."""

    @staticmethod
    def __new__(cls, here):
        options = {"dtype": here.dtype, "device": DEVICE}
        view = here.shape, here.stride(), here.storage_offset()
        return torch.Tensor._make_wrapper_subclass(cls, *view, **options)

    def __init__(self, here):
        self.here = here

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return _compute(func, args, kwargs or {})

    def tolist(self):
        return self.here.tolist()

    def numpy(self, **options):
        raise TypeError("copy this tensor to the CPU first: it is on the accelerator")

    def __array__(self, dtype=None, copy=None):
        return self.numpy()

    def __format__(self, form):
        return format(self.here.detach(), form)

    def __repr__(self):
        return f"There({self.here})"


class Accelerator(TorchDispatchMode):
    """Where `DEVICE` is known."""

    def __enter__(self):
        # A module that moves gets new parameters: these have another type.
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        torch.__future__.set_overwrite_module_params_on_conversion(False)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return _compute(func, args, kwargs or {})


def _compute(func, args, kwargs):
    """Compute on the CPU, and keep the result where it belongs."""
    flat, form = tree_flatten((args, kwargs))
    there = any(isinstance(x, There) for x in flat)
    if kwargs.get("device") is not None:  # made there, or moved
        there = torch.device(kwargs["device"]) == DEVICE
    elif func is torch.ops.aten.copy_.default:
        there = isinstance(args[0], There)
    elif there and not (func in INDEXED and isinstance(args[0], There)):
        for x in flat:
            # A single number may come from the CPU.
            if isinstance(x, torch.Tensor) and not isinstance(x, There) and x.dim():
                raise RuntimeError(
                    f"{func} got a tensor on the accelerator and one on the CPU, of "
                    f"shape {list(x.shape)}"
                )
    flat = [x.here if isinstance(x, There) else x for x in flat]
    flat = [CPU if isinstance(x, torch.device) else x for x in flat]
    on_cpu, options = tree_unflatten(flat, form)
    result = func(*on_cpu, **options)
    if not there:
        return result
    result = tree_map_only(torch.Tensor, There, result)
    return return_and_correct_aliasing(func, args, kwargs, result)
