"""Train a language model.

`accelerate launch -m fwlab train ...` and `torchrun -m fwlab train ...` start several
processes. Each computes its share of every batch, and they add up their gradients.
"""

import copy
import math
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from fwlab.data.packing import NO_TARGET
from fwlab.models import LanguageModel
from fwlab.ops import detach
from fwlab.training import checkpoint as checkpoints
from fwlab.training.batches import Batch, all_batches, batch, run_text
from fwlab.training.checkpoint import Checkpoint, CheckpointError
from fwlab.training.config import FREE, Config


class Progress(NamedTuple):
    """Hold the losses, the time and the number of tokens after an optimiser step.

    - `step`: optimiser steps so far, including this one.
    - `loss`: training loss of its batch, nats per token.
    - `val_loss`: validation loss after it, if it was measured.
    - `seconds`: time spent training so far, validation not counted.
    - `tokens`: tokens read in training so far, by all processes. Both count from the
      start or the last resume.
    """

    step: int
    loss: float
    val_loss: float | None
    seconds: float
    tokens: int


class Loss(nn.Module):
    """Compute the loss of a model, as a module that can be compiled and distributed.

    Wrappers for several processes act on `forward`, so all is computed there.
    """

    def __init__(self, model: LanguageModel):
        super().__init__()
        self.model = model

    def forward(
        self,
        inputs: Tensor,
        targets: Tensor,
        state: Any = None,
        carry: bool = False,
        cu_seqlens: Tensor | None = None,
    ) -> Any:
        """Compute the mean loss in nats per token, and the state after the inputs.

        - `inputs`, `targets`: `int64 [batch, time]`; -100 = no target.
        - `state`: as in `LanguageModel.prefill`.
        - `carry`: return the state, too; None otherwise.
        - `cu_seqlens`: the borders of packed documents.
        - Returns `(loss, state)`; the loss is 0 if no token has a target.
        """
        if carry:
            logits, state = self.model.prefill(inputs, state)
        else:
            logits, state = self.model(inputs, cu_seqlens=cu_seqlens), None
        scores, targets = logits.flatten(0, 1), targets.flatten()
        # At the end of an epoch a packed row may have no target: the mean would be 0/0.
        total = nn.functional.cross_entropy(scores, targets, reduction="sum")
        return total / (targets != NO_TARGET).sum().clamp(min=1), state


class Trainer:
    """Train a language model; hold its data and optimiser.

    - `config`: the run.
    - `text`: train on this instead of `config.corpus`.
    - `resume`: continue from this checkpoint, which must be of the same run.
    - `options`: more arguments of Accelerate's `Accelerator`.
    - Raises `ValueError`, `CorpusError` or `CheckpointError` for what does not fit,
      before any training.

    Started by `torchrun` or `accelerate launch`, all processes train one model. `main`
    is True in the process that prints and writes.

    ```python
    trainer = Trainer(Config(mixer="delta", steps=100))
    for progress in trainer.run():
        print(progress)
    ```
    """

    #: Number of pieces of the validation text that are read in parallel with `carry`.
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
            model = self._new_model(2)  # Raise an error for invalid sizes.
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
        self.accelerator = new_accelerator(config, **options)
        self.main = self.accelerator.is_main_process
        kind = self.accelerator.distributed_type.value
        if kind in ("FSDP", "DEEPSPEED", "MEGATRON_LM"):
            raise ValueError(
                "expected a launcher that copies the model to each process, got one "
                f"that divides it ({kind}): checkpoints and samples need all weights"
            )
        parts = self.accelerator.num_processes * config.accumulate
        if config.batch % parts:
            raise ValueError(
                f"expected batch to be a multiple of {parts} (processes times "
                f"accumulate), got {config.batch}"
            )
        earlier = asdict(config if resume is None else resume.config)
        for name, expected in asdict(config).items():
            got = earlier[name]
            if name not in FREE and expected != got:
                raise CheckpointError(
                    f"the checkpoint is of another run: expected {name} {expected!r}, "
                    f"got {got!r}"
                )
        # On each machine, the first process writes the tokens of a large text.
        with self.accelerator.local_main_process_first():
            self.vocabulary, self.train_text, self.valid_text, self.corpus_sha256 = (
                run_text(config, text, resume.vocabulary if resume else None)
            )
        self.train_tokens = self.train_text.tokens
        self.val_tokens = self.valid_text.tokens
        #: `[step, training loss, validation loss]` of every validation.
        self.curve: list[list[float]] = []
        self.step = 0
        if resume is None:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(config.seed)
                self.model = self._new_model(len(self.vocabulary))
            if config.start is not None:
                trained = checkpoints.load(config.start)
                if trained.vocabulary.vocabulary != self.vocabulary.vocabulary:
                    raise CheckpointError(
                        f"expected {config.start} to have the same {config.tokens} as "
                        "the text: it was trained on another one"
                    )
                self.model.start_from(trained.model)
        else:
            if resume.corpus_sha256 != self.corpus_sha256:
                raise CheckpointError(
                    "the checkpoint was trained on another text: expected SHA-256 "
                    f"{resume.corpus_sha256[:12]}…, got {self.corpus_sha256[:12]}…"
                )
            self.model, self.step = copy.deepcopy(resume.model), resume.step
            self.curve = [list(row) for row in resume.curve]
        several = self.accelerator.num_processes > 1
        self.device = self.accelerator.device if several else device(config.device)
        self.model.checkpointing = config.checkpointing
        self.model.to(self.device)
        self.loss, self.optimizer = self.accelerator.prepare(
            Loss(self.model), self._new_optimizer(), device_placement=[False, False]
        )
        #: Initial states of the next windows with `carry`, one per part of a batch.
        self.states: list[Any] = [None] * config.accumulate
        if resume is not None:
            self._restore(resume)

    def run(self) -> Iterator[Progress]:
        """Train up to step `config.steps`, and yield a `Progress` per optimiser step.

        Validation runs every `eval_every` steps on `eval_windows` windows, and after
        the last step on all windows.

        - Returns an iterator of `Progress`; each item trains one step.
        - Raises `FloatingPointError` if the loss or a gradient is not finite; it names
          the first layer whose output is not.
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
                    raise FloatingPointError(
                        self._diverged("validation loss", self.step)
                    )
                self.curve.append([self.step, round(loss, 4), round(val_loss, 4)])
            yield Progress(self.step, loss, val_loss, seconds, tokens)

    def _train_step(self) -> float:
        c = self.config
        for group in self.optimizer.param_groups:
            group["lr"] = c.lr_at(self.step)
        self.loss.train()
        self.optimizer.zero_grad(set_to_none=True)
        draws = c.dropout > 0 or c.attention_dropout > 0
        gpus = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(gpus, enabled=draws):
            if draws:  # A resumed run repeats the same dropout.
                rank = self.accelerator.process_index
                torch.manual_seed(c.seed + 1_000_003 * self.step + 7919 * (rank + 1))
            loss = self._backward()
        norm = self.accelerator.clip_grad_norm_(self.loss.parameters(), c.clip)
        # Accelerate skips gradients that overflow float16, and lowers the loss scale.
        if not torch.isfinite(loss if self.accelerator.scaler else norm + loss):
            what = "gradient" if torch.isfinite(loss) else "loss"
            raise FloatingPointError(self._diverged(what, self.step + 1))
        self.optimizer.step()
        return loss.item()

    def _backward(self) -> Tensor:
        """Compute the gradients of a batch, and return the loss over all processes."""
        parts, total = self.config.accumulate, torch.zeros((), device=self.device)
        for part in range(parts):
            inputs, targets, cu_seqlens, begins = self._batch(part)
            state = None if begins else self.states[part]
            last = part == parts - 1
            with nullcontext() if last else self.accelerator.no_sync(self.loss):
                loss, state = self.loss(
                    inputs, targets, state, self.config.carry, cu_seqlens
                )
                self.accelerator.backward(loss / parts)
            total += loss.detach() / parts
            self.states[part] = detach(state)
        if self.accelerator.num_processes > 1:
            total = self.accelerator.reduce(total, "mean")
        return total

    def _batch(self, part: int = 0) -> Batch:
        """Return part `part` of this process's share of the batch, on the device."""
        parts = self.accelerator.num_processes * self.config.accumulate
        part += self.accelerator.process_index * self.config.accumulate
        return self._to_device(
            batch(self.train_text, self.config, self.step, part, parts)
        )

    def _to_device(self, batch: Batch) -> Batch:
        x, y, borders, begins = batch
        borders = None if borders is None else borders.to(self.device)
        return Batch(x.to(self.device), y.to(self.device), borders, begins)

    @torch.no_grad()
    def evaluate(self, windows: int | None = None, carry: bool | None = None) -> float:
        """Measure the validation loss, in nats per token.

        - `windows`: number of windows of `block` tokens, spread evenly over the
          validation text, or from its beginning with `carry` and `pack`; None = all of
          them, without overlap.
        - `carry`: read the text in order with carried state; default: as in the
          configuration.
        - Returns the mean over these windows.
        """
        c = self.config if carry is None else replace(self.config, carry=carry)
        rank, several = self.accelerator.process_index, self.accelerator.num_processes
        share = 1 if c.carry or c.pack else several
        total, count, state = 0.0, 0, None
        self.loss.eval()
        for each in all_batches(
            self.valid_text, c, len(self.vocabulary), windows, self.eval_rows
        ):
            x, y, borders, _ = self._to_device(each)
            known = int((y != NO_TARGET).sum())
            if share == 1:
                loss, state = self.loss(x, y, state, c.carry, borders)
            else:  # Every process must call `reduce`, even if it has no window.
                mine = slice(rank, None, share) if rank < len(x) else slice(1)
                weight = len(x[rank::share]) / len(x)
                part = self.loss(x[mine], y[mine])[0] * weight
                loss = self.accelerator.reduce(part, "sum")
            total, count = total + loss.item() * known, count + known
        return total / count

    def sample(
        self, prompt: str | None = None, length: int = 200, temperature: float = 0.8
    ) -> str:
        """Generate a continuation of a prompt, with the seed of the configuration.

        - `prompt`: the text to continue, at least one token; None = a line break, or
          the first character of the vocabulary.
        - `length`: number of tokens to add, 0 or more.
        - `temperature`: divides the logits; 0 takes the most likely token.
        - Returns the new text, without the prompt.
        - Raises `ValueError` for tokens that are not in the vocabulary, and for an
          argument out of range.
        """
        known = self.vocabulary.encode(
            self.vocabulary.start if prompt is None else prompt
        )
        tokens = self.model.eval().generate(
            known[None].to(self.device),
            length,
            temperature=temperature,
            seed=self.config.seed,
        )
        return self.vocabulary.decode(tokens[0, len(known) :])

    def save(self, *paths: str | Path) -> None:
        """Write a checkpoint that `generate` and `resume` can load.

        All processes must call this; one of them writes.

        - `paths`: paths of the files; existing files are replaced.
        - Raises `CheckpointError` if a file cannot be written, and `FloatingPointError`
          for weights that are not finite.
        """
        if not all(torch.isfinite(p).all() for p in self.model.parameters()):
            raise FloatingPointError(self._diverged("result", self.step))
        adam = {
            name: self.optimizer.state[p]
            for name, p in self.model.named_parameters()
            if p in self.optimizer.state
        }
        saved = Checkpoint(
            self.model,
            self.vocabulary,
            self.config,
            self.step,
            adam,
            self.curve,
            self.corpus_sha256,
            self._gather_states() if self.config.carry else [],
        )
        if self.main:
            for path in paths:
                checkpoints.save(path, saved)

    def _gather_states(self) -> list[Tensor]:
        """Return the tensors of the carried states, with the rows of all processes."""
        tensors = []
        for parts in zip(*map(tree_leaves, self.states), strict=True):
            if isinstance(parts[0], Tensor):
                rows = torch.cat(parts).contiguous()
                several = self.accelerator.num_processes > 1
                tensors.append(self.accelerator.gather(rows) if several else rows)
            elif parts[0] is not None:
                tensors.append(torch.tensor(parts[0]))
        return tensors

    def _restore(self, saved: Checkpoint) -> None:
        """Restore the optimiser's state and the carried states from a checkpoint."""
        named = dict(self.model.named_parameters())
        for name, adam in saved.adam.items():
            self.optimizer.state[named[name]] = {
                # PyTorch keeps the number of steps on the CPU.
                key: part.to(self.device if part.dim() else "cpu", copy=True)
                for key, part in adam.items()
            }
        if not saved.state:
            return
        inputs = self._batch().inputs[:, :1]
        with torch.no_grad():  # Only the structure of the state is needed.
            leaves, form = tree_flatten(self.loss(inputs, inputs, carry=True)[1])
        if len(saved.state) != sum(x is not None for x in leaves):
            raise CheckpointError(
                f"expected a carried state of {len(leaves)} parts in the checkpoint, "
                f"got {len(saved.state)}"
            )
        for part in range(len(self.states)):
            at = self.accelerator.process_index * len(self.states) + part
            tensors, filled = iter(saved.state), []
            for old in leaves:
                new: Any = old if old is None else next(tensors)
                if isinstance(old, Tensor):
                    new = new[at * len(inputs) : (at + 1) * len(inputs)].to(self.device)
                filled.append(int(new) if isinstance(old, int) else new)
            self.states[part] = tree_unflatten(filled, form)

    def _new_model(self, vocab_size: int) -> LanguageModel:
        return checkpoints.new_model(self.config, vocab_size)

    def _new_optimizer(self) -> torch.optim.Optimizer:
        c, parameters = self.config, [*self.model.parameters()]
        matrices = [p for p in parameters if p.dim() >= 2]
        groups = [
            {"params": matrices, "weight_decay": c.weight_decay},
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=c.lr, betas=(0.9, c.beta2))

    @torch.no_grad()
    def _diverged(self, what: str, step: int) -> str:
        """Return an error message with the first module whose output is not finite."""
        names, found = {m: n for n, m in self.model.named_modules()}, []

        def note(module: nn.Module, inputs: Any, output: Any) -> None:
            if isinstance(output, Tensor) and not torch.isfinite(output).all():
                found.append(names.get(module, "the loss"))

        # Hooks of inner modules run first, so the innermost module comes first.
        hook = nn.modules.module.register_module_forward_hook(note)
        try:
            inputs, targets, cu_seqlens, _ = self._batch()
            self.loss(inputs, targets, cu_seqlens=cu_seqlens)
        finally:
            hook.remove()
        where = f"; the first output that is not: {found[0]}" if found else ""
        return f"training diverged: the {what} of step {step} is not finite{where}"


def device(name: str) -> torch.device:
    """Return the device of a configuration, or raise `ValueError` if unavailable."""
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        chosen = torch.device(name)
        torch.zeros(1, device=chosen).item()  # Reject "meta".
    except (RuntimeError, AssertionError):
        raise ValueError(
            "expected device to be auto, cpu, cuda or mps, and available here, "
            f"got {name!r}"
        ) from None
    return chosen


def new_accelerator(config: Config, **options: Any) -> Accelerator:
    """Create the Accelerate `Accelerator` of a run.

    Settings that it does not contain come from `accelerate config` and its launcher.

    - `options`: more arguments of `Accelerator`.
    - Raises `ValueError` for settings that this machine does not support.
    """
    cpu = device(config.device).type == "cpu"
    compilers = (os.environ.get("CXX"), "g++", "clang++", "c++")
    if config.compile and cpu and not any(c and shutil.which(c) for c in compilers):
        raise ValueError(
            "expected a C++ compiler for compile on a CPU (g++ or clang++), found none"
        )
    # Accelerate has one state per process, and a process may train several models.
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    AcceleratorState._reset_state(reset_partial_state=not several)
    backend = os.environ.get("ACCELERATE_DYNAMO_BACKEND", "inductor")
    return Accelerator(
        cpu=cpu,
        mixed_precision="bf16" if config.precision == "bf16" else None,
        dynamo_backend=backend if config.compile else None,
        step_scheduler_with_optimizer=False,
        **options,
    )
