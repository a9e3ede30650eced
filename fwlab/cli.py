"""Define the command line: `fwlab train`, `fwlab exercises` and five other commands."""

import os
import re
import shlex
import sys
import warnings
from dataclasses import fields
from io import TextIOWrapper
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal

import torch
import tyro
from typing_extensions import Doc
from tyro.conf import Positional, arg

from fwlab import training
from fwlab.data.corpus import CORPORA
from fwlab.files import destination, replacing, write_json
from fwlab.layers import FastWeightAttention
from fwlab.models import checkpoints
from fwlab.training.checkpoint import new_model
from fwlab.training.presets import PRESETS, vocabulary_size
from fwlab.training.run_folder import run_in, say

app = tyro.extras.SubcommandApp()
#: Type of `--preset`, with the text that `fwlab train --help` shows.
PresetName = Annotated[
    str | None,
    Doc(
        f"Start from a published configuration ({', '.join(PRESETS)}); other options "
        "change it."
    ),
]


@app.command
def train(
    config: Annotated[training.Config, arg(name="")] = training.Config(),  # noqa: B008
    preset: PresetName = None,
    out: Path | None = None,
    resume: bool = False,
    dry_run: bool = False,
    track: Literal["tensorboard", "wandb"] | None = None,
    threads: int | None = None,
) -> None:
    """Train a language model and save its run in a folder.

    With torchrun -m fwlab train or accelerate launch -m fwlab train, several
    processes train one model.

    Args:
        config: The run.
        out: Folder for config.json, metrics.jsonl, the checkpoints last and
            best, and result.json; default: runs/MIXER, or runs/PRESET.
        resume: Continue from the last checkpoint that the same command line
            has left in that folder; without one, begin.
        dry_run: Do not train; show the number of parameters, the memory, the
            operations and the time of a step, which three steps measure.
        track: Also send the metrics to TensorBoard (in that folder) or to
            Weights & Biases.
        threads: Number of threads on a CPU; default: OMP_NUM_THREADS, or else one, the
            fastest beside a program that keeps a core busy.
    """
    if preset is not None:
        if preset not in PRESETS:
            raise ValueError(
                f"expected preset to be one of {', '.join(PRESETS)}, got {preset!r}"
            )
        print(f"{preset}: {PRESETS[preset].source}")
    if threads is not None and threads < 1:
        raise ValueError(f"expected threads to be at least 1, got {threads}")
    if threads is not None or "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(threads or 1)
    with torch.device("meta"):  # Raise for invalid sizes before a folder is made.
        new_model(config, 2)
    if dry_run:
        from fwlab.training.plan import describe

        print(describe(config, vocabulary_size(config, preset)))
        return
    name = preset or re.sub("[*, ]+", "-", config.mixer)
    folder = Path("runs", name) if out is None else out
    trainer = run_in(folder, config, resume, _command(), track)
    run, picture, curves = map(
        shlex.quote, map(str, (folder, folder / "look.svg", folder / "curves.svg"))
    )
    commands = [f"fwlab generate {run}"]
    if any(isinstance(part, FastWeightAttention) for part in trainer.model.modules()):
        # Without a network, the text is Python's standard library, so compare hashes.
        shakespeare = CORPORA["shakespeare"].hash.endswith(trainer.corpus_sha256)
        text = config.corpus or ("shakespeare" if shakespeare else "python")
        more = f"--text {shlex.quote(text)} --out {picture}"
        commands.append(f"fwlab look {run} {more}")
    commands.append(f"fwlab plot {run} --out {curves}")
    if trainer.accelerator.num_processes == 1:
        again = re.sub(r" --resume\b| --steps[ =]\S+", "", _command())
        commands.append(f"{again} --steps {2 * config.steps} --resume")
    say(trainer, "\n".join(["next:", *commands]))


def _with_preset(arguments: list[str]) -> list[str]:
    """Insert a preset's options before the given options, which take precedence."""
    chosen = [
        name for before, name in pairwise(_split(arguments)) if before == "--preset"
    ]
    if arguments[:1] != ["train"] or not chosen or chosen[-1] not in PRESETS:
        return arguments
    options = []
    for field in fields(training.Config):
        value = getattr(PRESETS[chosen[-1]].config, field.name)
        if value != field.default:
            option = f"--{field.name.replace('_', '-')}"
            options += [option] if value is True else [option, str(value)]
    return ["train", *options, *arguments[1:]]


def _split(arguments: list[str]) -> list[str]:
    """Split arguments into options and values, also at `=`."""
    pairs = [a.split("=", 1) if a.startswith("--") else [a] for a in arguments]
    return [part for pair in pairs for part in pair]


def _refuse_empty(arguments: list[str]) -> None:
    """Raise `ValueError` for an empty argument, which would name the current folder."""
    for before, argument in pairwise(_split(arguments)):
        if not argument and before != "--prompt":
            raise ValueError(
                f"expected a value after {before}, got an empty one: perhaps a shell "
                "variable is not set"
            )


@app.command
def plot(runs: Positional[tuple[Path, ...]], /, out: Path = Path("curves.svg")) -> None:
    """Draw the losses of runs, while they train or afterwards.

    Args:
        runs: Folders that fwlab train has written.
        out: The file to write; its ending decides its format.
    """
    from fwlab.plots import learning_curves
    from fwlab.training.run_folder import metrics

    if not runs:
        raise ValueError("expected a run to plot, got none")
    destination(out)
    figure = learning_curves({str(run): metrics(run) for run in runs})
    with replacing(out) as part:
        figure.savefig(part, format=out.suffix[1:] or "svg")
    print(out)


@app.command
def generate(
    checkpoint: Positional[Path],
    /,
    prompt: str | None = None,
    length: int = 500,
    temperature: float = 0.8,
    top_k: int | None = None,
    seed: int | None = None,
    dtype: Literal["float32", "bfloat16"] | None = None,
) -> None:
    """Continue a prompt with a trained model.

    Args:
        checkpoint: A folder or a file that fwlab train has written; or the folder of a
            published model, or its name on the hub, OWNER/NAME.
        prompt: Text to continue; default: the start of a line.
        length: Number of tokens to add.
        temperature: Divides the logits; 0 takes the most likely token.
        top_k: Sample only from this many of the most likely tokens.
        seed: The same seed gives the same text.
        dtype: Of the weights of a published model; default: as in its files.
    """
    if length < 0:
        raise ValueError(f"expected length to be 0 or more, got {length}")
    if checkpoints.is_published(checkpoint) or checkpoints.is_name(checkpoint):
        if prompt is None:
            raise ValueError("expected --prompt for a published model, got none")
        kind = None if dtype is None else getattr(torch, dtype)
        sampling = (length, temperature, top_k, seed)
        for piece in checkpoints.stream_text(checkpoint, prompt, *sampling, dtype=kind):
            print(piece, end="", flush=True)
        print()
        return
    if dtype is not None:
        raise ValueError(f"expected --dtype with a published model only, got {dtype}")
    loaded = training.load(checkpoint)
    if prompt is None:
        prompt = loaded.vocabulary.start
    tokens = loaded.vocabulary.encode(prompt)[None]
    if tokens.shape[1] == 0:
        one = loaded.config.tokens[:-1]
        raise ValueError(f"expected a prompt of at least one {one}, got {prompt!r}")
    text = loaded.model.eval().generate(tokens, length, temperature, top_k, seed)
    print(loaded.vocabulary.decode(text[0]))


@app.command
def look(
    checkpoint: Positional[Path],
    /,
    text: Path,
    name: str | None = None,
    tokens: int = 512,
    out: Path = Path("look.svg"),
) -> None:
    """Show how a model writes to its fast weights while it reads a text.

    Args:
        checkpoint: As for fwlab generate.
        text: A file; or a corpus, as for fwlab train.
        name: A word that occurs at least twice: how long each head keeps what it writes
            there first. Default: the most frequent capitalised one that is nowhere in
            small letters.
        tokens: Read at most this many tokens, from the beginning.
        out: The picture; its ending decides its format. The numbers go to a JSON file
            of the same name beside it.
    """
    from fwlab import look as inside
    from fwlab.data import corpus
    from fwlab.provenance import provenance

    numbers = out.with_suffix(".json")
    if numbers == out:
        raise ValueError(f"expected a picture, such as look.svg, got {out}")
    for path in (out, numbers):
        destination(path)
    reading = inside.read(checkpoint, corpus(str(text)), tokens)
    word, places = inside.occurrences(reading, name)
    layers, skipped = inside.look(reading.model, reading.tokens, *places[:1])
    if len(reading.tokens) < reading.total:
        print(f"the first {len(reading.tokens)} of {reading.total:,} tokens")
    for number, kind in skipped.items():
        print(f"layer {number} has no fast weights to show: {kind}")
    if word is None:
        print(
            "no write is followed: every capitalised word of two letters or more occurs "
            "only once, or also in small letters; choose a word with --name WORD"
        )
    figure = inside.picture(reading, layers, word, places)
    with replacing(out) as part:
        figure.savefig(part, format=out.suffix[1:] or "svg", dpi=200)
    found = {
        "model": str(checkpoint),
        "text": str(text),
        "tokens": [reading.text[a:b] for a, b in reading.spans],
        "name": word,
        "places": places,
        "skipped": skipped,
        "layers": [inside.report(layer, places) for layer in layers],
    }
    write_json(numbers, provenance(_command()) | found)
    print(f"{out}\n{numbers}")


@app.command
def info() -> None:
    """Show versions, devices, and the implementations that run here."""
    from fwlab.info import report

    print(report())


@app.command
def bench(
    out: Path | None = None,
    gpu: bool = False,
) -> None:
    """Measure speed and memory of naive and efficient implementations.

    Args:
        out: Also write the results to this JSON file. With --gpu they are
            always written; default: gpu-CARD.json, in docs/results if
            that folder exists.
        gpu: On an Nvidia GPU: compare the kernels with the naive loops, then
            measure them next to flash-linear-attention, if that is installed;
            exit code 1 if one of them is wrong.
    """
    if gpu:
        from fwlab.bench import kernels

        if not kernels.main(out, _command()):
            sys.exit(1)
        return
    from fwlab.bench import operations

    operations.main(out, _command())


@app.command
def exercises(
    action: Positional[Literal["list", "export", "grade"]],
    paths: Positional[tuple[Path, ...]] = (),
    /,
    out: Path | None = None,
    seconds: float = 300,
    cell_seconds: float = 60,
    gib: float = 4,
    handout: Path | None = None,
    own: Annotated[Path | None, arg(name="from")] = None,
    force: bool = False,
) -> None:
    """List exercises with their progress, export them as notebooks, or grade answers.

    Each notebook is graded in a kernel of its own; this needs the extra "notebooks".

    Args:
        action: list [FOLDER]; export FOLDER [NOTEBOOK ...]; grade NOTEBOOK [NOTEBOOK ...].
        paths: The folder of the course; or a folder for the notebooks of students,
            and notebooks to copy into it without their results; or what students
            hand in.
        out: File for the grades, as JSON.
        seconds: Time limit for a notebook.
        cell_seconds: Time limit for a cell.
        gib: Memory limit for a notebook, where the system can set one.
        handout: The notebook that was handed out; its exercises are those
            that count. Default: the list that export writes into notebooks.
        own: A Python file with exercises of your own: they are listed and graded
            with the others, and only they are exported.
        force: Export over notebooks that are there.
    """
    from fwlab.exercises import TOPICS, grading, handouts, lab, progress

    topics, module = dict(TOPICS), None
    if own:
        module = own.stem, own.read_text("utf-8-sig")
        topics = {own.stem: handouts.own_exercises(*module)}
    if action == "list":
        folder = paths[0] if paths else Path()
        print(progress.overview(progress.found(folder)))
        if kept := lab.shelf(folder):
            print(f"\nYours, in {lab.FILE}: {', '.join(kept)}")
    elif action == "export":
        if not paths:
            raise ValueError("expected a folder, got none")
        for path in handouts.export(*paths, topics=topics, own=own, force=force):
            print(path)
    else:
        if not paths:
            names = ", ".join(name for named in topics.values() for name in named)
            raise ValueError(f"expected a notebook to grade ({names})")
        if out:
            destination(out)
        expected = grading.exercises_of(handout) if handout else None
        # Read all submissions before one runs, since a run may delete others.
        submissions = [grading.read(path) for path in paths]
        if caution := grading.caution():
            _complain(caution)
        grades = []
        for each in submissions:
            grades.append(
                grading.grade(each, seconds, cell_seconds, gib, expected, module)
            )
            print(grading.report(grades[-1]), flush=True)
            if out:
                write_json(out, grades)
        if out:
            print(out)


def _command() -> str:
    return shlex.join(["fwlab", *sys.argv[1:]])


def main() -> None:
    """Run the command line. Invalid input gives one sentence and exit code 2."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # A terminal may lack UTF-8.
            stream.reconfigure(errors="backslashreplace")
    try:
        _refuse_empty(sys.argv)
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *_, **__: _complain(message)
            app.cli(
                prog="fwlab",
                description="Sequence layers beyond softmax attention.",
                args=_with_preset(sys.argv[1:]),
            )
    except BrokenPipeError:  # Readers such as `head -1` close the pipe early.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)  # The exit code of a program killed by SIGPIPE.
    except (ValueError, FloatingPointError, OSError) as error:
        _complain(error)
        sys.exit(2)
    except (RuntimeError, MemoryError) as error:
        too_large = re.search("memory|Storage size", str(error))
        if isinstance(error, RuntimeError) and not too_large:
            raise  # This is a bug in fwlab, so show the traceback.
        _complain("not enough memory for a model or batch of this size")
        sys.exit(2)
    except KeyboardInterrupt as stop:
        _complain(stop if stop.args else "stopped; what was written is kept")
        sys.exit(130)


def _complain(message: object) -> None:
    print(f"fwlab: {message}", file=sys.stderr)
