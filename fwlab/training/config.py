"""Define the configuration of a training run."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from typing_extensions import Doc

from fwlab.layers.fast_weight_attention import PRESETS
from fwlab.models import MIXERS

#: Type of `mixer`, with the text that `fwlab train --help` shows.
MixerName = Annotated[
    str,
    Doc(
        f"How information passes between tokens: {', '.join([*MIXERS][:-1])} "
        f"or {[*MIXERS][-1]}; or several, as in gated-delta*3,softmax: layers take "
        "them in turn."
    ),
]
LayerName = Annotated[
    str | None,
    Doc(
        f"A published layer ({', '.join(PRESETS)}) whose options all fast weights "
        "have; the next options change them."
    ),
]

#: Names of the types of fields, for error messages.
WORDS: dict[Any, str] = {
    **{bool: "True or False", int: "an integer", float: "a number"},
    **{str: "a string", type(None): "None"},
}
SIZES = ("layers", "heads", "d_model", "d_ff", "block", "batch", "accumulate")
COUNTS = ("steps", "eval_every", "eval_windows", "log_every")
AMOUNTS = ("lr", "min_lr", "weight_decay", "warmup", "grow_steps", "conv")
SHARES = ("dropout", "attention_dropout", "beta2")
#: Maximum size, above which PyTorch overflows, and maximum number of layers.
LARGEST, MOST_LAYERS = 2**53, 10_000
#: Ranges of numbers: names of fields, description of the range, and test.
RANGES: list[tuple[tuple[str, ...], str, Callable[[Any], bool]]] = [
    ((*SIZES, *COUNTS), "to be at least 1", lambda x: x >= 1),
    (("layers",), f"to be at most {MOST_LAYERS:,}", lambda x: x <= MOST_LAYERS),
    ((*SIZES, *COUNTS), f"to be at most {LARGEST:,}", lambda x: x <= LARGEST),
    (AMOUNTS, "to be 0 or more", lambda x: 0 <= x < math.inf),
    (("conv",), f"to be at most {LARGEST:,}", lambda x: x <= LARGEST),
    (SHARES, "from 0 to 1, excluding 1", lambda x: 0 <= x < 1),
    (("clip",), "to be above 0", lambda x: x > 0),
    (("seed",), "from 0 to 2**32 - 1", lambda x: 0 <= x < 2**32),
]
#: Fields that may change when a run is resumed: length, evaluation and execution.
#: The corpus is compared by its text.
FREE = ["corpus", "steps", "eval_every", "eval_windows", "log_every"]
FREE += ["device", "precision", "compile", "checkpointing"]


@dataclass(frozen=True)
class Config:
    """Configure a training run; the default sizes are those of nanoGPT on a CPU.

    A value out of range raises `ValueError`, which names the field.
    """

    mixer: MixerName = "delta"
    """How information passes between tokens: a name in `fwlab.models.MIXERS`."""
    corpus: str | None = None
    """shakespeare, python, wikitext-2, wikitext-103, or a text file or a folder of
    them; default: shakespeare, or python if that cannot be downloaded."""
    tokens: Literal["characters", "words"] = "characters"
    """What a token is."""
    layers: int = 4
    """Number of blocks."""
    heads: int = 4
    """Heads per block; must divide d_model."""
    d_model: int = 128
    """Width of the model."""
    d_ff: int | None = None
    """Width inside the MLPs; default: 4 * d_model."""
    dropout: float = 0.0
    """Share of embeddings and of what each layer adds that is set to 0 in training."""
    attention_dropout: float = 0.0
    """The same of attention weights, for mixers that have any."""
    like: LayerName = None
    """A published layer, as in `FastWeightAttention.like`."""
    conv: int = 0
    """Tokens of the short convolutions before fast weights; 0: none."""
    out_norm: bool = False
    """Normalise what each head of fast weights reads."""
    out_gate: bool = False
    """Multiply what each head of fast weights reads by a gate."""
    beta_max: float = 1.0
    """Maximum of beta in rules that correct; up to 2."""
    rope: float | None = None
    """Softmax attention: share of a head's width that is turned by the position, in
    place of a table of positions; 0: no positions."""
    norm: Literal["layer", "rms"] = "layer"
    """The norms of the blocks."""
    mlp: Literal["gelu", "swiglu"] = "gelu"
    """The MLPs of the blocks."""
    start: str | None = None
    """A run to take the first weights from: of the same model, or of softmax attention
    for feedback."""
    block: int = 64
    """Tokens per training window."""
    first_block: int | None = None
    """Tokens per window at the first step, which then grow to block; default: block."""
    grow_steps: int = 0
    """Steps over which windows grow from first_block to block."""
    carry: bool = False
    """Read the text in order, and let each window begin with the state in which the one
    before it has ended (truncated backpropagation)."""
    pack: bool = False
    """Fill each batch with documents, whose states do not mix, instead of windows; a
    document that does not fit is cut."""
    batch: int = 12
    """Windows per step, of all processes together."""
    accumulate: int = 1
    """Parts of a batch, computed one after the other, which takes less memory."""
    steps: int = 2000
    """Total number of optimiser steps."""
    lr: float = 1e-3
    """Learning rate after the warm-up."""
    schedule: Literal["cosine", "noam"] = "cosine"
    """How the learning rate falls: along half a cosine to min_lr, or with one over the
    square root of the step."""
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
    log_every: int = 10
    """Steps between two lines of metrics.jsonl."""
    seed: int = 1337
    """Seed of the initial weights, the batches and the samples."""
    device: str = "auto"
    """auto, cpu, cuda or mps; auto takes the best available one."""
    precision: Literal["float32", "bf16"] = "float32"
    """Precision of matrix products; weights and states of fast weights stay float32."""
    compile: bool = False
    """Compile the model with torch.compile."""
    checkpointing: bool = False
    """Keep only the inputs of each block for the backward pass, and compute the rest
    again."""

    def __post_init__(self) -> None:
        self._check_types()
        for names, words, fits in RANGES:
            for name in names:
                value = getattr(self, name)
                if value is not None and not fits(value):
                    raise ValueError(f"expected {name} {words}, got {value}")
        if self.batch % self.accumulate:
            raise ValueError(
                f"expected batch to be a multiple of accumulate = {self.accumulate}, "
                f"got {self.batch}"
            )
        grows = self.first_block is not None
        if self.first_block is not None and not 1 <= self.first_block <= self.block:
            raise ValueError(
                f"expected first_block from 1 to block = {self.block}, "
                f"got {self.first_block}"
            )
        ways = {"first_block": grows, "carry": self.carry, "pack": self.pack}
        chosen = [name for name, on in ways.items() if on]
        if len(chosen) > 1:
            raise ValueError(
                f"expected one of {', '.join(ways)} at most, got {' and '.join(chosen)}"
            )
        if grows != (self.grow_steps > 0):
            raise ValueError(
                "expected first_block and grow_steps together, got first_block = "
                f"{self.first_block} and grow_steps = {self.grow_steps}"
            )

    def _check_types(self) -> None:
        for name, hint in get_type_hints(type(self)).items():
            value, kinds = getattr(self, name), get_args(hint) or (hint,)
            if get_origin(hint) is Literal:
                fits, words = value in kinds, f"one of {', '.join(kinds)}"
            else:
                # Accept an int for a float, but not a bool, which is an int in Python.
                types = (*kinds, int) if float in kinds else kinds
                fits = isinstance(value, types)
                fits = fits and isinstance(value, bool) == (hint is bool)
                words = " or ".join(WORDS[kind] for kind in kinds)
            if not fits:
                raise ValueError(f"expected {name} to be {words}, got {value!r}")

    def lr_at(self, step: int) -> float:
        r"""Return the learning rate of a step, which is `lr` after the warm-up.

        It rises in equal steps. Then it falls along half a cosine to `min_lr`, or
        ("noam") with $1/\sqrt{\text{step}}$, as in Vaswani et al. 2017, section 5.3.

        - `step`: number of optimiser steps so far, from 0.
        - Returns the learning rate of the next step.
        """
        if step < self.warmup:
            return self.lr * (step + 1) / (self.warmup + 1)
        if self.schedule == "noam":
            return self.lr * math.sqrt((self.warmup + 1) / (step + 1))
        done = (step - self.warmup) / max(self.steps - self.warmup, 1)
        return self.min_lr + (self.lr - self.min_lr) * 0.5 * (
            1 + math.cos(math.pi * min(done, 1.0))
        )

    def block_at(self, step: int) -> int:
        """Return the number of tokens per window at a step.

        - `step`: number of optimiser steps so far, from 0.
        - Returns the length, from `first_block` to `block`.
        """
        if self.first_block is None or step >= self.grow_steps:
            return self.block
        more = (self.block - self.first_block) * step // self.grow_steps
        return self.first_block + more
