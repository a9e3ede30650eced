"""What a training run is, in one place."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Config:
    """The defaults are nanoGPT's CPU configuration for Tiny Shakespeare,
    with which softmax attention reaches a validation loss of 1.88.
    A number out of range raises `ValueError`, which names its field.
    """

    mixer: str = "delta"
    """How characters learn of each other: softmax, sum, gated, delta,
    gated-delta, fwp, aft-simple, aft-full, aft-local, aft-conv, feedback,
    feedback-shared or transformer-xl."""
    corpus: str | None = None
    """shakespeare, python, wikitext-2-valid, wikitext-2-test, or a text
    file; left out: shakespeare, or python where that cannot be fetched."""
    layers: int = 4
    """Number of blocks."""
    heads: int = 4
    """Heads per block; must divide d_model."""
    d_model: int = 128
    """Width of the model."""
    d_ff: int | None = None
    """Width inside the MLPs; left out: 4 * d_model."""
    block: int = 64
    """Characters per training window."""
    batch: int = 12
    """Windows per step."""
    steps: int = 2000
    """Optimiser steps in all."""
    lr: float = 1e-3
    """Learning rate after the warm-up."""
    min_lr: float = 1e-4
    """Learning rate at the end of the cosine."""
    warmup: int = 100
    """Steps of linear warm-up."""
    beta2: float = 0.99
    """AdamW's second beta; the first is 0.9."""
    weight_decay: float = 0.1
    """On matrices; norms are free of it."""
    clip: float = 1.0
    """Largest norm of the gradient."""
    eval_every: int = 250
    """Steps between validations, samples and checkpoints."""
    eval_windows: int = 240
    """Validation windows on the way; at the end all of them."""
    seed: int = 1337
    """Of the initial weights, the batches and the samples."""
    device: str = "auto"
    """auto, cpu, cuda or mps; auto takes the best one there is."""

    def __post_init__(self) -> None:
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
                    f"{name} must be at least 1, not {getattr(self, name)}"
                )
        if self.d_ff is not None and self.d_ff < 1:
            raise ValueError(f"d_ff must be at least 1, not {self.d_ff}")
        for name in ("lr", "min_lr", "weight_decay", "warmup"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                raise ValueError(f"{name} must be 0 or more, not {getattr(self, name)}")
        if not self.clip > 0:
            raise ValueError(f"clip must be above 0, not {self.clip}")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed must be from 0 to 2**32 - 1, not {self.seed}")
        if not 0 <= self.beta2 < 1:
            raise ValueError(f"beta2 must be from 0 to 1, 1 excluded, not {self.beta2}")

    def lr_at(self, step: int) -> float:
        """Warm-up, then half a cosine from `lr` to `min_lr`.

        - `step`: how many steps were done before, from 0.
        - Returns the learning rate of the next step.
        """
        if step < self.warmup:
            return self.lr * (step + 1) / (self.warmup + 1)
        done = (step - self.warmup) / max(self.steps - self.warmup, 1)
        return self.min_lr + (self.lr - self.min_lr) * 0.5 * (
            1 + math.cos(math.pi * min(done, 1.0))
        )
