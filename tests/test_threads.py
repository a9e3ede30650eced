"""How many threads train, and how they wait for each other."""

import io
import json
import os
import subprocess
import sys

import pytest
import terminal
import torch

from fwlab.training import Config, Trainer, threads
from fwlab.training.threads import Setting, choose, fastest, settings, times

ONE, TWO, ASLEEP = settings(2)
SMALL = Config(layers=1, heads=2, d_model=16, block=16, batch=4, device="cpu")


@pytest.fixture
def cores(monkeypatch):
    """Two, for threads of which nothing is decided; every run is a long one."""
    before = torch.get_num_threads()
    for name in threads.GIVEN:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(threads, "LONG", 0)
    monkeypatch.setattr(sys, "argv", sys.orig_argv[1:])
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def chosen(cores, monkeypatch):
    """`chosen(found, ...)`: what happens if the trial finds these times, and
    what is said of it.
    """

    def choice(found, *before, steps=2000):
        said, started, tried = [], [], []

        def measured(config, vocabulary, settings):
            tried.extend(settings)
            return {s: found[s] for s in settings}

        monkeypatch.setattr(threads, "times", measured)
        monkeypatch.setattr(threads, "_start_again", started.append)
        choose(SMALL, 30, steps, *before, said.append)
        return (started or [torch.get_num_threads()])[0], tried, said

    return choice


def test_settings():
    assert settings(1) == [(1, False)]
    assert settings(6) == [(1, False), *((n, a) for n in (2, 4, 6) for a in (0, 1))]
    assert [str(s) for s in (ONE, ASLEEP)] == [
        "1 thread",
        "2 threads that sleep while they wait",
    ]


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ((0.059, 0.060, 0.047), ASLEEP),
        ((0.059, 0.040, 0.047), TWO),
        ((0.050, 0.049, 0.048), ONE),  # nearly as fast, with fewer threads
        ((0.060, 0.048, 0.047), TWO),
    ],
)
def test_the_fastest_setting_wins(chosen, found, expected):
    found = dict(zip(settings(2), found, strict=True))
    assert fastest(found) == expected
    then, tried, said = chosen(found, None)
    assert then == (ASLEEP if expected == ASLEEP else expected.number)
    assert tried == [ONE, TWO, ASLEEP]
    (line,) = said
    assert line.startswith(f"training on {expected}: {1e3 * found[expected]:.0f} ms")
    assert all(f"{1e3 * t:.0f} ms" in line for t in found.values())


def test_what_cannot_start_again_stays_awake(chosen, monkeypatch):
    """A program that calls the command."""
    monkeypatch.setattr(sys, "argv", ["fwlab", "train"])
    assert chosen({ONE: 0.1, TWO: 0.09, ASLEEP: 0.01}, None)[:2] == (2, [ONE, TWO])


def test_a_run_keeps_its_number_of_threads(chosen):
    """It is resumed bit for bit."""
    found = {ONE: 0.1, TWO: 0.3, ASLEEP: 0.2}
    assert chosen(found, 2)[:2] == (ASLEEP, [TWO, ASLEEP])
    assert chosen(found, 1) == (1, [], [])
    torch.set_num_threads(2)
    assert chosen(found, 64)[:2] == (1, [ONE, TWO, ASLEEP])  # of a larger machine


def test_you_decide(chosen, monkeypatch):
    """The number, or only how threads wait."""
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    said = "training on 2 threads, with OMP_WAIT_POLICY=ACTIVE"
    assert chosen({}, None) == (2, [], [said])
    said = "training on 1 thread, with OMP_WAIT_POLICY=ACTIVE"
    assert chosen({}, 1) == (1, [], [said])
    torch.set_num_threads(2)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    said = "training on 2 threads, with OMP_NUM_THREADS=2 and OMP_WAIT_POLICY=ACTIVE"
    assert chosen({}, 1) == (2, [], [said])


def test_no_trial(chosen, monkeypatch):
    """In a short run, in one of several processes, and after a new start."""
    monkeypatch.setattr(threads, "LONG", 2**40)
    assert chosen({}, 2) == (2, [], [])
    with monkeypatch.context() as decided:
        decided.setenv("OMP_WAIT_POLICY", "PASSIVE")
        assert chosen({}, None) == (2, [], [])
    assert chosen({}, None) == (1, [], [])
    torch.set_num_threads(2)
    assert chosen({}, 1) == (1, [], [])
    torch.set_num_threads(2)
    monkeypatch.setattr(threads, "LONG", 0)
    with monkeypatch.context() as several:
        several.setenv("WORLD_SIZE", "2")
        assert chosen({}, None) == (2, [], [])
    monkeypatch.setenv(threads.CHOSEN, "1")
    assert chosen({}, None) == (2, [], [])
    assert threads.CHOSEN not in os.environ  # of what this process starts


def test_the_command(cores, monkeypatch, tmp_path):
    """A run goes on with as many threads as it has begun with, or as you say."""
    monkeypatch.chdir(tmp_path)
    tmp_path.joinpath("text.txt").write_text("the quick brown fox jumps. " * 60)
    size = ("--layers", "1", "--heads", "2", "--d-model", "16", "--block", "16")
    command = [
        "train",
        *size,
        "--corpus",
        "text.txt",
        "--device",
        "cpu",
        "--out",
        "run",
    ]
    found = {ONE: 0.1, TWO: 0.2}
    monkeypatch.setattr(threads, "times", lambda *_: found)
    monkeypatch.setattr(Trainer, "sample", lambda self, length: "")

    def printed(*arguments):
        code, out, err = terminal.fwlab(*command, *arguments)
        assert code == 0, err
        return out

    def used():
        return json.loads(tmp_path.joinpath("run/config.json").read_text())["threads"]

    assert "training on 1 thread: 100 ms" in printed("--steps", "2") and used() == 1
    torch.set_num_threads(2)
    assert "training on" not in printed("--steps", "3", "--resume") and used() == 1
    options = "--steps", "4", "--resume", "--threads", "2"
    assert "training on" not in printed(*options) and used() == 2
    assert "training on 1 thread: 100 ms" in printed("--dry-run")


def test_a_trial(cores, monkeypatch):
    """In this process instead of two, and on one thread: only what they are
    given and print counts.
    """
    seen = []

    def run(command, *, input, env, **_):
        numbers = json.loads(input)["numbers"]
        seen.append((numbers, env.get(threads.POLICY)))
        out = io.StringIO()
        with monkeypatch.context() as child:
            child.setattr(sys, "stdin", io.StringIO(input))
            child.setattr(sys, "stdout", out)
            child.setattr(torch, "set_num_threads", lambda number: None)
            exec(command[2], {})
        return subprocess.CompletedProcess(command, 0, out.getvalue())

    monkeypatch.setattr(threads, "SECONDS", 0.0)
    monkeypatch.setattr(threads.subprocess, "run", run)
    found = times(SMALL, 30, settings(2))
    assert seen == [([1, 2], None), ([2], "PASSIVE")]
    assert {*found} == {ONE, TWO, ASLEEP} and min(found.values()) > 0
    failed = subprocess.CompletedProcess([], 1, "")
    monkeypatch.setattr(threads.subprocess, "run", lambda *_, **__: failed)
    assert times(SMALL, 30, settings(2)) == {}


def test_a_hopeless_setting_ends_at_its_first_step(monkeypatch, capsys):
    steps = iter([9.0, 1.0, 1.0, 1.0, 4.0, 2.5, 0.5, 0.5, 0.6])
    monkeypatch.setattr(threads, "Step", lambda *_: lambda: next(steps))
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    given = {"config": {}, "vocabulary": 30, "numbers": [1, 2, 4]}
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(given)))
    threads._try()
    assert json.loads(capsys.readouterr().out) == [1.0, 4.0, 0.5]


def test_a_new_start(monkeypatch):
    seen = []
    monkeypatch.setattr(os, "execve", lambda *command: seen.append(command))
    threads._start_again(Setting(2, True))
    ((path, command, environment),) = seen
    assert path == sys.executable and command[1:] == sys.orig_argv[1:]
    changed = {k: v for k, v in environment.items() if os.environ.get(k) != v}
    assert changed == {
        "OMP_NUM_THREADS": "2",
        "OMP_WAIT_POLICY": "PASSIVE",
        threads.CHOSEN: "1",
    }
