"""The benchmark measures what it claims; tests assert no times."""

import json
import re
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from bench import __main__ as run
from bench import (
    busy,
    generation,
    imports,
    lengths,
    peers,
    published,
    settings,
    steps,
    training,
)

import fwlab.bench
from fwlab.bench import aft, decoding, measure, mixers, operations, rules
from fwlab.bench import case as cases
from fwlab.models import MIXERS
from fwlab.training import Config, threads

BENCHES = (busy, generation, imports, lengths, peers, published, steps, training)


def test_every_case_is_complete():
    for case in operations.CASES:
        assert {"efficient", case.exact} <= {*case.sides}, case.key
        inputs, dy = case.problem(torch.float32)
        assert all(x.requires_grad for x in inputs), case.key
        assert dy.dtype == torch.float32, case.key


def test_the_result_is_printed_and_written(tmp_path, capsys):
    path = tmp_path / "new" / "x.json"
    fwlab.bench.main(lambda: {"rows": [1]}, path, "fwlab bench")
    written = json.loads(path.read_text("utf-8"))
    assert written["rows"] == [1] and written["command"] == "fwlab bench"
    assert written["machine"] in capsys.readouterr().out
    fwlab.bench.main(lambda: {}, None, "fwlab bench")
    assert list(tmp_path.rglob("*.json")) == [path]


@pytest.mark.parametrize("name", run.NAMES)
def test_the_benchmarks_of_the_repository(name, monkeypatch, capsys):
    """Each by its name; nothing is written unless asked for."""
    module = {m.__name__: m for m in BENCHES}[f"bench.{name}"]
    monkeypatch.setattr(module, "measure", lambda: {name: [1]})
    monkeypatch.setattr(sys, "argv", ["bench", name])
    run.main()
    assert "float32; torch" in capsys.readouterr().out
    monkeypatch.setattr(run, "RESULTS", Path("nowhere"))
    seen = []
    monkeypatch.setattr(
        fwlab.bench, "main", lambda *arguments: seen.append(arguments[1:])
    )
    monkeypatch.setattr(sys, "argv", ["bench", name, "--write"])
    run.main()
    command = f"PYTHONPATH=docs/tools python -m bench {name} --write"
    assert seen == [(Path("nowhere", f"{name}-cpu.json"), command)]


def test_the_training_loop_is_measured_beside_a_bare_one(monkeypatch):
    monkeypatch.setattr(training, "STEPS", 2)
    small = Config(layers=1, d_model=16, heads=2, block=16, batch=2, steps=9)
    row = training.run("delta", replace(small, eval_every=9, device="cpu"), rounds=2)
    ratio = row["tokens_per_second"] / row["bare_tokens_per_second"]
    assert row["mixer"] == "delta"
    assert row["times_bare"] == pytest.approx(ratio, abs=2e-3)


def test_a_published_model_is_read_by_both(monkeypatch, capsys):
    """In turns, with the same text; in processes of their own."""
    monkeypatch.setattr(published, "PROMPT", 9)
    monkeypatch.setattr(published, "TOKENS", 3)
    tiny = published.SIZES["tiny"] | {"hidden_size": 32}
    monkeypatch.setattr(published, "SIZES", {"tiny": tiny})
    monkeypatch.setattr(published, "ROUNDS", {"tiny": 1})

    def here(module, call, setting):
        return eval(call, vars(published))  # in processes, the sizes are whole

    monkeypatch.setattr(published, "fresh", here)
    ours, theirs = published.measure()["rows"]
    assert (ours["side"], theirs["side"]) == published.SIDES
    assert ours["equal"] == 1 and ours["first_ms"] > 0 < ours["tokens_per_second"]
    assert "tokens_per_second" in capsys.readouterr().out


def test_imports_are_measured_side_by_side(monkeypatch):
    assert {"torch", "fwlab", "fwlab --help"} <= set(imports.SIDES)
    sides = {"torch": ("-c", ""), "fwlab": ("-c", "print()")}
    monkeypatch.setattr(imports, "SIDES", sides)
    rows = imports.run(rounds=1)
    assert [r["import"] for r in rows] == list(sides)
    assert rows[0]["times_torch"] == 1 and rows[1]["processor_seconds"] >= 0
    assert len(imports.table(rows)) == 3


@pytest.mark.parametrize("op", dict.fromkeys(case.name for case in rules.CASES))
def test_all_sides_compute_the_same(op):
    inputs, dy = rules.problem(torch.float64, op=rules.RULES[op], time=40, width=8)
    sides = {
        name: side
        for case in rules.CASES
        if case.name == op
        for name, side in case.sides.items()
    }
    if op in rules.DENSE:
        sides["dense"] = rules.DENSE[op]
    exact = cases.once(sides["naive"], inputs, dy)
    assert len(exact) == 1 + len(inputs)
    assert {"naive", "chunked", "efficient"} <= set(sides)
    for side in sides.values():
        for a, b in zip(cases.once(side, inputs, dy), exact, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_peak_memory_is_that_of_the_tensors_alive_at_once():
    x = torch.ones(2**18)  # 1 MiB

    def call():
        y = x + 1
        z = y * 2
        del y
        return z + 3

    assert measure.peak_mib(call) == measure.peak_mib(call)
    assert measure.peak_mib(call) == pytest.approx(2, abs=0.01)


def test_operator_calls_of_both_passes():
    x = torch.ones(3, requires_grad=True)
    assert measure.operator_calls(lambda: x.cos().neg().abs()) == 3
    forward = measure.operator_calls(lambda: x.exp().sum())
    both = measure.operator_calls(lambda: torch.autograd.grad(x.exp().sum(), x))
    assert both >= forward + 3  # ones, expand, product


def test_a_small_run(monkeypatch):
    monkeypatch.setattr(measure, "TURN", 0.01)
    case = next(c for c in operations.CASES if c.name == "aft_simple")
    problem = partial(aft.problem, time=256, bias=())
    rows = cases.run(case._replace(problem=problem, rounds=1))
    assert [r["side"] for r in rows] == ["naive loop", "efficient"]
    assert all(r["milliseconds"] > 0 and r["error"] < 1e-5 for r in rows)
    # The output and three gradients, each of half a MiB, are there at the end.
    assert all(r["peak_mib"] > 2 for r in rows)
    text = cases.layout(operations.table(rows), left=3)
    assert text.splitlines()[0].split()[0] == "operation"
    assert len({len(line) for line in text.splitlines()}) == 1


def test_rows_are_printed_when_they_are_measured(monkeypatch, capsys):
    """Each case before the next one runs; and all tables have straight columns."""
    written = []

    def measured(case):
        """Nothing; it keeps what was printed before."""
        written.append(capsys.readouterr().out)
        return [
            {"case": case.name, "shape": case.shape, "side": side}
            | dict.fromkeys(
                ("milliseconds", "fastest", "times_slower", "peak_mib"), 1.0
            )
            | {"error": 1e-7}
            for side in case.sides
        ]

    model = dict.fromkeys(("d_ff", "parameters", "tokens_per_second"), 10**6)
    model |= dict.fromkeys(("peak_mib", "operators", "state_size"), 10)
    models = [{"mixer": name, **model} for name in ("sum", "transformer-xl")]
    steps = [
        {
            "layer": "fast weights, gated_delta",
            "microseconds": {1: 5.0, 2: 5.0, 3: 6.0},
        },
        {"layer": "softmax", "microseconds": {1: 5.0, 2: 5000.0}},
    ]
    monkeypatch.setattr(operations, "run", measured)
    monkeypatch.setattr(mixers, "run", lambda: iter(models))
    monkeypatch.setattr(decoding, "run", lambda: iter(steps))
    result = operations.measure()
    assert (result["mixers"], result["decoding"]) == (models, steps)
    end = capsys.readouterr().out
    first, *others = written
    assert first.splitlines()[-1].startswith("operation ")
    for case, text in zip(operations.CASES, [*others, end], strict=True):
        assert text.count(f"{case.name} ") == len(case.sides)
    tables = re.split(r"\n\n.*\n\n", "".join(written) + end)
    lengths = [{len(line) for line in table.splitlines()} for table in tables]
    assert [len(each) for each in lengths[1:]] == [1, 1]


@pytest.mark.slow
def test_busy(monkeypatch):
    """One process measures; the others say what it would be in other settings."""
    one, two, asleep = tried = threads.settings(2)
    monkeypatch.setattr(busy, "ROUNDS", 1)
    monkeypatch.setattr(busy, "MIXERS", ("softmax",))
    monkeypatch.setattr(busy, "TOKENS", (64,))
    monkeypatch.setattr(threads, "settings", lambda most: tried)
    first = settings.fresh("busy", "milliseconds('softmax', 64, 0)", one.environment())
    assert first > 0
    times = {one: first, two: 2 * first, asleep: 1.5 * first}

    def fresh(module, call, setting):
        by_setting = {str(s.environment()): ms for s, ms in times.items()}
        return by_setting[str(setting)] if setting else str(asleep)

    monkeypatch.setattr(threads, "times", lambda *_: times)
    assert busy.chosen("softmax", 64) == str(one)
    monkeypatch.setattr(busy, "fresh", fresh)
    rows = busy.run()
    assert [row["setting"] for row in rows] == [*map(str, tried)]
    for load in ("quiet", "busy"):
        assert [row[load] for row in rows] == [*times.values()]
        assert [row[f"chosen_{load}"] for row in rows] == [None, None, 1.5]
    assert len({len(row) for row in busy.table(rows)}) == 1


def test_decoding(monkeypatch):
    monkeypatch.setattr(decoding, "STEPS", 2)
    monkeypatch.setattr(decoding, "ROUNDS", 1)
    rows = [*decoding.run((3, 5, 9))]
    assert {row["layer"] for row in rows} == set(decoding.makers(10))
    for row in rows:
        grows = row["layer"] in decoding.GROWING
        assert list(row["microseconds"]) == ([3, 5] if grows else [3, 5, 9])
        assert all(t > 0 for t in row["microseconds"].values())
    assert len({len(row) for row in decoding.table(rows, (3, 5, 9))}) == 1


def test_generation_by_context(monkeypatch):
    monkeypatch.setattr(generation, "TOKENS", 2)
    monkeypatch.setattr(generation, "ROUNDS", 1)
    rows = generation.run((3, 5))
    times = generation.by_model(rows)
    assert list(times) == [*generation.MIXERS, generation.NANOGPT]
    assert all(list(line) == [3, 5] for line in times.values())
    assert all(us > 0 for line in times.values() for us in line.values())
    assert len({len(line) for line in generation.table(rows)}) == 1


@torch.no_grad()
def test_the_cache_of_nanogpt_changes_nothing():
    cached, past, logits = generation.Cached(6), 0, []
    tokens = torch.tensor([[3, 1, 4, 1, 5, 9]])
    for token in tokens.unbind(1):
        y, past = cached.step(token, past)
        logits.append(y)
    whole = cached.model(tokens)
    torch.testing.assert_close(torch.stack(logits, 1), whole, rtol=2e-5, atol=2e-5)


def test_where_a_constant_cost_crosses():
    lines = {
        generation.NANOGPT: (2, 4, 8),
        "delta": (4, 4, 4),
        "sum": (1, 1, 1),
        "softmax": (3, 6, 9),
    }
    rows = [
        {"model": name, "context": context, "microseconds": float(us)}
        for name, line in lines.items()
        for context, us in zip((64, 128, 256), line, strict=True)
    ]
    said = {line[0]: line[-1] for line in generation.table(rows)[1:]}
    assert said == {
        generation.NANOGPT: "",
        "delta": "from 130",
        "sum": "at every context from 64",
        "softmax": "not up to 256",
    }


def test_models_of_all_mixers_are_equally_large():
    """Within 2 %, not counting position tables."""
    sizes = {
        name: mixers.model(name, mixers.equal_d_ff(name)).num_parameters()
        for name in MIXERS
    }
    wanted = dict.fromkeys(MIXERS, sizes["softmax"])
    assert sizes == pytest.approx(wanted, rel=0.02)


def test_mixers(monkeypatch):
    monkeypatch.setattr(mixers, "ROUNDS", 1)
    monkeypatch.setattr(mixers, "TURN", 0.0)
    rows = [*mixers.run(("softmax", "sum"))]
    assert [r["mixer"] for r in rows] == ["softmax", "sum"]
    assert all(r["tokens_per_second"] > 0 and r["peak_mib"] > 10 for r in rows)
    # The rules of chunks need more operators than PyTorch's one.
    assert 100 < rows[0]["operators"] < rows[1]["operators"]
    assert len({len(row) for row in mixers.table(rows)}) == 1


@pytest.mark.parametrize(("mixer", "limit"), [("delta", 1180), ("sum", 810)])
def test_operators_of_a_short_sequence(mixer, limit):
    """Softmax attention needs 506, of which 210 are not those of a mixer.

    The sum rule looks at its first keys: tiny ones need units. Every projection is a call
    of its own, so that what is put around it acts.
    """
    step = mixers.Step(partial(mixers.of, mixer))

    def both_passes():
        step.model(step.tokens[:, :-1]).sum().backward()

    assert measure.operator_calls(both_passes) <= limit


def test_operators_of_a_short_window():
    """The dense form needs 132, and is not stable."""
    comparison = peers.aft_dense(64, 128, 32, peers.Goal(1, 1))
    ours, _ = cases.calls(peers.case_of(comparison)).values()
    assert measure.operator_calls(ours) <= 161


GOAL = peers.Goal(1, 1, always=1, why="because")
SMALL = (
    peers.gated_delta(2, 70, 2, 8, GOAL),
    peers.one_step(2, 2, 8, GOAL),
    peers.qwen_layer(2, 70, 2, 8, GOAL),
    peers.aft_dense(40, 8, 5, GOAL),
    peers.aft_dense(40, 8, None, GOAL),
    peers.normalized_sum(2, 150, 2, 8, "chunks", lambda: peers.sum_chunks, GOAL),
    peers.normalized_sum(2, 70, 2, 8, "package", peers._fast_transformers, GOAL),
    peers.dpfp(2, 10, 2, 8, GOAL),
    peers.qwen("prefill", 40, 2, 16, GOAL),
    peers.qwen("decoding", 5, 2, 16, GOAL),
)


@pytest.mark.parametrize("comparison", SMALL, ids=[c.key for c in SMALL])
def test_peers_compute_the_same(comparison):
    try:
        case = peers.case_of(comparison)
    except ImportError as error:
        pytest.skip(f"{error.name} is not installed")
    assert peers.difference(case) < 1e-5


def test_peers_of_training_are_equally_large():
    models = (peers.NanoGPT(), mixers.of("softmax"))
    assert len({sum(p.numel() for p in model.parameters()) for model in models}) == 1


def test_a_comparison(monkeypatch):
    monkeypatch.setattr(measure, "TURN", 0.001)
    monkeypatch.setattr(peers, "COMPARISONS", SMALL)
    monkeypatch.setattr(peers, "fresh", lambda _, call, __: eval(call, vars(peers)))
    row = peers.run(SMALL[4])
    assert row["difference"] < 1e-5
    assert 0 < row["worst"] <= row["best"] and row["ratio"] > 0
    assert {*row["settings"]} == {*settings.SETTINGS}
    missing = SMALL[0]._replace(theirs=lambda: __import__("no_such_package"))
    other = peers.run(missing)
    assert other["reason"] == "no_such_package is not installed"
    cells = peers.table([row, other])
    assert len({len(line) for line in cells}) == 1
    assert "no_such_package is not installed" in cells[2]


def spent(ours, theirs, others=0.0, wide=False):
    sides = [{"milliseconds": ms, "main_thread": ms / 2} for ms in (ours, theirs)]
    return {"sides": sides, "others": others, "wide": wide}


@pytest.mark.parametrize(
    ("asleep", "spinning", "verdict", "reason"),
    [
        (spent(2, 4), spent(1, 2), "yes", None),
        # Each at its best: 1 against 3, though 4 against 3 in one setting.
        (spent(4, 3), spent(1, 4), "no", "because"),
        (spent(4, 3), spent(4, 3), "no", "because"),
        (spent(2, 4, others=1.0), spent(1, 2), "loaded", None),
    ],
)
def test_each_side_counts_at_its_best_setting(
    monkeypatch, asleep, spinning, verdict, reason
):
    by_setting = {"PASSIVE": asleep, "ACTIVE": spinning}
    monkeypatch.setattr(peers, "SETTINGS", {k: {"OMP": k} for k in by_setting})
    monkeypatch.setattr(peers, "fresh", lambda _, __, given: by_setting[given["OMP"]])
    row = peers.run(SMALL[7])
    assert (peers.verdict(row), row["reason"]) == (verdict, reason)
    best = [
        min(s["sides"][side]["milliseconds"] for s in by_setting.values())
        for side in (0, 1)
    ]
    assert row["ratio"] == pytest.approx(best[1] / best[0])


def test_a_loaded_row_is_measured_again(monkeypatch):
    tries = [spent(1, 2, others=2.0), spent(1, 2, wide=True), spent(1, 2, others=2.0)]
    left = iter(tries)
    monkeypatch.setattr(peers, "COMPARISONS", SMALL)
    monkeypatch.setattr(peers, "times", lambda case: next(left))
    assert peers.measured(SMALL[7].key) == tries[1]
    left = iter([spent(1, 2), *tries])
    assert peers.measured(SMALL[7].key) == spent(1, 2)


def test_rows_that_miss_say_why():
    """In the committed file."""
    rows = json.loads((run.RESULTS / "peers-cpu.json").read_text("utf-8"))["peers"]
    assert [row["work"] for row in rows] == [c.name for c in peers.COMPARISONS]
    for row in rows:
        missed = row.get("ratio", 0) < row["must"] or row["worst"] < row["always"]
        assert bool(row["reason"]) == missed, row["work"]


def test_a_setting_is_a_process_of_its_own(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    call = "os.environ.get('OMP_NUM_THREADS', 'not set')"
    assert settings.fresh("settings", call, {}) == "not set"
    before = settings.busy_seconds()
    assert before is None or before > 0


def test_steps_by_length(monkeypatch):
    monkeypatch.setattr(steps, "TIMES", (32,))
    monkeypatch.setattr(steps, "MIXERS", ("softmax", "sum"))
    monkeypatch.setattr(steps, "ROUNDS", 1)
    monkeypatch.setattr(steps, "TURN", 0.0)
    measured = steps.milliseconds(32, ("softmax", "sum"))
    assert all(ms > 0 for ms in measured.values())
    monkeypatch.setattr(steps, "fresh", lambda *_: {"softmax": 2.0, "sum": 3.0})
    rows = steps.run()
    assert [row["softmax_steps"] for row in rows] == [1.0, 1.5]
    assert steps.table(rows)[1:] == [["softmax", "1.00"], ["sum", "1.50"]]


def test_names_are_unique():
    for cases_ in (operations.CASES, peers.COMPARISONS):
        assert len({case.key for case in cases_}) == len(cases_)
    assert all(c.goal.must <= c.goal.aim for c in peers.COMPARISONS)


def test_lengths_have_every_operation_and_its_dense_form():
    forms = {(form.op, form.form) for form in lengths.FORMS}
    assert len(forms) == len(lengths.FORMS)
    aft = {"aft_simple", "aft_full", "aft_local"}
    assert {op for op, form in forms if form == lengths.DENSE} == {*rules.DENSE, *aft}
    assert {op for op, _ in forms} == {*rules.RULES} | aft | {lengths.SOFTMAX}


@pytest.mark.parametrize("op", ["aft_simple", "aft_full", "aft_local"])
def test_dense_forms_of_aft_compute_the_same(op):
    ours, dense = (form for form in lengths.FORMS if form.op == op)
    inputs, dy = ours.problem(batch=2, time=16)  # the window is longer
    a, b = (cases.once(form.side, inputs, dy) for form in (ours, dense))
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


def test_lengths(monkeypatch):
    monkeypatch.setattr(lengths, "ROUNDS", 1)
    monkeypatch.setattr(lengths, "TURN", 0.0)
    rows = lengths.sweep([(1, 16), (1, 32)])
    assert len(rows) == 2 * len(lengths.FORMS)
    assert all(r["milliseconds"] > 0 and r["reason"] is None for r in rows)
    # Everything left out from the second length on.
    monkeypatch.setattr(lengths, "LIMIT", 0)
    monkeypatch.setattr(lengths, "FORMS", lengths.FORMS[:2] + lengths.FORMS[-1:])
    rows = lengths.sweep([(1, 16), (1, 32)])
    assert [r["milliseconds"] is None for r in rows] == [False] * 3 + [True] * 3
    assert all(r["reason"].startswith("would need up to") for r in rows[3:])
    cells = lengths.table(rows, "T")
    assert [line[-1] for line in cells[1:]] == ["-"] * 3
    assert len({len(line) for line in cells}) == 1


@pytest.mark.parametrize(
    ("ours", "theirs", "at"),
    [
        # Quadratic against linear: equal at 50.
        ({20: 20, 40: 40, 80: 80}, {20: 8, 40: 32, 80: 128}, 50),
        ({20: 1, 40: 2}, {20: 2, 40: 4}, 20),
        ({20: 2, 40: 4}, {20: 1, 40: 2, 80: 9}, None),
        # Twice: what counts is where it stays faster.
        ({10: 1, 20: 4, 40: 4}, {10: 2, 20: 2, 40: 8}, 800**0.5),
    ],
)
def test_crossing(ours, theirs, at):
    assert lengths.crossing(ours, theirs) == pytest.approx(at)


def test_crossings_in_words():
    measured = {
        ("sum_rule", "fwlab"): (1, 64),
        ("sum_rule", "dense"): (0.5, 2048),
        ("kimi_delta_rule", "fwlab"): (2, 99),
        ("softmax_attention", "fwlab"): (2, 98),
    }
    rows = [
        {"op": op, "form": form, "batch": 4, "T": T, "milliseconds": time}
        for (op, form), times in measured.items()
        for T, time in zip((16, 1024), times, strict=True)
    ]
    first, second = lengths.crossings(rows)
    assert lengths.said(first["dense"]) == "from T = 32"
    assert lengths.said(first["softmax"]) == "at every length from T = 16"
    assert lengths.said(second["dense"]) == "no dense form"
    assert lengths.said(second["softmax"]) == "not up to T = 1,024"
