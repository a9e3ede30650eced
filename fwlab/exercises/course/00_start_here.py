"""Start here."""

import torch
from torch import Generator, Tensor

from fwlab.exercises.answers import ask, compare, normal, orthonormal
from fwlab.exercises.notation import exercise
from fwlab.feature_maps import l2_normalize
from fwlab.ops.delta.delta import delta_step

# --- read_memory ----------------------------------------------------


def _query(generator, value=4, key=4, lead=()):
    W = normal(generator, *lead, value, key)
    return {"W": W, "q": normal(generator, *lead, key)}


def _one_hot(generator, place):
    return _query(generator) | {"q": torch.eye(4, dtype=torch.float64)[place]}


@exercise(_query, difficulty=1, importance=5, minutes=5)
def read_memory(W, q):
    """
    **Read a memory.** Return $W q$: what the memory `W` `[..., value, key]` holds for
    the query `q` `[..., key]`. The dots are any leading dimensions, such as batch and
    heads.

    ✓ returns a tensor of the shape of a value
        shape((3, 5), (5, 3), (1, 1))
    ✗ This is q W, not W q: the query meets the columns of W, its last dimension.
        W=W.mT
    ✓ with a one-hot query, returns a column of W
        agrees(0, 1, 2, 3, draw=_one_hot)
        == W[:, q.argmax()]
    ! The query was one-hot, with its 1 at place {place}: column {place} of W.
    ✗ This takes the mean over the columns, and has to take the sum.
        q=q / q.shape[-1]
    ✗ This takes a softmax of the query first. Fast weights need none.
        q=torch.softmax(q, -1)
    ✓ with any query, returns the sum of the columns times its entries
        agrees((4, 4), (3, 5))
        == (W * q).sum(1)
    ! This is W q.
    ✗ This takes the column of the largest entry of the query alone. All columns count,
      each times its entry.
        torch.take_along_dim(W, q.argmax(-1)[..., None, None], -1)[..., 0]
    ✓ works on any leading dimensions, such as [batch, heads]
        agrees({"lead": (2,)}, {"lead": (2, 3)}, {"lead": (4, 4)})
        == (W * q[..., None, :]).sum(-1)
    ! The leading dimensions were {lead}.
    ✗ This is right for one memory, but not for several at once: in einsum, dots stand
      for leading dimensions; for @, q has to be q[..., None].
        W @ q
    ✓ lets gradients through to W and q
        gradient((4, 5, (2,)))
    ? It is a matrix times a vector. Which dimension of W does the query meet?
    ? The last dimension of W is that of keys and queries; sum over it.
    ? torch.einsum("...vk,...k->...v", W, q). For plain matrices, W @ q.
    """
    # Each query meets the columns of its own W.
    return torch.einsum("...vk,...k->...v", W, q)


# --- correct --------------------------------------------------------


def pair(
    generator: Generator, value: int = 4, key: int = 4, lead: tuple[int, ...] = ()
) -> dict[str, Tensor]:
    """Draw a memory, and the key and value to write into it."""
    W, k = normal(generator, *lead, value, key), normal(generator, *lead, key)
    return {"W": W, "k": k, "v": normal(generator, *lead, value)}


def _keeps_orthogonal(answer, reference, generator):
    keys, v = orthonormal(generator, 4), normal(generator, 3)
    W = normal(generator, 3, 4)
    written = ask(answer, W, W=W, k=keys[0], v=v)
    compare(
        written @ keys[1:].T,
        W @ keys[1:].T,
        "The write changed what orthogonal keys read.",
    )


@exercise(pair, difficulty=2, importance=5, minutes=5)
def correct(W, k, v):
    r"""
    **Correct a memory.** Return $W + (v - W k)\,k^\top$, the delta rule at $\beta = 1$,
    for `W` `[..., value, key]`, `k` `[..., key]` and `v` `[..., value]`.

    ✓ returns a tensor of the shape of W
        shape((3, 5), (5, 3), (1, 1))
    ✗ This multiplies entry by entry. Every entry of the difference meets every entry of
      k.
        [..., :, None] * k[..., None, :] -> * k
    ✓ after it, a key of length 1 reads the new value
        agrees((3, 5), (4, 4), k=l2_normalize, of=lambda new, W, k, v: new @ k)
        == v
    ! This is W k after the write; it should be v.
    ✗ This adds v ⊗ k, and the old value stays. Read first, and write the difference.
        v - read_memory(W, k) -> v
    ✗ This subtracts the difference. Check the sign.
        W + -> W -
    ✗ This is the write alone: what W held is lost.
        W + ->
    ✗ This removes what the key held, but does not write the new value.
        v - read_memory(W, k) -> -read_memory(W, k)
    ✓ keeps what orthogonal keys read
        _keeps_orthogonal
    ✗ This clears the memory first. Only what k reads may change.
        W=0 * W
    ✓ with any key, adds the difference times the key
        agrees((3, 5), (4, 4))
        == W + torch.outer(v - W @ k, k)
    ! This is W + (v - W k) k^T, with the key as it is given.
    ✗ This divides by |k|², so that a key of any length reads v. The formula takes the
      key as it is.
        k[..., None, :] -> k[..., None, :] / (k * k).sum(-1)[..., None, None]
    ✗ This makes the length of the key 1 first. The formula takes it as it is.
        k=l2_normalize(k)
    ✓ works on any leading dimensions, such as [batch, heads]
        agrees({"lead": (2,)}, {"lead": (2, 3)}, {"lead": (4, 4)})
        == delta_step(W, k, v, torch.ones_like(k[..., 0]))
    ! The leading dimensions were {lead}.
    ✗ This is right for one memory, but not for several at once: give the difference a
      last dimension of 1, and k a second-to-last one.
        W + torch.outer(v - W @ k, k)
    ✓ lets gradients through to W, k and v
        gradient((4, 5, (2,)))
    ? Two steps: first what the key reads now, W k. Then a write of the difference.
    ? old is read_memory(W, k). The matrix to add has v - old in its rows and k in its
      columns.
    ? W + (v - old)[..., :, None] * k[..., None, :]
    """
    difference = v - read_memory(W, k)  # from what k reads now
    return W + difference[..., :, None] * k[..., None, :]
