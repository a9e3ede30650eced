"""Cases on a GPU: operations at a size, and their implementations."""

from collections.abc import Callable
from functools import partial
from importlib import metadata
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fwlab import ops
from fwlab.bench.aft import conv_dense, full_dense, local_dense
from fwlab.bench.gpu.problems import feedback_weights
from fwlab.feature_maps import DPFP, l2_normalize, sum_normalize
from fwlab.ops.call import measured

FWLAB, FLA = measured.OURS, measured.OTHERS
ATTENTION, DENSE = "PyTorch attention", "dense form"
NAIVE, EFFICIENT = "naive loop", "fwlab efficient"
MATERIALISED = "materialised features"

#: One way to compute a case: outputs from inputs.
Function = Callable[..., Tensor]

CHUNK = 64  # steps per chunk, in the floors
SHARES = 3  # processes that compile a side with many configurations
BACKWARD = 2.5  # floating-point operations, backward pass over forward pass


class Side(NamedTuple):
    """One way to compute a case.

    - `load`: returns the function; fails if a package is not installed.
    - `time`: number of steps to measure; None = that of the case.
    - `package`: the package whose version the row reports.
    - `compiles`: number of processes that share the compilation of its
      kernels at the first call; 0 = there are none.
    - `same`: computes the same function, so that it has an error.
    """

    load: Callable[[], Function]
    time: int | None = None
    package: str | None = None
    compiles: int = 0
    same: bool = True

    def version(self) -> str | None:
        if self.package is None:
            return None
        # fla-core contains only the operations.
        for name in (self.package, "fla-core"):
            try:
                return metadata.version(name)
            except metadata.PackageNotFoundError:
                continue
        return None


class Floor(NamedTuple):
    """The minimum of data movement and computation, per pass.

    Each pair is (forward, backward): bytes moved to and from HBM, each
    once (including one state per chunk), and floating-point operations.
    """

    bytes: tuple[float, float]
    operations: tuple[float, float]

    def milliseconds(self, rates: dict[str, Any]) -> float | None:
        """Per pass, the longer of data movement and computation; the sum."""
        copy, matrix = rates.get("copy_gb_per_s"), rates.get("matrix_tflop_per_s")
        if not copy or not matrix:
            return None
        return sum(
            max(b / (1e6 * copy), n / (1e9 * matrix))
            for b, n in zip(self.bytes, self.operations, strict=True)
        )


class Case(NamedTuple):
    """An operation at one size.

    - `draw`: inputs from a generator on the device and a number of steps.
    - `piece`: an independent part of the inputs, on which the error is
      computed, with gradients of the first `compared` inputs.
    - `exact`: the function that computes this part in float64.
    """

    name: str
    shape: dict[str, int]
    draw: Callable[[torch.Generator, int], list[Tensor]]
    sides: dict[str, Side]
    floor: Floor | None
    piece: Callable[[list[Tensor]], list[Tensor]]
    compared: int
    exact: Function

    @property
    def key(self) -> str:
        return " ".join([self.name, *(f"{n}{s}" for n, s in self.shape.items())])


def _op(name: str, implementation: str, **more: Any) -> Callable[[], Function]:
    """A loader for an operation of fwlab."""
    return lambda: partial(getattr(ops, name), implementation=implementation, **more)


def _fla_delta() -> Function:
    from fla.ops.delta_rule import chunk_delta_rule

    # Its default scale is K ** -0.5; a state is [batch, heads, K, V].
    return lambda q, k, v, beta: chunk_delta_rule(q, k, v, beta, scale=1.0)[0]


def _fla_dpfp(nu: int) -> Function:
    phi, delta = DPFP(nu), _fla_delta()
    return lambda q, k, v, beta: delta(
        sum_normalize(phi(q)), sum_normalize(phi(k)), v, beta
    )


def _fla_gated_delta() -> Function:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    return lambda q, k, v, beta, log_decay: chunk_gated_delta_rule(
        q, k, v, g=log_decay, beta=beta, scale=1.0
    )[0]


def _fla_linear() -> Function:
    from fla.ops.linear_attn import chunk_linear_attn

    return lambda q, k, v: chunk_linear_attn(q, k, v, scale=1.0, normalize=True)[0]


def _attention(q: Tensor, k: Tensor, v: Tensor, *_: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def _rule(op: str, batch: int, time: int, heads: int, width: int) -> Case:
    """A fast weight rule in bfloat16, keys and values of equal width."""
    normalize = op == "sum_rule"

    def draw(generator: torch.Generator, time: int) -> list[Tensor]:
        def random(*more: int) -> Tensor:
            shape, where = (batch, time, heads, *more), generator.device
            return torch.randn(shape, generator=generator, device=where)

        q, k = (l2_normalize(random(width)) for _ in range(2))
        if normalize:  # positive: they are divided by
            q, k = q.abs() + 0.05, k.abs() + 0.05
        inputs = [q, k, random(width)]
        if op != "sum_rule":
            inputs.append(torch.sigmoid(random()))
        inputs = [x.bfloat16() for x in inputs]
        if op == "gated_delta_rule":  # fla needs it in full precision
            inputs.append(-0.1 * torch.sigmoid(random()))
        return inputs

    others: dict[str, Callable[[], Function]] = {
        "delta_rule": _fla_delta,
        "gated_delta_rule": _fla_gated_delta,
        "sum_rule": _fla_linear,
    }
    # The gated rule has no target, so it must not delay those that have.
    shares = 0 if op == "gated_delta_rule" else SHARES
    n, chunks = batch * time * heads, batch * heads * time / CHUNK
    gates = {"sum_rule": 0, "delta_rule": 2, "gated_delta_rule": 6}[op]
    state = 2 * chunks * width * width
    per_step = 6 * CHUNK * width + 6 * width**2
    if normalize:
        per_step = 4 * CHUNK * width + 4 * width**2
    else:
        per_step += 4 * CHUNK * width  # the triangular system
    floor = Floor(
        (
            n * (2 * 4 * width + gates) + state,
            n * (2 * 7 * width + 2 * gates) + state,
        ),
        (n * per_step, BACKWARD * n * per_step),
    )
    more = {"normalize": normalize}
    return Case(
        op,
        {"batch": batch, "T": time, "heads": heads, "width": width},
        draw,
        {
            FWLAB: Side(_op(op, "triton", **more), compiles=1),
            FLA: Side(others[op], package=FLA, compiles=shares),
            ATTENTION: Side(lambda: _attention, same=False),
            EFFICIENT: Side(_op(op, "efficient", **more)),
            NAIVE: Side(_op(op, "naive", **more), time=min(time, 256)),
        },
        floor,
        piece=lambda inputs: [x[:1, :, :1] for x in inputs],
        compared=5,
        exact=_op(op, "efficient", **more)(),
    )


def _dpfp(batch: int, time: int, heads: int, d: int, nu: int) -> Case:
    """DPFP computed in the kernel, against features in HBM."""

    def draw(generator: torch.Generator, time: int) -> list[Tensor]:
        def random(*more: int) -> Tensor:
            shape, where = (batch, time, heads, *more), generator.device
            return torch.randn(shape, generator=generator, device=where)

        inputs = [random(d), random(d), random(d), torch.sigmoid(random())]
        return [x.bfloat16() for x in inputs]

    def materialised() -> Function:
        phi, delta = DPFP(nu), _op("delta_rule", "triton")()
        return lambda q, k, v, beta: delta(
            sum_normalize(phi(q)), sum_normalize(phi(k)), v, beta
        )

    plain = _op("dpfp_delta_rule", "efficient", nu=nu)
    n, width = batch * time * heads, 2 * d * nu
    state = 2 * n / CHUNK * d * width
    per_step = CHUNK * (6 * width + 4 * d) + 6 * width * d
    return Case(
        "dpfp_delta_rule",
        {"batch": batch, "T": time, "heads": heads, "d": d, "nu": nu},
        draw,
        {
            FWLAB: Side(_op("dpfp_delta_rule", "triton", nu=nu), compiles=1),
            MATERIALISED: Side(materialised, compiles=1),
            FLA: Side(lambda: _fla_dpfp(nu), package=FLA),
            EFFICIENT: Side(plain),
        },
        Floor(
            (n * (8 * d + 2) + state, n * (14 * d + 4) + state),
            (n * per_step, BACKWARD * n * per_step),
        ),
        piece=lambda inputs: [x[:1, :, :1] for x in inputs],
        compared=4,
        exact=plain(),
    )


def _aft(
    op: str, batch: int, time: int, width: int, window: int = 0, heads: int = 0
) -> Case:
    """AFT in bfloat16, including the biases, which are parameters."""

    def draw(generator: torch.Generator, time: int) -> list[Tensor]:
        def random(*shape: int) -> Tensor:
            where = generator.device
            return torch.randn(shape, generator=generator, device=where).bfloat16()

        rows = (batch, time, heads, width // heads) if heads else (batch, time, width)
        inputs = [random(*rows) for _ in range(3)]
        if op == "aft_full":
            inputs.append(random(time, time))
        elif window:
            inputs.append(random(heads or time, window))
        return inputs

    def dense() -> Function:
        if op == "aft_simple":

            def without_bias(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                return full_dense(q, k, v, q.new_zeros(q.shape[1], q.shape[1]))

            return without_bias
        return {
            "aft_full": full_dense,
            "aft_local": local_dense,
            "aft_conv": conv_dense,
        }[op]

    def piece(inputs: list[Tensor]) -> list[Tensor]:
        if heads:
            return [*(x[:1, :, :1] for x in inputs[:3]), inputs[3][:1]]
        return [*(x[:1, :, :8] for x in inputs[:3]), *inputs[3:]]

    n = batch * time * width
    bias = 2 * {"aft_simple": 0, "aft_full": time**2}.get(op, (heads or time) * window)
    per_scalar = 4.0 * {"aft_simple": 0, "aft_full": time / 2}.get(op, window)
    shape = {"batch": batch, "T": time, "width": width}
    if heads:
        shape["heads"] = heads
    if window:
        shape["window"] = window
    return Case(
        op,
        shape,
        draw,
        {
            FWLAB: Side(_op(op, "triton"), compiles=1),
            DENSE: Side(dense),
            EFFICIENT: Side(_op(op, "efficient")),
            NAIVE: Side(_op(op, "naive"), time=min(time, 128)),
        },
        Floor(
            (8 * n + bias, 14 * n + 2 * bias),
            (n * per_scalar, BACKWARD * n * per_scalar),
        ),
        piece,
        compared=3,
        exact=_op(op, "efficient")(),
    )


def _feedback(batch: int, time: int, layers: int, width: int, heads: int) -> Case:
    def draw(generator: torch.Generator, time: int) -> list[Tensor]:
        def random(*shape: int, into: int = 1) -> Tensor:
            where = generator.device
            x = torch.randn(shape, generator=generator, device=where)
            return x / into**0.5

        weights = feedback_weights(random, layers, layers, width, heads)
        inputs = [random(batch, time, width)]
        inputs += [weights[name] for name in ops.FeedbackWeights._fields]
        return [x.bfloat16() for x in inputs]

    def stack(implementation: str) -> Function:
        return lambda x, *weights: ops.feedback(
            x,
            ops.FeedbackWeights(*weights),
            heads=heads,
            implementation=implementation,
        )

    return Case(
        "feedback",
        {
            "batch": batch,
            "T": time,
            "layers": layers,
            "width": width,
            "heads": heads,
        },
        draw,
        {
            FWLAB: Side(lambda: stack("triton"), compiles=1),
            EFFICIENT: Side(lambda: stack("efficient")),
            NAIVE: Side(lambda: stack("naive")),
        },
        None,
        piece=lambda inputs: [inputs[0][:1], *inputs[1:]],
        compared=1,
        exact=stack("efficient"),
    )


#: The cases by key, in the order of measurement.
CASES: dict[str, Case] = {
    case.key: case
    for case in (
        _rule("delta_rule", 8, 4096, 16, 64),
        _rule("delta_rule", 8, 1024, 8, 64),
        _rule("delta_rule", 4, 512, 4, 32),
        _rule("delta_rule", 8, 4096, 16, 128),
        _dpfp(8, 4096, 16, 64, 3),
        _rule("sum_rule", 8, 4096, 16, 64),
        _aft("aft_simple", 32, 2048, 1024),
        _aft("aft_local", 32, 2048, 1024, 64),
        _aft("aft_conv", 32, 2048, 1024, 64, 16),
        _feedback(8, 512, 4, 256, 8),
        _aft("aft_simple", 4, 2048, 128),
        _aft("aft_local", 4, 2048, 128, 64),
        _aft("aft_conv", 4, 2048, 128, 64, 4),
        _aft("aft_full", 8, 2048, 512),
        _rule("gated_delta_rule", 8, 4096, 16, 64),
    )
}
QUICK = 3  # number of cases in a quick run
