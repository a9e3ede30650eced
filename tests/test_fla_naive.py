"""The loops against those of flash-linear-attention, in plain PyTorch.

Its package needs a GPU, so each of its files is loaded alone. Those loops
compute in float32; their states are `[batch, heads, key, value]`.
"""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from fwlab import ops
from problems import error

#: `make` unpacks its wheel here.
PEER = Path(sys.prefix, "peer", "fla", "ops")
pytestmark = pytest.mark.skipif(not PEER.exists(), reason="fla-core is not unpacked")


def theirs(folder, name, monkeypatch):
    """A function of a file `naive.py`."""
    einops = ModuleType("einops")  # which the loops themselves do not need
    einops.rearrange = None
    monkeypatch.setitem(sys.modules, "einops", einops)
    path = PEER / folder / "naive.py"
    spec = importlib.util.spec_from_file_location("peer", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)


def by_head(*tensors):
    return [x.transpose(1, 2) for x in tensors]


def delta(f, q, k, v, beta, S):
    o, S = f(*by_head(q, k, v, beta), initial_state=S)
    return o.transpose(1, 2), S


def gla(f, q, k, v, log_decay, S):
    return f(q, k, v, log_decay, initial_state=S, output_final_state=True)


def dplr(f, q, k, v, a, b, log_decay, S):
    o, S = f(*by_head(q, k, v, a, b, log_decay), initial_state=S)
    return o.transpose(1, 2), S


def product(f, q, k, v, beta, log_decay, S):
    flat = k.flatten(1, 2), v.flatten(1, 2), log_decay, beta.flatten(1, 2)
    scale = q.shape[-1] ** -0.5
    return f(q, *flat, scale, initial_state=S, num_householder=k.shape[2])


def comba(f, q, k, v, beta, log_decay, ask, S):
    more = {"initial_state": S, "output_final_state": True}
    return f(q, k, v, ask[..., None] * k, beta, log_decay, **more)


def plain(*order):
    """One that takes its gates by these names."""

    def call(f, q, k, v, *gates, S):
        names = dict(zip(order, gates, strict=True))
        return f(q, k, v, **names, initial_state=S, output_final_state=True)

    return lambda f, *x: call(f, *x[:-1], S=x[-1])


#: Their function -> our rule, optional gates, folder, and how it is called.
PEERS = {
    "naive_recurrent_linear_attn": ("sum_rule", {}, "linear_attn", plain()),
    "naive_recurrent_simple_gla": (
        "sum_rule",
        {"log_decay": "heads"},
        "simple_gla",
        plain("g"),
    ),
    "naive_recurrent_gla": ("sum_rule", {"log_decay": "heads key"}, "gla", gla),
    "delta_rule_recurrence": ("delta_rule", {}, "delta_rule", delta),
    "naive_recurrent_gated_delta_rule": (
        "gated_delta_rule",
        {},
        "gated_delta_rule",
        plain("beta", "g"),
    ),
    "naive_recurrent_kda": ("kimi_delta_rule", {}, "kda", plain("beta", "g")),
    "naive_recurrent_gdn2": ("gated_delta_rule_2", {}, "gdn2", plain("b", "w", "g")),
    "naive_recurrent_comba": ("comba_rule", {}, "comba", comba),
    "naive_recurrent_gated_delta_product": (
        "delta_product",
        {"log_decay": "heads"},
        "gated_delta_product",
        product,
    ),
    "dplr_recurrence": ("rwkv7_rule", {}, "generalized_delta_rule/dplr", dplr),
}
both = pytest.mark.parametrize("implementation", ["naive", "efficient"])
SIZES = {"batch": 2, "time": 37, "heads": 3, "key": 8, "value": 6}


def example(rule, options, **sizes):
    """Arguments by name, and a state."""
    generator = torch.Generator().manual_seed(0)
    x = ops.TABLE[rule].example(generator, options, **SIZES | sizes)
    x = {name: part.float() for name, part in x.items()}
    return x, torch.randn(2, 3, 6, 8, generator=generator)


@both
@pytest.mark.parametrize("name", PEERS)
def test_same_as_theirs(name, implementation, monkeypatch):
    """Outputs and final state, from a state, with several steps a token."""
    rule, options, folder, call = PEERS[name]
    x, W = example(rule, options, steps=3)
    more = {"normalize": False} if ops.TABLE[rule].normalizes else {}
    y, after = getattr(ops, rule)(
        **x,
        scale=8**-0.5,
        state=W,
        return_state=True,
        implementation=implementation,
        **more,
    )
    o, S = call(theirs(folder, name, monkeypatch), *x.values(), W.mT.clone())
    # Both add in float32, in another order.
    assert error(y, o) < 2e-6 and error(after, S.mT) < 2e-6


@both
def test_linear_attention_with_a_normaliser(implementation, monkeypatch):
    x, W = example("sum_rule", {})
    q, k, v = x["q"].abs(), x["k"].abs(), x["v"]
    z = k[:, 0]
    y, after = ops.sum_rule(
        *(q, k, v),
        state=ops.NormalizedState(W, z),
        return_state=True,
        implementation=implementation,
    )
    f = theirs("linear_attn", "naive_recurrent_linear_attn", monkeypatch)
    start, more = (W.mT, z[:, None]), {"output_final_state": True, "normalize": True}
    o, (S, total) = f(q, k, v, initial_state=start, **more)
    assert error(y, o) < 2e-6
    assert error(after.W, S.mT) < 2e-6 and error(after.z, total[:, 0]) < 2e-6


@both
def test_retention(implementation, monkeypatch):
    """The sum rule with a constant decay for each head."""
    x, _ = example("sum_rule", {})
    heads = torch.arange(3.0)
    log_decay = (1 - 2 ** (-5 - heads)).log().expand(2, 37, 3)
    options = {"normalize": False, "scale": 8**-0.5}
    y = ops.sum_rule(**x, log_decay=log_decay, implementation=implementation, **options)
    f = theirs("retention", "naive_retention", monkeypatch)
    assert error(y, f(*by_head(*x.values())).transpose(1, 2)) < 2e-6


def test_every_rule_that_they_have_is_compared():
    """But for those that they do not have, and DPFP features."""
    rules = {name for name, record in ops.TABLE.items() if hasattr(record, "gates")}
    compared = {rule for rule, *_ in PEERS.values()}
    assert rules - compared == {"gated_rule", "dpfp_delta_rule", "implicit_delta_rule"}
