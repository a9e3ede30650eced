"""Test the command of docs/reproduce, and grids, claims and points of experiments."""

import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from importlib import import_module
from itertools import pairwise
from pathlib import Path

import aft
import erasing
import formal
import frame
import pytest
import reproduce as hook
from frame import (
    NAMES,
    Claim,
    Points,
    Runs,
    every,
    holds,
    load,
    order,
    results,
    verdict,
)
from matplotlib.figure import Figure

from fwlab import ops
from fwlab.models import MIXERS
from fwlab.plots import medians

DOCS = Path(__file__).resolve().parents[1] / "docs"
FOLDER = DOCS / "reproduce"

# --- Claims -----------------------------------------------------------------


def test_every_claim_is_recomputed_from_the_stored_points():
    """The stored table of claims equals the table recomputed from stored results."""
    assert hook.TABLE.read_text("utf-8") == hook.table()


def test_medians_leave_out_what_diverged():
    points = [{"S": 1, "loss": x} for x in (3.0, 1.0, None)]
    points += [{"S": 2, "loss": x} for x in (1.0, None, None)]
    assert medians(points, "S", "loss") == {1: 3.0}


def test_the_verdict_of_an_experiment():
    yes, no, overlap, left = (
        Claim("", "1 (Table 1)", "", *which)
        for which in ((True,), (False,), (True, False), (None,))
    )
    few = yes._replace(seeds=1)
    ours = [Claim("", "", "", which) for which in (True, False)]
    for claims, word in (
        ([yes, yes], "reproduced"),
        ([yes, ours[1]], "reproduced"),  # Published claims have priority over ours.
        ([no], "not"),
        ([yes, no], "partly"),
        ([yes, overlap], "partly"),
        ([overlap], "undecided"),
        ([overlap, few, left], "undecided so far"),
        ([yes, left], "reproduced so far"),
        ([left, ours[0]], "not run"),
        ([], "not run"),
        (ours[:1], "ours: holds"),
        (ours[1:], "ours: does not"),
        (ours, "ours: partly"),
    ):
        assert verdict(claims) == word


def test_claims_of_points_that_are_missing():
    """A claim that lacks results is "not run", unless other results contradict it."""
    assert order("", [[1.0], []]).verdict == order("", [[], []]).verdict == "not run"
    assert holds("", [], bool).verdict == "not run"
    low, high = [0.1] * 3, [0.8] * 3
    assert every("", {1: low, 2: []}, lambda x: x < 0.5).verdict == "not run"
    assert every("", {1: high, 2: []}, lambda x: x < 0.5).verdict == "does not"


def test_seeds_of_an_order():
    """`order` compares at least three seeds, and reports every overlapping pair."""
    assert order("", [[0.1, 0.2], [0.3, 0.4]]).apart is None
    clear, mixed = [[0.1, 0.2, 0.3], [0.5, 0.6, 0.7]], [0.4, 0.55, 0.8]
    assert order("", [*clear, mixed]).verdict == "seeds overlap"
    assert order("", [*clear, [0.2, 0.4, 0.55]]).verdict == "seeds overlap"


def test_a_rate_with_fewer_seeds_is_not_chosen():
    same = {"task": "Shakespeare", "map": "DPFP", "erased": "the key", "loss": 1.0}
    losses = ((0.1, 1, 0.5), (0.01, 1, 0.7), (0.01, 2, 0.8))
    points = Points(
        {**same, "lr": lr, "seed": seed, "chosen_by": x} for lr, seed, x in losses
    )
    assert {*erasing.best(points)["lr"]} == {0.01}


# --- Files ------------------------------------------------------------------


def tiny(quick: bool) -> list[dict]:
    return [{"S": S, "seed": seed} for S in (2, 3) for seed in (1, 2)]


TINY = replace(
    load("regression"),
    name="tiny",
    points=tiny,
    run=lambda point: {"loss": point["S"] / 4},
    claims=lambda points: [holds("small", points["loss"], lambda x: x < 1)],
    draw=lambda points: Figure(),
    setup=lambda point: {"lr": 0.1},
)


def test_points_are_saved_one_by_one_and_not_run_again(tmp_path):
    runs = Runs(TINY, True, tmp_path)
    first = runs.run(2)
    saved = runs.read(2)
    assert saved["point"] == first and first["S"] == 3 and first["setup"] == {"lr": 0.1}
    assert saved["run"]["command"] == "python docs/reproduce/tiny.py --quick"
    assert saved["run"]["commit"] and saved["run"]["threads"] == 1
    assert [runs.read(i) is None for i in range(4)] == [True, True, False, True]
    assert Runs(TINY, False, tmp_path).read(2) is None  # The full run has no result.
    with pytest.raises(ValueError, match="a point from 0 to 3, got 4"):
        runs.run(4)


def test_a_grid_can_be_run_in_parts(tmp_path):
    """A grid can be run in parts, even if results of an earlier part are deleted."""
    runs = Runs(TINY, True, tmp_path)
    one, two = runs.run(3), runs.run(2)
    assert [p["seed"] for p in runs.collect()["points"]] == [two["seed"], one["seed"]]
    assert (tmp_path / "tiny.quick.svg").exists()
    shutil.rmtree(tmp_path / ".points")
    with pytest.raises(ValueError, match="nothing to collect"):
        runs.collect()
    first = runs.run(0)
    again = runs.collect()
    points = [{n: v for n, v in p.items() if n != "run"} for p in again["points"]]
    assert points == [first, two, one]
    assert (
        results("tiny", True, tmp_path) == again
        and results("tiny", False, tmp_path) is None
    )
    # Results with other settings are dropped.
    changed = replace(TINY, points=lambda quick: [{**p, "S": 5} for p in tiny(quick)])
    Runs(changed, True, tmp_path).run(1)
    assert len(Runs(changed, True, tmp_path).collect()["points"]) == 1


@pytest.mark.parametrize("damage", ["", "3", '{"point": 3}'])
def test_a_damaged_point_runs_again(tmp_path, damage):
    runs = Runs(TINY, True, tmp_path)
    runs.run(0), runs.run(1)
    (tmp_path / ".points" / "tiny.quick" / "0000.json").write_text(damage)
    with pytest.warns(UserWarning, match="is damaged: its point runs again$"):
        assert len(runs.collect()["points"]) == 1


@pytest.mark.parametrize("damage", ["", "[1]", "{}", "null", '{"experiment": "tiny"}'])
def test_a_file_that_is_something_else_is_named(tmp_path, damage):
    path = tmp_path / "tiny.quick.json"
    path.write_text(damage)
    Runs(TINY, True, tmp_path).run(0)
    with pytest.raises(ValueError, match=f"^{path} is "):
        Runs(TINY, True, tmp_path).collect()
    assert path.read_text() == damage


def test_two_texts_never_mix(tmp_path):
    points = [{"corpus": "any", "seed": seed} for seed in range(2)]
    read = replace(
        TINY,
        points=lambda quick: points,
        run=lambda point: {"corpus_name": "x", "corpus_sha256": str(point["seed"])},
    )
    runs = Runs(read, True, tmp_path)
    runs.run(0)
    first = runs.collect()
    runs.run(1)
    with pytest.raises(ValueError, match="2 texts as corpus 'any': use another folder"):
        runs.collect()
    assert results("tiny", True, tmp_path) == first
    points[1]["corpus"] = "python"  # Named corpora may differ.
    runs = Runs(read, True, tmp_path)
    runs.run(1)
    assert len(runs.collect()["points"]) == 2


# --- The command ------------------------------------------------------------


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    """Return a function that runs `TINY` as a command, and returns the output."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["x.py", *arguments, "--out", str(tmp_path)])
        monkeypatch.setattr(frame, "load", lambda name: TINY)
        try:
            frame.main("tiny.py")
        except SystemExit as ended:
            assert ended.code == 2
            return capsys.readouterr().err
        return capsys.readouterr().out

    return run


def test_the_command_runs_one_point_and_collects(command, tmp_path):
    assert command("--list").count(" -  ") == 4 and not [*tmp_path.iterdir()]
    assert "S 2, seed 1, loss 0.5" in command("--point", "0")
    assert command("--list").count("finished") == 1
    *_, said, drawn = command("--collect").splitlines()
    assert said == "tiny: ours: undecided (1 of 4 points, 1 of them run here)"
    assert drawn == str(tmp_path / "tiny.svg") and Path(drawn).exists()


def test_errors_of_the_command(command, tmp_path):
    """The command reports errors before it computes a result."""
    for arguments, what in {
        "--jobs 0": "expected jobs to be at least 1, got 0",
        "--point 999": "expected a point from 0 to ",
        "--collect": "nothing to collect",
        "--collect --list": "not allowed with argument",
    }.items():
        assert what in command(*arguments.split())
    os.mkfifo(tmp_path / "tiny.svg")
    assert "tiny.svg to be a file, got a pipe" in command()
    assert not (tmp_path / ".points").exists()


@pytest.mark.slow
def test_a_killed_run_continues_where_it_was(tmp_path):
    """After SIGKILL, workers end, finished results remain, and a new run continues."""
    run = [sys.executable, FOLDER / "favor-underflow.py", "--quick"]
    run += ["--jobs", "2", "--out", str(tmp_path)]
    folder = tmp_path / ".points" / "favor-underflow.quick"
    first = subprocess.Popen(run, stderr=subprocess.DEVNULL, start_new_session=True)
    while len(list(folder.glob("*.json"))) < 3:
        assert first.poll() is None
        time.sleep(0.2)
    first.send_signal(signal.SIGKILL)
    first.wait()
    end = time.monotonic() + 60
    while time.monotonic() < end:
        try:
            os.killpg(first.pid, 0)
        except ProcessLookupError:
            break
        time.sleep(0.2)
    else:
        pytest.fail("the workers live on")
    times = {p.name: p.stat().st_mtime_ns for p in folder.glob("*.json")}
    assert len(times) >= 3
    subprocess.run(run, check=True, capture_output=True)
    for name, when in times.items():
        assert (folder / name).stat().st_mtime_ns == when
    found = results("favor-underflow", True, tmp_path)
    assert len(found["points"]) == found["grid"]


# --- All experiments --------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_every_grid(name):
    """Every grid has distinct runs, three or more seeds, and a run for each result."""
    for quick in (True, False):
        points = load(name).points(quick)
        assert len({json.dumps(point) for point in points}) == len(points)
        for point in points:
            assert point.keys() == points[0].keys()
            assert all(isinstance(v, int | float | str) for v in point.values())
        sizes = [point.get("S", 0) for point in points]
        assert all(a <= b for a, b in pairwise(sizes))  # Small numbers S come first.
        assert {point["seed"] for point in points} >= {1, 2, 3}
        known = {tuple(point[n] for n in points[0]) for point in points}
        if saved := results(name, quick):
            assert {
                tuple(p.get(n) for n in points[0]) for p in saved["points"]
            } <= known


def test_a_new_mixer_grows_no_published_grid(monkeypatch):
    monkeypatch.setitem(MIXERS, "new-rule", MIXERS["delta"])
    monkeypatch.setitem(ops.TABLE, "new_rule", ops.TABLE["delta_rule"])
    for name in NAMES:
        again = runpy.run_path(str(FOLDER / f"{name}.py"))
        for quick in (True, False):
            assert again["points"](quick) == load(name).points(quick)


@pytest.mark.parametrize(
    ("name", "some", "apart"),
    [
        ("aft", {"task": "digits"}, 0.005),
        ("replacing", {}, 0.02),
        ("feedback-depth", {"kind": "accuracy", "layers": 4}, 0.02),
    ],
)
def test_models_that_are_compared_are_equally_large(name, some, apart):
    sizes = results(name, False)["points"](**some)["parameters"]
    assert max(sizes) < (1 + apart) * min(sizes)


# --- A tiny run of each experiment ------------------------------------------

TEXT = "to be, or not to be, that is the question. " * 400
SIZES = {"layers": 1, "d_model": 16, "batch": 2, "steps": 2, "warmup": 1}
PARITY = formal.TASKS["parity"]
#: Replacements, by (script, name), that shorten the runs.
SHORT = {
    ("text", "load"): lambda name: TEXT,
    ("text", "SIZES"): {"small": SIZES},
    ("erasing", "corpus"): lambda name: TEXT,
    ("erasing", "tokens"): erasing.tokens.__wrapped__,
    ("erasing", "STEPS"): {"pairs": 20, "text": 20},
    ("erasing", "TEST"): 50,
    ("capacity-law", "STEPS"): 20,
    ("translation", "TEST"): 2,
    ("aft", "load"): lambda name: TEXT * 25,
    ("aft", "characters"): aft.characters.__wrapped__,
    ("feedback-depth", "TIMED"): (2, 4),
    ("state-tracking", "FAR"): 40,
    ("regression", "STEPS"): 20,
    ("mqar", "TRAIN"): 80,
    ("mqar", "TEST"): 50,
    ("mqar", "BATCH"): 4,
    ("formal", "TASKS"): {
        "parity": PARITY._replace(sizes=PARITY.sizes | {"steps": 20})
    },
    ("formal", "FAR"): (40, 60),
    ("hybrid", "TEST"): 4,
}
MEMORY = {"S": 4, "d_key": 4, "budget": 20}
PROGRAMS = {"statements": 12, "batch": 2, "steps": 20, "budget": 20, "parallel": 20}
IMAGES = {"d_model": 8, "layers": 1, "budget": 1}
#: Experiments, settings that select a run, and settings that make the run smaller.
TINY_POINTS = [
    ("erasing", {"task": "pairs, 0.3", "erased": "the key"}, {}),
    ("erasing", {"task": "source code", "erased": "the key"}, {}),
    ("capacity-law", {}, {}),
    ("rates", {"mixer": "convolution + attention"}, {}),
    ("capacity", {"rule": "sum"}, MEMORY),
    ("overwrite", {"rule": "delta"}, MEMORY),
    ("favor-underflow", {}, MEMORY),
    ("ablation", {"positions": 1, "normalize": 1}, {}),
    ("language-model", {"mixer": "transformer-xl"}, {}),
    ("recall", {"mixer": "delta"}, {"pairs": 2, "symbols": 4, "budget": 100}),
    ("state-size", {"model": "gated-delta"}, {}),
    ("state-size", {"memory": 64}, {}),
    ("translation", {"map": "favor"}, {"train": 4, "budget": 20, "batch": 2}),
    *(("aft", {"task": task}, IMAGES) for task in ("layer", "digits", "text")),
    ("aft", {"task": "windows", "mixer": "aft-local, 4"}, IMAGES),
    ("aft", {"mixer": aft.WHOLE}, IMAGES | {"d_model": 64}),
    *(("feedback-tasks", {"task": t}, {"steps": 20}) for t in ("reverse", "count")),
    ("aft-stability", {}, {}),
    ("feedback-variables", {"model": "last print"}, PROGRAMS),
    ("feedback-variables", {"model": "feedback"}, PROGRAMS),
    *(("feedback-depth", {"kind": kind}, PROGRAMS) for kind in ("rule", "time")),
    ("feedback-depth", {"model": "transformer"}, PROGRAMS),
    ("feedback-curriculum", {"way": "from a transformer"}, PROGRAMS),
    ("state-tracking", {"weights": "trained"}, {"budget": 20}),
    ("state-tracking", {"task": "topics"}, {}),
    ("reversal", {}, {}),
    ("replacing", {"layer": "delta without removal", "conv_size": 4}, {}),
    ("regression", {"rule": "delta"}, {}),
    ("mqar", {"mixer": "delta"}, {"epochs": 2}),
    ("length", {"mixer": "delta"}, {}),
    ("formal", {"task": "parity"}, {}),
    ("hybrid", {}, {"pairs": 4, "budget": 20}),
]


@pytest.mark.parametrize(("name", "some", "smaller"), TINY_POINTS)
def test_a_tiny_point(name, some, smaller, monkeypatch):
    """A tiny run has the fields of a stored result, and is reproducible."""
    for (script, what), value in SHORT.items():
        monkeypatch.setattr(import_module(script), what, value)
    experiment, stored = load(name), results(name, True) or results(name, False)
    if not stored["points"](**some):
        stored = results(name, False)
    point = Points(experiment.points(stored["quick"]))(**some)[0]
    one, other = (experiment.run(point | smaller) for _ in "ab")
    (known, *_) = stored["points"](**some)
    found = {*point, *one} | {"run", "seconds", "cpu_seconds"}
    assert found == known.keys() - {"setup"}
    for what in ("loss", "accuracy", "curve", "near", "error", "value"):
        assert one.get(what) == other.get(what)
    assert experiment.setup(point).keys() == known.get("setup", {}).keys()


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_quick_version(name, tmp_path):
    """The quick version reproduces the verdicts of the claims on the site.

    Claims with overlapping seeds may differ on another machine.
    """
    experiment, published = load(name), results(name, True)
    if published is None:
        pytest.skip("its quick version is not on the site yet")
    runs = Runs(experiment, True, tmp_path)
    for _ in runs.run_all(1):
        pass
    points = runs.collect()["points"]
    known = [*experiment.claims(published["points"])]
    clear = [c for c in known if c.holds is not None and c.apart is not False]
    again = {claim.text: claim.holds for claim in experiment.claims(points)}
    assert clear
    assert {c.text: again[c.text] for c in clear} == {c.text: c.holds for c in clear}
