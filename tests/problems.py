"""The operations as one table, and random problems for them."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fwlab import ops
from fwlab.feature_maps import DPFP, l2_normalize, sum_normalize


@dataclass(frozen=True)
class Rule:
    """One row: a fast weight rule with or without its normaliser."""

    op: Callable
    gates: int
    normalize: bool

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *gates: Tensor, **options):
        return self.op(q, k, v, *gates, normalize=self.normalize, **options)


RULES = {
    "sum": Rule(ops.sum_rule, 0, False),
    "sum-normalized": Rule(ops.sum_rule, 0, True),
    "delta": Rule(ops.delta_rule, 1, False),
    "delta-normalized": Rule(ops.delta_rule, 1, True),
}


def problem(
    rule: Rule,
    time: int,
    batch: int = 2,
    heads: int = 3,
    key: int = 6,
    value: int = 5,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    with_state: bool = True,
) -> tuple[list[Tensor], ops.NormalizedState | Tensor | None]:
    """Inputs `[q, k, v, *gates]` and a state, all leaves with gradients.

    With a normaliser keys are DPFP features, as in the papers: a signed
    denominator can come arbitrarily close to 0, and no two ways to add
    it up agree there. Strengths contain exact zeros and ones.
    """
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    def features(*shape: int) -> Tensor:
        x = random(*shape[:-1], shape[-1] // 2)
        if rule.normalize:
            return sum_normalize(DPFP()(x) + 0.05)
        return l2_normalize(random(*shape))

    width = 2 * (key // 2) if rule.normalize else key
    inputs = [
        features(batch, time, heads, width),
        features(batch, time, heads, width),
        random(batch, time, heads, value),
    ]
    if rule.gates:
        beta = torch.rand(batch, time, heads, generator=generator, dtype=torch.float64)
        beta[:, 2::7], beta[:, 3::7] = 0.0, 1.0
        inputs.append(beta)
    state = None
    if with_state:
        state_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        W = random(batch, heads, value, width).to(state_dtype).requires_grad_()
        z = random(batch, heads, width).abs().to(state_dtype).requires_grad_()
        state = ops.NormalizedState(W, z) if rule.normalize else W
    return [x.to(dtype).requires_grad_() for x in inputs], state


def parts(state: ops.NormalizedState | Tensor | None) -> tuple[Tensor, ...]:
    """A state as a tuple of its tensors."""
    if state is None:
        return ()
    return (state,) if isinstance(state, Tensor) else tuple(state)


def error(found: Tensor, wanted: Tensor) -> float:
    """Norm of the difference over the norm of what was wanted."""
    wanted = wanted.double()
    return ((found.double() - wanted).norm() / wanted.norm().clamp(min=1e-30)).item()


def weighted(*outputs: Tensor, seed: int = 1) -> Tensor:
    """A scalar that depends on every output with a random weight."""
    generator = torch.Generator().manual_seed(seed)
    total = torch.zeros((), dtype=torch.float64)
    for output in outputs:
        weights = torch.randn(output.shape, generator=generator, dtype=torch.float64)
        total = total + (output.double() * weights).sum()
    return total
