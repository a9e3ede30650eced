"""One step of a recurrence, without chunks."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fwlab.feature_maps import divide, unit_range
from fwlab.ops.parts import autograd

#: The efficient forms of which this is one step; recurrences add theirs.
FORMS: set[Callable] = set()


def one_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None = None,
    strength: Tensor | None = None,
    ask: Tensor | None = None,
    *,
    W: Tensor,
    z: Tensor | None = None,
    corrects: bool = False,
    early: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """(c0) or (d0) as products of matrices with single rows.

    For a single step nothing is gained from chunks.

    - `q`: perhaps several consecutive heads for each one of `k`.
    - `corrects`, `early`: as in `Group` of the efficient version.
    - Returns what its `Memory` does; with `z`, means, and the next `z`
      in place of what `ask` reads.
    """
    batch, heads, more = *W.shape[:2], None
    rows: Any = [
        x if x is None else x.reshape(batch * heads, -1, x.shape[-1])
        for x in (q, k, v, decay, strength, ask)
    ]
    if not q.dtype == k.dtype == v.dtype == W.dtype:
        rows = [x if x is None else x.to(W.dtype) for x in rows]
    q, k, v, d, s, a = rows
    old = W.flatten(0, 1)
    S = old if d is None else d * old
    # The delta rules write the error.
    if corrects:
        read = (old if early else S).mT
        v = v - torch.bmm(k if a is None else a, read)
    elif a is not None:
        more = torch.bmm(a, S.mT).view(batch, 1, heads, -1)
    u = v if s is None else s * v
    # A state is large: there is room for one new one.
    S = torch.addcmul(S, u.mT, k, out=None if d is None else S)
    y = torch.bmm(q, S.mT)
    if z is not None:
        z = z.reshape(batch * heads, 1, -1)
        z = z if d is None else d * z
        z = z + k if s is None else torch.addcmul(z, s, k)
        total = torch.bmm(q, z.mT)
        if usual(total):
            y = y / total  # Eq. 19
        else:
            q = unit_range(q)
            y = divide(torch.bmm(q, S.mT), torch.bmm(q, z.mT))
        more = z.view(batch, heads, -1)
    return y.view(batch, 1, -1, y.shape[-1]), more, S.view_as(W)


def usual(total: Tensor) -> bool:
    """Whether it is known that quotients need no care."""
    known = total.is_cpu and autograd.only_numbers(total)
    if not known or not total.numel():
        return False
    least, most = total.aminmax()
    return least.item() > 1e-6 and most.item() < 1e9
