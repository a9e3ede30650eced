"""Training, checkpoints, and the command line around them."""

import dataclasses
import json
import math
import os
import subprocess
import sys

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from fwlab import cli
from fwlab.data import CorpusError
from fwlab.models import MIXERS
from fwlab.training import (
    Checkpoint,
    CheckpointError,
    Config,
    Trainer,
    load,
    save,
)

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


@pytest.mark.parametrize("mixer", MIXERS)
def test_it_learns(mixer):
    trainer = Trainer(config(mixer=mixer, steps=60, eval_every=20), TEXT)
    run = list(trainer.run())
    assert [p.step for p in run] == list(range(1, 61))
    assert run[0].loss == pytest.approx(math.log(len(trainer.characters)), abs=0.3)
    assert run[-1].val_loss < 2.0
    measured = [p.step for p in run if p.val_loss is not None]
    assert measured == [20, 40, 60]


def test_same_seed_same_model():
    models = []
    for seed in (1, 1, 2):
        trainer = Trainer(config(seed=seed), TEXT)
        list(trainer.run())
        models.append(torch.cat([p.flatten() for p in trainer.model.parameters()]))
    assert torch.equal(models[0], models[1])
    assert not torch.equal(models[0], models[2])


def test_resume_is_as_if_never_stopped(tmp_path):
    whole = Trainer(SMALL, TEXT)
    list(whole.run())

    first = Trainer(SMALL, TEXT)
    for progress in first.run():
        if progress.step == 5:
            break
    first.save(tmp_path / "half")
    second = Trainer(SMALL, TEXT, resume=load(tmp_path / "half"))
    assert [p.step for p in second.run()] == list(range(6, 13))
    for a, b in zip(whole.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_learning_rate():
    c = Config()
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
    ],
)
def test_trainer_refuses(changes, message):
    with pytest.raises(ValueError, match=message):
        Trainer(config(**changes), TEXT)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "steps to be at least 1"),
        ({"lr": float("nan")}, "lr to be 0 or more"),
        ({"beta2": 1.0}, "beta2"),
    ],
)
def test_config_refuses(changes, message):
    with pytest.raises(ValueError, match=message):
        config(**changes)


def test_short_text():
    with pytest.raises(CorpusError, match=r"block \+ 1 = 17 .*100 characters"):
        Trainer(SMALL, "x" * 100)


def test_divergence_stops():
    trainer = Trainer(SMALL, TEXT)
    with torch.no_grad():
        trainer.model.embedding.weight.fill_(float("inf"))
    with pytest.raises(FloatingPointError, match="gradient of step 1 is not finite"):
        next(trainer.run())


@pytest.fixture
def trained(tmp_path):
    trainer = Trainer(SMALL, TEXT)
    list(trainer.run())
    trainer.save(tmp_path / "model")
    return trainer, tmp_path / "model"


def test_checkpoint_round_trip(trained):
    trainer, path = trained
    loaded = load(path)
    assert loaded.config == SMALL
    assert loaded.step == 12
    assert loaded.characters.alphabet == trainer.characters.alphabet
    tokens = trainer.val_tokens[None, :16]
    assert torch.equal(loaded.model(tokens), trainer.model(tokens))
    assert loaded.curve == trainer.curve
    assert [row[0] for row in loaded.curve] == [6, 12]
    assert [p.name for p in path.parent.iterdir()] == ["model"]  # no leftovers


def test_checkpoints_of_the_first_version_load(trained):
    """They had no d_ff."""
    _, path = trained
    old = dataclasses.asdict(SMALL)
    del old["d_ff"]
    rewrite(path, config=json.dumps(old))
    assert load(path).config == SMALL


def rewrite(path, tensors=None, **header):
    with safe_open(path, "pt") as file:
        old = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        metadata = file.metadata() | header
    save_file({**old, **(tensors or {})}, path, metadata)


def asdict(**changes):
    return dataclasses.asdict(config(**changes))


def other_model(path):
    rewrite(path, config=json.dumps(asdict(mixer="softmax")))


DAMAGE = {
    "truncated": (lambda p: p.write_bytes(p.read_bytes()[:-100]), "is damaged"),
    "header cut": (lambda p: p.write_bytes(p.read_bytes()[:20]), "is damaged"),
    "empty": (lambda p: p.write_bytes(b""), "is damaged"),
    "text": (lambda p: p.write_text("hello"), "is damaged"),
    "missing": (lambda p: p.unlink(), "there is no checkpoint file"),
    "foreign": (
        lambda p: save_file({"x": torch.zeros(2)}, p),
        "not a checkpoint of fwlab train",
    ),
    "other model": (
        other_model,
        "does not contain the softmax model .* weight .* got",
    ),
    "other shape": (
        lambda p: rewrite(p, {"model.norm.weight": torch.zeros(3)}),
        r"norm.weight of shape \[16\], got \[3\]",
    ),
    "not finite": (
        lambda p: rewrite(p, {"model.norm.weight": torch.full((16,), torch.nan)}),
        "norm.weight to be finite",
    ),
    "bad header": (lambda p: rewrite(p, config="{}"), "header of .* is damaged"),
    "other format": (
        lambda p: rewrite(p, fwlab="9"),
        "format 1, got 9",
    ),
    "negative step": (lambda p: rewrite(p, step="-4"), "step to be 0 or more, got -4"),
    "huge sizes": (
        lambda p: rewrite(p, config=json.dumps(asdict(d_model=10**6))),
        "does not contain the delta model",
    ),
    "optimiser of nothing": (
        lambda p: rewrite(p, {"adam.exp_avg.nothing": torch.zeros(2)}),
        "optimiser state exp_avg.nothing belongs to no weight",
    ),
    "optimiser cut": (
        lambda p: rewrite(p, {"adam.exp_avg.norm.weight": torch.zeros(3)}),
        r"exp_avg of norm.weight of shape \[16\], got \[3\]",
    ),
    "whole numbers": (
        lambda p: rewrite(p, {"model.norm.weight": torch.ones(16, dtype=torch.int64)}),
        "norm.weight of dtype torch.float32, got torch.int64",
    ),
    "bad curve": (lambda p: rewrite(p, curve="[[1]]"), "rows of three numbers"),
    "odd name": (
        lambda p: rewrite(p, {"adam.x": torch.zeros(2)}),
        "belongs to no weight",
    ),
    "bad step": (lambda p: rewrite(p, step="many"), "header of .* is damaged"),
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


def test_failed_save_keeps_the_old_file(trained, monkeypatch):
    trainer, path = trained
    before = path.read_bytes()

    def fail(tensors, file, header):
        file.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr("fwlab.training.checkpoint.save_file", fail)
    with pytest.raises(
        CheckpointError, match=r"cannot write the checkpoint .*disk full"
    ):
        trainer.save(path)
    assert path.read_bytes() == before
    assert [p.name for p in path.parent.iterdir()] == ["model"]


def test_save_where_nothing_can_be_written(trained, tmp_path):
    trainer, path = trained
    with pytest.raises(CheckpointError, match="cannot write"):
        trainer.save(path / "below-a-file" / "model")
    empty = Checkpoint(trainer.model, trainer.characters, SMALL, 0, {}, [], "")
    save(tmp_path / "new" / "folder" / "model", empty)
    assert load(tmp_path / "new" / "folder" / "model").adam == {}


# --- the command line ------------------------------------------------

FAST = [
    *("--layers", "1", "--heads", "2", "--d-model", "16", "--block", "16"),
    *("--batch", "2", "--steps", "6", "--eval-every", "3", "--eval-windows", "2"),
    *("--device", "cpu"),
]


@pytest.fixture
def fwlab(monkeypatch, capsys, tmp_path):
    """Call the command as a user would: exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text(TEXT)

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["fwlab", *arguments])
        try:
            cli.main()
            code = 0
        except SystemExit as stop:
            code = stop.code or 0
        return code, *capsys.readouterr()

    return call


def test_train_and_generate(fwlab, tmp_path):
    code, out, _ = fwlab("train", "--mixer", "delta", "--corpus", "text.txt", *FAST)
    assert code == 0
    assert "validation loss" in out
    result = json.loads((tmp_path / "runs/delta/result.json").read_text("utf-8"))
    assert result["config"]["mixer"] == "delta"
    assert [row[0] for row in result["curve"]] == [3, 6]
    assert result["curve"][-1][-1] == result["validation_loss"]
    assert result["command"].startswith("fwlab train --mixer delta")
    assert {"seed", "steps"} <= result["config"].keys()
    assert {"torch", "machine", "date", "commit", "seconds"} <= result.keys()
    assert result["state_size"] == 2 * 8 * 16  # per head [value, DPFP features]
    assert result["peak_mib"] is None or 0 <= result["peak_mib"] < 2000

    path = "runs/delta/checkpoint.safetensors"
    arguments = ("generate", path, "--prompt", "the q", "--length", "20", "--seed", "1")
    code, out, _ = fwlab(*arguments)
    assert code == 0
    assert out.startswith("the q")
    assert len(out) == 26
    assert fwlab(*arguments)[1] == out

    # Going on: nothing left at 6 steps, 3 more at 9.
    again = ["train", "--corpus", "text.txt", *FAST, "--resume"]
    assert "already has 6 steps" in fwlab(*again)[1]
    again[again.index("6")] = "9"
    assert fwlab(*again)[0] == 0
    assert load(path).step == 9
    result = json.loads((tmp_path / "runs/delta/result.json").read_text("utf-8"))
    assert [row[0] for row in result["curve"]] == [3, 6, 9]


@pytest.mark.parametrize("mixer", MIXERS)
def test_every_mixer_trains_and_generates(fwlab, tmp_path, mixer):
    options = ("--mixer", mixer, "--d-ff", "24", "--corpus", "text.txt")
    assert fwlab("train", *options, *FAST)[0] == 0
    result = json.loads((tmp_path / f"runs/{mixer}/result.json").read_text("utf-8"))
    assert math.isfinite(result["validation_loss"])
    path = tmp_path / f"runs/{mixer}/checkpoint.safetensors"
    model = load(path).model
    assert result["state_size"] == model.state_size(16)
    assert result["parameters"] == model.num_parameters()
    wide = [p for n, p in model.named_parameters() if n.endswith("expand.weight")]
    assert [p.shape[0] for p in wide] == [24]
    code, out, _ = fwlab("generate", str(path), "--length", "20", "--seed", "1")
    assert code == 0
    assert len(out) > 20


def test_peak_memory():
    """In a fresh process: this one may reuse memory that it has freed."""
    code = """
import torch
from fwlab.training import PeakMemory
before = PeakMemory()
block = torch.ones(16 * 2**20)  # 64 MiB
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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "--mixer", "dleta"], "expected mixer to be one of"),
        (["train", "--heads", "3"], "d_model=128 and heads=3"),
        (["train", "--corpus", "none.txt"], "cannot read the corpus file none.txt"),
        (["train", "--corpus", "empty.txt"], "empty.txt is empty"),
        (["train", "--steps", "0"], "steps to be at least 1, got 0"),
        (["train", "--d-ff", "0"], "d_ff to be at least 1, got 0"),
        (["train", "--resume", "--out", "x"], "no checkpoint file x/checkpoint"),
        (["train", "--device", "tpu"], "got 'tpu'"),
        (["train", "--device", "meta"], "got 'meta'"),
        (["train", "--seed", "9" * 25], "seed from 0 to 2**32 - 1"),
        (["train", "--clip", "0"], "clip to be above 0"),
        (
            ["train", "--out", "text.txt"],
            "expected text.txt to be a folder, got a file",
        ),
        (["train", "--d-model", "2000000000"], "not enough memory"),
        (["bench", "--out", "text.txt/x.json"], "text.txt"),
        (["generate", "none"], "there is no checkpoint file none"),
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
    code, out, err = fwlab(*arguments)
    assert code == 2
    assert message in err
    assert err.startswith("fwlab: ")
    assert err.count("\n") == 1
    assert "Traceback" not in out + err
    assert sorted(p.name for p in tmp_path.iterdir()) == before


def test_generate_refuses(fwlab):
    fwlab("train", "--corpus", "text.txt", *FAST)
    path = "runs/delta/checkpoint.safetensors"
    for arguments, message in (
        (["--prompt", "Ä"], "'Ä'"),
        (["--prompt", ""], "expected a prompt of at least one character"),
        (["--temperature", "-1"], "temperature"),
        (["--top-k", "0"], "top_k"),
        (["--length", "-1"], "length to be 0 or more, got -1"),
        (["--seed", "-1"], "seed from 0"),
    ):
        code, _, err = fwlab("generate", path, *arguments)
        assert code == 2
        assert message in err
        assert err.count("\n") == 1


@pytest.mark.parametrize("name", ["truncated", "foreign", "other model"])
def test_damaged_checkpoints_end_in_one_sentence(fwlab, trained, name):
    _, path = trained
    DAMAGE[name][0](path)
    code, out, err = fwlab("generate", str(path))
    assert (code, out) == (2, "")
    assert err.startswith(f"fwlab: {path} ")
    assert err.count("\n") == 1


def test_wrong_hash_ends_in_one_sentence(fwlab, monkeypatch, tmp_path):
    monkeypatch.setenv("FWLAB_DATA", str(tmp_path))
    (tmp_path / "tinyshakespeare.txt").write_text(TEXT)
    code, out, err = fwlab("train", *FAST)
    assert (code, out) == (2, "")
    assert "tinyshakespeare.txt is not the corpus 'shakespeare'" in err
    assert err.count("\n") == 1


def test_without_the_extra(monkeypatch, capsys):
    from fwlab.__main__ import main

    monkeypatch.setitem(sys.modules, "tyro", None)
    monkeypatch.delitem(sys.modules, "fwlab.cli")
    with pytest.raises(SystemExit, match="2"):
        main()
    assert capsys.readouterr().err == (
        'fwlab: the command line needs the package tyro: pip install "fwlab[train]"\n'
    )


def test_extreme_temperatures(trained):
    trainer, _ = trained
    greedy = trainer.sample(length=20, temperature=0)
    assert trainer.sample(length=20, temperature=1e-40) == greedy


def test_unknown_options_exit_with_2(fwlab):
    for arguments in (["train", "--stpes", "3"], ["nothing"], []):
        code, out, err = fwlab(*arguments)
        assert code == 2
        assert "Traceback" not in out + err


def test_info(fwlab):
    code, out, _ = fwlab("info")
    assert code == 0
    assert torch.__version__ in out
    assert "delta_rule" in out
    assert "naive, efficient" in out
    assert "while they wait" in out


@pytest.mark.parametrize(
    "packages, given, policy",
    [
        ("fwlab", {}, "PASSIVE"),
        ("fwlab", {"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE"),
        ("torch, fwlab", {}, "None"),
    ],
)
def test_waiting_threads_sleep(packages, given, policy):
    """Unless you decide yourself, or PyTorch is loaded already."""
    code = f"import os, {packages}; print(os.getenv('OMP_WAIT_POLICY'))"
    others = {k: v for k, v in os.environ.items() if not k.startswith("OMP_")}
    env = others | given | {"OMP_DISPLAY_ENV": "verbose"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=env, check=True, capture_output=True, text=True)
    assert done.stdout.split()[-1] == policy
    if "GOMP_SPINCOUNT" in done.stderr:  # what GNU's OpenMP has understood
        assert ("GOMP_SPINCOUNT = '0'" in done.stderr) == (policy == "PASSIVE")
