"""Test training by several processes, as torchrun starts them."""

import subprocess
import sys

import pytest
import torch

from fwlab.training import load
from fwlab.training.run_folder import metrics

TRAIN = ["train", "--layers", "2", "--heads", "2", "--d-model", "16", "--block", "16"]
TRAIN += ["--batch", "4", "--eval-every", "2", "--lr", "1e-2", "--min-lr", "1e-2"]
TRAIN += ["--corpus", "text.txt", "--device", "cpu", "--warmup", "1"]
TRAIN += ["--log-every", "1", "--out", "run"]


@pytest.fixture
def start(tmp_path):
    """Return a function that runs `fwlab train` in one process or in several."""

    def start(name, number, *options):
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        (folder / "text.txt").write_text("the quick brown fox jumps. " * 60)
        many = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
        begin = [*many, str(number)] * (number > 1)
        command = [sys.executable, *begin, "-m", "fwlab", *TRAIN, *options]
        printed = subprocess.check_output(command, cwd=folder, text=True)
        assert printed.count("parameters") == 1  # Only one process prints.
        return folder / "run"

    return start


def assert_same(one, other):
    """Assert that two runs have the same metrics, weights and Adam states."""
    for a, b in zip(metrics(one), metrics(other), strict=True):
        for name in {*a} & {"loss", "validation_loss"}:
            assert b[name] == pytest.approx(a[name], abs=1e-5)
    a, b = load(one / "last"), load(other / "last")
    assert a.step == b.step == 4
    for name, weight in a.model.state_dict().items():
        assert torch.allclose(b.model.state_dict()[name], weight, atol=1e-4), name
    for name, state in a.adam.items():
        for key, part in state.items():
            assert torch.allclose(b.adam[name][key], part, atol=1e-5), (name, key)


def test_two_processes_train_as_one(start):
    options = ["--steps", "4", "--eval-windows", "3"]
    assert_same(start("1", 1, *options), start("2", 2, *options))


def test_two_processes_continue_what_one_began(start):
    """Two processes can continue a `--carry` run that one process began."""
    options = ["--carry", "--accumulate", "2"]
    alone = start("alone", 1, *options, "--steps", "4")
    start("both", 1, *options, "--steps", "2")
    assert_same(alone, start("both", 2, *options, "--steps", "4", "--resume"))
