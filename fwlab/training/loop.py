"""The training loop of a character language model."""

import copy
import hashlib
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fwlab.data import Characters, CorpusError, corpus
from fwlab.models import LanguageModel
from fwlab.training import checkpoint as checkpoints
from fwlab.training.checkpoint import Checkpoint, CheckpointError
from fwlab.training.config import Config


class Progress(NamedTuple):
    """The result of one optimiser step.

    - `step`: optimiser steps so far, including this one.
    - `loss`: training loss of its batch, nats per character.
    - `val_loss`: validation loss after it, if it was measured.
    - `seconds`: time spent training so far, validation not counted.
    """

    step: int
    loss: float
    val_loss: float | None
    seconds: float


class Trainer:
    """A model, its data and its optimiser.

    - `config`: the run.
    - `text`: train on this instead of `config.corpus`.
    - `resume`: continue from this checkpoint, which must be of the same
      run.
    - Raises `ValueError`, `CorpusError` or `CheckpointError` for what
      does not fit, before any training.

    ```python
    trainer = Trainer(Config(mixer="delta", steps=100))
    for progress in trainer.run():
        print(progress)
    ```
    """

    def __init__(
        self, config: Config, text: str | None = None, resume: Checkpoint | None = None
    ):
        self.config = config
        self.device = _device(config.device)
        with torch.device("meta"):
            self._new_model(2)  # invalid sizes raise here
        text = corpus(config.corpus) if text is None else text
        #: SHA-256 of the text, so that results identify their training text.
        self.corpus_sha256 = hashlib.sha256(text.encode()).hexdigest()
        split = int(0.9 * len(text))
        shortest = min(split, len(text) - split)
        if shortest < config.block + 1:
            raise CorpusError(
                "expected a validation text (a tenth of the corpus) of at least block + 1 = "
                f"{config.block + 1} characters, got a corpus of {len(text)} characters"
            )
        if resume is not None:
            _same_run(config, resume.config)
        self.characters = Characters(text)
        #: `[step, training loss, validation loss]` of every validation.
        self.curve: list[list[float]] = []
        if resume is None:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(config.seed)
                self.model = self._new_model(len(self.characters))
            self.step = 0
        else:
            if resume.corpus_sha256 != self.corpus_sha256:
                raise CheckpointError(
                    "the checkpoint was trained on another text: expected SHA-256 "
                    f"{resume.corpus_sha256[:12]}…, got {self.corpus_sha256[:12]}…"
                )
            self.model, self.step = copy.deepcopy(resume.model), resume.step
            self.curve = [list(row) for row in resume.curve]
        self.model.to(self.device)
        tokens = self.characters.encode(text)
        self.train_tokens, self.val_tokens = tokens[:split], tokens[split:]
        self.optimizer = self._new_optimizer(resume.adam if resume else {})

    def run(self) -> Iterator[Progress]:
        """Train up to `config.steps`, one optimiser step per item.

        Validation runs every `eval_every` steps on `eval_windows`
        windows, and after the last step on all of them.

        - Returns an iterator of `Progress`; each item trains one step.
        - Raises `FloatingPointError` if the loss or a gradient is not finite;
          it names the first layer whose output is not.
        """
        c, seconds = self.config, 0.0
        while self.step < c.steps:
            start = time.perf_counter()
            loss = self._train_step()
            seconds += time.perf_counter() - start
            self.step += 1
            val_loss = None
            if self.step == c.steps:
                val_loss = self.evaluate()
            elif self.step % c.eval_every == 0:
                val_loss = self.evaluate(c.eval_windows)
            if val_loss is not None:
                if not math.isfinite(val_loss):
                    raise FloatingPointError(
                        self._diverged("validation loss", self._batch()[0])
                    )
                self.curve.append([self.step, round(loss, 4), round(val_loss, 4)])
            yield Progress(self.step, loss, val_loss, seconds)

    def _train_step(self) -> float:
        inputs, targets = self._batch()
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.lr_at(self.step)
        self.model.train()
        loss = _loss(self._logits(inputs), targets)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip)
        if not torch.isfinite(norm + loss):
            self.step += 1
            what = "gradient" if torch.isfinite(loss) else "loss"
            raise FloatingPointError(self._diverged(what, inputs))
        self.optimizer.step()
        return loss.item()

    def _diverged(self, what: str, inputs: Tensor) -> str:
        begin = f"training diverged: the {what} of step {self.step} is not finite"
        return begin + _first_not_finite(self.model, inputs)

    def _new_model(self, vocab_size: int) -> LanguageModel:
        return checkpoints.new_model(self.config, vocab_size)

    def _logits(self, inputs: Tensor) -> Tensor:
        return self.model(inputs)

    def _batch(self) -> tuple[Tensor, Tensor]:
        # Seeded per step, so that a resumed run gets the same batches.
        generator = torch.Generator().manual_seed(
            self.config.seed + 1_000_003 * self.step
        )
        block = self.config.block
        starts = torch.randint(
            len(self.train_tokens) - block, (self.config.batch,), generator=generator
        )
        windows = self.train_tokens[starts[:, None] + torch.arange(block + 1)].to(
            self.device
        )
        return windows[:, :-1], windows[:, 1:]

    @torch.no_grad()
    def evaluate(self, windows: int | None = None) -> float:
        """Validation loss in nats per character.

        - `windows`: number of windows of `block` characters, spread
          evenly over the validation text; None = all of them, without
          overlap.
        - Returns the mean over these windows.
        """
        block = self.config.block
        count = (len(self.val_tokens) - 1) // block
        if windows is not None and windows < count:
            starts = torch.linspace(0, count - 1, windows).long() * block
        else:
            starts = torch.arange(count) * block
        self.model.eval()
        total = 0.0
        for part in starts.split(128):
            cut = self.val_tokens[part[:, None] + torch.arange(block + 1)].to(
                self.device
            )
            total += _loss(self.model(cut[:, :-1]), cut[:, 1:]).item() * len(part)
        return total / len(starts)

    def sample(
        self, prompt: str | None = None, length: int = 200, temperature: float = 0.8
    ) -> str:
        """Continue a prompt, with the seed of the configuration.

        - `prompt`: the text to continue, at least one character; None = a
          line break, or the first character of the alphabet.
        - `length`: number of characters to add, 0 or more.
        - `temperature`: divides the logits; 0 takes the most likely
          character.
        - Returns the new text, without the prompt.
        - Raises `ValueError` for characters that are not in the alphabet,
          and for an argument out of range.
        """
        known = self.characters.encode(
            self.characters.start if prompt is None else prompt
        )
        self.model.eval()
        tokens = self.model.generate(
            known[None].to(self.device),
            length,
            temperature=temperature,
            seed=self.config.seed,
        )
        return self.characters.decode(tokens[0, len(known) :])

    def save(self, path: str | Path) -> None:
        """Write a checkpoint for `generate` and `resume`.

        - `path`: of the file; an existing file is replaced.
        - Raises `CheckpointError` if the file cannot be written, and
          `FloatingPointError` for weights that are not finite.
        """
        if not all(torch.isfinite(p).all() for p in self.model.parameters()):
            raise FloatingPointError(self._diverged("result", self._batch()[0]))
        adam = {
            name: self.optimizer.state[p]
            for name, p in self.model.named_parameters()
            if p in self.optimizer.state
        }
        checkpoints.save(
            path,
            Checkpoint(
                self.model,
                self.characters,
                self.config,
                self.step,
                adam,
                self.curve,
                self.corpus_sha256,
            ),
        )

    def _new_optimizer(
        self, adam: dict[str, dict[str, Tensor]]
    ) -> torch.optim.Optimizer:
        c = self.config
        named = dict(self.model.named_parameters())
        optimizer = torch.optim.AdamW(
            [
                {
                    "params": [p for p in named.values() if p.dim() >= 2],
                    "weight_decay": c.weight_decay,
                },
                {
                    "params": [p for p in named.values() if p.dim() < 2],
                    "weight_decay": 0.0,
                },
            ],
            lr=c.lr,
            betas=(0.9, c.beta2),
        )
        for name, state in adam.items():
            optimizer.state[named[name]] = {
                key: part.clone() if key == "step" else part.to(self.device)
                for key, part in state.items()
            }
        return optimizer


def _loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@torch.no_grad()
def _first_not_finite(model: torch.nn.Module, inputs: Tensor) -> str:
    """Where it began, for an error: a parameter or a layer; "" = unknown."""
    for name, p in model.named_parameters():
        if not torch.isfinite(p).all():
            return f"; the parameter {name} is not finite"
    found: list[str] = []

    def note(name: str) -> Callable:
        def hook(module: torch.nn.Module, given: Any, output: Any) -> None:
            if isinstance(output, Tensor) and not torch.isfinite(output).all():
                found.append(name)

        return hook

    # A layer ends after the layers inside it: the innermost comes first.
    hooks = [m.register_forward_hook(note(n)) for n, m in model.named_modules() if n]
    try:
        model(inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return f"; the first output that is not: {found[0]}" if found else ""


def _device(name: str) -> torch.device:
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()  # "meta" has no values
    except (RuntimeError, AssertionError):
        raise ValueError(
            "expected device to be auto, cpu, cuda or mps, and available here, "
            f"got {name!r}"
        ) from None
    return device


def _same_run(config: Config, saved: Config) -> None:
    for name in Config.__dataclass_fields__:
        # The corpus is compared by its text.
        if name in ("corpus", "steps", "device", "eval_every", "eval_windows"):
            continue
        expected, found = getattr(config, name), getattr(saved, name)
        if expected != found:
            raise CheckpointError(
                f"the checkpoint is of another run: expected {name} {expected!r}, "
                f"got {found!r}"
            )
