r"""The operations as operators of PyTorch, for calls that are traced.

A call with ordinary tensors runs its function, as Python always does.
`torch.compile` and `torch.export` only trace a call, and tensors on the
device "meta" have no data. Such a call goes through the operator
`torch.ops.fwlab.NAME` instead: one node of a graph, whatever the
function does inside. PyTorch knows three things about it:

- what it computes: the function itself;
- the shapes of its results: from the same function, whose `Call` checks
  the arguments and then computes nothing;
- its gradients: the operator `NAME_backward` calls the function once
  more with gradients enabled, because only the inputs are saved, as in
  activation checkpointing. A training step thus costs one more forward
  pass of the operation.

The arguments of an operator are those of the function, in its order. A
state, or any other named tuple, is a list of its tensors, without the
parts that are None; the result is the list of `y` and the tensors of
the state.
"""

import functools
import inspect
import sys
import typing
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fwlab.ops.call import gpu
from fwlab.ops.call.choice import Shapes
from fwlab.transforms import transformed

#: Functions that may be arguments, by the name in the graph.
FUNCTIONS = {"tanh": torch.tanh}


class Parameter(NamedTuple):
    """A parameter of an operation.

    - `type`: in the language of PyTorch's schemas.
    - `kinds`: the named tuples that it may be, by how many of their
      parts are not None.
    """

    name: str
    type: str
    default: Any
    kinds: dict[int, Any]

    def fits(self, value: Any) -> bool:
        """Whether a schema can describe this value."""
        if self.type == "Tensor[]":
            if value is None or isinstance(value, Tensor):
                return True
            return (
                isinstance(value, tuple)
                and _whole(value)
                and len(_parts(value)) in self.kinds
            )
        if value is None:
            return self.type.endswith("?")
        if self.type.startswith("Tensor"):
            return isinstance(value, Tensor)
        if self.type == "str?":
            return any(value is f for f in FUNCTIONS.values())
        if self.type == "float?":
            return type(value) in (int, float)
        return (
            type(value)
            is {"bool": bool, "int": int, "str": str}[self.type]
        )

    def pack(self, value: Any) -> Any:
        """The value as the operator takes it."""
        if self.type == "Tensor[]":
            return _parts(value)
        if self.type == "str?" and value is not None:
            names = [n for n, f in FUNCTIONS.items() if f is value]
            return names[0]
        return value

    def unpack(self, value: Any) -> Any:
        """The value as the function takes it."""
        if self.type == "Tensor[]":
            return _rebuilt(self.kinds, value)
        return FUNCTIONS.get(value) if self.type == "str?" else value


# The tensors of a state: the tensor itself, or those of a named tuple.
def _parts(value: Any) -> list[Tensor]:
    if value is None or isinstance(value, Tensor):
        return [] if value is None else [value]
    return [x for x in value if x is not None]


def _whole(value: tuple) -> bool:
    """Whether nothing but the last parts is None."""
    return all(
        isinstance(x, Tensor) for x in list(value)[: len(_parts(value))]
    )


def _rebuilt(kinds: dict[int, Any], tensors: list[Tensor]) -> Any:
    """The inverse of `_parts`."""
    if len(tensors) not in kinds:
        return tensors[0] if tensors else None
    kind = kinds[len(tensors)]
    return kind(*tensors, *[None] * (len(kind._fields) - len(tensors)))


def _kinds(types: tuple[Any, ...]) -> dict[int, Any]:
    """The named tuples among types, by how many tensors they have."""
    kinds = {}
    for kind in types:
        if fields := getattr(kind, "_fields", ()):
            last = typing.get_type_hints(kind)[fields[-1]]
            if type(None) in typing.get_args(last):
                kinds[len(fields) - 1] = kind
            kinds[len(fields)] = kind
    return kinds


# From an annotation to the language of schemas. A state is a list in
# any case: how many tensors it has differs between calls.
def _parameter(p: inspect.Parameter) -> Parameter:
    types = typing.get_args(p.annotation) or (p.annotation,)
    kinds = _kinds(types)
    optional = "?" if type(None) in types else ""
    kind = "str?"  # a function
    if kinds or p.name == "state":
        kind = "Tensor[]"
    elif Tensor in types:
        kind = f"Tensor{optional}"
    elif types[0] in (bool, int, str, float):
        kind = types[0].__name__ + optional
    return Parameter(p.name, kind, p.default, kinds)


class Operator:
    """What PyTorch is told about an operation.

    - `function`: the public function.
    - `unknown`: why the shapes of the results of a call depend on the
      values of its arguments, in words; None = they do not.
    """

    # All of it follows from the signature, so an operation says it
    # once.
    def __init__(
        self,
        function: Callable[..., Any],
        unknown: Callable[[dict[str, Any]], str | None],
    ):
        self.function, self.unknown = function, unknown
        self.name = function.__name__
        self.parameters = [
            _parameter(p)
            for p in inspect.signature(function).parameters.values()
        ]
        self.names = [p.name for p in self.parameters]
        self.defaults = {
            p.name: p.default
            for p in self.parameters
            if p.default is not inspect.Parameter.empty
        }
        self.kinds = next(
            (p.kinds for p in self.parameters if p.name == "state"), {}
        )

    def schema(self) -> str:
        """The types of all arguments of the operator."""
        return ", ".join(f"{p.type} {p.name}" for p in self.parameters)

    def trace(self, *args: Any, **given: Any) -> Any:
        """A call that becomes one node of a graph, if it can."""
        # No `|` for dicts, and no union types here: torch 2.6 cannot
        # trace them.
        values = {**self.defaults, **given}
        for name, value in zip(self.names, args):  # noqa: B905
            values[name] = value
        described = (
            len(args) <= len(self.names)
            and len(values) == len(self.names)
            and all(p.name in values for p in self.parameters)
            and not any(n in given for n in self.names[: len(args)])
            and all(p.fits(values[p.name]) for p in self.parameters)
            and not transformed()
        )
        reason = self.unknown(values) if described else None
        if reason and not torch.compiler.is_dynamo_compiling():
            raise ValueError(f"{self.name}: {reason}")
        if reason or not described:
            # What is wrong, the function itself says.
            return _untraced(self.function, args, given)
        packed = [p.pack(values[p.name]) for p in self.parameters]
        y, *after = getattr(torch.ops.fwlab, self.name)(*packed)
        if values.get("return_state"):
            return y, _rebuilt(self.kinds, after)
        return y

    def call(
        self, packed: Iterable[Any], **changes: Any
    ) -> list[Tensor]:
        """The results of the function as a list."""
        values = {
            p.name: p.unpack(x)
            for p, x in zip(self.parameters, packed, strict=True)
        }
        out = self.function(**values | changes)
        if values.get("return_state"):
            return [out[0], *_parts(out[1])]
        return [out]

    def forward(self, *packed: Any) -> list[Tensor]:
        """What the operator computes."""
        with torch.no_grad():
            return _own(self.call(packed), _split(packed)[0])

    def shapes(self, *packed: Any) -> list[Tensor]:
        """Tensors without data, of the shapes and dtypes of `forward`."""
        name = Shapes(packed[self.names.index("implementation")])
        found = self.call(packed, implementation=name)
        return [x.new_empty(x.shape) for x in found]

    def backward(self, *packed: Any) -> list[Tensor]:
        """The gradients of the tensors that need one.

        The last two arguments are the gradients of the results, and
        for each tensor whether it needs one.
        """
        *inputs, gradients, needed = packed
        tensors, rest = _split(inputs)
        with _recording():
            leaves = [
                x.detach().requires_grad_(need)
                for x, need in zip(tensors, needed, strict=True)
            ]
            results = self.call(_join(leaves, rest))
            pairs = [
                (y, dy)
                for y, dy in zip(results, gradients, strict=True)
                if dy is not None and y.requires_grad
            ]
            wanted = [x for x in leaves if x.requires_grad]
            found: Any = [None] * len(wanted)
            if pairs:
                found = torch.autograd.grad(
                    *([y for y, _ in pairs], wanted),
                    [dy for _, dy in pairs],
                    allow_unused=True,
                )
        return _own(
            [
                x.new_zeros(x.shape) if dx is None else dx
                for x, dx in zip(wanted, found, strict=True)
            ],
            [*tensors, *(dy for dy in gradients if dy is not None)],
        )


def operator(
    function: Callable[..., Any],
    unknown: Callable[[dict[str, Any]], str | None] = lambda _: None,
) -> Any:
    """Decorator for the public function of an operation.

    Calls that are traced go through an operator; for `unknown` see
    `Operator`.
    """
    traced = Operator(function, unknown)

    # A call with ordinary tensors is a call of the function itself.
    @functools.wraps(function)
    def call(*args: Any, **given: Any) -> Any:
        if torch.compiler.is_compiling() or _no_data(args, given):
            return traced.trace(*args, **given)
        return function(*args, **given)

    call.operator = traced  # type: ignore[attr-defined]
    _register(traced)
    return call


# Whether the shapes are all that there is. The first argument decides;
# `gpu.recording` works with such tensors itself.
def _no_data(args: tuple, given: dict[str, Any]) -> bool:
    first = args[0] if args else next(iter(given.values()), None)
    if type(first) is Tensor and not first.is_meta:
        return False
    fake = hasattr(first, "fake_mode")  # as those of torch.export
    meta = isinstance(first, Tensor) and first.is_meta
    return (fake or meta) and not gpu.takes("meta")


# A call that no schema describes: under `torch.compile`, it breaks the
# graph.
def _untraced(function: Callable, args: tuple, given: dict) -> Any:
    if torch.compiler.is_dynamo_compiling():
        # Not at import: this loads the compiler.
        function = torch.compiler.disable(function)
    return function(*args, **given)


def _register(new: Operator) -> None:
    """Make the operators `NAME` and `NAME_backward`.

    PyTorch keeps them until the process ends. When a module is loaded
    again, they are there already, and call its new function.
    """
    space: Any = torch.ops.fwlab
    if hasattr(space, new.name):
        return
    if "library" not in vars(space):
        space.library = torch.library.Library("fwlab", "DEF")
    library, name = space.library, new.name
    module = new.function.__module__

    # The function of the module as it is loaded now.
    def now() -> Operator:
        return getattr(sys.modules[module], name).operator

    def forward(*packed: Any) -> list[Tensor]:
        return now().forward(*packed)

    def backward(*packed: Any) -> list[Tensor]:
        return now().backward(*packed)

    def shapes(*packed: Any) -> list[Tensor]:
        return now().shapes(*packed)

    def shapes_backward(*packed: Any) -> list[Tensor]:
        *inputs, _, needed = packed
        tensors, _ = _split(inputs)
        return [
            x.new_empty(x.shape)
            for x, need in zip(tensors, needed, strict=True)
            if need
        ]

    back = f"{new.schema()}, Tensor?[] gradients, bool[] needed"
    for suffix, schema, compute, fake in (
        ("", new.schema(), forward, shapes),
        ("_backward", back, backward, shapes_backward),
    ):
        full = f"fwlab::{name}{suffix}"
        library.define(f"{name}{suffix}({schema}) -> Tensor[]")
        library.impl(
            f"{name}{suffix}", compute, "CompositeExplicitAutograd"
        )
        torch.library.register_fake(full, fake, lib=library)
    torch.library.register_autograd(
        f"fwlab::{name}",
        functools.partial(_backward, name),
        setup_context=_save,
        lib=library,
    )
    torch.library.register_autograd(
        f"fwlab::{name}_backward", _no_second, lib=library
    )


# Only inputs are kept; `Operator.backward` computes all else again.
def _save(ctx: Any, inputs: tuple, output: list[Tensor]) -> None:
    tensors, ctx.rest = _split(inputs)
    ctx.save_for_backward(*tensors)
    ctx.set_materialize_grads(False)


# One flat list of tensors goes through the operator; the gradients come
# back in the places of the inputs.
def _backward(name: str, ctx: Any, gradients: list) -> tuple:
    inputs = _join(ctx.saved_tensors, ctx.rest)
    needed = [
        need
        for value, needs in zip(
            inputs, ctx.needs_input_grad, strict=True
        )
        if isinstance(value, Tensor | list)
        for need in (needs if isinstance(value, list) else [needs])
    ]
    back = getattr(torch.ops.fwlab, f"{name}_backward")
    found = iter(back(*inputs, gradients, needed))
    each = [next(found) if need else None for need in needed]
    return tuple(
        dx if isinstance(value, Tensor | list) else None
        for value, dx in zip(inputs, _join(each, ctx.rest), strict=True)
    )


# `NAME_backward` has no gradients of its own, and says so.
def _no_second(ctx: Any, *gradients: Any) -> Any:
    raise RuntimeError(
        "a traced operation has no second derivative; for "
        "create_graph=True, call it with implementation='naive' and "
        "without torch.compile"
    )


def _split(inputs: Iterable[Any]) -> tuple[list[Tensor], list[Any]]:
    """The tensors of all arguments, and the arguments without them."""
    tensors: list[Tensor] = []
    rest: list[Any] = []
    for value in inputs:
        if isinstance(value, Tensor):
            tensors.append(value)
            rest.append(...)
        elif isinstance(value, list | tuple):
            tensors += value
            rest.append([...] * len(value))
        else:
            rest.append(value)
    return tensors, rest


def _join(tensors: Iterable[Any], rest: list[Any]) -> list[Any]:
    """The inverse of `_split`."""
    each = iter(tensors)
    return [
        next(each)
        if value is ...
        else [next(each) for _ in value]
        if isinstance(value, list)
        else value
        for value in rest
    ]


def _own(
    results: list[Tensor], others: Iterable[Tensor]
) -> list[Tensor]:
    """Contiguous tensors that share no memory, as PyTorch expects."""
    seen = {x.untyped_storage().data_ptr() for x in others}
    owned = []
    for x in results:
        x = x.detach().contiguous()
        if x.untyped_storage().data_ptr() in seen:
            x = x.clone()
        seen.add(x.untyped_storage().data_ptr())
        owned.append(x)
    return owned


@contextmanager
def _recording() -> Iterator[None]:
    """Let autograd record, inside an operator, where it would not."""
    autograd = torch._C.DispatchKeySet(
        torch._C.DispatchKey.AutogradFunctionality
    )
    included = torch._C._dispatch_tls_local_include_set()
    excluded = torch._C._dispatch_tls_local_exclude_set() - autograd
    with (
        torch._C._ForceDispatchKeyGuard(included, excluded),
        torch.enable_grad(),
    ):
        yield
