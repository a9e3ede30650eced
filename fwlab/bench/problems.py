"""Draw typical inputs of any operation of `fwlab.ops`, by names of its dimensions."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fwlab import ops
from fwlab.feature_maps import l2_normalize
from fwlab.layers import FeedbackTransformer
from fwlab.ops import _operation as operation

#: Operations that are fast weight rules, by name.
RULES = {name: op for name, op in ops.TABLE.items() if hasattr(op, "rule")}
#: Default sizes of dimensions that a case does not name.
SIZES = {"batch": 4, "heads": 4, "steps": 2, "layers": 1, "window": 32}


class Problem(NamedTuple):
    """Hold the inputs and the call of a benchmark's forward and backward pass.

    - `call`: a function of `inputs` and `implementation`.
    - `inputs`: leaves with gradients.
    - `gradient`: gradient of the output.
    """

    call: Callable[..., Any]
    inputs: list[Tensor]
    gradient: Tensor


def example(
    op: Any, sizes: Mapping[str, int], generator: torch.Generator
) -> dict[str, Tensor]:
    """Draw typical random inputs of an operation, by argument name, in float64.

    - `sizes`: sizes of the dimensions by name. Optional arguments are left out.
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
        else:  # Small `a` and `b` do not saturate tanh in `fwp`.
            x[name] = part / 4 if name in "ab" else part
    if rule and "a" in x:  # RWKV-7 erases a part of the key's value.
        x |= {"a": -x["k"], "b": x["k"] * x["b"]}
    return x


def problem(op: Any, dtype: torch.dtype, **sizes: int) -> Problem:
    """Draw inputs of an operation, and the gradient of its output.

    - `sizes`: `time`, `width` (of a head, or of all channels), and others of `SIZES`.
    """
    generator, sizes = torch.Generator().manual_seed(0), SIZES | sizes
    width, heads, name = sizes.pop("width"), sizes["heads"], op.__name__
    # In AFT, `keys` is the width of the bias table or, in AFT-conv, of a head.
    wide, keys = width, sizes["time"]
    if name == "aft_conv":
        wide = keys = width // heads
    sizes |= dict.fromkeys(("key", "value", "d"), width) | {"channels": wide}
    sizes |= {"queries": heads, "keys": keys}
    call = op
    if name == "feedback":
        torch.manual_seed(0)
        d, layers, shared = sizes["d"], sizes["layers"], sizes.get("groups") == 1
        stack = FeedbackTransformer(d, heads, layers, shared=shared).double()
        weights = {n: w.detach() for n, w in stack.weights()._asdict().items()}
        # Perturb the weights of norms and of the mean over layers, as training would.
        x = {n: w + torch.randn_like(w) / 10 for n, w in weights.items()}
        x = {"x": torch.randn(sizes["batch"], sizes["time"], d).double()} | x
        call = partial(feedback, [*weights], heads)
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
    """Call `ops.feedback` with the weights as positional arguments."""
    given = ops.FeedbackWeights(**dict(zip(names, weights, strict=True)))
    return ops.feedback(x, given, heads=heads, implementation=implementation)
