"""flash-linear-attention behind our calls: a stand-in with its conventions.

Its kernels need a GPU. The functions here take and return what its own do:
states `[batch, heads, key, value]`, queries scaled by K ** -0.5 unless told
otherwise, decays as logarithms, results in the dtype of the queries.
"""

import re
import sys
from types import ModuleType

import pytest
import torch

from fwlab import info, ops
from fwlab.ops.call import choice, fla, launcher
from problems import error, outcome, parts, problem, rules

CALLS = []


def recurrent(q, k, v, g, beta, scale, initial_state, output_final_state):
    """Step by step, in full precision; beta None = an additive rule."""
    assert q.dtype == k.dtype == v.dtype and k.shape == q.shape
    assert initial_state is None or initial_state.is_contiguous()
    full = torch.float64 if q.dtype == torch.float64 else torch.float32
    scale = k.shape[-1] ** -0.5 if scale is None else scale
    dtype = q.dtype
    q, k, v = (x.to(full) for x in (q, k, v))
    S = k.new_zeros(*k.shape[::2], k.shape[-1], v.shape[-1])
    S = S if initial_state is None else initial_state
    assert S.dtype == full and S.shape[-2:] == (k.shape[-1], v.shape[-1])
    o = []
    # A chunk sums logarithms up, so it takes none that are infinite.
    assert g is None or g.isfinite().all()
    for t in range(q.shape[1]):
        if g is not None:
            decay = g[:, t].exp()
            S = S * (decay[..., None] if decay.dim() == 3 else decay[..., None, None])
        new = v[:, t]
        if beta is not None:
            new = beta[:, t, :, None] * (
                new - torch.einsum("bhk,bhkv->bhv", k[:, t], S)
            )
        S = S + k[:, t, :, :, None] * new[:, :, None]
        o.append(scale * torch.einsum("bhk,bhkv->bhv", q[:, t], S))
    return torch.stack(o, 1).to(dtype), S if output_final_state else None


def simple_gla(q, k, v, g=None, scale=None, **more):
    assert g is None or g.shape == q.shape[:3]
    return recurrent(q, k, v, g, None, scale, **more)


def delta_rule(q, k, v, beta, scale=None, **more):
    assert q.dtype != torch.float32 and beta.shape == q.shape[:3]
    return recurrent(q, k, v, None, beta, scale, **more)


def gated_delta_rule(q, k, v, g, beta, scale=None, **more):
    assert g.shape == beta.shape == q.shape[:3]
    return recurrent(q, k, v, g, beta, scale, **more)


def kda(q, k, v, g, beta, scale=None, **more):
    assert g.shape == k.shape and beta.shape == q.shape[:3]
    return recurrent(q, k, v, g, beta, scale, **more)


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    """The stand-in, on a machine that seems to have a GPU."""
    for name in ("fla", "fla.ops"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for function in (simple_gla, delta_rule, gated_delta_rule, kda):
        name = function.__name__

        def called(*arguments, function=function, **options):
            CALLS.append(function.__name__)
            return function(*arguments, **options)

        module = ModuleType(f"fla.ops.{name}")
        setattr(module, f"chunk_{name}", called)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(fla, "version", lambda: (0, 6, 0))
    monkeypatch.setattr(launcher, "installed", lambda: True)
    monkeypatch.setattr(launcher, "stands_in", lambda: False)
    CALLS.clear()
    with launcher.standing_in(launcher.StandIn((9, 0), "cpu", print)):
        yield


@pytest.fixture
def any_dtype(monkeypatch):
    """Also float64, to compare exactly."""
    monkeypatch.setattr(launcher, "DTYPES", (*launcher.DTYPES, torch.float64))
    monkeypatch.setattr(launcher.StandIn, "dtypes", (torch.float64,))
    one = launcher.StandIn((9, 0), "cpu", print, (torch.float64, torch.float16))
    with launcher.standing_in(one):
        yield


FUNCTIONS = {
    **dict.fromkeys(("sum", "sum-normalized", "sum-decay", "gated"), "simple_gla"),
    "delta": "delta_rule",
    "gated-delta": "gated_delta_rule",
    "kimi-delta": "kda",
}
#: The rules that it has, which are those without a normaliser, and one.
ROWS = {name: rules.ROWS[name] for name in FUNCTIONS}


def close(got, wanted, limit=1e-9):
    for a, b in zip(got, wanted, strict=True):
        assert a.dtype == b.dtype and error(a, b) < limit


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("with_state", [True, False])
def test_is_naive(name, with_state, any_dtype):
    """Outputs, states and every gradient, with decays of 0 and of 1."""
    row = ROWS[name]
    inputs, state = problem(row, 23, with_state=with_state)
    fla_outcome = outcome(row, inputs, state, "fla")
    wanted = outcome(row, inputs, state, "naive")
    assert [FUNCTIONS[name]] == CALLS
    if name == "gated":  # log(1 - beta) has no derivative at 1
        (at,) = {i for i, x in enumerate(fla_outcome) if x.dim() == 3 and i > 1}
        assert (fla_outcome[at] - wanted[at])[inputs[3] < 1].abs().max() <= 1e-9
        fla_outcome[at] = wanted[at]
    close(fla_outcome, wanted)


@pytest.mark.parametrize("name", ROWS)
def test_half_precision(name):
    """It gets the inputs as they are, and its state has full precision."""
    row = ROWS[name]
    inputs, state = problem(row, 23, dtype=torch.bfloat16)
    half = outcome(row, inputs, state, "fla")
    assert half[0].dtype == torch.bfloat16 and half[1].dtype == torch.float32
    wanted = outcome(row, inputs, state, "naive")
    if name == "gated":  # but for the gradient of beta
        half, wanted = ([x for x in each if x.dim() != 3] for each in (half, wanted))
    close(half, wanted, 2e-2)


@pytest.mark.parametrize("name", ["sum-normalized", "gated", "delta", "kimi-delta"])
def test_contract(name, any_dtype):
    """Masks, a scale, packed documents and grouped heads."""
    row = ROWS[name]
    inputs, _ = problem(row, 12)
    one = [x[:1] for x in inputs]
    mask = torch.ones(2, 12, dtype=torch.bool)
    mask[0, 3:5], mask[1, :2] = False, False
    calls = [
        (inputs, {"key_mask": mask, "scale": 0.7}),
        (one, {"cu_seqlens": torch.tensor([0, 5, 5, 12])}),
        ([inputs[0].repeat_interleave(2, 2), *inputs[1:]], {}),
    ]
    for arguments, options in calls:
        a, b = (
            row(*arguments, return_state=True, implementation=implementation, **options)
            for implementation in ("fla", "naive")
        )
        close(parts(a), parts(b))


def test_an_infinite_decay(any_dtype):
    """It erases the memory, and its gradient is 0."""
    row = ROWS["gated-delta"]
    inputs, state = problem(row, 9)
    with torch.no_grad():
        inputs[-1][:, 4] = -torch.inf
    fla_outcome = outcome(row, inputs, state, "fla")
    close(fla_outcome, outcome(row, inputs, state, "naive"))


def test_no_second_derivative(any_dtype):
    inputs, _ = problem(ROWS["delta"], 4)
    y = ops.delta_rule(*inputs, implementation="fla")
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(y.sum(), inputs, create_graph=True)


def call(op, *, dtype=torch.float16, key=8, **options):
    x = torch.zeros(1, 3, 1, key, dtype=dtype)
    gates = {"gated_rule": 1, "delta_rule": 1, "gated_delta_rule": 2}.get(op, 0)
    return getattr(ops, op)(x, x, x, *[x[..., 0]] * gates, **options)


@pytest.mark.parametrize(
    ("op", "options", "says"),
    [
        (
            "delta_rule",
            {"dtype": torch.float32},
            "calls flash-linear-attention in half",
        ),
        ("sum_rule", {"dtype": torch.float32}, "in half precision only"),
        ("delta_rule", {"key": 257}, "keys of width up to 256, got 257"),
        ("delta_rule", {"normalize": True}, "no kernel for normalize=True"),
        ("gated_rule", {"normalize": True}, "normalize=True with beta"),
    ],
)
def test_refusals(op, options, says):
    with pytest.raises(choice.Refused, match=says) as error:
        call(op, implementation="fla", **options)
    assert str(error.value).endswith("'efficient' can")
    assert not CALLS


@pytest.mark.parametrize("version", [None, (0, 5, 9)])
def test_not_installed(version, monkeypatch):
    monkeypatch.setattr(fla, "version", lambda: version)
    with pytest.raises(
        ValueError,
        match=r"attention 0\.6 or newer is not installed \(pip install \"fwlab\[fla\]\"\)",
    ):
        call("delta_rule", implementation="fla")
    assert "fla" not in ops.implementations("delta_rule")


def test_not_on_a_cpu(monkeypatch):
    """Installed or not, which would not help."""
    monkeypatch.setattr(fla, "version", lambda: None)
    says = "flash-linear-attention needs a GPU, but the tensors are on cpu"
    with launcher.standing_in(None), pytest.raises(ValueError, match=says):
        call("delta_rule", implementation="fla")


def test_not_with_a_stand_in(monkeypatch):
    """A stand-in takes our launches; flash-linear-attention has its own."""

    def listed():
        names = ("delta_rule", "kimi_delta_rule", "sum_rule")
        return {"fla" in ops.implementations(name) for name in names}

    assert listed() == {True}
    monkeypatch.setattr(launcher, "stands_in", lambda: True)
    with pytest.raises(ValueError, match="flash-linear-attention needs a GPU"):
        call("delta_rule", implementation="fla")
    assert listed() == {"fla" in ops.implementations("dpfp_delta_rule")} == {False}


# The choice.

CUDA = torch.device("cuda", 0)
TABLE = ops.TABLE["delta_rule"].implementations


def test_ours_comes_first():
    """It was right and faster wherever both were measured."""
    assert choice.preferred(TABLE)[:2] == ["triton", "fla"]
    gated = ops.TABLE["gated_rule"].implementations
    assert choice.preferred(gated)[:2] == ["triton", "efficient"]


def on_gpu(dtype=torch.float16):
    class OnGPU(torch.Tensor):
        device = CUDA

    return torch.zeros(1, dtype=dtype).as_subclass(OnGPU)


@pytest.mark.parametrize(
    ("op", "dtype", "name"),
    [
        ("delta_rule", torch.float16, "triton"),
        ("delta_rule", torch.float32, "triton"),
        ("delta_rule", torch.float64, "efficient"),
        ("gated_rule", torch.float16, "triton"),
        ("kimi_delta_rule", torch.float16, "fla"),
        ("kimi_delta_rule", torch.float32, "efficient"),
    ],
)
def test_auto(op, dtype, name, recwarn, monkeypatch):
    """It warns only where a kernel of ours would be expected."""
    monkeypatch.setattr(choice, "_loaded", lambda entry: entry)  # without Triton
    choice._warn.cache_clear()
    table = ops.TABLE[op].implementations
    with launcher.standing_in(launcher.StandIn((9, 0), "cuda", print)):
        chosen, _ = choice.choose(op, table, "auto", on_gpu(dtype))
    assert chosen == name
    assert len(recwarn) == (op == "delta_rule" and name == "efficient")


def test_report():
    assert re.search(r"\nfla +flash-linear-attention 0\.6\.0\n", info.report())


def test_report_with_an_old_triton(monkeypatch):
    """As with PyTorch 2.6."""
    monkeypatch.setattr(info, "_version", lambda package: "3.2.0")
    monkeypatch.setitem(sys.modules, "triton.knobs", None)
    assert "Triton 3.2.0 does not say" in info.report()


def test_info(monkeypatch):
    """Which kernel "auto" tries first."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    with launcher.standing_in(launcher.StandIn((9, 0), "cuda", print)):
        assert info._usable("delta_rule") == (
            "naive, chunked, efficient, fla, triton (triton first)"
        )
        assert info._usable("gated_rule").endswith("(triton first)")
        assert info._usable("aft_simple") == "naive, efficient, triton"
        assert info._fla() == "flash-linear-attention 0.6.0"
        monkeypatch.setattr(fla, "version", lambda: None)
        assert info._fla() == "not installed"
        assert info._usable("delta_rule") == (
            "naive, chunked, efficient, triton (triton first)"
        )
