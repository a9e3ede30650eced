"""A training run in a folder, with progress on the terminal.

- `config.json`: the configuration, with versions and the SHA-256 of the
  text;
- `metrics.jsonl`: a line for every few steps, and for every validation;
- `last/`, `best/`: the latest checkpoint, and the one with the lowest
  validation loss;
- `result.json`: at the end.
"""

import contextlib
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from tqdm import tqdm

from fwlab.files import (
    check_writable,
    destination,
    read_json,
    replacing,
    write_json,
)
from fwlab.provenance import provenance
from fwlab.training import devices
from fwlab.training.checkpoint import (
    FILE,
    Checkpoint,
    CheckpointError,
    check_same_run,
    load,
)
from fwlab.training.config import Config
from fwlab.training.lock import locked
from fwlab.training.loop import Progress, Trainer
from fwlab.training.memory import PeakMemory

CONFIG, METRICS, RESULT = "config.json", "metrics.jsonl", "result.json"
#: The numbers that every row of the metrics has, among others.
ROW = {"step", "loss", "seconds"}


def run_in(
    folder: Path,
    config: Config,
    resume: bool,
    command: str,
    track: str | None = None,
    begin: Callable[["Run"], None] = lambda run: None,
) -> "Run":
    """Train with checkpoints, metrics and a result in a folder.

    - `folder`: folder of the run; no other process may train there.
    - `config`: the run.
    - `resume`: continue from the last checkpoint in the folder; without one
      the run begins, so a job that may be stopped at any time can have it
      from the start.
    - `command`: the command that the result names.
    - `track`: also send metrics to this tracker, "tensorboard" or "wandb".
    - `begin`: called with the run before its first step.
    - Returns the run, which is finished.
    - Raises `KeyboardInterrupt` after Ctrl-C or SIGTERM; the checkpoint then
      has all steps so far.
    - Raises `FloatingPointError` if training diverges, and what `Trainer`
      raises.
    """
    with _no_empty_folders(folder), _alone(folder, config):
        latest = _last(folder)
        if latest is not None and not resume:
            raise ValueError(
                f"expected a new folder, got {folder}, which has a run already: "
                "--resume continues it, and --out chooses another folder"
            )
        options: dict[str, Any] = (
            {} if track is None else {"log_with": track, "project_dir": folder}
        )
        resumed = None if latest is None else _loaded(folder, latest)
        trainer = Trainer(config, resume=resumed, **options)
        if trainer.step > config.steps:
            raise ValueError(
                f"expected steps to be at least {trainer.step}, which {folder} already "
                f"has, got {config.steps}"
            )
        if track is not None and not trainer.accelerator.log_with:
            raise ValueError(f"expected {track} to be installed: pip install {track}")
        run = Run(folder, trainer)
        if resume and latest is None:
            run.say(f"{folder} has no checkpoint yet: the run begins")
        if resumed is not None and (change := _other_rates(config, resumed)):
            run.say(change)
        begin(run)
        run.train(command, track)
        trainer.accelerator.end_training()
        return run


@contextmanager
def _alone(folder: Path, config: Config) -> Iterator[None]:
    """Hold the folder, or raise `ValueError` in all processes of the run."""
    with ExitStack() as held:
        error: Exception | None = None
        if devices.is_main(config):
            try:
                check_writable(folder)
                for name in (CONFIG, METRICS, RESULT):
                    destination(folder / name)
                held.enter_context(locked(folder))
            except (OSError, ValueError) as problem:
                error = problem
        # Those that were not told would wait for the main process.
        if error := devices.from_main(error):
            raise error
        yield


def _last(folder: Path) -> Path | None:
    """The checkpoint to continue from.

    A run that was killed while it wrote its first one has only the best, and
    the first runs had their only checkpoint in the folder itself.
    """
    for place in (folder / "last", folder / "best", folder):
        if (place / FILE).exists():
            return place / FILE
    return None


def _loaded(folder: Path, path: Path) -> Checkpoint:
    """The checkpoint, if the best one is of the same run."""
    best = folder / "best" / FILE
    try:
        checkpoint = load(path)
    except CheckpointError as error:
        with contextlib.suppress(CheckpointError):
            step = load(best).step
            error = CheckpointError(
                f"{error}; remove it, and --resume continues from {best}, which has "
                f"{step} steps"
            )
        raise error from None
    check_same_run(best, path)
    return checkpoint


def _other_rates(config: Config, resumed: Checkpoint) -> str:
    """Say how another number of steps changes the learning rate; "" = it does not."""
    before, step = resumed.config, resumed.step
    ends = step, config.steps - 1
    if not 0 < step < config.steps or all(
        config.lr_at(t) == before.lr_at(t) for t in ends
    ):
        return ""
    return (
        f"{config.steps:,} steps in place of {before.steps:,} stretch the schedule of "
        f"the learning rate: it was {before.lr_at(step - 1):.2g} at step {step:,} and is "
        f"{config.lr_at(step):.2g} at step {step + 1:,}"
    )


def metrics(folder: Path) -> list[dict[str, Any]]:
    """The rows of `metrics.jsonl` of a run.

    - Raises `ValueError` if the folder has none.
    """
    path = folder / METRICS
    if not path.is_file():
        raise ValueError(
            f"expected a run of fwlab train in {folder}: it has no {METRICS}"
        )
    rows = []
    for line in path.read_text("utf-8-sig", errors="replace").splitlines():
        # A line may have been cut while it was written.
        with contextlib.suppress(ValueError, RecursionError):
            row = json.loads(line)
            if (
                isinstance(row, dict)
                and {*row} >= ROW
                and all(map(_number, row.values()))
            ):
                rows.append(row)
    return rows


def _number(x: Any) -> bool:
    return type(x) in (int, float) and abs(x) < 1e100  # which can be drawn; no NaN


class Run:
    """Prints and writes the progress of a training, in the main process.

    - `folder`: folder of the run.
    - `trainer`: at its start, or where it was stopped.
    """

    def __init__(self, folder: Path, trainer: Trainer):
        self.folder, self.trainer = folder, trainer
        self.started = trainer.step
        self.peak: float | None = None
        self.seconds_before = 0.0

    def threads(self) -> int | None:
        """The number of threads of the steps so far; None = unknown."""
        if self.started:
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                return int(read_json(self.folder / CONFIG)["threads"])
        return None

    def train(self, command: str, track: str | None) -> None:
        """Train to the end, and write the result."""
        trainer, config = self.trainer, self.trainer.config
        processes = trainer.accelerator.num_processes
        self.say(
            f"{config.mixer}: {trainer.model.num_parameters():,} parameters, "
            f"{len(trainer.train_tokens):,} training {config.tokens}, on "
            f"{trainer.device}" + (f", {processes} processes" if processes > 1 else "")
        )
        if trainer.step == config.steps == self._finished():
            self.say(
                f"nothing to do: {self.folder} already has {trainer.step} steps of "
                "training"
            )
            return
        about = {
            "config": asdict(config),
            "corpus_sha256": trainer.corpus_sha256,
            "parameters": trainer.model.num_parameters(),
            "state_size": trainer.model.state_size(config.block),
        }
        if trainer.main:
            self._clean()
            write_json(self.folder / CONFIG, about | provenance(command))
            self._cut_metrics()
        if track is not None:
            trainer.accelerator.init_trackers("fwlab", config=asdict(config))
        try:
            spent = self._steps()
        except FloatingPointError as error:
            last = self.folder / "last"
            kept = f"{last} has an earlier state"
            if not (last / FILE).exists():
                kept = "no checkpoint yet"
            raise FloatingPointError(f"{error} ({kept})") from None
        # A run that was interrupted at its last step has not been validated there.
        validated = [loss for step, _, loss in trainer.curve if step == trainer.step]
        validation_loss = validated[-1] if validated else round(trainer.evaluate(), 4)
        result = {
            **about,
            "columns": ["step", "training loss", "validation loss"],
            "curve": trainer.curve,
            "validation_loss": validation_loss,
            **spent,
            "sample": trainer.sample(length=300),
            **provenance(command),
        }
        if trainer.main:
            write_json(self.folder / RESULT, result)
        self.say(f"\n{result['sample']}\n")
        self.say(
            f"validation loss {validation_loss:.4f} nats per {config.tokens[:-1]} after "
            f"{trainer.step} steps, {spent['seconds']:.0f} s of training\n"
            f"{self.folder}"
        )

    def _steps(self) -> dict[str, Any]:
        """Train to the end; returns what it took."""
        trainer, c = self.trainer, self.trainer.config
        memory, seconds, tokens = PeakMemory(), 0.0, 0
        with (
            _interrupts() as interrupted,
            tqdm(
                total=c.steps,
                initial=self.started,
                unit="step",
                dynamic_ncols=True,
                # A file gets lines, but no bar; without stderr there is neither.
                disable=not trainer.main
                or sys.stderr is None
                or not sys.stderr.isatty(),
            ) as bar,
            # A line at once, so that a killed run has written what it knew.
            open(
                self.folder / METRICS if trainer.main else os.devnull,
                "a",
                buffering=1,
                encoding="utf-8",
            ) as lines,
        ):
            for progress in trainer.run():
                seconds, tokens = progress.seconds, progress.tokens
                # Validation has larger batches: measure before the first one.
                if self.peak is None or not trainer.curve:
                    self.peak = memory.mib()
                row = self._metrics(progress)
                bar.set_postfix_str(_status(row, c.tokens), refresh=False)
                bar.update()
                validated = progress.val_loss is not None
                if validated or progress.step % c.log_every == 0:
                    lines.write(json.dumps(row) + "\n")
                    trainer.accelerator.log(
                        {k: x for k, x in row.items() if k != "step"}, progress.step
                    )
                stop = devices.in_any(trainer.accelerator, bool(interrupted))
                if validated or stop:
                    self._save(validated)
                if validated:
                    bar.clear()
                    text = " ".join(trainer.sample(length=72).split())
                    left = (c.steps - trainer.step) / (trainer.step - self.started)
                    self.say(
                        f"step {progress.step}: validation loss "
                        f"{progress.val_loss:.4f}, "
                        f"{row['tokens_per_second']:,} {c.tokens}/s"
                        f"{_left(left * seconds)} | {text}"
                    )
                if stop and trainer.step < c.steps:
                    raise KeyboardInterrupt(
                        f"stopped after step {trainer.step}, saved in "
                        f"{self.folder / 'last'}; the same command with --resume "
                        "continues"
                    )
        return {
            "first_step": self.started,
            "seconds": round(seconds, 1),
            "tokens_per_second": round(tokens / seconds) if seconds else None,
            "peak_mib": self.peak,
        }

    def _metrics(self, progress: Progress) -> dict[str, Any]:
        row = {
            "step": progress.step,
            "loss": round(progress.loss, 6),
            "lr": self.trainer.config.lr_at(progress.step - 1),
            "tokens_per_second": round(
                progress.tokens / max(progress.seconds, 1e-9)  # of a coarse clock
            ),
            "seconds": round(self.seconds_before + progress.seconds, 2),
        }
        if progress.val_loss is not None:
            row["validation_loss"] = round(progress.val_loss, 6)
        return row

    def _finished(self) -> int | None:
        """The number of steps of the result, if there is one."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            return read_json(self.folder / RESULT)["config"]["steps"]
        return None

    def _clean(self) -> None:
        """Remove what a killed run has half written, and a result.

        So a result is always one of the latest checkpoint, whenever this run
        ends.
        """
        destination(self.folder / RESULT).unlink(missing_ok=True)
        for place, name in ((".", CONFIG), (".", METRICS), (".", RESULT), ("*", FILE)):
            for part in self.folder.glob(f"{place}/.{name}.????????"):
                part.unlink(missing_ok=True)

    def _cut_metrics(self) -> None:
        """Forget the lines of steps that the checkpoint does not have."""
        path = self.folder / METRICS
        rows = metrics(self.folder) if self.started and path.exists() else []
        kept = [row for row in rows if row["step"] <= self.started]
        if kept:
            self.seconds_before = kept[-1]["seconds"]
        with replacing(path) as part:
            part.write_text(
                "".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8"
            )

    def _save(self, validated: bool) -> None:
        losses = [loss for _, _, loss in self.trainer.curve]
        best = validated and losses[-1] <= min(losses)
        folders = ["best", "last"] if best else ["last"]
        self.trainer.save(*(self.folder / each / FILE for each in folders))

    def say(self, text: str) -> None:
        if self.trainer.main:
            _say(text)


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


def _status(row: dict[str, Any], tokens: str) -> str:
    return (
        f"loss {row['loss']:.3f}, lr {row['lr']:.2g}, "
        f"{row['tokens_per_second']:,} {tokens}/s"
    )


def _left(seconds: float) -> str:
    """The time that is left, if it is worth printing."""
    if seconds < 60:
        return ""
    minutes = round(seconds / 60)
    hours = f"{minutes // 60} h " if minutes >= 60 else ""
    return f", {hours}{minutes % 60} min left"


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
    """Yield a list that Ctrl-C and SIGTERM fill, so that no step is cut in two.

    A second one stops at once. Nothing changes outside the main thread,
    where Python has no signals, and for a process that ignores them, as
    one in the background of a shell may do. Batch systems announce the end
    of a job with SIGTERM.
    """
    seen: list[int] = []

    def note(number: int, frame: Any) -> None:
        seen.append(number)
        if len(seen) > 1:
            raise KeyboardInterrupt("stopped; checkpoints that were written are kept")

    if threading.current_thread() is not threading.main_thread():
        yield seen
        return
    before = {
        number: signal.signal(number, note)
        for number in (signal.SIGINT, signal.SIGTERM)
        if signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
        yield seen
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
