"""Test training, checkpoints, and the commands `fwlab train` and `fwlab generate`."""

import copy
import dataclasses
import itertools
import json
import math
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import terminal
import torch
from alike import identical
from safetensors import safe_open
from safetensors.torch import save_file

from fwlab import cli
from fwlab.data import CorpusError
from fwlab.models import MIXERS
from fwlab.plots import learning_curves
from fwlab.training import CheckpointError, Config, Trainer, batches, checkpoint, load
from fwlab.training.checkpoint import new_model
from fwlab.training.presets import PRESETS
from fwlab.training.run_folder import locked, metrics

TEXT = "the quick brown fox jumps over the lazy dog. " * 60
SIZES = {"layers": 1, "heads": 2, "d_model": 16, "block": 16, "batch": 4}
SMALL = Config(**SIZES, steps=12, warmup=2, eval_every=6, lr=1e-2, device="cpu")


def config(**changes):
    return dataclasses.replace(SMALL, **changes)


def losses(trainer):
    return [progress.loss for progress in trainer.run()]


def same_weights(one, other):
    identical(one.state_dict().values(), other.state_dict().values())


@pytest.mark.parametrize("mixer", MIXERS)
def test_every_mixer_trains_and_generates(tmp_path, mixer):
    c = config(mixer=mixer, steps=20, eval_every=10, d_ff=24)
    trainer = Trainer(c, TEXT)
    run = list(trainer.run())
    assert run[0].loss == pytest.approx(math.log(len(trainer.vocabulary)), abs=0.3)
    assert run[-1].val_loss < 2.7  # Token frequencies alone give 3.05.
    assert [p.step for p in run if p.val_loss is not None] == [10, 20]
    trainer.save(tmp_path / "model")
    loaded = load(tmp_path / "model")
    assert (loaded.config, loaded.step, loaded.curve) == (c, 20, trainer.curve)
    same_weights(loaded.model, trainer.model)
    wide = [p for n, p in loaded.model.named_parameters() if "expand.weight" in n]
    assert [p.shape[0] for p in wide] == [24]
    tokens = trainer.vocabulary.encode("the")[None]
    again = loaded.model.eval().generate(tokens, 20, seed=c.seed, temperature=0.8)
    assert trainer.vocabulary.decode(again[0, 3:]) == trainer.sample("the", 20)


def test_a_step_is_that_of_adamw():
    """A training step is AdamW with clipped gradients, and decays only matrices."""
    c = config(clip=1e-6, weight_decay=0.9)  # With this clip, Adam's epsilon matters.
    trainer = Trainer(c, TEXT)
    model, (x, y, *_) = copy.deepcopy(trainer.model), trainer._batch()
    parts = [
        [p for p in model.parameters() if (p.dim() > 1) == many] for many in (1, 0)
    ]
    groups = [
        {"params": p, "weight_decay": d} for p, d in zip(parts, (0.9, 0), strict=True)
    ]
    optimizer = torch.optim.AdamW(groups, c.lr / 3, betas=(0.9, 0.99))
    torch.nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-6)
    optimizer.step()
    next(trainer.run())
    same_weights(model, trainer.model)


def test_each_step_draws_its_own_dropout(monkeypatch):
    trainer = Trainer(config(dropout=0.5, lr=0.0, min_lr=0.0, steps=3), TEXT)
    same = trainer._batch()
    monkeypatch.setattr(trainer, "_batch", lambda part: same)
    assert len({*losses(trainer)}) == 3


def test_carried_windows_follow_one_another():
    """With `carry`, windows are consecutive, and a text begins with an empty state."""
    run = Trainer(config(carry=True), TEXT)
    rows, block = batches.in_rows(run.train_tokens, SMALL.batch), SMALL.block
    windows, logits = (rows.shape[1] - 1) // block, []
    for step in range(windows + 1):
        run.step = step
        batch, start = run._batch(), step % windows * block
        assert torch.equal(batch.inputs, rows[:, start : start + block])
        assert torch.equal(batch.targets, rows[:, start + 1 : start + block + 1])
        assert batch.begins == (start == 0)
        with torch.no_grad():
            state = None if batch.begins else run.states[0]
            logits.append(run.model.prefill(batch.inputs, state)[0])
        run._backward()
    whole = run.model(rows[:, : 2 * block])
    assert torch.allclose(torch.cat(logits[:2], 1), whole, atol=1e-5)
    past, W = run.states[0]
    assert past == block and not W.requires_grad


@pytest.mark.parametrize("mixer", ["delta", "transformer-xl"])
def test_carried_validation_is_that_of_one_long_sequence(mixer):
    run = Trainer(config(mixer=mixer, carry=True), TEXT * 8)
    assert len(run.val_tokens) > 1500  # Evaluation takes more than one segment.
    for run.eval_rows in (1, 2):
        rows = batches.in_rows(run.val_tokens, run.eval_rows)
        logits = run.model(rows[:, :-1])
        whole = torch.nn.functional.cross_entropy(logits.mT, rows[:, 1:]).item()
        assert run.evaluate() == pytest.approx(whole, rel=1e-5)
    windows = Trainer(config(mixer=mixer), TEXT * 8)
    assert run.evaluate(carry=False) == windows.evaluate()


def stopped(trainer, folder):
    """Train for five steps, save a checkpoint, and return the path."""
    for progress in trainer.run():
        if progress.step == 5:
            break
    trainer.save(folder / "half")
    return folder / "half"


CARRIED_BY = ("delta", "sum", "transformer-xl", "feedback")
RESUMED = [{}, {"mixer": "softmax", "attention_dropout": 0.3}, {"pack": True}]
RESUMED += [{"mixer": mixer, "carry": True} for mixer in CARRIED_BY]
RESUMED += [{"carry": True, "accumulate": 2, "dropout": 0.2}]
RESUMED += [{"first_block": 4, "grow_steps": 6, "schedule": "noam"}]


@pytest.mark.parametrize("changes", RESUMED, ids=str)
def test_resume_is_as_if_never_stopped(tmp_path, changes):
    """A resumed run equals an uninterrupted run, including random numbers."""
    c = config(**changes)
    whole = Trainer(c, TEXT)
    expected = losses(whole)
    half = load(stopped(Trainer(c, TEXT), tmp_path))
    second = Trainer(c, TEXT, resume=half)
    torch.rand(1)
    assert losses(second) == expected[5:]
    same_weights(second.model, whole.model)
    if c.carry:
        too_many = half._replace(state=[*half.state[:1]] * 99)
        with pytest.raises(CheckpointError, match="carried state"):
            Trainer(c, TEXT, resume=too_many)


@pytest.mark.parametrize("pack", [False, True])
def test_validation_is_the_mean_and_takes_little_memory(monkeypatch, pack):
    c = config(pack=pack)
    trainer = Trainer(c, TEXT)
    block, tokens = SMALL.block, trainer.val_tokens
    expected = trainer.evaluate()
    if not pack:
        means = []
        for start in range(0, len(tokens) - block, block):
            y = trainer.model(tokens[None, start : start + block])[0].log_softmax(-1)
            targets = tokens[start + 1 : start + block + 1]
            means.append(-y[torch.arange(block), targets].mean().item())
        assert expected == pytest.approx(sum(means) / len(means))
    monkeypatch.setattr(batches, "LOGITS", 3 * 28 * 16)
    trainer, seen = Trainer(c, TEXT), []
    hook = lambda *arguments: seen.append(arguments[2].numel())  # noqa: E731
    trainer.model.register_forward_hook(hook)
    # Packing cuts documents at the ends of rows, which changes the loss.
    assert trainer.evaluate() == pytest.approx(expected, abs=2e-3 if pack else 1e-6)
    assert len(seen) > 1 and max(seen) <= batches.LOGITS


def test_growing_windows():
    trainer = Trainer(config(first_block=4, grow_steps=6), TEXT)
    lengths = []
    for progress in trainer.run():
        lengths.append(trainer._batch().inputs.shape[1])
        tokens = progress.tokens
    assert lengths == [6, 8, 10, 12, 14] + [16] * 7
    assert tokens == 4 * (4 + 6 + 8 + 10 + 12 + 14 + 6 * 16)


@pytest.mark.parametrize("way", ["accumulate", "checkpointing"])
def test_less_memory_same_training(way):
    saving = config(layers=2, **{way: 2 if way == "accumulate" else True})
    kept, found = [], []
    for c in (config(layers=2), saving):
        trainer, saved = Trainer(c, TEXT), []

        def keep(x, saved=saved):
            saved.append(x.numel())
            return x

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            trainer.loss(*trainer._batch()[:2])[0].backward()
        kept.append(sum(saved))
        found.append(losses(trainer))
    assert found[0] == pytest.approx(found[1], abs=1e-5)
    assert kept[1] < kept[0] / (2 if way == "checkpointing" else 1.3)


@pytest.mark.parametrize("mixer", ["feedback", "feedback-shared", "softmax"])
def test_start_from_a_trained_transformer(tmp_path, mixer):
    parallel = Trainer(config(mixer="softmax", steps=40), TEXT)
    list(parallel.run())
    parallel.save(tmp_path / "model")
    c = config(mixer=mixer, start=str(tmp_path / "model"))
    warm, cold = Trainer(c, TEXT), Trainer(config(mixer=mixer), TEXT)
    weight = parallel.model.embedding.weight
    assert torch.equal(warm.model.embedding.weight, weight)
    assert warm.evaluate() < cold.evaluate() - 0.5
    with pytest.raises(ValueError, match="the same mixer and sizes"):
        Trainer(dataclasses.replace(c, mixer="delta"), TEXT)
    with pytest.raises(CheckpointError, match="to have the same characters"):
        Trainer(c, TEXT.upper())


def test_words_and_packed_documents(tmp_path):
    """Training packs documents of words; validation reads each document separately."""
    (tmp_path / "texts").mkdir()
    for i in range(12):
        words = "a quick fox jumps over some lazy dogs " * (3 + i % 4)
        (tmp_path / "texts" / f"{i:02}.txt").write_text(words + "\n")
    c = config(corpus=str(tmp_path / "texts"), tokens="words", pack=True)
    trainer = Trainer(c)
    assert len(trainer.vocabulary) == 10  # The words include <eos> and <unk>.
    inputs, _, borders, _ = trainer._batch()
    begins = inputs[0, borders[1:-1].long()]
    assert inputs.shape == (1, 64) and len(begins)
    assert set(begins.tolist()) == {int(trainer.vocabulary.encode("a"))}
    run = losses(trainer)
    assert run[-1] < run[0]
    (tokens, borders), alone = trainer.valid_text, []
    for start, end in itertools.pairwise(borders.tolist()):
        y = trainer.model(tokens[None, start : end - 1])[0].log_softmax(-1)
        alone.append(-y[torch.arange(end - start - 1), tokens[start + 1 : end]])
    assert trainer.evaluate() == pytest.approx(torch.cat(alone).mean().item(), rel=1e-5)
    assert trainer.sample(length=3).count(" ") <= 3


#: Numbers of parameters that papers and their code state.
PUBLISHED = {"wt103-small": 40e6, "wt103-medium": 90e6, "transformer-xl": 90.9e6}


@pytest.mark.parametrize("name", PRESETS)
def test_presets(name):
    """Presets have the published sizes, as in the table of docs/training.md."""
    preset = PRESETS[name]
    c = preset.config
    with torch.device("meta"):
        model = new_model(c, preset.vocabulary)
    count = sum(p.numel() for p in model.parameters())
    assert count == pytest.approx(PUBLISHED.get(name, count), rel=0.1)
    if name.startswith("labml"):  # Noam's factor is 1, with 2000 steps of warm-up.
        assert c.lr_at(4999) == pytest.approx((c.d_model * 5000) ** -0.5, rel=1e-3)
    page = (Path(cli.__file__).parents[1] / "docs/training.md").read_text("utf-8")
    (source,), cells = (
        row.split(" | ") for row in re.findall(rf"\| `{name}` \| (.*) \|\n", page)
    )
    said = preset.source, f"{count / 1e6:.1f} M", f"{c.steps:,}"
    assert said == (source, cells[0], cells[2])


def test_options_change_a_preset(monkeypatch):
    seen = []

    def stop(folder, c, *_):
        seen.append((folder.name, c))
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "run_in", stop)
    for name, preset in PRESETS.items():
        terminal.fwlab("train", f"--preset={name}", "--lr", "1")
        assert seen[-1] == (name, dataclasses.replace(preset.config, lr=1.0))
    assert terminal.fwlab("train")[0] == 130 and seen[-1] == ("delta", Config())
    assert terminal.fwlab("train", "--preset", "nix")[0] == 2


def test_bf16_and_compile(monkeypatch):
    full = losses(Trainer(SMALL, TEXT))
    half, seen = Trainer(config(precision="bf16"), TEXT), []
    half.model.blocks[0].mixer.to_q.register_forward_hook(
        lambda module, inputs, y: seen.append(y.dtype)
    )
    lower = losses(half)
    assert torch.bfloat16 in seen
    assert lower != full and lower == pytest.approx(full, abs=0.05)
    assert next(half.model.parameters()).dtype == torch.float32
    monkeypatch.setattr("shutil.which", lambda name: name)
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "eager")
    compiled = Trainer(config(compile=True, steps=2), TEXT)
    assert losses(compiled) == pytest.approx(full[:2], abs=1e-5)


def test_learning_rate():
    c = Config()
    noam = Config(schedule="noam")
    assert noam.lr_at(99) == c.lr_at(99) and noam.lr_at(100) == pytest.approx(1e-3)
    assert noam.lr_at(403) == pytest.approx(0.5e-3)  # Noam rates fall as 1/sqrt(steps).
    for step, rate in ((0, 1e-3 / 101), (100, 1e-3), (1050, 5.5e-4), (2000, 1e-4)):
        assert c.lr_at(step) == pytest.approx(rate)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mixer": "dleta"}, "mixer to be one of .* got 'dleta'"),
        ({"device": "gpu"}, "device to be .* got 'gpu'"),
        ({"mixer": "softmax", "carry": True}, "'softmax', which ends after 16"),
        ({"mixer": "feedback", "pack": True}, "packed documents apart, got 'feedback'"),
        ({"steps": 0}, "steps to be at least 1"),
        ({"lr": float("nan")}, "lr to be 0 or more"),
        ({"beta2": 1.0}, "beta2 from 0 to 1, excluding 1"),
        ({"seed": 1.5}, "seed to be an integer, got 1.5"),
        ({"lr": "fast"}, "lr to be a number, got .fast."),
        ({"compile": 1}, "compile to be True or False, got 1"),
        ({"precision": "fp16"}, "precision to be one of float32, bf16, got 'fp16'"),
        ({"accumulate": 3}, "batch to be a multiple of accumulate = 3, got 4"),
        ({"first_block": 17}, "first_block from 1 to block = 16, got 17"),
        ({"first_block": 2}, "first_block and grow_steps together, got .* = 0"),
        ({"grow_steps": 2}, "first_block and grow_steps together, got .* None"),
        ({"carry": True, "first_block": 2}, "at most, got first_block and carry"),
        ({}, r"block \+ 1 = 17 characters .* got 90 and 10"),
        # Each of the twelve windows is in a separate row.
        (
            {"carry": True, "block": 7, "batch": 12},
            r"\* \(block \+ 1\) = 96 .* in order, got 90",
        ),
    ],
)
def test_refuses(changes, message):
    with pytest.raises((ValueError, CorpusError), match=message):
        Trainer(config(**changes), "x" * 100)


def test_refuses_to_divide_the_model(monkeypatch):
    from accelerate import Accelerator, DistributedType

    monkeypatch.setattr(Accelerator, "distributed_type", DistributedType.FSDP)
    with pytest.raises(ValueError, match=r"divides it \(FSDP\): checkpoints and"):
        Trainer(SMALL, TEXT)


def test_divergence_stops_and_names_where_it_began(tmp_path):
    trainer = Trainer(config(layers=3), TEXT)
    with torch.no_grad():
        trainer.model.blocks[1].mixer.to_v.weight.fill_(1e30)
        trainer.model.blocks[1].mixer.to_out.weight.fill_(1e30)
    said = r"first output that is not: blocks\.1\.mixer"
    with pytest.raises(FloatingPointError, match=said):
        next(trainer.run())
    with torch.no_grad():
        trainer.model.embedding.weight.fill_(float("inf"))
    with pytest.raises(FloatingPointError, match=r"result of step 0 .* embedding"):
        trainer.save(tmp_path / "model")
    assert not (tmp_path / "model").exists()


# --- checkpoints -----------------------------------------------------


@pytest.fixture(scope="module")
def once(tmp_path_factory):
    trainer = Trainer(SMALL, TEXT)
    list(trainer.run())
    path = tmp_path_factory.mktemp("once") / "model"
    trainer.save(path)
    assert [p.name for p in path.parent.iterdir()] == ["model"]  # No other file exists.
    return trainer, path


@pytest.fixture
def trained(once, tmp_path):
    """Return a trained `Trainer`, and the path of a copied checkpoint."""
    trainer, path = once
    return trainer, Path(shutil.copy(path, tmp_path / "model"))


def rewrite(path, **changes):
    """Change the header of a checkpoint, and update its checksum."""
    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        header = file.metadata() | changes
    del header["sha256"]
    header["sha256"] = checkpoint._checksum(header, tensors)
    save_file(tensors, path, header)


def flip(path, seed):
    content, draw = bytearray(path.read_bytes()), random.Random(seed)
    content[draw.randrange(8, len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        *((partial(flip, seed=i), "") for i in range(9)),
        (lambda p: p.write_bytes(p.read_bytes()[:-100]), "is damaged or not"),
        (lambda p: p.unlink(), "there is no checkpoint"),
        (lambda p: save_file({"x": torch.zeros(2)}, p), "not a checkpoint of fwlab"),
        (lambda p: rewrite(p, fwlab="9"), "format 1 in its header, got 9"),
        (
            lambda p: rewrite(p, config='{"mixer": "softmax"}'),
            "does not contain the model of its header: .*issing key",
        ),
    ],
)
def test_a_damaged_checkpoint(trained, damage, message):
    """`load` reports a damaged checkpoint, or another kind of file, in one line."""
    damage(trained[1])
    with pytest.raises(CheckpointError, match=message) as info:
        load(trained[1])
    assert "\n" not in str(info.value) and str(trained[1]) in str(info.value)


def test_resume_refuses_another_text(trained):
    _, path = trained
    with pytest.raises(CheckpointError, match="trained on another text"):
        Trainer(SMALL, TEXT[::-1], resume=load(path))  # The characters are equal.
    # A text that only has a new name continues the run.
    assert Trainer(config(corpus="moved.txt"), TEXT, resume=load(path)).step == 12


def fail(*_):
    raise OSError("disk full")


def test_failed_save_keeps_the_old_file(trained, monkeypatch):
    trainer, path = trained
    before = path.read_bytes()
    with pytest.raises(CheckpointError, match="cannot write"):
        trainer.save(path / "below-a-file" / "model")
    monkeypatch.setattr("fwlab.training.checkpoint.serialize", fail)
    with pytest.raises(CheckpointError, match=r"cannot write .*disk full"):
        trainer.save(path)
    assert path.read_bytes() == before and [*path.parent.iterdir()] == [path]


# --- the command line ------------------------------------------------

FAST = ["--layers", "1", "--heads", "2", "--d-model", "16", "--block", "16"]
FAST += ["--batch", "2", "--steps", "6", "--eval-every", "3", "--eval-windows", "2"]
FAST += ["--device", "cpu"]
TRAIN = ["train", "--corpus", "text.txt", *FAST]
RUN = [*TRAIN, "--out", "run"]


@pytest.fixture
def fwlab(monkeypatch, tmp_path):
    """Return a function that runs `fwlab` in a folder with a text."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text(TEXT)
    # Shorten samples, which take most of the time of small runs.
    sample = Trainer.sample
    monkeypatch.setattr(Trainer, "sample", lambda self, length: sample(self, length=4))
    return terminal.fwlab


@pytest.fixture
def run(fwlab, tmp_path):
    """Run `fwlab train`, and return the folder of the run."""
    assert fwlab(*RUN)[0] == 0
    return tmp_path / "run"


def result_of(folder):
    return json.loads((Path(folder) / "result.json").read_text("utf-8"))


def refused(*arguments):
    """Run a command that must fail with exit code 2; return the one-line error."""
    code, out, err = terminal.fwlab(*arguments)
    assert (code, err.count("\n")) == (2, 1)
    assert err.startswith("fwlab: ") and "Traceback" not in out + err
    return err


def test_the_files_of_a_run(fwlab, tmp_path):
    code, out, err = fwlab(*RUN, "--log-every", "2", "--tokens", "words")
    # Output to a file has no progress bar.
    assert code == 0 and "\r" not in out + err
    assert "words/s" in out and "nats per word" in out and "characters" not in out
    folder = tmp_path / "run"
    about = json.loads((folder / "config.json").read_text("utf-8"))
    result, last = result_of(folder), load(folder / "last")
    assert about["config"] == result["config"] == dataclasses.asdict(last.config)
    assert {"torch", "machine", "date", "commit", "command"} <= {*about} & {*result}
    assert result["curve"] == last.curve and [r[0] for r in last.curve] == [3, 6]
    assert result["validation_loss"] == last.curve[-1][-1]
    assert result["parameters"] == last.model.num_parameters()
    assert result["state_size"] == 2 * 8 * 16  # Each head has [value, DPFP features].
    assert 0 <= result["peak_mib"] < 2000
    rows = metrics(folder)
    assert [row["step"] for row in rows] == [2, 3, 4, 6]
    assert [row["step"] for row in rows if "validation_loss" in row] == [3, 6]
    found = {p.step: p.loss for p in Trainer(last.config).run()}
    assert all(abs(row["loss"] - found[row["step"]]) < 1e-6 for row in rows)
    assert last.step == 6


def test_best_has_the_lowest_validation_loss(fwlab, monkeypatch):
    found = iter([2.0, 1.0, 3.0])
    monkeypatch.setattr(Trainer, "evaluate", lambda *_: next(found))
    assert fwlab(*RUN, "--steps", "9")[0] == 0
    assert (load("run").step, load("run/last").step) == (6, 9)


def test_resume_and_what_it_says(fwlab):
    """Resuming rejects changed settings; more steps stretch the learning-rate curve."""
    train = [*TRAIN, "--out", "new", "--warmup", "1", "--lr", "0.01", "--resume"]
    assert "learning rate" not in fwlab(*train)[1]
    assert "nothing to do: new already has 6 steps" in fwlab(*train)[1]
    out = fwlab(*train, "--steps", "12")[1]
    rows = metrics(Path("new"))
    now = Config(lr=0.01, warmup=1, steps=12).lr_at(6)
    assert (
        "12 steps in place of 6 stretch the schedule of the learning rate: it was "
        f"{rows[1]['lr']:.2g} at step 6 and is {now:.2g} at step 7\n"
    ) in out
    assert [row[0] for row in result_of("new")["curve"]] == [3, 6, 9, 12]
    seconds = [row["seconds"] for row in rows]
    assert seconds == sorted(seconds)
    for option, value in (("lr", "0.1"), ("schedule", "noam"), ("dropout", "0.5")):
        said = f"the checkpoint is of another run: expected {option} "
        assert said in refused(*train, "--steps", "12", f"--{option}", value)
    noam = [*TRAIN, "--out", "noam", "--schedule", "noam", "--resume"]
    assert "learning rate" not in fwlab(*noam)[1] + fwlab(*noam, "--steps", "9")[1]


def test_a_run_is_not_overwritten(fwlab, run):
    before = (run / "metrics.jsonl").read_bytes()
    assert "--resume continues it, and --out" in refused(*RUN)
    # A run cannot continue while another process trains it, or with fewer steps.
    with locked(run):
        said = f"but process {os.getpid()} on "
        assert said in refused(*RUN, "--resume", "--steps", "9")
    assert "steps to be at least 6" in refused(*RUN, "--steps", "4", "--resume")
    assert (run / "metrics.jsonl").read_bytes() == before
    # The error names a damaged `last`, and recommends `best`.
    last = run / "last" / "checkpoint.safetensors"
    last.write_bytes(last.read_bytes()[:-9])
    said = "remove it, and --resume continues from run/best/checkpoint.safetensors"
    assert said in refused(*RUN, "--resume")
    last.unlink()
    assert fwlab(*RUN, "--resume")[0] == 0


def test_a_result_is_one_of_the_last_checkpoint(fwlab, run, monkeypatch):
    """A result belongs to the last checkpoint, even if a run was killed."""
    whole = result_of(run)
    (run / "result.json").unlink()
    assert fwlab(*RUN, "--resume")[0] == 0
    again = result_of(run)
    for name in ("config", "curve", "sample", "validation_loss", "corpus_sha256"):
        assert again[name] == whole[name]
    assert again["first_step"] == 6 and again["tokens_per_second"] is None
    # A longer run removes the result before it writes a checkpoint.
    monkeypatch.setattr("fwlab.training.checkpoint.serialize", fail)
    assert "disk full" in refused(*RUN, "--resume", "--steps", "9")
    assert load("run/last").step == 6 and not (run / "result.json").exists()


def test_a_run_that_is_killed_three_times_is_the_same_run(tmp_path):
    """A run that is killed three times, at random moments, has the same results."""
    train = [*RUN, "--carry", "--dropout", "0.2", "--log-every", "1"]
    train += ["--steps", "90", "--eval-every", "5", "--resume"]
    for name in ("whole", "cut"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "text.txt").write_text(TEXT)
    whole, cut = (tmp_path / name / "run" for name in ("whole", "cut"))

    def start(folder):
        command = [sys.executable, "-m", "fwlab", *train]
        return subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL)

    def written():
        log = cut / "metrics.jsonl"
        return log.stat().st_mtime_ns if log.exists() else 0

    assert start(whole.parent).wait() == 0
    seconds = metrics(whole)[-1]["seconds"] / 4
    for moment in [random.random() for _ in range(3)]:
        print(moment)  # pytest prints the moment if the test fails.
        before, process = written(), start(cut.parent)
        while written() == before:  # Wait until training begins.
            time.sleep(0.01)
        time.sleep(moment * seconds)
        process.kill()
        assert process.wait() == -signal.SIGKILL
    (cut / ".result.json.12345678").write_text("half")
    (cut / ".env.template").write_text("a file of the user's own")
    assert start(cut.parent).wait() == 0
    (cut / ".env.template").unlink()
    for part in ("best", "last"):
        one, other = load(whole / part), load(cut / part)
        assert one.step == other.step and one.curve == other.curve
        same_weights(one.model, other.model)
        identical(one.state, other.state)
    rows = [[(r["step"], r["loss"]) for r in metrics(run)] for run in (whole, cut)]
    assert rows[0] == rows[1]
    assert result_of(cut)["sample"] == result_of(whole)["sample"]
    assert {p.name for p in cut.rglob("*")} == {p.name for p in whole.rglob("*")}


@pytest.fixture
def ctrl_c():
    """Restore the default effects of Ctrl-C and SIGTERM, which pytest may ignore."""
    numbers = signal.SIGINT, signal.SIGTERM
    before = [signal.signal(each, signal.default_int_handler) for each in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_saves_and_says_how_to_continue(fwlab, ctrl_c, monkeypatch, number):
    """Ctrl-C or SIGTERM saves a checkpoint, and prints how to continue."""
    step = Trainer._train_step

    def stop(trainer):
        if trainer.step == 3:
            os.kill(os.getpid(), number)
        return step(trainer)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_train_step", stop)
        code, _, err = fwlab(*RUN)
    assert code == 130
    assert "stopped after step 4" in err and "--resume continues" in err
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert load("run/last").step == 4
    # A run that was stopped between two validations can end there.
    shutil.copytree("run", "short")
    assert fwlab(*TRAIN, "--out", "short", "--steps", "4", "--resume")[0] == 0
    assert result_of("short")["validation_loss"] > 0
    assert fwlab(*RUN, "--resume")[0] == 0 and load("run/last").step == 6
    # Commands in the background of a shell ignore Ctrl-C.
    signal.signal(number, signal.SIG_IGN)
    monkeypatch.setattr(Trainer, "_train_step", stop)
    assert fwlab(*TRAIN, "--out", "ignored")[0] == 0
    same_weights(load("ignored/last").model, load("run/last").model)


@pytest.mark.parametrize("every", [1, 2, 3, 100])
def test_divergence_keeps_the_last_good_checkpoint(fwlab, tmp_path, monkeypatch, every):
    """Divergence in a step or a validation keeps the last finite checkpoint."""
    rate = lambda self, step: 1e38 if step > 2 else 1e-3  # noqa: E731
    monkeypatch.setattr(Config, "lr_at", rate)
    err = refused(*RUN, "--eval-every", str(every), "--log-every", "1")
    assert "is not finite" in err
    if every < 100:
        assert "run/last has an earlier state" in err
        assert load("run/last").step in (2, 3)
    else:
        assert "no checkpoint yet" in err and metrics(tmp_path / "run")


def test_plot(fwlab, run):
    assert fwlab("plot", "run", "--out", "all.svg")[:2] == (0, "all.svg\n")
    assert "<svg" in Path("all.svg").read_text("utf-8")
    rows = metrics(run)
    (validated, training), _ = (ax.lines for ax in learning_curves({"run": rows}).axes)
    assert [*validated.get_xdata()] == [3, 6]
    assert [*training.get_ydata()] == [row["loss"] for row in rows]
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 9, "lo')  # The process was killed while writing the line.
    assert metrics(run) == rows
    assert "expected a run of fwlab train in nowhere" in refused("plot", "nowhere")


def test_trackers(fwlab, monkeypatch):
    from accelerate import Accelerator

    seen = {}
    monkeypatch.setattr(Accelerator, "init_trackers", lambda *_, **__: None)
    monkeypatch.setattr(
        Accelerator, "log", lambda self, x, step: seen.update({step: x})
    )
    filtered = "accelerate.accelerator.filter_trackers"
    monkeypatch.setattr(filtered, lambda with_, *_: with_)
    assert fwlab(*RUN, "--track", "tensorboard")[0] == 0
    assert [*seen] == [3, 6] and {"loss", "validation_loss", "lr"} <= {*seen[3]}
    monkeypatch.setattr(filtered, lambda *_: [])
    said = "expected wandb to be installed: pip install wandb"
    assert said in fwlab(*TRAIN, "--track", "wandb")[2]


def test_dry_run(fwlab, tmp_path):
    code, out, _ = fwlab(*TRAIN, "--dry-run")
    assert code == 0 and "of 2 windows" in out and "6 steps take" in out
    assert not (tmp_path / "runs").exists()
    # A backward pass costs two forward passes; the weights give a lower bound.
    least = 4 * 2 * 16 * new_model(SMALL, 28).num_parameters()
    assert least < float(re.search(r"operations (\S+) per step", out)[1]) < 5 * least


def test_threads(fwlab, monkeypatch):
    """Training uses one thread, `--threads` threads, or OMP_NUM_THREADS."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    seen = []
    monkeypatch.setattr(torch, "set_num_threads", seen.append)
    fwlab(*TRAIN, "--dry-run")
    fwlab(*TRAIN, "--dry-run", "--threads", "3")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    fwlab(*TRAIN, "--dry-run")
    assert seen == [1, 3]


def test_a_hybrid_stack_trains_and_generates(fwlab, tmp_path):
    """A hybrid stack trains, and generates text with the checkpoint's options."""
    options = "--like kimi --conv 3 --out-norm --out-gate --beta-max 2 --rope 0.5"
    options += " --norm rms --mlp swiglu --layers 3 --mixer delta*2,softmax"
    assert fwlab(*TRAIN, *options.split())[0] == 0
    path = str(tmp_path / "runs" / "delta-2-softmax")
    model = load(path).model
    fast, again, attention = (block.mixer for block in model.blocks)
    for mixer in (fast, again):
        assert (mixer.rule, mixer.conv.size, mixer.beta_max) == ("delta", 3, 2)
        assert mixer.out_norm is not None and mixer.out_gate == "silu"  # not Kimi's
        assert isinstance(mixer.to_gate, torch.nn.Sequential)  # Kimi's
    assert attention.rope == 0.5 and model.positions is None
    assert isinstance(model.norm, torch.nn.RMSNorm)
    assert model.blocks[0].gate is not None
    code, out, _ = fwlab("generate", path, "--length", "40", "--seed", "1")
    assert code == 0 and len(out) > 40  # The text is longer than a window.


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "--corpus", "none.txt"], "cannot read the corpus file none.txt"),
        (["train", "--corpus", "empty.txt"], "empty.txt is empty"),
        (["train", "--threads", "0"], "threads to be at least 1, got 0"),
        (["train", "--device", "meta"], "got 'meta'"),
        (["train", "--out", "text.txt"], "text.txt to be a folder, got a file"),
        (["train", "--d-model", "2000000000"], "not enough memory"),
        (["generate", "none"], "there is no checkpoint none"),
        (["generate", "text.txt"], "text.txt is damaged or not a safetensors file"),
        # An empty value, for example of an unset variable, would be the current folder.
        (["train", "--out="], "got an empty one: perhaps a shell variable"),
        (["look", "run", "--text", ""], "got an empty one: perhaps a shell variable"),
    ],
)
def test_wrong_input_is_one_sentence_and_exit_code_2(
    fwlab, tmp_path, arguments, message
):
    (tmp_path / "empty.txt").write_text("\n")
    if arguments[0] == "train" and "--corpus" not in arguments:
        arguments = [*arguments, "--corpus", "text.txt"]
    assert message in refused(*arguments)
    assert not [*tmp_path.glob("runs/*/*.json")]


def test_what_to_type_next(fwlab):
    """The commands printed at the end of a run work, even with a space in the path."""
    arguments = [*TRAIN, "--mixer", "sum,softmax", "--layers", "2", "--out", "a run"]
    _, _, said = fwlab(*arguments)[1].partition("\nnext:\n")
    commands = [shlex.split(line) for line in said.splitlines()]
    assert [name for _, name, *_ in commands] == ["generate", "look", "plot", "train"]
    *_, again = [fwlab(*command[1:]) for command in commands]
    assert {*os.listdir("a run")} >= {"look.svg", "curves.svg"}
    assert result_of("a run")["config"]["steps"] == 12
    # The next command doubles the steps again; options do not accumulate.
    _, _, said = again[1].partition("\nnext:\n")
    *_, last = map(shlex.split, said.splitlines())
    assert last == [each.replace("12", "24") for each in commands[-1]]
    # Without fast weights, `fwlab look` is not recommended.
    assert "fwlab look" not in fwlab(*TRAIN, "--mixer", "softmax")[1]


def test_generate(fwlab, run):
    arguments = "generate", "run", "--prompt", "the q", "--length", "20", "--seed", "1"
    code, out, _ = fwlab(*arguments)
    assert code == 0 and out.startswith("the q") and len(out) == 26
    assert fwlab(*arguments)[1] == out
    for option, value, message in (
        ("--prompt", "Ä", "'Ä'"),
        ("--prompt", "", "expected a prompt of at least one character"),
        ("--length", "-1", "length to be 0 or more, got -1"),
    ):
        assert message in refused("generate", "run", option, value)


def test_without_the_extra(monkeypatch, capsys):
    from fwlab.__main__ import main

    monkeypatch.setitem(sys.modules, "tyro", None)
    monkeypatch.delitem(sys.modules, "fwlab.cli")
    with pytest.raises(SystemExit, match="2"):
        main()
    said = 'needs the package tyro: pip install "fwlab[train]"\n'
    assert capsys.readouterr().err == f"fwlab: the command line {said}"


def test_info(fwlab):
    code, out, _ = fwlab("info")
    assert code == 0 and torch.__version__ in out and "naive, efficient" in out


def test_no_shell_ends_a_training(tmp_path):
    """An ASCII terminal or a closed pipe does not stop training."""
    (tmp_path / "text.txt").write_text("žluťoučký kůň úpěl. " * 200, "utf-8")
    train = shlex.join([sys.executable, "-m", "fwlab", *RUN])
    env = os.environ | {"PYTHONIOENCODING": "ascii"}
    subprocess.run(["bash", "-c", f"{train} 2>&- | head -1"], cwd=tmp_path, env=env)
    assert result_of(tmp_path / "run") and load(tmp_path / "run").step == 6


def test_a_closed_pipe_ends_other_commands_silently():
    """A closed pipe, such as of `head -1`, ends other commands without an error."""
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "fwlab", "exercises", "list"]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, b"")
