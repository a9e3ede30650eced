"""Make an autograd function and a custom operator of a forward and a backward pass.

With ordinary tensors a `Recurrence` is an autograd function. Where a call is only
traced (`torch.compile`, `torch.export`, the device "meta"), it is the operator
`torch.ops.fwlab.NAME`, one opaque node of a graph.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._C import _are_functorch_transforms_active as under_func
from torch.autograd import Function, forward_ad

Tensors = Sequence[Tensor | None]
Results = tuple[Sequence[Tensor], Sequence[Tensor]]


class Recurrence:
    """Combine a forward and a backward function into one differentiable function.

    - `forward(x, keep, *options)` returns two sequences of newly allocated tensors: the
      results and, if `keep`, the tensors that the backward pass needs besides the
      inputs, which are always saved.
    - `backward(x, kept, gradients, needed, *options)` returns a gradient or None for
      each of `x`. In `gradients`, None stands for 0; at least one is a tensor.
    - `shapes(x, keep, *options)` returns empty tensors with the shapes of `forward`.
    - `reads`: the indices of results that the backward pass also gets, after the saved
      tensors.
    - `spares`: the indices of inputs that the backward pass does not need: an eager
      call does not save them, and passes None.
    - `x`, `options`: the arguments of a call, as PyTorch's operators declare them:
      "Tensor q, Tensor? decay" and "bool early".
    """

    def __init__(
        self,
        name: str,
        x: str,
        options: str,
        forward: Callable[..., Results],
        backward: Callable[..., Tensors],
        shapes: Callable[..., Results],
        reads: Sequence[int] = (),
        spares: Sequence[int] = (),
    ):
        n = len(x.split(","))
        self.forward, self.backward = forward, backward
        self.reads, self.spares = reads, spares

        def compute(*given: Any) -> Any:
            made = forward(given[:n], given[-1], *given[n:-1])
            return tuple([_compact(x) for x in parts] for parts in made)

        def gradients(*given: Any) -> list[Tensor]:
            tensors, (kept, dy, needed, *more) = given[:n], given[n:]
            made = backward(tensors, kept, dy, needed, *more)
            return [
                torch.zeros_like(x) if dx is None else _compact(dx)
                for x, dx, need in zip(tensors, made, needed, strict=True)
                if need
            ]

        def save(ctx: Any, inputs: tuple, output: Any) -> None:
            read = [output[0][i] for i in reads]
            ctx.save_for_backward(*inputs[:n], *output[1], *read)
            ctx.set_materialize_grads(False)
            ctx.options = inputs[n:-1]

        def go_back(ctx: Any, dy: Any, _: Any) -> Any:
            refuse_second_derivative()
            saved, needed = (ctx.saved_tensors, [*ctx.needs_input_grad[:n]])
            made = iter(back(*saved[:n], [*saved[n:]], [*dy], needed, *ctx.options))
            pulled = [next(made) if need else None for need in needed]
            return *pulled, *[None] * (len(ctx.options) + 1)

        options = f", {options}" if options else ""
        self.node = torch.library.custom_op(
            f"fwlab::{name}",
            compute,
            mutates_args=(),
            schema=f"({x}{options}, bool keep) -> (Tensor[] y, Tensor[] kept)",
        )
        self.node.register_fake(lambda *a: shapes(a[:n], a[-1], *a[n:-1]))
        self.node.register_autograd(go_back, setup_context=save)
        back = torch.library.custom_op(
            f"fwlab::{name}_backward",
            gradients,
            mutates_args=(),
            schema=f"({x}, Tensor[] kept, Tensor?[] dy, bool[] needed{options})"
            " -> Tensor[]",
        )
        back.register_fake(
            lambda *a: [
                x.new_empty(x.shape)
                for x, need in zip(a[:n], a[n + 2], strict=True)
                if need
            ]
        )

    def __call__(
        self, x: Tensors, *options: bool | int | float | str | Callable | None
    ) -> Any:
        """Run the forward function. Traced calls support no function as an option."""
        keep = needs_backward(*x)
        if is_traced(x[0]):
            dense = [part if part is None else part.contiguous() for part in x]
            return self.node(*dense, *options, keep)[0]
        if not keep:
            return self.forward(x, False, *options)[0]
        return _Function.apply(self, options, *x)


class _Function(Function):
    """Connect a `Recurrence` to autograd, for calls that are not traced."""

    @staticmethod
    def forward(ctx: Any, recurrence: Recurrence, options: tuple, *x: Any) -> Any:
        results, kept = recurrence.forward(x, True, *options)
        ctx.recurrence, ctx.options, ctx.inputs = (recurrence, options, len(x))
        read = [results[i] for i in recurrence.reads]
        held = (None if i in recurrence.spares else part for i, part in enumerate(x))
        ctx.save_for_backward(*held, *kept, *read)
        ctx.set_materialize_grads(False)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *dy: Tensor | None) -> Any:
        refuse_second_derivative()
        n, needed = ctx.inputs, ctx.needs_input_grad[2:]
        first = next((g for g in dy if g is not None), None)
        if first is None:
            return None, None, *[None] * n
        saved = ctx.saved_tensors  # Activation checkpointing allows only one access.
        with full_precision(first):
            dx = ctx.recurrence.backward(saved[:n], saved[n:], dy, needed, *ctx.options)
        return None, None, *dx


def _compact(x: Tensor) -> Tensor:
    """Return a contiguous tensor with storage offset 0, cloned if necessary."""
    if x.storage_offset() or not x.is_contiguous():
        return x.clone(memory_format=torch.contiguous_format)
    return x


Named = dict[str, Tensor]


def differentiate(
    function: Callable[[Named], Named], leaves: Named
) -> tuple[Named, Callable[[Named], Named]]:
    """Call a function on `leaves`; return its result and vector-Jacobian product."""
    with torch.enable_grad():
        own = {name: x.detach().requires_grad_() for name, x in leaves.items()}
        results = function(own)
    # Autograd does not record inside of a custom operator; `vjp` does, but is slower.
    if not any(x.grad_fn is not None for x in results.values()):
        results, pull_back = torch.func.vjp(function, leaves)  # type: ignore[misc]
        return results, lambda gradients: pull_back(gradients)[0]

    def go_back(gradients: Named) -> Named:
        names = [name for name, x in results.items() if x.requires_grad]
        outputs = [results[name] for name in names]
        incoming = [gradients[name] for name in names]
        made = torch.autograd.grad(outputs, list(own.values()), incoming)
        return dict(zip(own, made, strict=True))

    return {name: x.detach() for name, x in results.items()}, go_back


def refuse_second_derivative() -> None:
    """Raise `RuntimeError` in a backward pass with `create_graph=True`."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            "the efficient implementation has no second derivative; for "
            "create_graph=True, call the operation with implementation='naive' and "
            "without torch.compile"
        )


def full_precision(x: Tensor) -> AbstractContextManager:
    """Return a context that disables autocast on the device of `x`."""
    device = x.device.type
    if x.is_meta or not torch.is_autocast_enabled(device):
        return nullcontext()  # This keeps the context out of traced graphs.
    return torch.autocast(device, enabled=False)


def has_autocast(x: Tensor) -> bool:
    """Return True if autocast is on for the device of `x`."""
    return not x.is_meta and torch.is_autocast_enabled(x.device.type)


def sum_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of states and sums for inputs like `x`: float64 or float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def needs_backward(*tensors: Tensor | None) -> bool:
    """Return True if autograd records operations on these tensors."""
    return torch.is_grad_enabled() and any(
        x is not None and x.requires_grad for x in tensors
    )


def is_transformed() -> bool:
    """Return True under a `torch.func` transform or forward-mode differentiation.

    Transformed code must not branch on values, and a custom autograd function has no
    forward-mode derivative.
    """
    return under_func() or forward_ad._current_level >= 0


def constant(function: Callable[..., Any]) -> Any:
    """Mark a function whose result `torch.compile` treats as a constant.

    `torch.compiler.assume_constant_result` does the same, but loads the compiler.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def is_traced(x: Any) -> bool:
    """Return True if a call is traced into a graph, where tensors have no values."""
    return torch.compiler.is_compiling() or x.is_meta or hasattr(x, "fake_mode")
