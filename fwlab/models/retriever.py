"""Train models on the synthetic tasks of Schlag et al. 2021.

As in the authors' code, values are fixed one-hot vectors, a key is a
projection of the embedded key and of the value, and a query is a
projection of the embedded key alone.
"""

from math import inf
from statistics import mean
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fwlab import ops
from fwlab.data.retrieval import Retrieval, loss, retrieval
from fwlab.feature_maps import DPFP, ELU1, FAVOR, FeatureMap, divide, sum_normalize
from fwlab.fit import fit

#: The epsilon of the authors' denominators. fwlab itself has none.
EPSILON = 1e-6
#: Optimiser steps between evaluations, and number of sequences per evaluation.
EVERY, SEQUENCES = 100, 20
#: Stop at this loss, or after this many evaluations without a lower loss.
SOLVED, PATIENCE = 0.001, 11
#: Beyond capacity, stop after this many evaluations without this decrease in loss.
SHORT_PATIENCE, GAIN = 5, 0.002
#: Kinds of queries of a training sequence: one key, as published, or all keys.
ONE, ALL = "one key", "all keys"
#: Batch sizes by kind of query. With more queries, fewer sequences are enough.
BATCH = {ONE: 32, ALL: 8}
#: Description of the defaults of `train`.
SETUP = {"optimiser": "Adam", "schedule": "constant", "lr": 1e-3}
RULES = "sum", "delta", "gated", "fwm", "softmax"


class Tanh(FeatureMap):
    r"""Compute $\phi(x) = \tanh x$, which Schlag et al. (2021) use with `fwm`."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x)


def feature_map(name: str, d_key: int) -> FeatureMap | None:
    """Build a feature map from its name.

    - `name`: linear, tanh, dpfp-NU, favor-M or favor-M-stable; or softmax, whose
      attention has no features: None.
    - `d_key`: width of keys, at least 1.
    - Raises `ValueError` for another name.
    """
    kind, *sizes = name.split("-")
    if kind == "dpfp" and sizes:
        return DPFP(int(sizes[0]))
    if kind == "favor" and sizes:
        return FAVOR(d_key, int(sizes[0]), stabilize=sizes[-1] == "stable")
    others = {"linear": ELU1(), "tanh": Tanh(), "softmax": None}
    if name in others:
        return others[name]
    raise ValueError(f"expected a feature map such as dpfp-1, got {name!r}")


def d_dot(name: str, d_key: int) -> int | None:
    """Return the number of features, or None for softmax, which has no limit."""
    phi = feature_map(name, d_key)
    return None if phi is None else phi.width(d_key)


class Retriever(nn.Module):
    """Store key-value pairs in one layer, and retrieve values for queries.

    - `symbols`, `d_key`: number of keys, and of values; width of keys and
      queries; both at least 1.
    - `rule`: sum, delta, gated, softmax, or fwm (Schlag et al., "Learning
      associative inference using fast weight memory").
    - `phi`: name of the feature map, as for `feature_map`; of softmax, softmax.
    - `epsilon`: added to the denominator of sum and gated, 0 or more.
    - Raises `ValueError` for another rule or map.
    """

    def __init__(
        self, symbols: int, d_key: int, rule: str, phi: str, epsilon: float = 0.0
    ):
        super().__init__()
        if rule not in RULES or (rule == "softmax") != (phi == "softmax"):
            raise ValueError(f"expected one of {RULES} with its map, got {rule}, {phi}")
        self.symbols, self.d_key, self.rule = symbols, d_key, rule
        self.phi, self.epsilon = feature_map(phi, d_key), epsilon
        # This is int(1.1 * 2 * symbols) without the rounding of 1.1.
        width = 22 * symbols // 10
        self.embedding = nn.Parameter(torch.randn(symbols, width))
        self.to_k = nn.Linear(width + symbols, d_key)
        self.to_q = nn.Linear(width, d_key)
        self.to_beta = nn.Linear(width + symbols, 1)
        bound = d_key**-0.5
        for projection in (self.to_k, self.to_q):
            if rule == "softmax":
                nn.init.xavier_uniform_(projection.weight)
            else:
                nn.init.uniform_(projection.weight, -bound, bound)

    def forward(self, keys: Tensor, values: Tensor, queries: Tensor) -> Tensor:
        """Return the values that queries retrieve after the sequence, for training.

        With few queries there is no need for the fast weights: it is faster to
        weight each value by the weight of its pair for the query, as in attention.

        - `keys`, `values`: `[batch, length]`, from 0 to `symbols` - 1.
        - `queries`: the queried keys, `[batch, count]`, likewise.
        - Returns `[batch, count, symbols]`.
        """
        q, k, logits = self._project(keys, values, queries)
        if self.rule == "fwm":
            return self._fast_weight_memory(q, k, values, logits.sigmoid())
        weights = self._weights(q, k, logits)
        retrieved = weights.new_zeros(*queries.shape, self.symbols)
        return retrieved.scatter_add(-1, values[:, None].expand_as(weights), weights)

    def retrieve(self, keys: Tensor, values: Tensor, queries: Tensor) -> Tensor:
        """Compute the retrieved values with fwlab's operations, for evaluation.

        Queries follow the pairs as steps that write nothing.
        """
        if self.rule not in ("sum", "delta", "gated") or self.epsilon:
            return self(keys, values, queries)
        q, k, logits = self._project(keys, values, queries)
        after = queries.shape[1]
        q = F.pad(q, (0, 0, k.shape[1], 0))[:, :, None]
        k = F.pad(k, (0, 0, 0, after))[:, :, None]
        v = F.pad(self._one_hot(values), (0, 0, 0, after))[:, :, None]
        beta = F.pad(torch.sigmoid(logits), (0, after))[:, :, None]
        y: Any
        if self.rule == "sum":
            y = ops.sum_rule(q, k, v, normalize=True)
        elif self.rule == "delta":
            y = ops.delta_rule(q, k, v, beta)
        else:
            y = ops.gated_rule(q, k, v, beta, normalize=True)
        return y[:, -after:, 0]

    def _project(
        self, keys: Tensor, values: Tensor, queries: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return features of queries and keys, and the logits of beta."""
        if isinstance(self.phi, FAVOR):
            self.phi.redraw()  # The authors redraw in every forward pass.
        k = self._of_pairs(self.to_k, keys, values)
        q = F.embedding(queries, self.to_q(self.embedding))
        logits = self._of_pairs(self.to_beta, keys, values)[..., 0]
        if self.phi is None:
            return q, k, logits
        q, k = self._features(q), self._features(k)
        if self.rule == "delta":
            q, k = sum_normalize(q), sum_normalize(k)
        return q, k, logits

    def _of_pairs(self, projection: nn.Linear, keys: Tensor, values: Tensor) -> Tensor:
        """Project each pair, the concatenation of its one-hot value and embedded key.

        All keys are projected once, and the values are columns of the weight.
        """
        of_value, of_key = projection.weight.tensor_split([self.symbols], 1)
        table = F.linear(self.embedding, of_key, projection.bias)
        return F.embedding(keys, table) + F.embedding(values, of_value.mT)

    def _features(self, x: Tensor) -> Tensor:
        """Return features, divided by the largest scale if the map has scales."""
        assert self.phi is not None
        features, scale = self.phi.scaled(x)
        if scale is None:
            return features
        return features * (scale - scale.amax(-1, keepdim=True)).exp()[..., None]

    def _weights(self, q: Tensor, k: Tensor, logits: Tensor) -> Tensor:
        """Return the weight of each pair for each query, `[batch, count, length]`."""
        match = q @ k.mT
        if self.rule == "softmax":
            return torch.softmax(match / self.d_key**0.5, -1)
        beta = torch.sigmoid(logits)
        if self.rule == "delta":
            # Solve y = q K^T (I + tril(diag(beta) K K^T, -1))^-1 diag(beta) V.
            system = (beta[..., None] * (k @ k.mT)).tril(-1)
            solved = torch.linalg.solve_triangular(
                system.mT, match.mT, upper=True, unitriangular=True
            )
            return solved.mT * beta[:, None]
        if self.rule == "gated":
            # Fraction of a write that remains after all later writes.
            kept = F.logsigmoid(-logits)
            left = (kept.flip(-1).cumsum(-1).flip(-1) - kept).exp()
            match = match * (beta * left)[:, None]
        total = match.sum(-1, keepdim=True) + self.epsilon
        return match / total if self.epsilon else divide(match, total)

    def _fast_weight_memory(
        self, q: Tensor, k: Tensor, values: Tensor, beta: Tensor
    ) -> Tensor:
        """Retrieve values by the delta rule with fast weights of norm at most 1."""
        v = self._one_hot(values)
        W = k.new_zeros(len(k), self.symbols, k.shape[-1])
        steps = (x.unbind(1) for x in (k, v, beta))
        for k_t, v_t, beta_t in zip(*steps, strict=True):
            wrong = v_t - (W @ k_t[..., None])[..., 0]
            W = W + (beta_t[:, None] * wrong)[..., None] * k_t[:, None]
            W = W / W.flatten(1).norm(dim=-1).clamp(min=1)[:, None, None]
        return F.layer_norm(q @ W.mT, [self.symbols])

    def _one_hot(self, values: Tensor) -> Tensor:
        return F.one_hot(values, self.symbols).to(self.embedding.dtype)


@torch.no_grad()
def evaluate(
    model: Retriever, length: int, repeat: bool, as_published: bool = False
) -> float:
    """Return the mean loss over all keys of 20 new sequences.

    - `length`, `repeat`: of the sequences, as for `retrieval`.
    - `as_published`: as in the authors' code, the mean over groups of 32 keys
      and a smaller last group, without the keys after the 200th.
    """
    pairs = retrieval(SEQUENCES, model.symbols, length, repeat=repeat)
    retrieved = model.retrieve(pairs.keys, pairs.values, _every_key(pairs))
    if not as_published:
        asked = pairs.answers >= 0
        return loss(retrieved[asked], pairs.answers[asked]).item()
    groups = [part[:, :200].split(32, 1) for part in (retrieved, pairs.answers)]
    return mean(loss(*group).item() for group in zip(*groups, strict=True))


def train(
    model: Retriever,
    length: int,
    repeat: bool,
    budget: int,
    lr: float = 1e-3,
    batch: int = BATCH[ONE],
    ask: str = ONE,
    gain: float = 0.0,
) -> dict[str, Any]:
    """Train a model until its loss no longer falls.

    - `length`, `repeat`: of the training sequences, as for `retrieval`; those of
      evaluation have one step per symbol, as in the authors' code.
    - `budget`: maximum number of optimiser steps; fewer than 100 end without a loss.
    - `lr`, `batch`: learning rate, number of sequences per optimiser step.
    - `ask`: `ONE` = query the key of a random step of each training sequence,
      `ALL` = query all its keys.
    - `gain`: 0 = stop after 11 evaluations without a lower loss, as in the
      authors' code; otherwise stop after 5 that together gain no more than this.
    - Returns the loss of the last evaluation, the lowest of all, the
      number of optimiser steps, what ended the training: "solved",
      "no progress", "diverged" (the loss is None) or "budget"; and pairs of a
      step and its loss, at most 20.
    - Raises `ValueError` for a length that does not fit.
    """

    def draw(_: int) -> tuple[Retrieval, Tensor, Tensor]:
        pairs = retrieval(batch, model.symbols, length, repeat=repeat)
        asked = _question(pairs) if ask == ONE else (_every_key(pairs), pairs.answers)
        return pairs, *asked

    def stop(curve: list[tuple[int, float]]) -> str:
        mark, since = inf, 0
        for _, now in curve:
            mark, since = (now, 0) if now < mark - gain else (mark, since + 1)
        if curve[-1][1] <= SOLVED:
            return "solved"
        return "no progress" if since == (SHORT_PATIENCE if gain else PATIENCE) else ""

    fitted = fit(
        *(model, draw, loss_of, budget, lr),
        schedule=None,
        clip=None,
        every=EVERY,
        evaluate=lambda _: evaluate(model, model.symbols, repeat),
        stop=stop,
    )
    losses = [round(loss, 5) for _, loss in fitted.curve]
    failed = fitted.ended == "diverged" or not losses
    return {
        "loss": None if failed else losses[-1],
        "best": min(losses, default=None),
        "steps": fitted.steps,
        "ended": fitted.ended or "budget",
        "curve": [[step, round(loss, 5)] for step, loss in fitted.short],
    }


def loss_of(model: Retriever, batch: tuple[Retrieval, Tensor, Tensor]) -> Tensor:
    """Return the mean loss of a model over the queried keys.

    - `batch`: the pairs, and the queries and their values, `[batch, count]`; a
      query whose value is -1 does not count.
    """
    (keys, values, _), queries, wanted = batch
    asked = wanted >= 0
    return loss(model(keys, values, queries)[asked], wanted[asked])


def _every_key(pairs: Retrieval) -> Tensor:
    """Return queries for all keys, including keys that do not occur."""
    return torch.arange(pairs.answers.shape[1]).expand(len(pairs.answers), -1)


def _question(pairs: Retrieval) -> tuple[Tensor, Tensor]:
    """Return the key of a random step of each sequence, and the value of this key."""
    step = torch.randint(pairs.keys.shape[1], (len(pairs.keys), 1))
    query = pairs.keys.gather(1, step)
    return query, pairs.answers.gather(1, query)
