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


def plan(config: Config, vocabulary: int) -> Plan:
    """Train ten steps on random tokens, and count.

    - `config`: the run. It is measured in one process, without compilation
      and in float32.
    - `vocabulary`: number of tokens.
    - Raises `ValueError` for sizes that do not fit.
    """
    at = device(config.device)
    torch.manual_seed(config.seed)
    model = new_model(config, vocabulary).to(at)
    model.checkpointing = config.checkpointing
    loss, optimizer = Loss(model), torch.optim.AdamW(model.parameters(), config.lr)
    part = config.batch // config.accumulate
    trained = sum(p.numel() for p in model.parameters())
    most = min(LOGITS // vocabulary, OPERATIONS // (6 * trained)) // config.block
    windows = min(part, max(1, most))
    tokens = torch.randint(vocabulary, (windows, config.block + 1), device=at)

    def forward() -> Tensor:
        return loss(tokens[:, :-1], tokens[:, 1:])[0]

    sizes: dict[int, int] = {
        p.untyped_storage().data_ptr(): 0 for p in model.parameters()
    }

    def keep(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        sizes.setdefault(storage.data_ptr(), storage.nbytes())
        return x

    with FlopCounterMode(display=False) as counter:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            y = forward()
        y.backward()
    seconds = []
    for _ in range(STEPS):
        start = time.perf_counter()
        optimizer.zero_grad()
        forward().backward()
        optimizer.step()
        if at.type != "cpu":
            next(model.parameters()).sum().item()  # waits for the device
        seconds.append(time.perf_counter() - start)
    return Plan(
        vocabulary,
        trained,
        model.state_size(config.block),
        16 * trained,
        sum(sizes.values()) * part // windows,
        counter.get_total_flops() * config.batch // windows,
        windows,
        str(at),
        sorted(seconds)[STEPS // 2] * config.batch / windows,
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
