"""The fast weight rules, with and without their normaliser."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Generator, Tensor

from fwlab import ops
from fwlab.feature_maps import DPFP, sum_normalize
from fwlab.ops.call.rule import Rule
from fwlab.ops.parts import chunks
from problems.row import Inputs, Row

KEY, VALUE, HEADS = 6, 5, 3


def make(
    time: int,
    generator: Generator,
    with_state: bool,
    *,
    record: Rule,
    normalize: bool,
    options: dict[str, str] | None = None,
) -> tuple[Inputs, Tensor | ops.NormalizedState | None]:
    """Examples of the record, with exact edges of every gate.

    With a normaliser keys are DPFP features, as in the papers: a signed denominator can
    come arbitrarily close to 0, and no two ways to add it up agree there.
    """

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    def features() -> Tensor:
        return sum_normalize(DPFP()(random(2, time, HEADS, KEY // 2)) + 0.05)

    sizes = {"batch": 2, "time": time, "heads": HEADS, "key": KEY, "value": VALUE}
    x = record.example(generator, options, **sizes)
    if normalize:
        x |= {"q": features(), "k": features()}
    else:  # where an empty denominator would jump
        x["q"][:, 7::9], x["k"][:, 5::8] = 0.0, 0.0
    for place, (name, gate) in enumerate(record.gates.items()):
        if name in x:
            low, high = gate.edges
            x[name][:, 2 + 2 * place :: 7 + 2 * place] = low
            x[name][:, 3 + 3 * place :: 7 + 4 * place] = high
    inputs = [*x.values()]
    if not with_state:
        return inputs, None
    W, z = random(2, HEADS, VALUE, KEY), random(2, HEADS, KEY).abs()
    return inputs, ops.NormalizedState(W, z) if normalize else W


def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "LENGTH", 2)
    monkeypatch.setattr(chunks, "ROWS", {"cpu": 12})


def large(time: int, *, record: Rule, options: dict[str, str] | None = None) -> Inputs:
    generator = torch.Generator().manual_seed(0)
    sizes = {"batch": 1, "time": time, "heads": 4, "key": 32, "value": 32}
    x = record.example(generator, options, **sizes)
    return [part.float() for part in x.values()]


def decaying_sum(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, **options):
    return ops.sum_rule(q, k, v, log_decay=log_decay, **options)


def rows(
    record: Rule,
    name: str,
    op: Callable[..., Any],
    options: dict[str, str] | None = None,
) -> dict[str, Row]:
    """A rule as its record says, with and without a normaliser."""
    made = {}
    for normalize in (False, True)[: 1 + record.normalizes]:
        call = partial(op, normalize=normalize) if record.normalizes else op
        made[name + "-normalized" * normalize] = Row(
            call,
            partial(make, record=record, normalize=normalize, options=options),
            partial(large, record=record, options=options),
            small=small,
            # With more inputs, both keep more of them.
            ratio=4 if len(record.gates) < 3 else 2,
        )
    return made


def dpfp(
    time: int, generator: Generator, with_state: bool, nu: int = 1
) -> tuple[Inputs, Tensor | None]:
    """Keys as they come; features of width `KEY * nu` are made by the operation.

    No zeros: divided by their sum, features jump there.
    """

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    widths = (KEY // 2, KEY // 2, VALUE)
    inputs = [random(2, time, HEADS, width) for width in widths]
    inputs.append(torch.rand(2, time, HEADS, generator=generator, dtype=torch.float64))
    return inputs, random(2, HEADS, VALUE, KEY * nu) if with_state else None


ROWS = {
    "dpfp-delta": Row(
        ops.dpfp_delta_rule,
        dpfp,
        partial(large, record=ops.TABLE["delta_rule"]),
        small=small,
    ),
    **rows(ops.TABLE["sum_rule"], "sum-decay", decaying_sum, {"log_decay": "heads"}),
    "sum-channels": rows(
        ops.TABLE["sum_rule"], "", decaying_sum, {"log_decay": "heads key"}
    )[""],
}
for record in ops.TABLE.values():
    if isinstance(record, Rule) and record.mixer:
        ROWS |= rows(record, record.mixer, getattr(ops, record.name))
