"""Share code between the experiments on recall and on counting.

A sequence has an answer after some of its tokens, and none after the others.
"""

from collections.abc import Mapping
from typing import Any

import torch
from frame import Points
from matplotlib.axes import Axes
from torch import Tensor, nn
from torch.nn import functional as F

from fwlab import plots
from fwlab.data.retrieval import loss as squared
from fwlab.feature_maps import DPFP
from fwlab.layers import FastWeightAttention
from fwlab.models import LanguageModel
from fwlab.plots import SERIES

#: The label of tokens without an answer, which the loss ignores.
UNASKED = -100
#: Tokens, and the answer after each token, both `[batch, time]`.
Batch = tuple[Tensor, Tensor]
WIDTH = 32


def loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean cross-entropy of all answers in a batch."""
    tokens, answers = batch
    return F.cross_entropy(model(tokens).flatten(0, 1), answers.flatten())


def recall_error(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Return half the squared error of the values that a model retrieves."""
    keys, values, last = batch
    return squared(model(keys, values).flatten(0, 1), last.flatten())


@torch.no_grad()
def right(
    model: nn.Module, tokens: Tensor, answers: Tensor, among: int | None = None
) -> Tensor:
    """Return 1 for questions whose most likely answer is correct, and 0 for others.

    - `among`: consider only the first `among` tokens as answers; None = all tokens.
    - Returns `[questions]` in float64, in the order of the questions.
    """
    asked = answers != UNASKED
    given = model(tokens)[asked][:, :among].argmax(-1)
    return (given == answers[asked]).double()


def scaled(share: float, answers: int) -> float:
    """Rescale an accuracy so that 0 is chance level and 1 is perfect."""
    return round((share - 1 / answers) / (1 - 1 / answers), 4)


def growing(step: int, budget: int, last: int, first: int = 2) -> int:
    """Return the sequence length at a training step; lengths grow during training.

    Short sequences help. The length grows from `first` to `last` in half the budget.
    """
    return min(last, first + 2 * last * step // budget)


def columns(ax: Axes, rows: Mapping[str, Points], labels: Mapping[str, str]) -> None:
    """Draw columns of results as marks, with one row per group of results.

    - `rows`, `labels`: the groups by name, and the legend label of each column.
    """
    for (name, label), color, marker in zip(labels.items(), SERIES, "^o", strict=False):
        numbers = {row: own[name] for row, own in rows.items()}
        plots.rows(ax, numbers, color, marker, label)


def enlarge(model: nn.Module) -> None:
    """Sample new linear and embedding weights with standard deviation width ** -0.5."""
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=module.weight.shape[-1] ** -0.5)


class Recaller(LanguageModel):
    """Build a language model that adds the previous token's embedding to each token.

    A value then arrives together with its key, as after the short
    convolution of today's models: no mixer has to find out which key
    came before a value. The model takes whole sequences, without `prefill` or `step`.

    - `mixer`, `vocabulary`, `layers`, `heads`, `max_len`, `options`: as for
      `LanguageModel`.
    - `features`: "own" for the feature map of the mixer, or "dpfp-1" instead.
    """

    def __init__(
        self,
        mixer: str | list[str],
        features: str,
        vocabulary: int,
        layers: int,
        heads: int,
        max_len: int,
        **options: Any,
    ):
        sizes = (layers, heads, WIDTH, max_len, 2 * WIDTH)
        super().__init__(vocabulary, mixer, *sizes, **options)
        self.before = nn.Embedding(vocabulary, WIDTH)
        enlarge(self)
        if features == "own":
            return
        for block in self.blocks:
            own = block.mixer
            block.mixer = FastWeightAttention(WIDTH, heads, DPFP(nu=1), own.rule)
            block.mixer.load_state_dict(own.state_dict())  # DPFP has no weights.

    def forward(self, tokens: Tensor) -> Tensor:
        before = F.pad(self.before(tokens[:, :-1]), (0, 0, 1, 0))
        x = self._embed(tokens, 0, tokens.shape[1]) + before
        for block in self.blocks:
            x = block(x)
        return self._logits(x)
