"""The validation loss of a run, over windows, over documents or in order."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fwlab.data import Tokens, packed, packed_rows
from fwlab.data.packing import NO_TARGET
from fwlab.training.batches import in_rows
from fwlab.training.config import Config

if TYPE_CHECKING:
    from accelerate import Accelerator

#: Logits at most: 1 GiB, as one for each word takes much memory.
LOGITS = 2**28


class Validation:
    """Measures the loss on a text.

    - `loss`: a `devices.Loss`, or what Accelerate has made of it.
    - `text`: the validation text.
    - `vocabulary`: number of different tokens.
    - `config`, `accelerator`, `device`: of the run.
    - `rows`: with `config.carry`, the number of pieces of the text that are
      read side by side.
    """

    def __init__(
        self,
        loss: nn.Module,
        text: Tokens,
        vocabulary: int,
        config: Config,
        accelerator: "Accelerator",
        device: torch.device,
        rows: int = 1,
    ):
        self.loss, self.text, self.config = loss, text, config
        self.accelerator, self.device, self.rows = accelerator, device, rows
        #: Windows that are read at once.
        self.batch = max(1, min(128, LOGITS // (vocabulary * config.block)))

    @torch.no_grad()
    def measure(self, windows: int | None = None) -> float:
        """The loss as `Trainer.evaluate` describes it."""
        if self.config.carry:
            return self._in_order(windows)
        if self.config.pack:
            return self._of_documents(windows)
        return self.of_windows(windows)

    @torch.no_grad()
    def of_windows(self, windows: int | None = None) -> float:
        """The loss of windows that start with an empty state."""
        self.loss.eval()
        tokens, block = self.text.tokens, self.config.block
        count = (len(tokens) - 1) // block
        if windows is not None and windows < count:
            starts = torch.linspace(0, count - 1, windows).long() * block
        else:
            starts = torch.arange(count) * block
        total = torch.zeros((), dtype=torch.float64)
        for part in starts.split(self.batch):
            cut = tokens[part[:, None] + torch.arange(block + 1)].long()
            total += self._mean(cut.to(self.device)) * len(part)
        return total.item() / len(starts)

    def _mean(self, windows: Tensor) -> float:
        """The mean loss of windows, of which each process computes a share."""
        count, rank = self.accelerator.num_processes, self.accelerator.process_index
        if count == 1:
            return self.loss(windows[:, :-1], windows[:, 1:])[0].item()
        # All take part, also those that nothing is left for.
        share = windows[rank::count]
        weight, share = len(share), share if len(share) else windows[:1]
        loss = self.loss(share[:, :-1], share[:, 1:])[0] * weight
        return self.accelerator.reduce(loss, "sum").item() / len(windows)

    def _of_documents(self, windows: int | None) -> float:
        self.loss.eval()
        length = self.batch * self.config.block
        rows = packed_rows(self.text.borders, length)
        if windows is not None:
            rows = min(rows, -(-windows // self.batch))
        total, count = 0.0, 0
        for row in range(rows):
            inputs, targets, cu_seqlens = (
                x.to(self.device) for x in packed(*self.text, length, row)
            )
            known = int((targets != NO_TARGET).sum())
            loss = self.loss(inputs, targets, cu_seqlens=cu_seqlens)[0]
            total += loss.item() * known
            count += known
        return total / count

    def _in_order(self, windows: int | None) -> float:
        length = len(self.text.tokens) // self.rows
        if windows is not None:
            length = min(length, windows * self.config.block + 1)
        # The length of these parts changes no result.
        ends = [*range(1024, length - 1, 1024), length - 1]
        total, past = 0.0, 0
        for end, loss, _ in self.read(ends):
            total += loss * (end - past)
            past = end
        return total / past

    @torch.no_grad()
    def read(self, ends: Sequence[int]) -> Iterator[tuple[int, float, Any]]:
        """Read the text in parts, with carried state.

        - `ends`: where each part ends, in tokens, increasing.
        - Returns an iterator of `(end, loss of the part, state after it)`.
        """
        self.loss.eval()
        tokens = in_rows(self.text.tokens, self.rows).long().to(self.device)
        state = None
        for start, end in pairwise([0, *ends]):
            part = tokens[:, start : end + 1]
            loss, state = self.loss(part[:, :-1], part[:, 1:], state, carry=True)
            yield end, loss.item(), state
