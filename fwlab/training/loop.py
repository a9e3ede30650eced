"""The training loop of a language model."""

import copy
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from fwlab.data import packed, packed_rows
from fwlab.data.packing import NO_TARGET
from fwlab.models import LanguageModel
from fwlab.ops import detach
from fwlab.training import checkpoint as checkpoints
from fwlab.training import engine
from fwlab.training.batches import Batch, batch, in_rows
from fwlab.training.checkpoint import Checkpoint, CheckpointError
from fwlab.training.config import Config
from fwlab.training.texts import run_text

#: Logits at most in validation: 1 GiB, as one for each word takes much memory.
LOGITS = 2**28


class Progress(NamedTuple):
    """The result of one optimiser step.

    - `step`: optimiser steps so far, including this one.
    - `loss`: training loss of its batch, nats per token.
    - `val_loss`: validation loss after it, if it was measured.
    - `seconds`: time spent training so far, validation not counted.
    - `characters`: tokens read in training so far, by all processes. Both
      count from the start or the last resume.
    """

    step: int
    loss: float
    val_loss: float | None
    seconds: float
    characters: int


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
    model: see `engine.py`. `main` is True in the one that prints and writes.

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
        if (config.carry or config.pack) and small.max_len is not None:
            raise ValueError(
                "expected a mixer without a maximum length for carry and pack, got "
                f"{config.mixer!r}, which ends after {small.max_len} tokens"
            )
        if config.pack and not all(getattr(b, "packs", False) for b in small.blocks):
            raise ValueError(
                "expected a mixer that can keep packed documents apart, got "
                f"{config.mixer!r}"
            )
        self.engine = engine.accelerator(config, small, **options)
        self.main = self.engine.is_main_process
        parts = self.engine.num_processes * config.accumulate
        if config.batch % parts:
            raise ValueError(
                f"expected batch to be a multiple of {parts} (processes times "
                f"accumulate), got {config.batch}"
            )
        if resume and (found := checkpoints.difference(config, resume.config)):
            raise CheckpointError(f"the checkpoint is of another run: {found}")
        known = resume.characters if resume else None
        # On each machine, the first process writes the tokens of a large text.
        with self.engine.local_main_process_first():
            #: The text; `corpus_sha256` identifies it in results.
            self.text = run_text(config, text, known)
        #: The vocabulary, of characters or words.
        self.characters, self.corpus_sha256 = self.text.vocabulary, self.text.sha256
        self.train_tokens = self.text.train.tokens
        self.val_tokens = self.text.valid.tokens
        logits = len(self.characters) * config.block
        #: Windows that are validated at once.
        self.eval_batch = max(1, min(128, LOGITS // logits))
        #: `[step, training loss, validation loss]` of every validation.
        self.curve: list[list[float]] = []
        if resume is None:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(config.seed)
                self.model = self._new_model(len(self.characters))
            if config.start is not None:
                self._start_from(checkpoints.load(config.start))
            self.step = 0
        else:
            if resume.corpus_sha256 != self.corpus_sha256:
                raise CheckpointError(
                    "the checkpoint was trained on another text: expected SHA-256 "
                    f"{resume.corpus_sha256[:12]}…, got {self.corpus_sha256[:12]}…"
                )
            self.model, self.step = copy.deepcopy(resume.model), resume.step
            self.curve = [list(row) for row in resume.curve]
        self._prepare(resume.adam if resume else {})
        scaler = self.engine.scaler
        if resume is not None and resume.scaler and scaler is not None:
            scaler.load_state_dict(scaler.state_dict() | resume.scaler)
        #: With `carry`: what the next windows begin with, one state for each
        #: part of a batch.
        self.states: list[Any] = [None] * config.accumulate
        if resume is not None and resume.state:
            self.states = self._restored(resume.state)

    def _start_from(self, trained: Checkpoint) -> None:
        if trained.characters.vocabulary != self.characters.vocabulary:
            raise CheckpointError(
                f"expected {self.config.start} to have the same {self.config.tokens} "
                "as the text: it was trained on another one"
            )
        self.model.start_from(trained.model)

    def _prepare(self, adam: dict[str, dict[str, Tensor]]) -> None:
        """Move the model to its devices, and make the optimiser."""
        several = self.engine.num_processes > 1
        self.device = (
            self.engine.device if several else engine.device(self.config.device)
        )
        self.model.checkpointing = self.config.checkpointing
        self.model.to(self.device)
        loss, self.optimizer = self.engine.prepare(
            engine.Loss(self.model),
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
                key: engine.divided(part.clone(), named[name])
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
        c, seconds, characters = self.config, 0.0, 0
        while self.step < c.steps:
            start = time.perf_counter()
            characters += c.batch * c.block_at(self.step)
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
            yield Progress(self.step, loss, val_loss, seconds, characters)

    def _train_step(self) -> float:
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.lr_at(self.step)
        self._loss.train()
        self.optimizer.zero_grad(set_to_none=True)
        with self._seeded():
            loss = self._backward()
        norm = self.engine.clip_grad_norm_(self._loss.parameters(), self.config.clip)
        # Too large a gradient in float16 is skipped, and the next one is scaled
        # less.
        finite = torch.isfinite(loss if self.engine.scaler else norm + loss)
        if not finite:
            what = "gradient" if torch.isfinite(loss) else "loss"
            raise FloatingPointError(self._diverged(what, self.step + 1))
        self.optimizer.step()
        return loss.item()

    def _backward(self) -> Tensor:
        """The loss of a batch over all processes, and its gradients."""
        parts, total = self.config.accumulate, torch.zeros((), device=self.device)
        for part in range(parts):
            given = self._batch(part)
            state = None if given.begins else self.states[part]
            last = part == parts - 1
            with nullcontext() if last else self.engine.no_sync(self._loss):
                loss, state = self._loss(
                    given.inputs,
                    given.targets,
                    state,
                    self.config.carry,
                    given.cu_seqlens,
                )
                self.engine.backward(loss / parts)
            total += loss.detach() / parts
            self.states[part] = detach(state)
        if self.engine.num_processes > 1:
            total = self.engine.reduce(total, "mean")
        return total

    @contextmanager
    def _seeded(self) -> Iterator[None]:
        """Draw the same dropout when a step is trained again after a stop."""
        c, rank = self.config, self.engine.process_index
        if not (c.dropout or c.attention_dropout):
            yield
            return
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(c.seed + 1_000_003 * self.step + 7919 * (rank + 1))
            yield

    def _diverged(self, what: str, step: int | None = None) -> str:
        given = self._batch()
        found = _first_not_finite(
            self.model,
            lambda: self._loss(
                given.inputs, given.targets, cu_seqlens=given.cu_seqlens
            ),
        )
        step = self.step if step is None else step
        return f"training diverged: the {what} of step {step} is not finite{found}"

    def _new_model(self, vocab_size: int) -> LanguageModel:
        return checkpoints.new_model(self.config, vocab_size)

    def _batch(self, part: int = 0) -> Batch:
        """What this process reads next, in as many parts as it accumulates."""
        parts = self.config.accumulate
        given = batch(
            self.text.train,
            self.config,
            self.step,
            self.engine.process_index * parts + part,
            self.engine.num_processes * parts,
        )
        inputs, targets, cu_seqlens, begins = given
        if cu_seqlens is not None:
            cu_seqlens = cu_seqlens.to(self.device)
        return Batch(
            inputs.to(self.device), targets.to(self.device), cu_seqlens, begins
        )

    def any(self, flag: bool) -> bool:
        """Ask all processes.

        - `flag`: of this process.
        - Returns whether it is True in one of them. All must call this.
        """
        if self.engine.num_processes == 1:
            return flag
        return bool(self.engine.reduce(torch.tensor(flag, device=self.device).int()))

    @torch.no_grad()
    def evaluate(self, windows: int | None = None) -> float:
        """Validation loss in nats per token.

        - `windows`: number of windows of `block` tokens, spread evenly over
          the validation text, or from its beginning with `carry` and
          `pack`; None = all of them, without overlap.
        - Returns the mean over these windows.
        """
        if self.config.carry:
            return self._evaluate_in_order(windows)
        if self.config.pack:
            return self._evaluate_packed(windows)
        return self._evaluate_windows(windows)

    @torch.no_grad()
    def _evaluate_windows(self, windows: int | None = None) -> float:
        self._loss.eval()
        block = self.config.block
        count = (len(self.val_tokens) - 1) // block
        if windows is not None and windows < count:
            starts = torch.linspace(0, count - 1, windows).long() * block
        else:
            starts = torch.arange(count) * block
        total = torch.zeros((), dtype=torch.float64)
        for part in starts.split(self.eval_batch):
            cut = self.val_tokens[part[:, None] + torch.arange(block + 1)].long()
            total += self._mean(cut.to(self.device)) * len(part)
        return total.item() / len(starts)

    def _mean(self, windows: Tensor) -> float:
        """The mean loss of windows, of which each process computes a share."""
        count, rank = self.engine.num_processes, self.engine.process_index
        if count == 1:
            return self._loss(windows[:, :-1], windows[:, 1:])[0].item()
        # All take part, also those that nothing is left for.
        share = windows[rank::count]
        weight, share = len(share), share if len(share) else windows[:1]
        loss = self._loss(share[:, :-1], share[:, 1:])[0] * weight
        return self.engine.reduce(loss, "sum").item() / len(windows)

    def _evaluate_packed(self, windows: int | None) -> float:
        self._loss.eval()
        length = self.eval_batch * self.config.block
        rows = packed_rows(self.text.valid.borders, length)
        if windows is not None:
            rows = min(rows, -(-windows // self.eval_batch))
        total, count = 0.0, 0
        for row in range(rows):
            inputs, targets, cu_seqlens = (
                x.to(self.device) for x in packed(*self.text.valid, length, row)
            )
            known = int((targets != NO_TARGET).sum())
            loss = self._loss(inputs, targets, cu_seqlens=cu_seqlens)[0]
            total += loss.item() * known
            count += known
        return total / count

    def _evaluate_in_order(self, windows: int | None) -> float:
        length = len(self.val_tokens) // self.eval_rows
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
        """Read the validation text in parts, with carried state.

        - `ends`: where each part ends, in tokens, increasing.
        - Returns an iterator of `(end, loss of the part, state after it)`.
        """
        self._loss.eval()
        tokens = in_rows(self.val_tokens, self.eval_rows).long().to(self.device)
        state = None
        for start, end in pairwise([0, *ends]):
            part = tokens[:, start : end + 1]
            loss, state = self._loss(part[:, :-1], part[:, 1:], state, carry=True)
            yield end, loss.item(), state

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
        model = self.trained().eval()
        tokens = model.generate(
            known[None].to(next(model.parameters()).device),
            length,
            temperature=temperature,
            seed=self.config.seed,
        )
        return self.characters.decode(tokens[0, len(known) :])

    def trained(self) -> LanguageModel:
        """The model with all its weights; all processes must call this.

        - Returns `model`, or a copy of it on the CPU if the weights are
          divided among the processes.
        """
        if not self.divided:
            return self.model
        model = self._new_model(len(self.characters))
        weights = {n: engine.whole(x) for n, x in self.model.state_dict().items()}
        model.load_state_dict(weights)
        return model

    def save(self, *paths: str | Path) -> None:
        """Write a checkpoint for `generate` and `resume`.

        All processes must call this; one of them writes.

        - `paths`: of the files; existing files are replaced.
        - Raises `CheckpointError` if a file cannot be written, and
          `FloatingPointError` for weights that are not finite.
        """
        model = self.trained()
        if not all(torch.isfinite(p).all() for p in model.parameters()):
            raise FloatingPointError(self._diverged("result"))
        adam = {
            name: {k: engine.whole(x) for k, x in self.optimizer.state[p].items()}
            for name, p in self.model.named_parameters()
            if p in self.optimizer.state
        }
        scaler = self.engine.scaler.state_dict() if self.engine.scaler else {}
        saved = Checkpoint(
            model,
            self.characters,
            self.config,
            self.step,
            adam,
            self.curve,
            self.corpus_sha256,
            self._gathered(),
            {name: x for name, x in scaler.items() if name in checkpoints.SCALER},
        )
        if self.main:
            for path in paths:
                checkpoints.save(path, saved)

    def _gathered(self) -> list[Tensor]:
        """The parts of the carried state, with the rows of all processes."""
        if not self.config.carry or self.states[0] is None:
            return []
        found = []
        for parts in zip(*map(tree_leaves, self.states), strict=True):
            if isinstance(parts[0], Tensor):
                part = torch.cat(parts).contiguous()
                if self.engine.num_processes > 1:
                    part = self.engine.gather(part)
                found.append(part)
            elif parts[0] is not None:
                found.append(torch.tensor(parts[0]))
        return found

    def _restored(self, saved: Sequence[Tensor]) -> list[Any]:
        """The inverse of `_gathered`."""
        inputs = self._batch().inputs[:, :1]
        with torch.no_grad():  # only for the form of a state
            _, example = self._loss(inputs, inputs, carry=True)
        leaves, form = tree_flatten(example)
        if len(saved) != sum(x is not None for x in leaves):
            raise CheckpointError(
                f"expected a carried state of {len(leaves)} parts in the checkpoint, "
                f"got {len(saved)}"
            )
        parts, first = self.config.accumulate, self.engine.process_index
        rows, states = self.config.batch // (parts * self.engine.num_processes), []
        for part in range(first * parts, (first + 1) * parts):
            given, found = iter(saved), []
            for old in leaves:
                new: Any = old if old is None else next(given)
                if isinstance(old, Tensor):
                    new = new[part * rows : (part + 1) * rows].to(self.device)
                found.append(int(new) if isinstance(old, int) else new)
            states.append(tree_unflatten(found, form))
        return states

    def _new_optimizer(self) -> torch.optim.Optimizer:
        c, named = self.config, [*self.model.parameters()]
        return torch.optim.AdamW(
            [
                {
                    "params": [p for p in named if p.dim() >= 2],
                    "weight_decay": c.weight_decay,
                },
                {"params": [p for p in named if p.dim() < 2], "weight_decay": 0.0},
            ],
            lr=c.lr,
            betas=(0.9, c.beta2),
        )


@torch.no_grad()
def _first_not_finite(model: torch.nn.Module, run: Callable[[], Any]) -> str:
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
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return f"; the first output that is not: {found[0]}" if found else ""
