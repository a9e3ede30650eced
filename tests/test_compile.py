"""torch.compile, torch.export, tensors without data, and torch.func.

Calls that are traced become operators of PyTorch: `fwlab/ops/call/operators.py`.
"""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.library import opcheck

from fwlab import layers, ops
from fwlab.feature_maps import FAVOR
from fwlab.models import LanguageModel
from fwlab.models.language_model import MIXERS
from fwlab.ops.additive.efficient import Memory
from fwlab.ops.aft.full import efficient as full_efficient
from fwlab.ops.aft.full.efficient import Tiles
from fwlab.ops.aft.simple.efficient import _Simple
from fwlab.ops.call.operators import Operator
from fwlab.ops.feedback.efficient import _Feedback
from fwlab.ops.fwp.efficient import _Segments
from problems import ROWS, error, outcome, parts, problem, rebuild, weighted

#: Rows and mixers that share what is compiled with another.
AGAIN = {n for n in ROWS if n.endswith("-normalized")} | {
    "aft-conv",
    "aft-conv-one-key",
    "feedback-plain-memory",
    "fwp-linear",
}
SLOW_MODELS = set(MIXERS) - {"softmax", "delta", "aft-full", "feedback"}


def some(names, slow):
    slowly = {True: [pytest.mark.slow], False: []}
    return [pytest.param(name, marks=slowly[name in slow]) for name in names]


def lines(row):
    """What can be compiled: a function, not an object."""
    return lambda *x, **options: row(*x, **options)


def compiled(function, **options):
    # What other tests have had compiled counts against a limit, above which
    # nothing would be.
    torch.compiler.reset()
    options = {"fullgraph": True} | options
    return torch.compile(function, backend="aot_eager", **options)


def agree(got, wanted, limit=1e-10):
    for a, b in zip(got, wanted, strict=True):
        assert a.dtype == b.dtype
        assert error(a, b) < limit


def masked_problem(name, time=9):
    row = ROWS[name]
    keep = torch.rand(2, time, generator=torch.Generator().manual_seed(0)) < 0.7
    keep[:, 0] = True
    return row, *problem(row, time), keep


@pytest.mark.parametrize("name", some(ROWS, AGAIN))
def test_one_graph(name):
    """Outputs, final state and all gradients, the initial state's included."""
    row = ROWS[name]
    inputs, state = problem(row, 9)
    whole = replace(row, op=compiled(lines(row)))
    compiled_outcome = outcome(whole, inputs, state, "auto")
    agree(compiled_outcome, outcome(row, inputs, state, "auto"), 1e-14)


@pytest.mark.parametrize("name", ["delta-normalized", "aft-local", "fwp-tanh"])
def test_masks_and_missing_gradients(name):
    row, inputs, state, keep = masked_problem(name)
    inputs[1] = inputs[1].detach()  # needs no gradient
    leaves = [x for x in inputs if x.requires_grad]

    def run(function):
        y, after = function(*inputs, key_mask=keep, state=state, return_state=True)
        # The state alone, then both.
        first = torch.autograd.grad(
            weighted(*parts(after)), leaves, retain_graph=True, allow_unused=True
        )
        both = torch.autograd.grad(weighted(y, *parts(after)), leaves)
        return [y, *both, *(x for x in first if x is not None and x.any())]

    got = run(compiled(lines(row)))
    agree(got, run(row), 1e-14)


@pytest.mark.parametrize(
    "name", some(["delta", "aft-full", "feedback"], {"aft-full", "feedback"})
)
def test_other_lengths(name):
    """One function for all lengths, 0 and 1 included.

    Other operations are exported with a length left open.
    """
    row = ROWS[name]
    whole = replace(row, op=compiled(lines(row), dynamic=True))
    for time in (9, 33, 1, 0, 12):
        inputs, state = problem(row, time)
        compiled_outcome = outcome(whole, inputs, state, "auto")
        agree(compiled_outcome, outcome(row, inputs, state, "auto"), 1e-14)


def test_lower_precision_and_autocast():
    row = ROWS["delta"]
    inputs, _ = problem(row, 9, torch.bfloat16, with_state=False)
    whole = compiled(lines(row))
    y, after = whole(*inputs, return_state=True)
    assert (y.dtype, after.dtype) == (torch.bfloat16, torch.float32)
    agree([y, after], row(*inputs, return_state=True), 1e-14)

    inputs, _ = problem(row, 9, torch.float32, with_state=False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = whole(*inputs)
        gradients = torch.autograd.grad(weighted(y), inputs)
    agree(
        [y, *gradients],
        [y := row(*inputs), *torch.autograd.grad(weighted(y), inputs)],
        1e-6,
    )


def test_options():
    """`scale`, no causality, images, and arguments by name."""
    q, k, v = torch.randn(3, 2, 5, 3, 4)
    beta, kernel = torch.rand(2, 5, 3), torch.randn(3, 3, 3)

    def every(q, k, v, beta, kernel):
        return (
            ops.delta_rule(q=q, k=k, v=v, beta=beta, scale=0.3),
            ops.sum_rule(q, k, v, normalize=False, implementation="chunked"),
            ops.aft_simple(q[..., 0], k[..., 0], v[..., 0], causal=False),
            ops.aft_conv2d(*(x[:, :, None] for x in (q, k, v)), kernel),
            ops.softmax_attention(q, k, v, scale=0.1),
            ops.dpfp_delta_rule(q, k, v, beta, 2),
        )

    inputs = (q, k, v, beta, kernel)
    agree(compiled(every)(*inputs), every(*inputs), 1e-6)


def images(time):
    q, k, v = torch.randn(3, 2, time, 2, 2, 2, dtype=torch.float64)
    inputs = [q, k[..., :1], v, torch.randn(2, 3, 3, dtype=torch.float64)]
    return [x.detach().requires_grad_() for x in inputs]


def calls_of(name, time):
    """The operators that a call goes through where it is traced, and their
    arguments.
    """
    calls, call = [], Operator.__call__

    def record(self, *arguments):
        calls.append((self.name, arguments[: self.count]))
        return call(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Operator, "__call__", record)
        patch.setattr(torch.compiler, "is_compiling", lambda: True)
        if name == "images":
            ops.aft_conv2d(*images(time))
        else:
            row = ROWS[name]
            inputs, state = problem(row, time)
            row(*inputs, state=state, return_state=True)
    return calls


def test_every_recurrence_is_an_operator():
    operators = {name for row in (*ROWS, "images") for name, _ in calls_of(row, 2)}
    assert operators == RECURRENCES


@pytest.mark.parametrize("time", [1, 35])
@pytest.mark.parametrize("name", some((*ROWS, "images"), AGAIN))
def test_what_pytorch_is_told(name, time, monkeypatch):
    """Schema and shapes, checked by PyTorch; and the numbers of an ordinary call."""
    with torch.set_grad_enabled(time > 1):  # What is kept for a backward pass, too.
        calls = calls_of(name, time)
    for operator, arguments in calls:
        leaves = [
            x.detach().requires_grad_(x.requires_grad) if torch.is_tensor(x) else x
            for x in arguments
        ]
        opcheck(
            getattr(torch.ops.fwlab, operator).default,
            tuple(leaves),
            test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
        )
    if row := ROWS.get(name):
        inputs, state = problem(row, time)
        if name.startswith("aft"):  # Some tiles, and rows that are computed alone.
            monkeypatch.setattr(full_efficient, "TILE", 16)
            monkeypatch.setattr(full_efficient, "MAX_FACTOR", 20.0)
        wanted = outcome(row, inputs, state, "auto")
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
        agree(outcome(row, inputs, state, "auto"), wanted, 1e-12)


RECURRENCES = {"additive", "correcting", "correcting_early", "fwp", "aft", "aft_simple"}
RECURRENCES |= {"feedback"}

FORWARD = {
    "delta-normalized": [Memory],
    "fwp-tanh": [_Segments],
    "aft-simple": [_Simple],
    "aft-full": [Tiles],
    "aft-local": [Tiles],
    "feedback": [_Feedback],
}


@pytest.mark.parametrize("name", FORWARD)
def test_nothing_is_computed_twice(name, monkeypatch):
    """Compiled training has as many forward passes as any other."""
    passes = []
    for function in FORWARD[name]:

        def counted(*arguments, forward=function.forward):
            passes.append(forward)
            return forward(*arguments)

        monkeypatch.setattr(function, "forward", staticmethod(counted))
    row = ROWS[name]
    inputs, state = problem(row, 40)
    outcome(row, inputs, state, "auto")
    expected = len(passes)
    whole = replace(row, op=compiled(lines(row)))
    outcome(whole, inputs, state, "auto")
    passes.clear()
    outcome(whole, inputs, state, "auto")
    assert len(passes) == expected > 0


def test_backward_knows_what_is_not_needed(monkeypatch):
    """No zeros for a state that nobody differentiates, and no gradient for
    an input that needs none.
    """
    ((name, arguments),) = calls_of("delta", 3)
    q, k, v, decay, strength, ask, W, keep = arguments
    q = q.detach()
    leaves = [x.detach().requires_grad_() for x in (k, v, strength, W)]
    seen, compute = [], Operator.backward

    def record(self, *packed):
        seen.append(packed[-2:])
        return compute(self, *packed)

    monkeypatch.setattr(Operator, "backward", record)
    k, v, strength, W = leaves
    y, *_ = getattr(torch.ops.fwlab, name)(q, k, v, decay, strength, ask, W, keep)
    computed = torch.autograd.grad(weighted(y), leaves)
    ((gradients, needed),) = seen
    assert [x is None for x in gradients] == [False, True, True]
    assert needed == [False, True, True, False, True, False, True]
    y = ops.delta_rule(q, k, v, strength[..., 0], state=W)
    agree(computed, torch.autograd.grad(weighted(y), leaves))


def test_ordinary_calls_are_not_operators(monkeypatch):
    monkeypatch.delattr(Operator, "__call__")
    inputs, _ = problem(ROWS["delta"], 3, with_state=False)
    ops.delta_rule(*inputs)
    ops.delta_rule(*map(torch.nn.Parameter, inputs))


def test_what_no_graph_can_describe():
    """A function of your own, and a size that depends on values: there the
    graph breaks, and everything else stays as it is.
    """
    inputs, state = problem(ROWS["fwp-tanh"], 9)

    def own(a, b, x):
        return ops.fwp(a, b, x, torch.sigmoid, state=state)

    whole = compiled(own, fullgraph=False)
    got, wanted = (
        [f(*inputs), *torch.autograd.grad(weighted(f(*inputs)), inputs)]
        for f in (whole, own)
    )
    agree(got, wanted)

    row, inputs, state, keep = masked_problem("feedback")

    def masked(*x, **options):
        return row(*x, key_mask=keep, **options)

    options = {"state": state, "return_state": True}
    got = compiled(masked, fullgraph=False)(*inputs, **options)
    wanted = masked(*inputs, **options)
    agree(parts(got), parts(wanted))
    assert torch.equal(got[1].mask, wanted[1].mask)
    # Without a new state there is nothing unknown.
    got, wanted = (
        compiled(masked)(*inputs, state=got[1]),
        masked(*inputs, state=wanted[1]),
    )
    agree([got], [wanted])


def bare(x):
    """The same tensor without data."""
    return x.detach().to("meta").requires_grad_(x.requires_grad)


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_without_data(name, dtype):
    row = ROWS[name]
    inputs, state = problem(row, 5, dtype)
    y, after = row(*inputs, state=state, return_state=True)
    state = rebuild(state, bare)
    y_bare, after_bare = row(*map(bare, inputs), state=state, return_state=True)
    assert type(after_bare) is type(after)
    for x, wanted in zip(parts((y_bare, after_bare)), parts((y, after)), strict=True):
        assert (x.device.type, x.shape, x.dtype) == ("meta", wanted.shape, wanted.dtype)
    leaves = [*map(bare, problem(row, 5, dtype, with_state=False)[0])]
    for x, dx in zip(leaves, torch.autograd.grad(row(*leaves).sum(), leaves)):  # noqa: B905
        assert (dx.device.type, dx.shape, dx.dtype) == ("meta", x.shape, x.dtype)


def test_without_data_errors_are_the_same():
    x = torch.zeros(2, 5, 3, 4, device="meta")
    with pytest.raises(ValueError, match=r"expected beta of shape \[2, 5, 3\]"):
        ops.delta_rule(x, x, x, x)
    with pytest.raises(ValueError, match="got 'cuda'"):
        ops.delta_rule(x, x, x, x[..., 0], implementation="cuda")
    with pytest.raises(TypeError, match="expected scale to be a finite number"):
        ops.delta_rule(x, x, x, x[..., 0], scale="a")
    with pytest.raises(TypeError, match="expected state to be a RunningMean"):
        ops.aft_simple(*[x[..., 0]] * 3, state=3)
    with pytest.raises(TypeError, match=r"missing .* 'beta'"):
        ops.delta_rule(x, x, x)
    with pytest.raises(TypeError, match="multiple values for argument 'q'"):
        ops.delta_rule(x, x, x, x[..., 0], q=x)
    y = ops.delta_rule(x.requires_grad_(), x, x, x[..., 0])
    with pytest.raises(RuntimeError, match="implementation='naive'"):
        torch.autograd.grad(y.sum(), x, create_graph=True)
    row, inputs, state, keep = masked_problem("feedback")
    options = {"state": rebuild(state, bare), "key_mask": bare(keep)}
    with pytest.raises(ValueError, match="expected return_state=False"):
        row(*map(bare, inputs), **options, return_state=True)


def test_fake_tensors():
    with FakeTensorMode():
        x = torch.randn(2, 5, 3, 4)
        y, state = ops.sum_rule(x, x, x, return_state=True)
    assert y.shape == x.shape and y.device.type == "cpu"
    assert isinstance(state, ops.NormalizedState)


def model(mixer, max_len=16):
    torch.manual_seed(0)
    made = LanguageModel(11, mixer, layers=1, heads=2, d_model=8, max_len=max_len)
    return made, torch.randint(0, 11, (2, 9))


@pytest.mark.parametrize("mixer", MIXERS)
def test_models_without_data(mixer):
    made, tokens = model(mixer)
    made, tokens = made.to("meta"), tokens.to("meta")
    made(tokens).sum().backward()
    assert all(p.grad.shape == p.shape for p in made.parameters())
    _, state = made.prefill(tokens)
    logits, _ = made.step(tokens[:, 0], state)
    assert (logits.device.type, *logits.shape) == ("meta", 2, 11)


#: Sizes of what is exported.
SIZES = {
    0: torch.export.Dim("batch", max=50),
    1: torch.export.Dim("time", min=2, max=60),
}


@pytest.mark.parametrize("mixer", MIXERS)
def test_models_are_exported(mixer, tmp_path):
    """For any batch, and any length but those that docs/api/ops.md names."""
    made, tokens = model(mixer, max_len=61)
    shapes = [(1, 9), (7, 9), (4, 60), (2, 2)]
    sizes = SIZES
    if mixer == "transformer-xl":
        shapes, sizes = shapes[:2], {0: SIZES[0]}
    program = torch.export.export(made, (tokens,), dynamic_shapes=(sizes,))
    names = {str(node.target) for node in program.graph.nodes}
    torch.export.save(program, tmp_path / "model.pt2")
    loaded = torch.export.load(tmp_path / "model.pt2").module()
    for shape in shapes:
        tokens = torch.randint(0, 11, shape)
        agree([loaded(tokens)], [made(tokens)], 1e-5)
    used = {name.split(".")[1] for name in names if "fwlab" in name}
    if mixer in ("softmax", "transformer-xl"):
        assert not used
    else:
        assert used & RECURRENCES and used <= RECURRENCES


class Pieces(torch.nn.Module):
    """A layer over a masked sequence, then in pieces."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x, key_mask):
        y, state = self.layer.prefill(x)
        return self.layer(x, key_mask), y, self.layer.step(x[:, 0], state)[0]


@pytest.mark.parametrize(
    "layer",
    [
        layers.FastWeightAttention(
            8, 2, FAVOR(4, 8), "sum", None, normalize=True, conv_size=3
        ),
        layers.SoftmaxAttention(8, 4, 2, rope=1, qk_norm="head"),
        layers.AFTLocal(8, max_len=64, window=4, factor=2),
    ],
    ids=["favor", "softmax", "aft-local"],
)
def test_layers_are_exported(layer):
    def inputs(*shape):
        x = torch.randn(*shape, 8, dtype=torch.float64)
        return x, torch.rand(shape) > 0.3

    torch.manual_seed(0)
    made = Pieces(layer.double())
    sizes = (SIZES, SIZES)
    program = torch.export.export(made, inputs(3, 9), dynamic_shapes=sizes).module()
    for shape in ((1, 9), (5, 40), (2, 2)):
        now = inputs(*shape)
        agree(program(*now), made(*now))


@pytest.mark.parametrize("mixer", some(MIXERS, SLOW_MODELS))
def test_models_are_one_graph(mixer):
    made, tokens = model(mixer)

    def train(function):
        made.zero_grad()
        loss = weighted(function(tokens))
        loss.backward()
        return [loss, *(p.grad for p in made.parameters())]

    agree(train(compiled(made)), train(made), 1e-5)


def test_a_step_of_a_layer_is_one_graph():
    layer = layers.FastWeightAttention(8, 2, rule="gated_delta", conv_size=3)
    x = torch.randn(2, 8)
    step = compiled(layer.step)
    state, expected, y = None, None, []
    for _ in range(3):
        a, state = step(x, state)
        b, expected = layer.step(x, expected)
        y.append((a, b))
    agree(*zip(*y, strict=True), 1e-6)
    agree(parts(state), parts(expected), 1e-6)


@pytest.mark.parametrize("name", some(ROWS, AGAIN))
def test_torch_func(name):
    row = ROWS[name]
    inputs, _ = problem(row, 3, with_state=False)
    wanted = torch.autograd.grad(weighted(row(*inputs)), inputs)
    inputs = [x.detach() for x in inputs]
    places = tuple(range(len(inputs)))

    def loss(*x):
        return weighted(row(*x))

    agree(torch.func.grad(loss, places)(*inputs), wanted)
    agree(torch.func.jacrev(loss, places)(*inputs), wanted)
    pairs = [torch.stack([x, x / 2]) for x in inputs]
    halves = [x / 2 for x in inputs]
    agree(torch.vmap(row)(*pairs), [row(*inputs), row(*halves)])
    with pytest.raises(ValueError, match="implementation='naive' does") as info:
        torch.vmap(lambda *x: row(*x, implementation="efficient"))(*pairs)
    assert "\n" not in str(info.value)


def test_torch_func_of_models_and_compiled():
    made, tokens = model("delta")
    weights = {n: p.detach() for n, p in made.named_parameters()}

    def loss(weights, tokens):
        logits = torch.func.functional_call(made, weights, (tokens[None],))
        return logits.square().mean()

    each = torch.vmap(torch.func.grad(loss), (None, 0))(weights, tokens)
    for i in range(2):
        alone = torch.func.grad(loss)(weights, tokens[i])
        agree([each[n][i] for n in weights], alone.values(), 1e-4)

    row = ROWS["delta"]
    q, *others = (x.detach() for x in problem(row, 3, with_state=False)[0])
    gradient = torch.func.grad(lambda q: row(q, *others).sum())
    agree([compiled(gradient, fullgraph=False)(q)], [gradient(q)])


def test_modules_may_be_loaded_again():
    """As notebooks do: reloaded, and imported from the beginning."""
    code = """
import importlib, sys, torch, fwlab.ops
x = torch.zeros(1, 2, 1, 3, device="meta")
for name in ("fwlab.ops.additive", "fwlab.ops.call.operators", "fwlab.ops"):
    importlib.reload(sys.modules[name])
    assert fwlab.ops.sum_rule(x, x, x).is_meta
for name in [n for n in sys.modules if n.startswith("fwlab")]:
    del sys.modules[name]
import fwlab.ops
y, state = fwlab.ops.sum_rule(x, x, x, return_state=True)
assert type(state) is fwlab.ops.NormalizedState
"""
    subprocess.run([sys.executable, "-c", code], check=True)
