"""What the kernels must compute: every operation, with states."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fwlab import ops
from fwlab.feature_maps import l2_normalize
from fwlab.ops.call.rule import Rule

#: Maximum relative error of an output, a state or a gradient.
LIMITS = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1e-2}

#: Name -> tensor; names that begin with "state" keep full precision.
Tensors = dict[str, Tensor]


class Problem(NamedTuple):
    """One operation at one size.

    - `op`, `note`: the operation, and what is special about the problem.
    - `shape`: as the table prints it.
    - `draw`: draws the inputs with a generator.
    - `call`: computes outputs; takes an implementation and the inputs.
    - `cancels`: tensors that are small differences of large terms, and how
      many times larger the terms are: errors are relative to these.
    """

    op: str
    note: str
    shape: dict[str, int]
    draw: Callable[[torch.Generator], Tensors]
    call: Callable[[str, Tensors], Tensors]
    cancels: Mapping[str, float] = MappingProxyType({})

    @property
    def key(self) -> str:
        sizes = (f"{name}{size}" for name, size in self.shape.items())
        return " ".join(filter(None, [self.op, self.note, *sizes]))


def of(op: str, *, quick: bool = False) -> list[Problem]:
    """The problems of one operation; if `quick`, only the first two."""
    found = list(PROBLEMS[op]())
    return found[:2] if quick else found


def _rules(op: str) -> Iterable[Problem]:
    """Full and partial chunks; each width has a kernel of its own.

    The additive rules mostly with a normaliser; the kernels of the delta
    rules have none.
    """
    note = "" if RULES[op].corrects else "normalised"
    yield _rule(op, note, 2, 130, 3, 64, 64)
    yield _rule(op, note, 1, 77, 2, 24, 40)
    yield _rule(op, note, 1, 1, 2, 64, 64)
    yield _rule(op, note, 1, 1024, 2, 64, 64)
    if note:
        yield _rule(op, "", 2, 130, 3, 64, 64)
        yield _rule(op, "", 1, 77, 2, 24, 40)
    if op == "gated_rule":
        return
    yield _rule(op, note, 1, 200, 2, 128, 128)
    if "delta" in op:  # short sequences have their own kernel
        yield _rule(op, note, 2, 50, 2, 32, 64)
        yield _rule(op, note, 1, 150, 2, 384, 64)
    if op == "delta_rule":
        yield _rule(op, note, 1, 4096, 1, 64, 64)


#: With a normaliser, dq is the sum of weights times dy (v - y) times keys.
#: An error of y changes it by the error of dy y times z over the denominator.
#: Keys are positive here and have much of their direction in common, so this
#: product is 2 (sum rule) to 4 times (gated rule) as large as dq, and rounding
#: adds an error in proportion. The analysis would allow 4; 2 is enough: the
#: largest error of the compiled kernels in bfloat16, in an emulator, was 1.2e-2
#: of dq itself. The backward pass of FlashAttention subtracts dy y in the same
#: way.
NORMALISED = {"d q": 2.0}

RULES = {name: record for name, record in ops.TABLE.items() if isinstance(record, Rule)}


def _rule(
    op: str, note: str, batch: int, time: int, heads: int, key: int, value: int
) -> Problem:
    """Keys of length 1, strengths that include 0 and 1; with a normaliser,
    positive features.
    """
    normalize = note == "normalised"

    def draw(generator: torch.Generator) -> Tensors:
        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        x: Tensors = {}
        for name in ("q", "k"):
            x[name] = l2_normalize(random(batch, time, heads, key))
            if normalize:
                x[name] = x[name].abs() + 0.05
        x["v"] = random(batch, time, heads, value)
        gates = RULES[op].required
        if "beta" in gates:
            x["beta"] = torch.sigmoid(random(batch, time, heads))
            x["beta"][:, 3::7], x["beta"][:, 5::11] = 0, 1
        if "log_decay" in gates:
            x["log_decay"] = -0.1 * torch.sigmoid(random(batch, time, heads))
            x["log_decay"][:, 4::9], x["log_decay"][:, 40::60] = 0, -torch.inf
        x["state.W"] = random(batch, heads, value, key) / key**0.5
        if normalize:
            x["state.z"] = 1 + torch.rand(batch, heads, key, generator=generator)
        return x

    def call(implementation: str, x: Tensors) -> Tensors:
        given = [x[n] for n in ("q", "k", "v", "beta", "log_decay") if n in x]
        state: Any = x["state.W"]
        if normalize:
            state = ops.NormalizedState(state, x["state.z"])
        y, state = getattr(ops, op)(
            *given,
            normalize=normalize,
            state=state,
            return_state=True,
            implementation=implementation,
        )
        if normalize:
            return {"y": y, "state.W": state.W, "state.z": state.z}
        return {"y": y, "state.W": state}

    sizes = {"batch": batch, "T": time, "heads": heads, "K": key, "V": value}
    return Problem(op, note, sizes, draw, call, NORMALISED if normalize else {})


def _dpfp() -> Iterable[Problem]:
    for batch, time, heads, d, value, nu in (
        (2, 130, 2, 64, 64, 3),
        (1, 77, 3, 16, 40, 1),
        (1, 50, 2, 32, 32, 2),
        (1, 1024, 1, 64, 64, 3),
    ):
        yield _features(batch, time, heads, d, value, nu)


def _features(
    batch: int, time: int, heads: int, d: int, value: int, nu: int
) -> Problem:
    def draw(generator: torch.Generator) -> Tensors:
        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        x = {
            name: random(batch, time, heads, width)
            for name, width in (("q", d), ("k", d), ("v", value))
        }
        x["beta"] = torch.sigmoid(random(batch, time, heads))
        x["state.W"] = random(batch, heads, value, 2 * d * nu)
        return x

    def call(implementation: str, x: Tensors) -> Tensors:
        y, W = ops.dpfp_delta_rule(
            x["q"],
            x["k"],
            x["v"],
            x["beta"],
            nu,
            state=x["state.W"],
            return_state=True,
            implementation=implementation,
        )
        return {"y": y, "state.W": W}

    sizes = {"batch": batch, "T": time, "heads": heads, "d": d, "V": value, "nu": nu}
    return Problem("dpfp_delta_rule", "", sizes, draw, call)


def _aft(op: str) -> Iterable[Problem]:
    if op == "aft_conv":
        yield _aft_problem(op, "", 2, 130, 64, 32, heads=2)
        yield _aft_problem(op, "one key channel", 1, 77, 60, 16, heads=3)
        yield _aft_problem(op, "", 1, 1, 64, 16, heads=2)
        yield _aft_problem(op, "", 1, 700, 64, 64, heads=1)
        yield _aft_problem(op, "large keys", 1, 130, 64, 32, heads=2)
        return
    yield _aft_problem(op, "", 2, 130, 64, 32)
    yield _aft_problem(op, "", 3, 77, 40, 16)
    yield _aft_problem(op, "", 1, 1, 40, 16)
    yield _aft_problem(op, "", 1, 700, 64, 64)
    yield _aft_problem(op, "large keys", 1, 130, 64, 32)


def _aft_problem(
    op: str,
    note: str,
    batch: int,
    time: int,
    width: int,
    window: int,
    heads: int = 1,
) -> Problem:
    """With a state; large keys overflow unless a maximum is subtracted."""
    conv, full = op == "aft_conv", op == "aft_full"
    large = 20.0 if note == "large keys" else 1.0
    past = window - 1

    def draw(generator: torch.Generator) -> Tensors:
        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        rows = (batch, time, heads, width // heads) if conv else (batch, time, width)
        one = "one" in note
        x = {"q": random(*rows), "v": random(*rows)}
        x["k"] = large * random(*rows[:-1], 1 if one else rows[-1])
        if full:
            x["bias"] = random(time, past + time)
        elif conv:
            x["kernel"] = random(heads, window)
        elif op == "aft_local":
            x["band"] = random(time, window)
        if op != "aft_simple":
            x["state.k"] = large * random(batch, past, width)
            x["state.v"] = random(batch, past, width)
        if not full:
            x["state.log_sum"] = 2 + random(batch, width)
            x["state.mean"] = random(batch, width)
        return x

    def call(implementation: str, x: Tensors) -> Tensors:
        names = ("q", "k", "v", "bias", "band", "kernel")
        given = [x[name] for name in names if name in x]
        kind: Any = ops.WindowState
        if op == "aft_simple":
            kind = ops.RunningMean
        elif full:
            kind = ops.KeysAndValues
        y, state = getattr(ops, op)(
            *given,
            state=kind(**{name: x[f"state.{name}"] for name in kind._fields}),
            return_state=True,
            implementation=implementation,
        )
        return {"y": y, **{f"state.{n}": s for n, s in state._asdict().items()}}

    sizes = {"batch": batch, "T": time, "width": width}
    if conv:
        sizes["heads"] = heads
    if op in ("aft_local", "aft_conv"):
        sizes["window"] = window
    return Problem(op, note, sizes, draw, call)


def feedback_weights(
    random: Callable[..., Tensor], layers: int, groups: int, d: int, heads: int
) -> Tensors:
    """Weights that keep the residual stream and the scores in range.

    - `random(*shape, into=n)`: standard deviation $n^{-1/2}$.
    """
    key = d // heads
    return {
        "merge": random(layers + 1),
        "norm_mixer": 1 + 0.1 * random(layers, d),
        "to_q": random(layers, d, d, into=d),
        "to_k": random(groups, d, d, into=d),
        "to_v": random(groups, d, d, into=d),
        "positions": random(key, key, into=key),
        "to_out": random(layers, d, d, into=d),
        "norm_mlp": 1 + 0.1 * random(layers, d),
        "expand": random(layers, 4 * d, d, into=d),
        "contract": random(layers, d, 4 * d, into=4 * d),
        "norm_memory": 1 + 0.1 * random(groups, d),
    }


def _feedback() -> Iterable[Problem]:
    yield _stack(2, 40, 2, 2, 64, 4)
    yield _stack(1, 33, 3, 1, 64, 2)
    yield _stack(3, 130, 2, 1, 128, 4)


def _stack(
    batch: int, time: int, layers: int, groups: int, d: int, heads: int
) -> Problem:
    past = 5

    def draw(generator: torch.Generator) -> Tensors:
        def random(*shape: int, into: int = 1) -> Tensor:
            return torch.randn(shape, generator=generator) / into**0.5

        kept = (batch, past, groups, heads, d // heads)
        return {
            "x": random(batch, time, d),
            **feedback_weights(random, layers, groups, d, heads),
            "state.k": random(*kept),
            "state.v": random(*kept),
        }

    def call(implementation: str, x: Tensors) -> Tensors:
        weights = {name: x[name] for name in ops.FeedbackWeights._fields}
        y, state = ops.feedback(
            x["x"],
            ops.FeedbackWeights(**weights),
            heads=heads,
            state=ops.FeedbackState(x["state.k"], x["state.v"], None),
            return_state=True,
            implementation=implementation,
        )
        return {"y": y, "state.k": state.k, "state.v": state.v}

    sizes = {"batch": batch, "T": time, "layers": layers, "groups": groups}
    return Problem("feedback", "", sizes | {"width": d, "heads": heads}, draw, call)


#: Operation -> its problems, in the order of the report.
PROBLEMS: dict[str, Callable[[], Iterable[Problem]]] = {
    **{
        name: partial(_rules, name)
        for name, record in RULES.items()
        if "triton" in record.implementations
    },
    "dpfp_delta_rule": _dpfp,  # makes its features itself
    **{
        name: partial(_aft, name)
        for name in ("aft_simple", "aft_full", "aft_local", "aft_conv")
    },
    "feedback": _feedback,
}
