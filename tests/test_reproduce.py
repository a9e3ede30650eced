"""The frame of docs/reproduce: points, claims, files, the command; all grids and claims."""

import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
import time
import warnings
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import frame
import pytest
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

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "reproduce"

# --- Claims -----------------------------------------------------------------


def test_a_table_selects_and_groups():
    points = Points(
        {"S": S, "seed": seed, "loss": S / seed} for S in (2, 4) for seed in (1, 2)
    )
    assert points(S=4)["loss"] == [4, 2] and points(S=4)(seed=2)[0]["loss"] == 2
    assert {S: own["loss"] for S, own in points.by("S").items()} == {
        2: [2, 1],
        4: [4, 2],
    }
    assert [*points.by("S", "seed")] == [(2, 1), (2, 2), (4, 1), (4, 2)]


def test_medians_leave_out_what_diverged():
    points = [{"S": 1, "loss": x} for x in (3.0, 1.0, None)]
    points += [{"S": 2, "loss": x} for x in (1.0, None, None)]
    assert medians(points, "S", "loss") == {1: 3.0}


@pytest.mark.parametrize(
    ("which", "published", "ours"),
    [
        ((None,), "not run", "not run"),
        ((True,), "reproduced", "holds"),
        ((False,), "not", "does not"),
        ((True, True), "reproduced", "holds"),
        ((True, False), "seeds overlap", "seeds overlap"),
        ((False, False), "seeds overlap", "seeds overlap"),
    ],
)
def test_the_verdict_of_a_claim(which, published, ours):
    assert Claim("", "1 (Table 1)", "", *which).verdict == published
    assert Claim("", "", "", *which).verdict == ours


def test_few_seeds_and_untrained_models_are_no_evidence():
    assert order("", [[1.0], [2.0, 3.0, 4.0]], "1 (Table 1)").verdict == "one seed"
    assert holds("", [1.0, 2.0], bool).verdict == "one seed"
    low, none = [0.1] * 3, {2: [0.9]}
    assert every("", {1: low, 2: [0.2]}, lambda x: x < 0.5).verdict == "one seed"
    assert every("", {1: low} | none, lambda x: x < 0.5).verdict == "one seed"
    # One failure of three seeds decides, whatever the others have.
    assert every("", {1: [0.8] * 3} | none, lambda x: x < 0.5).verdict == "does not"
    assert (
        every("", {1: [0.1, 0.9, 0.8]} | none, lambda x: x < 0.5).verdict == "one seed"
    )
    trained = {"a": [2.0, 2.1, 2.2], "b": [2.4, 2.45, 2.6]}
    assert order("{}", trained, trivial=2.5).verdict == "holds"
    assert order("{}", trained, trivial=2.45).verdict == "not trained far enough"


def test_the_verdict_of_an_experiment():
    yes, no, overlap, left = (
        Claim("", "1 (Table 1)", "", *which)
        for which in ((True,), (False,), (True, False), (None,))
    )
    few = yes._replace(seeds=1)
    ours = [Claim("", "", "", which) for which in (True, False)]
    for claims, word in (
        ([yes, yes], "reproduced"),
        ([yes, ours[1]], "reproduced"),  # ours do not count beside published ones
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


LOW, HIGH, OVER = [1.0, 3.0, 2.0], [4.0, 6.0, 5.0], [2.5, 4.0, 3.5]
FAILED = [None] * 3


@pytest.mark.parametrize(
    ("sides", "found", "yes", "apart"),
    [
        ([LOW, HIGH], "2 [1, 3] against 5 [4, 6]", True, True),
        ([HIGH, LOW], "5 [4, 6] against 2 [1, 3]", False, True),
        ([LOW, OVER], "2 [1, 3] against 4 [2, 4]", True, False),
        (
            [LOW[:2], HIGH],
            "2 [1, 3] against 5 [4, 6]",
            True,
            None,
        ),  # two seeds say little
        ([[1.0], [2.0]], "1 against 2", True, None),
        # A seed that failed is above all others; one that was not run says nothing.
        ([LOW, [4.0, None, 5.0]], "2 [1, 3] against 5 [4, failed]", True, True),
        ([LOW, []], "2 [1, 3]", None, None),
        ([FAILED, []], "failed [failed, failed]", None, None),
        ([FAILED, LOW], "failed [failed, failed] against 2 [1, 3]", False, True),
        # One pair in the wrong order refutes a chain, if all seeds of this pair agree.
        ([LOW, HIGH, [7.0, 8.0, 9.0]], None, True, True),
        ([LOW, HIGH, [5.5, 8.0, 9.0]], None, True, False),
        ([LOW, OVER, [*LOW[:2], 0.5]], None, False, False),
        ([LOW, OVER, [0.5] * 3], None, False, True),
        ([LOW, HIGH, [5.5] * 3 + [4.5]], None, True, False),
        ([LOW, HIGH, [4.5, 4.8, 5.5]], None, False, False),
        ([LOW, [1.5, 1.6, 1.7], [0.5] * 3], None, False, True),
    ],
)
def test_an_order_goes_by_medians_and_seeds(sides, found, yes, apart):
    claim = order("a {}", sides, "1, 2 (Table 1)", spec=".0f")
    assert (claim.holds, claim.apart) == (yes, apart) and found in (None, claim.found)
    mirrored = [[None if x is None else -x for x in side] for side in sides]
    if all(None not in side for side in sides):
        same = order("", mirrored, sign=">")
        assert (same.holds, same.apart) == (yes, apart)


def test_sides_have_names():
    claim = order("loss: {}", {"delta": LOW, "sum": HIGH, 3: [9.0]}, spec=".0f")
    assert claim.text == "loss: delta < sum < 3"
    assert order("{}", {"a": [2], "b": [1]}, sign=">")[:4] == (
        "a > b",
        "",
        "2.000 against 1.000",
        True,
    )


def test_a_limit_is_true_of_all_seeds_or_of_none():
    for most, yes, apart in (
        (4, True, True),
        (3, True, False),
        (2, False, False),
        (1, False, True),
    ):
        claim = holds("", LOW, lambda x, most=most: x < most)
        assert (claim.holds, claim.apart) == (yes, apart)
    assert (
        holds("", LOW[:2], bool)[3:5] == (True, None)
        and holds("", [], bool).holds is None
    )


@pytest.mark.parametrize(
    ("groups", "yes", "apart", "shown"),
    [
        (
            {1: [0.1] * 3, 2: [0.2] * 3},
            True,
            True,
            "0.2 [0.2, 0.2] (S = 2), the worst of 2",
        ),
        (
            {1: [0.1] * 3, 2: [0.2, 0.2, 0.9]},
            True,
            False,
            "0.2 [0.2, 0.9] (S = 2), the worst of 2",
        ),
        ({1: [0.1] * 3, 2: [0.2]}, True, None, "0.2 (S = 2), the worst of 2"),
        # A group that fails decides, if its seeds agree, whatever others say.
        (
            {1: [0.1, 0.1, 0.9], 2: [0.8] * 3},
            False,
            True,
            "0.8 [0.8, 0.8] (S = 2), the worst of 2",
        ),
        (
            {1: [0.1] * 3, 2: [0.8, 0.8, 0.2]},
            False,
            False,
            "0.8 [0.2, 0.8] (S = 2), the worst of 2",
        ),
        (
            {1: [None] * 3, 2: [0.1] * 3},
            False,
            True,
            "failed [failed, failed] (S = 1), the worst of 2",
        ),
        ({1: [0.1] * 3, 2: []}, None, True, "0.1 [0.1, 0.1] (S = 1)"),
        ({1: [0.8] * 3, 2: []}, False, True, "0.8 [0.8, 0.8] (S = 1)"),
        ({1: [], 2: []}, None, False, "–"),
    ],
)
def test_something_is_true_of_every_group(groups, yes, apart, shown):
    claim = every("", groups, lambda x: x < 0.5, spec=".1f", worst=abs)
    assert (claim.holds, claim.found) == (yes, shown)
    assert yes is None or claim.apart is apart
    whole = every("", {1: [0.1], 2: [0.7]}, lambda x: x < 0.5, spec=".1f", x="pairs")
    assert whole.found == "0.1 (pairs = 1), 0.7 (pairs = 2)"


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
    # A point with other settings is another point.
    changed = replace(TINY, points=lambda quick: [{**p, "S": 5} for p in tiny(quick)])
    assert Runs(changed, True, tmp_path).read(2) is None
    assert Runs(TINY, False, tmp_path).read(2) is None  # of the full version
    with pytest.raises(ValueError, match="a point from 0 to 3, got 4"):
        runs.run(4)


def test_a_grid_can_be_run_in_parts(tmp_path):
    """Also where the finished points of an earlier part are gone."""
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
    # Points with other settings do not stay.
    changed = replace(TINY, points=lambda quick: [{**p, "S": 5} for p in tiny(quick)])
    Runs(changed, True, tmp_path).run(1)
    assert len(Runs(changed, True, tmp_path).collect()["points"]) == 1


@pytest.mark.parametrize("damage", ["", "3", "{}", '{"point": 3}'])
def test_a_damaged_point_runs_again(tmp_path, damage):
    runs = Runs(TINY, True, tmp_path)
    runs.run(0), runs.run(1)
    (tmp_path / ".points" / "tiny.quick" / "0000.json").write_text(damage)
    if damage != "{}":
        with pytest.warns(UserWarning, match="is damaged: its point runs again$"):
            assert runs.read(0) is None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
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
    digests = ["8a73136f699d", "8a73136f699d", "0123456789ab"]
    points = [{"corpus": "any", "seed": seed} for seed in range(3)]
    read = replace(
        TINY,
        points=lambda quick: points,
        run=lambda point: {"loss": 0.5, "corpus_sha256": digests[point["seed"]]},
    )
    runs = Runs(read, True, tmp_path)
    runs.run(0), runs.run(1)
    first = runs.collect()
    shutil.rmtree(tmp_path / ".points")
    runs.run(2)
    with pytest.raises(ValueError, match="2 texts as corpus 'any': use another folder"):
        runs.collect()
    assert results("tiny", True, tmp_path) == first
    points[2]["corpus"] = "python"  # two corpora by their names are no mixture
    runs = Runs(read, True, tmp_path)
    runs.run(2)
    assert len(runs.collect()["points"]) == 3


# --- The command ------------------------------------------------------------


def script(name, *arguments, **options):
    command = [sys.executable, str(FOLDER / f"{name}.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, **options)


def test_the_command_runs_one_point_and_collects(tmp_path):
    given = ("--quick", "--out", tmp_path)
    listed = script("reversal", *given, "--list")
    assert len(listed.stdout.splitlines()) == len(load("reversal").points(True))
    assert not listed.returncode and not [*tmp_path.iterdir()]
    assert "error" in script("reversal", *given, "--point", 0).stdout
    assert "finished" in script("reversal", *given, "--list").stdout.splitlines()[0]
    done = script("reversal", *given, "--collect")
    assert (
        done.stdout.splitlines()[-1]
        == "reversal.quick: not run (1 of 216 points, 1 of them run here)"
    )
    assert len(results("reversal", True, tmp_path)["points"]) == 1


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["--jobs", "0"], "expected jobs to be at least 1, got 0"),
        (["--point", "999"], "expected a point from 0 to "),
        (["--collect"], "nothing to collect"),
        (["--collect", "--list"], "not allowed with argument"),
    ],
)
def test_errors_of_the_command(arguments, what, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["x.py", *arguments, "--out", str(tmp_path)])
    monkeypatch.setattr(frame, "load", lambda name: TINY)
    with pytest.raises(SystemExit) as ended:
        frame.main("tiny.py")
    assert ended.value.code == 2 and what in capsys.readouterr().err


def test_the_command_complains_before_it_works(tmp_path, monkeypatch, capsys):
    os.mkfifo(tmp_path / "tiny.svg")
    monkeypatch.setattr(sys, "argv", ["x.py", "--out", str(tmp_path)])
    never = replace(TINY, run=lambda point: pytest.fail("runs"))
    monkeypatch.setattr(frame, "load", lambda name: never)
    with pytest.raises(SystemExit):
        frame.main("tiny.py")
    assert "tiny.svg to be a file, got a pipe" in capsys.readouterr().err


@pytest.mark.slow
def test_a_killed_run_continues_where_it_was(tmp_path):
    """Two processes, SIGKILL to the first: workers end, points are kept."""
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
    """Points are flat and different, with three seeds; committed ones are among them."""
    for quick in (True, False):
        points = load(name).points(quick)
        assert len({json.dumps(point) for point in points}) == len(points)
        for point in points:
            assert point.keys() == points[0].keys()
            assert all(isinstance(v, int | float | str) for v in point.values())
        sizes = [point.get("S", 0) for point in points]
        assert all(a <= b for a, b in pairwise(sizes))  # stopped: all maps up to some S
        assert {point["seed"] for point in points} >= {1, 2, 3}
        known = {tuple(point[n] for n in points[0]) for point in points}
        saved = results(name, quick)
        for p in saved["points"] if saved else []:
            assert tuple(p.get(n) for n in points[0]) in known, p


def test_a_new_mixer_grows_no_published_grid(monkeypatch):
    monkeypatch.setitem(MIXERS, "new-rule", MIXERS["delta"])
    monkeypatch.setitem(ops.TABLE, "new_rule", ops.TABLE["delta_rule"])
    for name in NAMES:
        again = runpy.run_path(str(FOLDER / f"{name}.py"))
        for quick in (True, False):
            assert again["points"](quick) == load(name).points(quick)


def held(name: str, points: Points) -> None:
    """Compare with what the results of the site say clearly.

    Where their seeds overlap, another machine may say something else.
    """
    experiment = load(name)
    published = results(name, True)
    if published is None:
        pytest.skip("its quick version is not on the site yet")
    known = [*experiment.claims(published["points"])]
    clear = [c for c in known if c.holds is not None and c.apart is not False]
    again = {claim.text: claim.holds for claim in experiment.claims(points)}
    assert clear
    assert {c.text: again[c.text] for c in clear} == {c.text: c.holds for c in clear}


#: One each time, the others with `make test-all`.
QUICK = [
    pytest.param(name, marks=[pytest.mark.slow] * (name != "aft-stability"))
    for name in NAMES
]


@pytest.mark.parametrize("name", QUICK)
def test_quick_version(name, tmp_path):
    runs = Runs(load(name), True, tmp_path)
    for _ in runs.run_all(1):
        pass
    held(name, runs.collect()["points"])
