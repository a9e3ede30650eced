"""Test that errors of operations, layers, models and maps name a wrong argument."""

import inspect
import math
import re
from functools import partial

import fuzz
import pytest
import torch
from alike import call, problem, refuses
from loops import AFT, RULES
from torch.utils._pytree import tree_map

from fwlab import feature_maps, layers, models, ops

EVERY = (*RULES, "fwp", "softmax_attention", *AFT, "feedback")


def small(op, **options):
    text = f"op={op} batch=2 time=5 heads=2 key=4 value=3 window=3 asked=y"
    return problem(text, **options)


@pytest.mark.parametrize("transform", ["vmap", "jvp"])
@pytest.mark.parametrize("op", EVERY)
def test_efficient_forms_refuse_torch_func(op, transform):
    """Under torch.func, "efficient" raises an error that names an alternative."""
    p = small(op, implementation="efficient")
    if op == "softmax_attention" and transform == "vmap":
        return  # PyTorch's kernel supports vmap.
    given = [p.x, p.state]
    pairs = tree_map(lambda x: torch.stack([x, x]), given)
    tangents = tree_map(torch.ones_like, given)
    calls = {
        "vmap": lambda: torch.vmap(p.called)(*pairs),
        "jvp": lambda: torch.func.jvp(p.called, tuple(given), tuple(tangents)),
    }
    refuses(calls[transform], "'efficient' does not .*'naive' does", ValueError)


@pytest.mark.filterwarnings("ignore:.*(nested|Sparse CSR).*")
@pytest.mark.parametrize(
    "kind",
    [
        lambda x: x.to_sparse(),
        lambda x: x.flatten(0, -2).to_sparse_csr(),
        lambda x: x.to_mkldnn(),
        lambda x: torch.nested.as_nested_tensor(list(x)),
        lambda x: torch.nested.as_nested_tensor(list(x), layout=torch.jagged),
    ],
    ids=["sparse", "csr", "onednn", "nested", "jagged"],
)
def test_tensors_that_are_not_dense(kind):
    """An error names each argument or state that is not a dense tensor."""
    for op in EVERY:
        p = small(op, dtype="float32", state=int(op in RULES))
        for name, x in p.x.items():
            if x.dim() > 1:
                with pytest.raises(TypeError, match="to be a dense tensor, got "):
                    call(p, **{name: kind(x.detach())})
        if op in RULES:
            with pytest.raises(TypeError, match="state to be a dense tensor, got "):
                call(p, state=kind(p.state[0].detach()))


#: Valid arguments of each layer, model and feature map.
MADE = {
    **{name: {"d_model": 8, "heads": 2} for name in layers.__all__},
    "AFTSimple": {"d_model": 8},
    "AFTFull": {"d_model": 8, "max_len": 9},
    "AFTLocal": {"d_model": 8, "max_len": 9},
    "AFTConv2d": {"d_model": 8, "heads": 2, "size": 3},
    "FeedbackTransformer": {"d_model": 8, "heads": 2, "layers": 1},
    "TransformerXL": {"d_model": 8, "heads": 2, "layers": 1},
    "Block": {"mixer": torch.nn.Identity(), "d_model": 8},
    "LanguageModel": {"vocab_size": 5, "d_model": 8},
    "EncoderDecoder": {"source_vocab": 5, "target_vocab": 5, "d_model": 8},
    "DPFP": {},
    "FAVOR": {"d": 4},
    "RandomFourier": {"d": 4},
}


#: Integer arguments that may be below 1, and arguments that may be negative.
ZEROS = {"conv_size", "memory", "rope", "rope_base", "seed"}
FREE = {"scale", "seed"}


@pytest.mark.parametrize("name", MADE)
def test_the_constructor_names_a_wrong_argument(name):
    """Errors of a constructor name arguments of a wrong type or out of range."""
    kinds = (layers, models, feature_maps)
    kind = next(getattr(module, name) for module in kinds if hasattr(module, name))
    assert kind(**MADE[name])
    for argument, parameter in inspect.signature(kind).parameters.items():
        annotation = str(parameter.annotation)
        wrong: list = [{"delta"}, *["nix"] * (argument != "activation")]
        wrong += [-1] * (argument not in FREE)
        wrong += [0] * ("int" in annotation and argument not in ZEROS)
        wrong += [math.nan, math.inf] * ("float" in annotation)
        wrong += [1] * argument.endswith("dropout")
        for value in wrong:
            message = rf"^\w+: expected .*{argument}.*got .*{re.escape(repr(value))}$"
            error = TypeError if isinstance(value, set) else (TypeError, ValueError)
            refuses(partial(kind, **MADE[name] | {argument: value}), message, error)


@pytest.mark.parametrize("op", EVERY)
def test_the_operation_names_a_wrong_argument(op):
    """Errors of an operation name tensors with a wrong type, dtype, device or shape."""
    p = small(op, dropout=1)
    first, *_ = fuzz.takes(op)
    for name, x in p.x.items():
        x = x.detach()
        for wrong, error, message in (
            ([1.0], TypeError, f"{name} to be a tensor, got list"),
            (x.long(), TypeError, f"{name} in float16, bfloat16, .*got int64"),
            (x.to(torch.float8_e4m3fn), TypeError, f"{name} in .*got float8_e4m3fn"),
            (x.to("meta"), ValueError, f"{name} on cpu, like {first}, got meta"),
            (x.half(), TypeError, f"{name} in the precision of {first}, float64"),
            (x[None], ValueError, rf"{name} of shape .*got \[1, "),
            (x[:-1], ValueError, rf"{name} of shape .*got \["),
        ):
            others = isinstance(wrong, torch.Tensor) and wrong.dtype == x.dtype
            if name in (first, "to_q", "to_k") and (others or "precision" in message):
                continue  # The error names another argument.
            message = rf"^{op}: expected (weights\.)?{message}"
            refuses(partial(call, p, **{name: wrong}), message, error)
    some = torch.zeros(2, 3, 4, 5, dtype=torch.float64)
    for name, wrong, error, message in (
        ("key_mask", torch.ones(2, 5), TypeError, "key_mask to be a bool tensor"),
        ("key_mask", [True], TypeError, "key_mask to be a tensor, got list"),
        ("key_mask", torch.ones(2, 4).bool(), ValueError, "key_mask of shape"),
        ("state", 3, TypeError, "state to be a .*got int"),
        ("state", some, (TypeError, ValueError), "state .*got (Tensor|.*5|a tensor)"),
        ("implementation", "cuda", ValueError, "implementation to be one of 'auto'"),
        ("implementation", ["no"], TypeError, r"implementation to be .*got \['no'\]"),
        ("return_state", ["no"], TypeError, r"return_state to be .*got \['no'\]"),
        ("causal", "no", TypeError, "causal to be True or False, got 'no'"),
        ("normalize", "yes", TypeError, "normalize to be True or False, got 'yes'"),
        ("scale", "a", TypeError, "scale to be a finite number, got 'a'"),
        ("scale", True, TypeError, "scale to be a finite number, got True"),
        ("scale", math.nan, ValueError, "scale to be a finite number, got nan"),
        ("scale", torch.ones(2), ValueError, "scale to be a .*or a tensor of one"),
    ):
        if name in fuzz.takes(op) and name not in p.x:
            message = f"^{op}: expected {message}"
            refuses(partial(call, p, **{name: wrong}), message, error)
    refuses(partial(call, p, misspelt=1), "misspelt", TypeError)


Z = partial(torch.zeros, dtype=torch.float64)
SINGLE, WHOLE = torch.zeros(2, 2, 3, 4), Z(2, 2, 3, 4)
MEMORIES = Z(2, 3, 1, 2, 4)


@pytest.mark.parametrize(
    ("op", "changes", "message"),
    [
        ("delta_rule", {"state": SINGLE}, "state in float64 for these inputs, got float32"),
        ("delta_rule", {"state": WHOLE, "normalize": True}, "state to be a NormalizedState"),
        ("delta_rule", {"q": Z(2, 5, 3, 4)}, "the heads of q to be a multiple of the 2 heads of k, got 3"),
        ("delta_rule", {"v": Z(2, 5, 1, 4)}, r"v of shape \[2, 5, 2, value\]"),
        ("softmax_attention", {"q": Z(2, 5, 3, 4)}, "the heads of q to be a multiple of the 2 heads"),
        ("softmax_attention", {"state": (None, None, None)}, "state.k to be a tensor"),
        ("softmax_attention", {"state": (Z(2, 3, 2, 4), Z(2, 3, 2, 3), Z(2, 3))}, "state.mask to be a bool"),
        ("sum_rule", {"scale": torch.tensor(True)}, r"scale .*got a bool tensor of shape \[\]"),
        ("fwp", {"activation": "tanh"}, "activation to be a function or None, got 'tanh'"),
        ("fwp", {"activation": lambda W: W.sum()}, r"activation to return .*got torch.float64 \[\]"),
        ("fwp", {"activation": lambda W: W.float()}, "activation to return .*got torch.float32"),
        ("fwp", {"activation": lambda W: None}, "activation to return .*got NoneType"),
        ("aft_full", {"bias": Z(5, 4)}, r"bias of shape \[5, 5\].*got \[5, 4\]"),
        ("aft_local", {"band": Z(5, 4), "causal": False}, r"band .*odd.*got \[5, 4\]"),
        ("aft_simple", {"causal": False, "return_state": True}, "causal=True"),
        ("aft_full", {"causal": False, "state": (0, 0)}, "causal=True"),
        ("aft_local", {"state": (Z(2, 3, 3),) * 4}, r"state.k of shape \[2, 2, 3\].*got \[2, 3, 3\]"),
        ("aft_simple", {"state": (torch.zeros(2, 3),) * 2}, "state.log_sum in float64 for these inputs"),
        ("aft_conv2d", {"kernel": Z(2, 4, 4)}, "kernel of odd size, got size 4"),
        ("feedback", {"state": ops.FeedbackState(MEMORIES, MEMORIES[:, 1:], None)}, r"state.v of shape \[2, 3, "),
        ("feedback", {"state": ops.FeedbackState(MEMORIES.float(), MEMORIES, None)}, "state.k in float64"),
        ("feedback", {"factors": Z(2, 5, 1, 7)}, r"factors of shape \[2, 5, 1, 19\]"),
        ("feedback", {"positions": Z(4, 3)}, "weights.positions to have an even number .*got 3"),
        ("feedback", {"to_k": Z(2, 8, 8), "to_v": Z(2, 8, 8), "norm_memory": None}, "to_k to have 1 group .*got 2"),
    ],
)  # fmt: skip
def test_the_operation_says_what_does_not_fit(op, changes, message):
    refuses(partial(call, small(op), **changes), f"^{op}: expected .*{message}")
