r"""The kernels of flash-linear-attention, to compare ours with.

flash-linear-attention (https://github.com/fla-org) has kernels for the recurrences of
five of our rules. Its conventions are others than those of `fwlab.ops`:

- it multiplies queries by $K^{-1/2}$, unless told otherwise;
- a state is `[batch, heads, key, value]`, the transpose of our $W$;
- it takes the logarithm of a decay, and sums it up within a chunk. So a decay of 0 is
  raised to `SMALLEST` here: the difference of two infinite sums is not a number.

Each function takes the tensors of our operation of that name, and returns its output
without a normaliser and without a state.
"""

from collections.abc import Callable
from importlib import metadata

from torch import Tensor

SMALLEST = 1e-11


def version() -> str | None:
    """Return the version of flash-linear-attention; None = it is not installed."""
    for package in ("flash-linear-attention", "fla-core"):  # all, or only operations
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            pass
    return None


def sum_rule(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Add values."""
    from fla.ops.simple_gla import chunk_simple_gla

    return chunk_simple_gla(q, k, v, scale=1.0)[0]


def gated_rule(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    r"""Fade by $1 - \beta$, then add a part $\beta$ of the values."""
    from fla.ops.simple_gla import chunk_simple_gla

    kept = (1 - beta.float()).clamp(min=SMALLEST)
    return chunk_simple_gla(q, k, beta[..., None] * v, g=kept.log(), scale=1.0)[0]


def delta_rule(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """Replace what a key retrieves."""
    from fla.ops.delta_rule import chunk_delta_rule

    return chunk_delta_rule(q, k, v, beta=beta, scale=1.0)[0]


def implicit_delta_rule(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """Replace what a key retrieves, after a step of the implicit rule."""
    return delta_rule(q, k, v, beta / (1 + beta * k.square().sum(-1)))


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor
) -> Tensor:
    """Fade, then replace what a key retrieves."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    return chunk_gated_delta_rule(q, k, v, g=log_decay.float(), beta=beta, scale=1.0)[0]


#: By the names of our operations.
PEERS: dict[str, Callable[..., Tensor]] = {
    function.__name__: function
    for function in (
        sum_rule,
        gated_rule,
        delta_rule,
        implicit_delta_rule,
        gated_delta_rule,
    )
}
