"""Write strength: each beta that the page shows is what PyTorch computes."""

import re

import pytest
import test_figure_live as pair
import test_figure_shakespeare as shakespeare
import torch
from built import ROOT

from fwlab.data.moves import NAMES, PLACES, WORDS

PAGE = "figures/strength.html"
STATE = "document.querySelector('#figure-strength').figure.state()"
TEXT = (ROOT / "docs" / "figures" / "strength.md").read_text("utf-8")


def state(tab) -> dict:
    return tab.evaluate(STATE)


def words(tab) -> str:
    return tab.inner_text("#figure-strength .fw-words")


def asked_for(tab) -> list[str]:
    return [n.split("figures/")[1] for n in shakespeare.weights_asked_for(tab)]


@pytest.fixture
def tab(fresh):
    figure = fresh("strength")
    figure.start()
    return figure.tab


def to_shakespeare(tab):
    tab.get_by_role("radio", name="Shakespeare").check()
    tab.wait_for_function(f"{STATE}.name === 'shakespeare'")


def betas(model, tokens: list[int]) -> torch.Tensor:
    """[time, layer, head], from PyTorch."""
    found = []
    for block in model.blocks:
        keep = lambda module, inputs, output: found.append(output.sigmoid()[0])  # noqa: E731
        block.mixer.to_beta.register_forward_hook(keep)
    with torch.no_grad():
        model(torch.tensor([tokens]))
    return torch.stack(found, dim=1)


def compare(tab, model, tokens: list[int]) -> dict:
    """The state, the bars and their numbers, and the table of kinds."""
    shown = state(tab)
    wanted = betas(model, tokens)
    torch.testing.assert_close(torch.tensor(shown["betas"]), wanted, atol=1e-4, rtol=0)
    layer, head = shown["head"]
    found = [beta[layer][head] for beta in shown["betas"]]
    figure = tab.locator("#figure-strength")
    numbers = figure.locator(".fw-betas em").all_inner_texts()
    assert numbers == [f"{x:.2f}".removeprefix("0") for x in found]
    heights = figure.locator(".fw-betas i").evaluate_all(
        "(all) => all.map((e) => e.getBoundingClientRect().height)"
    )
    # A strength of 1 is a twentieth of the window, within limits.
    full = tab.evaluate("""() => {
      const rem = parseFloat(getComputedStyle(document.documentElement).fontSize);
      return Math.min(Math.max(1.8 * rem, innerWidth / 20), 3.2 * rem);
    }""")
    assert heights == pytest.approx([max(1, full * x) for x in found], abs=0.6)
    rows = figure.locator("tbody tr").all()
    assert len(rows) == len(shown["kinds"])
    assert sum(kind["count"] for kind in shown["kinds"]) == len(tokens)
    means = [kind["mean"] for kind in shown["kinds"]]
    assert means == sorted(means, reverse=True)
    for row, kind in zip(rows, shown["kinds"], strict=True):
        cells = row.locator("th, td").all_inner_texts()
        numbers = [f"{kind[x]:.2f}" for x in ("mean", "low", "high")]
        assert [cell.strip() for cell in cells] == [
            kind["kind"],
            str(kind["count"]),
            numbers[0],
            f"{numbers[1]} – {numbers[2]}",
        ]
        assert f"{kind['kind']} {numbers[0]}" in words(tab)
    return shown


def test_weights_come_on_first_use(fresh):
    tab = fresh("strength").tab
    assert asked_for(tab) == []
    assert tab.locator("#figure-strength .fw-betas em").first.is_visible()
    tab.get_by_role("button", name="Start the model (22 kB)").click()
    tab.get_by_label("Text to read").wait_for()
    assert asked_for(tab) == ["live/delta.safetensors"]
    to_shakespeare(tab)
    assert len(asked_for(tab)) == 2
    # Back, without fetching again, and with the reader's text.
    tab.get_by_label("Text to read").fill("To be")
    tab.get_by_role("radio", name="people who move").check()
    tab.wait_for_function(f"{STATE}.name === 'people'")
    to_shakespeare(tab)
    assert tab.get_by_label("Text to read").input_value() == "To be"
    assert len(asked_for(tab)) == 2


@pytest.mark.parametrize(
    "text",
    [None, "Where is Hana? hana IS in tunis. Pia is in Accra . Where is Pia ?", "Ada"],
)
def test_agrees_with_pytorch_on_people(tab, text):
    if text:
        tab.get_by_label("Text to read").fill(text)
    shown = compare(
        tab, pair.model("delta"), [WORDS.index(x) for x in state(tab)["units"]]
    )
    units = re.findall(r"\w+|[.?]", text or shown["text"])
    assert [unit.lower() for unit in shown["units"]] == [x.lower() for x in units]
    assert shown["skipped"] == []


def test_agrees_with_pytorch_on_shakespeare(tab):
    to_shakespeare(tab)
    made, alphabet = shakespeare.model("delta")
    for text in (None, shakespeare.TEXT, "o" * 200):
        if text:
            tab.get_by_label("Text to read").fill(text)
        text = state(tab)["text"]
        assert "".join(state(tab)["units"]) == text
        for layer, head in ((1, 1), (1, 4), (2, 3)):
            tab.get_by_role("radio", name=f"{layer}.{head}", exact=True).check()
            shown = compare(tab, made, [alphabet.index(c) for c in text])
            assert shown["head"] == [layer - 1, head - 1]


def test_page_says_what_was_measured_of_people(tab):
    """Over all words that the model knows."""
    found = betas(pair.model("delta"), list(range(len(WORDS))))[:, 0, 0].tolist()
    of = dict(zip(WORDS, found, strict=True))
    places, names = ([of[x] for x in group] for group in (PLACES, NAMES))
    assert f"{min(places):.2f} to {max(places):.2f}" in TEXT
    assert f"{min(names):.2f} to {max(names):.2f}" in TEXT
    assert {f"{of[x]:.2f}" for x in ("is", "Where", ".", "?")} == {"0.01", "0.02"}
    assert "0.01 or 0.02" in TEXT
    # Wherever a word is, in the order of a text or not.
    by_word = {}
    for unit, beta in zip(state(tab)["units"], state(tab)["betas"], strict=True):
        by_word.setdefault(unit, set()).add(round(beta[0][0], 9))
    assert len(by_word["Ada"]) == 1 and all(len(x) == 1 for x in by_word.values())


def test_page_says_what_was_measured_of_shakespeare(tab):
    to_shakespeare(tab)
    by_head = {}
    for head in ("1.1", "1.3"):
        tab.get_by_role("radio", name=head, exact=True).check()
        by_head[head] = {kind["kind"]: kind["mean"] for kind in state(tab)["kinds"]}
    for head, kind in (
        *(("1.1", "spaces"), ("1.1", "vowels")),
        *(("1.3", "line breaks"), ("1.3", "capitals")),
    ):
        assert f"{kind} with {by_head[head][kind]:.2f}" in TEXT
    first, second = {}, {}
    for unit, beta in zip(state(tab)["units"], state(tab)["betas"], strict=True):
        for head in range(4):
            first.setdefault((unit, head), set()).add(round(beta[0][head], 9))
            second.setdefault((unit, head), set()).add(round(beta[1][head], 2))
    assert all(len(x) == 1 for x in first.values())
    assert all(len(second["e", head]) > 1 for head in range(4))


def test_what_is_left_out_is_said(tab):
    field = tab.get_by_label("Text to read")
    field.fill("Zoe is in Rome!")
    assert state(tab)["units"] == ["is", "in", "Rome"]
    assert "leaves out: Zoe !" in words(tab)
    field.fill("")
    assert "Nothing is read yet" in words(tab)
    field.fill("<b>Ada</b> is in <img src=x>")
    assert (
        tab.locator("#figure-strength :is(.fw-betas, .fw-words) :is(img, b b)").count()
        == 0
    )
    to_shakespeare(tab)
    field.fill("o" * 200)
    assert "200 letters at most" in words(tab)


def test_weights_that_do_not_come_are_said_to(tab):
    tab.context.route(
        "**/shakespeare/delta.safetensors", lambda r: r.fulfill(status=204)
    )
    tab.get_by_role("radio", name="Shakespeare").click()
    tab.wait_for_function(
        "document.querySelector('#figure-strength .fw-words').textContent.includes('did not come')"
    )
    assert state(tab)["name"] == "people"
    assert tab.get_by_role("radio", name="people who move").is_checked()
    tab.context.unroute("**/shakespeare/delta.safetensors")
    to_shakespeare(tab)


def test_says_why_it_does_not_run_from_disk(look, site):
    tab = look(PAGE, base=f"{site.as_uri()}/")
    tab.get_by_role("button", name="Start the model").click()
    tab.wait_for_function(
        "document.querySelector('#figure-strength .fw-words').textContent.includes('python -m http.server')"
    )
    assert tab.locator("#figure-strength .fw-betas em").first.is_visible()
