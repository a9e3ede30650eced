"""Check arguments, apply masks, and select the implementation of an operation.

An operation is its public function. The annotations of its tensors name their
dimensions; `match` checks them. This module contains the code that all operations
share: error messages (with the argument, what was expected, and what was passed),
precision, masks, parts of states, and the selection of an implementation.
"""

import functools
import itertools
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from inspect import Parameter, signature
from typing import (
    Annotated,
    Any,
    NamedTuple,
    ParamSpec,
    TypedDict,
    get_args,
    get_type_hints,
)

import torch
from torch import Tensor
from torch._C import _are_functorch_transforms_active as under_func
from torch.autograd import forward_ad
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from fwlab import arguments
from fwlab.ops._recurrence import constant, full_precision, is_traced, is_transformed
from fwlab.ops.states import separate

P = ParamSpec("P")
DTYPES = torch.float16, torch.bfloat16, torch.float32, torch.float64
#: Implementations that `torch.func` can transform: they have no custom gradients.
PLAIN = "naive", "chunked"
#: Tolerance for gates outside of their range, due to rounding or numerical gradients.
SLACK = 1e-4
#: The maximum of float64. `torch.compile` in PyTorch 2.6 cannot trace `torch.finfo`.
LARGEST = torch.finfo(torch.float64).max


class Options(TypedDict, total=False):
    """Declare the keyword options of operations with a state: see `sum_rule`."""

    key_mask: Tensor | None
    state: Any
    return_state: bool
    implementation: str


#: The default values of `Options`.
DEFAULTS: dict[str, Any] = {
    "key_mask": None,
    "state": None,
    "return_state": False,
    "implementation": "auto",
}


class Range(NamedTuple):
    """Declare the range of an argument's values, in its annotation.

    - `hint`: the advice at the end of the error message for a value out of range.
    """

    least: float
    most: float
    hint: str


class Refused(ValueError):
    """Signal that the requested implementation cannot compute a call."""


class Kernel(NamedTuple):
    """Hold an implementation that supports only some devices and some inputs.

    - `load`: imports the compiler of a device, and returns the function.
    - `why_not`: returns the reason why the function cannot compute these inputs, or
      None. Called without inputs, it checks only this machine.
    """

    load: Callable[[], Callable[..., Any]]
    why_not: Callable[..., str | None]


class Dimensions(NamedTuple):
    """Hold the dimension names and value ranges of tensors, by argument."""

    names: dict[str, tuple[str, ...]]
    ranges: dict[str, Range]


def annotated(function: Callable[..., Any]) -> Dimensions:
    """Read the dimensions and ranges of a function's tensors from its annotations."""
    found = Dimensions({}, {})
    for name, hint in get_type_hints(function, include_extras=True).items():
        for part in (hint, *get_args(hint)):
            dims, *bounds = getattr(part, "__metadata__", [None])
            if isinstance(dims, str):
                found.names[name] = tuple(dims.split())
                found.ranges.update((name, bound) for bound in bounds)
    return found


def public(
    function: Callable[..., Any],
    options: type,
    defaults: Mapping[str, Any],
    compute: Callable[[dict[str, Any]], Any],
) -> Any:
    """Make the public function of an operation, which binds arguments for `compute`.

    - `function`: has the signature and the docstring. The keywords of `options`, with
      these `defaults`, replace its `**options`.
    - `compute`: takes a dict of all arguments by name.
    """
    own, hints = signature(function), get_type_hints(options)
    named = [p for p in own.parameters.values() if p.kind is not p.VAR_KEYWORD]
    named += [
        Parameter(n, Parameter.KEYWORD_ONLY, default=value, annotation=hints[n])
        for n, value in defaults.items()
    ]
    every = own.replace(parameters=named, return_annotation=Any)
    positional = [p.name for p in named if p.kind < p.KEYWORD_ONLY]
    default = {p.name: p.default for p in named if p.default is not p.empty}
    names = {p.name for p in named}

    # This does the same as `Signature.bind`, but faster.
    @functools.wraps(function)
    def call(*args: Any, **given: Any) -> Any:
        first = dict(zip(positional, args, strict=False))
        bound = {**default, **first, **given}
        fits = len(first) == len(args) and not {*first} & {*given}
        if not fits or {*bound} != names:
            try:
                every.bind_partial(*args, **given)  # This reports extra arguments.
                every.bind(*args, **given)
            except TypeError as error:
                raise TypeError(f"{function.__name__}: {error}") from None
        return compute(bound)

    call.__signature__ = every  # type: ignore[attr-defined]
    return call


def operation(
    forms: Mapping[str, Any],
    like: str,
    options: Any = Options,
    defaults: Mapping[str, Any] = DEFAULTS,
    fills: Mapping[str, float] | None = None,
    steps: tuple[str, ...] = ("batch", "time"),
    plain: Sequence[str] = PLAIN,
) -> Callable[[Callable[P, tuple[Tensor, Any]]], Callable[P, Any]]:
    """Return a decorator that adds checks, masks and options to an operation.

    The decorated function takes tensors whose shapes match, with masked steps filled,
    and a valid `implementation`. It returns `(y, state)`, and runs without autocast.

    - `forms`: the implementations by name; "auto" selects the last that can run.
    - `like`: the argument whose dtype the result has.
    - `options`, `defaults`: the keywords that replace the function's `**options`.
    - `fills`: the values that replace masked steps, by argument, if they are not 0.
    - `steps`: the dimensions of a mask.
    - `plain`: the implementations that `torch.func` can transform.
    """

    def decorate(body: Callable[P, tuple[Tensor, Any]]) -> Callable[P, Any]:
        op, dims = body.__name__, annotated(body).names

        def compute(x: dict[str, Any]) -> Any:
            tensors = {
                name: x[name]
                for name in dims
                if x[name] is not None or name not in optional
            }
            sizes = match(op, tensors, dims)
            precision(op, tensors)
            if not all(isinstance(x[name], bool) for name in flags):
                arguments.flags(op, **{name: x[name] for name in flags})
            wanted = check_form(op, forms, x["implementation"], plain)
            stateful = x.get("state") is not None or x.get("return_state")
            if stateful and not x.get("causal", True):
                raise ValueError(
                    f"{op}: expected causal=True with a state, got causal=False, where "
                    "every step sees all others"
                )
            lead, mask = tensors[like], x["key_mask"]
            if mask is not None:
                check_mask(op, "key_mask", mask, lead, **{n: sizes[n] for n in steps})
                for name, part in tensors.items():
                    if dims[name][: len(steps)] == steps:
                        x[name] = masked(part, mask, (fills or {}).get(name, 0))
            with full_precision(lead):
                y, after = body(  # type: ignore[call-arg]
                    **x | {"implementation": wanted}
                )
                y = (y if mask is None else masked(y, mask)).to(lead.dtype)
            # After an empty sequence, the state is the caller's tensor, so clone it.
            every = not sizes[steps[-1]]
            return (y, separate(after, every)) if x.get("return_state") else y

        call = public(body, options, defaults, compute)
        call.forms = forms
        named = call.__signature__.parameters
        flags = [name for name, p in named.items() if isinstance(p.default, bool)]
        optional = {name for name in dims if named[name].default is None}
        return call

    return decorate


def prepare(
    op: str, forms: Mapping[str, Any], wanted: str, *inputs: Tensor
) -> tuple[Any, ...]:
    """Return the function of an implementation, and its inputs in at least float32.

    The inputs of a kernel keep their dtype: the kernel converts what it loads.
    """
    form = choose(op, forms, wanted, inputs[0], *inputs)
    if form not in forms.values():
        return form, *inputs
    dtype = torch.promote_types(inputs[0].dtype, torch.float32)
    return form, *[x.to(dtype) for x in inputs]


def empty(like: Tensor, *others: Tensor) -> Tensor:
    """Return an empty output that gives every input a gradient of zeros."""
    return like * sum(x.sum().to(like.dtype) for x in others)


def unseen(like: Tensor, *sizes: Sequence[int]) -> list[Tensor]:
    r"""Return keys of $-\infty$ and values of 0 for each size, in at least float32."""
    dtype = torch.promote_types(like.dtype, torch.float32)
    fills = [(size, fill) for size in sizes for fill in (-torch.inf, 0)]
    return [like.new_full(size, fill, dtype=dtype) for size, fill in fills]


def check_borders(op: str, borders: Any, like: Tensor) -> None:
    """Raise unless `cu_seqlens` rises from 0 to the sequence length, and batch is 1.

    The values are read only where this needs no synchronisation.

    - `like`: `[batch, time, ...]`.
    """
    batch, time = like.shape[:2]
    check_dense(op, "cu_seqlens", borders)
    kind = borders.dtype
    if kind.is_floating_point or kind.is_complex or kind == torch.bool:
        raise TypeError(
            f"{op}: expected cu_seqlens to be a tensor of integers, "
            f"got {in_words(kind)}"
        )
    if borders.dim() != 1 or len(borders) < 2:
        raise ValueError(
            f"{op}: expected cu_seqlens of shape [documents + 1], for at least 1 "
            f"document, got {[*borders.shape]}"
        )
    if batch != 1:
        raise ValueError(f"{op}: expected a batch of 1 with cu_seqlens, got {batch}")
    if borders.is_meta and not like.is_meta:
        raise ValueError(f"{op}: expected cu_seqlens with values, got them on meta")
    if is_known(borders):
        document_lengths(op, borders, time)


def document_lengths(op: str, borders: Tensor, time: int) -> list[int]:
    """Return the lengths of packed documents; raise if `borders` are invalid."""
    ends = [int(end) for end in borders.cpu()]  # `tolist` fails in vmap of PyTorch 2.6.
    if ends[0] or ends[-1] != time or ends != sorted(ends):
        raise ValueError(
            f"{op}: expected cu_seqlens to rise from 0 to {time}, the number of steps, "
            f"got {ends}"
        )
    return [b - a for a, b in itertools.pairwise(ends)]


def map_documents(
    op: str,
    call: Callable[..., Any],
    borders: Any,
    steps: Mapping[str, Tensor | None],
    state: Any,
    return_state: bool,
) -> tuple[Tensor, Any]:
    """Call an operation once for each packed document, with a separate state.

    - `call`: takes a document's `steps` by name, `state` and `return_state`.
    - `steps`: the tensors with one entry for each step, `[1, time, ...]`.
    - `state`: a state with one row for each document, or None.
    """
    given = {n: x for n, x in steps.items() if x is not None}
    first = next(iter(given.values()))
    check_borders(op, borders, first)
    if is_traced(borders):
        return mask_documents(call, borders, given, state, return_state)
    lengths = document_lengths(op, borders, first.shape[1])
    states: list[Any] = [None] * len(lengths)
    if state is not None:
        parts, kind = tree_flatten(state)
        for part in parts:
            check_dense(op, "state", part)
            if part.shape[:1] != (len(lengths),):
                raise ValueError(
                    f"{op}: expected state to have a row for each of {len(lengths)} "
                    f"documents, got {[*part.shape]}"
                )
        rows = zip(*(part.split(1) for part in parts), strict=True)
        states = [tree_unflatten(row, kind) for row in rows]
    ys, after = [], []
    each = zip(*(x.split(lengths, 1) for x in given.values()), states, strict=True)
    for *pieces, before in each:
        own = dict(zip(given, pieces, strict=True))
        made = call(**own, state=before, return_state=return_state)
        y, end = made if return_state else (made, None)
        ys.append(y)
        after.append(end)
    y = torch.cat(ys, 1)
    if not return_state:
        return y, None
    return y, tree_map(lambda *parts: torch.cat(parts), *after)


def mask_documents(
    call: Callable[..., Any],
    borders: Tensor,
    steps: Mapping[str, Tensor],
    state: Any,
    return_state: bool,
) -> tuple[Tensor, Any]:
    """Compute packed documents in a traced graph, where `borders` have no values.

    Each document is one row of a batch, in which all other documents are masked.
    """
    first = next(iter(steps.values()))
    index = torch.arange(first.shape[1], device=borders.device)
    own = (index >= borders[:-1, None]) & (index < borders[1:, None])
    rows = {name: x.expand(len(own), *x.shape[1:]) for name, x in steps.items()}
    rows["key_mask"] = own & rows["key_mask"] if "key_mask" in rows else own
    made = call(**rows, state=state, return_state=return_state)
    y, after = made if return_state else (made, None)
    return y.sum(0, keepdim=True), after  # Only one row of each step is nonzero.


def match(
    op: str, tensors: Mapping[str, Any], dims: Mapping[str, Sequence[str]]
) -> dict[str, int]:
    """Return the size of every named dimension; raise if shapes do not match.

    The first tensor that has a dimension determines its size. The last dimension of a
    tensor is optional if its name is in brackets.
    """
    sizes: dict[str, int] = {}
    for argument, x in tensors.items():
        if not isinstance(x, Tensor) or x.is_nested or x.layout is not torch.strided:
            check_dense(op, argument, x)
        names, shape = dims[argument], x.shape
        if names[-1][0] == "[":
            last = [names[-1][1:-1]] if len(shape) == len(names) else []
            names = (*names[:-1], *last)
        fits, before = len(names) == len(shape), sizes.copy()
        for name, size in zip(names, shape, strict=False):
            if sizes.setdefault(name, size) != size:
                fits = False
        if not fits:
            wanted = ", ".join(str(before.get(name, name)) for name in names)
            words = f" ([{', '.join(names)}])" if {*names} & {*before} else ""
            raise ValueError(
                f"{op}: expected {argument} of shape [{wanted}]{words}, "
                f"got {list(shape)}"
            )
    return sizes


def check_dense(op: str, argument: str, x: Any) -> None:
    """Raise `TypeError` unless `x` is a dense tensor, neither nested nor sparse."""
    if not isinstance(x, Tensor):
        kind = type(x).__name__
        raise TypeError(f"{op}: expected {argument} to be a tensor, got {kind}")
    if x.is_nested or x.layout is not torch.strided:
        kind = "a nested tensor" if x.is_nested else f"layout {in_words(x.layout)}"
        raise TypeError(f"{op}: expected {argument} to be a dense tensor, got {kind}")


def precision(op: str, tensors: Mapping[str, Tensor]) -> torch.dtype:
    """Check the dtypes of tensors; return the dtype of states, float64 or float32.

    Half precision and float32 may be mixed, as autocast does.
    """
    first, lead = next(iter(tensors.items()))
    for argument, x in tensors.items():
        if x.dtype not in DTYPES:
            *names, last = map(in_words, DTYPES)
            raise TypeError(
                f"{op}: expected {argument} in {', '.join(names)} or {last}, "
                f"got {in_words(x.dtype)}"
            )
        if (x.dtype == torch.float64) != (lead.dtype == torch.float64):
            raise TypeError(
                f"{op}: expected {argument} in the precision of {first}, "
                f"{in_words(lead.dtype)}, got {in_words(x.dtype)}; float64 does not "
                "mix with lower precision"
            )
        if x.device != lead.device:
            check_device(op, argument, x, lead, first)
    return torch.float64 if lead.dtype == torch.float64 else torch.float32


def check_device(
    op: str, argument: str, x: Tensor, like: Tensor, named: str = "the inputs"
) -> None:
    """Raise unless `x` is on the device of `like`."""
    if x.device != like.device:
        raise ValueError(
            f"{op}: expected {argument} on {like.device}, like {named}, got {x.device}"
        )


def check_part(
    op: str,
    argument: str,
    x: Any,
    shape: Iterable[int],
    dtype: torch.dtype,
    like: Tensor,
) -> None:
    """Raise unless a tensor of a state has the expected shape, dtype and device."""
    check_dense(op, argument, x)
    if [*x.shape] != [*shape]:
        raise ValueError(
            f"{op}: expected {argument} of shape {[*shape]}, got {[*x.shape]}"
        )
    if x.dtype != dtype:
        raise TypeError(
            f"{op}: expected {argument} in {in_words(dtype)} for these inputs, "
            f"got {in_words(x.dtype)}"
        )
    check_device(op, argument, x, like)


def check_state(op: str, state: Any, kind: Any) -> None:
    """Raise `TypeError` unless a state is a tuple of as many parts as `kind` has."""
    names = kind._fields
    if not isinstance(state, tuple) or len(state) != len(names):
        raise TypeError(
            f"{op}: expected state to be a {kind.__name__} ({', '.join(names)}), "
            f"got {type(state).__name__}"
        )


def check_parts(
    op: str,
    state: Any,
    kind: Any,
    shapes: Sequence[Sequence[int]],
    like: Tensor,
    dtype: torch.dtype | None = None,
) -> Any:
    """Return a state as the named tuple `kind`; raise if one of its tensors is invalid.

    - `dtype`: of all parts except a mask, which may be None; None = at least float32.
    """
    check_state(op, state, kind)
    dtype = dtype or torch.promote_types(like.dtype, torch.float32)
    for name, part, shape in zip(kind._fields, state, shapes, strict=True):
        if name != "mask":
            check_part(op, f"state.{name}", part, shape, dtype, like)
        elif part is not None:
            check_mask(op, "state.mask", part, like, batch=shape[0], past=shape[1])
    return kind(*state)


def check_mask(op: str, argument: str, mask: Any, like: Tensor, **sizes: int) -> None:
    """Raise unless `mask` is a bool tensor with dimensions of the given sizes."""
    check_dense(op, argument, mask)
    if mask.dtype != torch.bool:
        raise TypeError(
            f"{op}: expected {argument} to be a bool tensor (True = real token), "
            f"got {in_words(mask.dtype)}"
        )
    shape = [*sizes.values()]
    if [*mask.shape] != shape:
        raise ValueError(
            f"{op}: expected {argument} of shape {shape} ([{', '.join(sizes)}]), "
            f"got {[*mask.shape]}"
        )
    check_device(op, argument, mask, like)


def time_of(part: Any, dims: int) -> int:
    """Return the number of steps in a tensor of a state, or 0 if it is invalid.

    - `part`: the tensor, or a tuple whose first entry is used.
    """
    part = part[0] if isinstance(part, tuple) and part else part
    fits = isinstance(part, Tensor) and not part.is_nested and part.dim() == dims
    return part.shape[1] if fits else 0


def is_like(
    x: Any, shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> bool:
    """Return True if `x` is a dense tensor of this shape and dtype, on this device."""
    return (
        isinstance(x, Tensor)
        and x.layout is torch.strided
        and not x.is_nested
        and (x.shape, x.dtype, x.device) == (shape, dtype, device)
    )


def check_scale(op: str, scale: Any) -> None:
    """Raise unless `scale` is a finite number or a tensor with one entry."""
    text = f"{op}: expected scale to be a finite number"
    if isinstance(scale, Tensor):
        check_dense(op, "scale", scale)
        if scale.numel() != 1 or scale.is_complex() or scale.dtype == torch.bool:
            raise ValueError(
                f"{text} or a tensor of one, got a {in_words(scale.dtype)} tensor of "
                f"shape {[*scale.shape]}"
            )
    elif not arguments.number(scale):
        raise TypeError(f"{text}, got {scale!r}")
    elif not abs(scale) <= LARGEST:
        raise ValueError(f"{text}, got {scale!r}")


def queries_per_head(op: str, queries: int, heads: int) -> int:
    """Return how many consecutive heads of `q` share one head of `k`."""
    if queries == heads:
        return 1
    if not queries * heads or queries % heads:
        raise ValueError(
            f"{op}: expected the heads of q to be a multiple of the {heads} heads of k, "
            f"got {queries}"
        )
    return queries // heads


def check_range(op: str, argument: str, x: Tensor, bound: Range) -> None:
    """Raise for a value out of range; on a GPU, skip this check."""
    if not is_known(x) or not x.numel():
        return
    low, high = (end.item() for end in x.detach().aminmax())
    wrong = ""
    if low < bound.least - SLACK:
        wrong = f"at least {bound.least:g}, got values down to {low:.3g}"
    if high > bound.most + SLACK:
        wrong = f"at most {bound.most:g}, got values up to {high:.3g}"
    if wrong:
        raise ValueError(f"{op}: expected {argument} to be {wrong}; {bound.hint}")


def is_known(x: Tensor) -> bool:
    """Return True if code may branch on the values of `x`.

    Reading them would synchronise with a GPU, and `torch.func` forbids such branches.
    """
    return x.is_cpu and not is_transformed() and not is_traced(x)


def masked(x: Tensor, mask: Tensor | None, fill: float = 0) -> Tensor:
    """Replace masked steps of `[batch, time, ...]`, even NaN, by the number `fill`."""
    if mask is None:
        return x
    return torch.where(mask.view(*mask.shape, *[1] * (x.dim() - mask.dim())), x, fill)


def check_form(
    op: str, forms: Mapping[str, Any], wanted: Any, plain: Sequence[str] = PLAIN
) -> str:
    """Return the name of an implementation, or "auto"; raise for an invalid name.

    Where `torch.func` transforms a call, "auto" becomes the last name in `plain`.
    """
    if wanted not in ("auto", *forms):
        arguments.choice(op, ("auto", *forms), implementation=wanted)
    if not (under_func() or forward_ad._current_level >= 0):
        return wanted
    plain = [name for name in forms if name in plain]
    if "efficient" in plain and forward_ad._current_level >= 0:
        plain.remove("efficient")  # PyTorch's attention has no forward mode.
    if wanted == "auto":
        return plain[-1]
    if wanted not in plain:
        raise ValueError(
            f"{op}: implementation {wanted!r} does not work with torch.func (vmap, "
            "grad, jacrev and others) or in forward-mode differentiation; "
            "implementation='naive' does"
        )
    return wanted


def choose(
    op: str, forms: Mapping[str, Any], wanted: str, like: Tensor, *inputs: Any
) -> Callable[..., Any]:
    """Return the function of an implementation; "auto" selects the last that can run.

    - `like`: a tensor on the device of the inputs.
    """
    for name in [*forms][::-1] if wanted == "auto" else [wanted]:
        form = forms[name]
        if not isinstance(form, Kernel):
            return form
        if wanted == "auto" and like.is_cpu:  # Triton's interpreter is too slow.
            continue
        reason = form.why_not(*inputs)
        if reason is None:
            return form.load()
        able = [n for n, f in forms.items() if not isinstance(f, Kernel)][-1]
        if wanted == name:
            raise Refused(
                f"{op}: implementation {name!r} cannot run here: {reason}; {able!r} can"
            )
        if like.is_cuda:
            tell(f"{op}: {reason}; {able!r} is used instead")
    raise AssertionError(f"{op} has no form without a kernel")


@functools.cache
def warn_once(text: str) -> None:
    """Emit a warning with this text, at most once per process."""
    warnings.warn(text, stacklevel=4)


@constant
def tell(text: str) -> None:
    """Emit a warning once, also in a call that `torch.compile` traces."""
    warn_once(text)


def in_words(kind: torch.dtype | torch.layout) -> str:
    """Return the name of a dtype or layout without "torch.", such as "float32"."""
    return str(kind).removeprefix("torch.")


INFINITE = float("inf")
AtMost0 = Range(-INFINITE, 0, "pass the logarithm of a decay, such as decay.log()")

Queries = Annotated[Tensor, "batch time queries key"]
Keys = Annotated[Tensor, "batch time heads key"]
Values = Annotated[Tensor, "batch time heads value"]
PerHead = Annotated[Tensor, "batch time heads"]
LogDecay = Annotated[Tensor, "batch time heads", AtMost0]
LogDecayPerKey = Annotated[Tensor, "batch time heads key", AtMost0]
LogDecayPerHeadOrKey = Annotated[Tensor, "batch time heads [key]", AtMost0]
#: The inputs of AFT, which has channels in place of heads.
Steps = Annotated[Tensor, "batch time channels"]
