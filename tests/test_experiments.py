"""`fwlab reproduce`: the task, the model, the frame, and quick versions."""

import itertools
import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from itertools import pairwise
from math import inf
from pathlib import Path

import pytest
import torch
from matplotlib.figure import Figure
from terminal import fwlab

from fwlab import ops
from fwlab.data import retrieval
from fwlab.experiments import (
    EXPERIMENTS,
    Runs,
    aft_stability,
    capacity,
    favor_underflow,
    results,
    reversal,
    state_tracking,
    verdict,
)
from fwlab.experiments.experiment import Claim, below_part, compared
from fwlab.experiments.retrieval import Retriever, feature_map, loss, train
from fwlab.experiments.runs import texts_of
from fwlab.models import MIXERS
from fwlab.plots import medians

ROOT = Path(__file__).resolve().parents[1]

# --- The task -----------------------------------------------------------


def test_without_repetition_every_key_and_value_occurs_once():
    pairs = retrieval(5, 7)
    for part in pairs[:2]:
        assert torch.equal(part.sort(-1).values, torch.arange(7).expand(5, 7))
    assert torch.equal(pairs.answers.gather(1, pairs.keys), pairs.values)
    short = retrieval(5, 7, 3)
    assert short.keys.shape == (5, 3) and ((short.answers < 0).sum(-1) == 4).all()


def test_with_repetition_the_most_recent_value_counts():
    keys, values, answers = retrieval(20, 6, 12, repeat=True)
    for row in range(20):
        wanted = dict(zip(keys[row].tolist(), values[row].tolist(), strict=True))
        assert answers[row].tolist() == [wanted.get(key, -1) for key in range(6)]


def test_the_same_seed_gives_the_same_task():
    same = [retrieval(3, 5, generator=torch.Generator().manual_seed(1)) for _ in "ab"]
    assert all(torch.equal(*parts) for parts in zip(*same, strict=True))


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ((-1, 3), "batch to be at least 0, got -1"),
        ((1, 0), "symbols to be at least 1, got 0"),
        ((1, 3, 4), "length to be from 0 to 3, the number of symbols, got 4"),
    ],
)
def test_sizes_that_do_not_fit(sizes, said):
    with pytest.raises(ValueError, match=said):
        retrieval(*sizes)


# --- The model ----------------------------------------------------------


@pytest.mark.parametrize("repeat", [False, True])
@pytest.mark.parametrize(
    ("rule", "phi"),
    [
        *itertools.product(("sum", "delta", "gated"), ("linear", "dpfp-2")),
        ("sum", "favor-5-stable"),
    ],
)
def test_training_retrieves_what_the_operation_retrieves(rule, phi, repeat):
    model = Retriever(9, 4, rule, phi).double()
    if phi.startswith("favor"):
        model.phi.redraw = lambda seed=None: None  # the same features twice
    keys, values, _ = retrieval(3, 9, 18 if repeat else 9, repeat=repeat)
    queries = torch.arange(9).expand(3, -1)
    one, other = (f(keys, values, queries) for f in (model, model.retrieve))
    assert (one - other).norm() < 1e-10 * other.norm()


def test_the_key_depends_on_the_value_and_the_query_does_not():
    model = Retriever(6, 4, "sum", "linear")
    key, query = torch.tensor([[2]]), torch.tensor([[2]])
    first = model._project(key, torch.tensor([[1]]), query)
    other = model._project(key, torch.tensor([[3]]), query)
    assert torch.equal(first[0], other[0]) and not torch.equal(first[1], other[1])
    # A projection of the concatenation, as in the authors' code.
    one_hot = torch.eye(6)[1]
    whole = model.to_k(torch.cat([one_hot, model.embedding[2]]))
    assert torch.allclose(first[1][0, 0], model.phi(whole), atol=1e-6)


def test_fast_weight_memory_is_a_delta_rule_while_its_norm_is_small():
    model = Retriever(5, 3, "fwm", "tanh").double()
    torch.nn.init.uniform_(model.to_k.weight, -0.01, 0.01)
    torch.nn.init.zeros_(model.to_k.bias)
    keys, values, _ = retrieval(2, 5)
    queries = torch.arange(5).expand(2, -1)
    q, k, logits = model._project(keys, values, queries)
    v = torch.eye(5, dtype=torch.float64)[values]
    beta = torch.sigmoid(logits)
    _, W = ops.delta_rule(
        k[:, :, None], k[:, :, None], v[:, :, None], beta[..., None], return_state=True
    )
    assert W.flatten(1).norm(dim=-1).max() < 1
    wanted = torch.nn.functional.layer_norm(q @ W[:, 0].mT, [5])
    assert torch.allclose(model(keys, values, queries), wanted, atol=1e-12)


def test_finding_nothing_costs_one_half():
    assert loss(torch.zeros(4, 7), torch.arange(4)).item() == 0.5
    assert loss(torch.eye(7)[:4], torch.arange(4)).item() == 0


def test_sizes_of_the_model_are_those_of_the_paper():
    model = Retriever(20, 64, "delta", "dpfp-1")
    assert model.embedding.shape == (20, 44)  # int(1.1 * 2 * 20)
    assert model.to_k.weight.shape == (64, 44 + 20)
    assert model.to_k.weight.abs().max() <= 1 / 8
    widths = {"linear": 64, "dpfp-3": 384, "favor-512": 1024, "tanh": 64}
    for name, width in widths.items():
        assert feature_map(name, 64).width(64) == width


# --- The frame ----------------------------------------------------------


def tiny(quick: bool) -> list[dict]:
    return [
        {"rule": "sum", "map": "linear", "S": S, "d_key": 4, "seed": seed}
        for S in (2, 3)
        for seed in (1, 2)
    ]


def run_tiny(point: dict) -> dict:
    torch.manual_seed(point["seed"])
    model = Retriever(point["S"], 4, "sum", "linear")
    return train(model, point["S"], False, budget=100)


TINY = replace(favor_underflow.EXPERIMENT, name="tiny", points=tiny, run=run_tiny)


def test_points_are_saved_one_by_one_and_not_run_again(tmp_path):
    runs = Runs(TINY, True, tmp_path)
    first = runs.run(2)
    saved = runs.read(2)
    assert saved["point"] == first and first["S"] == 3
    assert first["setup"] == TINY.setup(first) and "optimiser" in first["setup"]
    assert (
        saved["run"]["command"] == "fwlab reproduce tiny --quick"
        and saved["run"]["commit"]
    )
    assert [runs.read(i) is None for i in range(4)] == [True, True, False, True]
    # A point with other settings is another point.
    changed = replace(TINY, points=lambda quick: [{**p, "S": 5} for p in tiny(quick)])
    assert Runs(changed, True, tmp_path).read(2) is None
    assert Runs(TINY, False, tmp_path).read(2) is None  # of the full version
    with pytest.raises(ValueError, match="a point from 0 to 3, got 4"):
        runs.run(4)


def test_a_grid_can_be_run_in_parts(tmp_path):
    """Also where the finished points of an earlier part are gone."""
    drawn = replace(TINY, draw=lambda points: Figure())
    runs = Runs(drawn, True, tmp_path)
    one, two = runs.run(3), runs.run(2)
    assert [p["S"] for p in runs.collect()["points"]] == [two["S"], one["S"]]
    shutil.rmtree(runs.folder)
    with pytest.raises(ValueError, match="nothing to collect"):
        runs.collect()
    first = runs.run(0)
    again = runs.collect()
    points = [{n: v for n, v in p.items() if n != "run"} for p in again["points"]]
    assert points == [first, two, one]
    assert json.loads((tmp_path / "tiny.json").read_text("utf-8")) == again
    # Points with other settings do not stay.
    changed = replace(drawn, points=lambda quick: [{**p, "S": 5} for p in tiny(quick)])
    Runs(changed, True, tmp_path).run(1)
    assert len(Runs(changed, True, tmp_path).collect()["points"]) == 1


SMALL = replace(
    TINY,
    run=lambda point: {"loss": 0.5},
    claims=lambda points: [Claim("", "", "", max(p["loss"] for p in points) < 1)],
    draw=lambda points: Figure(),
)
#: What a disk or a person may leave of a file.
DAMAGE = ["", "\0", "[1]", "{}", "3", "null", '{"point": {', "[" * 10**5]
DAMAGE += ['{"point": 3, "run": {}}', '{"points": [{"S": 2}], "runs": [], "grid": 4}']


def edit(path, change):
    """Change a file of a point, or of results, by hand.

    - `change`: gets all of it, and a point.
    """
    data = json.loads(path.read_text("utf-8"))
    change(data, data["point"] if "point" in data else data["points"][0])
    path.write_text(json.dumps(data), "utf-8")


def damaged(path):
    """Damage a file in one way after the other."""
    text = path.read_text("utf-8")
    for damage in (*DAMAGE, text[: len(text) // 2]):
        path.write_text(damage, "utf-8")
        yield
    for change in (
        lambda data, point: point.update(loss=0.25),
        lambda data, point: (data.pop("sha256"), point.pop("loss")),
        lambda data, point: (data.pop("sha256"), point.update(seconds="1")),
    ):
        path.write_text(text, "utf-8")
        edit(path, change)
        yield
    path.write_text(text, "utf-8")
    edit(path, lambda data, point: data.pop("sha256"))  # as older versions wrote it


def test_a_damaged_point_runs_again(tmp_path):
    runs = Runs(SMALL, True, tmp_path)
    point, path = runs.run(1), runs.folder / "0001.json"
    for _ in damaged(path):
        with pytest.warns(UserWarning, match=f"^{path} is damaged: .* run again$"):
            assert runs.read(1) is None
    assert runs.read(1)["point"] == point


def test_damaged_results_are_named(tmp_path):
    """They stay as they are, if points would be lost otherwise."""
    runs, path = Runs(SMALL, True, tmp_path), tmp_path / "tiny.json"
    runs.run(0), runs.run(2)
    collected = runs.collect()
    (runs.folder / "0000.json").unlink()
    for _ in damaged(path):
        before = path.read_bytes()
        with pytest.raises(ValueError, match=f"^{path} is damaged: .* move it away"):
            runs.collect()
        assert path.read_bytes() == before
    assert runs.collect() == collected
    path.rename(tmp_path / "other.json")
    with pytest.raises(ValueError, match="not what fwlab reproduce other writes"):
        results(replace(SMALL, name="other"), tmp_path)
    for index in (0, 1, 3):
        runs.run(index)
    path.write_text("[1]")  # it has nothing that the points do not have
    assert len(runs.collect()["points"]) == 4


def test_two_texts_never_mix(tmp_path):
    """Also if one of them is in an earlier file, or is not recorded."""
    digests = ["8a73136f699d", "8a73136f699d", "0123456789ab", None]
    points = [{"corpus": "any", "seed": seed} for seed in range(4)]

    def run(point):
        digest = digests[point["seed"]]
        return {"loss": 0.5, **({"corpus_sha256": digest} if digest else {})}

    read = replace(SMALL, points=lambda quick: points, run=run)
    runs = Runs(read, True, tmp_path)
    runs.run(0), runs.run(1)
    first = runs.collect()
    whole = "Tiny Shakespeare, the first 300,000 characters, SHA-256 8a73136f699d…"
    assert texts_of(first["points"]) == {"any": [whole]}
    for other, said in ((2, "another text, SHA-256 01"), (3, "corpus not recorded")):
        shutil.rmtree(runs.folder)
        runs.run(other)
        with pytest.raises(
            ValueError, match=f"as corpus 'any' .*{said}.*another folder"
        ):
            runs.collect()
        assert results(read, tmp_path)["points"] == first["points"]
    # Two corpora by their names are no mixture.
    points[2:] = []
    points.append({"corpus": "python", "seed": 2})
    runs = Runs(read, True, tmp_path)
    runs.run(2)
    assert set(texts_of(runs.collect()["points"])) == {"any", "python"}


def test_damaged_results_hide_no_others(tmp_path, monkeypatch):
    folder = tmp_path / "docs" / "results"
    shutil.copytree(ROOT / "docs" / "results", folder)
    monkeypatch.chdir(tmp_path)
    _, whole, _ = fwlab("reproduce")
    assert "damaged" not in whole
    bad = [Path("docs", "results", "reversal.json"), *Path("docs").rglob("aft.json")]
    for path in bad:
        path.write_text("[1]")
    code, text, _ = fwlab("reproduce")
    assert code == 0
    changed = {*text.splitlines()} - {*whole.splitlines()}
    assert {line.split()[1] for line in changed} == {str(path) for path in bad}
    assert len(text.splitlines()) == len(whole.splitlines())


def test_the_same_seed_gives_the_same_point():
    one, other = ({**run_tiny(tiny(True)[0])} for _ in "ab")
    assert one == other


def test_medians_leave_out_what_diverged():
    points = [{"S": 1, "loss": x} for x in (3.0, 1.0, None)]
    points += [{"S": 2, "loss": x} for x in (1.0, None, None)]
    assert medians(points, "S", "loss") == {1: 3.0}


def test_verdicts():
    def claim(*which, published="1 (Table 1)"):
        return Claim("", published, "", *which)

    for which, published, ours in (
        ((None,), "not run", "not run"),
        ((True,), "reproduced", "holds"),
        ((False,), "not", "does not"),
        ((True, True), "reproduced", "holds"),
        ((True, False), "seeds overlap", "seeds overlap"),
        ((False, False), "seeds overlap", "seeds overlap"),
    ):
        assert claim(*which).verdict == published
        assert claim(*which, published="").verdict == ours
    yes, no, overlap, left = (
        claim(*w) for w in ((True,), (False,), (True, False), (None,))
    )
    ours = [claim(holds, published="") for holds in (True, False)]
    for claims, word in (
        ([yes, yes], "reproduced"),
        ([yes, ours[1]], "reproduced"),  # ours do not count beside published ones
        ([no], "not"),
        ([yes, no], "partly"),
        ([yes, overlap], "partly"),
        ([overlap], "partly"),
        ([yes, left], "reproduced so far"),
        ([left, ours[0]], "not run"),
        ([], "not run"),
        (ours[:1], "ours: holds"),
        (ours[1:], "ours: does not"),
        (ours, "ours: partly"),
    ):
        assert verdict(claims) == word


def test_sides_are_compared_by_their_medians_and_seeds():
    def of(*sides, **options):
        return compared("a below b", "1, 2 (Table 1)", sides, **options)[2:5]

    low, high = [1.0, 3.0, 2.0], [4.0, 6.0, 5.0]
    assert of(low, high) == (
        "2.000 [1.000, 3.000] against 5.000 [4.000, 6.000]",
        True,
        True,
    )
    assert of(high, low)[1:] == (False, True)
    assert of(low, [2.5, 4.0, 3.5])[1:] == (True, False)
    assert of(low[:2], high, spec=".0f")[1:] == (True, None)  # two seeds say little
    assert of([1.0], [2.0], spec=".1f") == ("1.0 against 2.0", True, None)
    # A seed that failed is above all others; one that was not run says nothing.
    assert of(low, [4.0, None, 5.0], spec=".0f") == (
        "2 [1, 3] against 5 [4, failed]",
        True,
        True,
    )
    assert (
        of([None, 1.0, None], high, spec=".0f")[0]
        == "failed [1, failed] against 5 [4, 6]"
    )
    assert of(low, [], spec=".0f") == ("2 [1, 3]", None, None)
    assert of([None] * 3, []) == ("failed [failed, failed]", None, None)
    assert of([None] * 3, low)[1:] == (False, True)
    assert of(low, [None] * 3)[1:] == (True, True)
    # More sides than two, and one with a threshold.
    rising = {"holds": lambda *medians: [*medians] == sorted(medians)}
    assert of(low, high, [7.0, 8.0, 9.0], **rising)[1:] == (True, True)
    assert of(low, high, [5.5, 8.0, 9.0], **rising)[1:] == (True, False)
    # One pair in the wrong order is enough, if all of its seeds are.
    assert of(low, [2.5, 4.0, 3.5], [*low[:2], 0.5], **rising)[1:] == (False, False)
    assert of(low, [2.5, 4.0, 3.5], [0.5] * 3, **rising)[1:] == (False, True)
    assert of(low, high, [5.5] * 3 + [4.5], **rising)[1:] == (True, False)
    assert of(low, high, [4.5, 4.8, 5.5], **rising)[1:] == (False, False)
    assert of(low, [1.5, 1.6, 1.7], [0.5] * 3, **rising)[1:] == (False, True)
    assert of(low, holds=lambda x: x < 4)[1:] == (True, True)
    assert of(low, holds=lambda x: x < 3)[1:] == (True, False)


def test_a_part_is_compared_seed_by_seed():
    """Sides may overlap; a failure of the lower one fails."""
    high = {1: 1.0, 2: 3.0, 3: 8.0}
    low = {seed: 0.4 * x for seed, x in high.items()}
    claim = below_part("", low, high, 1 / 2)
    assert claim[3:5] == (True, True)
    assert claim.found == "1.200 [0.400, 3.200] against 3.000 [1.000, 8.000]"
    assert below_part("", {**low, 2: 1.6}, high, 1 / 2)[3:5] == (True, False)
    assert below_part("", {**low, 2: inf, 3: inf}, high, 1 / 2).holds is False
    both = dict.fromkeys(high, inf)
    assert below_part("", both, both, 1 / 2)[3:5] == (False, True)
    both = dict.fromkeys(high, -inf)  # the layer that both are compared with
    assert below_part("", both, both, 1 / 2)[3:5] == (True, True)
    assert below_part("", {1: 0.1}, {2: 1.0}, 1 / 2).holds is None


@pytest.mark.parametrize("experiment", EXPERIMENTS.values(), ids=list(EXPERIMENTS))
def test_every_grid(experiment):
    """Points are flat and different; near a threshold there are 3 seeds."""
    for points in (experiment.points(True), experiment.points(False)):
        assert len({json.dumps(point) for point in points}) == len(points)
        for point in points:
            assert point.keys() == points[0].keys()
            assert all(isinstance(v, int | float | str) for v in point.values())
        sizes = [point.get("S", 0) for point in points]
        assert all(a <= b for a, b in pairwise(sizes))  # stopped: all maps up to some S
        assert {point["seed"] for point in points} == {1, 2, 3}


@pytest.mark.parametrize("folder", ["", "quick"])
def test_committed_points_are_points_of_the_grid(folder):
    for experiment in EXPERIMENTS.values():
        grid = experiment.points(bool(folder))
        known = {tuple(point[name] for name in grid[0]) for point in grid}
        saved = results(experiment, ROOT / "docs" / "results" / folder)
        for p in saved["points"] if saved else []:
            assert tuple(p.get(name) for name in grid[0]) in known, p


def test_a_new_mixer_grows_no_published_grid(monkeypatch):
    monkeypatch.setitem(MIXERS, "new-rule", MIXERS["delta"])
    monkeypatch.setitem(ops.TABLE, "new_rule", ops.TABLE["delta_rule"])
    for experiment in EXPERIMENTS.values():
        source = sys.modules[experiment.claims.__module__].__file__
        again = runpy.run_path(source)["EXPERIMENT"]
        for quick in (True, False):
            assert again.points(quick) == experiment.points(quick)


def test_the_command_lists_all_experiments():
    code, text, _ = fwlab("reproduce")
    assert code == 0
    for experiment in EXPERIMENTS.values():
        for part in (experiment.name, experiment.source, experiment.cost):
            assert part in text


def test_the_command_lists_points(tmp_path):
    arguments = ["capacity", "--quick", "--list-points", "--out", str(tmp_path)]
    code, lines, _ = fwlab("reproduce", *arguments)
    assert code == 0 and len(lines.splitlines()) == len(
        EXPERIMENTS["capacity"].points(True)
    )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["capacitance"], "expected an experiment (capacity, overwrite,"),
        (["capacity", "--jobs", "0"], "expected jobs to be at least 1, got 0"),
        (["capacity", "--point", "999", "--quick"], "expected a point from 0 to "),
        (["capacity", "--collect"], "nothing to collect"),
        (["capacity", "--collect", "--list-points"], "expected one of --list-points"),
        ([], "these options need the name of an experiment, got none"),
    ],
)
def test_errors_of_the_command(arguments, what, tmp_path):
    code, _, error = fwlab("reproduce", *arguments, "--out", str(tmp_path))
    assert code == 2 and what in error and error.count("\n") == 1


@pytest.mark.slow
def test_a_killed_run_continues_where_it_was(tmp_path):
    """Two processes, SIGKILL to the first: workers end, points are kept."""
    run = [sys.executable, "-m", "fwlab", "reproduce", "favor-underflow", "--quick"]
    run += ["--jobs", "2", "--out", str(tmp_path)]
    folder = tmp_path / ".points" / "favor-underflow" / "quick"
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
    results = json.loads((tmp_path / "favor-underflow.json").read_text("utf-8"))
    assert len(results["points"]) == results["grid"]
    assert (tmp_path / "favor-underflow.svg").stat().st_size > 1000
    held(favor_underflow.EXPERIMENT, results["points"])


# --- Quick versions -----------------------------------------------------


def held(experiment, points) -> None:
    """What the results of the site say clearly comes out again.

    Where their seeds overlap, another machine may say something else.
    """
    site = results(experiment, ROOT / "docs" / "results" / "quick")["points"]
    every = experiment.claims(site)
    clear = [c for c in every if c.holds is not None and c.apart is not False]
    again = {claim.text: claim.holds for claim in experiment.claims(points)}
    assert clear
    assert {c.text: again[c.text] for c in clear} == {c.text: c.holds for c in clear}


def quick_versions():
    """One each time, the others with `make test-all`."""
    for name in EXPERIMENTS:
        if name != "favor-underflow":  # below, killed and continued
            slow = [pytest.mark.slow] * (name != "aft-stability")
            yield pytest.param(name, marks=slow)


@pytest.mark.parametrize("name", quick_versions())
def test_quick_version(name, tmp_path):
    runs = Runs(EXPERIMENTS[name], True, tmp_path)
    for _ in runs.run_all(1):
        pass
    held(EXPERIMENTS[name], runs.collect()["points"])


def test_favor_with_long_keys_retrieves_nothing():
    """`favor-underflow` at S = 100 with one seed and few optimiser steps."""
    points = [
        favor_underflow.run({**p, "budget": 100}) | p
        for p in favor_underflow.points(True)
        if p["S"] == 100 and p["seed"] == 1
    ]
    by = {point["variant"]: point for point in points}
    assert abs(by["as published"]["loss"] - 0.5) < 5e-4
    assert by["without epsilon"]["loss"] > 0.55  # that is no way out
    assert by["as published"]["log10_denominator"] < -8


def test_linear_features_hold_as_many_pairs_as_they_are_wide():
    """`capacity` at two sizes with one seed."""
    point = {"rule": "sum", "map": "linear", "d_key": 8, "seed": 1, "budget": 1500}
    point |= {"ask": "one key", "batch": 32, "gain": 0.0}
    inside, beyond = (capacity.SETTING.run({**point, "S": S}) for S in (6, 16))
    assert inside["loss"] < 0.02 and inside["d_dot"] == beyond["d_dot"] == 8
    assert abs(beyond["loss"] - capacity.law(16, 8)) < 0.04


def test_increments_must_be_stored():
    """`reversal` in float32, with one seed."""
    errors = {
        point["method"]: reversal.run(point)["error"]
        for point in reversal.points(True)
        if point["length"] == 1024
        and (point["dtype"], point["key_norm"]) == ("float32", "l2")
        and point["seed"] == 1
    }
    assert errors["stored"] < 1e-6
    assert errors["inverted"] is None or errors["inverted"] > 1e6
    assert 1e-5 < errors["decay"] < 1e-1


def test_an_inverted_update_gives_its_increment():
    W, k, v = (torch.randn(*size).double() for size in ((3, 4), (4,), (3,)))
    k, beta = k / k.norm(), torch.tensor(0.7).double()
    increment = beta * (v - W @ k)
    after = W + torch.outer(increment, k)
    assert torch.allclose(reversal.recovered(after, k, v, beta), increment)


def test_every_way_to_compute_aft_is_right_for_small_keys():
    k, v, w = (torch.randn(20, width).double() for width in (3, 3, 20))
    seen = torch.ones(20, 20, dtype=torch.bool).tril()
    exact = aft_stability.softmax(k, v, w, seen)
    for name, way in aft_stability.WAYS.items():
        y = way(k, v, torch.where(seen, w, -torch.inf))
        assert torch.allclose(y, exact, atol=1e-5 if name == "epsilon" else 1e-12), name


def test_compositions_are_products_of_matrices():
    every = state_tracking.permutations(3)
    table = state_tracking.compositions(3)
    matrices = [state_tracking.matrix(each) for each in every]
    for i, a in enumerate(matrices):
        for j, b in enumerate(matrices):
            assert torch.equal(a @ b, matrices[table[i, j]])


def test_an_update_with_beta_2_swaps_two_items():
    """Weights by hand make no error, also where a token has 3 updates."""
    torch.manual_seed(0)
    model = state_tracking.Composer(4, steps=3, limit=2)
    model.by_hand()
    assert state_tracking.score(model, 40) == 1
    for token, permutation in enumerate(state_tracking.permutations(4)):
        turned = torch.eye(4)
        for i, j in state_tracking.swaps(permutation):
            k = (torch.eye(4)[i] - torch.eye(4)[j]) / 2**0.5
            turned = turned @ (torch.eye(4) - 2 * torch.outer(k, k))
        wanted = state_tracking.matrix(permutation)
        assert torch.allclose(turned, wanted, atol=1e-6), token


def test_what_was_erased_does_not_interfere():
    torch.manual_seed(0)
    loss = {
        (topics, forget): state_tracking.recall(topics, forget)
        for topics in (1, 4)
        for forget in ("no decay", "erase at a new topic", "0.9 per step")
    }
    alone = loss[1, "no decay"]
    assert abs(loss[4, "erase at a new topic"] - alone) < 0.1 * alone
    assert loss[4, "no decay"] > 1.1 * alone
    assert loss[1, "0.9 per step"] > 1.1 * alone
