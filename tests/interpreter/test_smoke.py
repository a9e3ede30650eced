"""Every kernel once, forward and backward; the rest is slow."""

import json
from pathlib import Path

import pytest
import torch

from fwlab.ops.aft.simple import kernels as scan
from fwlab.ops.aft.window import kernels as window
from fwlab.ops.call import launcher
from problems import ROWS, error, outcome, problem, rebuild

TABLE = Path(__file__).resolve().parents[2] / "docs/results/kernels.json"
#: Rows, steps (two chunks, or tiles of four), and multiprocessors: where they are
#: many, outputs have a kernel of their own.
PROBLEMS = [
    ("sum-normalized", 17, 1),
    ("gated", 17, 1),
    ("delta", 17, 1000),
    ("gated-delta", 3, 1),
    ("dpfp-delta", 17, 1),
    ("aft-simple", 5, 1),
    ("aft-full", 5, 1),
    ("aft-local", 5, 1),
    ("aft-conv", 5, 1),
    ("feedback", 3, 1),
]


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(scan, "SEGMENT", 4)
    for name in ("TILE", "KEYS"):
        monkeypatch.setattr(window, name, 4)


def exact(x):
    return x.detach().double().requires_grad_()


def test_every_kernel(small, monkeypatch):
    real, launched, errors = launcher.launch, set(), {}

    def launch(kernel, *arguments, **options):
        launched.add(kernel.__name__)
        real(kernel, *arguments, **options)

    monkeypatch.setattr(launcher, "launch", launch)
    for name, steps, cores in PROBLEMS:
        monkeypatch.setattr(launcher, "multiprocessors", lambda device, n=cores: n)
        row, (inputs, state) = ROWS[name], problem(ROWS[name], steps, torch.float32)
        found = outcome(row, inputs, state, "triton")
        wanted = outcome(row, [*map(exact, inputs)], rebuild(state, exact), "naive")
        errors[name] = max(error(a, b) for a, b in zip(found, wanted, strict=True))
    assert {name: x for name, x in errors.items() if not x < 1e-5} == {}
    table = json.loads(TABLE.read_text("utf-8"))["kernels"]
    assert launched == {key.partition(",")[0] for row in table.values() for key in row}
