"""Whole calls as an operator, for those whose insides cannot be traced.

The numbers in `cu_seqlens` decide how packed documents are computed, and
kernels are chosen and launched in Python. Where such a call is only
traced, all of it becomes the operator `torch.ops.fwlab.call`. It keeps
its arguments, and its backward pass computes the call once more.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fwlab.ops.call.operators import Operator
from fwlab.ops.parts import autograd

#: The public functions by name; `fwlab/ops/__init__.py` adds them.
FUNCTIONS: dict[str, Callable[..., Any]] = {}

#: The maximum number of tensors of a call.
TENSORS = 14
#: The other arguments of public functions, which not all of them have.
OPTIONS = {
    "implementation": "str",
    "normalize": "bool",
    "scale": "float?",
    "nu": "int",
    "causal": "bool",
}
DEFAULTS = {"normalize": False, "scale": None, "nu": 0, "causal": True}


def call(
    op: str,
    start: Any,
    like: Tensor,
    return_state: bool,
    tensors: dict[str, Tensor | None],
    **options: Any,
) -> Any:
    """Call a public function of `fwlab.ops` as one operator.

    - `op`: the name of the function.
    - `start`: the state before the call, or an empty one.
    - `like`: a tensor of the shape of the result.
    - `tensors`, `options`: its other arguments, by name.
    - Returns the result, or `(y, state)` with `return_state`.
    """
    parts = tuple(start) if isinstance(start, tuple) else (start,)
    names = [n for n, x in tensors.items() if x is not None]
    arguments = [*parts, *(tensors[n] for n in names)]
    missing = [None] * (TENSORS - len(arguments))
    rest = [(DEFAULTS | options)[name] for name in OPTIONS]
    about = (op, " ".join(names), list(like.shape), *rest)
    y, *after = _operator(*arguments, *missing, *about)
    if not return_state:
        return y
    if not isinstance(start, tuple):
        return y, after[0]
    return y, type(start)(*after)


def _called(
    tensors: list[Any], op: str, names: str, size: Any, *rest: Any
) -> tuple[Any, ...]:
    """What the call returns: `y`, and the parts of its state."""
    function = FUNCTIONS[op]
    parts, named = _sorted(tensors, names)
    takes = inspect.signature(function).parameters
    options = dict(zip(OPTIONS, rest, strict=True))
    if op == "fwp" and not options.pop("causal"):
        named["activation"] = None
    y, after = function(
        **named,
        **{name: x for name, x in options.items() if name in takes},
        state=tuple(parts) if len(parts) > 1 else parts[0],
        return_state=True,
    )
    after = after if isinstance(after, tuple) else (after,)
    return (y, *after, None)[:3]


def _sorted(tensors: list[Any], names: str) -> tuple[list, dict]:
    """The parts of the state, and the other tensors by name."""
    each = [x for x in tensors if x is not None]
    count = len(each) - len(names.split())
    return each[:count], dict(zip(names.split(), each[count:], strict=True))


class _Call(torch.autograd.Function):
    """What the operator computes; it is never applied itself."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Any, ...]:
        """Call the function, and save nothing but its arguments."""
        tensors, about = [*arguments[:TENSORS]], arguments[TENSORS:]
        ctx.save_for_backward(*tensors)
        return _called(tensors, *about)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        """Call the function again, and differentiate it by autograd."""
        return autograd.pull_back(
            lambda *tensors: _called([*tensors], *ctx.options),
            ctx.saved_tensors,
            ctx.needs_input_grad,
            gradients,
        )


def _shapes(*arguments: Any) -> tuple[Any, Any]:
    """What the operator returns and what it saves, without data."""
    tensors, (op, names, size, *_) = arguments[:TENSORS], arguments[TENSORS:]
    parts, named = _sorted([*tensors], names)
    like = named["a" if op == "fwp" else "v"]
    after = [torch.empty_like(x) for x in parts]
    return (like.new_empty(size), *after, None)[:3], tensors


_operator = Operator(
    "call",
    _Call,
    "Tensor t0, "
    + ", ".join(f"Tensor? t{i}" for i in range(1, TENSORS))
    + ", str op, str names, SymInt[] size, "
    + ", ".join(f"{kind} {name}" for name, kind in OPTIONS.items()),
    3,
    shapes=_shapes,
)
