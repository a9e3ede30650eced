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


#: rule -> optional gates, folder, function, and how it is called.
PEERS = {
    "sum_rule": ({"log_decay": "heads key"}, "gla", "naive_recurrent_gla", gla),
    "delta_rule": ({}, "delta_rule", "delta_rule_recurrence", delta),
    "gated_delta_rule": (
        {},
        "gated_delta_rule",
        "naive_recurrent_gated_delta_rule",
        plain("beta", "g"),
    ),
    "kimi_delta_rule": ({}, "kda", "naive_recurrent_kda", plain("beta", "g")),
    "gated_delta_rule_2": ({}, "gdn2", "naive_recurrent_gdn2", plain("b", "w", "g")),
    "comba_rule": ({}, "comba", "naive_recurrent_comba", comba),
    "delta_product": (
        {"log_decay": "heads"},
        "gated_delta_product",
        "naive_recurrent_gated_delta_product",
        product,
    ),
    "rwkv7_rule": ({}, "generalized_delta_rule/dplr", "dplr_recurrence", dplr),
}


@pytest.mark.parametrize("implementation", ["naive", "efficient"])
@pytest.mark.parametrize("rule", PEERS)
def test_same_as_theirs(rule, implementation, monkeypatch):
    """Outputs and final state, from a state, with several steps a token."""
    options, folder, name, call = PEERS[rule]
    generator = torch.Generator().manual_seed(0)
    sizes = {"batch": 2, "time": 37, "heads": 3, "key": 8, "value": 6}
    if rule == "delta_product":
        sizes["steps"] = 3
    record = ops.TABLE[rule]
    x = record.example(generator, options, **sizes)
    q, k, v, *gates = (part.float() for part in x.values())
    W = torch.randn(2, 3, 6, 8, generator=generator)
    more = {"normalize": False} if record.normalizes else {}
    if rule == "sum_rule":
        more, gates = {**more, "log_decay": gates[0]}, []
    y, after = getattr(ops, rule)(
        *(q, k, v, *gates),
        scale=8**-0.5,
        state=W,
        return_state=True,
        implementation=implementation,
        **more,
    )
    gates = gates or [more["log_decay"]]
    function = theirs(folder, name, monkeypatch)
    o, S = call(function, q, k, v, *gates, W.mT.clone())
    # Both add in float32, in another order.
    assert error(y, o) < 2e-6 and error(after, S.mT) < 2e-6


def test_every_rule_that_they_have_is_compared():
    """But for those that they do not have, and DPFP features."""
    rules = {name for name, record in ops.TABLE.items() if hasattr(record, "gates")}
    assert rules - {*PEERS} == {"gated_rule", "dpfp_delta_rule", "implicit_delta_rule"}
