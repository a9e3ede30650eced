"""Train in a folder, with progress on the terminal.

- `config.json`: the configuration, with versions and the SHA-256 of the text;
- `metrics.jsonl`: a line for every few steps, and for every validation;
- `last/`, `best/`: the latest checkpoint, and the one with the lowest validation loss;
- `result.json`: at the end.
"""

import contextlib
import json
import os
import platform
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from fwlab.files import check_writable, replacing, write_json
from fwlab.provenance import provenance
from fwlab.training.checkpoint import FILE, Checkpoint, CheckpointError, load
from fwlab.training.config import Config
from fwlab.training.loop import Trainer

CONFIG, METRICS, RESULT = "config.json", "metrics.jsonl", "result.json"
STOPS = (signal.SIGINT, signal.SIGTERM)


def run_in(
    folder: Path, config: Config, resume: bool, command: str, track: str | None = None
) -> Trainer:
    """Train a model, and write checkpoints, metrics and the result to a folder.

    - `folder`: folder of the run; no other process may train there.
    - `config`: the run.
    - `resume`: continue from the last checkpoint in the folder; without one the run
      begins, so a job that may be stopped at any time can have it from the start.
    - `command`: the command that the result names.
    - `track`: also send metrics to this tracker, "tensorboard" or "wandb".
    - Returns the trainer, at its end.
    - Raises `KeyboardInterrupt` after Ctrl-C or SIGTERM; the checkpoint then has all
      steps so far.
    - Raises `FloatingPointError` if training diverges, and what `Trainer` raises.
    """
    with locked(folder):
        last, best = (folder / name / FILE for name in ("last", "best"))
        resumed = _latest(last, best, resume)
        trainer = Trainer(config, None, resumed, log_with=track, project_dir=folder)
        if trainer.step > config.steps:
            raise ValueError(
                f"expected steps to be at least {trainer.step}, which {folder} already "
                f"has, got {config.steps}"
            )
        if track is not None and not trainer.accelerator.log_with:
            raise ValueError(f"expected {track} to be installed: pip install {track}")
        processes = trainer.accelerator.num_processes
        say(
            trainer,
            f"{config.mixer}: {trainer.model.num_parameters():,} parameters, "
            f"{len(trainer.train_tokens):,} training {config.tokens}, on "
            f"{trainer.device}" + (f", {processes} processes" if processes > 1 else ""),
        )
        if resumed is not None:
            say(trainer, _other_rates(config, resumed))
        if trainer.step == config.steps and (folder / RESULT).exists():
            say(trainer, f"nothing to do: {folder} already has {trainer.step} steps")
            return trainer
        about = {
            "config": asdict(config),
            "corpus_sha256": trainer.corpus_sha256,
            "parameters": trainer.model.num_parameters(),
            "state_size": trainer.model.state_size(config.block),
        }
        if trainer.main:
            # A result must always belong to the latest checkpoint.
            (folder / RESULT).unlink(missing_ok=True)
            names = CONFIG, METRICS, RESULT
            for path in (*(folder / name for name in names), last, best):
                # Remove temporary files of a killed run: see `replacing`.
                for part in path.parent.glob(f".{path.name}.{8 * '[0-9a-f]'}"):
                    part.unlink()
            write_json(folder / CONFIG, about | provenance(command))
        if track is not None:
            trainer.accelerator.init_trackers("fwlab", config=asdict(config))
        try:
            spent = _train(folder, trainer)
        except FloatingPointError as error:
            kept = f"{last.parent} has an earlier state"
            kept = kept if last.exists() else "no checkpoint yet"
            raise FloatingPointError(f"{error} ({kept})") from None
        # A run that was interrupted at its last step has no validation of that step.
        validated = [loss for step, _, loss in trainer.curve if step == trainer.step]
        result = {
            **about,
            "columns": ["step", "training loss", "validation loss"],
            "curve": trainer.curve,
            "validation_loss": (validated or [round(trainer.evaluate(), 4)])[-1],
            **spent,
            "sample": trainer.sample(length=300),
            **provenance(command),
        }
        if trainer.main:
            write_json(folder / RESULT, result)
        say(
            trainer,
            f"\n{result['sample']}\n\nvalidation loss {result['validation_loss']:.4f} "
            f"nats per {config.tokens[:-1]} after {trainer.step} steps, "
            f"{spent['seconds']:.0f} s of training\n{folder}",
        )
        trainer.accelerator.end_training()
        return trainer


def _latest(last: Path, best: Path, resume: bool) -> Checkpoint | None:
    """Load the checkpoint that a run continues from, or return None."""
    # A run killed while writing its first checkpoint has only the best checkpoint.
    path = last if last.exists() else best
    if not path.exists():
        return None
    folder = path.parent.parent
    if not resume:
        raise ValueError(
            f"expected a new folder, got {folder}, which has a run already: "
            "--resume continues it, and --out chooses another folder"
        )
    try:
        return load(path)
    except CheckpointError as error:
        more = f"; remove it, and --resume continues from {best}"
        raise CheckpointError(f"{error}{more * best.exists()}") from None


def _train(folder: Path, trainer: Trainer) -> dict[str, Any]:
    """Train to the end, write metrics and checkpoints, and return the run's result."""
    c, started = trainer.config, trainer.step
    peak, before, seconds, tokens = None, peak_mib(), 0.0, 0
    # Drop the lines of steps after the checkpoint.
    rows = metrics(folder) if started and (folder / METRICS).exists() else []
    rows = [row for row in rows if row["step"] <= started]
    earlier = rows[-1]["seconds"] if rows else 0.0
    if trainer.main:
        with replacing(folder / METRICS) as part:
            part.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    path = folder / METRICS if trainer.main else os.devnull
    # None shows the progress bar on a terminal only, not in a file.
    silent = None if trainer.main and sys.stderr else True
    with (
        _interrupts() as interrupted,
        tqdm(
            total=c.steps,
            initial=started,
            unit="step",
            dynamic_ncols=True,
            disable=silent,
        ) as bar,
        # Flush each line, so that a killed run loses no line.
        open(path, "a", buffering=1, encoding="utf-8") as lines,
    ):
        for progress in trainer.run():
            seconds, tokens = progress.seconds, progress.tokens
            speed = round(tokens / max(seconds, 1e-9))  # A coarse clock may show 0 s.
            row = {
                "step": progress.step,
                "loss": round(progress.loss, 6),
                "lr": c.lr_at(progress.step - 1),
                "tokens_per_second": speed,
                "seconds": round(earlier + seconds, 2),
            }
            validated = progress.val_loss is not None
            if progress.val_loss is not None:
                row["validation_loss"] = round(progress.val_loss, 6)
            # Measure before the first validation, whose batches are larger.
            if peak is None or not trainer.curve:
                peak = round(peak_mib() - before, 1)
            bar.set_postfix_str(
                f"loss {row['loss']:.3f}, lr {row['lr']:.2g}, {speed:,} {c.tokens}/s",
                refresh=False,
            )
            bar.update()
            if validated or progress.step % c.log_every == 0:
                lines.write(json.dumps(row) + "\n")
                logged = {name: x for name, x in row.items() if name != "step"}
                trainer.accelerator.log(logged, progress.step)
            stop = bool(interrupted)
            if trainer.accelerator.num_processes > 1:  # Stop all processes.
                flag = torch.tensor(int(stop), device=trainer.device)
                stop = bool(trainer.accelerator.reduce(flag))
            if validated or stop:
                losses = [loss for *_, loss in trainer.curve]
                lowest = validated and losses[-1] <= min(losses)
                names = ["best", "last"] if lowest else ["last"]
                trainer.save(*(folder / name / FILE for name in names))
            if validated:
                bar.clear()
                text = " ".join(trainer.sample(length=72).split())
                say(
                    trainer,
                    f"step {progress.step}: validation loss {progress.val_loss:.4f}, "
                    f"{speed:,} {c.tokens}/s | {text}",
                )
            if stop and trainer.step < c.steps:
                raise KeyboardInterrupt(
                    f"stopped after step {trainer.step}, saved in {folder / 'last'}; "
                    "the same command with --resume continues"
                )
    return {
        "first_step": started,
        "seconds": round(seconds, 1),
        "tokens_per_second": round(tokens / seconds) if seconds else None,
        "peak_mib": peak,
    }


def peak_mib() -> float:
    """Return the peak memory of this process in MiB, or 0 if unknown."""
    try:
        import resource
    except ImportError:  # Windows has no `resource`.
        return 0
    highest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return highest / (2**20 if sys.platform == "darwin" else 2**10)


def say(trainer: Trainer, text: str) -> None:
    """Print a text in the main process, and ignore a closed output."""
    if trainer.main and text:
        with contextlib.suppress(OSError):
            print(text, flush=True)


def _other_rates(config: Config, resumed: Checkpoint) -> str:
    """Describe how a new number of steps changes the learning rate, or return ""."""
    before, step = resumed.config, resumed.step
    ends = (step, config.steps - 1) if 0 < step < config.steps else ()
    if all(config.lr_at(t) == before.lr_at(t) for t in ends):
        return ""
    return (
        f"{config.steps:,} steps in place of {before.steps:,} stretch the schedule of "
        f"the learning rate: it was {before.lr_at(step - 1):.2g} at step {step:,} and is "
        f"{config.lr_at(step):.2g} at step {step + 1:,}"
    )


def metrics(folder: Path) -> list[dict[str, Any]]:
    """Load the rows of `metrics.jsonl` of a run.

    - Raises `ValueError` if the folder has none.
    """
    path, rows = folder / METRICS, []
    if not path.is_file():
        raise ValueError(
            f"expected a run of fwlab train in {folder}: it has no {METRICS}"
        )
    for line in path.read_text("utf-8").splitlines():
        # A killed run may leave an incomplete line.
        with contextlib.suppress(ValueError):
            rows.append(json.loads(line))
    return rows


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock a folder against other processes, or raise if another process has the lock.

    The system releases the lock of a process that dies. On file systems without locks,
    nothing is locked.

    - Raises `ValueError` if another process holds the lock, and `OSError` if no file
      can be written there.
    """
    if os.environ.get("RANK", "0") != "0":
        yield
        return
    check_writable(folder)
    with open(folder / ".lock", "a+", encoding="utf-8") as file:
        with contextlib.suppress(ImportError, OSError):
            import fcntl

            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                raise ValueError(
                    f"expected {folder} to be free, but {file.read()} trains there: "
                    "wait for it, or choose another folder with --out"
                ) from None
        file.truncate(0)
        print(
            f"process {os.getpid()} on {platform.node()}", end="", file=file, flush=True
        )
        yield


@contextmanager
def _interrupts() -> Iterator[list[int]]:
    """Yield a list that collects Ctrl-C and SIGTERM signals, which interrupt no step.

    A second signal stops at once. A process that ignores signals, as in the background
    of a shell, goes on. Batch systems announce the end of a job with SIGTERM.
    """
    seen: list[int] = []

    def note(number: int, frame: Any) -> None:
        seen.append(number)
        if len(seen) > 1:
            raise KeyboardInterrupt("stopped; checkpoints that were written are kept")

    before = {number: signal.getsignal(number) for number in STOPS}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, note)
    try:
        yield seen
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
