"""Training by several processes, as torchrun starts them."""

import functools
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fwlab.training import load

OPTIONS = [
    *("--layers", "2", "--heads", "2", "--d-model", "16", "--block", "16"),
    *("--batch", "4", "--steps", "4", "--eval-every", "2", "--eval-windows", "3"),
    *("--lr", "1e-2", "--warmup", "1", "--log-every", "1"),
    *("--corpus", "text.txt", "--device", "cpu"),
]


@pytest.fixture(scope="module")
def train(copies):
    """`fwlab train` in a folder, by one process or several."""

    def train(folder: Path, number: int, *options: str, torchrun=False) -> Path:
        (folder / "text.txt").write_text("the quick brown fox jumps. " * 60)
        command = ["train", *OPTIONS, *options, "--out", "run"]
        if torchrun:
            many = ["--standalone", "--nproc-per-node", str(number), "-m", "fwlab"]
            start = [sys.executable, "-m", "torch.distributed.run", *many]
            printed = subprocess.check_output([*start, *command], cwd=folder).decode()
        else:
            printed = copies(folder, *command, number=number)
        # One of them prints.
        assert printed.count("parameters") == 1
        return folder / "run"

    return train


def losses(run: Path) -> list[float]:
    lines = (run / "metrics.jsonl").read_text("utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    return [row[name] for row in rows for name in row if "loss" in name]


#: Sums in another order: a rounding error, which four steps enlarge.
CLOSE = 1e-5


def assert_same(one: Path, other: Path) -> None:
    assert len(losses(one)) == 6
    assert losses(other) == pytest.approx(losses(one), abs=CLOSE)
    a, b = load(one / "last"), load(other / "last")
    assert a.step == b.step == 4
    for name, weight in a.model.state_dict().items():
        assert torch.allclose(b.model.state_dict()[name], weight, atol=1e-4), name
    for name, state in a.adam.items():
        for key, part in state.items():
            assert torch.allclose(b.adam[name][key], part, atol=1e-5), (name, key)


@pytest.fixture(scope="module")
def alone(train, tmp_path_factory):
    """The runs of one process, by their options."""
    return functools.cache(
        lambda *options: train(tmp_path_factory.mktemp("alone"), 1, *options)
    )


DELTA, CARRY = ("--mixer", "delta"), ("--mixer", "delta", "--carry")


@pytest.mark.parametrize(
    ("torchrun", "shard", "options"),
    [
        (True, False, DELTA),
        (False, True, (*CARRY, "--accumulate", "2")),
        (False, False, (*CARRY, "--accumulate", "2")),
        pytest.param(False, True, ("--mixer", "feedback"), marks=pytest.mark.slow),
        pytest.param(False, True, DELTA, marks=pytest.mark.slow),
        pytest.param(False, True, ("--mixer", "aft-conv"), marks=pytest.mark.slow),
    ],
)
def test_two_processes_train_as_one(train, alone, tmp_path, torchrun, shard, options):
    if shard and not hasattr(torch.cpu.Stream, "record_event"):
        pytest.skip("this PyTorch cannot shard on CPUs")
    more = ["--shard"] * shard
    together = train(tmp_path, 2, *options, *more, torchrun=torchrun)
    assert_same(alone(*options), together)


def test_two_processes_continue_what_one_began(train, alone, tmp_path):
    """Sharded: weights and the optimiser's state are divided again."""
    # Neither rate nor validation depends on the number of steps.
    options = (*CARRY, "--min-lr", "1e-2", "--eval-windows", "1000")
    train(tmp_path, 1, *options, "--steps", "2")
    together = train(tmp_path, 2, *options, "--shard", "--resume")
    assert_same(alone(*options), together)
