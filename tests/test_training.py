"""Training, checkpoints, and the command line around them."""

import dataclasses
import itertools
import json
import math
import os
import platform
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import terminal
import torch
from alike import identical
from safetensors import safe_open
from safetensors.torch import save_file
from torch.multiprocessing import ProcessExitedException

from fwlab import cli
from fwlab.data import CorpusError
from fwlab.models import MIXERS
from fwlab.plots import learning_curves
from fwlab.training import (
    Checkpoint,
    CheckpointError,
    Config,
    Trainer,
    load,
    loop,
    memory,
    save,
    validation,
)
from fwlab.training.checkpoint import FIRST, new_model
from fwlab.training.lock import locked
from fwlab.training.plan import plan
from fwlab.training.presets import PRESETS
from fwlab.training.run_folder import metrics

TEXT = "the quick brown fox jumps over the lazy dog. " * 60
SMALL = Config(
    layers=1,
    heads=2,
    d_model=16,
    block=16,
    batch=4,
    steps=12,
    warmup=2,
    eval_every=6,
    lr=1e-2,
    device="cpu",
)


def config(**changes):
    return dataclasses.replace(SMALL, **changes)


def losses(trainer):
    return [progress.loss for progress in trainer.run()]


def same_weights(one, other):
    identical(one.state_dict().values(), other.state_dict().values())


@pytest.mark.parametrize("mixer", MIXERS)
def test_it_learns(mixer):
    trainer = Trainer(config(mixer=mixer, steps=20, eval_every=10), TEXT)
    run = list(trainer.run())
    assert [p.step for p in run] == list(range(1, 21))
    assert run[0].loss == pytest.approx(math.log(len(trainer.vocabulary)), abs=0.3)
    assert run[-1].val_loss < 2.7  # by frequencies alone: 3.05
    assert [p.step for p in run if p.val_loss is not None] == [10, 20]


def test_same_seed_same_model():
    models = []
    for seed in (1, 1, 2):
        trainer = Trainer(config(seed=seed), TEXT)
        list(trainer.run())
        models.append(torch.cat([p.flatten() for p in trainer.model.parameters()]))
    assert torch.equal(models[0], models[1])
    assert not torch.equal(models[0], models[2])


def stopped(trainer, folder):
    """Train five steps; returns the path of the checkpoint after them."""
    for progress in trainer.run():
        if progress.step == 5:
            break
    trainer.save(folder / "half")
    return folder / "half"


CARRIED_BY = ("delta", "sum", "transformer-xl", "feedback")


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"mixer": "softmax", "attention_dropout": 0.3},
        *({"mixer": mixer, "carry": True} for mixer in CARRIED_BY),
    ],
    ids=str,
)
def test_resume_is_as_if_never_stopped(tmp_path, changes):
    """Also where numbers are drawn: the generator has moved on in between."""
    c = config(**changes)
    whole = Trainer(c, TEXT)
    expected = losses(whole)
    half = load(stopped(Trainer(c, TEXT), tmp_path))
    second = Trainer(c, TEXT, resume=half)
    torch.rand(1)
    assert losses(second) == expected[5:]
    same_weights(second.model, whole.model)
    if c.carry:
        damaged = half._replace(state=())
        if c.mixer != "feedback":
            assert losses(Trainer(c, TEXT, resume=damaged)) != expected[5:]
        too_many = half._replace(state=[*half.state[:1]] * 99)
        with pytest.raises(CheckpointError, match="carried state"):
            Trainer(c, TEXT, resume=too_many)


def test_the_scale_of_half_precision_survives_a_stop(tmp_path, monkeypatch):
    """float16 is refused on a CPU, but its scaler works there."""

    def with_scaler(*arguments):
        prepared = accelerator(*arguments)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=4)
        prepared.scaler = scaler
        return prepared

    accelerator = loop.devices.accelerator
    monkeypatch.setattr(loop.devices, "accelerator", with_scaler)
    whole = Trainer(SMALL, TEXT)
    expected = losses(whole)
    assert 1 < whole.accelerator.scaler.get_scale() < 2.0**127
    half = stopped(Trainer(SMALL, TEXT), tmp_path)
    second = Trainer(SMALL, TEXT, resume=load(half))
    assert losses(second) == expected[5:]
    assert (
        second.accelerator.scaler.state_dict() == whole.accelerator.scaler.state_dict()
    )
    # Others have none, and precision may change.
    monkeypatch.undo()
    assert losses(Trainer(SMALL, TEXT, resume=load(half)))


def test_rows_without_targets():
    """One token is left for the last row of an epoch, and nothing follows it."""
    trainer = Trainer(config(pack=True, steps=5), TEXT[:215])
    assert len(trainer.train_tokens) == 3 * 4 * 16 + 1
    first, second, third, fourth, fifth = losses(trainer)
    assert fourth == 0 and all([first, second, third]) and fifth > 0
    # The same in validation.
    trainer = Trainer(config(pack=True), (TEXT * 8)[: 10 * (128 * 16 + 1)])
    assert len(trainer.val_tokens) == 128 * 16 + 1
    assert trainer.evaluate() == trainer.evaluate(128) > 0


@pytest.mark.parametrize("pack", [False, True])
def test_validation_of_many_words_takes_little_memory(monkeypatch, pack):
    c = config(pack=pack)
    expected = Trainer(c, TEXT).evaluate()
    monkeypatch.setattr(validation, "LOGITS", 3 * 28 * 16)
    trainer = Trainer(c, TEXT)
    assert len(trainer.vocabulary) == 28
    seen = []
    trainer.model.register_forward_hook(
        lambda *arguments: seen.append(arguments[2].numel())
    )
    # Where a row ends, a document is cut.
    assert trainer.evaluate() == pytest.approx(expected, abs=2e-3 if pack else 1e-6)
    assert len(seen) > 1 and max(seen) <= validation.LOGITS


def test_growing_windows():
    c = config(first_block=4, grow_steps=6)
    trainer = Trainer(c, TEXT)
    lengths = [trainer._batch().inputs.shape[1]]
    for progress in trainer.run():
        trainer.step = progress.step
        lengths.append(trainer._batch().inputs.shape[1])
    assert lengths == [4, 6, 8, 10, 12, 14] + [16] * 7
    assert progress.tokens == 4 * (4 + 6 + 8 + 10 + 12 + 14 + 6 * 16)


@pytest.mark.parametrize("way", ["accumulate", "checkpointing"])
def test_less_memory_same_training(way):
    usual = Trainer(config(layers=2), TEXT)
    saving = Trainer(
        config(layers=2, **{way: 2 if way == "accumulate" else True}), TEXT
    )
    kept = []
    for trainer in (usual, saving):
        saved = []

        def keep(x, saved=saved):
            saved.append(x.numel())
            return x

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            trainer._loss(*trainer._batch()[:2])[0].backward()
        kept.append(sum(saved))
        trainer.optimizer.zero_grad()
    a, b = losses(usual), losses(saving)
    assert a == pytest.approx(b, abs=1e-5)
    if way == "checkpointing":
        assert a == b and kept[1] < kept[0] / 2


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
    """A folder of documents, and a stop in between."""
    (tmp_path / "texts").mkdir()
    for i in range(12):
        words = "a quick fox jumps over some lazy dogs " * (3 + i % 4)
        (tmp_path / "texts" / f"{i:02}.txt").write_text(words + "\n")
    c = config(corpus=str(tmp_path / "texts"), tokens="words", pack=True)
    whole = Trainer(c)
    assert len(whole.vocabulary) == 10  # with <eos> and <unk>
    batch = whole._batch()
    assert batch.inputs.shape == (1, 4 * 16)
    begins = batch.cu_seqlens[:-1].long()
    inside = (batch.inputs[0, begins] == whole.vocabulary.encode("a")).sum()
    assert len(begins) > 1 and inside >= len(begins) - 1
    run = losses(whole)
    assert run[-1] < run[0]
    # As if each document stood alone.
    text, alone = whole.text.valid, []
    for start, end in itertools.pairwise(text.borders.tolist()):
        tokens = text.tokens[None, start:end]
        y = whole.model(tokens[:, :-1])[0]
        alone.append(
            torch.nn.functional.cross_entropy(y, tokens[0, 1:], reduction="none")
        )
    assert whole.evaluate() == pytest.approx(torch.cat(alone).mean().item(), rel=1e-5)
    second = Trainer(c, resume=load(stopped(Trainer(c), tmp_path)))
    assert losses(second) == run[5:]
    assert second.sample(length=3).count(" ") <= 3


#: What their papers and pages say, to the digits that they give.
PUBLISHED = {"wt103-small": 40e6, "wt103-medium": 90e6, "transformer-xl": 90.9e6}


@pytest.mark.parametrize("name", PRESETS)
def test_presets(name):
    """Their sizes, also as the table of their page tells them."""
    preset = PRESETS[name]
    c = preset.config
    with torch.device("meta"):
        model = new_model(c, preset.vocabulary)
    count = sum(p.numel() for p in model.parameters())
    if name in PUBLISHED:
        assert count == pytest.approx(PUBLISHED[name], rel=0.1)
    if name.startswith("labml"):
        # Noam's factor 1 with 2000 steps of warm-up.
        published = c.d_model**-0.5 * 5000**-0.5
        assert c.lr_at(4999) == pytest.approx(published, rel=1e-3)
    assert preset.source and c.batch % c.accumulate == 0

    page = (Path(cli.__file__).parents[1] / "docs/training.md").read_text("utf-8")
    told = [
        cell.strip("` ")
        for row in re.findall(rf"^\| `{name}` \|(.*)\|$", page, re.MULTILINE)
        for cell in row.split(" | ")
    ]
    source, parameters, operations, steps, *times = told
    assert parameters == f"{count / 1e6:.1f} M"
    assert source == preset.source and steps == f"{c.steps:,}"
    # Six operations for each weight and token, and those of the mixers.
    factor, power = re.findall(r"[\d.]+", operations.replace("10^", ""))
    least = 6 * count * c.batch * c.block
    assert 0.7 * least < float(factor) * 10 ** int(power) < 3 * least
    assert ["–" not in each for each in times] == [c.batch % n == 0 for n in (1, 8, 64)]


def test_dry_run(fwlab, tmp_path):
    code, out, _ = fwlab(*TRAIN, "--dry-run")
    assert code == 0 and "of 2 windows" in out and "6 steps take" in out
    assert not (tmp_path / "runs").exists()
    one, two = (plan(config(batch=n), 30) for n in (2, 4))
    model = new_model(SMALL, 30)
    assert one.parameters == sum(p.numel() for p in model.parameters())
    assert two.operations == 2 * one.operations
    # Forward, and twice as many backward: at least those of the weights.
    assert one.operations >= 6 * 2 * 16 * sum(
        p.numel() for p in model.parameters() if p.dim() == 2
    )
    assert one.kept < two.kept < 2.5 * one.kept
    # A step of fewer windows counts for all.
    assert plan(config(batch=4, accumulate=2), 30).operations == two.operations
    assert fwlab("train", "--preset", "nix")[0] == 2


def test_options_change_a_preset(monkeypatch):
    seen = []
    monkeypatch.setattr(cli, "run_in", lambda folder, c, *_: seen.append((folder, c)))
    monkeypatch.setattr(cli, "_say_next", lambda run: None)
    name = "nanogpt-gpu"
    for more in (["--preset", name], [f"--preset={name}", "--lr", "1"], []):
        monkeypatch.setattr(sys, "argv", ["fwlab", "train", *more])
        cli.main()
    (folder, first), (_, second), (_, third) = seen
    assert folder.name == name and first == PRESETS[name].config
    assert second == dataclasses.replace(first, lr=1.0) and third == Config()


def test_plot(fwlab, run):
    code, out, _ = fwlab("plot", "run", "--out", "all.svg")
    assert (code, out) == (0, "all.svg\n")
    assert "<svg" in run.with_name("all.svg").read_text("utf-8")
    rows = metrics(run)
    figure = learning_curves({"run": rows})
    (validation, training), _ = (ax.lines for ax in figure.axes)
    assert [*validation.get_xdata()] == [3, 6]
    assert [*training.get_ydata()] == [row["loss"] for row in rows]
    with open(run / "metrics.jsonl", "ab") as file:
        file.write(b'null\n7\n{"step": 9}\n\xff\n' + b"[" * 10**5)
        whole = rows[0]
        for name, x in itertools.product(whole, ("7", None, [1], True, 1e400, 1e200)):
            file.write(f"\n{json.dumps({**whole, name: x})}".encode())
    assert metrics(run) == rows
    assert fwlab("plot", "run")[0] == 0
    assert "expected a run of fwlab train in nowhere" in refused("plot", "nowhere")


def test_metrics_go_to_a_tracker(fwlab, tmp_path, monkeypatch):
    from accelerate import Accelerator

    seen = []
    monkeypatch.setattr(Accelerator, "init_trackers", lambda self, name, config: None)
    monkeypatch.setattr(
        Accelerator, "log", lambda self, values, step: seen.append((step, {*values}))
    )
    monkeypatch.setattr(
        "accelerate.accelerator.filter_trackers", lambda with_, *_: with_
    )
    assert fwlab(*TRAIN, "--out", "run", "--track", "tensorboard")[0] == 0
    assert [step for step, _ in seen] == [3, 6]
    assert {"loss", "validation_loss", "lr"} <= seen[0][1]


def test_a_tracker_that_is_not_installed(fwlab, monkeypatch, tmp_path):
    monkeypatch.setattr("accelerate.accelerator.filter_trackers", lambda *_: [])
    code, _, err = fwlab(*TRAIN, "--track", "wandb")
    assert code == 2 and "expected wandb to be installed: pip install wandb" in err
    assert not (tmp_path / "runs").exists()


def test_bf16_and_compile(monkeypatch):
    full = losses(Trainer(SMALL, TEXT))
    half = Trainer(config(precision="bf16"), TEXT)
    seen = []
    half.model.blocks[0].mixer.to_q.register_forward_hook(
        lambda module, inputs, y: seen.append(y.dtype)
    )
    lower = losses(half)
    assert torch.bfloat16 in seen
    assert lower != full and lower == pytest.approx(full, abs=0.05)
    assert next(half.model.parameters()).dtype == torch.float32
    monkeypatch.setattr("fwlab.training.devices._compiler", lambda: "g++")
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "eager")
    compiled = Trainer(config(compile=True, steps=2), TEXT)
    assert losses(compiled) == pytest.approx(full[:2], abs=1e-5)


def test_learning_rate():
    c = Config()
    noam = Config(schedule="noam")
    assert noam.lr_at(99) == c.lr_at(99) and noam.lr_at(100) == pytest.approx(1e-3)
    assert noam.lr_at(403) == pytest.approx(0.5e-3)  # four times as many steps
    assert c.lr_at(0) == pytest.approx(1e-3 / 101)
    assert c.lr_at(100) == pytest.approx(1e-3)
    assert c.lr_at(1050) == pytest.approx(5.5e-4)
    assert c.lr_at(2000) == pytest.approx(1e-4)


def test_evaluation_is_the_mean_over_the_validation_text():
    trainer = Trainer(SMALL, TEXT)
    block, tokens = SMALL.block, trainer.val_tokens
    losses = []
    for start in range(0, len(tokens) - block, block):
        logits = trainer.model(tokens[None, start : start + block])[0]
        log_p = torch.log_softmax(logits, -1)
        targets = tokens[start + 1 : start + block + 1]
        losses.append(-log_p[torch.arange(block), targets].mean())
    assert trainer.evaluate() == pytest.approx(torch.stack(losses).mean().item())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads": 3}, "d_model=16 and heads=3"),
        ({"mixer": "dleta"}, "mixer to be one of .* got 'dleta'"),
        ({"device": "gpu"}, "device to be .* got 'gpu'"),
        ({"precision": "fp16"}, "float32 or bf16 on a CPU"),
        ({"mixer": "softmax", "carry": True}, "'softmax', which ends after 16"),
        ({"mixer": "feedback", "pack": True}, "packed documents apart, got 'feedback'"),
        ({"steps": 0}, "steps to be at least 1"),
        ({"lr": float("nan")}, "lr to be 0 or more"),
        ({"beta2": 1.0}, "beta2"),
        ({"seed": 1.5}, "seed to be an integer, got 1.5"),
        ({"layers": True}, "layers to be an integer, got True"),
        ({"d_ff": "64"}, "d_ff to be an integer or None, got .64."),
        ({"lr": "fast"}, "lr to be a number, got .fast."),
        ({"compile": 1}, "compile to be True or False, got 1"),
        ({"schedule": "linear"}, "schedule to be one of cosine, noam, got 'linear'"),
        ({"accumulate": 3}, "batch to be a multiple of accumulate = 3, got 4"),
        ({"first_block": 17}, "first_block from 1 to block = 16, got 17"),
        ({"first_block": 2}, "first_block and grow_steps together, got .* = 0"),
        ({"grow_steps": 2}, "first_block and grow_steps together, got .* None"),
        ({"carry": True, "first_block": 2}, "at most, got first_block and carry"),
        ({"dropout": 1.0}, "dropout from 0 to 1"),
    ],
)
def test_refuses(changes, message):
    with pytest.raises(ValueError, match=message):
        Trainer(config(**changes), TEXT)


def test_short_text():
    said = r"block \+ 1 = 17 characters .* got 90 and 10"
    with pytest.raises(CorpusError, match=said):
        Trainer(SMALL, "x" * 100)
    # A row of the text for each of the twelve windows.
    said = r"\* \(block \+ 1\) = 96 .* in order, got 90"
    with pytest.raises(CorpusError, match=said):
        Trainer(config(carry=True, block=7, batch=12), "x" * 100)


def test_divergence_stops_and_names_where_it_began():
    trainer = Trainer(config(layers=3), TEXT)
    with torch.no_grad():
        trainer.model.blocks[1].mixer.to_v.weight.fill_(1e30)
        trainer.model.blocks[1].mixer.to_out.weight.fill_(1e30)
    said = r"first output that is not: blocks\.1\.mixer"
    with pytest.raises(FloatingPointError, match=said):
        next(trainer.run())
    with torch.no_grad():
        trainer.model.embedding.weight.fill_(float("inf"))
    said = "loss of step 1 is not finite; the parameter embedding.weight is not"
    with pytest.raises(FloatingPointError, match=said):
        next(trainer.run())


@pytest.fixture(scope="module")
def once(tmp_path_factory):
    trainer = Trainer(SMALL, TEXT)
    list(trainer.run())
    path = tmp_path_factory.mktemp("once") / "model"
    trainer.save(path)
    return trainer, path


@pytest.fixture
def trained(once, tmp_path):
    """A trainer at its end, and a copy of its checkpoint to damage."""
    trainer, path = once
    return trainer, shutil.copy(path, tmp_path / "model")


def test_checkpoint_round_trip(trained):
    trainer, path = trained
    loaded = load(path)
    assert (loaded.config, loaded.step) == (SMALL, 12)
    assert loaded.vocabulary.alphabet == trainer.vocabulary.alphabet
    tokens = trainer.val_tokens[None, :16]
    assert torch.equal(loaded.model(tokens), trainer.model(tokens))
    assert loaded.curve == trainer.curve
    assert [row[0] for row in loaded.curve] == [6, 12]
    assert [p.name for p in path.parent.iterdir()] == ["model"]  # no leftovers


def test_checkpoints_of_the_first_version_load(trained):
    """They had no d_ff, no options of layers, and no checksum."""
    _, path = trained
    old = {name: getattr(SMALL, name) for name in FIRST}
    rewrite(path, config=json.dumps(old), sha256="")
    assert load(path).config == SMALL


@pytest.mark.parametrize("seed", range(20))
def test_a_flipped_bit_is_noticed(trained, seed):
    _, path = trained
    content = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(content[:8], "little")  # the tensors
    place = random.Random(seed).randrange(start, len(content))
    content[place] ^= 1 << seed % 8
    path.write_bytes(content)
    with pytest.raises(CheckpointError):
        load(path)
    rewrite(path)  # the same contents, and a header of the same length
    with pytest.raises(CheckpointError):
        load(path)


def rewrite(path, tensors=None, **header):
    with safe_open(path, "pt") as file:
        old = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        metadata = file.metadata() | header
    save_file({**old, **(tensors or {})}, path, metadata)


def header(**changes):
    """Another header: text as it is, and changes of the configuration."""
    text = {name: changes.pop(name) for name in {*changes} - {*vars(SMALL)}}
    text_in_json = json.dumps(dataclasses.asdict(config(**changes)))
    return lambda path: rewrite(path, **{"config": text_in_json} | text)


def tensor(name, value):
    return lambda path: rewrite(path, {name: value})


ENDLESS = json.dumps(dataclasses.asdict(SMALL)).replace
NORM, DAMAGED = "model.norm.weight", "header of .* is damaged"
DAMAGE = {
    "truncated": (lambda p: p.write_bytes(p.read_bytes()[:-100]), "is damaged"),
    "header cut": (lambda p: p.write_bytes(p.read_bytes()[:20]), "is damaged"),
    "empty": (lambda p: p.write_bytes(b""), "is damaged"),
    "text": (lambda p: p.write_text("hello"), "is damaged"),
    "missing": (lambda p: p.unlink(), "there is no checkpoint"),
    "foreign": (
        lambda p: save_file({"x": torch.zeros(2)}, p),
        "not a checkpoint of fwlab train",
    ),
    "other model": (
        header(mixer="softmax"),
        "does not contain the softmax model .* weight .* got",
    ),
    "other shape": (
        tensor(NORM, torch.zeros(3)),
        r"norm.weight of shape \[16\], got \[3\]",
    ),
    "not finite": (
        tensor(NORM, torch.full((16,), torch.nan)),
        "norm.weight to be finite",
    ),
    "bad header": (header(config="{}"), DAMAGED),
    "other format": (header(fwlab="9"), "format 1, got 9"),
    "negative step": (header(step="-4"), "step to be 0 or more, got -4"),
    "huge sizes": (header(d_model=10**6), "does not contain the delta model"),
    "optimiser of nothing": (
        tensor("adam.exp_avg.nothing", torch.zeros(2)),
        "optimiser state exp_avg.nothing belongs to no weight",
    ),
    "optimiser cut": (
        tensor("adam.exp_avg.norm.weight", torch.zeros(3)),
        r"exp_avg of norm.weight of shape \[16\], got \[3\]",
    ),
    "whole numbers": (
        tensor(NORM, torch.ones(16, dtype=torch.int64)),
        "norm.weight of dtype torch.float32, got torch.int64",
    ),
    "changed step": (lambda p: rewrite(p, step="11"), "its checksum is wrong"),
    "bad curve": (header(curve="[[1]]"), "rows of three numbers"),
    "odd name": (tensor("adam.x", torch.zeros(2)), "belongs to no weight"),
    "bad scaler": (header(scaler='{"scale": NaN, "_growth_tracker": 1}'), DAMAGED),
    "bad step": (header(step="many"), DAMAGED),
    "many layers": (header(layers=10**4), "expected layers to be at most"),
    "an endless width": (header(config=ENDLESS(": 16", ": " + "8" * 400)), DAMAGED),
    "an endless rate": (header(config=ENDLESS("0.01", "8" * 400)), DAMAGED),
    "half a seed": (
        header(config=ENDLESS("1337", "1.5")),
        "expected seed to be an integer, got 1.5",
    ),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGE.values(), ids=DAMAGE)
def test_damaged_checkpoints(trained, damage, message):
    _, path = trained
    damage(path)
    with pytest.raises(CheckpointError, match=message) as info:
        load(path)
    assert "\n" not in str(info.value)
    assert str(path) in str(info.value)


def test_resume_refuses_another_run(trained):
    _, path = trained
    with pytest.raises(CheckpointError, match="expected mixer 'sum', got 'delta'"):
        Trainer(config(mixer="sum"), TEXT, resume=load(path))
    with pytest.raises(CheckpointError, match="trained on another text"):
        Trainer(SMALL, TEXT[::-1], resume=load(path))  # the same alphabet
    # The same text by another name is the same run.
    assert Trainer(config(corpus="moved.txt"), TEXT, resume=load(path)).step == 12


def test_failed_save_keeps_the_old_file(trained, monkeypatch):
    trainer, path = trained
    before = path.read_bytes()

    def fail(tensors, file, header):
        file.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr("fwlab.training.checkpoint.save_file", fail)
    said = r"cannot write the checkpoint .*disk full"
    with pytest.raises(CheckpointError, match=said):
        trainer.save(path)
    assert path.read_bytes() == before
    assert [p.name for p in path.parent.iterdir()] == ["model"]


def test_save_where_nothing_can_be_written(trained, tmp_path):
    trainer, path = trained
    with pytest.raises(CheckpointError, match="cannot write"):
        trainer.save(path / "below-a-file" / "model")
    empty = Checkpoint(trainer.model, trainer.vocabulary, SMALL, 0, {}, [], "")
    save(tmp_path / "new" / "folder" / "model", empty)
    assert load(tmp_path / "new" / "folder" / "model").adam == {}


# --- the command line ------------------------------------------------

CZECH = "žluťoučký kůň úpěl. " * 200
FAST = [
    *("--layers", "1", "--heads", "2", "--d-model", "16", "--block", "16"),
    *("--batch", "2", "--steps", "6", "--eval-every", "3", "--eval-windows", "2"),
    *("--device", "cpu"),
]
TRAIN = ["train", "--corpus", "text.txt", *FAST]
RUN = [*TRAIN, "--out", "run"]


@pytest.fixture
def fwlab(monkeypatch, tmp_path):
    """Call the command in a folder with a text: exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text(TEXT)
    # Samples are most of the work of such small runs.
    sample = Trainer.sample
    monkeypatch.setattr(Trainer, "sample", lambda self, length: sample(self, length=4))
    return terminal.fwlab


@pytest.fixture
def run(fwlab, tmp_path):
    """The folder of a run that has ended."""
    assert fwlab(*RUN)[0] == 0
    return tmp_path / "run"


def result_of(folder):
    return json.loads((Path(folder) / "result.json").read_text("utf-8"))


def refused(*arguments):
    """The one sentence that the command ends in, with exit code 2."""
    code, out, err = terminal.fwlab(*arguments)
    assert (code, err.count("\n")) == (2, 1)
    assert err.startswith("fwlab: ") and "Traceback" not in out + err
    return err


def test_train_and_generate(fwlab):
    code, out, err = fwlab("train", "--mixer", "delta", "--corpus", "text.txt", *FAST)
    assert code == 0 and "validation loss" in out
    # As in a log file: lines only.
    assert "\r" not in out + err and "characters/s" in out
    result = result_of("runs/delta")
    assert result["config"]["mixer"] == "delta"
    assert [row[0] for row in result["curve"]] == [3, 6]
    assert result["curve"][-1][-1] == result["validation_loss"]
    assert result["command"].startswith("fwlab train --mixer delta")
    assert {"seed", "steps"} <= result["config"].keys()
    assert {"torch", "machine", "date", "commit", "seconds"} <= result.keys()
    assert result["state_size"] == 2 * 8 * 16  # per head [value, DPFP features]
    assert result["peak_mib"] is None or 0 <= result["peak_mib"] < 2000

    path = "runs/delta"
    arguments = ("generate", path, "--prompt", "the q", "--length", "20", "--seed", "1")
    code, out, _ = fwlab(*arguments)
    assert code == 0 and out.startswith("the q") and len(out) == 26
    assert fwlab(*arguments)[1] == out

    # Going on: nothing left at 6 steps, 3 more at 9.
    code, out, _ = fwlab(*TRAIN, "--resume")
    assert "already has 6 steps" in out and "learning rate" not in out
    assert fwlab(*TRAIN, "--resume", "--steps", "9")[0] == 0
    assert load(f"{path}/last").step == 9
    assert [row[0] for row in result_of("runs/delta")["curve"]] == [3, 6, 9]


def test_resume_says_how_the_learning_rate_changes(fwlab):
    options = ("--warmup", "1", "--lr", "0.01")
    train = [*RUN, *options, "--resume"]
    assert "learning rate" not in fwlab(*train)[1]
    code, out, _ = fwlab(*train, "--steps", "12")
    assert code == 0
    lines = Path("run/metrics.jsonl").read_text().splitlines()
    rates = [json.loads(line)["lr"] for line in lines]
    assert (
        "12 steps in place of 6 stretch the schedule of the learning rate: it was "
        f"{rates[1]:.2g} at step 6 and is {Config(lr=0.01, warmup=1, steps=12).lr_at(6):.2g}"
        " at step 7\n"
    ) in out
    for option, value in (("--lr", "0.1"), ("--schedule", "noam"), ("--min-lr", "0")):
        name = option.removeprefix("--").replace("-", "_")
        said = f"the checkpoint is of another run: expected {name} "
        assert said in refused(*train, "--steps", "12", option, value)


def test_resume_with_rates_that_do_not_depend_on_the_steps(fwlab):
    train = [*RUN, "--schedule", "noam", "--resume"]
    assert fwlab(*train)[0] == 0
    assert "learning rate" not in fwlab(*train, "--steps", "9")[1]


#: Each would take the current folder: the value of an unset variable of the shell.
@pytest.mark.parametrize(
    "arguments",
    [
        [*TRAIN, "--out", ""],
        [*TRAIN, "--out="],
        ["train", *FAST, "--corpus", ""],
        [*TRAIN, "--start", ""],
        ["plot", ""],
        ["plot", "run", "--out", ""],
        ["generate", ""],
        ["look", "", "--text", "text.txt"],
        ["look", "run", "--text", ""],
        ["look", "run", "--text", "text.txt", "--out="],
        ["bench", "--out", ""],
        ["exercises", "export", ""],
        ["exercises", "grade", "notebook.ipynb", "--out", ""],
        ["exercises", "list", "--from", ""],
        ["reproduce", "retrieval-1", "--quick", "--out", ""],
    ],
    ids=" ".join,
)
def test_an_empty_path_is_refused(fwlab, tmp_path, arguments):
    assert "got an empty one: perhaps a shell variable is not set" in refused(
        *arguments
    )
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]


def test_an_empty_prompt_is_a_value(run):
    assert "expected a prompt" in refused("generate", "run", "--prompt", "")


def test_an_empty_name_is_no_checkpoint(run, monkeypatch):
    monkeypatch.chdir(run)
    with pytest.raises(CheckpointError, match="a file or a folder, got ''"):
        load("")


@pytest.mark.parametrize("mixer", MIXERS)
def test_every_mixer_trains_and_generates(fwlab, tmp_path, mixer):
    options = ("--mixer", mixer, "--d-ff", "24", "--corpus", "text.txt")
    assert fwlab("train", *options, *FAST)[0] == 0
    result = result_of(f"runs/{mixer}")
    assert math.isfinite(result["validation_loss"])
    path = tmp_path / f"runs/{mixer}/last"
    model = load(path).model
    assert result["state_size"] == model.state_size(16)
    assert result["parameters"] == model.num_parameters()
    wide = [p for n, p in model.named_parameters() if n.endswith("expand.weight")]
    assert [p.shape[0] for p in wide] == [24]
    code, out, _ = fwlab("generate", str(path), "--length", "20", "--seed", "1")
    assert code == 0 and len(out) > 20


def test_a_hybrid_stack_trains_and_generates(fwlab, tmp_path):
    """Its checkpoint remembers the stack and the options of its layers."""
    options = ["--like", "kimi", "--conv", "3", "--out-norm", "--out-gate"]
    options += ["--beta-max", "2", "--rope", "0.5", "--norm", "rms", "--mlp", "swiglu"]
    train = [*TRAIN, "--mixer", "delta*2,softmax", "--layers", "3", *options]
    assert fwlab(*train)[0] == 0
    path = str(tmp_path / "runs" / "delta-2-softmax")
    model = load(path).model
    assert [type(b.mixer).__name__[:4] for b in model.blocks] == ["Fast"] * 2 + ["Soft"]
    for block in model.blocks[:2]:
        fast = block.mixer
        assert (fast.rule, fast.conv.size, fast.beta_max) == ("delta", 3, 2)
        assert fast.out_norm is not None and fast.out_gate == "silu"  # not Kimi's
        assert isinstance(fast.to_gate, torch.nn.Sequential)  # Kimi's
    assert model.blocks[2].mixer.rope == 0.5 and model.positions is None
    assert isinstance(model.norm, torch.nn.RMSNorm)
    assert model.blocks[0].gate is not None
    code, out, _ = fwlab("generate", path, "--length", "40", "--seed", "1")
    assert code == 0 and len(out) > 40  # beyond a window: there is no table
    assert result_of(path)["state_size"] == model.state_size(16)
    said = refused(*RUN, "--mixer", "softmax", "--conv", "4")
    assert "no fast_weights" in said and "conv_size" in said
    assert "divides layers=1, got 2" in refused(*RUN, "--mixer", "delta,softmax")
    assert "conv" in refused(*RUN, "--conv", "-1")


def test_peak_memory():
    """In a fresh process: this one may reuse memory that it has freed."""
    code = f"""
import runpy
before = runpy.run_path({memory.__file__!r})["PeakMemory"]()
block = b"x" * (64 * 2**20)
during = before.mib()
del block
print(during, before.mib())
"""
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, stdout=subprocess.PIPE
    )
    during, after = done.stdout.split()
    if during == b"None":
        pytest.skip("this system does not report its peak memory")
    assert 60 < float(during) < 200
    assert float(after) > 60


def test_freed_memory_is_kept():
    """In a fresh process, which has its pages mapped for the second time."""
    if platform.libc_ver()[0] != "glibc":
        pytest.skip("this system has no glibc")
    code = f"""
import resource, runpy
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    many = [bytearray(b"x") * (20 * 2**20) for _ in range(3)]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
without = [faults(), faults()]
runpy.run_path({memory.__file__!r})["keep_freed"]()
print(*without, faults(), faults())
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    *without, _, kept = map(int, done.stdout.split())
    assert kept < min(without) / 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "--mixer", "dleta"], "expected mixer to be one of"),
        (["train", "--heads", "3"], "d_model=128 and heads=3"),
        (["train", "--corpus", "none.txt"], "cannot read the corpus file none.txt"),
        (["train", "--corpus", "empty.txt"], "empty.txt is empty"),
        (["train", "--steps", "0"], "steps to be at least 1, got 0"),
        (["train", "--threads", "0"], "threads to be at least 1, got 0"),
        (["train", "--steps", "1" + "0" * 32], "steps to be at most"),
        (["train", "--layers", "1" + "0" * 9], "layers to be at most 10,000"),
        (["train", "--corpus", os.devnull], "to be a file or a folder"),
        (["train", "--d-ff", "0"], "d_ff to be at least 1, got 0"),
        (["train", "--device", "tpu"], "got 'tpu'"),
        (["train", "--device", "meta"], "got 'meta'"),
        (["train", "--seed", "9" * 25], "seed from 0 to 2**32 - 1"),
        (["train", "--clip", "0"], "clip to be above 0"),
        (["train", "--out", "text.txt"], "text.txt to be a folder, got a file"),
        (["train", "--d-model", "2000000000"], "not enough memory"),
        (["bench", "--out", "text.txt/x.json"], "text.txt"),
        (["generate", "none"], "there is no checkpoint none"),
        (["generate", "text.txt"], "text.txt is damaged or not a safetensors file"),
    ],
)
def test_wrong_input_is_one_sentence_and_exit_code_2(
    fwlab, tmp_path, arguments, message
):
    (tmp_path / "empty.txt").write_text("\n")
    before = sorted(p.name for p in tmp_path.iterdir())
    if arguments[0] == "train" and "--corpus" not in arguments:
        arguments = [*arguments, "--corpus", "text.txt"]
    assert message in refused(*arguments)
    assert sorted(p.name for p in tmp_path.iterdir()) == before


def test_what_to_type_next(fwlab):
    """Each of these commands runs as it is, also with a space in the path."""
    arguments = [*TRAIN, "--mixer", "sum,softmax", "--layers", "2", "--out", "a run"]
    _, _, said = fwlab(*arguments)[1].partition("\nnext:\n")
    commands = [shlex.split(line) for line in said.splitlines()]
    assert [name for _, name, *_ in commands] == ["generate", "look", "plot", "train"]
    *_, again = [fwlab(*command[1:]) for command in commands]
    assert {*os.listdir("a run")} >= {"look.svg", "curves.svg"}
    assert result_of("a run")["config"]["steps"] == 12
    # From there on, and not with one more option each time.
    _, _, said = again[1].partition("\nnext:\n")
    *_, last = map(shlex.split, said.splitlines())
    assert last == [each.replace("12", "24") for each in commands[-1]]
    # Where there are no fast weights, there is nothing to look at.
    assert "fwlab look" not in fwlab(*TRAIN, "--mixer", "softmax")[1]


def test_generate_refuses(fwlab):
    fwlab(*TRAIN)
    for arguments, message in (
        (["--prompt", "Ä"], "'Ä'"),
        (["--prompt", ""], "expected a prompt of at least one character"),
        (["--temperature", "-1"], "temperature"),
        (["--top-k", "0"], "top_k"),
        (["--length", "-1"], "length to be 0 or more, got -1"),
        (["--seed", "-1"], "seed from 0"),
    ):
        assert message in refused("generate", "runs/delta", *arguments)


def test_without_the_extra(monkeypatch, capsys):
    from fwlab.__main__ import main

    monkeypatch.setitem(sys.modules, "tyro", None)
    monkeypatch.delitem(sys.modules, "fwlab.cli")
    with pytest.raises(SystemExit, match="2"):
        main()
    assert capsys.readouterr().err == (
        'fwlab: the command line needs the package tyro: pip install "fwlab[train]"\n'
    )
    # What the extra does not bring is not blamed on it.
    monkeypatch.setitem(sys.modules, "typing_extensions", None)
    monkeypatch.delitem(sys.modules, "tyro")
    with pytest.raises(ModuleNotFoundError, match="typing_extensions"):
        main()


def test_extreme_temperatures(trained):
    trainer, _ = trained
    greedy = trainer.sample(length=20, temperature=0)
    for temperature in (1e-37, 1e-40, 1e-320, 5e-324):
        assert trainer.sample(length=20, temperature=temperature) == greedy


def test_unknown_options_exit_with_2(fwlab):
    for arguments in (["train", "--stpes", "3"], ["nothing"], []):
        code, out, err = fwlab(*arguments)
        assert code == 2 and "Traceback" not in out + err


def test_info(fwlab):
    code, out, _ = fwlab("info")
    assert code == 0
    for words in (
        torch.__version__,
        "delta_rule",
        "naive, efficient",
        "while they wait",
    ):
        assert words in out


# --- what people do to a run -------------------------------------------


def ended_well(folder):
    assert result_of(folder) and load(folder).step == 6


@pytest.mark.parametrize(
    "shell", ["{} > out", "{} 2>&- | head -1", "{} >&-"], ids=["ascii", "head", "none"]
)
def test_no_shell_ends_a_training(tmp_path, shell):
    """A terminal without letters, a pipe that is closed early, or nothing at all."""
    (tmp_path / "text.txt").write_text(CZECH, "utf-8")
    train = shlex.join([sys.executable, "-m", "fwlab", *RUN])
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {shell.format(train)}"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
        capture_output=True,
        check=True,
    )
    if "head" in shell:
        assert done.stdout.count(b"\n") == 1 and b"parameters" in done.stdout
    ended_well(tmp_path / "run")


def test_a_closed_pipe_ends_other_commands_silently():
    """As after `head -1`, but closed for sure before the first line."""
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "fwlab", "reproduce"]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, b"")


def test_the_files_of_a_run(fwlab, tmp_path, monkeypatch):
    """Also after a stop between two checkpoints: lines that come again are new."""
    folder = tmp_path / "run"
    train = [*TRAIN, "--out", "run", "--log-every", "2"]
    assert fwlab(*train)[0] == 0
    about = json.loads((folder / "config.json").read_text("utf-8"))
    assert about["config"]["steps"] == 6 and {"torch", "corpus_sha256"} <= {*about}
    losses = rows(folder, "loss")
    assert [*losses] == [2, 3, 4, 6] and [*rows(folder, "validation_loss")] == [3, 6]
    trainer = Trainer(load(folder / "last").config, TEXT)
    for progress in trainer.run():
        if progress.step in losses:
            assert losses[progress.step] == pytest.approx(progress.loss, abs=1e-6)
    curve = load(folder / "last").curve
    best = min((loss, -step) for step, _, loss in curve)
    assert load(folder / "best").step == -best[1] == load(folder).step

    # As if killed after the fifth step: the checkpoint has three.
    monkeypatch.setattr(loop.devices, "in_any", lambda *_: False)
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_train_step", before_step(5, fail))
        assert fwlab(*train, "--out", "cut")[0] == 2
    cut = tmp_path / "cut"
    with open(cut / "metrics.jsonl", "a", encoding="utf-8") as file:
        file.write('{"step": 5, "lo')
    assert [*rows(cut, "loss")] == [2, 3, 4]
    assert fwlab(*train, "--out", "cut", "--resume")[0] == 0
    assert rows(cut, "loss") == losses


def kill(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def before_step(number, do):
    """A training step that does this first, if it is that one (None: each)."""
    step = Trainer._train_step

    def changed(self):
        if number in (None, self.step):
            do()
        return step(self)

    return changed


def interrupt(number=signal.SIGINT):
    os.kill(os.getpid(), number)


def fail(*_):
    raise OSError("disk full")


def killed_in_step(number):
    Trainer._train_step = before_step(number, kill)


def killed_after_save(number):
    """Each validation saves the last checkpoint, and before it perhaps the best."""
    counter, save = itertools.count(1), loop.checkpoints.save

    def save_and_count(*arguments):
        save(*arguments)
        if next(counter) == number:
            kill()

    loop.checkpoints.save = save_and_count


#: The night has more.
KILLED = [(killed_in_step, 0), (killed_in_step, 7), (killed_after_save, 1)]


@pytest.fixture(scope="module")
def uninterrupted(copies, tmp_path_factory):
    folder = tmp_path_factory.mktemp("uninterrupted")
    (folder / "text.txt").write_text(TEXT)
    copies(folder, *CARRIED)
    return folder / "run"


CARRIED = [*TRAIN, "--steps", "12", "--out", "run"]
CARRIED += ["--carry", "--dropout", "0.2", "--log-every", "1"]


@pytest.mark.parametrize(("when", "number"), KILLED)
def test_sigkill_changes_nothing(copies, uninterrupted, tmp_path, when, number):
    """The checkpoints have 3, 6, 9 and 12 steps."""
    (tmp_path / "text.txt").write_text(TEXT)
    with pytest.raises(ProcessExitedException, match="SIGKILL"):
        copies(tmp_path, *CARRIED, before=partial(when, number))
    copies(tmp_path, *CARRIED, "--resume")
    whole, cut = uninterrupted, tmp_path / "run"
    one, other = (load(folder / "last") for folder in (whole, cut))
    assert one.step == other.step == 12 and one.curve == other.curve
    same_weights(one.model, other.model)
    for name in ("loss", "validation_loss"):
        assert rows(cut, name) == rows(whole, name)
    assert result_of(cut)["sample"] == result_of(whole)["sample"]


@pytest.mark.slow
def test_a_night_of_kills():
    """The seed is new each time; FWLAB_SEED repeats one."""
    kills = Path(__file__).with_name("kills.py")
    seed = ["--seed", os.environ["FWLAB_SEED"]] if "FWLAB_SEED" in os.environ else []
    subprocess.run([sys.executable, str(kills), *seed], check=True)


def rows(folder, name):
    """A column of metrics.jsonl, by step; what is not a whole line is left out."""
    values = {}
    for line in (folder / "metrics.jsonl").read_text("utf-8").splitlines():
        if line.endswith("}"):
            row = json.loads(line)
            if name in row:
                assert row["step"] not in values
                values[row["step"]] = row[name]
    return values


@pytest.mark.parametrize("options", [[], ["--resume"]])
def test_a_run_without_a_checkpoint_begins_again(fwlab, tmp_path, options):
    """As one that was killed before it had its first: nothing is in the way."""
    folder, train = tmp_path / "run", [*TRAIN, "--out", "run", *options]
    (folder / "last").mkdir(parents=True)
    (folder / "best").mkdir()
    half = [folder / f".{name}.abc_1234" for name in ("config.json", "metrics.jsonl")]
    half += [
        folder / at / ".checkpoint.safetensors.abc_1234" for at in ("last", "best")
    ]
    for path in (folder / "config.json", folder / "metrics.jsonl", *half):
        path.write_text("{")
    (folder / ".lock").write_text("process 1 on a computer that was switched off")
    assert fwlab(*train)[0] == 0
    ended_well(folder)
    assert not [*folder.glob(".*"), *folder.glob("*/.*")]


def test_a_run_is_not_overwritten(fwlab, tmp_path):
    # As a job that may be stopped at any time: --resume from the start.
    code, out, _ = fwlab(*RUN, "--resume")
    assert code == 0 and "run has no checkpoint yet: the run begins" in out
    before = (tmp_path / "run/metrics.jsonl").read_bytes()
    assert "--resume continues it, and --out" in refused(*RUN)
    # Nor trained by two at a time, and the second leaves nothing behind.
    with locked(tmp_path / "run"):
        said = f"but process {os.getpid()} on {platform.node()} trains there"
        assert said in refused(*RUN, "--resume", "--steps", "9")
    # Nor to fewer steps than it has.
    said = "expected steps to be at least 6"
    assert said in refused(*RUN, "--steps", "4", "--resume")
    assert (tmp_path / "run/metrics.jsonl").read_bytes() == before
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [
        *("best", "config.json", "last", "metrics.jsonl", "result.json")
    ]


@pytest.mark.parametrize("name", ["best", "last"])
def test_nobody_is_told_to_remove_what_may_not_be_read(run, monkeypatch, name):
    path = f"run/{name}/checkpoint.safetensors"
    access = os.access  # root may read all
    monkeypatch.setattr(os, "access", lambda p, m: str(p) != path and access(p, m))
    error = refused(*RUN, "--resume", "--steps", "9")
    assert error == f"fwlab: expected {path} to be readable, got no permission\n"
    assert (run / "result.json").exists()


def test_a_full_disk_is_named_and_leaves_nothing(fwlab, tmp_path):
    resource = pytest.importorskip("resource")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        error = refused(*TRAIN, "--out", "new/run")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert error.endswith("'new/run/config.json'\n")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    "name", [".lock", "config.json", "metrics.jsonl", "result.json"]
)
def test_what_is_no_file_of_a_run_stays(run, name):
    """A pipe is neither read, which takes forever, nor removed."""
    path = run / name
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    said = f"expected run/{name} to be a file, got a pipe"
    assert said in refused(*RUN, "--resume")
    assert said in refused(*RUN, "--resume", "--steps", "9")
    assert path.is_fifo()


def test_links_in_a_run(fwlab, tmp_path):
    """The result is written through them; a lock would overwrite the target."""
    run, kept = tmp_path / "run", tmp_path / "kept"
    run.mkdir()
    (run / "result.json").symlink_to("../kept")
    assert fwlab(*RUN)[0] == 0 and fwlab(*RUN, "--resume", "--steps", "9")[0] == 0
    assert (run / "result.json").is_symlink()
    before = kept.read_bytes()
    assert json.loads(before)["config"]["steps"] == 9
    (run / ".lock").symlink_to("../kept")
    said = "expected run/.lock to be a file, got a symbolic link"
    assert said in refused(*RUN, "--resume", "--steps", "12")
    assert kept.read_bytes() == before


def test_a_lost_result_is_written(fwlab, run):
    """As after a run that was killed between its last checkpoint and its end."""
    whole, path = result_of(run), run / "result.json"
    other = json.dumps(whole | {"config": {"steps": 3}})
    for text in (None, "[", "[1]", "[" * 10**5, other):
        if text is None:
            path.unlink()
        else:  # damaged, or of the run before it was extended
            path.write_text(text)
        assert fwlab(*RUN, "--resume")[0] == 0
        again = result_of(run)
        for name in ("config", "curve", "sample", "validation_loss", "corpus_sha256"):
            assert again[name] == whole[name]
        assert again["first_step"] == 6 and again["tokens_per_second"] is None
        assert "nothing to do" in fwlab(*RUN, "--resume")[1]


def test_no_result_of_other_steps(run, monkeypatch):
    """A longer run removes the result before it writes its first checkpoint."""
    with monkeypatch.context() as patch:
        patch.setattr("fwlab.training.checkpoint.save_file", fail)
        refused(*RUN, "--resume", "--steps", "9")
    assert load("run/last").step == 6 and not (run / "result.json").exists()


def test_checkpoints_of_two_runs(fwlab, tmp_path):
    """What was put into `best` is noticed, and `best` helps a damaged `last`."""
    train = [*TRAIN, "--resume", "--steps", "9", "--out"]
    for name, seed in (("run", "1"), ("other", "2")):
        assert fwlab(*TRAIN, "--out", name, "--seed", seed)[0] == 0
    shutil.move("run/best", "kept")
    shutil.copytree("other/best", "run/best")
    said = "of the same run as run/last/checkpoint.safetensors: expected seed 1, got 2"
    assert said in refused(*train, "run", "--seed", "1")
    assert said in refused("generate", "run")
    shutil.rmtree("run/best")
    shutil.move("kept", "run/best")
    last = tmp_path / "run/last/checkpoint.safetensors"
    last.write_bytes(last.read_bytes()[:-9])
    said = "remove it, and --resume continues from run/best/checkpoint.safetensors"
    assert said in refused(*train, "run", "--seed", "1")
    last.unlink()
    assert fwlab(*train, "run", "--seed", "1")[0] == 0
    rewrite("run/best/checkpoint.safetensors", curve="[[1, 2, 3], [2, 3, 4]]")
    assert "it has other losses" in refused("generate", "run")


def test_time_goes_on_after_a_stop(fwlab, tmp_path, monkeypatch):
    train, run = [*RUN, "--log-every", "1"], tmp_path / "run"
    assert fwlab(*train)[0] == 0
    rows = [{**row, "seconds": row["seconds"] + 100} for row in metrics(run)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (run / "metrics.jsonl").write_text(text, "utf-8")
    assert fwlab(*train, "--steps", "9", "--resume")[0] == 0
    # Also by a clock that stands still.
    monkeypatch.setattr("fwlab.training.loop.time.perf_counter", lambda: 5.0)
    assert fwlab(*train, "--steps", "12", "--resume")[0] == 0
    seconds = [row["seconds"] for row in metrics(run)]
    assert len(seconds) == 12 and seconds == sorted(seconds) and seconds[0] >= 100


def test_words_are_not_called_characters(fwlab):
    code, out, _ = fwlab(*TRAIN, "--tokens", "words")
    assert code == 0 and "characters" not in out
    assert " training words" in out and "words/s" in out and "nats per word" in out
    err = refused("generate", "runs/delta", "--prompt", " ")
    assert "a prompt of at least one word, got ' '" in err


@pytest.fixture
def ctrl_c():
    """Ctrl-C has its usual effect, even where all of pytest ignores it."""
    numbers = signal.SIGINT, signal.SIGTERM
    before = [signal.signal(each, signal.default_int_handler) for each in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


def test_ctrl_c_that_is_ignored_stays_ignored(fwlab, ctrl_c, monkeypatch):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    monkeypatch.setattr(Trainer, "_train_step", before_step(None, interrupt))
    assert fwlab(*TRAIN)[0] == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_saves_and_says_how_to_continue(fwlab, ctrl_c, monkeypatch, number):
    """As a batch system does, with SIGTERM."""
    assert fwlab(*TRAIN, "--out", "whole")[0] == 0
    within = before_step(3, lambda: interrupt(number))
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_train_step", within)
        code, _, err = fwlab(*TRAIN, "--out", "cut")
    assert code == 130
    assert "stopped after step 4" in err and "--resume continues" in err
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert load("cut/last").step == 4
    assert fwlab(*TRAIN, "--out", "cut", "--resume")[0] == 0
    one, other = (load(f"{name}/last") for name in ("whole", "cut"))
    same_weights(one.model, other.model)
    assert one.curve == other.curve


def diverge(monkeypatch):
    """From the fourth step on."""
    monkeypatch.setattr(
        Config, "lr_at", lambda self, step: 1e38 if step > 2 else 1e-3, raising=True
    )


@pytest.mark.parametrize("every", [1, 2, 3, 100])
def test_divergence_keeps_the_last_good_checkpoint(fwlab, tmp_path, monkeypatch, every):
    """Whether the loss of a step or that of a validation shows it first."""
    diverge(monkeypatch)
    err = refused(*RUN, "--eval-every", str(every), "--log-every", "1")
    assert "is not finite" in err
    if every < 100:
        assert "run/last has an earlier state" in err
        assert load("run/last").step in (2, 3)
    else:
        assert "no checkpoint yet" in err
        left = sorted(path.name for path in (tmp_path / "run").iterdir())
        assert left == ["config.json", "metrics.jsonl"]  # what led to it


def test_weights_that_are_not_finite_are_not_saved(tmp_path):
    trainer = Trainer(SMALL, TEXT)
    with torch.no_grad():
        trainer.model.norm.weight.fill_(torch.nan)
    with pytest.raises(FloatingPointError, match=r"parameter norm\.weight"):
        trainer.save(tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_a_run_that_was_cut_between_validations_can_end_there(
    fwlab, ctrl_c, monkeypatch
):
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_train_step", before_step(3, interrupt))
        assert fwlab(*TRAIN)[0] == 130
    assert fwlab(*TRAIN, "--steps", "4", "--resume")[0] == 0
    loaded = load("runs/delta/last")
    loss = Trainer(loaded.config, TEXT, resume=loaded).evaluate()
    assert result_of("runs/delta")["validation_loss"] == pytest.approx(loss, abs=1e-4)
