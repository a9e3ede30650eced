"""The training loop of a language model."""

import copy
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fwlab.models import LanguageModel
from fwlab.ops import detach
from fwlab.training import checkpoint as checkpoints
from fwlab.training import devices
from fwlab.training.batches import Batch, batch
from fwlab.training.carried import gathered, restored
from fwlab.training.checkpoint import Checkpoint, CheckpointError
from fwlab.training.config import Config
from fwlab.training.texts import run_text
from fwlab.training.validation import Validation


class Progress(NamedTuple):
    """The result of one optimiser step.

    - `step`: optimiser steps so far, including this one.
    - `loss`: training loss of its batch, nats per token.
    - `val_loss`: validation loss after it, if it was measured.
    - `seconds`: time spent training so far, validation not counted.
    - `tokens`: tokens read in training so far, by all processes. Both
      count from the start or the last resume.
    """

    step: int
    loss: float
    val_loss: float | None
    seconds: float
    tokens: int


class Trainer:
    """A model, its data and its optimiser.

    - `config`: the run.
    - `text`: train on this instead of `config.corpus`.
    - `resume`: continue from this checkpoint, which must be of the same
      run.
    - `options`: more arguments of Accelerate's `Accelerator`.
    - Raises `ValueError`, `CorpusError` or `CheckpointError` for what
      does not fit, before any training.

    Started by `torchrun` or `accelerate launch`, all processes train one
    model: see `devices.py`. `main` is True in the one that prints and writes.

    ```python
    trainer = Trainer(Config(mixer="delta", steps=100))
    for progress in trainer.run():
        print(progress)
    ```
    """

    #: With `carry`: the number of pieces of the validation text that are read
    #: side by side.
    eval_rows = 1

    def __init__(
        self,
        config: Config,
        text: str | None = None,
        resume: Checkpoint | None = None,
        **options: Any,
    ):
        self.config = config
        with torch.device("meta"):
            small = self._new_model(2)  # invalid sizes raise here
        _check_mixer(config, small)
        self.accelerator = devices.accelerator(config, small, **options)
        self.main = self.accelerator.is_main_process
        parts = self.accelerator.num_processes * config.accumulate
        if config.batch % parts:
            raise ValueError(
                f"expected batch to be a multiple of {parts} (processes times "
                f"accumulate), got {config.batch}"
            )
        if resume and (other := checkpoints.difference(config, resume.config)):
            raise CheckpointError(f"the checkpoint is of another run: {other}")
        # On each machine, the first process writes the tokens of a large text.
        with self.accelerator.local_main_process_first():
            #: The text; `corpus_sha256` identifies it in results.
            self.text = run_text(config, text, resume.vocabulary if resume else None)
        self.vocabulary, self.corpus_sha256 = self.text.vocabulary, self.text.sha256
        self.train_tokens = self.text.train.tokens
        self.val_tokens = self.text.valid.tokens
        #: `[step, training loss, validation loss]` of every validation.
        self.curve: list[list[float]] = []
        self.step = 0
        if resume is None:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(config.seed)
                self.model = self._new_model(len(self.vocabulary))
            if config.start is not None:
                self._start_from(checkpoints.load(config.start))
        else:
            if resume.corpus_sha256 != self.corpus_sha256:
                raise CheckpointError(
                    "the checkpoint was trained on another text: expected SHA-256 "
                    f"{resume.corpus_sha256[:12]}…, got {self.corpus_sha256[:12]}…"
                )
            self.model, self.step = copy.deepcopy(resume.model), resume.step
            self.curve = [list(row) for row in resume.curve]
        self._prepare(resume.adam if resume else {})
        self.validation = Validation(
            self._loss,
            self.text.valid,
            len(self.vocabulary),
            config,
            self.accelerator,
            self.device,
            self.eval_rows,
        )
        #: With `carry`: what the next windows begin with, one state for each
        #: part of a batch.
        self.states: list[Any] = [None] * config.accumulate
        if resume is not None:
            self._go_on_from(resume)

    def _go_on_from(self, resume: Checkpoint) -> None:
        """Restore the loss scaler and the carried state."""
        if resume.scaler and (scaler := self.accelerator.scaler) is not None:
            scaler.load_state_dict(scaler.state_dict() | resume.scaler)
        if resume.state:
            inputs = self._batch().inputs[:, :1]
            with torch.no_grad():  # only for the form of a state
                _, example = self._loss(inputs, inputs, carry=True)
            self.states = restored(
                resume.state, example, self.config, self.accelerator, self.device
            )

    def _start_from(self, trained: Checkpoint) -> None:
        if trained.vocabulary.vocabulary != self.vocabulary.vocabulary:
            raise CheckpointError(
                f"expected {self.config.start} to have the same {self.config.tokens} "
                "as the text: it was trained on another one"
            )
        self.model.start_from(trained.model)

    def _prepare(self, adam: dict[str, dict[str, Tensor]]) -> None:
        """Move the model to its devices, and make the optimiser."""
        several = self.accelerator.num_processes > 1
        self.device = (
            self.accelerator.device if several else devices.device(self.config.device)
        )
        self.model.checkpointing = self.config.checkpointing
        self.model.to(self.device)
        loss, self.optimizer = self.accelerator.prepare(
            devices.Loss(self.model),
            self._new_optimizer(),
            device_placement=[False, False],
        )
        self._loss = loss
        #: Whether each process has a part of the weights only.
        self.divided = any(hasattr(p, "full_tensor") for p in self.model.parameters())
        if self.divided and self.config.carry:
            from torch.distributed.fsdp import register_fsdp_forward_method

            for block in self.model.blocks:
                register_fsdp_forward_method(block, "prefill")
        named = dict(self.model.named_parameters())
        for name, state in adam.items():
            self.optimizer.state[named[name]] = {
                key: devices.divided(part.clone(), named[name])
                for key, part in state.items()
            }

    def run(self) -> Iterator[Progress]:
        """Train up to `config.steps`, one optimiser step per item.

        Validation runs every `eval_every` steps on `eval_windows`
        windows, and after the last step on all of them.

        - Returns an iterator of `Progress`; each item trains one step.
        - Raises `FloatingPointError` if the loss or a gradient is not finite;
          it names the first layer whose output is not.
        """
        c, seconds, tokens = self.config, 0.0, 0
        while self.step < c.steps:
            start = time.perf_counter()
            tokens += c.batch * c.block_at(self.step)
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
                    raise FloatingPointError(self._diverged("validation loss"))
                self.curve.append([self.step, round(loss, 4), round(val_loss, 4)])
            yield Progress(self.step, loss, val_loss, seconds, tokens)

    def _train_step(self) -> float:
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.lr_at(self.step)
        self._loss.train()
        self.optimizer.zero_grad(set_to_none=True)
        with self._seeded():
            loss = self._backward()
        norm = self.accelerator.clip_grad_norm_(
            self._loss.parameters(), self.config.clip
        )
        # Too large a gradient in float16 is skipped, and the next one is scaled
        # less.
        finite = torch.isfinite(loss if self.accelerator.scaler else norm + loss)
        if not finite:
            what = "gradient" if torch.isfinite(loss) else "loss"
            raise FloatingPointError(self._diverged(what, self.step + 1))
        self.optimizer.step()
        return loss.item()

    def _backward(self) -> Tensor:
        """The loss of a batch over all processes, and its gradients."""
        parts, total = self.config.accumulate, torch.zeros((), device=self.device)
        for part in range(parts):
            inputs, targets, cu_seqlens, begins = self._batch(part)
            state = None if begins else self.states[part]
            last = part == parts - 1
            with nullcontext() if last else self.accelerator.no_sync(self._loss):
                loss, state = self._loss(
                    inputs, targets, state, self.config.carry, cu_seqlens
                )
                self.accelerator.backward(loss / parts)
            total += loss.detach() / parts
            self.states[part] = detach(state)
        if self.accelerator.num_processes > 1:
            total = self.accelerator.reduce(total, "mean")
        return total

    @contextmanager
    def _seeded(self) -> Iterator[None]:
        """Draw the same dropout when a step is trained again after a stop."""
        c, rank = self.config, self.accelerator.process_index
        if not (c.dropout or c.attention_dropout):
            yield
            return
        gpus = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices=gpus):
            torch.manual_seed(c.seed + 1_000_003 * self.step + 7919 * (rank + 1))
            yield

    def _diverged(self, what: str, step: int | None = None) -> str:
        inputs, targets, cu_seqlens, _ = self._batch()
        first = _first_not_finite(
            self.model, lambda: self._loss(inputs, targets, cu_seqlens=cu_seqlens)
        )
        step = self.step if step is None else step
        return f"training diverged: the {what} of step {step} is not finite{first}"

    def _new_model(self, vocab_size: int) -> LanguageModel:
        return checkpoints.new_model(self.config, vocab_size)

    def _batch(self, part: int = 0) -> Batch:
        """The next part of a batch of which this process reads a share."""
        parts = self.config.accumulate
        return batch(
            self.text.train,
            self.config,
            self.step,
            self.accelerator.process_index * parts + part,
            self.accelerator.num_processes * parts,
        ).to(self.device)

    def evaluate(self, windows: int | None = None) -> float:
        """Validation loss in nats per token.

        - `windows`: number of windows of `block` tokens, spread evenly over
          the validation text, or from its beginning with `carry` and
          `pack`; None = all of them, without overlap.
        - Returns the mean over these windows.
        """
        return self.validation.measure(windows)

    def sample(
        self, prompt: str | None = None, length: int = 200, temperature: float = 0.8
    ) -> str:
        """Continue a prompt, with the seed of the configuration.

        - `prompt`: the text to continue, at least one token; None = a line
          break, or the first character of the vocabulary.
        - `length`: number of tokens to add, 0 or more.
        - `temperature`: divides the logits; 0 takes the most likely token.
        - Returns the new text, without the prompt.
        - Raises `ValueError` for tokens that are not in the vocabulary, and
          for an argument out of range.
        """
        known = self.vocabulary.encode(
            self.vocabulary.start if prompt is None else prompt
        )
        model = self.trained().eval()
        tokens = model.generate(
            known[None].to(next(model.parameters()).device),
            length,
            temperature=temperature,
            seed=self.config.seed,
        )
        return self.vocabulary.decode(tokens[0, len(known) :])

    def trained(self) -> LanguageModel:
        """The model with all its weights; all processes must call this.

        - Returns `model`, or a copy of it on the CPU if the weights are
          divided among the processes.
        """
        if not self.divided:
            return self.model
        model = self._new_model(len(self.vocabulary))
        weights = {n: devices.whole(x) for n, x in self.model.state_dict().items()}
        model.load_state_dict(weights)
        return model

    def save(self, *paths: str | Path) -> None:
        """Write a checkpoint for `generate` and `resume`.

        All processes must call this; one of them writes.

        - `paths`: paths of the files; existing files are replaced.
        - Raises `CheckpointError` if a file cannot be written, and
          `FloatingPointError` for weights that are not finite.
        """
        model = self.trained()
        if not all(torch.isfinite(p).all() for p in model.parameters()):
            raise FloatingPointError(self._diverged("result"))
        adam = {
            name: {k: devices.whole(x) for k, x in self.optimizer.state[p].items()}
            for name, p in self.model.named_parameters()
            if p in self.optimizer.state
        }
        scaler = self.accelerator.scaler.state_dict() if self.accelerator.scaler else {}
        saved = Checkpoint(
            model,
            self.vocabulary,
            self.config,
            self.step,
            adam,
            self.curve,
            self.corpus_sha256,
            gathered(self.states, self.accelerator) if self.config.carry else [],
            {name: x for name, x in scaler.items() if name in checkpoints.SCALER},
        )
        if self.main:
            for path in paths:
                checkpoints.save(path, saved)

    def _new_optimizer(self) -> torch.optim.Optimizer:
        c, parameters = self.config, [*self.model.parameters()]
        matrices = [p for p in parameters if p.dim() >= 2]
        groups = [
            {"params": matrices, "weight_decay": c.weight_decay},
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=c.lr, betas=(0.9, c.beta2))


def _check_mixer(config: Config, model: LanguageModel) -> None:
    """Raise `ValueError` for a mixer that cannot carry states or pack."""
    if (config.carry or config.pack) and model.max_len is not None:
        raise ValueError(
            "expected a mixer without a maximum length for carry and pack, got "
            f"{config.mixer!r}, which ends after {model.max_len} tokens"
        )
    if config.pack and not all(getattr(b, "packs", False) for b in model.blocks):
        raise ValueError(
            "expected a mixer that can keep packed documents apart, got "
            f"{config.mixer!r}"
        )


@torch.no_grad()
def _first_not_finite(model: torch.nn.Module, run: Callable[[], Any]) -> str:
    """Name the parameter or layer where it began; "" = unknown."""
    for name, p in model.named_parameters():
        if not torch.isfinite(p).all():
            return f"; the parameter {name} is not finite"
    layers: list[str] = []

    def note(name: str) -> Callable:
        def hook(module: torch.nn.Module, inputs: Any, output: Any) -> None:
            if isinstance(output, Tensor) and not torch.isfinite(output).all():
                layers.append(name)

        return hook

    # A layer ends after the layers inside it: the innermost comes first.
    hooks = [m.register_forward_hook(note(n)) for n, m in model.named_modules() if n]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return f"; the first output that is not: {layers[0]}" if layers else ""
