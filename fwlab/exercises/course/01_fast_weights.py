"""Fast weights."""

import torch

from fwlab.exercises.answers import Wrong, ask, compare, normal, orthonormal
from fwlab.exercises.course.start_here import correct, pair
from fwlab.exercises.notation import exercise
from fwlab.exercises.properties import exactly
from fwlab.feature_maps import l2_normalize

# --- write ----------------------------------------------------------


def _of_size(generator, size):
    return {name: size * x for name, x in pair(generator).items()}


def _stores(answer, reference, generator):
    W, v = torch.zeros(3, 4, dtype=torch.float64), normal(generator, 3)
    for place in range(4):
        k = torch.eye(4, dtype=torch.float64)[place]
        written = ask(answer, W, W=W, k=k, v=v)
        compare(
            written[:, place],
            v,
            f"With the one-hot key {place}, column {place} of W should hold v.",
        )
        compare(written @ k, v, "W k should be v.")


def _write_adds(answer, reference, generator):
    keys, values = orthonormal(generator, 4), normal(generator, 2, 3)
    W = values[0][:, None] * keys[0][None, :]
    written = ask(answer, W, W=W, k=keys[1], v=values[1])
    compare(
        written @ keys[0],
        values[0],
        "The write changed an earlier value under an orthogonal key.",
    )
    twice = ask(answer, W, W=W, k=keys[0], v=values[1])
    compare(
        twice @ keys[0],
        values.sum(0),
        "After two writes under one key, reading should return the sum of both values.",
    )


@exercise(pair, difficulty=1, importance=5, minutes=5)
def write(W, k, v):
    r"""
    **The outer-product write** (Eq. 17). Return $W + v \otimes k$, for `W` `[...,
    value, key]`, `k` `[..., key]` and `v` `[..., value]`. The dots are any leading
    dimensions, such as batch and heads.

    ✓ returns a tensor of the shape of W
        shape((3, 5), (4, 2), (1, 1))
    ✗ This adds k ⊗ v, with keys along the rows. Values go along the rows, and keys
      along the columns, so that W k is a value.
        v[..., :, None] * k[..., None, :] -> k[..., :, None] * v[..., None, :]
    ✗ This multiplies entry by entry, v * k. In v ⊗ k every entry of v meets every entry
      of k.
        [..., :, None] * k[..., None, :] -> * k
    ✓ stores a value in an empty memory
        _stores
    ✗ This subtracts the pair: W - v ⊗ k in place of W + v ⊗ k.
        W + -> W -
    ✓ keeps what is already there
        _write_adds
    ✗ This is the new pair alone: what W held is lost.
        W + ->
    ✗ This is the delta rule already: it removes what the key held. Here a write only
      adds.
        correct(W, k, v)
    ✓ adds v ⊗ k, whatever their lengths
        agrees(0.001, 1.0, 1000.0, draw=_of_size)
        == W + torch.outer(v, k)
    ! W, k and v were multiplied by {size:g}. A write takes the key as it is, and W has
      no limit: is there a normalize or a clamp?
    ✗ This scales the key to length 1. A write takes the key as it is.
        k=l2_normalize(k)
    ✓ works on any leading dimensions, such as [batch, heads]
        agrees({"lead": (2,)}, {"lead": (2, 3)}, {"lead": (1, 4, 4)})
        == W + torch.einsum("...v,...k->...vk", v, k)
    ! The leading dimensions were {lead}.
    ✗ This is right for one memory, but not for several at once: torch.outer takes
      single vectors, and beside v[..., None], k needs a dimension of 1, too.
        W + torch.outer(v, k)
    ✓ lets gradients through to W, k and v
        gradient((4, 5, (2,)))
    ? Eq. 17 adds v ⊗ k to W. Entry (i, j) of v ⊗ k is v_i k_j.
    ? Give v a last dimension of 1 and k a second-to-last one, and multiply:
      broadcasting makes the matrix. Or name the indices in torch.einsum.
    ? v[..., :, None] has shape [..., value, 1], and k[..., None, :] has [..., 1, key].
      In einsum: "...v,...k->...vk".
    """
    # Entry (i, j) of v ⊗ k is v_i k_j (Eq. 17).
    return W + v[..., :, None] * k[..., None, :]


# --- linear_attention -----------------------------------------------


def _sequence(generator, time=5, key=4, value=4, lead=()):
    q, k = (normal(generator, *lead, time, key) for _ in "qk")
    return {"q": q, "k": k, "v": normal(generator, *lead, time, value)}


def _only_first(x):
    """Ones at the first step, and zeros after it."""
    return torch.ones_like(x) * (torch.arange(len(x)) == 0)[:, None]


@exercise(_sequence, difficulty=2, importance=5, minutes=7)
def linear_attention(q, k, v):
    r"""
    **Attention without softmax** (Eqs. 8-11). From queries `q`, keys `k` `[..., time,
    key]` and values `v` `[..., time, value]`, return $y_i = \sum_{j \le i} v_j\, (k_j
    \cdot q_i)$ for every step $i$, `[..., time, value]`: in a loop that writes and
    reads, or all steps at once.

    ✓ returns a tensor of the shape of v
        shape((5, 4, 3), (1, 2, 6), (3, 5, 5))
    ✗ Here W is the sum of k ⊗ v, so it answers with keys. Values belong to the rows of
      W: v ⊗ k.
        k=v, v=k
    ✓ does not look at later steps
        is_causal()
    ✗ This sees the future: step i reads all pairs, later ones included. It may read
      those up to i.
        .tril() ->
    ✗ .triu() keeps the future: columns from i on. .tril() keeps those up to i.
        .tril() -> .triu()
    ✗ A softmax gives later steps a weight, too, since exp(0) is 1. Here there is none.
        .tril() -> .tril().softmax(-1)
    ✓ at the first step, returns the first value, weighted by k · q
        agrees(1, 5, of=lambda y, *_: y[0])
        == v[0] * (k[0] @ q[0])
    ! Step 0 reads a memory that holds one pair, its own.
    ✗ This leaves out the pair of the step itself. Write first, then read: j goes up to
      i, and includes it.
        .tril() -> .tril(-1)
    ✗ This divides by the sum of the weights, as softmax does. Here nothing divides:
      weights may be negative, and may sum to 0.
        @ v -> @ v / weights.tril().sum(-1, keepdim=True)
    ✗ There is still a softmax here, so no matrix can take the place of the list.
        .tril() -> .masked_fill(torch.ones_like(weights).triu(1) > 0, -torch.inf).softmax(-1)
        torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    ✗ This divides by sqrt(d), a factor that the paper leaves out (Eq. 7).
        k.mT -> k.mT / q.shape[-1] ** 0.5
    ✓ at the last step, still reads the first value
        agrees(7, k=_only_first, v=_only_first, of=lambda y, *_: y[-1])
        == q[-1].sum() * v[0]
    ! Only the first pair was not 0. Nothing takes it out of the memory, and nothing
      divides the sum.
    ✗ This reads the pair of the step alone: W was replaced, in place of added to.
        (q * k).sum(-1, keepdim=True) * v
    ✗ This divides by the number of pairs. A memory is a sum: nothing divides it.
        @ v -> @ v / torch.arange(1, q.shape[-2] + 1)[:, None]
    ✗ Keys and queries are swapped: this weights v_j by k_i · q_j, in place of k_j ·
      q_i.
        q=k, k=q
    ✓ weights the value of each step j up to i by k_j · q_i
        agrees((6, 4, 3), (6, 6, 6), (40, 3, 5))
        == torch.einsum("tvk,tk->tv", (v[:, :, None] * k[:, None, :]).cumsum(0), q)
    ! There were {time} steps, keys of width {key}, values of {value}.
    ✓ works on any leading dimensions, such as [batch, heads]
        agrees({"lead": (2,)}, {"lead": (2, 3)}, {"lead": (5, 5)})
    ! The leading dimensions were {lead}.
    ✗ This is right for one sequence, but not for several at once: time is dimension -2,
      so k[..., i, :] is a step of all sequences.
        q @ k.mT -> torch.einsum("id,jd->ij", q, k)
    ✓ lets gradients through to q, k and v
        gradient({"lead": (2,)})
    ? As a loop: start with W = 0. At each step, k[..., i, :] is the key of all leading
      dimensions: add v ⊗ k to W, as in write, then append W q to a list.
      torch.stack(list, -2) makes a tensor of it.
    ? All at once: q @ k.mT has the weight k_j · q_i in row i and column j. Later steps
      must not count.
    ? .tril() keeps the columns up to i of each row i. Multiply what is left by v.
    """
    weights = q @ k.mT  # row i, column j: k_j · q_i
    return weights.tril() @ v  # j up to i (Eqs. 8-11)


# --- predict_error --------------------------------------------------


def _as_measured(answer, reference, generator):
    for S, d in ((2, 8), (9, 8), (33, 16), (5, 64)):
        k = l2_normalize(normal(generator, 2000, S, d))
        v = normal(generator, 2000, S, 4)
        error = k @ (k.mT @ v) - v
        measured = (error.square().sum() / v.square().sum()).item()
        predicted = ask(answer, float, S=S, d=d)
        if not abs(predicted / measured - 1) < 0.1:
            raise Wrong(
                f"S = {S}, d = {d}: 2000 memories had an error of {measured:.3g}, you "
                f"predict {predicted:.3g}."
            )


def _size(generator):
    S, d = torch.randint(5, 40, (2,), generator=generator).tolist()
    return {"S": S, "d": d}


@exercise(_size, difficulty=3, importance=4, minutes=5)
def predict_error(S, d):
    """
    **Predict the error.** `S` pairs are written under random keys of length 1 and width
    `d`, and all are read. Return the expected squared error of a value that is read,
    relative to the squared length of a value.

    ✓ is 0 for one pair, which nothing disturbs
        agrees((1, 1), (1, 8), (1, 64), draw=exactly("S", "d"))
        == 0
    ! W k is v (k · k), and k has length 1.
    ✗ This counts the pair itself, too, which is read without an error: only the S - 1
      others disturb it.
        (S - 1) -> S
    ✓ agrees with memories that were filled and read, to within 10 %
        _as_measured
    ✗ This divides by d². The mean of (k_j · k_i)² is 1/d: the square is in it already.
        / d -> / d**2
    ✗ This is the length of the error, the root of what is asked: take its square.
        (S - 1) / d -> ((S - 1) / d) ** 0.5
    ✗ 1/sqrt(d) is the typical size of k_j · k_i. The error has its square.
        / d -> / d**0.5
    ✗ This would be right if all S - 1 terms pointed the same way. The cross terms
      vanish, so squares add up, not lengths.
        (S - 1) -> (S - 1) ** 2
    ✗ This is what the best keys lose: d of them have room. Random keys disturb each
      other long before, and beyond 1.
        max(0.0, 1 - d / S)
    ✗ This takes the first d pairs to be free. That holds for orthogonal keys; random
      ones overlap, even two of them.
        max(0.0, (S - d) / d)
    ✗ This weights every other value by 1, but its weight is k_j · k_i: small in a wide
      memory.
        / d ->
    ✓ is right for any S and d, large ones too
        agrees(
            (2, 1), (8, 8), (100, 64), (10001, 10), (3, 4096), draw=exactly("S", "d")
        )
    ? How many other values come in, when you read one?
    ? Each of them comes in with the weight k_j · k_i. What is the mean of its square?
    ? The squares add up, the cross terms vanish: (number of other values) times (mean
      of the squared weight).
    """
    # S - 1 other values come in, each with a weight whose square is 1/d on average.
    return (S - 1) / d
