"""`fwlab bench --gpu`, as far as it can be tested without a GPU."""

import gc
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from fwlab import cli
from fwlab.bench import gpu
from fwlab.bench.case import layout
from fwlab.bench.gpu import cases, correctness, measure, problems, report, targets
from fwlab.bench.gpu import dry as tiny
from fwlab.bench.gpu.processes import Worker, do, do_all
from fwlab.ops.call import compiler, measured
from fwlab.ops.call import gpu as kernels

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "docs" / "hooks"))
import results as hook  # noqa: E402

FREE = measure.free
#: The worker of a dry run, without the emulator: kernels are refused.
CODE = "from fwlab.bench.gpu import dry, worker; dry.install(None); worker.main()"
TINY = (sys.executable, "-c", CODE)
CARD = {
    "name": "NVIDIA H200",
    "slug": "nvidia-h200",
    "capability": [9, 0],
    "multiprocessors": 132,
    "memory_gib": 139.8,
    "free_gib": 139.0,
    "driver": None,
    "cuda": None,
}


@pytest.fixture(autouse=True)
def short_turns(monkeypatch):
    monkeypatch.setattr(measure, "TURN", 1e-3)
    monkeypatch.setattr(measure, "free", lambda device: None)  # takes 0.1 s


def test_slug():
    assert measured.slug("NVIDIA H200") == "nvidia-h200"
    assert measured.slug("NVIDIA GeForce RTX 4090 (Laptop)") == (
        "nvidia-geforce-rtx-4090-laptop"
    )


def test_default_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert measured.written("x") == Path("gpu-x.json")
    monkeypatch.chdir(ROOT)
    assert measured.written("x") == Path("docs/results/gpu-x.json")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--gpu"], "needs an Nvidia GPU"),
        (["--gpu", "--out", "new/here.json"], "needs an Nvidia GPU"),
        (["--quick"], "--quick needs --gpu"),
        (["--dry-run"], "--dry-run needs --gpu"),
    ],
)
def test_refusal(tmp_path, monkeypatch, capsys, arguments, says):
    """Exit code 2, one sentence, nothing written."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["fwlab", "bench", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    out, err = capsys.readouterr()
    assert not out and err.count("\n") == 1 and says in err
    assert not list(tmp_path.iterdir())


def test_nothing_is_loaded_before_it_is_needed():
    code = (
        "import sys, fwlab.bench.gpu\n"
        "assert not [m for m in sys.modules if m == 'fla' or m.endswith('.kernels')]"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# Problems.


@pytest.mark.parametrize("op", problems.PROBLEMS)
def test_problems(op):
    """Unique names, announced shapes, and values in the range of the rules."""
    found = problems.of(op)
    assert len({problem.key for problem in found}) == len(found) >= 3
    assert len(problems.of(op, quick=True)) == 2
    for problem in found:
        inputs = problem.draw(torch.Generator().manual_seed(0))
        first = inputs.get("q", inputs.get("x"))
        assert list(first.shape[:2]) == [problem.shape["batch"], problem.shape["T"]]
        assert all(x.dtype == torch.float32 for x in inputs.values())


def test_states_are_in_and_out_of_all_that_have_one():
    for op in problems.PROBLEMS:
        inputs = problems.of(op)[0].draw(torch.Generator().manual_seed(0))
        states = [name for name in inputs if name.startswith("state.")]
        assert states


@pytest.mark.parametrize("op", tiny.PROBLEMS)
def test_check(op):
    """With the efficient form instead of the kernel."""
    problem = tiny.PROBLEMS[op][0]
    other = {"triton": "efficient"}
    seen = []

    def call(implementation, x):
        seen.append(implementation)
        return problem.call(other.get(implementation, implementation), x)

    for dtype in problems.LIMITS:
        row = correctness.check(problem._replace(call=call), dtype, "cpu", seed=3)
        assert not row["reason"] and row["ok"], row
        inputs = problem.draw(torch.Generator())
        assert {f"d {name}" for name in inputs} <= set(row["errors"])
        assert "y" in row["errors"]
        assert max(row["errors"].values()) <= problems.LIMITS[dtype]
    assert seen.count("triton") == 3 * correctness.RUNS


def test_check_sees_what_is_wrong():
    problem = tiny.PROBLEMS["delta_rule"][0]

    def wrong(change):
        def call(implementation, x):
            out = problem.call("efficient", x)
            return change(out) if implementation == "triton" else out

        return correctness.check(problem._replace(call=call), "float32", "cpu", seed=3)

    row = wrong(lambda out: out | {"state.W": out["state.W"] * 1.001})
    assert not row["ok"] and row["reason"] is None
    assert row["errors"]["state.W"] > 1e-4 > 1e-5 > row["errors"]["y"]
    row = wrong(lambda out: out | {"y": out["y"] * torch.nan})
    assert not row["ok"] and row["errors"]["y"] is None and "finite" in row["reason"]
    row = wrong(lambda out: out | {"y": out["y"][:, 1:]})
    assert "ok" not in row and "shape" in row["reason"]
    json.dumps(row, allow_nan=False)


@pytest.mark.parametrize(
    ("reason", "row"),
    [
        (kernels.Limit("too wide"), {"refused": "too wide"}),
        ("no GPU", {"reason": "ValueError: delta_rule: no GPU"}),
    ],
)
def test_only_limits_are_refusals(monkeypatch, reason, row):
    """What is missing on this machine has not been checked."""
    problem = tiny.PROBLEMS["delta_rule"][0]

    def refusal(*_, **__):
        return reason

    monkeypatch.setattr(kernels.Kernel, "refusal", refusal)
    found = correctness.check(problem, "float32", "cpu", seed=3)
    assert [*found] == [*row]
    if "refused" in row:
        assert found == row
    else:
        assert "cannot run here: no GPU" in found["reason"]


def test_an_operation_without_a_kernel_is_not_right():
    def call(implementation, x):
        if implementation == "triton":
            raise ValueError("no kernel\nfor this")
        return problem.call(implementation, x)

    problem = tiny.PROBLEMS["sum_rule"][0]
    row = correctness.check(problem._replace(call=call), "float32", "cpu", seed=3)
    assert row == {"reason": "ValueError: no kernel"}  # and so "ok" stays False


# Measurements.


def test_rates():
    messages = list(measure.rates(device="cpu", copied=2**20, width=64, rounds=2))
    rows = [m["row"] for m in messages if "row" in m]
    assert rows[0]["copy_gb_per_s"] > 0
    assert rows[1]["matrix_tflop_per_s"] is not None


@pytest.mark.parametrize("case", tiny.CASES.values(), ids=tiny.CASES)
def test_a_failing_side_is_a_row(case, monkeypatch):
    """All others are measured. flash-linear-attention is not installed."""
    monkeypatch.setitem(sys.modules, "fla", None)

    def fail():
        raise torch.cuda.OutOfMemoryError("with a long\nexplanation")

    sides = {"full": cases.Side(fail), **case.sides}
    case = case._replace(sides=sides)
    messages = list(measure.rows(case, device="cpu", seed=0, rounds=1))
    assert [m["part"] for m in messages if "part" in m][: len(sides)] == list(sides)
    rows = {m["row"]["side"]: m["row"] for m in messages if "row" in m}
    assert set(rows) == set(sides)
    assert rows["full"]["reason"] == "out of memory"
    if cases.FLA in rows:
        assert rows[cases.FLA]["reason"].endswith("is not installed")
    good = [r for r in rows.values() if r["reason"] is None]
    assert {cases.EFFICIENT} <= {r["side"] for r in good}
    for row in good:
        assert row["ms"] >= row["fastest"] > 0 and row["wall_ms"] > 0
        if row["side"] in (cases.EFFICIENT, cases.NAIVE):
            assert row["error"] < 2e-2
        assert (row["error"] is None) == (row["side"] == cases.ATTENTION)
    json.dumps(list(rows.values()), allow_nan=False)


def test_sides_that_are_left_out():
    case = next(iter(tiny.CASES.values()))
    without = tuple(name for name in case.sides if name != cases.EFFICIENT)
    messages = list(measure.rows(case, device="cpu", seed=0, rounds=1, without=without))
    assert {m["row"]["side"] for m in messages if "row" in m} == {cases.EFFICIENT}


def test_a_side_with_fewer_steps_says_so():
    case = cases._rule("delta_rule", 1, 300, 1, 8)
    without = tuple(name for name in case.sides if name != cases.NAIVE)
    messages = list(measure.rows(case, device="cpu", seed=0, rounds=1, without=without))
    row = next(m["row"] for m in messages if "row" in m)
    assert row["T"] == 256 and row["shape"]["T"] == 300 and row["error"] is None


def test_cases():
    assert [c.name for c in cases.CASES.values()][:4] == ["delta_rule"] * 4
    for key, case in cases.CASES.items():
        assert case.key == key
        assert next(iter(case.sides)) == cases.FWLAB


def test_floors():
    """Those of the reference problem, at the rates of an H200."""
    rates = {"copy_gb_per_s": 4300.0, "matrix_tflop_per_s": 790.0}
    floors = targets.floors(rates)
    assert floors[targets._of("delta_rule")] == pytest.approx(0.204, rel=0.01)
    assert floors[targets._of("delta_rule", 3)] == pytest.approx(0.470, rel=0.05)
    assert floors[targets._of("feedback")] is None
    assert set(targets.floors({}).values()) == {None}


# What only a GPU takes: here with a stand-in for `torch.cuda`.


class Event:
    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.at = time.perf_counter()

    def elapsed_time(self, last):
        return 1e3 * (last.at - self.at)


@pytest.fixture
def like_a_gpu(monkeypatch):
    """Its name: not "cpu", and still a place for tensors."""
    calls = []
    for name, gives in {
        "synchronize": None,
        "empty_cache": None,
        "reset_peak_memory_stats": None,
        "memory_allocated": 2**20,
        "max_memory_allocated": 4 * 2**20,
        "mem_get_info": (2**24, 2**25),
        "get_device_name": "NVIDIA H200",
    }.items():
        monkeypatch.setattr(
            torch.cuda,
            name,
            lambda *_, name=name, gives=gives: calls.append(name) or gives,
        )
    # It takes long where all other tests have left their objects.
    monkeypatch.setattr(gc, "collect", lambda: 0)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(measure, "FLUSH", 2**10)
    monkeypatch.setattr(measure, "TURN", 0.0)
    monkeypatch.setattr(measure, "free", FREE)
    calls.clear()
    yield "cpu:0"
    assert "synchronize" in calls and "empty_cache" in calls


@pytest.mark.parametrize("case", tiny.CASES.values(), ids=tiny.CASES)
def test_times_and_memory(case, like_a_gpu):
    without = (cases.FWLAB, cases.FLA, cases.MATERIALISED)
    messages = measure.rows(case, device=like_a_gpu, seed=0, rounds=2, without=without)
    rows = [m["row"] for m in messages if "row" in m]
    assert {r["side"] for r in rows} == set(case.sides) - set(without)
    for row in rows:
        assert row["reason"] is None and row["peak_mib"] == 3.0
        assert row["ms"] > 0 and row["wall_ms"] > 0 and row["forward_ms"] > 0


def test_rates_of_a_gpu(like_a_gpu):
    messages = measure.rates(device=like_a_gpu, width=64, rounds=3)
    rows = [m["row"] for m in messages if "row" in m]
    assert rows[0]["copy_gb_per_s"] is not None and not any(r["reason"] for r in rows)


def test_check_on_a_gpu(like_a_gpu):
    problem = tiny.PROBLEMS["sum_rule"][0]

    def call(implementation, x):
        return problem.call(
            "efficient" if implementation == "triton" else implementation, x
        )

    row = correctness.check(problem._replace(call=call), "bfloat16", like_a_gpu, seed=3)
    assert row["ok"]


def test_card(like_a_gpu, monkeypatch):
    class Properties:
        name, major, minor = "NVIDIA H200", 9, 0
        multi_processor_count, total_memory = 132, 140 * 2**30

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Properties)
    card = gpu.card()
    assert set(card) == set(CARD)
    assert card["slug"] == "nvidia-h200" and card["capability"] == [9, 0]
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


# Targets.


def row(case, side, ms, wall=None, peak=100.0, reason=None, T=None):
    return {
        "case": case,
        "op": cases.CASES[case].name,
        "shape": cases.CASES[case].shape,
        "side": side,
        "T": T or cases.CASES[case].shape["T"],
        "ms": ms,
        "fastest": ms,
        "wall_ms": wall or ms,
        "forward_ms": ms,
        "peak_mib": peak,
        "error": 1e-3,
        "version": None,
        "note": None,
        "reason": reason,
    }


def verdicts(rows, checked=(), rates=None, not_run=()):
    found = targets.evaluate(list(checked), rows, rates or {}, list(not_run))
    return {t["name"]: t for t in found}


def test_nothing_measured():
    found = verdicts([])
    assert len(found) == len(targets.TARGETS) + 3
    assert {t["verdict"] for t in found.values()} == {"not measured"}
    assert {t["measured"] for t in found.values()} == {None}


@pytest.mark.parametrize(
    ("ms", "verdict"),
    [(1.5, "aim reached"), (0.95, "reached"), (0.85, "missed")],
)
def test_speed(ms, verdict):
    key = targets._of("delta_rule")
    rows = [row(key, cases.FWLAB, 1.0), row(key, cases.FLA, ms)]
    found = verdicts(rows)["delta 64: speed"]
    assert (found["measured"], found["verdict"]) == (ms, verdict)


def test_the_worse_clock_counts():
    key = targets._of("delta_rule")
    rows = [row(key, cases.FWLAB, 1.0, wall=2.0), row(key, cases.FLA, 2.0, wall=2.0)]
    assert verdicts(rows)["delta 64: speed"]["measured"] == 1.0


def test_memory_floor_and_bandwidth():
    key = targets._of("delta_rule")
    rows = [row(key, cases.FWLAB, 0.5, peak=50.0), row(key, cases.FLA, 1.0)]
    rows += [row(targets._of("aft_simple"), cases.FWLAB, 0.6)]
    found = verdicts(rows, rates={"copy_gb_per_s": 4300.0, "matrix_tflop_per_s": 790.0})
    assert found["delta 64: memory"]["measured"] == 0.5
    assert found["delta 64: memory"]["verdict"] == "aim reached"
    assert found["delta 64: floor"]["measured"] == pytest.approx(2.45, rel=0.01)
    assert found["delta 64: floor"]["verdict"] == "aim reached"
    # 11 tensors of 2 bytes in 0.6 ms
    want = 11 * 2 * 32 * 2048 * 1024 / 0.6e-3 / 4300e9
    assert found["AFT simple: bandwidth"]["measured"] == pytest.approx(want, rel=0.01)
    assert found["AFT simple: bandwidth"]["verdict"] == "missed"


@pytest.mark.parametrize(
    ("ours", "other"),
    [
        ({"reason": "out of memory"}, {}),
        ({}, {"reason": "fla is not installed"}),
        ({}, {"T": 256}),
    ],
)
def test_what_has_no_figure_is_not_measured(ours, other):
    key = targets._of("delta_rule")
    rows = [row(key, cases.FWLAB, 1.0, **ours), row(key, cases.FLA, 9.0, **other)]
    assert verdicts(rows)["delta 64: speed"]["verdict"] == "not measured"


def test_errors_are_targets():
    good = checked(True)
    bad = checked(False, errors={})
    assert verdicts([], [good])["float32: error"]["verdict"] == "reached"
    found = verdicts([], [good, bad])["float32: error"]
    assert (found["verdict"], found["measured"]) == ("missed", 2e-6)
    assert verdicts([], [bad])["float32: error"]["verdict"] == "missed"
    gaps = [
        {"task": "rates", "reason": ""},
        {"task": "correctness sum_rule float32", "reason": "out of time"},
    ]
    found = verdicts([], [good], not_run=gaps)["float32: error"]
    assert (found["verdict"], found["measured"]) == ("not measured", 2e-6)


# Processes.

#: Speaks as the worker does, and does what the task says.
SCRIPT = """
import json, os, sys, time
for line in sys.stdin:
    task = json.loads(line)
    for part, does in task["parts"].items():
        if part in task["without"]:
            continue
        print(json.dumps({"part": part, "head": {"name": part}}), flush=True)
        if does == "hang":
            time.sleep(3600)
        if does == "die":
            print("Xid 13", file=sys.stderr)
            os._exit(7)
        reason = "broken" if does == "break" else None
        print(json.dumps({"row": {"name": part, "reason": reason}}), flush=True)
        if does == "break":
            os._exit(3)
    if task.get("fails"):
        print(json.dumps({"failed": "oh"}), flush=True)
    print(json.dumps({"done": True}), flush=True)
"""
FAKE = (sys.executable, "-c", SCRIPT)


class Patient(Worker):
    """Gives a loaded machine the time to start a process, and keeps to the
    limits where a part hangs.
    """

    def receive(self, seconds):
        message = super().receive(seconds if self.hangs else LONG)
        self.hangs = self.parts.get(message.get("part")) == "hang"
        return message

    def send(self, task):
        self.parts, self.hangs = task.get("parts", {}), False
        super().send(task)


#: Seconds that nothing here takes, also beside other work.
LONG = 600.0


def attempt(parts, limit=LONG, seconds=LONG, **more):
    worker = Patient(FAKE)
    try:
        return do(worker, {"parts": parts, **more}, limit, time.monotonic() + seconds)
    finally:
        worker.close()


def test_a_task():
    rows, reason = attempt({"a": "", "b": ""})
    assert [r["name"] for r in rows] == ["a", "b"] and reason is None


@pytest.mark.parametrize(
    ("does", "says"),
    [("hang", "stopped after 1 s"), ("die", "code 7: Xid 13"), ("break", "broken")],
)
def test_what_ends_the_process_is_a_row(does, says):
    """The tasks after it run in another process."""
    rows, reason = attempt({"a": "", "b": does, "c": ""}, limit=1.0)
    assert [r["name"] for r in rows] == ["a", "b", "c"] and reason is None
    assert says in rows[1]["reason"]
    assert not rows[0]["reason"] and not rows[2]["reason"]


def test_a_task_that_fails_as_a_whole():
    rows, reason = attempt({"a": ""}, fails=True)
    assert reason == "oh" and len(rows) == 1


def test_a_worker_that_does_not_start():
    worker = Worker((sys.executable, "-c", "raise SystemExit('no driver')"))
    rows, reason = do(worker, {}, LONG, time.monotonic() + LONG)
    assert not rows and "no driver" in reason


def test_the_time_is_up():
    rows, reason = attempt({"a": "", "b": "hang"}, seconds=1.0)
    assert reason == "out of time"
    assert [r["name"] for r in rows] == ["a"]


def test_what_is_not_begun_is_named():
    seen = []
    tasks = [{"parts": {str(i): ""}, "i": i} for i in range(3)]
    do_all(
        tasks,
        [Worker(FAKE)],
        LONG,
        time.monotonic() - 1,
        lambda task, rows, reason: seen.append((task["i"], rows, reason)),
    )
    assert seen == [(i, [], "not started: out of time") for i in range(3)]


def test_many_workers():
    seen = []
    tasks = [{"parts": {"a": "die" if i == 2 else ""}, "i": i} for i in range(6)]
    do_all(
        tasks,
        [Worker(FAKE), Worker(FAKE)],
        LONG,
        time.monotonic() + LONG,
        lambda task, rows, reason: seen.append((task["i"], rows)),
    )
    assert sorted(i for i, _ in seen) == list(range(6))
    assert all(len(rows) == 1 for _, rows in seen)


# The whole run, on a CPU: there the kernels are refused, all else runs.


def run(path, **more):
    return gpu.Run(path, "fwlab bench --gpu", CARD, quick=True, **more)


FIRST = compiler.Assembler("/here/ptxas", (13, 3, 7), "a test")
OTHER = compiler.Assembler("/elsewhere/ptxas", (13, 9, 1), "a test")


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    path = tmp_path_factory.mktemp("gpu") / "gpu-nvidia-h200.json"
    with pytest.MonkeyPatch.context() as patch:
        started = []

        def start(command, **more):
            assert command == gpu.COMMAND
            started.append(more)
            return Worker(TINY, **more)

        patch.setattr(gpu, "Worker", start)
        patch.setattr(gpu, "MAX_WORKERS", 1)
        patch.setattr("tempfile.tempdir", str(path.parent))
        for limit in ("FIRST", "SECOND", "PART", "AGAIN"):
            patch.setattr(gpu, limit, 2 * LONG)
        patch.setattr(gpu, "CASES", dict(list(tiny.CASES.items())[:2]))
        patch.setattr(gpu, "PROBLEMS", dict.fromkeys(["delta_rule", "feedback"]))
        # With Triton and without.
        patch.setattr(compiler, "assembler", lambda capability: (FIRST, None))
        one = run(path)
        one.device, one.sizes = "cpu", tiny.SIZES
        patch.setattr(one, "another", lambda: OTHER)
        one.check()
        one.check_again()
        one.measure()
        one.finish()
        assert not one.right()
        # Another ptxas, without what Triton has kept of the first.
        chosen = [more for more in started if more.get(compiler.CHOICE) == OTHER.path]
        assert len(started) == 3 and len(chosen) == 1
        assert "TRITON_CACHE_DIR" in chosen[0] and compiler.BLACKWELL in chosen[0]
    return json.loads(path.read_text("utf-8"), parse_constant=pytest.fail)


def test_result(whole_run):
    run = whole_run
    assert run["complete"] and run["quick"] and not run["not_run"]
    assert run["card"] == CARD and run["seconds"] > 0
    assert {"torch", "triton", "python", cases.FLA} <= set(run["versions"])
    assert {"command", "date", "commit", "seed", "machine", "threads"} <= set(run)
    assert set(run["rates"]) == {"copy_gb_per_s", "matrix_tflop_per_s"}
    assert {(r["op"], r["dtype"]) for r in run["correctness"]} == {
        (op, dtype) for op in ("delta_rule", "feedback") for dtype in problems.LIMITS
    }
    for checked in run["correctness"]:
        assert set(checked) == {
            *("problem", "op", "note", "dtype", "shape", "limit"),
            *("errors", "efficient", "ok", "refused", "reason", "again"),
        }
        # There is no GPU, whichever ptxas compiles.
        assert "Triton needs a GPU" in checked["reason"] or (
            compiler.triton() is None and "is not installed" in checked["reason"]
        )
        assert not checked["refused"]
        assert checked["again"]["ptxas"] == "13.9.1" and not checked["again"]["ok"]
    assert run["ptxas"] == {"why": "a test", "not_used": None}
    assert run["versions"]["ptxas"] == "13.3.7" and not run["dry_run"]
    assert "/here" not in json.dumps(run) and "/elsewhere" not in json.dumps(run)
    sides = {(r["case"], r["side"]) for r in run["rows"]}
    assert sides == {
        (key, side) for key in list(tiny.CASES)[:2] for side in tiny.CASES[key].sides
    }
    assert len(run["targets"]) == len(targets.TARGETS) + 3


def test_tables(whole_run):
    for table in (report.correctness, report.rows, report.targets):
        lines = layout(table(whole_run), left=1).splitlines()
        assert len(lines) > 1 and len(set(map(len, lines))) == 1
    failed = [s for s in report.failures(whole_run) if s.startswith("failed")]
    assert any(cases.FLA in sentence for sentence in failed)
    wrong = [s for s in report.failures(whole_run) if s.startswith("wrong")]
    assert len(wrong) == 9
    assert all(s.endswith("with ptxas 13.9.1 it is wrong too") for s in wrong)


def test_page(whole_run, tmp_path, monkeypatch):
    class Page:
        class file:
            src_uri = "results.md"

    def page():
        text = (ROOT / "docs" / "results.md").read_text("utf-8")
        return hook.on_page_markdown(text, Page, None, None)

    monkeypatch.setattr(hook, "RESULTS", tmp_path)
    assert "Not yet benchmarked on a GPU." in page()
    assert "fwlab bench --gpu" in page()
    name = tmp_path / "gpu-nvidia-h200.json"
    name.write_text(json.dumps(whole_run))
    text = page()
    assert "Not yet benchmarked" not in text
    assert "### NVIDIA H200" in text and "results/gpu-nvidia-h200.json" in text
    assert "delta 64: speed" in text and "not measured" in text
    assert "What could not be measured" in text


def checked(ok, **more):
    row = {"op": "delta_rule", "dtype": "float32", "problem": "delta_rule x"}
    row |= {"note": "", "shape": {"T": 3}, "errors": {"y": 2e-6}, "limit": 1e-5}
    row |= {"efficient": None, "refused": None, "reason": None, "again": None}
    return row | {"ok": ok} | more


@pytest.mark.parametrize(
    ("rows", "gaps", "right"),
    [
        ([checked(True), checked(False, refused="too wide")], [], True),
        ([checked(True), checked(False)], [], False),
        # Nothing has been checked.
        ([checked(False, refused="too wide")], [], False),
        ([], [], False),
        ([checked(True)], ["case x"], True),
        ([checked(True)], ["correctness delta_rule float32"], False),
    ],
)
def test_verdict(tmp_path, rows, gaps, right):
    """What the kernels refuse is neither right nor wrong."""
    one = run(tmp_path / "gpu.json")
    one.result["correctness"] = rows
    one.result["not_run"] = [{"task": gap, "reason": "out of time"} for gap in gaps]
    assert one.right() == right


def test_a_refusal_is_reported():
    refused = checked(False, refused="the kernels take widths up to 256", errors={})
    result = {"correctness": [checked(True), refused], "rows": [], "not_run": []}
    assert report.correctness(result)[1][2] == "1 of 1 (1 refused)"
    assert report.failures(result) == [
        "refused: delta_rule float32, T 3: the kernels take widths up to 256"
    ]
    assert verdicts([], result["correctness"])["float32: error"]["verdict"] == "reached"


def test_another_ptxas_is_in_the_row(tmp_path):
    one = run(tmp_path / "gpu.json")
    one.other = OTHER
    one.result["correctness"] = [checked(False, errors={"y": 1.0}), checked(True)]
    one.result["correctness"][1]["problem"] = "delta_rule y"
    task = {"kind": "again", "op": "delta_rule", "dtype": "float32"}
    one.finished(task, [checked(True)], None)
    wrong, right = one.result["correctness"]
    assert wrong["again"] == {
        "ptxas": "13.9.1",
        "known_wrong": False,
        "errors": {"y": 2e-6},
        "ok": True,
        "reason": None,
    }
    assert not wrong["ok"] and right["again"] is None
    assert report._why(wrong) == "y 1.0e+00; with ptxas 13.9.1 it is right"
    one.other = OTHER._replace(version=(12, 8, 93))
    one.finished(task, [checked(False)], None)
    assert report._why(wrong) == (
        "y 1.0e+00; with ptxas 12.8.93 (known to be wrong on Hopper) it is wrong too"
    )


def test_the_other_ptxas(tmp_path, monkeypatch):
    """The newest of another version that the driver takes."""
    one = run(tmp_path / "gpu.json")
    one.assembler = OTHER
    versions = [(12, 8, 93), OTHER.version, (13, 0, 88), (14, 0, 1)]
    found = [OTHER._replace(version=version) for version in versions]
    monkeypatch.setattr(compiler, "assemblers", lambda: found)
    monkeypatch.setattr(compiler, "driver", lambda: (13, 0))
    assert one.another().version == (13, 0, 88)
    monkeypatch.setattr(compiler, "driver", lambda: (11, 8))
    assert one.another() is None


@pytest.mark.parametrize(
    ("cores", "workers", "first"), [(64, 14, 100), (8, 6, 233), (2, 1, 1400)]
)
def test_fewer_cores_get_more_time(
    tmp_path, monkeypatch, capsys, cores, workers, first
):
    monkeypatch.setattr(gpu, "cores", lambda: cores)
    one = run(tmp_path / "gpu.json")
    assert (one.workers, int(one.first)) == (workers, first)
    monkeypatch.setattr(one, "do", lambda tasks, workers: None)
    one.check()
    assert f"{workers} processes and at most {first} s" in capsys.readouterr().out


# A dry run.


def test_a_dry_run_has_no_limits(tmp_path, monkeypatch, capsys):
    """And it does not look for an error of a compiler."""
    seen = []

    def do_all(tasks, workers, limit, end, finished):
        assert limit == gpu.NEVER and end > time.monotonic() + gpu.NEVER / 2
        seen.extend(task["kind"] for task in tasks)
        for task in tasks:
            assert task.get("limit", limit) == gpu.NEVER
            if task["kind"] == "correctness":
                finished(task, [checked(False)], None)

    monkeypatch.setattr(gpu, "do_all", do_all)
    monkeypatch.setattr(compiler, "assembler", lambda capability: (FIRST, None))
    monkeypatch.setattr(gpu.importlib.util, "find_spec", lambda name: True)
    monkeypatch.setattr(tiny, "stand_in", lambda: None)
    monkeypatch.setattr(tiny, "install", lambda: None)
    monkeypatch.setattr(gpu.Run, "another", lambda run: OTHER)
    path = tmp_path / "gpu.json"
    assert not gpu.main(path, "", dry_run=True)
    assert {"correctness", "warm-up", "rates", "case"} == set(seen)
    assert "at most" not in capsys.readouterr().out


def test_a_dry_run_measures_nothing(tmp_path):
    """Its file has no times, and is not among the results of the site."""
    one = run(tmp_path / "gpu.json", dry_run=True)
    key = targets._of("delta_rule")
    one.result["rows"] = [row(key, cases.FWLAB, 1.0) | {"first_seconds": 2.0}]
    one.result["rates"] = {"copy_gb_per_s": 5.0}
    one.write()
    kept = json.loads((tmp_path / "gpu.json").read_text("utf-8"))
    assert kept["dry_run"] and kept["rates"] == {"copy_gb_per_s": None}
    assert set(kept["floors"].values()) == {None}
    assert [t["name"] for t in kept["targets"]] == [
        f"{d}: error" for d in problems.LIMITS
    ]
    (only,) = kept["rows"]
    assert {n for n in only if only[n] is None} >= {
        *("ms", "fastest", "wall_ms", "forward_ms", "first_seconds")
    }
    assert one.result["rows"][0]["ms"] == 1.0


def test_a_dry_run_needs_the_repository(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu.importlib.util, "find_spec", lambda name: True)
    monkeypatch.setattr(tiny.fwlab, "__file__", str(tmp_path / "fwlab/__init__.py"))
    with pytest.raises(ValueError, match="tests/emulator of the repository"):
        gpu.main(None, "", dry_run=True)


def emulated():
    """Go on only where the emulator can run."""
    pytest.importorskip("triton", reason="Triton is not installed")
    try:
        tiny.stand_in()
    except ValueError as error:
        pytest.skip(str(error))


def test_the_worker_of_a_dry_run():
    """One problem in one precision."""
    emulated()
    task = {"kind": "correctness", "op": "dpfp_delta_rule", "dtype": "bfloat16"}
    worker = Worker(tiny.COMMAND)
    try:
        task |= {"device": "cpu", "seed": 1, "quick": True}
        rows, reason = do(worker, task, LONG, time.monotonic() + LONG)
    finally:
        worker.close()
    assert reason is None
    (only,) = rows
    assert only["ok"], only


@pytest.mark.evidence
def test_dry_run(tmp_path):
    """The command from its beginning to its end."""
    emulated()
    path = tmp_path / "gpu.json"
    command = [sys.executable, "-m", "fwlab", "bench", "--gpu", "--dry-run"]
    done = subprocess.run(
        [*command, "--out", str(path)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    result = json.loads(path.read_text("utf-8"), parse_constant=pytest.fail)
    assert result["complete"] and result["dry_run"] and not result["not_run"]
    assert {r["op"] for r in result["correctness"]} == set(tiny.PROBLEMS)
    assert all(r["ok"] for r in result["correctness"])
    assert {r["case"] for r in result["rows"]} == set(tiny.CASES)
    ours = [r for r in result["rows"] if r["side"] == cases.FWLAB]
    assert not [r for r in ours if r["reason"]]
