"""The configuration of a training run."""

import math
from dataclasses import dataclass, fields
from typing import Annotated, Any

from typing_extensions import Doc

from fwlab.models import MIXERS

#: The text is what `fwlab train --help` shows.
MixerName = Annotated[
    str,
    Doc(
        f"How information passes between characters: {', '.join([*MIXERS][:-1])} "
        f"or {[*MIXERS][-1]}."
    ),
]

#: What a value of each annotated type must be.
KINDS: dict[Any, tuple[str, Any]] = {
    int: ("an integer", int),
    int | None: ("an integer or None", int | None),
    float: ("a number", int | float),
    str: ("a string", str),
    str | None: ("a string or None", str | None),
}


@dataclass(frozen=True)
class Config:
    """The defaults are nanoGPT's CPU configuration for Tiny Shakespeare,
    with which softmax attention reaches a validation loss of 1.88.
    A value out of range raises `ValueError`, which names the field.
    """

    mixer: MixerName = "delta"
    """How information passes between characters: a name in
    `fwlab.models.MIXERS`."""
    corpus: str | None = None
    """shakespeare, python, wikitext-2-valid, wikitext-2-test, or a text
    file; default: shakespeare, or python if that cannot be downloaded."""
    layers: int = 4
    """Number of blocks."""
    heads: int = 4
    """Heads per block; must divide d_model."""
    d_model: int = 128
    """Width of the model."""
    d_ff: int | None = None
    """Width inside the MLPs; default: 4 * d_model."""
    block: int = 64
    """Characters per training window."""
    batch: int = 12
    """Windows per step."""
    steps: int = 2000
    """Total number of optimiser steps."""
    lr: float = 1e-3
    """Learning rate after the warm-up."""
    min_lr: float = 1e-4
    """Learning rate at the end of the cosine decay."""
    warmup: int = 100
    """Steps of linear warm-up."""
    beta2: float = 0.99
    """AdamW's second beta; the first is 0.9."""
    weight_decay: float = 0.1
    """Applied to matrices, not to norms."""
    clip: float = 1.0
    """Maximum norm of the gradient."""
    eval_every: int = 250
    """Steps between validations, samples and checkpoints."""
    eval_windows: int = 240
    """Validation windows during training; the final validation uses all."""
    seed: int = 1337
    """Seed of the initial weights, the batches and the samples."""
    device: str = "auto"
    """auto, cpu, cuda or mps; auto takes the best available one."""

    def __post_init__(self) -> None:
        for field in fields(self):
            kinds = KINDS.get(field.type)
            value = getattr(self, field.name)
            if kinds and (isinstance(value, bool) or not isinstance(value, kinds[1])):
                raise ValueError(
                    f"expected {field.name} to be {kinds[0]}, got {value!r}"
                )
        for name in (
            "layers",
            "heads",
            "d_model",
            "block",
            "batch",
            "steps",
            "eval_every",
            "eval_windows",
        ):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"expected {name} to be at least 1, got {getattr(self, name)}"
                )
        if self.d_ff is not None and self.d_ff < 1:
            raise ValueError(f"expected d_ff to be at least 1, got {self.d_ff}")
        for name in ("lr", "min_lr", "weight_decay", "warmup"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                raise ValueError(
                    f"expected {name} to be 0 or more, got {getattr(self, name)}"
                )
        if not self.clip > 0:
            raise ValueError(f"expected clip to be above 0, got {self.clip}")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"expected seed from 0 to 2**32 - 1, got {self.seed}")
        if not 0 <= self.beta2 < 1:
            raise ValueError(
                f"expected beta2 from 0 to 1, excluding 1, got {self.beta2}"
            )

    def lr_at(self, step: int) -> float:
        """Warm-up, then half a cosine from `lr` to `min_lr`.

        - `step`: number of optimiser steps so far, from 0.
        - Returns the learning rate of the next step.
        """
        if step < self.warmup:
            return self.lr * (step + 1) / (self.warmup + 1)
        done = (step - self.warmup) / max(self.steps - self.warmup, 1)
        return self.min_lr + (self.lr - self.min_lr) * 0.5 * (
            1 + math.cos(math.pi * min(done, 1.0))
        )
