"""What all forms of AFT add to a call."""

from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fwlab import arguments
from fwlab.ops.call.call import Call, Operation


def refuses(
    *,
    only_causal: bool = True,
    causal: bool = True,
    batch: int = 0,
    channels: int = 0,
    **others: Any,
) -> str | None:
    """Why the kernels cannot compute a call; None = they can."""
    if only_causal and not causal:
        return "there is no kernel for causal=False"
    # Programs in the second and the third dimension of a grid.
    for name, size in (("batch", batch), ("channels", channels)):
        if size > 65535:
            return f"the kernels take {name} up to 65535, got {size}"
    return None


class AFTCall(Call):
    """A call of AFT: masked keys are hidden from all rows.

    - `form`: the module that computes the call.
    - `q`, `k`, `v`: masked, in the precision that `form` takes.
    - `weights`: the other tensors of the call, by name.
    """

    form: ModuleType

    # The weights may have any shape here: each form checks its own.
    def __init__(
        self,
        op: Operation,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        causal: bool,
        key_mask: Tensor | None,
        implementation: str,
        cu_seqlens: Tensor | None = None,
        **weights: Tensor,
    ):
        dims = "batch time channels"
        inputs: dict[str, tuple[Tensor, str | None]] = {
            "q": (q, dims),
            "k": (k, dims),
            "v": (v, dims),
        }
        more = {
            name: (weight, None) for name, weight in weights.items()
        }
        super().__init__(
            op,
            inputs | more,
            like="v",
            key_mask=key_mask,
            cu_seqlens=cu_seqlens,
            causal=causal,
        )
        self.causal = causal
        name, self.form = self.choose(
            implementation, "q", "k", "v", causal=causal
        )
        q, v = self.masked(q), self.masked(v)
        k = self.masked(k, -torch.inf)  # no row sees it
        if name != "triton":  # kernels convert themselves
            q, k, v = (x.to(self.dtype) for x in (q, k, v))
        self.q, self.k, self.v = q, k, v

    def width(self, name: str, weight: Tensor, dims: str) -> int:
        """The width of a band or kernel; odd if it has two sides."""
        width = weight.shape[-1] if weight.dim() else 0
        if width < 1 or not (self.causal or width % 2):
            size = (
                "at least 1" if self.causal else "odd (2 * window - 1)"
            )
            raise ValueError(
                f"{self.name}: expected {name} of shape [{dims}] whose "
                f"width is {size}, got {list(weight.shape)}"
            )
        return width

    def shape(
        self, name: str, weight: Tensor, shape: list[int], dims: str
    ) -> None:
        """Raise `ValueError` unless a tensor has this shape."""
        if list(weight.shape) != shape:
            raise ValueError(
                f"{self.name}: expected {name} of shape {shape} "
                f"([{dims}]), got {list(weight.shape)}"
            )

    def before(
        self,
        kind: type[NamedTuple],
        state: Any,
        return_state: bool,
        shapes: dict[str, tuple[int, ...]],
    ) -> Any:
        """The given state, or an empty one."""
        arguments.flags(self.name, return_state=return_state)
        if not self.causal and (state is not None or return_state):
            raise ValueError(
                f"{self.name}: expected causal=True with a state, got "
                "causal=False, where every step sees all others"
            )
        empty = {"k": -torch.inf, "log_sum": -torch.inf}
        own = dict.fromkeys(("k", "v"), self.v.dtype)
        return self.start(kind, state, shapes, empty, own)
