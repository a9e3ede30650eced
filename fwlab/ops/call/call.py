"""The record of an operation, and what all calls have in common.

A record says once what the rest of fwlab needs to know about an operation: the lists of
`fwlab.ops`, of layers, mixers, benchmarks, tests and pages come from it. A `Call`
checks the arguments, chooses an implementation, masks steps, passes the state on, and
handles empty and packed sequences.
"""

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fwlab.arguments import flags as check_flags
from fwlab.ops.call import checks, choice, packed, whole
from fwlab.ops.call.operators import traced
from fwlab.ops.parts.autograd import full_precision
from fwlab.ops.parts.state import separate


@dataclass(frozen=True)
class Operation:
    """All that is declared about an operation.

    - `name`: the name of its function in `fwlab.ops`.
    - `folder`: the folder of its implementations in `fwlab/ops`, and of
      its page of annotated source.
    - `implementations`: name -> function or `launcher.Kernel`, simplest
      first. "auto" takes the last one that can run.
    - `plain`: those made of PyTorch's own functions alone, which
      `torch.func` can transform.
    """

    name: str
    folder: str
    implementations: Mapping[str, Any]
    plain: tuple[str, ...] = ("naive", "chunked")


class Variants:
    """Several functions, one for each set of parameters.

    A call goes to the function whose parameters have exactly the names
    of the arguments.
    """

    # The names of the parameters say what a function computes.
    def __init__(self, *functions: Callable):
        self.by_names = {
            frozenset(inspect.signature(f).parameters): f for f in functions
        }

    def __call__(self, **arguments: Any) -> tuple[Tensor, ...]:
        return self.by_names[frozenset(arguments)](**arguments)


class Call:
    """One call of an operation, with checked arguments.

    - `arguments`: name -> (tensor, dimensions), as in `checks.shapes`;
      all are floating-point tensors.
    - `like`: the argument whose dtype and leading shape the result has.
    - `cu_seqlens`: the borders of packed documents. There is then one
      state for each document, and `sizes["batch"]` counts them.
    - `flags`: the arguments that are True or False, by name.
    """

    def __init__(
        self,
        op: Operation,
        arguments: Mapping[str, tuple[Tensor, str | None]],
        *,
        like: str,
        key_mask: Tensor | None,
        cu_seqlens: Tensor | None = None,
        **flags: bool,
    ):
        self.op, self.name, self.key_mask = op, op.name, key_mask
        self.sizes = checks.shapes(op.name, **arguments)
        check_flags(op.name, **flags)
        self.tensors = {name: x for name, (x, _) in arguments.items()}
        self.like = self.tensors[like]
        #: The precision of states and sums.
        self.dtype = checks.compute_dtype(op.name, **self.tensors)
        if key_mask is not None:
            shape = {n: self.sizes[n] for n in ("batch", "time")}
            checks.mask(op.name, "key_mask", key_mask, self.like, **shape)
        self.cu_seqlens = cu_seqlens
        #: Whether there are documents of unknown lengths.
        self.hidden = cu_seqlens is not None and traced(self.like)
        #: Those of packed documents.
        self.lengths: list[int] | None = None
        if cu_seqlens is not None:
            self.sizes["batch"] = checks.documents(
                op.name, cu_seqlens, self.sizes["batch"]
            )

    def choose(self, implementation: str, *deciding: str, **sizes: Any) -> Any:
        """The name and the function of the implementation.

        - `deciding`: the arguments whose device and dtypes decide.
        - `sizes`: other arguments for `refuses` of a kernel.
        """
        if self.cu_seqlens is not None and not self.hidden:
            self.lengths = packed.lengths(
                self.name, self.cu_seqlens, self.sizes["time"]
            )
        return choice.choose(
            self.name,
            self.op.implementations,
            implementation,
            *(self.tensors[name] for name in deciding),
            plain=self.op.plain,
            **{**self.sizes, **sizes},
        )

    def whole(self, start: Any, return_state: bool, **options: Any) -> Any:
        """The call as a single operator, with checked arguments."""
        own = {"key_mask": self.key_mask, "cu_seqlens": self.cu_seqlens}
        tensors = self.tensors | own
        return whole.call(self.name, start, self.like, return_state, tensors, **options)

    def masked(self, x: Tensor, fill: float = 0) -> Tensor:
        """`[batch, time, ...]` with `fill` in place of masked steps.

        This uses `where`, not a product: a masked step may contain anything, even NaN.
        """
        if self.key_mask is None:
            return x
        more = [1] * (x.dim() - 2)
        return torch.where(self.key_mask.unflatten(1, (-1, *more)), x, fill)

    def by_document(
        self, compute: packed.Compute, states: Collection[str], **fills: float
    ) -> packed.Compute:
        """The computation for each document, if the call is packed.

        For the arguments see `packed.by_document`.
        """
        if self.lengths is None:
            return compute
        return packed.by_document(compute, self.lengths, states, fills)

    def start(
        self,
        kind: Callable[..., Any],
        state: Any,
        shapes: dict[str, Any],
        empty: Mapping[str, float] | None = None,
        dtypes: Mapping[str, torch.dtype] | None = None,
    ) -> Any:
        """The given state, checked, or an empty one.

        - `kind`: a named tuple, or a function of one tensor for a state without parts.
        - `shapes`: the shape of each part, by name.
        - `empty`: fill values of an empty state, where not 0.
        - `dtypes`: dtypes of an empty state, where not `self.dtype`.
        """
        if state is None:
            return kind(
                *(
                    self.like.new_full(
                        tuple(shape),
                        (empty or {}).get(part, 0.0),
                        dtype=(dtypes or {}).get(part, self.dtype),
                    )
                    for part, shape in shapes.items()
                )
            )
        parts = [state]
        if hasattr(kind, "_fields"):
            checks.state_kind(self.name, state, kind)
            parts = list(state)
        for (part, shape), x in zip(shapes.items(), parts, strict=True):
            argument = f"state.{part}" if part else "state"
            checks.state_part(self.name, argument, x, shape, self.dtype, self.like)
        return kind(*parts)

    def run(
        self,
        compute: Callable[[], tuple[Tensor, Any]] | None,
        start: Any,
        return_state: bool,
    ) -> Any:
        """`(y, state)` of `compute`, in full precision.

        An empty sequence has no steps to compute, but its result still
        depends on the inputs.
        """
        with full_precision(self.like):
            if self.like.shape[1] == 0:
                others = (
                    x.sum().to(self.dtype)
                    for x in self.tensors.values()
                    if x is not self.like
                )
                # Not the caller's own state, which may be changed in place.
                y, after = self.like * sum(others), separate(start, every=True)
            else:
                assert compute is not None
                y, after = compute()
            y = self.masked(y).to(self.like.dtype)
        return (y, separate(after)) if return_state else y
