"""The four fast weight rules, with and without their normaliser."""

from functools import partial

import pytest
import torch
from torch import Generator, Tensor

from fwlab import ops
from fwlab.feature_maps import DPFP, l2_normalize, sum_normalize
from fwlab.ops import chunks
from problems.row import Inputs, Row

KEY, VALUE, HEADS = 6, 5, 3


def make(
    time: int,
    generator: Generator,
    with_state: bool,
    *,
    gates: tuple[str, ...],
    normalize: bool,
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
        decay = -torch.rand(2, time, HEADS, generator=generator, dtype=torch.float64)
        decay[:, 4::9], decay[:, 6::11] = 0.0, -1000.0
        inputs.append(decay)
    if not with_state:
        return inputs, None
    W, z = random(2, HEADS, VALUE, KEY), random(2, HEADS, KEY).abs()
    return inputs, ops.NormalizedState(W, z) if normalize else W


def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "LENGTH", 2)
    monkeypatch.setattr(chunks, "ROWS", {"cpu": 12})


def large(time: int, *, gates: tuple[str, ...]) -> Inputs:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.rand(1, time, 4, 32, generator=generator) for _ in range(3))
    more = [torch.rand(1, time, 4, generator=generator) for _ in gates]
    return [sum_normalize(q), sum_normalize(k), v, *more]


def _decaying_sum(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, **options):
    return ops.sum_rule(q, k, v, log_decay=log_decay, **options)


def _row(op, *gates: str, normalize: bool) -> Row:
    return Row(
        partial(op, normalize=normalize),
        partial(make, gates=gates, normalize=normalize),
        partial(large, gates=gates),
        small=small,
    )


def dpfp(
    time: int, generator: Generator, with_state: bool
) -> tuple[Inputs, Tensor | None]:
    """Keys as they come; features of width 6 are made by the operation.

    No zeros: divided by their sum, features jump there.
    """

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    inputs = [random(2, time, HEADS, width) for width in (3, 3, VALUE)]
    inputs.append(torch.rand(2, time, HEADS, generator=generator, dtype=torch.float64))
    return inputs, random(2, HEADS, VALUE, 6) if with_state else None


ROWS = {
    "dpfp-delta": Row(
        ops.dpfp_delta_rule, dpfp, partial(large, gates=("beta",)), small=small
    )
} | {
    f"{name}-normalized" if normalize else name: _row(op, *gates, normalize=normalize)
    for name, op, *gates in (
        ("sum", ops.sum_rule),
        ("sum-decay", _decaying_sum, "log_decay"),
        ("gated", ops.gated_rule, "beta"),
        ("delta", ops.delta_rule, "beta"),
        ("gated-delta", ops.gated_delta_rule, "beta", "log_decay"),
    )
    for normalize in (False, True)
}
