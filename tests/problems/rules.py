"""The fast weight rules, with and without their normaliser."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Generator, Tensor

from fwlab import ops
from fwlab.feature_maps import DPFP, l2_normalize, sum_normalize
from fwlab.ops import chunks
from fwlab.ops.rule import Rule
from problems.row import Inputs, Row

KEY, VALUE, HEADS = 6, 5, 3


def make(
    time: int,
    generator: Generator,
    with_state: bool,
    *,
    gates: tuple[str, ...],
    normalize: bool,
    channels: bool = False,
) -> tuple[Inputs, Tensor | ops.NormalizedState | None]:
    """With a normaliser keys are DPFP features, as in the papers: a
    signed denominator can come arbitrarily close to 0, and no two ways to
    add it up agree there.
    """

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    def features() -> Tensor:
        if normalize:
            return sum_normalize(DPFP()(random(2, time, HEADS, KEY // 2)) + 0.05)
        return l2_normalize(random(2, time, HEADS, KEY))

    inputs = [features(), features(), random(2, time, HEADS, VALUE)]
    if not normalize:  # where an empty denominator would jump
        inputs[0][:, 7::9], inputs[1][:, 5::8] = 0.0, 0.0
    if "beta" in gates:
        beta = torch.rand(2, time, HEADS, generator=generator, dtype=torch.float64)
        beta[:, 2::7], beta[:, 3::7] = 0.0, 1.0
        inputs.append(beta)
    if "log_decay" in gates:
        shape = (2, time, HEADS, KEY) if channels else (2, time, HEADS)
        decay = -torch.rand(shape, generator=generator, dtype=torch.float64)
        decay[:, 4::9], decay[:, 6::11] = 0.0, -1000.0
        inputs.append(decay)
    if not with_state:
        return inputs, None
    W, z = random(2, HEADS, VALUE, KEY), random(2, HEADS, KEY).abs()
    return inputs, ops.NormalizedState(W, z) if normalize else W


def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "LENGTH", 2)
    monkeypatch.setattr(chunks, "ROWS", {"cpu": 12})


def large(time: int, *, gates: tuple[str, ...], channels: bool = False) -> Inputs:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.rand(1, time, 4, 32, generator=generator) for _ in range(3))
    more = [torch.rand(1, time, 4, generator=generator) for _ in gates]
    if channels:
        more[-1] = torch.rand(1, time, 4, 32, generator=generator)
    return [sum_normalize(q), sum_normalize(k), v, *more]


def decaying_sum(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, **options):
    return ops.sum_rule(q, k, v, log_decay=log_decay, **options)


#: Where a row is not called as its record says.
OPS = {"sum-decay": decaying_sum}


def _rows(record: Rule) -> dict[str, Row]:
    """A rule as its record says, with and without a normaliser."""
    given = {
        "gates": record.required,
        "channels": "key" in record.gates.get("log_decay", ""),
    }
    options = ({}, {"normalize": True}) if record.normalizes else ({},)
    rows = {}
    for more in options:
        normalize = "normalize" in more
        name = f"{record.mixer}-normalized" if normalize else record.mixer
        op = OPS.get(record.mixer, getattr(ops, record.name))
        if record.normalizes:
            op = partial(op, normalize=normalize)
        rows[name] = Row(
            op,
            partial(make, normalize=normalize, **given),
            partial(large, **given),
            small=small,
        )
    return rows


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
        ops.dpfp_delta_rule, dpfp, partial(large, gates=("beta",)), small=small
    ),
    **_rows(
        replace(
            ops.TABLE["sum_rule"],
            mixer="sum-decay",
            optional=(),
        )
    ),
}
for record in ops.TABLE.values():
    if isinstance(record, Rule) and record.mixer:
        ROWS |= _rows(record)
