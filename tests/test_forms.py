"""Test that every implementation of every rule agrees with the loop of the rule.

New rules are included. tests/fuzz.py compares each loop with tests/loops.py,
on many more problems.
"""

import itertools

import pytest
import torch
from alike import weighted
from torch import Tensor

from fwlab import ops
from fwlab.bench.problems import RULES, example

TIME = 45
SIZES = {"batch": 2, "time": TIME, "heads": 2, "queries": 2, "key": 6, "value": 5}
FORMS = [
    (name, form)
    for name, op in RULES.items()
    for form in ops.implementations(name)
    if form != "triton"
]


def problem(name: str, seed: int = 0) -> tuple[dict[str, Tensor], Tensor, dict]:
    """Return a rule's inputs (with decays for odd seeds), a state, and options."""
    generator, op = torch.Generator().manual_seed(seed), RULES[name]
    x = example(op, SIZES | {"steps": 2}, generator)
    if seed % 2:
        decay = -torch.rand(2, TIME, 2, generator=generator).double()
        x |= {n: decay for n in op.rule.optional}
    W = torch.randn(2, 2, 5, 6, generator=generator, dtype=torch.float64)
    return x, W, {"normalize": False} if op.rule.normalized_loop else {}


def gradients(y: Tensor, W: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    loss = weighted(y, W)
    return [y, W, *torch.autograd.grad(loss, leaves, materialize_grads=True)]


def close(found: list[Tensor], expected: list[Tensor]) -> None:
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(("name", "form"), FORMS)
def test_a_masked_step_is_as_if_the_token_were_not_there(name, form, seed):
    x, W, options = problem(name, seed)
    mask = torch.rand(2, TIME, generator=torch.Generator().manual_seed(2)) > 0.4
    hidden = {n: part.clone() for n, part in x.items()}
    for part in hidden.values():
        part[~mask] = torch.nan
    call, leaves = RULES[name], [W, *hidden.values()]
    for leaf in leaves:
        leaf.requires_grad_()
    options |= {"return_state": True}
    y, after = call(**hidden, **options, state=W, key_mask=mask, implementation=form)
    found = gradients(y, after, leaves)
    rows, states = [], []
    for i in range(2):
        here = mask[i].nonzero()[:, 0]
        dropped = {n: part[i : i + 1, here] for n, part in hidden.items()}
        y_i, W_i = call(
            **dropped, **options, state=W[i : i + 1], implementation="naive"
        )
        rows.append(y_i.new_zeros(1, *y.shape[1:]).index_copy(1, here, y_i))
        states.append(W_i)
    close(found, gradients(torch.cat(rows), torch.cat(states), leaves))


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(("name", "form"), FORMS)
def test_a_packed_document_is_as_if_it_were_alone(name, form, seed):
    x, _, options = problem(name, seed)
    x = {n: part[:1].clone().requires_grad_() for n, part in x.items()}
    borders = [0, 1, 20, 20, TIME]  # One document is empty.
    call, none = RULES[name], torch.zeros((), dtype=torch.float64, requires_grad=True)
    y = call(**x, **options, cu_seqlens=torch.tensor(borders), implementation=form)
    alone = [
        call(**{n: p[:, a:b] for n, p in x.items()}, **options, implementation="naive")
        for a, b in itertools.pairwise(borders)
    ]
    leaves = [*x.values()]
    close(gradients(y, none, leaves), gradients(torch.cat(alone, 1), none, leaves))
