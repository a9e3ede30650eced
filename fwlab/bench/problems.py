"""Draw usual inputs of any operation of `fwlab.ops`, by the names of its dimensions."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fwlab import ops
from fwlab.feature_maps import l2_normalize
from fwlab.ops import _operation as operation

#: The rules, by the name of their operation.
RULES = {name: op for name, op in ops.TABLE.items() if hasattr(op, "rule")}
#: The sizes of dimensions that a case does not name.
SIZES = {"batch": 4, "heads": 4, "steps": 2, "layers": 1, "window": 32}


class Problem(NamedTuple):
    """Hold what is computed, forward and backward.

    - `call`: takes `inputs` and `implementation`.
    - `inputs`: leaves with gradients.
    - `gradient`: that of the output.
    """

    call: Callable[..., Any]
    inputs: list[Tensor]
    gradient: Tensor


def example(
    op: Any, sizes: Mapping[str, int], generator: torch.Generator
) -> dict[str, Tensor]:
    """Draw usual inputs of an operation by name, in float64.

    - `sizes`: those of its dimensions by name. Arguments that may be missing are.
    """
    rule, x = getattr(op, "rule", None), {}
    for name, dims in operation.annotated(op).names.items():
        if rule and name in rule.optional:
            continue
        shape = [sizes[dim] for dim in dims]
        part = torch.randn(shape, generator=generator, dtype=torch.float64)
        if rule and name in "qk":
            x[name] = l2_normalize(part)
        elif rule and name != "v":
            decays = name == "log_decay"
            x[name] = -F.softplus(part - 1) if decays else torch.sigmoid(part)
        else:  # The programmer of 1991 writes little: tanh is not saturated.
            x[name] = part / 4 if name in "ab" else part
    if rule and "a" in x:  # RWKV-7 removes a part of what the key holds
        x |= {"a": -x["k"], "b": x["k"] * x["b"]}
    return x


def stack_weights(
    sizes: Mapping[str, int], generator: torch.Generator
) -> dict[str, Tensor]:
    """Draw weights of a feedback stack that keep its numbers in range, in float64."""
    layers, d = sizes["layers"], sizes["d"]
    key, groups = d // sizes["heads"], sizes.get("groups", layers)
    shapes = {"merge": (layers + 1,), "positions": (key, key)}
    shapes |= dict.fromkeys(("to_q", "to_out"), (layers, d, d))
    shapes |= dict.fromkeys(("to_k", "to_v"), (groups, d, d))
    shapes |= {"expand": (layers, 4 * d, d), "contract": (layers, d, 4 * d)}
    norms = dict.fromkeys(("norm_mixer", "norm_mlp"), layers) | {"norm_memory": groups}
    weights = {}
    for name, shape in (shapes | {n: (count, d) for n, count in norms.items()}).items():
        part = torch.randn(shape, generator=generator, dtype=torch.float64)
        weights[name] = 1 + part / 10 if name in norms else part / shape[-1] ** 0.5
    return weights


def problem(op: Any, dtype: torch.dtype, **sizes: int) -> Problem:
    """Draw inputs of an operation, and the gradient of its output.

    - `sizes`: `time`, `width` (of a head, or of all channels), and others of `SIZES`.
    """
    generator, sizes = torch.Generator().manual_seed(0), SIZES | sizes
    width, heads, name = sizes.pop("width"), sizes["heads"], op.__name__
    # The dimensions of keys in AFT: of the table of biases, or those of a head.
    wide, keys = width, sizes["time"]
    if name == "aft_conv":
        wide = keys = width // heads
    sizes |= dict.fromkeys(("key", "value", "d"), width) | {"channels": wide}
    sizes |= {"queries": heads, "keys": keys}
    call = op
    if name == "feedback":
        shape = [sizes[dim] for dim in ("batch", "time", "d")]
        x = {"x": torch.randn(shape, generator=generator, dtype=torch.float64)}
        weights = stack_weights(sizes, generator)
        call, x = partial(feedback, [*weights], heads), x | weights
    else:
        x = example(op, sizes, generator)
    if hasattr(op, "rule") and op.rule.normalized_loop:
        call = partial(op, normalize=False)
    like = x.get("v", next(iter(x.values())))
    if name == "delta_product":
        like = like[:, :, 0]
    gradient = torch.randn(like.shape, generator=generator, dtype=torch.float64)
    inputs = [part.to(dtype).requires_grad_() for part in x.values()]
    return Problem(call, inputs, gradient.to(dtype))


def feedback(
    names: list[str], heads: int, x: Tensor, *weights: Tensor, implementation: str
) -> Any:
    """Call `ops.feedback` with all weights as arguments."""
    given = ops.FeedbackWeights(**dict(zip(names, weights, strict=True)))
    return ops.feedback(x, given, heads=heads, implementation=implementation)
