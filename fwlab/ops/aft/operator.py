"""The forms of AFT with biases, where a call is only traced.

All of them are tiles and what comes before and after: copies of biases,
running means of the keys outside a window. One operator serves them
all. Its forward pass keeps the sums of weights of all rows. Its backward
pass computes again what is around the tiles, but no tile.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from fwlab.ops.call.operators import Operator, traced
from fwlab.ops.parts import autograd

#: The functions that compute a form, by name.
FORMS: dict[str, Callable[..., Any]] = {}

#: The name of the method that computes tiles within an operator, and its first
#: argument; None = an autograd function.
_tiles: ContextVar[Any] = ContextVar("tiles", default=None)


def form(name: str) -> Callable[[Callable], Callable]:
    """Decorator: a call that is traced becomes an operator.

    The function takes `q`, `k`, `v`, biases, then perhaps the running
    mean of a state, and sizes.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        FORMS[name] = function

        @functools.wraps(function)
        def call(q: Tensor, *arguments: Any) -> Any:
            if not traced(q):
                return function(q, *arguments)
            k, v, w, *others = arguments
            state = [x for x in others if isinstance(x, Tensor)]
            sizes = [
                x for x in others if not isinstance(x, Tensor)
            ] or [0, 0]
            tensors = (q, k, v, w, *(state or (None, None)))
            keep = autograd.will_go_back(*tensors)
            results = _operator(*tensors, name, *sizes, keep)
            return results if state else results[0]

        return call

    return decorate


def apply(function: Any, *arguments: Any) -> Tensor:
    """`function.apply`, or within an operator what takes its place."""
    if (chosen := _tiles.get()) is None:
        return function.apply(*arguments)
    return getattr(function, chosen[0])(chosen[1], *arguments)


def inside() -> bool:
    """Whether an operator computes this call."""
    return _tiles.get() is not None


@contextmanager
def _computing(method: str, argument: Any) -> Iterator[None]:
    """Within this context, `apply` calls `method` of `Tiles`.

    - `argument`: the first argument of the method.
    """
    token = _tiles.set((method, argument))
    try:
        yield
    finally:
        _tiles.reset(token)


def _called(
    name: str, sizes: list[int], *arguments: Any
) -> tuple[Any, ...]:
    """The results of a form: `y`, and perhaps a running mean."""
    tensors = [x for x in arguments if x is not None]
    out = FORMS[name](*tensors, *(size for size in sizes if size))
    return out if isinstance(out, tuple) else (out, None, None)


class _Form(torch.autograd.Function):
    """What the operator computes; it is never applied itself."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Any, ...]:
        """Compute the form; save its inputs, outputs and sums."""
        *tensors, name, height, width, keep = arguments
        sums: list[Tensor] = []
        with _computing("first", sums):
            results = _called(name, [height, width], *tensors)
        if keep:
            rows = tensors[0].shape[1]
            total = torch.cat(sums, 1)[:, :rows]
            ctx.save_for_backward(*tensors, results[0], total)
        return results

    @staticmethod
    def backward(
        ctx: Any, *gradients: Tensor | None
    ) -> tuple[Any, ...]:
        """Compute the form again, and differentiate it by autograd.

        Tiles are not computed again: their outputs were saved.
        """
        *tensors, y, total = ctx.saved_tensors
        name, *sizes, _ = ctx.options
        with _computing("second", iter_rows(y, total)):
            return autograd.pull_back(
                functools.partial(_called, name, sizes),
                tensors,
                ctx.needs_input_grad,
                gradients,
            )


def iter_rows(y: Tensor, total: Tensor) -> Callable[[int], Any]:
    """A function `take(count)`, which returns the next rows of both.

    Each call continues where the one before it ended.
    """
    place = 0

    def take(count: int) -> tuple[Tensor, Tensor]:
        nonlocal place
        here = slice(place, place + count)
        place += count
        return y[:, here], total[:, here]

    return take


def _shapes(*arguments: Any) -> tuple[Any, Any]:
    """What the operator returns and what it saves, without data."""
    *tensors, _, _, _, keep = arguments
    y = torch.empty_like(tensors[0])
    end = [
        None if x is None else torch.empty_like(x) for x in tensors[4:]
    ]
    saved = (*tensors, y, torch.empty_like(y)) if keep else ()
    return (y, *end), saved


_operator = Operator(
    "aft",
    _Form,
    "Tensor q, Tensor k, Tensor v, Tensor w, Tensor? log_sum, "
    "Tensor? mean, str form, SymInt height, SymInt width, bool keep",
    3,
    shapes=_shapes,
)
