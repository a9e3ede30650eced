"""The fast weight programmer of 1991."""

from collections.abc import Callable

import torch
from torch import Tensor

from fwlab.ops import checks, chunks, gpu
from fwlab.ops.fwp import efficient, naive

FWP: dict[str, Callable] = {
    "naive": naive.fwp,
    "efficient": efficient.fwp,
}


@torch.compiler.disable
def fwp(
    a: Tensor,
    b: Tensor,
    x: Tensor,
    activation: Callable[[Tensor], Tensor] | None = torch.tanh,
    *,
    key_mask: Tensor | None = None,
    state: Tensor | None = None,
    return_state: bool = False,
    implementation: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    r"""The fast weight programmer of 1991 (Eqs. 2 and 3).

    $W_t = \sigma(W_{t-1} + a_t \otimes b_t)$ and $y_t = W_t x_t$. With
    $\sigma$ = identity it is `sum_rule(x, b, a, normalize=False)`.

    - `a`: `[batch, time, heads, value]`, what to write.
    - `b`: `[batch, time, heads, key]`, where.
    - `x`: `[batch, time, heads, key]`, the input of the fast network.
    - `activation`: $\sigma$, any function of a tensor that keeps its
      shape, also one with parameters of its own; None = identity. It
      must give the same for the same tensor (no dropout): "efficient"
      calls it again in the backward pass.
    - `key_mask`: `bool [batch, time]`, True = real token. Masked steps
      leave $W$ untouched ($\sigma$ included) and return 0.
    - `state`: the `W` `[batch, heads, value, key]` of an earlier call;
      None = zeros; float32 for half-precision inputs.
    - `return_state`: return `(y, state)` in place of `y`.
    - `implementation`: "auto", "naive" or "efficient".
    - Returns `y` `[batch, time, heads, value]` in the dtype of `a`.
    - Raises `ValueError` or `TypeError`, naming the argument.

    Source: Schmidhuber 1991, "Learning to control fast-weight memories";
    equation numbers from Schlag et al. 2021 (arXiv:2102.11174).
    """
    op = "fwp"
    sizes = checks.shapes(
        op,
        a=(a, "batch time heads value"),
        b=(b, "batch time heads key"),
        x=(x, "batch time heads key"),
    )
    dtype = checks.compute_dtype(op, a=a, b=b, x=x)
    compute = gpu.choose(op, FWP, implementation, a)
    if activation is not None and not callable(activation):
        raise TypeError(
            f"{op}: activation must be a function or None, not {activation!r}"
        )
    wanted = [sizes[n] for n in ("batch", "heads", "value", "key")]
    if state is None:
        W = torch.zeros(wanted, dtype=dtype, device=a.device)
    else:
        checks.state_part(op, "state", state, wanted, dtype, a)
        W = state
    if key_mask is not None:
        batch, time = sizes["batch"], sizes["time"]
        checks.mask(op, "key_mask", key_mask, a, batch=batch, time=time)

    # Autocast would push the sums below into half precision.
    with chunks.full_precision(a):
        if key_mask is not None:
            # What stands in a masked step may be anything, also NaN.
            a, b, x = (
                torch.where(key_mask[..., None, None], part, 0)
                for part in (a, b, x)
            )
        if a.shape[1] == 0:  # empty, and still a function of its inputs
            y = a * (b.sum() + x.sum()).to(a.dtype)
        else:
            y, W = compute(
                a, b, x, key_mask, W, _same_shape(activation)
            )
    y = y.to(a.dtype)
    return (y, W) if return_state else y


def _same_shape(activation: Callable | None) -> Callable | None:
    """The same function, held to the shape and dtype of its argument."""
    if activation is None:
        return None

    def checked(W: Tensor) -> Tensor:
        out = activation(W)
        if not (
            isinstance(out, Tensor)
            and out.shape == W.shape
            and out.dtype == W.dtype
        ):
            kind = (
                f"{out.dtype} {list(out.shape)}"
                if isinstance(out, Tensor)
                else type(out).__name__
            )
            raise ValueError(
                f"fwp: activation made {kind} of {W.dtype} {list(W.shape)}, "
                "but a tensor of the same shape and dtype was wanted"
            )
        return out

    return checked
