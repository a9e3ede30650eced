"""Inputs of unusual kinds: scales that are not positive, tangents of forward-mode
differentiation, and tensors that are not dense.
"""

import inspect
import re
from functools import partial

import fuzz
import pytest
import torch
from alike import call, error, problem, refuses
from loops import AFT, RULES
from torch.utils._pytree import tree_map

from fwlab import feature_maps, layers, models, ops

EVERY = (*RULES, "fwp", "softmax_attention", *AFT, "feedback")


def small(op, **options):
    text = f"op={op} batch=2 time=5 heads=2 key=4 value=3 window=3 asked=y"
    return problem(text, **options)


@pytest.mark.parametrize(
    ("dtype", "limit"),
    [
        (torch.float64, 1e-12),
        (torch.float32, 1e-5),
        (torch.float16, 2e-3),
        (torch.bfloat16, 1e-2),
    ],
)
def test_softmax_attention_with_any_scale(dtype, limit):
    """PyTorch's own causal attention is NaN unless the scale is above 0, rounded
    to float32.
    """
    q, k, v, weights = torch.randn(4, 2, 9, 2, 4, dtype=torch.float64).to(dtype)
    future = torch.ones(9, 9, dtype=torch.bool).triu(1)

    def formula(q, k, v):
        scores = torch.einsum("bihc,bjhc->bhij", q, k) * scale
        shares = scores.masked_fill(future, -torch.inf).softmax(-1)
        return torch.einsum("bhij,bjhc->bihc", shares, v)

    def all_of(function, *inputs):
        leaves = [x.clone().requires_grad_() for x in inputs]
        y = function(*leaves)
        return [y, *torch.autograd.grad((y * weights).sum(), leaves)]

    for scale in (0.0, -1.0, -0.3, 1e-300, -1e-300):
        wanted = all_of(formula, q.double(), k.double(), v.double())
        for factor in (scale, torch.tensor(scale, dtype=torch.float64)):
            for implementation in ("auto", "naive"):
                attend = partial(
                    ops.softmax_attention, scale=factor, implementation=implementation
                )
                results = all_of(attend, q, k, v)
                for x, y in zip(results, wanted, strict=True):
                    # With scores of 0, q and k have none, up to 1e-300.
                    nothing = x.double().norm() < 1e-30 > y.norm()
                    assert nothing or error(x, y) < limit


def test_a_scale_does_not_round_queries():
    """In half precision, the naive version multiplies by it in float32."""
    q, k, v = torch.randn(3, 1, 9, 2, 4).bfloat16()
    options = {"scale": 3.0, "implementation": "naive"}
    wanted = ops.softmax_attention(q.double(), k.double(), v.double(), **options)
    y = ops.softmax_attention(q, k, v, **options)
    assert error(y, wanted.bfloat16()) < 1e-3


@pytest.mark.parametrize("transform", ["vmap", "jvp"])
@pytest.mark.parametrize("op", EVERY)
def test_efficient_forms_refuse_torch_func(op, transform):
    """The fuzzer tries "auto"; what is differentiated by hand says what can."""
    p = small(op, implementation="efficient")
    if op == "softmax_attention" and transform == "vmap":
        return  # PyTorch's own can
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
    """Each argument in turn, and the state: one sentence that names it."""
    for op in EVERY:
        p = small(op, dtype="float32", state=int(op in RULES))
        for name, x in p.x.items():
            if x.dim() > 1:
                with pytest.raises(TypeError, match="to be a dense tensor, got "):
                    call(p, **{name: kind(x.detach())})
        if op in RULES:
            with pytest.raises(TypeError, match="state to be a dense tensor, got "):
                call(p, state=kind(p.state[0].detach()))


#: Arguments with which each layer, model and feature map is made.
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


@pytest.mark.parametrize("name", MADE)
def test_the_constructor_names_an_argument_of_the_wrong_type(name):
    """Of every argument: a set, and text, in place of a number, flag or name."""
    rooms = (layers, models, feature_maps)
    kind = next(getattr(room, name) for room in rooms if hasattr(room, name))
    assert kind(**MADE[name])
    for argument, parameter in inspect.signature(kind).parameters.items():
        wrong: list = [{"delta"}] + ["yes"] * ("str" not in str(parameter.annotation))
        for value in wrong:
            message = (
                rf"^\w+: expected {argument} to be .*got {re.escape(repr(value))}$"
            )
            make = partial(kind, **MADE[name] | {argument: value})
            refuses(make, message, TypeError)


def test_operations_name_an_argument_of_the_wrong_type():
    for op in EVERY:
        for argument in ("return_state", "implementation"):
            if argument in fuzz.takes(op):
                wrong = partial(call, small(op), **{argument: ["no"]})
                message = rf"expected {argument} to be .*got \['no'\]$"
                refuses(wrong, message, TypeError)


def test_what_decoding_takes():
    model = models.LanguageModel(5, layers=1, d_model=8, heads=2)
    text = torch.zeros(1, 2, dtype=torch.long)
    refuses(lambda: model.generate([[0]], 2), "prompt to be a tensor, got list")
    refuses(lambda: model.generate(text, "2"), "max_new_tokens to be an integer")
    refuses(lambda: model.generate(text, 2, top_k=1.5), "top_k to be an integer")
    refuses(lambda: model([[0]]), "tokens to be a tensor, got list")
