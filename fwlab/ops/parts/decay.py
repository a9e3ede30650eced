r"""Forgetting inside a chunk: products of decays, and their gradients.

With a decay, step $t$ keeps $d_t W_{t-1}$. Inside a chunk of steps $1 \dots C$, the
query of step $i$ reads what step $j$ wrote with the factor $\Gamma_{ij} = \prod_{j < m
\le i} d_m$, and the state before the chunk with the factor $\gamma_i = \prod_{m \le i}
d_m$. Everything else in the chunked forms is as without a decay.

The factors are multiplied out, never computed as differences of summed logarithms: so a
decay may be exactly 0, and one strong decay does not make those after it less precise.

Three classes have the same methods: `NoDecay`, `Decay` (one decay per
head) and `ChannelDecay` (one per key channel).
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def of(d: Tensor | None, early: bool = False) -> Any:
    """The decays of one group of chunks.

    - `d`: `[n, C, 1 or key]`, 0 to 1; None = 1.
    - `early`: rows that ask read the memory before it fades; only with
      a decay per key channel.
    """
    if d is None:
        return NoDecay()
    # Row j is 1 up to column j, then d; its running product.
    C, gamma = d.shape[1], d.cumprod(1)
    if d.shape[-1] == 1 and not early:
        rows = d.mT.expand(-1, C, C).triu(1)
        rows = rows.add_(d.new_ones(C, C).tril()).cumprod(-1)
        return Decay(gamma, rows.mT.contiguous(), rows[:, :, -1:].clone())
    later = d.new_ones(C, C).triu(1)[..., None]
    rows = (d[:, None] * later).add_(1 - later).cumprod_(2)
    return ChannelDecay(gamma, rows.transpose(1, 2), rows[:, :, -1], d=d, early=early)


class NoDecay:
    """No decay, at no cost."""

    forgets = False

    def scores(self, R: Tensor, K: Tensor) -> Tensor:
        r"""How much step $i$ reads of what step $j$ writes:
        $P = \mathrm{tril}(R K^\top)$.
        """
        # The gradient of each factor is a product with the other.
        self.R, self.K = R, K
        return lower(torch.bmm(R, K.mT))

    def scores_backward(
        self, dP: Tensor, dR: Tensor | None, dK: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Add to `dR` and `dK` if they are there; `dP` is overwritten."""
        lower(dP)
        return plus(dR, dP, self.K), plus(dK, dP.mT, self.R)

    def of_state(self, R: Tensor) -> Tensor:
        r"""Rows that read the state before the chunk, $\gamma R$."""
        return R

    def at_end(self, K: Tensor) -> Tensor:
        r"""Rows as the state after the chunk has them, $\Gamma_C K$."""
        return K

    def carry(self, before: Tensor, after: Tensor, index: int) -> None:
        r"""Add what is left of a state after chunk `index`:
        $\gamma_C W$.
        """
        after.add_(before)


def plus(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """A product, added to `total` in place if that is there."""
    return torch.bmm(a, b) if total is None else total.baddbmm_(a, b)


def lower(P: Tensor) -> Tensor:
    """Keep what step i may see, in place: `[n, C or 2 C, C]`.

    A row of the first C sees the steps j <= i, and one of the others,
    which read before the write of their own step, j < i.
    """
    C = P.shape[-1]
    if P.shape[1] == C:
        return P.tril_()
    P[:, :C].tril_()
    P[:, C:].tril_(-1)
    return P


def halves(x: Tensor, like: Tensor) -> Tensor:
    """`[n, C or 2 C, _]` to `[n, 1 or 2, C, _]`; C as in `like`."""
    return x.unflatten(1, (-1, like.shape[1]))


class Decay(NoDecay):
    r"""One decay per step and head.

    - `gamma`: $\gamma$, `[n, C, 1]`; `inside`: $\Gamma$, `[n, C, C]`,
      with ones above the diagonal; `left`: its last row, $\Gamma_C$.
    """

    forgets = True
    #: $P\, dP$ without decays, for `gradient`.
    between: Tensor | None = None

    def __init__(self, gamma: Tensor, inside: Tensor, left: Tensor):
        self.gamma, self.inside, self.left = gamma, inside, left
        self.state_left = gamma[:, -1:]
        #: The same, chunk by chunk: see `carry`.
        self.parts: tuple[Tensor, ...] = ()

    # $P \odot \Gamma$. The product without decays is kept, too: the
    # gradient of a decay needs it.
    def scores(self, R: Tensor, K: Tensor) -> Tensor:
        self.R, self.K = R, K
        self.product = lower(torch.bmm(R, K.mT))
        inside = self.inside[:, None]
        return (halves(self.product, self.inside) * inside).flatten(1, 2)

    # The gradients pass through $\Gamma$ as those of a constant.
    def scores_backward(
        self, dP: Tensor, dR: Tensor | None, dK: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        self.between = lower(dP) * self.product
        halves(dP, self.inside).mul_(self.inside[:, None])
        return super().scores_backward(dP, dR, dK)

    # $\gamma R$, for one or two sets of rows at once.
    def of_state(self, R: Tensor) -> Tensor:
        return (halves(R, self.gamma) * self.gamma[:, None]).flatten(1, 2)

    # $\Gamma_C K$: what step $j$ wrote has faded by the end.
    def at_end(self, K: Tensor) -> Tensor:
        return self.left * K

    # $\gamma_C W$, with the decays of this chunk for all heads.
    def carry(self, before: Tensor, after: Tensor, index: int) -> None:
        self.parts = self.parts or self.state_left.split(len(before))
        after.addcmul_(before, self.parts[index])

    def gradient(
        self,
        S: Tensor | None,
        after: Tensor | None,
        read: Tensor | None,
        written: Tensor | None,
    ) -> Tensor:
        r"""The gradients $dd_t = \langle dW_t, W_{t-1} \rangle$.

        Neither matrix is ever formed. $W_{t-1}$ is the sum of $\gamma_{t-1} S$ and of
        what the steps $j < t$ wrote, times $\Gamma_{t-1,j}$. $dW_t$ is the sum of
        $\Gamma_{Ct}\, dW'$ and of the gradients of the steps $i \ge t$ that read, times
        $\Gamma_{it}$. So only the product of each pair of steps $i$ and $j$ is needed.
        The state before the chunk is one more step that writes, and the state after it
        one more step that reads.

        - `S`, `after`: `[n, value, key]`, the state before, and the
          gradient of the state after the chunk.
        - `read`: `[n, C or 2 C, key]`, how much each row reads of `S`, per channel.
        - `written`: `[n, C, key]`, how much `after` takes of what each
          step wrote, per channel. All are None if there are no states.
        - Returns `[n, C, 1]`.
        """
        assert self.between is not None
        n, C = self.gamma.shape[:2]
        between = halves(self.between, self.gamma).sum(1)
        if S is None or after is None or read is None or written is None:
            readers, writers = self.inside.mT.triu(), self.inside.tril()
            met = torch.bmm(readers, between)[:, 1:] * writers[:, :-1]
            return F.pad(met.sum(-1, True), (0, 0, 1, 0))
        pairs = S.new_empty(n, C + 1, C + 1)
        pairs[:, :-1, 0] = halves(read, self.gamma).sum((1, -1))
        pairs[:, :-1, 1:] = between
        pairs[:, -1, 0] = torch.linalg.vecdot(S.flatten(1), after.flatten(1))
        pairs[:, -1, 1:] = written.sum(-1)
        # The decays from step t to those that read, and before it.
        readers = S.new_empty(n, C, C + 1)
        readers[:, :, :-1] = self.inside.mT.triu()
        readers[:, :, -1:] = self.left
        writers = S.new_zeros(n, C, C + 1)
        writers[:, :1, :1] = 1
        writers[:, 1:, :1] = self.gamma[:, :-1]
        writers[:, 1:, 1:] = self.inside[:, :-1].tril()
        return (torch.bmm(readers, pairs) * writers).sum(-1, True)


class ChannelDecay(Decay):
    r"""One decay per step, head and key channel, `d`: `[n, C, key]`.

    $\Gamma_{ij}$, `[n, i, j, key]`, is now a vector inside the products:

    $$P_{ij} = \sum_c Q_{ic}\, K_{jc}\, \Gamma_{ijc}$$

    All products of decays are formed. (With quotients $\Gamma_{ij} =
    \gamma_i / \gamma_j$ this would be a matrix product, but it would
    overflow at the first strong decay.)

    With `early`, what step $i$ asks is read at the end of step $i - 1$:
    as a row of that step, so no decay is ever divided out.
    """

    def __init__(self, *products: Tensor, d: Tensor, early: bool):
        super().__init__(*products)
        self.d, self.early = d, early

    # $\gamma R$, for one or two sets of rows at once.
    def of_state(self, R: Tensor) -> Tensor:
        rows = halves(R, self.d)
        if not self.early:
            return (rows * self.gamma[:, None]).flatten(1, 2)
        asking = rows[:, 1].clone()
        asking[:, 1:] *= self.gamma[:, :-1]
        return torch.cat([rows[:, 0] * self.gamma, asking], 1)

    def moved(self, rows: Tensor, by: int) -> Tensor:
        """Rows `[n, 1 or 2, C, _]`, those that ask earlier by a step, or
        with `by` = 1 later.
        """
        if not self.early:
            return rows
        asking = rows[:, 1].roll(by, 1)
        asking[:, min(by, 0)] = 0
        return torch.stack([rows[:, 0], asking], 1)

    # $P$ with the decays inside the products. Step $i$ has its own keys, those of step
    # $j$ faded until $i$, so $P$ is one small product per step.
    def scores(self, R: Tensor, K: Tensor) -> Tensor:
        self.K, C = K, K.shape[1]
        #: Step i sees the faded keys `[n, i, j, key]`.
        self.faded = self.inside * K[:, None]
        #: All rows of step i, `[n, i, 1 or 2, key]`.
        self.rows = self.moved(halves(R, K), -1).transpose(1, 2)
        P = self.moved((self.rows @ self.faded.mT).transpose(1, 2), 1)
        return lower(P.reshape(len(R), -1, C))

    # The two products of the forward pass, each with one factor
    # replaced by the gradient. `between` includes the decays.
    def scores_backward(self, dP: Tensor, dR: Any, dK: Any) -> tuple[Tensor, Tensor]:
        dP = self.moved(halves(lower(dP), self.K), -1).transpose(1, 2)
        dR_rows = (dP @ self.faded).transpose(1, 2)
        halves(dR, self.K).add_(self.moved(dR_rows, 1))
        # `[n, i, j, key]`: the gradient of the faded keys.
        share = (dP.mT @ self.rows).mul_(self.inside)
        dK += share.sum(1)
        self.between = share.mul_(self.K[:, None])
        return dR, dK

    def gradient(self, S: Any, after: Any, read: Any, written: Any) -> Tensor:
        r"""As in `Decay`, channel by channel.

        Here the entries of `between` include the decays. So the sum over all $i \ge t$
        and $j < t$ is $d_t\, dd_t$: a sum of products, without differences.

        - Returns `[n, C, key]`.
        """
        assert self.between is not None
        C = self.d.shape[1]
        upto = S.new_ones(C, C).tril()  # [t, s], s <= t
        # `[t, i, j]`: whether step t comes between a writer j and a reader i.
        pairs = upto.mT[:, :, None] * upto.tril(-1)[:, None]
        total = pairs.flatten(1) @ self.between.flatten(1, 2)
        rows = self.moved(halves(read, self.d), -1).sum(1)
        total += upto.mT @ (self.gamma * rows)
        total += upto.tril(-1) @ (self.left * written)
        total += self.state_left * (S * after).sum(-2, True)
        return torch.where(self.d == 0, 0, total / self.d)
