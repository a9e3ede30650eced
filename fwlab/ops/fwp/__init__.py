"""The fast weight programmer of 1991."""

from collections.abc import Callable

import torch
from torch import Tensor

from fwlab import arguments
from fwlab.ops.call.call import Call, Operation, Variants
from fwlab.ops.fwp import efficient, naive

FWP = Operation(
    name="fwp",
    folder="fwp",
    implementations={
        "naive": Variants(naive.fwp, naive.masked_fwp),
        "efficient": efficient.fwp,
    },
)


def fwp(
    a: Tensor,
    b: Tensor,
    x: Tensor,
    activation: Callable[[Tensor], Tensor] | None = torch.tanh,
    *,
    key_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    state: Tensor | None = None,
    return_state: bool = False,
    implementation: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    r"""The fast weight programmer of 1991 (Eqs. 2 and 3).

    $W_t = \sigma(W_{t-1} + a_t \otimes b_t)$ and $y_t = W_t x_t$. With
    $\sigma$ = identity it is `sum_rule(x, b, a, normalize=False)`.

    - `a`: `[batch, time, heads, value]`, what to write.
    - `b`: `[batch, time, heads, key]`, where to write it.
    - `x`: `[batch, time, heads, key]`, the input of the fast network.
    - `activation`: $\sigma$, a function of a tensor that keeps its
      shape and dtype, and may have parameters of its own; None =
      identity. It must be deterministic (no dropout), because
      "efficient" calls it again in the backward pass.
    - `key_mask`: `bool [batch, time]`, True = real token. Masked steps
      leave $W$ untouched ($\sigma$ included) and return 0.
    - `cu_seqlens`: borders of packed documents, as for `sum_rule`.
    - `state`: the `W` `[batch, heads, value, key]` of an earlier call;
      None = zeros; float32 for half-precision inputs.
    - `return_state`: return `(y, state)` instead of `y`.
    - `implementation`: "auto", "naive" or "efficient".
    - Returns `y` `[batch, time, heads, value]` in the dtype of `a`.
    - Raises `ValueError` or `TypeError`, naming the argument.

    Two values under one key, squashed after each.

        >>> k = torch.tensor([1.0, 0.0]).expand(1, 2, 1, 2)
        >>> v = torch.tensor([4.0, 8.0]).view(1, 2, 1, 1)
        >>> ops.fwp(v / 10, k, k, activation=torch.tanh).flatten()
        tensor([0.3799, 0.8274])

    Source: Schmidhuber 1991, "Learning to control fast-weight memories";
    equation numbers from Schlag et al. 2021 (arXiv:2102.11174).
    """
    call = Call(
        FWP,
        {
            "a": (a, "batch time heads value"),
            "b": (b, "batch time heads key"),
            "x": (x, "batch time heads key"),
        },
        like="a",
        key_mask=key_mask,
        cu_seqlens=cu_seqlens,
        return_state=return_state,
    )
    arguments.function("fwp", activation=activation)
    if activation is not None and activation is not torch.tanh:
        call.hidden = False  # no graph can describe the function
    name, compute = call.choose(implementation, "a")
    compute = call.by_document(compute, ("W",))
    shape = [call.sizes[n] for n in ("batch", "heads", "value", "key")]
    start = call.start(lambda W: W, state, {"": shape})

    if call.hidden:
        return call.whole(
            start,
            return_state,
            implementation=name,
            causal=activation is not None,
        )
    sigma = _same_shape(activation)
    if sigma is None and name == "naive":
        sigma = torch.positive  # the identity

    # Naive gets its inputs in the precision of the state.
    def run() -> tuple[Tensor, Tensor]:
        inputs = {
            n: call.masked(part) for n, part in call.tensors.items()
        }
        if name == "naive":
            inputs = {n: x.to(call.dtype) for n, x in inputs.items()}
        if key_mask is not None:
            inputs["real"] = key_mask
        elif cu_seqlens is not None:  # documents are padded
            inputs["real"] = a.new_ones(a.shape[:2], dtype=torch.bool)
        y, W = compute(**inputs, W=start, activation=sigma)
        return y, W

    return call.run(run, start, return_state)


def _same_shape(activation: Callable | None) -> Callable | None:
    """The same function; it raises if shape or dtype change."""
    if activation is None or activation is torch.tanh:
        return activation  # the default, which keeps both

    # Checked at each step: the function may be anyone's.
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
                "fwp: expected activation to return a tensor of its "
                f"argument's shape and dtype, {W.dtype} {list(W.shape)}, "
                f"got {kind}"
            )
        return out

    return checked
