"""The pages "Inside the package" and "One equation, ten rules" are true."""

import re
from itertools import product
from pathlib import Path

import frames
import test_house
import torch

from fwlab.bench.problems import RULES as OPERATIONS
from fwlab.bench.problems import example
from fwlab.layers.fast_weight_attention import RULES as LAYERS
from fwlab.ops._rules import Inputs

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


def test_every_room_is_drawn():
    # Beside a recurrence are the files that are in it, or in each of its forms.
    usual = {"naive.py", "chunked.py", "efficient.py", "kernels.py"}
    for names, says in test_house.ROWS:
        files = {*re.findall(r"`(\w+\.py)`", says)}
        forms = re.findall(r"`(\w+)`", says.partition("forms: ")[2]) or ["."]
        for name, form in product(re.findall(r"`(\w+)`", names), forms):
            folder = test_house.PACKAGE / "ops" / name / form
            assert {path.name for path in folder.glob("*.py")} & usual == files, name


#: The rules of the table, by the names of their functions.
ROWS = re.findall(r"^\| \*\*.*?`(\w+)`", RULES, re.M)


def drawn(op, *, time: int, optional: bool = False) -> tuple[dict, Inputs]:
    """Inputs of a rule, and those of its recurrence."""
    sizes = {"batch": 1, "time": time, "heads": 2, "queries": 2, "key": 4, "value": 5}
    generator = torch.Generator().manual_seed(0)
    x = example(op, sizes | {"steps": 2}, generator)
    if optional:
        x |= {name: -torch.rand(1, time, 2).double() for name in op.rule.optional}
    made = op.rule.gates(**x)
    qkv = {n: x[n] if getattr(made, n) is None else getattr(made, n) for n in "qkv"}
    return x, made._replace(**qkv)


def test_defaults_of_the_layer():
    row = re.compile(r"^\| `(\w+)` \| .+ \| `(\w+)` \| (\w+) \| (\w+) \|$", re.M)
    stated = {name: cells for name, *cells in row.findall(RULES)}
    records = {name: LAYERS[name] for name in stated}
    assert {"delta", "rwkv7"} <= {*stated}
    assert stated == {
        name: [r.feature_map.__name__, str(r.key_norm), str(bool(r.normalize))]
        for name, r in records.items()
    }


def test_the_equation_is_that_of_every_rule():
    """The recurrence of the page, step by step, against each rule's loop."""
    assert {*ROWS} == {*OPERATIONS}
    for op in OPERATIONS.values():
        x, made = drawn(op, time=4)
        W, y = torch.zeros(1, 2, 5, 4, dtype=torch.float64), []
        for t in range(made.k.shape[1]):
            q, k, v = (part[:, t] for part in (made.q, made.k, made.v))
            r = torch.zeros_like(k)
            if op.rule.corrects:
                r = k if made.erase_key is None else made.erase_key[:, t]
            d = 1 if made.decay is None else made.decay[:, t, :, None]
            s = 1 if made.strength is None else made.strength[:, t]
            # To ask before the decay is to divide by it.
            faded = W * d
            answer = torch.einsum(
                "bhvk,bhk->bhv", faded, r / d[..., 0, :] if made.early else r
            )
            W = faded + torch.einsum("bhv,bhk->bhvk", s * (v - answer), k)
            y.append(torch.einsum("bhvk,bhk->bhv", W, q))
        n = made.k.shape[1] // 4
        plain = {"normalize": False} if op.rule.normalized_loop else {}
        expected = op(**x, **plain, implementation="naive")
        torch.testing.assert_close(
            torch.stack(y[n - 1 :: n], 1), expected, rtol=1e-12, atol=1e-12
        )
