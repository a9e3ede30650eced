r"""Forgetting inside a chunk: products of decays, and their gradient.

A memory that fades keeps $d_t W_{t-1}$ of what it held. Inside a chunk
of steps $1 \dots C$, what step $j$ wrote is worth $\Gamma_{ij} =
\prod_{j < m \le i} d_m$ to the reader at step $i$, and the state before
the chunk is worth $\gamma_i = \prod_{m \le i} d_m$. Everywhere else the
chunked forms stay what they are without decay.

The products are multiplied out, never taken as differences of summed
logarithms: a decay of exactly 0 is allowed, and one strong decay does
not blur those after it.
"""

import torch
from torch import Tensor

from fwlab.ops import chunks


class Decay:
    """The factors of one group of chunks; None means no forgetting.

    - `decay`: `[batch, time, heads]`, 0 to 1, or None.
    """

    def __init__(
        self,
        decay: Tensor | None,
        steps: slice,
        chunk: int,
        dtype: torch.dtype,
    ):
        self.inside = None
        if decay is None:
            return
        cut = decay[:, steps, :, None]
        d = chunks.split(cut, chunk, dtype, fill=1)  # [n, C, 1]
        # Row j holds 1 up to place j, then d: its running product.
        after = torch.ones(
            chunk, chunk, dtype=torch.bool, device=d.device
        ).triu(1)
        rows = torch.where(after, d.mT, 1).cumprod(-1)
        #: $\Gamma$, with ones above the diagonal.
        self.inside = rows.mT.contiguous()
        #: $\gamma$ and $\gamma$ of the step before; what is left at the
        #: end of the chunk of the state, and of each step.
        self.gamma = d.cumprod(1)
        self.before = torch.cat(
            [torch.ones_like(d[:, :1]), self.gamma[:, :-1]], 1
        )
        self.state_left = self.gamma[:, -1:]
        self.left = rows[:, :, -1:]

    def seen(self, P: Tensor, diagonal: int) -> Tensor:
        r"""$\mathrm{tril}(P) \odot \Gamma$, in place."""
        P.tril_(diagonal)
        return P if self.inside is None else P.mul_(self.inside)

    def of_state(self, Q: Tensor) -> Tensor:
        r"""Rows that meet the state before the chunk, $\gamma Q$."""
        return Q if self.inside is None else self.gamma * Q

    def at_end(self, K: Tensor) -> Tensor:
        """Rows that go into the state after the chunk."""
        return K if self.inside is None else self.left * K

    def carry(self, state: Tensor, place: int) -> Tensor:
        """The state over one whole chunk, in place."""
        if self.inside is None:
            return state
        heads = len(state)
        one = self.state_left[place * heads : (place + 1) * heads]
        return state.mul_(one)

    def gradient(
        self,
        M: Tensor,
        S: Tensor,
        after: Tensor,
        read: Tensor,
        written: Tensor,
    ) -> Tensor:
        r"""Of each decay, $dd_t = \langle dW_t, W_{t-1} \rangle$.

        Neither is ever formed. $W_{t-1}$ is $\gamma_{t-1} S$ and what
        the steps $j < t$ wrote, times $\Gamma_{t-1,j}$; $dW_t$ is what
        the readers $i \ge t$ ask for, times $\Gamma_{it}$, and
        $\Gamma_{Ct}\, dW'$. So all that is needed is how much each
        reader asks of each writer, `M`, with the two states as one more
        writer in front and one more reader at the end.

        - `M`: `[n, C, C]`, reader `i` of writer `j`.
        - `S`, `after`: `[n, value, key]`, the state before, and the
          gradient of the state after the chunk.
        - `read`: `[n, C]`, reader `i` of `S`.
        - `written`: `[n, C]`, `after` of writer `j`.
        - Returns `[n, C, 1]`.
        """
        assert self.inside is not None
        chunk = M.shape[-1]
        whole = M.new_empty(len(M), chunk + 1, chunk + 1)
        whole[:, :-1, 0] = read
        whole[:, :-1, 1:] = M
        whole[:, -1, 0] = (S * after).sum((-2, -1))
        whole[:, -1, 1:] = written
        readers = M.new_empty(len(M), chunk, chunk + 1)
        readers[:, :, :-1] = self.inside.mT.triu()
        readers[:, :, -1:] = self.left
        writers = M.new_zeros(len(M), chunk, chunk + 1)
        writers[:, :, :1] = self.before
        writers[:, 1:, 1:] = self.inside[:, :-1].tril()
        return (torch.bmm(readers, whole) * writers).sum(-1, True)
