"""Check arguments, apply masks, and choose a form, for every operation.

An operation is its public function. The annotations of its tensors name their
dimensions; `match` checks them. This module has what all calls share: errors that
name the argument, what was expected and what came; precision; masks; parts of states;
the choice of a form.
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
#: Forms that `torch.func` can transform: nothing in them is differentiated by hand.
PLAIN = "naive", "chunked"
#: By how much a gate may leave its range: rounding, and steps of numerical gradients.
SLACK = 1e-4
#: A constant, since `torch.compile` in PyTorch 2.6 cannot look it up.
LARGEST = torch.finfo(torch.float64).max


class Options(TypedDict, total=False):
    """Name the options of every operation that has a state: see `sum_rule`."""

    key_mask: Tensor | None
    state: Any
    return_state: bool
    implementation: str


#: The default of each option.
DEFAULTS: dict[str, Any] = {
    "key_mask": None,
    "state": None,
    "return_state": False,
    "implementation": "auto",
}


class Range(NamedTuple):
    """Bound the numbers of an argument, in its annotation.

    - `hint`: the probable meaning of a number out of range.
    """

    least: float
    most: float
    hint: str


class Refused(ValueError):
    """Signal that the chosen form cannot compute a call."""


class Kernel(NamedTuple):
    """Hold a form that runs only on some devices, and for some inputs.

    - `load`: returns the function; a device's compiler is imported only then.
    - `why_not`: says why it cannot run for these inputs; None = it can. Called
      without inputs, it checks only this machine.
    """

    load: Callable[[], Callable[..., Any]]
    why_not: Callable[..., str | None]


class Dimensions(NamedTuple):
    """Hold the annotated dimensions of a function's tensors, by argument."""

    names: dict[str, tuple[str, ...]]
    ranges: dict[str, Range]


def annotated(function: Callable[..., Any]) -> Dimensions:
    """Return the dimensions and the ranges of a function's tensors."""
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
    """Return the function that users call: it binds all arguments for `compute`.

    - `function`: has the signature, with `**options` for the keywords in `options`,
      which have these `defaults`, and the documentation.
    - `compute`: takes all arguments by name.
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

    # As Python binds arguments to names, but quicker.
    @functools.wraps(function)
    def call(*args: Any, **given: Any) -> Any:
        first = dict(zip(positional, args, strict=False))
        bound = {**default, **first, **given}
        fits = len(first) == len(args) and not {*first} & {*given}
        if not fits or {*bound} != names:
            try:
                every.bind_partial(*args, **given)  # first, the superfluous arguments
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
    """Make an operation of its body: decorate a function from tensors to `(y, state)`.

    The body takes all arguments of the call: tensors that fit together, masked steps
    filled, and the name of a form that exists. It runs in full precision.

    - `forms`: how it is computed; "auto" prefers the last that can run.
    - `like`: the argument whose dtype the result has.
    - `options`, `defaults`: the keywords in the place of the body's `**options`.
    - `fills`: the value in a masked step, by argument, if it is not 0.
    - `steps`: the dimensions of a mask.
    - `plain`: forms that `torch.func` can transform.
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
            # A state that nothing was added to is the caller's own.
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
    """Return the form of a name, and its inputs in the precision of sums.

    A kernel gets them as they are: it converts while it loads.
    """
    form = choose(op, forms, wanted, inputs[0], *inputs)
    if form not in forms.values():
        return form, *inputs
    dtype = torch.promote_types(inputs[0].dtype, torch.float32)
    return form, *[x.to(dtype) for x in inputs]


def empty(like: Tensor, *others: Tensor) -> Tensor:
    """Return the output of an empty sequence, connected to all inputs for autograd."""
    return like * sum(x.sum().to(like.dtype) for x in others)


def unseen(like: Tensor, *sizes: Sequence[int]) -> list[Tensor]:
    r"""Return keys of $-\infty$ and values of 0 of each size, in the precision of sums."""
    dtype = torch.promote_types(like.dtype, torch.float32)
    fills = [(size, fill) for size in sizes for fill in (-torch.inf, 0)]
    return [like.new_full(size, fill, dtype=dtype) for size, fill in fills]


def check_borders(op: str, borders: Any, like: Tensor) -> None:
    """Raise unless `borders` are integers that rise from 0 to `time`, and batch is 1.

    Their values are read only where this costs no synchronisation.

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
    """Return the lengths of packed documents; raise unless their borders are right."""
    ends = [int(end) for end in borders.cpu()]  # `tolist` fails in vmap, PyTorch 2.6
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
    - `state`: what an operation returns for a batch of all documents, or None.
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
    """Compute packed documents in a graph, which cannot read their borders.

    Each document is a row of a batch in which all others are masked.
    """
    first = next(iter(steps.values()))
    index = torch.arange(first.shape[1], device=borders.device)
    own = (index >= borders[:-1, None]) & (index < borders[1:, None])
    rows = {name: x.expand(len(own), *x.shape[1:]) for name, x in steps.items()}
    rows["key_mask"] = own & rows["key_mask"] if "key_mask" in rows else own
    made = call(**rows, state=state, return_state=return_state)
    y, after = made if return_state else (made, None)
    return y.sum(0, keepdim=True), after  # all rows of a step but one are 0


def match(
    op: str, tensors: Mapping[str, Any], dims: Mapping[str, Sequence[str]]
) -> dict[str, int]:
    """Return the size of every dimension; raise if tensors disagree.

    A dimension has the size that it has in the first tensor. The last one may be
    missing if its name is in brackets.
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
    """Raise unless `x` is a tensor with all its entries."""
    if not isinstance(x, Tensor):
        kind = type(x).__name__
        raise TypeError(f"{op}: expected {argument} to be a tensor, got {kind}")
    if x.is_nested or x.layout is not torch.strided:
        kind = "a nested tensor" if x.is_nested else f"layout {in_words(x.layout)}"
        raise TypeError(f"{op}: expected {argument} to be a dense tensor, got {kind}")


def precision(op: str, tensors: Mapping[str, Tensor]) -> torch.dtype:
    """Return the dtype of states and sums: float64 for float64, else float32.

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
    """Raise unless a part of a state has this shape and dtype."""
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
    """Raise unless a state is the named tuple `kind`, or a tuple as long."""
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
    """Return a state as the named tuple `kind`; raise unless its parts are right.

    - `dtype`: of all parts but a mask, which may be None; None = the dtype of sums.
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
    """Raise unless `mask` is a bool tensor with these dimensions."""
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
    """Return the number of steps in a part of a state; 0 if it is no such tensor.

    - `part`: the part; if it is a tuple, its first entry counts.
    """
    part = part[0] if isinstance(part, tuple) and part else part
    fits = isinstance(part, Tensor) and not part.is_nested and part.dim() == dims
    return part.shape[1] if fits else 0


def is_like(
    x: Any, shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> bool:
    """Return True if `x` is a dense tensor of this kind."""
    return (
        isinstance(x, Tensor)
        and x.layout is torch.strided
        and not x.is_nested
        and (x.shape, x.dtype, x.device) == (shape, dtype, device)
    )


def check_scale(op: str, scale: Any) -> None:
    """Raise unless `scale` is a finite number, or a tensor of one."""
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
    """Raise for a value out of range, if reading values costs no synchronisation."""
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
    """Return True if the values of a call may decide how it is computed.

    Reading them would wait for a GPU, and `torch.func` cannot branch on values.
    """
    return x.is_cpu and not is_transformed() and not is_traced(x)


def masked(x: Tensor, mask: Tensor | None, fill: float = 0) -> Tensor:
    """Return `[batch, time, ...]` with `fill` in masked steps, which may hold NaN."""
    if mask is None:
        return x
    return torch.where(mask.view(*mask.shape, *[1] * (x.dim() - mask.dim())), x, fill)


def check_form(
    op: str, forms: Mapping[str, Any], wanted: Any, plain: Sequence[str] = PLAIN
) -> str:
    """Return the name of a form, or "auto"; raise for one that cannot be.

    Where `torch.func` transforms a call, "auto" becomes the last plain form.
    """
    if wanted not in ("auto", *forms):
        arguments.choice(op, ("auto", *forms), implementation=wanted)
    if not (under_func() or forward_ad._current_level >= 0):
        return wanted
    plain = [name for name in forms if name in plain]
    if "efficient" in plain and forward_ad._current_level >= 0:
        plain.remove("efficient")  # PyTorch's own has no forward mode
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
    """Return the form of a name; "auto" = the last one that can run for these inputs.

    - `like`: a tensor on the device of the inputs.
    """
    for name in [*forms][::-1] if wanted == "auto" else [wanted]:
        form = forms[name]
        if not isinstance(form, Kernel):
            return form
        if wanted == "auto" and like.is_cpu:  # Triton's interpreter is far too slow
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
    """Warn at most once for each text."""
    warnings.warn(text, stacklevel=4)


@constant
def tell(text: str) -> None:
    """Warn once, also where `torch.compile` traces the call."""
    warn_once(text)


def in_words(kind: torch.dtype | torch.layout) -> str:
    """Return a dtype or a layout without the prefix "torch.": "float32"."""
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
#: AFT: its heads are channels.
Steps = Annotated[Tensor, "batch time channels"]
