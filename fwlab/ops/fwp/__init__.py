"""The fast weight programmer of 1991."""

from collections.abc import Callable
from functools import partial
from typing import Any, Unpack

import torch
from torch import Tensor

from fwlab import arguments
from fwlab.ops import _operation as operation
from fwlab.ops._operation import Keys, Options, Values
from fwlab.ops.fwp import efficient, naive

FORMS = {"naive": naive.fwp, "efficient": efficient.fwp}


@operation.operation(FORMS, like="a")
def fwp(
    a: Values,
    b: Keys,
    x: Keys,
    activation: Callable[[Tensor], Tensor] | None = torch.tanh,
    *,
    cu_seqlens: Tensor | None = None,
    **options: Unpack[Options],
) -> tuple[Tensor, Any]:
    r"""Add an outer product to fast weights, and apply an activation (Eqs. 2 and 3).

    $W_t = \sigma(W_{t-1} + a_t \otimes b_t)$ and $y_t = W_t x_t$. With $\sigma$ =
    identity it is `sum_rule(x, b, a, normalize=False)`.

    - `a`: `[batch, time, heads, value]`, the values to write.
    - `b`: `[batch, time, heads, key]`, the keys to write them with.
    - `x`: `[batch, time, heads, key]`, the input of the fast network.
    - `activation`: $\sigma$, a function of a tensor that keeps its shape and dtype, and
      may have parameters of its own; None = identity. It must be deterministic (no
      dropout), because "efficient" calls it again in the backward pass.
    - `key_mask`: `bool [batch, time]`, True = real token. Masked steps leave $W$
      untouched ($\sigma$ included) and return 0.
    - `cu_seqlens`: borders of packed documents, as for `aft_simple`.
    - `state`: the `W` `[batch, heads, value, key]` of an earlier call; None = zeros;
      float32 for half-precision inputs.
    - `return_state`: return `(y, state)` instead of `y`.
    - `implementation`: "auto", "naive" or "efficient".
    - Returns `y` `[batch, time, heads, value]` in the dtype of `a`.
    - Raises `ValueError` or `TypeError`, naming the argument.

    Two values are written under one key, each followed by tanh.

        >>> k = torch.tensor([1.0, 0.0]).expand(1, 2, 1, 2)
        >>> v = torch.tensor([4.0, 8.0]).view(1, 2, 1, 1)
        >>> ops.fwp(v / 10, k, k, activation=torch.tanh).flatten()
        tensor([0.3799, 0.8274])

    Source: Schmidhuber 1991, "Learning to control fast-weight memories"; equation
    numbers from Schlag et al. 2021 (arXiv:2102.11174).
    """
    arguments.function("fwp", activation=activation)
    mask, W, form = options["key_mask"], options["state"], options["implementation"]
    if cu_seqlens is not None:
        steps = {"a": a, "b": b, "x": x, "key_mask": mask}
        document = partial(fwp, activation=activation, implementation=form)
        return operation.map_documents("fwp", document, cu_seqlens, steps, W, True)
    dtype = torch.promote_types(a.dtype, torch.float32)
    shape = a.shape[0], *a.shape[2:], b.shape[3]
    if W is None:
        W = a.new_zeros(shape, dtype=dtype)
    operation.check_part("fwp", "state", W, shape, dtype, a)
    if not a.numel():
        return operation.empty(a, b, x), W
    if activation is not None and activation is not torch.tanh:
        activation = _checked(activation)
    if form != "naive":
        return efficient.fwp(a, b, x, W, activation, mask)
    a, b, x = (part.to(dtype) for part in (a, b, x))
    if mask is None:
        return naive.fwp(a, b, x, W, activation or torch.positive)
    # A masked step does not change W.
    y = []
    for t, real in enumerate(mask.unbind(1)):
        a_t, b_t, x_t = (part[:, t : t + 1] for part in (a, b, x))
        y_t, after = naive.fwp(a_t, b_t, x_t, W, activation or torch.positive)
        W = torch.where(real[:, None, None, None], after, W)
        y.append(y_t)
    return torch.cat(y, 1), W


def _checked(activation: Callable[[Tensor], Any]) -> Callable[[Tensor], Tensor]:
    """Wrap an activation to raise an error if the shape or the dtype changes."""

    def checked(W: Tensor) -> Tensor:
        out = activation(W)
        if isinstance(out, Tensor) and (out.shape, out.dtype) == (W.shape, W.dtype):
            return out
        kind = type(out).__name__
        if isinstance(out, Tensor):
            kind = f"{out.dtype} {list(out.shape)}"
        raise ValueError(
            "fwp: expected activation to return a tensor of its argument's shape and "
            f"dtype, {W.dtype} {list(W.shape)}, got {kind}"
        )

    return checked
