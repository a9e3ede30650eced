"""fwlab next to what you would use instead of it, side by side.

Each row compares one operation, or one training step, with a peer: a
function of another package where that is installed, else the usual form,
written out here. Both sides are measured in turns in one process for each
way that threads can wait, and each side counts in the way that is best for
it; a ratio above 1 means that fwlab is faster.
"""

import statistics
import time
from collections.abc import Callable
from functools import partial
from importlib import metadata
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bench.settings import SETTINGS, busy_seconds, fresh
from fwlab import ops
from fwlab.bench import aft, mixers
from fwlab.bench.case import Case, Problem, Side, calls, layout
from fwlab.bench.measure import in_turns, peak_mib
from fwlab.exercises.solutions import modern_layer
from fwlab.feature_maps import DPFP, l2_normalize, sum_normalize

ROUNDS = 3
#: A row is measured again, up to this many times in all, while ...
ATTEMPTS = 3
#: ... its quartiles are further apart than this part of the median, or ...
WIDE = 0.2
#: ... other programs use more than this many cores.
OTHERS = 0.3
#: Of each side: on the clock, and of the processor for the main thread.
TIMES = ("milliseconds", "main_thread")
#: Packages whose versions are reported.
PACKAGES = ("transformers", "pytorch-fast-transformers")
FWLAB, HUGGING_FACE = "fwlab", "Hugging Face, Qwen3-Next"


class Goal(NamedTuple):
    """What a ratio has to be.

    - `must`, `aim`: what it has to reach, and should, each side at its best
      setting.
    - `always`: what it has to reach in every setting; 0 = anything.
    - `why`: the reason if it does not.
    """

    must: float
    aim: float
    always: float = 0.0
    why: str = ""


class Comparison(NamedTuple):
    """An operation at one size, and what to compare it with.

    - `name`, `shape`: the work, as the table prints it.
    - `problem`: inputs of a dtype, and a gradient of the output; None in
      its place = only forward, or the side does all itself.
    - `ours`, `theirs`: load both sides; `theirs` raises `ImportError` if
      its package is not installed.
    - `peer`: what `theirs` is.
    - `goal`: the ratio that fwlab has to reach.
    """

    name: str
    shape: dict[str, int]
    problem: Callable[[torch.dtype], Problem]
    ours: Callable[[], Side]
    peer: str
    theirs: Callable[[], Side]
    goal: Goal

    @property
    def key(self) -> str:
        """Work, shape and peer in one line."""
        shape = (f"{name}{size}" for name, size in self.shape.items())
        return " ".join([self.name, *shape, self.peer])


def _random(*shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def _leaves(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    return [x.to(dtype).requires_grad_() for x in tensors]


# The gated delta rule


def _gated(dtype: torch.dtype, *, shape: dict[str, int]) -> tuple[list[Tensor], Tensor]:
    B, T, H, K = shape.values()
    row, head = (B, T, H, K), (B, T, H)
    q, k, v, beta, decay, dy = _random(row, row, row, head, head, row)
    gates = [torch.sigmoid(beta), -0.1 * torch.sigmoid(decay)]
    return _leaves([q, k, v, *gates], dtype), dy.to(dtype)


def _our_gated_delta() -> Side:
    def run(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, decay: Tensor) -> Any:
        q, k, scale = l2_normalize(q), l2_normalize(k), q.shape[-1] ** -0.5
        return ops.gated_delta_rule(q, k, v, beta, decay, scale=scale)

    return run


def _their_gated_delta() -> Side:
    from transformers.models.qwen3_next import modeling_qwen3_next as theirs

    return lambda q, k, v, beta, decay: theirs.torch_chunk_gated_delta_rule(
        q, k, v, decay, beta, use_qk_l2norm_in_kernel=True
    )[0]


def gated_delta(B: int, T: int, H: int, K: int, goal: Goal) -> Comparison:
    """Forward and backward, with keys divided by their length."""
    shape = {"batch": B, "T": T, "heads": H, "width": K}
    problem = partial(_gated, shape=shape)
    sides = _our_gated_delta, HUGGING_FACE, _their_gated_delta
    return Comparison("gated delta rule", shape, problem, *sides, goal)


def _one_token(
    dtype: torch.dtype, *, shape: dict[str, int]
) -> tuple[list[Tensor], None]:
    """One step, and the state in both layouts."""
    B, H, K = shape.values()
    inputs, _ = _gated(dtype, shape={"B": B, "T": 1, "H": H, "K": K})
    (W,) = _random((B, H, K, K))
    states = [W.to(dtype), W.to(dtype).mT.contiguous()]
    return [*(x.detach() for x in inputs), *states], None


def _our_step() -> Side:
    @torch.no_grad()
    def run(q, k, v, beta, decay, W, _) -> tuple[Tensor, Tensor]:
        y, W = ops.gated_delta_rule(
            *(q, k, v, beta, decay),
            scale=q.shape[-1] ** -0.5,
            state=W,
            return_state=True,
        )
        return y, W.mT  # the peer's layout

    return run


def _their_step() -> Side:
    from transformers.models.qwen3_next import modeling_qwen3_next as theirs

    @torch.no_grad()
    def run(q, k, v, beta, decay, _, W) -> tuple[Tensor, Tensor]:
        return theirs.torch_recurrent_gated_delta_rule(
            *(q, k, v, decay, beta), initial_state=W, output_final_state=True
        )

    return run


def one_step(B: int, H: int, K: int, goal: Goal) -> Comparison:
    """One token, forward, state in and out."""
    shape = {"batch": B, "heads": H, "width": K}
    problem = partial(_one_token, shape=shape)
    sides = _our_step, HUGGING_FACE, _their_step
    return Comparison("a step of it", shape, problem, *sides, goal)


# The whole layer of Qwen3.5


def _layer(dtype: torch.dtype, *, shape: dict[str, int]) -> tuple[list[Tensor], Tensor]:
    """The input and the weights, in the order of `modern_layer`."""
    B, T, H, K = shape.values()
    d = H * K
    wide = [(3 * d, d), (3 * d, 4), (d, d), (H, d), (H, d), (d, d)]
    x, W_qkv, conv, W_z, W_b, W_a, W_out, dy = _random((B, T, d), *wide, (B, T, d))
    W_qkv, W_z, W_b, W_a, W_out = (W / d**0.5 for W in (W_qkv, W_z, W_b, W_a, W_out))
    small = [torch.zeros(H), torch.zeros(H), torch.ones(K)]  # A_log, dt_bias, norm
    weights = [W_qkv, conv / 2, W_z, W_b, W_a, *small, W_out]
    return _leaves([x, *weights], dtype), dy.to(dtype)


def _their_layer(shape: dict[str, int]) -> Side:
    from transformers.models.qwen3_5 import modeling_qwen3_5 as theirs
    from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig

    _, _, H, K = shape.values()
    config = Qwen3_5TextConfig(
        hidden_size=H * K,
        num_hidden_layers=1,
        layer_types=["linear_attention"],
        linear_num_key_heads=H,
        linear_num_value_heads=H,
        linear_key_head_dim=K,
        linear_value_head_dim=K,
    )
    layer = theirs.Qwen3_5GatedDeltaNet(config, 0)
    names = ("in_proj_qkv.weight", "conv1d.weight", "in_proj_z.weight")
    names += ("in_proj_b.weight", "in_proj_a.weight", "A_log", "dt_bias")
    names += ("norm.weight", "out_proj.weight")

    def run(x: Tensor, *weights: Tensor) -> Any:
        given = dict(zip(names, weights, strict=True))
        given["conv1d.weight"] = given["conv1d.weight"][:, None]
        return torch.func.functional_call(layer, given, (x,))

    return run


def qwen_layer(B: int, T: int, H: int, K: int, goal: Goal) -> Comparison:
    """The layer that notebook 16 builds of fwlab's parts, forward and backward."""
    shape = {"batch": B, "T": T, "heads": H, "width": K}
    return Comparison(
        "Qwen3.5's layer",
        shape,
        partial(_layer, shape=shape),
        lambda: partial(modern_layer, key_heads=H),
        "Hugging Face, Qwen3.5",
        partial(_their_layer, shape),
        goal,
    )


# A whole model of transformers, patched and as it is


class _Qwen(nn.Module):
    """A small random Qwen3.5: three layers with its rule, one with attention."""

    def __init__(self, H: int, K: int):
        super().__init__()
        from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

        config = Qwen3_5TextConfig(
            vocab_size=mixers.VOCAB,
            hidden_size=H * K,
            intermediate_size=3 * H * K,
            num_hidden_layers=4,
            num_attention_heads=H,
            num_key_value_heads=H,
            head_dim=K,
            linear_num_key_heads=H,
            linear_num_value_heads=H,
            linear_key_head_dim=K,
            linear_value_head_dim=K,
        )
        torch.manual_seed(0)
        self.model = Qwen3_5ForCausalLM(config)

    def forward(self, tokens: Tensor, **options: Any) -> Tensor:
        return self.model(tokens, **{"use_cache": False} | options).logits


def _prefill(make: Callable[[], _Qwen]) -> Side:
    return torch.no_grad()(partial(make(), use_cache=True))


def _decode(make: Callable[[], _Qwen]) -> Side:
    from transformers import DynamicCache

    model = make()

    @torch.no_grad()
    def run(tokens: Tensor) -> Tensor:
        cache = DynamicCache(config=model.model.config)
        options = {"cache": cache, "use_cache": True}
        return torch.cat([model(token, **options) for token in tokens.split(1, 1)], 1)

    return run


def _patched(load: Callable[[], Side]) -> Side:
    """The same, with fwlab's rule."""
    from fwlab import hf

    side = load()

    def run(*inputs: Tensor) -> Any:
        hf.patch()
        try:
            return side(*inputs)
        finally:
            hf.unpatch()

    return run


def qwen(work: str, T: int, H: int, K: int, goal: Goal) -> Comparison:
    """Qwen3.5 by transformers, with fwlab's rule and with its own.

    - `work`: "prefill", "decoding" (T tokens, one by one) or "training".
    """
    make = partial(_Qwen, H, K)
    load: Callable[[], Side] = {
        "prefill": partial(_prefill, make),
        "decoding": partial(_decode, make),
        "training": partial(mixers.Step, make, T),
    }[work]
    tokens = [] if work == "training" else [torch.arange(T)[None] % mixers.VOCAB]
    return Comparison(
        f"Qwen3.5, {work}",
        {"T": T, "heads": H, "width": K},
        lambda dtype: (tokens, None),
        partial(_patched, load),
        "Hugging Face, not patched",
        load,
        goal,
    )


# AFT


def _aft(
    dtype: torch.dtype, *, time: int, width: int, window: int | None
) -> tuple[list[Tensor], Tensor]:
    row = (4, time, width)
    q, k, v, bias, dy = _random(row, row, row, (time, window or time), row)
    return _leaves([q, k, v, bias], dtype), dy.to(dtype)


def aft_dense(time: int, width: int, window: int | None, goal: Goal) -> Comparison:
    """AFT-full, or AFT-local with a window, against a product with a T x T
    matrix that subtracts one maximum over all keys.
    """
    op: Any = ops.aft_local if window else ops.aft_full
    dense = aft.local_dense if window else aft.full_dense
    shape = {"T": time, "batch": 4, "width": width}
    return Comparison(
        "AFT-local" if window else "AFT-full",
        shape | ({"window": window} if window else {}),
        partial(_aft, time=time, width=width, window=window),
        lambda: op,
        "dense form, unstable",
        lambda: dense,
        goal,
    )


# The sum rule with a normaliser


def sum_chunks(q: Tensor, k: Tensor, v: Tensor, chunk: int = 64) -> Tensor:
    """Linear attention in chunks, all at once, for autograd.

    The states before all chunks are a cumulative sum; a column of ones
    beside `v` gives the normaliser.
    """
    v = F.pad(v, (0, 1), value=1.0)
    time, missing = q.shape[1], -q.shape[1] % chunk
    q, k, v = (
        F.pad(x, (0, 0, 0, 0, 0, missing)).unflatten(1, (-1, chunk)).transpose(2, 3)
        for x in (q, k, v)
    )
    W = k.mT @ v
    before = W.cumsum(1) - W
    y = (q @ k.mT).tril() @ v + q @ before
    y = y.transpose(2, 3).flatten(1, 2)[:, :time]
    return y[..., :-1] / y[..., -1:]


def _positive(
    dtype: torch.dtype, *, shape: dict[str, int]
) -> tuple[list[Tensor], Tensor]:
    row = tuple(shape.values())
    q, k, v, dy = _random(row, row, row, row)
    return _leaves([F.elu(q) + 1, F.elu(k) + 1, v], dtype), dy.to(dtype)


def _fast_transformers() -> Side:
    from fast_transformers.causal_product import causal_dot_product

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        total = torch.einsum("nthd,nthd->nth", q, k.cumsum(1))
        q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
        return causal_dot_product(q, k, v).transpose(1, 2) / total[..., None]

    return run


def normalized_sum(
    B: int, T: int, H: int, K: int, peer: str, theirs: Callable, goal: Goal
) -> Comparison:
    """Linear attention of ELU + 1 features, forward and backward."""
    shape = {"batch": B, "T": T, "heads": H, "width": K}
    problem = partial(_positive, shape=shape)
    ours: Any = partial(ops.sum_rule, normalize=True)
    name = "normalised sum rule"
    return Comparison(name, shape, problem, lambda: ours, peer, theirs, goal)


# Features


def _keys(dtype: torch.dtype, *, shape: dict[str, int]) -> tuple[list[Tensor], Tensor]:
    x, dy = _random(
        (*shape.values(),), (*list(shape.values())[:-1], 2 * shape["width"])
    )
    return _leaves([x], dtype), dy.to(dtype)


def dpfp_formula(x: Tensor) -> Tensor:
    """Eqs. 37 and 29 as they are written, for nu = 1."""
    r = torch.relu(torch.cat([x, -x], -1))
    phi = r * r.roll(-1, -1)
    return phi / phi.sum(-1, keepdim=True)


def dpfp(B: int, T: int, H: int, d: int, goal: Goal) -> Comparison:
    """DPFP features divided by their sum, forward and backward."""
    shape = {"batch": B, "T": T, "heads": H, "width": d}

    def ours() -> Side:
        phi = DPFP()
        return lambda x: sum_normalize(phi(x))

    theirs = "the formula, by autograd", lambda: dpfp_formula
    return Comparison(
        "DPFP, sum", shape, partial(_keys, shape=shape), ours, *theirs, goal
    )


# Training steps


class _Attention(nn.Module):
    """Causal attention with one projection for queries, keys and values."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.project = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def qkv(self, x: Tensor) -> list[Tensor]:
        """Queries, keys and values, each `[batch, heads, time, d]`."""
        return [
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.project(x).chunk(3, -1)
        ]

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class _Block(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width, bias=False) for _ in range(2))
        self.attention = _Attention(width, heads)
        self.expand = nn.Linear(width, 4 * width, bias=False)
        self.contract = nn.Linear(4 * width, width, bias=False)

    def mlp(self, x: Tensor) -> Tensor:
        """The second half."""
        return x + self.contract(F.gelu(self.expand(self.norms[1](x))))

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x + self.attention(self.norms[0](x)))


class NanoGPT(nn.Module):
    """A model of the form of nanoGPT: GPT-2 without biases.

    - `max_len`: the length of its position table.
    """

    def __init__(self, max_len: int = mixers.BLOCK) -> None:
        super().__init__()
        width = mixers.D_MODEL
        self.tokens = nn.Embedding(mixers.VOCAB, width)
        self.positions = nn.Embedding(max_len, width)
        self.blocks = nn.Sequential(
            *(_Block(width, mixers.HEADS) for _ in range(mixers.LAYERS))
        )
        self.norm = nn.LayerNorm(width, bias=False)
        self.head = nn.Linear(width, mixers.VOCAB, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def _training(name: str) -> Side:
    """A training step at nanoGPT's CPU size; "nanoGPT" is its own model."""
    make = NanoGPT if name == "nanoGPT" else partial(mixers.of, name)
    return mixers.Step(make)


def training(mixer: str, peer: str, goal: Goal) -> Comparison:
    """A step of training, of models with equally many parameters."""
    return Comparison(
        f"training, {mixer}",
        {"T": mixers.BLOCK, "batch": mixers.BATCH, "width": mixers.D_MODEL},
        lambda dtype: ([], None),
        partial(_training, mixer),
        f"{peer} model",
        partial(_training, peer),
        goal,
    )


#: What is left where a goal is missed.
GATED = "28 % of the time are products of chunks, which both sides need, 16 % copies"
STEP = "both are calls of Python and PyTorch: products and sums take 72 of 157 µs"
DELTA = "1,340 operators against 860: features by shifts, and a triangular solve"
SUM = "900 operators against 860, and features of queries and keys"
LOCAL = "not known: 215 operators against 296, and 1.05 in the run before"
SOFTMAX = "860 operators against 657, those of the optimiser included"
COMPARISONS = (
    gated_delta(1, 512, 4, 64, Goal(1.7, 2, 1.5, GATED)),
    gated_delta(1, 2048, 4, 64, Goal(2.6, 3, 1.8, GATED)),
    gated_delta(4, 1024, 4, 64, Goal(2.5, 3, 1.8, GATED)),
    gated_delta(1, 4096, 4, 128, Goal(3, 4)),
    one_step(4, 8, 64, Goal(1, 2, why=STEP)),
    qwen_layer(1, 512, 4, 64, Goal(1, 1.5)),
    qwen("prefill", 2048, 4, 64, Goal(1, 1.2)),
    qwen("decoding", 64, 4, 64, Goal(0.9, 1.1)),
    qwen("training", 2048, 4, 64, Goal(1.1, 1.3)),
    aft_dense(32, 128, 32, Goal(0.95, 1.2, why=LOCAL)),
    aft_dense(64, 128, 32, Goal(1, 1.2)),
    aft_dense(128, 128, 32, Goal(1, 1.2)),
    aft_dense(512, 128, 32, Goal(1, 2)),
    aft_dense(2048, 128, 32, Goal(3, 4)),
    aft_dense(128, 128, None, Goal(0.8, 1)),
    aft_dense(512, 128, None, Goal(0.8, 1)),
    normalized_sum(
        4, 2048, 4, 32, "chunks, by autograd", lambda: sum_chunks, Goal(1, 1.3)
    ),
    normalized_sum(
        4, 2048, 4, 32, "fast-transformers", _fast_transformers, Goal(1, 1.3)
    ),
    dpfp(12, 64, 4, 32, Goal(1, 2)),
    training("delta", "softmax", Goal(0.7, 0.8, why=DELTA)),
    training("sum", "softmax", Goal(1, 1, why=SUM)),
    training("aft-local", "softmax", Goal(0.6, 0.8)),
    training("softmax", "nanoGPT", Goal(1, 1.05, why=SOFTMAX)),
)


def case_of(comparison: Comparison) -> Case:
    """Both sides, loaded again; `ImportError` if a package is missing."""
    sides = {FWLAB: comparison.ours(), comparison.peer: comparison.theirs()}
    return Case(comparison.name, {}, comparison.problem, sides, rounds=ROUNDS)


def measured(key: str) -> dict[str, Any]:
    """Times of a comparison in this process, by side; see `times`."""
    (case,) = (case_of(c) for c in COMPARISONS if c.key == key)
    tries = []
    for _ in range(ATTEMPTS):
        tries.append(times(case))
        if not tries[-1]["wide"] and tries[-1]["others"] <= OTHERS:
            break
    return min(tries, key=lambda times: (times["others"] > OTHERS, times["wide"]))


def times(case: Case) -> dict[str, Any]:
    """Both sides in turns, in this process.

    - Returns a plain dict: "sides" has the median milliseconds of each on the
      clock and of the main thread; "wide" is whether the quartiles are far
      apart, "others" how many cores other programs used meanwhile.
    """
    spent: dict[str, list[float]] = {name: [] for name in case.sides}

    def timed(name: str, call: Callable[[], object]) -> Callable[[], None]:
        def run() -> None:
            start = time.thread_time()
            call()
            spent[name].append(time.thread_time() - start)

        return run

    runs = {name: timed(name, call) for name, call in calls(case).items()}
    start, own, all_ = time.perf_counter(), time.process_time(), busy_seconds()
    clock = in_turns(runs, case.rounds)
    passed, own = time.perf_counter() - start, time.process_time() - own
    others = 0.0 if all_ is None else (busy_seconds() or 0.0) - all_ - own
    quartiles = {name: statistics.quantiles(clock[name] * 2) for name in clock}
    return {
        "sides": [
            {
                "milliseconds": round(1e3 * quartiles[name][1], 3),
                "main_thread": round(1e3 * statistics.median(spent[name]), 3),
            }
            for name in clock
        ],
        "wide": any(high - low > WIDE * mid for low, mid, high in quartiles.values()),
        "others": round(max(others, 0.0) / passed, 2),
    }


def run(comparison: Comparison) -> dict[str, Any]:
    """Measure both sides: a plain dict, with a reason if that fails."""
    row: dict[str, Any] = {
        "work": comparison.name,
        "shape": comparison.shape,
        "peer": comparison.peer,
        **comparison.goal._asdict(),
        "reason": None,
    }
    del row["why"]
    try:
        case = case_of(comparison)
    except ImportError as error:
        return row | {"reason": f"{error.name or error} is not installed"}
    # Models that have not trained yet: the optimiser's state counts.
    peaks = [peak_mib(call) for call in calls(case).values()]
    row |= {"peak_mib": peaks[0], "peer_peak_mib": peaks[1]}
    row |= {"difference": difference(case)}
    settings = {
        name: fresh("peers", f"measured({comparison.key!r})", setting)
        for name, setting in SETTINGS.items()
    }
    row |= best(settings) | {"settings": settings}
    if row["ratio"] < row["must"] or row["worst"] < row["always"]:
        row["reason"] = comparison.goal.why or "not known"
    return row


def best(settings: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Each side at its best setting, and the ratios of all.

    - `settings`: see `times`.
    """
    row: dict[str, Any] = {}
    for side, whose in enumerate(("", "peer_")):
        by_setting = {name: m["sides"][side] for name, m in settings.items()}
        fastest = min(by_setting, key=lambda name: by_setting[name]["milliseconds"])
        row |= {whose + name: value for name, value in by_setting[fastest].items()}
        row[f"{whose}setting"] = fastest
    ratios = [
        theirs["milliseconds"] / ours["milliseconds"]
        for ours, theirs in (m["sides"] for m in settings.values())
    ]
    return row | {
        "ratio": round(row["peer_milliseconds"] / row["milliseconds"], 4),
        "worst": round(min(ratios), 4),
        "best": round(max(ratios), 4),
        "loaded": any(m["others"] > OTHERS for m in settings.values()),
        "wide": any(m["wide"] for m in settings.values()),
    }


def difference(case: Case) -> float | None:
    """Maximum relative difference of all results in float32.

    These are outputs and gradients, or the output and the new state.
    """
    if not case.problem(torch.float32)[0]:  # the two do not compute the same
        return None
    a, b = (call() for call in calls(case).values())
    norms = (((x - y).norm() / y.norm()).item() for x, y in zip(a, b, strict=True))
    return float(f"{max(norms):.1e}")


def verdict(row: dict[str, Any]) -> str:
    """ "yes" or "no", or why there is none."""
    if "ratio" not in row:
        return row["reason"]
    if row["loaded"]:
        return "loaded"
    return "no" if row["reason"] else "yes"


def table(rows: list[dict[str, Any]]) -> list[list[str]]:
    """The rows as text, with a header."""
    head = ["work", "shape", "peer", "ms", "peer", "thread", "peer", "ratio", "worst"]
    cells = [[*head, "best", "must", "always", "reached", "MiB", "peer"]]
    for r in rows:
        shape = ", ".join(f"{name} {size}" for name, size in r["shape"].items())
        line = [r["work"], shape, r["peer"]]
        goals = [f"{r[name]:g}" if r[name] else "" for name in ("must", "always")]
        goals.append(verdict(r))
        if "ratio" not in r:
            cells.append([*line, *["-"] * 7, *goals, "", ""])
            continue
        numbers = [whose + name for name in TIMES for whose in ("", "peer_")]
        numbers += ["ratio", "worst", "best"]
        memory = [f"{r[name]:.1f}" for name in ("peak_mib", "peer_peak_mib")]
        cells.append([*line, *(f"{r[name]:.2f}" for name in numbers), *goals, *memory])
    return cells


def measure() -> dict[str, Any]:
    """Print the table, and return its rows."""
    print(
        "ratio: time of the peer over that of fwlab, each at the best of "
        f"{len(SETTINGS)} settings ({', '.join(SETTINGS)}); worst and best: the two in "
        "the same setting\n"
    )
    rows = [run(comparison) for comparison in COMPARISONS]
    print(layout(table(rows), left=3))
    return {"peers": rows, "packages": versions()}


def versions() -> dict[str, str | None]:
    """The versions of the packages with peers; None = not installed."""
    found: dict[str, str | None] = {}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found
