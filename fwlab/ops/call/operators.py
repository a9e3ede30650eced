r"""Recurrences as operators of PyTorch, for calls that are traced.

`torch.compile` and `torch.export` only trace a call, and tensors on the device "meta"
have no data. Everything in a call is then traced as it is, except for its recurrence:
an autograd function written by hand. It becomes the operator `torch.ops.fwlab.NAME`,
one node of a graph. PyTorch knows three things about it:

- what it computes: the forward pass of the function, whose results and
  all that it saves for the backward pass are one list;
- their shapes;
- its gradients: the operator `NAME_backward` is the backward pass of
  the function, and gets what was saved. Nothing is computed twice.

A call with ordinary tensors does without all this.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fwlab.ops.call import launcher

#: Shapes in the list of results begin with this where there is no
#: tensor (then 0), or one of the arguments or results (1 more than its
#: index): an operator must not return the same memory twice.
NOWHERE = (0,) * 8


def traced(x: Any) -> bool:
    """Whether a call with this tensor is only traced."""
    if torch.compiler.is_compiling():
        return True
    if type(x) is Tensor and not x.is_meta:
        return False
    # `launcher.recording` works with tensors without data itself.
    fake = hasattr(x, "fake_mode")  # as those of torch.export
    return (fake or x.is_meta) and not launcher.takes("meta")


class Context:
    """What an autograd function gets as its `ctx` inside an operator.

    - `options`: the arguments that are no tensors, in their order. The
      function itself has nothing else there but its tensors.
    """

    saved_tensors: Sequence[Tensor | None] = ()
    options: tuple[Any, ...] = ()
    needs_input_grad: Sequence[bool] = ()

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        """Remember what is saved."""
        self.saved_tensors = tensors

    def set_materialize_grads(self, value: bool) -> None:
        """Inside an operator, a missing gradient is always None."""


class Operator:
    """An autograd function as a pair of operators.

    - `schema`: its arguments, tensors first, in PyTorch's language.
    - `results`: the number of its results.
    - `fixed`: last arguments, which no schema can describe.
    - `shapes`: returns results and saved tensors without data, for the
      same arguments; None = the forward pass itself can do that.
    """

    def __init__(
        self,
        name: str,
        function: type[torch.autograd.Function],
        schema: str,
        results: int,
        *fixed: Any,
        shapes: Callable[..., tuple[Sequence, Sequence]] | None = None,
    ):
        self.name, self.function, self.fixed = name, function, fixed
        self.count, self.results = schema.count(",") + 1, results
        self.tensors = schema.count("Tensor")
        self.shapes = shapes or self.compute
        define(self, f"{schema}", "Tensor[] saved, Tensor?[] gradients, bool[] needed")

    def __call__(self, *arguments: Any) -> Any:
        """Run the operator, with the arguments of the function's `apply`."""
        run = getattr(torch.ops.fwlab, self.name)
        results = run(*arguments[: self.count])[: self.results]
        return tuple(None if x.dim() == 9 else x for x in results)

    def compute(self, *arguments: Any) -> tuple[Sequence, Sequence]:
        """Results and saved tensors of the forward pass."""
        ctx = Context()
        results = self.function.forward(ctx, *arguments)
        if isinstance(results, Tensor):
            results = (results,)
        return results, ctx.saved_tensors

    def packed(self, compute: Callable, *arguments: Any) -> list[Tensor]:
        """The list of results of the operator."""
        arguments = self.complete(arguments)
        results, saved = compute(*arguments)
        known = [id(x) for x in (*arguments[: self.tensors], *results)]
        out = []
        for x, own in (
            *((x, True) for x in results),
            *((x, id(x) not in known) for x in saved),
        ):
            if x is None or not own:
                where = 0 if x is None else known.index(id(x)) + 1
                x = arguments[0].new_empty((*NOWHERE, where))
            out.append(x)
        return out

    def complete(self, arguments: Sequence[Any]) -> tuple[Any, ...]:
        """All arguments of the function."""
        return (*map(contiguous, arguments), *self.fixed)

    def forward(self, *arguments: Any) -> list[Tensor]:
        """Compute the results, and what is saved, as separate tensors."""
        return apart(self.packed(self.compute, *arguments), arguments)

    def forward_shapes(self, *arguments: Any) -> list[Tensor]:
        """Empty tensors of the shapes that `forward` returns."""
        results = self.packed(self.shapes, *arguments)
        return [x.new_empty(x.shape) for x in results]

    def save(self, ctx: Any, inputs: tuple, output: list[Tensor]) -> None:
        """Keep the arguments, and what the function saves."""
        made = []
        for x in output[self.results :]:
            index = x.shape[-1] - self.tensors - 1
            if x.dim() == 9 and index >= 0:
                x = output[index]  # a result
            made.append(x)
        ctx.options = inputs[self.tensors :]
        ctx.save_for_backward(*inputs[: self.tensors], *made)
        ctx.set_materialize_grads(False)

    def differentiate(self, ctx: Any, gradients: Any) -> tuple:
        """Call `NAME_backward`: a gradient, or None, for each argument."""
        refuse_second()
        tensors = ctx.saved_tensors
        arguments, made = tensors[: self.tensors], tensors[self.tensors :]
        needed = list(ctx.needs_input_grad[: self.tensors])
        run = getattr(torch.ops.fwlab, f"{self.name}_backward")
        pulled = iter(
            run(*arguments, *ctx.options, made, gradients[: self.results], needed)
        )
        each = [next(pulled) if need else None for need in needed]
        return (*each, *[None] * len(ctx.options))

    def backward(self, *packed: Any) -> list[Tensor]:
        """The gradients of the tensors that need one.

        The last three arguments are what was saved, the gradients of
        the results, and for each tensor whether it needs one.
        """
        *inputs, saved, gradients, needed = packed
        arguments = self.complete(inputs)
        ctx = Context()
        ctx.options, ctx.needs_input_grad = (arguments[self.tensors :], needed)
        ctx.saved_tensors = [
            (None, *arguments)[x.shape[-1]] if x.dim() == 9 else x for x in saved
        ]
        pulled = self.function.backward(ctx, *gradients)
        wanted = [
            torch.zeros_like(x) if dx is None else dx
            for x, dx, need in zip(arguments, pulled, needed)  # noqa: B905
            if need
        ]
        return apart(wanted, [*arguments, *saved, *gradients])

    def backward_shapes(self, *packed: Any) -> list[Tensor]:
        """Empty tensors of the shapes that `backward` returns."""
        *arguments, _, _, needed = packed
        pairs = zip(arguments, needed)  # noqa: B905
        return [x.new_empty(x.shape) for x, need in pairs if need]


def refuse_second() -> None:
    """Raise an error if a backward pass is itself differentiated."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            "a traced operation has no second derivative; for "
            "create_graph=True, call it with implementation='naive' and "
            "without torch.compile"
        )


def contiguous(x: Any) -> Any:
    """An argument of a function, as one piece of memory."""
    return x.contiguous() if isinstance(x, Tensor) else x


def apart(results: Sequence[Tensor], others: Sequence) -> list[Tensor]:
    """Contiguous tensors that share no memory, as PyTorch expects."""
    tensors = [x for x in others if isinstance(x, Tensor)]
    seen = {x.untyped_storage().data_ptr() for x in tensors}
    out = []
    for x in results:
        x = x.detach().contiguous()
        if x.untyped_storage().data_ptr() in seen and x.numel():
            x = x.clone()
        seen.add(x.untyped_storage().data_ptr())
        out.append(x)
    return out


def define(new: Any, schema: str, more: str) -> None:
    """Make the operators `NAME` and `NAME_backward`.

    PyTorch keeps them until the process ends. When a module is loaded
    again, they are there already, and call its new functions.
    """
    space: Any = torch.ops.fwlab
    if "library" not in vars(space):
        space.library = torch.library.Library("fwlab", "DEF")
        space.known = {}
    library, known, name = space.library, space.known, new.name
    defined, known[name] = name in known, new
    if defined:
        return

    def now(method: str) -> Callable:
        return lambda *arguments: getattr(known[name], method)(*arguments)

    for suffix, arguments, run in (
        ("", schema, "forward"),
        ("_backward", f"{schema}, {more}", "backward"),
    ):
        full = name + suffix
        library.define(f"{full}({arguments}) -> Tensor[]")
        library.impl(full, now(run), "CompositeExplicitAutograd")
        torch.library.register_fake(f"fwlab::{full}", now(f"{run}_shapes"), lib=library)
    torch.library.register_autograd(
        f"fwlab::{name}",
        now("differentiate"),
        setup_context=lambda ctx, inputs, output: known[name].save(ctx, inputs, output),
        lib=library,
    )
