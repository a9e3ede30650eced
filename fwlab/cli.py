"""The command line: `fwlab info`, `train`, `generate`, `bench`."""

import json
import shlex
import sys
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import tyro
from tqdm import tqdm
from tyro.conf import Positional, arg

from fwlab import training
from fwlab.data import CorpusError
from fwlab.provenance import provenance

app = tyro.extras.SubcommandApp()


@app.command
def train(
    config: Annotated[training.Config, arg(name="")],
    out: Path | None = None,
    resume: bool = False,
) -> None:
    """Train a character language model, and keep it in a checkpoint.

    Args:
        config: The run.
        out: Folder for checkpoint.safetensors and result.json; left out:
            runs/MIXER.
        resume: Go on from the checkpoint in that folder, which the same
            command line has left there.
    """
    out = Path("runs", config.mixer) if out is None else out
    path = out / "checkpoint.safetensors"
    trainer = training.Trainer(config, resume=training.load(path) if resume else None)
    print(
        f"{config.mixer}: {trainer.model.num_parameters():,} parameters, "
        f"{len(trainer.train_tokens):,} characters to learn from, on {trainer.device}"
    )
    started, curve, progress = trainer.step, [], None
    with tqdm(
        total=config.steps, initial=started, unit="step", dynamic_ncols=True
    ) as bar:
        for progress in trainer.run():
            bar.update()
            bar.set_postfix_str(f"loss {progress.loss:.3f}", refresh=False)
            if progress.val_loss is not None:
                curve.append(
                    [
                        progress.step,
                        round(progress.loss, 4),
                        round(progress.val_loss, 4),
                    ]
                )
                trainer.save(path)
                line = " ".join(trainer.sample(length=72).split())
                bar.write(
                    f"step {progress.step}: validation loss {progress.val_loss:.4f} | {line}"
                )
    if progress is None or progress.val_loss is None:
        print(f"nothing to do: {path} has seen {trainer.step} steps already")
        return
    done = trainer.step - started
    result = {
        "config": asdict(config),
        "corpus_sha256": trainer.corpus_sha256,
        "parameters": trainer.model.num_parameters(),
        "columns": ["step", "training loss", "validation loss"],
        "curve": curve,
        "validation_loss": round(progress.val_loss, 4),
        "first_step": started,
        "seconds": round(progress.seconds, 1),
        "characters_per_second": round(
            done * config.batch * config.block / progress.seconds
        ),
        "sample": trainer.sample(length=300),
        **provenance(_command()),
    }
    (out / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    print(f"\n{result['sample']}\n")
    print(
        f"validation loss {progress.val_loss:.4f} nats per character after {trainer.step} steps, "
        f"{progress.seconds:.0f} s of training\n{path}"
    )


@app.command
def generate(
    checkpoint: Positional[Path],
    /,
    prompt: str | None = None,
    length: int = 500,
    temperature: float = 0.8,
    top_k: int | None = None,
    seed: int | None = None,
) -> None:
    """Continue a prompt with a trained model.

    Args:
        checkpoint: A file that fwlab train has written.
        prompt: Text to go on from; left out: the start of a line.
        length: Characters to add.
        temperature: 0 takes the likeliest character, 1 draws as the
            model says.
        top_k: Draw among so many likeliest characters only.
        seed: Same seed, same text.
    """
    loaded = training.load(checkpoint)
    if prompt is None:
        prompt = loaded.characters.start
    tokens = loaded.characters.encode(prompt)[None]
    text = loaded.model.eval().generate(tokens, length, temperature, top_k, seed)
    print(loaded.characters.decode(text[0]))


@app.command
def info() -> None:
    """Show versions, devices, and which implementations run here."""
    from fwlab.info import report

    print(report())


@app.command
def bench(out: Path | None = None) -> None:
    """Measure speed and memory, naive against efficient, side by side.

    Args:
        out: Write the numbers to this JSON file, too.
    """
    from fwlab import bench as benchmark

    benchmark.main(out, _command())


def _command() -> str:
    return shlex.join(["fwlab", *sys.argv[1:]])


def main() -> None:
    """Entry point. Wrong input ends in one sentence and exit code 2."""
    warnings.showwarning = lambda message, *_, **__: print(
        f"fwlab: {message}", file=sys.stderr
    )
    try:
        app.cli(prog="fwlab", description="Sequence layers beyond softmax attention.")
    except (
        CorpusError,
        training.CheckpointError,
        ValueError,
        FloatingPointError,
        OSError,
    ) as error:
        print(f"fwlab: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print(
            "fwlab: stopped; the checkpoint of the last validation stands",
            file=sys.stderr,
        )
        sys.exit(130)


if __name__ == "__main__":
    main()
