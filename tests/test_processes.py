"""Training by several processes, as torchrun starts them."""

import json
import os
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


def train(folder: Path, processes: int, *options: str, **environment: str) -> None:
    """`fwlab train` in a folder, by one process or several."""
    (folder / "text.txt").write_text("the quick brown fox jumps. " * 60)
    start = [sys.executable, "-m"]
    if processes > 1:
        many = ["--standalone", "--nproc-per-node", str(processes)]
        start += ["torch.distributed.run", *many, "-m"]
    done = subprocess.run(
        [*start, "fwlab", "train", *OPTIONS, *options],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    # One of them prints.
    assert done.stdout.count("parameters") == 1


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
def alone(tmp_path_factory):
    """The runs of one process, by their options."""
    made: dict[tuple[str, ...], Path] = {}

    def run(*options: str) -> Path:
        if options not in made:
            folder = tmp_path_factory.mktemp("alone")
            train(folder, 1, "--out", "run", *options)
            made[options] = folder / "run"
        return made[options]

    return run


DELTA, CARRY = ("--mixer", "delta"), ("--mixer", "delta", "--carry")


@pytest.mark.parametrize(
    ("shard", "options"),
    [
        (False, DELTA),
        (True, (*CARRY, "--accumulate", "2")),
        pytest.param(True, DELTA, marks=pytest.mark.slow),
        pytest.param(False, (*CARRY, "--accumulate", "2"), marks=pytest.mark.slow),
        pytest.param(True, ("--mixer", "feedback"), marks=pytest.mark.slow),
        pytest.param(True, ("--mixer", "aft-conv"), marks=pytest.mark.slow),
    ],
)
def test_two_processes_train_as_one(alone, tmp_path, shard, options):
    if shard and not hasattr(torch.cpu.Stream, "record_event"):
        pytest.skip("this PyTorch cannot shard on CPUs")
    train(tmp_path, 2, "--out", "run", *options, *(["--shard"] * shard))
    assert_same(alone(*options), tmp_path / "run")


@pytest.mark.slow
def test_two_processes_continue_what_one_began(alone, tmp_path):
    """Sharded: weights and the optimiser's state are divided again."""
    # Neither rate nor validation depends on the number of steps.
    options = (*CARRY, "--min-lr", "1e-2", "--eval-windows", "1000")
    train(tmp_path, 1, "--out", "run", *options, "--steps", "2")
    train(tmp_path, 2, "--out", "run", *options, "--shard", "--resume")
    assert_same(alone(*options), tmp_path / "run")
