"""What a run will cost, before it starts: `fwlab train --dry-run`."""

import time
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from fwlab.data import CorpusError
from fwlab.training.checkpoint import new_model
from fwlab.training.config import Config
from fwlab.training.devices import Loss, device
from fwlab.training.presets import PRESETS
from fwlab.training.texts import run_text

STEPS = 10
#: Limits of a measured step: logits, about 2 GB with their gradients, and
#: operations, a few seconds on a CPU.
LOGITS, OPERATIONS = 2**28, 2**38


class Plan(NamedTuple):
    """The cost of a run.

    - `vocabulary`: number of tokens.
    - `parameters`: number of trained parameters.
    - `state_size`: scalars that a sequence of `block` tokens carries.
    - `fixed`: bytes for weights, gradients and Adam's two averages.
    - `kept`: bytes that a step keeps for its backward pass.
    - `operations`: floating-point operations of the matrix products of a step.
    - `windows`: how many windows a measured step had.
    - `device`: where it was measured.
    - `seconds`: time of a whole step, the median of ten, times `batch / windows`.
    """

    vocabulary: int
    parameters: int
    state_size: int
    fixed: int
    kept: int
    operations: int
    windows: int
    device: str
    seconds: float


class Step:
    """A training step on random tokens; a call takes it.

    - `config`: the run. The step is that of one process, without compilation
      and in float32.
    - `vocabulary`: number of tokens.
    - Raises `ValueError` for sizes that do not fit.
    """

    def __init__(self, config: Config, vocabulary: int):
        self.device = device(config.device)
        torch.manual_seed(config.seed)
        self.model = new_model(config, vocabulary).to(self.device)
        self.model.checkpointing = config.checkpointing
        self._loss = Loss(self.model)
        self._optimizer = torch.optim.AdamW(self.model.parameters(), config.lr)
        part = config.batch // config.accumulate
        #: Number of trained parameters.
        self.trained = sum(p.numel() for p in self.model.parameters())
        most = min(LOGITS // vocabulary, OPERATIONS // (6 * self.trained))
        #: How many windows it has.
        self.windows = min(part, max(1, most // config.block))
        self._tokens = torch.randint(
            vocabulary, (self.windows, config.block + 1), device=self.device
        )

    def forward(self) -> Tensor:
        """The loss."""
        return self._loss(self._tokens[:, :-1], self._tokens[:, 1:])[0]

    def __call__(self) -> float:
        """Train; returns how long it took, in seconds."""
        start = time.perf_counter()
        self._optimizer.zero_grad()
        self.forward().backward()
        self._optimizer.step()
        if self.device.type != "cpu":
            next(self.model.parameters()).sum().item()  # waits for the device
        return time.perf_counter() - start


def plan(config: Config, vocabulary: int) -> Plan:
    """Train ten steps on random tokens, and count.

    - `config`: the run.
    - `vocabulary`: number of tokens.
    - Raises `ValueError` for sizes that do not fit.
    """
    step = Step(config, vocabulary)
    model, windows = step.model, step.windows
    part = config.batch // config.accumulate
    sizes: dict[int, int] = {
        p.untyped_storage().data_ptr(): 0 for p in model.parameters()
    }

    def keep(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        sizes.setdefault(storage.data_ptr(), storage.nbytes())
        return x

    with FlopCounterMode(display=False) as counter:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            y = step.forward()
        y.backward()
    seconds = sorted(step() for _ in range(STEPS))
    return Plan(
        vocabulary,
        step.trained,
        model.state_size(config.block),
        16 * step.trained,
        sum(sizes.values()) * part // windows,
        counter.get_total_flops() * config.batch // windows,
        windows,
        str(step.device),
        seconds[STEPS // 2] * config.batch / windows,
    )


def vocabulary_size(config: Config, preset: str | None = None) -> int:
    """The number of tokens that a run will have.

    - `preset`: without its corpus, the published number counts.
    - Raises `CorpusError` if the corpus is not there.
    """
    try:
        return len(run_text(config, None).vocabulary)
    except CorpusError:
        if preset is None or config.corpus != PRESETS[preset].config.corpus:
            raise
        return PRESETS[preset].vocabulary


def describe(config: Config, plan: Plan) -> str:
    """A plan in words."""
    gib = 2**30
    return "\n".join(
        [
            f"{config.mixer}: {plan.parameters / 1e6:.1f} million parameters, "
            f"{plan.vocabulary:,} different tokens",
            f"state      {plan.state_size:,} numbers per sequence of {config.block} tokens",
            f"memory     at least {(plan.fixed + plan.kept) / gib:.1f} GiB: "
            f"{plan.fixed / gib:.2f} for weights, gradients and averages, "
            f"{plan.kept / gib:.2f} kept for the backward pass",
            f"operations {plan.operations:.2g} per step, in matrix products",
            f"time       {plan.seconds:.3g} s per step of {config.batch} windows, "
            f"measured on {plan.device} with {plan.windows} at a time; "
            f"{config.steps:,} steps take {_duration(plan.seconds * config.steps)}",
        ]
    )


def _duration(seconds: float) -> str:
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} seconds"
