"""Test torch.compile, torch.export and tensors without data.

The fuzzer compiles calls of operations; this file tests operators, layers and models.
"""

import subprocess
import sys

import pytest
import torch
from alike import agree, call, computed, parts, problem, weighted
from loops import AFT, RULES
from torch.library import opcheck
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from fwlab import layers, ops
from fwlab.feature_maps import FAVOR
from fwlab.models import LanguageModel
from fwlab.models.language_model import MIXERS

STREAMS = (*RULES, "fwp", *AFT[:-1], "feedback")
SMALL = "batch=2 heads=2 key=4 value=3 window=3 activation=tanh state=1"
#: Mixers that only `make test-all` compiles; the fast tests have one per kind of state.
SLOW_MODELS = set(MIXERS) - {"softmax", "delta", "aft-full", "feedback"}


def some(names, slow):
    slowly = {True: [pytest.mark.slow], False: []}
    return [pytest.param(name, marks=slowly[name in slow]) for name in names]


def compiled(function, **options):
    # Reset the compiler, because compilations of earlier tests count towards a limit.
    torch.compiler.reset()
    options = {"fullgraph": True} | options
    return torch.compile(function, backend="aot_eager", **options)


class Calls(TorchDispatchMode):
    """Record the calls of fwlab's custom operators."""

    def __init__(self):
        super().__init__()
        self.made = []

    def __torch_dispatch__(self, function, types, args=(), options=None):
        if function.namespace == "fwlab":
            self.made.append((function, args))
        return function(*args, **options or {})


@pytest.mark.parametrize("time", [1, 35])
@pytest.mark.parametrize("op", [*STREAMS, "aft_conv2d"])
def test_what_pytorch_is_told(op, time, monkeypatch):
    """Custom operators pass PyTorch's checks, and have the results of an eager call."""
    p = problem(f"op={op} time={min(time, 4 if op == 'aft_conv2d' else time)} {SMALL}")
    p.c["implementation"] = "auto"
    wanted = computed(p)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    agree(computed(p), wanted, 1e-12)
    with Calls() as calls:
        p.called(p.x, p.state)
    assert calls.made
    for operator, arguments in calls.made:
        if "backward" in str(operator):
            continue
        leaves = [
            x.detach().clone().requires_grad_(x.is_floating_point())
            if isinstance(x, torch.Tensor)
            else x
            for x in arguments
        ]
        tests = ("test_schema", "test_autograd_registration", "test_faketensor")
        opcheck(operator, tuple(leaves), test_utils=tests)


def test_what_no_graph_can_describe():
    """Graphs break only at user-defined functions and at data-dependent sizes."""
    p = problem(f"op=fwp time=3 {SMALL}")

    def own():
        return call(p, activation=torch.sigmoid, state=p.state[0])

    agree([compiled(own, fullgraph=False)()], [own()])
    p = problem(f"op=feedback time=3 {SMALL}")
    keep = torch.tensor([[True, False, True], [True, True, True]])

    def masked(**options):
        return call(p, key_mask=keep, **options)

    options = {"state": ops.FeedbackState(*p.state, None), "return_state": True}
    got, wanted = compiled(masked, fullgraph=False)(**options), masked(**options)
    agree(parts(got), parts(wanted))
    assert torch.equal(got[1].mask, wanted[1].mask)
    # Without a new state, no size depends on data.
    agree([compiled(masked)(state=got[1])], [masked(state=wanted[1])])


def bare(x):
    """Return a tensor of equal shape and dtype on the device "meta"."""
    return x.detach().to("meta").requires_grad_(x.requires_grad)


@pytest.mark.parametrize("op", STREAMS)
def test_without_data(op):
    p = problem(f"op={op} time=5 {SMALL}", dtype="bfloat16")
    wanted, leaves = p.called(p.x, p.state), tree_map(bare, p.x)
    found = p.called(leaves, tree_map(bare, p.state))
    for x, y in zip(found, wanted, strict=True):
        assert (x.device.type, x.shape, x.dtype) == ("meta", y.shape, y.dtype)
    gradients = torch.autograd.grad(found[0].sum(), [*leaves.values()])
    for x, dx in zip(leaves.values(), gradients, strict=True):
        assert (dx.device.type, dx.shape, dx.dtype) == ("meta", x.shape, x.dtype)


def test_without_data_errors_are_the_same():
    x = torch.zeros(2, 5, 3, 4, device="meta")
    with pytest.raises(ValueError, match=r"expected beta of shape \[2, 5, 3\]"):
        ops.delta_rule(x, x, x, x)
    with pytest.raises(TypeError, match=r"missing .* 'beta'"):
        ops.delta_rule(x, x, x)
    with pytest.raises(TypeError, match="multiple values for argument 'q'"):
        ops.delta_rule(x, x, x, x[..., 0], q=x)
    p = problem(f"op=feedback time=9 {SMALL}")
    options = {"key_mask": torch.ones(2, 9, dtype=torch.bool, device="meta")}
    with pytest.raises(ValueError, match="expected return_state=False"):
        call(p, **tree_map(bare, p.x), **options, return_state=True)


def model(mixer, max_len=16):
    torch.manual_seed(0)
    made = LanguageModel(11, mixer, layers=1, heads=2, d_model=8, max_len=max_len)
    return made, torch.randint(0, 11, (2, 9))


#: Dynamic dimensions of the inputs of exported models.
SIZES = {
    0: torch.export.Dim("batch", max=50),
    1: torch.export.Dim("time", min=2, max=60),
}


@pytest.mark.parametrize("mixer", some(MIXERS, SLOW_MODELS))
def test_models_are_exported(mixer, tmp_path):
    """Exported models run for any batch size and all lengths in docs/api/ops.md."""
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
    used = {name for name in names if "fwlab" in name}
    assert bool(used) == (mixer not in ("softmax", "transformer-xl"))


class Pieces(torch.nn.Module):
    """Call a layer with a mask, its `prefill`, and its `step`, as one module."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x, key_mask):
        y, state = self.layer.prefill(x)
        return self.layer(x, key_mask), y, self.layer.step(x[:, 0], state)[0]


def test_a_layer_is_exported():
    def inputs(*shape):
        x = torch.randn(*shape, 8, dtype=torch.float64)
        return x, torch.rand(shape) > 0.3

    torch.manual_seed(0)
    rest = {"normalize": True, "conv_size": 3}
    layer = layers.FastWeightAttention(8, 2, FAVOR(4, 8), "sum", None, **rest)
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

    for found, wanted in zip(train(compiled(made)), train(made), strict=True):
        # The gradient of beta in AFT-conv is 0, up to rounding.
        assert (found - wanted).norm() < 1e-5 * wanted.norm() + 1e-7


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


def test_modules_may_be_loaded_again():
    """The modules of fwlab can be reloaded, or deleted and imported again."""
    code = """
import importlib, sys, torch, fwlab.ops
x = torch.zeros(1, 2, 1, 3, device="meta")
for name in ("fwlab.feature_maps", "fwlab.ops"):
    importlib.reload(sys.modules[name])
    assert fwlab.ops.sum_rule(x, x, x).is_meta
for name in [n for n in sys.modules if n.startswith("fwlab")]:
    del sys.modules[name]
import fwlab.ops
y, state = fwlab.ops.sum_rule(x, x, x, return_state=True)
assert type(state) is fwlab.ops.NormalizedState
"""
    subprocess.run([sys.executable, "-c", code], check=True)
