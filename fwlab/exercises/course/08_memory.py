"""Memory."""

import tracemalloc

import torch

from fwlab.exercises.answers import Wrong, ask, normal
from fwlab.exercises.notation import exercise
from fwlab.exercises.properties import Work
from fwlab.feature_maps import l2_normalize

# --- recomputing_backward ------------------------------------------------


def _pass(generator, time=5, key=4, value=3):
    q, k = l2_normalize(normal(generator, 2, time, key))
    v, dy = normal(generator, 2, time, value)
    beta = 0.1 + 0.8 * torch.rand(time, generator=generator, dtype=torch.float64)
    return {"q": q, "k": k, "v": v, "beta": beta, "dy": dy}


def _equal_writes(generator, time, strength):
    """Keys are unit vectors and values whole numbers: at beta = 1, 0 / 0 is just that."""
    inputs = _pass(generator, time)
    keys = torch.eye(4).double()[torch.randint(4, (time,), generator=generator)]
    beta = torch.full_like(inputs["beta"], strength)
    return inputs | {"k": keys, "v": (4 * inputs["v"]).round(), "beta": beta}


NAMES = ("dq", "dk", "dv", "dbeta")
#: Steps and the widths of keys and values.
SIZES = [(2, 4, 3), (7, 4, 3), (6, 3, 5)]


def _keeps_no_states(answer, reference, generator):
    time, width = 128, 64
    inputs = _pass(generator, time, width, width)
    like = {name: inputs[name[1:]] for name in NAMES}
    with Work() as work:
        ask(answer, like, **inputs)
    traced = tracemalloc.is_tracing()  # by the reader, who goes on with it
    tracemalloc.start()  # again: what Python and NumPy hold
    try:
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        ask(answer, like, **inputs)
        held = work.peak + (tracemalloc.get_traced_memory()[1] - before) // 8
    finally:
        if not traced:
            tracemalloc.stop()
    if held > 2 / 3 * time * width * width:
        raise Wrong(
            f"With {time} steps and width {width}, your function held {held:,} "
            f"numbers at once; W of every step is {time * width * width:,}, and the "
            f"inputs are only {sum(x.numel() for x in inputs.values()):,}."
        )


@exercise(_pass, difficulty=5, importance=4, minutes=35, returns=NAMES)
def recomputing_backward(q, k, v, beta, dy):
    """
    **The backward pass without stored memories.** For one head of the delta rule, from
    an empty memory: `q` and `k` `[time, key]`, `v` `[time, value]`, `beta` `[time]`,
    and `dy` `[time, value]`, the gradient of the outputs $y_i = W_i q_i$. Return `dq,
    dk, dv, dbeta`. Do not keep $W_i$ for every step.

    ✓ returns dq, dk, dv and dbeta, shaped like q, k, v and beta
        shape((5, 4, 3), (1, 2, 2), (3, 3, 6))
    ✓ is right for a single step
        agrees(1)
    ! This is {name}. There is one step, and the memory before it is 0.
    ✗ The increment is lost: this undoes v_i k_i^T. What was written is u_i k_i^T, with
      u_i = beta_i (v_i - W k_i).
        dW = torch.zeros_like(W) -> dW, U = torch.zeros_like(W), v
    ✗ dk uses W after the step. The key reads the memory before its own write.
        du @ W -> du @ (W + torch.outer(U[t], k[t]))
    ✗ dq uses W before the step. The query reads the memory after the write.
        dy[t] @ W -> dy[t] @ (W - torch.outer(U[t], k[t]))
    ✗ du lacks the step's own query, which reads W_i, too: first add dy_i q_i^T to dW,
      then take du_i.
        du = dW -> du = (dW - torch.outer(dy[t], q[t]))
    ✓ carries dW from step to step: dv is right
        agrees(*SIZES, only=("dv",))
    ! This is dv, which needs no W. dW gains dy_i q_i^T at each step, and loses beta_i
      du_i k_i^T on its way to the step before. Are the rows of the result in the order
      of the steps?
    ✗ dW is not carried from step to step: a write is also read by all later steps.
        dW = dW + -> dW =
    ✗ dW is carried as in the sum rule: the reading W_{i-1} k_i in u_i is forgotten.
        dW = dW - beta[t] * torch.outer(du, k[t]) ->
    ✓ has the W of every step: dq is right
        agrees(*SIZES, only=("dq",))
    ! This is dq. The query of a step reads W_i, after the write of that step.
    ✗ The increment is lost: this undoes beta_i v_i k_i^T. What was written is u_i
      k_i^T, with u_i = beta_i (v_i - W k_i).
        dW = torch.zeros_like(W) -> dW, U = torch.zeros_like(W), beta[:, None] * v
    ✓ knows both uses of a key: dk and dbeta are right
        agrees(*SIZES, only=("dk", "dbeta"))
    ! This is {name}. A key reads W_{{i-1}}, and u_i is written under it.
    ✗ dk lacks its second part: the key also reads the memory, inside u_i.
        - beta[t] * du @ W ->
    ✓ is right for beta = 0, for beta = 1, and after many steps
        agrees((6, 0.0), (6, 1.0), (300, 0.95), draw=_equal_writes)
    ! This is {name}; there were {time} steps with beta = {strength:g} and keys of
      length 1. Do you divide by 1 - beta |k|²?
    ✗ The increment is not kept but solved for: division by 1 - beta |k|² fails where
      that is 0, and errors grow at every step.
        W = W - torch ->
          U[t] = beta[t] * (v[t] - W @ k[t]) / (1 - beta[t] * (k[t] @ k[t])); W = W - torch
    ✓ does not keep W for every step
        _keeps_no_states
    ? Run the rule forward first. Keep the last W and every increment u_i: a vector per
      step.
    ? Then go backward. At step t: dW += outer(dy[t], q[t]); dq[t] needs W; undo the
      write, W - outer(u[t], k[t]); now dk[t] and dbeta[t].
    ? du = dW @ k[t]; dv[t] = beta[t] * du; dbeta[t] = du @ (v[t] - W @ k[t]); dk[t] =
      u[t] @ dW - beta[t] * du @ W. Last, dW -= beta[t] * outer(du, k[t]).
    """
    # Forward: keep the last W, and the increment of each step.
    W, U = torch.zeros_like(torch.outer(v[0], k[0])), []
    for t in range(len(q)):
        U.append(beta[t] * (v[t] - W @ k[t]))
        W = W + torch.outer(U[t], k[t])
    # Backward: undo one write after the other.
    dW = torch.zeros_like(W)
    dq, dk, dv, dbeta = (torch.zeros_like(x) for x in (q, k, v, beta))
    for t in reversed(range(len(q))):
        dW = dW + torch.outer(dy[t], q[t])
        dq[t] = dy[t] @ W
        W = W - torch.outer(U[t], k[t])  # now the one before the step
        du = dW @ k[t]
        dk[t] = U[t] @ dW - beta[t] * du @ W
        dv[t] = beta[t] * du
        dbeta[t] = du @ (v[t] - W @ k[t])
        dW = dW - beta[t] * torch.outer(du, k[t])
    return dq, dk, dv, dbeta
