"""The pages "Inside the package" and "One equation, ten rules" are true."""

import re
from itertools import product
from pathlib import Path

import frames
import pytest
import test_house
import torch

from fwlab import ops
from fwlab.layers.fast_weight_attention import RULES as RECORDS
from fwlab.ops.call.rule import Rule

DOCS = Path(__file__).resolve().parents[1] / "docs"
CONTRIBUTE, RULES = (
    (DOCS / f"{name}.md").read_text("utf-8") for name in ("contribute", "rules")
)


def test_the_way_is_the_one_that_runs():
    line = re.compile(
        r"^1\. `([^`]+)` \[([\w/.]+)\]\(annotated/source/([\w/]+)\.md\)", re.M
    )
    drawn = line.findall(test_house.INSIDE)
    assert [(name, f"fwlab/{file}") for name, file, _ in drawn] == frames.frames()
    for _, file, page in drawn:
        assert page == file.removesuffix(".py")


def test_the_way_is_short():
    counted = {
        (rule, time): len(frames.frames(rule, time))
        for rule, time in product(RECORDS, (64, 512))
    }
    assert all(0 < count <= 9 for count in counted.values()), counted


def test_every_room_is_drawn():
    table = re.findall(r"^\| (`fwlab/.*?) \|", CONTRIBUTE, re.M)
    assert re.findall(r"`fwlab/(\w+)", "".join(table)) == test_house.ROOMS
    # Beside a recurrence are the files that are in it, or in each of its forms.
    usual = {"naive.py", "chunked.py", "efficient.py", "kernels.py"}
    for names, says in test_house.ROWS:
        files = {*re.findall(r"`(\w+\.py)`", says)}
        forms = re.findall(r"`(\w+)`", says.partition("forms: ")[2]) or ["."]
        for name, form in product(re.findall(r"`(\w+)`", names), forms):
            folder = test_house.PACKAGE / "ops" / name / form
            assert {path.name for path in folder.glob("*.py")} & usual == files, name


class Row:
    """A row of the table of rules, cell by cell."""

    def __init__(self, line: str):
        self.cells = [cell.strip() for cell in line.strip("| \n").split(" | ")]
        rule, _, self.decay, self.ask, self.k, self.v, self.strength, self.steps, *_ = (
            self.cells
        )
        self.function = re.search("`(.+)`", rule)[1]
        self.loop = re.search(r"annotated/(\w+)\.md", self.cells[8])[1]
        self.source = re.search(r"\[(.+)\]", self.cells[9])[1]


ROWS = [Row(line) for line in RULES.splitlines() if line.startswith("| **")]


def test_every_rule_has_a_row():
    records = [r for r in ops.TABLE.values() if isinstance(r, Rule) and r.mixer]
    records = [r for r in records if r.folder in ("additive", "correcting")]
    assert {row.function for row in ROWS} == {record.name for record in records}


@pytest.mark.parametrize("row", ROWS, ids=range(len(ROWS)))
def test_rows_say_what_the_records_compute(row):
    record = ops.TABLE[row.function]
    sizes = {"batch": 1, "time": 3, "heads": 1, "key": 4, "value": 5}
    optional = {
        n: g.dims.replace("[key]", "") for n, g in record.gates.items() if g.optional
    }
    x = record.example(torch.Generator().manual_seed(0), optional, **sizes)
    inputs = {"decay": None, "strength": None, "ask": None} | x | record.inputs(**x)
    loop = record.implementations["naive"].by_names.values()
    module = next(iter(loop)).__module__
    assert module == f"fwlab.ops.{record.folder}.rules.{row.loop}"
    assert row.source in getattr(ops, row.function).__doc__
    assert (row.ask != "–") == record.corrects
    if record.corrects:
        own = record.inputs(**x).get("ask")
        assert (row.ask == row.k) == (own is None)
    # A gate may be left out.
    assert (row.decay == "1") == (inputs["decay"] is None)
    assert (row.strength == "1") == (inputs["strength"] is None)
    steps = inputs["k"].shape[1] // 3
    assert row.steps == ("$n$" if record.steps else str(steps))
    same = inputs["v"] is x["v"] or (steps > 1 and record.steps > 1)
    assert (re.fullmatch(r"\$v(_j)?\$", row.v) is not None) == same
    wide = inputs["decay"] is not None and inputs["decay"].shape[-1] > 1
    assert ("channel" in row.decay) == wide


def test_defaults_of_the_layer():
    row = re.compile(r"^\| `(\w+)` \| .+ \| `(\w+)` \| (\w+) \| (\w+) \|$", re.M)
    stated = {name: cells for name, *cells in row.findall(RULES)}
    records = {name: RECORDS[name] for name in stated}
    assert {"delta", "rwkv7"} <= {*stated}
    assert stated == {
        name: [r.feature_map.__name__, str(r.key_norm), str(r.normalize)]
        for name, r in records.items()
    }


def test_the_equation_is_that_of_every_rule():
    """The recurrence of the page, step by step, against each rule's loop."""
    for row in ROWS:
        record = ops.TABLE[row.function]
        sizes = {"batch": 1, "time": 4, "heads": 2, "key": 4, "value": 5}
        x = record.example(torch.Generator().manual_seed(1), **sizes)
        given = {"decay": None, "strength": None, "ask": None, "early": False} | x
        given |= record.inputs(**x)
        W, y = torch.zeros(1, 2, 5, 4, dtype=torch.float64), []
        for t in range(given["k"].shape[1]):
            q, k, v = (given[name][:, t] for name in "qkv")
            r = torch.zeros_like(k)
            if record.corrects:
                r = k if given["ask"] is None else given["ask"][:, t]
            d = 1 if given["decay"] is None else given["decay"][:, t, :, None]
            s = 1 if given["strength"] is None else given["strength"][:, t]
            # To ask before the decay is to divide by it.
            faded = W * d
            answer = torch.einsum(
                "bhvk,bhk->bhv", faded, r / d[..., 0, :] if given["early"] else r
            )
            W = faded + torch.einsum("bhv,bhk->bhvk", s * (v - answer), k)
            y.append(torch.einsum("bhvk,bhk->bhv", W, q))
        n = given["k"].shape[1] // 4
        options = {"normalize": False} if record.normalizes else {}
        expected = getattr(ops, record.name)(**x, **options, implementation="naive")
        torch.testing.assert_close(
            torch.stack(y[n - 1 :: n], 1), expected, rtol=1e-12, atol=1e-12
        )
