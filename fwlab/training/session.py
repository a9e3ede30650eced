"""A training run in a folder, with progress on the terminal."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from tqdm import tqdm

from fwlab.files import check_writable, write_json
from fwlab.provenance import provenance
from fwlab.training.checkpoint import load
from fwlab.training.config import Config
from fwlab.training.loop import Progress, Trainer
from fwlab.training.memory import PeakMemory

CHECKPOINT, RESULT = "checkpoint.safetensors", "result.json"


def run_in(folder: Path, config: Config, resume: bool, command: str) -> None:
    """Train with checkpoints and a result in a folder.

    - `folder`: for `checkpoint.safetensors` and `result.json`.
    - `config`: the run.
    - `resume`: continue from the checkpoint in the folder.
    - `command`: what the result says of how it was made.
    - Raises `KeyboardInterrupt` after Ctrl-C; the checkpoint then has all
      steps so far.
    - Raises `FloatingPointError` if training diverges, and what `Trainer`
      raises.
    """
    path = folder / CHECKPOINT
    trainer = Trainer(config, resume=load(path) if resume else None)
    if trainer.step > config.steps:
        raise ValueError(
            f"expected steps to be at least {trainer.step}, which {path} already "
            f"has, got {config.steps}"
        )
    with _no_empty_folders(folder):
        _run_in(folder, trainer, command)


def _run_in(folder: Path, trainer: Trainer, command: str) -> None:
    path, found, config = folder / CHECKPOINT, folder / RESULT, trainer.config
    check_writable(folder)
    _say(
        f"{config.mixer}: {trainer.model.num_parameters():,} parameters, "
        f"{len(trainer.train_tokens):,} training characters, on {trainer.device}"
    )
    if trainer.step == config.steps and found.exists():
        _say(f"nothing to do: {path} already has {trainer.step} steps of training")
        return
    try:
        spent = _train(trainer, path)
    except FloatingPointError as error:
        kept = f"{path} has an earlier state" if path.exists() else "no checkpoint yet"
        raise FloatingPointError(f"{error} ({kept})") from None
    # A run that was interrupted at its last step has not been validated there.
    validated = [loss for step, _, loss in trainer.curve if step == trainer.step]
    validation_loss = validated[-1] if validated else round(trainer.evaluate(), 4)
    result = {
        "config": asdict(config),
        "corpus_sha256": trainer.corpus_sha256,
        "parameters": trainer.model.num_parameters(),
        "state_size": trainer.model.state_size(config.block),
        "columns": ["step", "training loss", "validation loss"],
        "curve": trainer.curve,
        "validation_loss": validation_loss,
        **spent,
        "sample": trainer.sample(length=300),
        **provenance(command),
    }
    write_json(found, result)
    _say(f"\n{result['sample']}\n")
    _say(
        f"validation loss {validation_loss:.4f} nats per character after "
        f"{trainer.step} steps, {spent['seconds']:.0f} s of training\n{path}"
    )


def _train(trainer: Trainer, path: Path) -> dict[str, Any]:
    """Train to the end; returns what it took."""
    c, started, seconds = trainer.config, trainer.step, 0.0
    memory, peak = PeakMemory(), None
    with (
        _interrupts() as interrupted,
        tqdm(
            total=c.steps,
            initial=started,
            unit="step",
            dynamic_ncols=True,
            # A file gets lines, but no bar; without stderr there is neither.
            disable=sys.stderr is None or not sys.stderr.isatty(),
        ) as bar,
    ):
        for progress in trainer.run():
            seconds = progress.seconds
            # Validation has larger batches: measure before the first one.
            if peak is None or not trainer.curve:
                peak = memory.mib()
            speed = (trainer.step - started) * c.batch * c.block / seconds
            bar.set_postfix_str(_status(trainer, progress, speed), refresh=False)
            bar.update()
            if progress.val_loss is not None or interrupted:
                trainer.save(path)
                # A result of an earlier run does not belong to this checkpoint.
                (path.parent / RESULT).unlink(missing_ok=True)
            if progress.val_loss is not None:
                bar.clear()
                line = " ".join(trainer.sample(length=72).split())
                _say(
                    f"step {progress.step}: validation loss {progress.val_loss:.4f}"
                    f", {speed:,.0f} characters/s | {line}"
                )
            if interrupted and trainer.step < c.steps:
                raise KeyboardInterrupt(
                    f"stopped after step {trainer.step}, saved in {path}; the same "
                    "command with --resume continues"
                )
    characters = (trainer.step - started) * c.batch * c.block
    return {
        "first_step": started,
        "seconds": round(seconds, 1),
        "characters_per_second": round(characters / seconds) if seconds else None,
        "peak_mib": peak,
    }


def _say(text: str) -> None:
    """Print; training continues if nobody reads it any longer."""
    try:
        print(text, flush=True)
    except OSError:
        silence(sys.stdout)


def silence(stream: TextIO) -> None:
    """Send what is left to write, and all that follows, to nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def _status(trainer: Trainer, progress: Progress, speed: float) -> str:
    rate = trainer.config.lr_at(trainer.step - 1)
    return f"loss {progress.loss:.3f}, lr {rate:.2g}, {speed:,.0f} characters/s"


@contextmanager
def _no_empty_folders(folder: Path) -> Iterator[None]:
    """After an error, remove the folders that were made and are empty."""
    made = [each for each in (folder, *folder.parents) if not each.exists()]
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            for each in made:
                each.rmdir()
        raise


@contextmanager
def _interrupts() -> Iterator[list[int]]:
    """Yield a list that Ctrl-C fills, so that no step is cut in two.

    A second Ctrl-C stops at once. Nothing changes outside the main thread,
    where Python has no signals, and for a process that ignores them, as
    one in the background of a shell may do.
    """
    seen: list[int] = []

    def note(number: int, frame: Any) -> None:
        seen.append(number)
        if len(seen) > 1:
            raise KeyboardInterrupt("stopped; checkpoints that were written are kept")

    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    ):
        yield seen
        return
    before = signal.signal(signal.SIGINT, note)
    try:
        yield seen
    finally:
        signal.signal(signal.SIGINT, before)
