"""One training step of a language model, mixer by mixer.

All models have nanoGPT's CPU size and as many parameters as the softmax
model: if a mixer has more parameters, its MLPs have fewer.
"""

import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fwlab.bench.measure import in_turns, operator_calls, peak_mib
from fwlab.models import MIXERS, LanguageModel

VOCAB, LAYERS, HEADS, D_MODEL, BLOCK, BATCH = 65, 4, 4, 128, 64, 12
ROUNDS = 5
TURN = 0.5  # seconds


def model(mixer: str, d_ff: int, time: int = BLOCK) -> LanguageModel:
    """A new model of that size, for windows of `time` tokens."""
    return LanguageModel(VOCAB, mixer, LAYERS, HEADS, D_MODEL, max_len=time, d_ff=d_ff)


def equal_d_ff(mixer: str) -> int:
    """The MLP width, a multiple of 32, at which a mixer's model is as large
    as the softmax model, within 2 %.
    """

    def size(mixer: str, d_ff: int) -> int:
        with torch.device("meta"):
            return model(mixer, d_ff).num_parameters()

    usual = 4 * D_MODEL
    missing = size("softmax", usual) - size(mixer, usual)
    more = size(mixer, usual + 32) - size(mixer, usual)
    return usual + 32 * round(missing / more)


def of(mixer: str, time: int = BLOCK) -> LanguageModel:
    """A new model, as large as the softmax model (at `BLOCK` tokens)."""
    return model(mixer, equal_d_ff(mixer), time)


class Step:
    """A model, a batch and an optimiser. A call trains; it returns the loss."""

    def __init__(self, make: Callable[[], nn.Module], time: int = BLOCK):
        torch.manual_seed(0)
        self.model: Any = make()
        batch = max(BATCH * BLOCK // time, 1)
        self.tokens = torch.randint(VOCAB, (batch, time + 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def __call__(self) -> Tensor:
        logits = self.model(self.tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), self.tokens[:, 1:].flatten())
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def run(mixers: tuple[str, ...] = tuple(MIXERS)) -> Iterator[dict[str, Any]]:
    """Yield tokens per second (in turns), peak memory, operator calls and state."""
    steps = {mixer: Step(partial(of, mixer)) for mixer in mixers}
    times = in_turns(steps, ROUNDS, TURN, shown=True)
    for mixer, step in steps.items():
        yield {
            "mixer": mixer,
            "d_ff": equal_d_ff(mixer),
            "parameters": step.model.num_parameters(),
            "tokens_per_second": round(BATCH * BLOCK / statistics.median(times[mixer])),
            "peak_mib": peak_mib(partial(_two_steps, mixer)),
            "operators": operator_calls(step),
            "state_size": step.model.state_size(BLOCK),
        }


def _two_steps(mixer: str) -> None:
    """A model and its training, from nothing; the optimiser's state is
    there from the second step on.
    """
    step = Step(partial(of, mixer))
    step()
    step()


def table(rows: list[dict[str, Any]]) -> list[list[str]]:
    """The rows as text, with a header."""
    head = ["mixer", "MLP width", "parameters", "tokens/s", "MiB"]
    head += ["operators", "state"]
    return [
        head,
        *(
            [
                r["mixer"],
                str(r["d_ff"]),
                f"{r['parameters']:,}",
                f"{r['tokens_per_second']:,}",
                f"{r['peak_mib']:.0f}",
                f"{r['operators']:,}",
                f"{r['state_size']:,}",
            ]
            for r in rows
        ),
    ]
