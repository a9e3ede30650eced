"""Test that "Inside the package" and "One equation, ten rules" agree with the code."""

import re
from itertools import product
from pathlib import Path

import annotated
import pytest
import rules
import test_house
import torch

from fwlab.bench.problems import RULES as OPERATIONS
from fwlab.layers.fast_weight_attention import RULES as LAYERS

DOCS = Path(__file__).resolve().parents[1] / "docs"

RULES = (DOCS / "rules.md").read_text("utf-8")


def test_the_functions_of_the_way_exist():
    line = re.compile(r"^1\. `([^`]+)` [`\[]([\w/.]+)[`\]](?:\(([\w/#.]+)\))?", re.M)
    drawn = line.findall(test_house.INSIDE)
    assert len(drawn) > 9
    shown = {page.uri: page.files for page in annotated.PAGES.values()}
    for name, file, link in drawn:
        text = (test_house.PACKAGE / file).read_text("utf-8")
        assert f"def {name.rpartition('.')[2]}(" in text, name
        uri, _, version = link.partition("#")
        if uri or annotated.page_of(f"fwlab/{file}"):
            assert shown[uri][version] == f"fwlab/{file}"


def test_every_folder_is_drawn():
    # The page lists the files of each recurrence or of each variant.
    usual = {"naive.py", "chunked.py", "efficient.py", "kernels.py"}
    for names, says in test_house.ROWS:
        files = {*re.findall(r"`(\w+\.py)`", says)}
        forms = re.findall(r"`(\w+)`", says.partition("forms: ")[2]) or ["."]
        for name, form in product(re.findall(r"`(\w+)`", names), forms):
            folder = test_house.PACKAGE / "ops" / name / form
            assert {path.name for path in folder.glob("*.py")} & usual == files, name


#: The function names in the table of rules.
ROWS = re.findall(r"^\| \*\*.*?`(\w+)`", RULES, re.M)


def test_every_rule_has_a_card():
    """Every rule has a card with its year, and with the loop's W after three tokens."""
    card = r"^\[[^\n]+\]\(annotated/(\w+)\.md\) (\d+)\n.*?^<!-- memory: (\w+) -->$"
    cards = re.findall(card, RULES, re.M | re.S)
    assert [name for *_, name in cards] == ROWS and {*ROWS} == {*OPERATIONS}
    years = re.findall(r"^\| \*\*.*\[(\d\d)\d\d\.\d+\]", RULES, re.M)
    assert [int(year) for _, year, _ in cards] == [2000 + int(year) for year in years]
    left = {name: torch.tensor(rules.memory(name)).double() for name in ROWS}
    beta, alpha, bob = 0.8, 0.7, torch.tensor([0.0, 0.8, 0.6]).double()
    for name, rome, lima, oslo in (
        ("sum_rule", 1, 1, 1),
        ("gated_rule", beta * (1 - beta) ** 2, beta * (1 - beta), beta),
        ("delta_rule", beta * (1 - beta), beta, beta),
        ("gated_delta_rule", beta * alpha**2 * (1 - beta), beta * alpha, beta),
        ("comba_rule", beta * alpha**2 * (1 - beta / 2), beta * alpha, beta),
        ("implicit_delta_rule", beta / (1 + beta) ** 2, *2 * [beta / (1 + beta)]),
        ("delta_product", 0.96 * alpha**2 * 0.04, 0.96 * alpha, 0.96),
    ):
        column = torch.tensor([[rome, 0, 0], [0, 0, 0], [oslo, 0, 0]]).double()
        column[1] = lima * bob
        torch.testing.assert_close(left[name], column)
    # Here, the decay per channel leaves the last channel unchanged.
    kimi, gated = left["kimi_delta_rule"], left["gated_delta_rule"]
    assert torch.equal(kimi[:, :2], gated[:, :2]) and kimi[1, 2] > gated[1, 2]
    two, rwkv7 = left["gated_delta_rule_2"], left["rwkv7_rule"]
    assert two[0, 0] == 0 > rwkv7[0, 0] == pytest.approx(alpha * (alpha - beta))


def test_defaults_of_the_layer():
    row = re.compile(r"^\| `(\w+)` \| .+ \| `(\w+)` \| (\w+) \| (\w+) \|$", re.M)
    stated = {name: cells for name, *cells in row.findall(RULES)}
    records = {name: LAYERS[name] for name in stated}
    assert {"delta", "rwkv7"} <= {*stated}
    assert stated == {
        name: [r.feature_map.__name__, str(r.key_norm), str(bool(r.normalize))]
        for name, r in records.items()
    }
