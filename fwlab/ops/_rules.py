"""Turn the expression of a fast weight rule into an operation.

The body of a rule is one expression, the inputs of its recurrence at each step. Scale,
normalisation, grouped heads, masks and packed documents are implemented here once, for
all rules and all implementations.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, ParamSpec

import torch
from torch import Tensor

from fwlab import arguments
from fwlab.feature_maps import finite_gradient, unit_range
from fwlab.ops import _operation as operation
from fwlab.ops._operation import Dimensions, Options, masked
from fwlab.ops._recurrence import (
    full_precision,
    has_autocast,
    is_traced,
    is_transformed,
)
from fwlab.ops.states import NormalizedState

P = ParamSpec("P")
Loop = Callable[..., tuple[Tensor, ...]]
State = Tensor | NormalizedState
#: Below this logarithm of a decay, quotients in float32 lose digits.
FAINT = -80.0


class RuleOptions(Options, total=False):
    """Declare the keyword options of all rules: see `sum_rule`."""

    scale: float | Tensor | None
    cu_seqlens: Tensor | None


DEFAULTS = {"scale": None, "cu_seqlens": None, **operation.DEFAULTS}


class Inputs(NamedTuple):
    """Hold the inputs of a recurrence at each step.

    - `decay`: `[batch, time, heads, 1 or key]`, from 0 to 1; `factor` makes it from a
      logarithm. `strength`: `[batch, time, heads, 1]`. None = 1.
    - `erase_key`: the key whose value a delta rule retrieves; None = `k`. With `early`,
      it retrieves before the decay.
    - `q`, `k`, `v`: None = the arguments of the call.
    """

    decay: Tensor | None = None
    strength: Tensor | None = None
    erase_key: Tensor | None = None
    q: Any = None
    k: Any = None
    v: Any = None
    early: bool = False


class Rule(NamedTuple):
    """Hold the implementations and properties of a fast weight rule: see `rule`."""

    name: str
    gates: Callable[..., Inputs]
    tensors: Dimensions
    optional: set[str]
    loop: Loop
    normalized_loop: Loop | None
    forms: Mapping[str, Any]
    corrects: bool


def rule(
    forms: Mapping[str, Any],
    loop: Loop,
    normalized_loop: Loop | None = None,
    *,
    corrects: bool = False,
) -> Callable[[Callable[P, Inputs]], Callable[P, Any]]:
    """Return a decorator that turns a function returning `Inputs` into an operation.

    - `forms`: the implementations of its recurrence; "auto" prefers the last.
    - `loop`, `normalized_loop`: the naive implementation, without and with a
      normaliser; an optional `log_decay` is applied outside of it.
    - `corrects`: True for delta rules, which write the difference to a retrieved value.
    """

    def decorate(gates: Callable[P, Inputs]) -> Callable[P, Any]:
        every, tensors = {"naive": loop, **forms}, operation.annotated(gates)
        given = inspect.signature(gates).parameters
        optional = {name for name in tensors.names if given[name].default is None}
        name, loops = gates.__name__, (loop, normalized_loop)
        this = Rule(name, gates, tensors, optional, *loops, every, corrects)
        compute = functools.partial(call, this)
        made = operation.public(gates, RuleOptions, DEFAULTS, compute)
        made.forms, made.rule = every, this
        made.one_token = functools.partial(one_token, this)
        return made

    return decorate


def call(rule: Rule, given: dict[str, Any]) -> Any:
    """Check the arguments of a rule, compute it, and mask its outputs."""
    x = {
        name: given[name]
        for name in rule.tensors.names
        if given[name] is not None or name not in rule.optional
    }
    sizes, dtype, wanted = check(rule, x, given)
    given_x, mask, state = x, given["key_mask"], given["state"]
    borders = given["cu_seqlens"]
    return_state, normalize = given["return_state"], given.get("normalize", False)
    scale = given["scale"]
    if borders is not None and (state is not None or return_state):
        return map_documents(rule, given, x)
    W, z = start(rule.name, state, normalize, sizes, dtype, x["q"])
    y_dtype, group = x["v"].dtype, max(sizes["queries"] // max(sizes["heads"], 1), 1)
    first = None if borders is None else first_steps(borders, sizes["time"])
    # Autograd differentiates a single chunk, but not in full precision under autocast.
    alone = state is None and not return_state and not has_autocast(x["q"])
    with full_precision(x["q"]):
        x = prepare(rule, x, mask, normalize, dtype, group)
        if normalize and rule.corrects and is_faint(x):
            x, W = {n: part.double() for n, part in x.items()}, W.double()
            z = z if z is None else z.double()
        if group > 1:
            W = W.repeat_interleave(group, 1)
            z = z if z is None else z.repeat_interleave(group, 1)
        if sizes["time"] == 0:
            y, W, z = no_steps(x, dtype), W.clone(), z if z is None else z.clone()
        elif wanted == "naive" or not all(part.numel() for part in x.values()):
            y, W, z = naive(rule, x, W, z, mask, first)
        else:
            inputs = recurrence(rule, x, normalize, mask, first)
            form = operation.choose(rule.name, rule.forms, wanted, inputs.q, inputs)
            y, W, z = form(inputs, W, z, alone)
            y = y if y.shape[1] == sizes["time"] else last_steps(y, sizes["time"])
        if borders is not None and operation.is_known(y) and not y.isfinite().all():
            return map_documents(rule, given, given_x)  # 0 times infinity is NaN.
        y = y if mask is None else masked(y, mask)
        y = (y if scale is None else scaled(y, scale, normalize)).to(y_dtype)
    if not return_state:
        return y
    # The states of a group are equal. Callers may edit the state, so it is a clone.
    W, *sums = (
        (s[:, ::group].clone() if s.requires_grad or group > 1 else s).to(dtype)
        for s in (W, z)
        if s is not None
    )
    return y, NormalizedState(W, *sums) if sums else W


def one_token(
    rule: Rule, state: State, normalize: bool = False, **x: Tensor
) -> tuple[Tensor, State]:
    """Compute one step of a rule without checks, in a third of the time.

    - `state`: the state that a call with `return_state` has returned.
    - `x`: the tensors of the rule by name, without gradients, in the dtype of the state.
    - Returns `(y, state)`.
    """
    W, z = state if isinstance(state, NormalizedState) else (state, None)
    dtype = W.dtype
    if normalize and rule.corrects:
        x["q"] = unit_range(x["q"])
        if z is not None and is_faint(x):
            x, W = {n: part.double() for n, part in x.items()}, W.double()
            z = z.double()
    inputs = recurrence(rule, x, normalize, None, None)
    y, W, *sums = rule.forms["efficient"](inputs, W, z, False)
    y, W = (y if y.shape[1] == 1 else last_steps(y, 1)).to(dtype), W.to(dtype)
    return y, NormalizedState(W, sums[0].to(dtype)) if normalize else W


def can_continue(
    state: Any, shape: tuple[int, ...], like: Tensor, normalize: bool = False
) -> bool:
    """Return True if `one_token` supports a state and an input.

    - `shape`: the shape of `W`; `like`: a tensor of its dtype, on its device.
    """
    if torch.is_grad_enabled() or is_transformed() or is_traced(like):
        return False
    if normalize != isinstance(state, NormalizedState):
        return False
    parts = state if normalize else (state,)
    shapes = shape, (*shape[:2], shape[3])
    return all(
        operation.is_like(part, wanted, like.dtype, like.device)
        for part, wanted in zip(parts, shapes, strict=False)
    )


def check(
    rule: Rule, x: dict[str, Any], given: dict[str, Any]
) -> tuple[dict[str, int], torch.dtype, str]:
    """Check all arguments of a rule; return sizes, dtype and implementation."""
    op = rule.name
    sizes = operation.match(op, x, rule.tensors.names)
    if sizes["queries"] != sizes["heads"]:
        operation.queries_per_head(op, sizes["queries"], sizes["heads"])
    dtype = operation.precision(op, x)
    for name in ("normalize", "return_state"):
        if not isinstance(given.get(name, False), bool):
            arguments.flags(op, **{name: given[name]})
    mask, borders = given["key_mask"], given["cu_seqlens"]
    if mask is not None:
        steps = {name: sizes[name] for name in ("batch", "time")}
        operation.check_mask(op, "key_mask", mask, x["q"], **steps)
    if given["scale"] is not None:
        operation.check_scale(op, given["scale"])
    if borders is not None:
        operation.check_borders(op, borders, x["q"])
    for name, bound in rule.tensors.ranges.items():
        if name in x:
            operation.check_range(op, name, masked(x[name], mask), bound)
    return sizes, dtype, operation.check_form(op, rule.forms, given["implementation"])


def prepare(
    rule: Rule,
    x: dict[str, Tensor],
    mask: Tensor | None,
    normalize: bool,
    dtype: torch.dtype,
    group: int,
) -> dict[str, Tensor]:
    """Mask inputs, convert gates to full precision, and repeat keys of grouped heads.

    Copies of the state of a group are exact in all implementations, at the cost of as
    many states as query heads.
    """
    if mask is not None:
        x = {name: masked(part, mask) for name, part in x.items()}
    # The exponential of a small logarithm would be rounded to 1 in half precision.
    x = {n: part if n in ("q", "k", "v") else part.to(dtype) for n, part in x.items()}
    if normalize:
        if x["q"].dtype == torch.float16:
            # Terms of a gradient may overflow float16 where their sum does not.
            x |= {n: finite_gradient(x[n]) for n in ("q", "k")}
            if not x["q"].is_cuda:  # Kernels take all inputs in one dtype.
                x |= {n: x[n].to(dtype) for n in ("q", "k")}
        x["q"] = unit_range(x["q"])  # The scale of a query cancels.
    if group > 1:
        dims = rule.tensors.names
        for name in [*x][1:]:
            x[name] = x[name].repeat_interleave(group, dims[name].index("heads"))
    return x


def is_faint(x: Mapping[str, Tensor]) -> bool:
    """Return True if fast weights may decay so far that float32 underflows.

    A key retrieves a quotient, in which the decay cancels, unless the decay is 0.
    """
    decay = x.get("log_decay")
    if decay is None or decay.dtype == torch.float64:
        return False
    if is_traced(decay):  # A traced tensor has no values.
        return True
    if not operation.is_known(decay):
        return False
    return bool(((decay < FAINT) & (decay > -torch.inf)).any())


def recurrence(
    rule: Rule, x: dict[str, Tensor], normalize: bool, mask: Any, first: Any
) -> Inputs:
    """Return the inputs of a rule's recurrence, with masks and borders applied.

    A masked step writes nothing and forgets nothing, whatever its gates. A document
    begins with a decay of 0, which is exact in all implementations.
    """
    made = rule.gates(**x)
    q, k, v = (
        x[name] if part is None else part
        for name, part in zip("qkv", (made.q, made.k, made.v), strict=True)
    )
    decay, erase_key = made.decay, made.erase_key
    for name, part in (("decay", decay), ("strength", made.strength)):
        if part is not None and part.dim() != 4:
            raise ValueError(
                f"{rule.name}: expected {name} of its Inputs of shape [batch, time, "
                f"heads, 1 or key], got {[*part.shape]}"
            )
    if normalize and rule.corrects:
        erase_key = unit_range(k)
    if mask is not None or first is not None:
        steps = k.shape[1] // x["q"].shape[1]
        if mask is not None:
            real = mask if steps == 1 else mask.repeat_interleave(steps, 1)
            k = masked(k, real)
            decay = None if decay is None else masked(decay, real, 1)
        if first is not None:
            inner = torch.zeros(k.shape[1], dtype=torch.bool, device=k.device)
            inner[::steps] = first
            inner = inner.view(1, -1, 1, 1)
            decay = v.new_ones(*k.shape[:3], 1) if decay is None else decay
            decay = decay.masked_fill(inner, 0)
            if made.early:  # The erase key reads before the decay.
                erase_key = (k if erase_key is None else erase_key).masked_fill(
                    inner, 0
                )
    return Inputs(decay, made.strength, erase_key, q, k, v, made.early)


def naive(
    rule: Rule, x: dict[str, Tensor], W: Tensor, z: Any, mask: Any, first: Any
) -> tuple[Any, ...]:
    """Call the loop of a rule, token by token with masks, documents or a log decay.

    The optional `log_decay` multiplies the fast weights before each token.
    """
    loop: Any = rule.loop if z is None else rule.normalized_loop
    memory = {"W": W} if z is None else {"W": W, "z": z}
    x = {name: part.to(W.dtype) for name, part in x.items()}
    if z is not None and rule.corrects:
        x["ask"] = unit_range(x["k"])
    fading = None
    if "log_decay" in rule.optional:
        fading = factor(x.pop("log_decay", None))
    if mask is None and first is None and fading is None:
        y, *after = loop(**x, **memory)
        return y, *after, *[None] * (z is None)
    ys, decays = [], [] if fading is None else fading.unbind(1)
    tokens = zip(*(part.split(1, 1) for part in x.values()), strict=True)
    for t, token in enumerate(tokens):
        if first is not None:
            memory = {n: s.masked_fill(first[t], 0) for n, s in memory.items()}
        if fading is not None:
            W, *sums = memory.values()
            faded = W * decays[t].unsqueeze(-2), *[z * decays[t] for z in sums]
            memory = dict(zip(memory, faded, strict=True))
        y, *after = loop(**dict(zip(x, token, strict=True)), **memory)
        ys.append(y)
        if mask is not None:
            after = [
                torch.where(mask[:, t].view(-1, *[1] * (s.dim() - 1)), s, before)
                for s, before in zip(after, memory.values(), strict=True)
            ]
        memory = dict(zip(memory, after, strict=True))
    return torch.cat(ys, 1), memory["W"], memory.get("z")


def map_documents(rule: Rule, given: dict[str, Any], x: dict[str, Tensor]) -> Any:
    """Call a rule once for each packed document, with a separate state."""

    def document(**own: Any) -> Any:
        return call(rule, {**given, "cu_seqlens": None, **own})

    steps, wanted = {**x, "key_mask": given["key_mask"]}, given["return_state"]
    made = operation.map_documents(
        rule.name, document, given["cu_seqlens"], steps, given["state"], wanted
    )
    return made if wanted else made[0]


def start(
    op: str,
    state: Any,
    normalize: bool,
    sizes: Mapping[str, int],
    dtype: torch.dtype,
    like: Tensor,
) -> tuple[Tensor, Tensor | None]:
    """Check the given state or make a state of zeros; return `W`, and `z` or None."""
    W = sizes["batch"], sizes["heads"], sizes["value"], sizes["key"]
    z = W[0], W[1], W[3]
    if state is None:
        empty = like.new_zeros(z, dtype=dtype) if normalize else None
        return like.new_zeros(W, dtype=dtype), empty
    if not normalize:
        if isinstance(state, tuple):
            raise TypeError(
                f"{op}: expected a state without normaliser for normalize=False, got "
                f"a {type(state).__name__}"
            )
        operation.check_part(op, "state", state, W, dtype, like)
        return state, None
    return operation.check_parts(op, state, NormalizedState, (W, z), like, dtype)


def scaled(y: Tensor, scale: float | Tensor, normalize: bool) -> Tensor:
    """Multiply outputs by `scale`; if normalised, only a scale of 0 has an effect."""
    if normalize:
        scale = torch.as_tensor(scale, device=y.device).sign().abs()
    return y * (scale.reshape(()) if isinstance(scale, Tensor) else scale)


def first_steps(borders: Tensor, time: int) -> Tensor:
    """Return a mask of the first steps of documents, `bool [time]`."""
    first = torch.zeros(time + 1, dtype=torch.bool, device=borders.device)
    return first.index_fill(0, borders[:-1].long(), True)[:time]


def no_steps(x: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
    """Return an output without steps that gives every input a gradient of zeros."""
    y = x["q"].new_zeros(*x["q"].shape[:3], x["v"].shape[-1], dtype=dtype)
    return y + sum(part.sum().to(dtype) for part in x.values())


def last_steps(y: Tensor, time: int) -> Tensor:
    """Return the output of the last step of each token, `[batch, time, ...]`."""
    steps = y.shape[1] // time
    return y if steps == 1 else y[:, steps - 1 :: steps]


def in_turn(*parts: Tensor) -> Tensor:
    """Interleave tensors along time: several steps per token, `[batch, time, ...]`."""
    return torch.stack(parts, 2).flatten(1, 2)


def factor(log_decay: Tensor | None) -> Tensor | None:
    """Exponentiate a log decay; return `[batch, time, heads, 1 or key]`."""
    if log_decay is None:
        return None
    decay = log_decay.exp()
    return decay if decay.dim() == 4 else decay.unsqueeze(-1)
