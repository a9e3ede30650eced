"""Write strength: each beta that the page shows is what PyTorch computes."""

import re

import pytest
import test_figure_live as pair
import test_figure_shakespeare as shakespeare
import torch
from built import ROOT, asks
from moves import NAMES, PLACES, WORDS

TEXT = (ROOT / "docs" / "figures" / "strength.md").read_text("utf-8")


@pytest.fixture
def figure(fresh):
    figure = fresh("strength")
    figure.start()
    return figure


def to_shakespeare(figure):
    figure.choose("Shakespeare")
    figure.until("state().name === 'shakespeare'")


def betas(model, tokens: list[int]) -> torch.Tensor:
    """[time, layer, head], from PyTorch."""
    strengths = []
    keep = [
        block.mixer.gates.beta.projection.register_forward_hook(
            lambda _, inputs, output: strengths.append(output.sigmoid()[0])
        )
        for block in model.blocks
    ]
    with torch.no_grad():
        model(torch.tensor([tokens]))
    for hook in keep:
        hook.remove()
    return torch.stack(strengths, dim=1)


def compare(figure, model, tokens: list[int]) -> dict:
    """The state, the bars and their numbers, and the table of kinds."""
    shown, words, numbers, heights, full, rows = figure.ask(asks.STRENGTH)
    wanted = betas(model, tokens)
    torch.testing.assert_close(torch.tensor(shown["betas"]), wanted, atol=1e-4, rtol=0)
    layer, head = shown["head"]
    strengths = [beta[layer][head] for beta in shown["betas"]]
    assert numbers == [f"{x:.2f}".removeprefix("0") for x in strengths]
    assert heights == pytest.approx([max(1, full * x) for x in strengths], abs=0.6)
    assert sum(kind["count"] for kind in shown["kinds"]) == len(tokens)
    means = [kind["mean"] for kind in shown["kinds"]]
    assert means == sorted(means, reverse=True)
    for row, kind in zip(rows, shown["kinds"], strict=True):
        mean, low, high = (f"{kind[x]:.2f}" for x in ("mean", "low", "high"))
        assert row == [kind["kind"], str(kind["count"]), mean, f"{low} – {high}"]
        assert f"{kind['kind']} {mean}" in words
    return shown


def test_agrees_with_pytorch_on_people(figure):
    model = pair.model("delta")
    for text in (
        None,
        "Where is Hana? hana IS in tunis. Pia is in Accra . Where is Pia ?",
        "Ada",
    ):
        if text:
            figure.text.fill(text)
        tokens = [WORDS.index(x) for x in figure.state()["units"]]
        shown = compare(figure, model, tokens)
        units = re.findall(r"\w+|[.?]", text or shown["text"])
        assert [unit.lower() for unit in shown["units"]] == [x.lower() for x in units]
        assert shown["skipped"] == []


def test_agrees_with_pytorch_on_shakespeare(figure):
    to_shakespeare(figure)
    made, alphabet = shakespeare.model("delta")
    for text in (None, shakespeare.TEXT, "o" * 200):
        if text:
            figure.text.fill(text)
        text = figure.state()["text"]
        assert "".join(figure.state()["units"]) == text
        for layer, head in ((1, 1), (1, 4), (2, 3)):
            figure.choose(f"{layer}.{head}")
            shown = compare(figure, made, [alphabet.index(c) for c in text])
            assert shown["head"] == [layer - 1, head - 1]
    assert "200 letters at most" in figure.words()


def test_page_says_what_was_measured_of_people(figure):
    """Over all words that the model knows."""
    strengths = betas(pair.model("delta"), list(range(len(WORDS))))[:, 0, 0].tolist()
    of = dict(zip(WORDS, strengths, strict=True))
    places, names = ([of[x] for x in group] for group in (PLACES, NAMES))
    assert f"{min(places):.2f} to {max(places):.2f}" in TEXT
    assert f"{min(names):.2f} to {max(names):.2f}" in TEXT
    assert {f"{of[x]:.2f}" for x in ("is", "Where", ".", "?")} == {"0.01", "0.02"}
    assert "0.01 or 0.02" in TEXT
    # Wherever a word is, in the order of a text or not.
    by_word = {}
    shown = figure.state()
    for unit, beta in zip(shown["units"], shown["betas"], strict=True):
        by_word.setdefault(unit, set()).add(round(beta[0][0], 9))
    assert len(by_word["Ada"]) == 1 and all(len(x) == 1 for x in by_word.values())


def test_page_says_what_was_measured_of_shakespeare(figure):
    to_shakespeare(figure)
    by_head = {}
    for head in ("1.1", "1.3"):
        figure.choose(head)
        shown = figure.state()
        by_head[head] = {kind["kind"]: kind["mean"] for kind in shown["kinds"]}
    for head, kind in (
        *(("1.1", "spaces"), ("1.1", "vowels")),
        *(("1.3", "line breaks"), ("1.3", "capitals")),
    ):
        assert f"{kind} with {by_head[head][kind]:.2f}" in TEXT
    first, second = {}, {}
    for unit, beta in zip(shown["units"], shown["betas"], strict=True):
        for head in range(4):
            first.setdefault((unit, head), set()).add(round(beta[0][head], 9))
            second.setdefault((unit, head), set()).add(round(beta[1][head], 2))
    assert all(len(x) == 1 for x in first.values())
    assert all(len(second["e", head]) > 1 for head in range(4))


def test_what_is_left_out_is_said(figure):
    weights = "**/delta.safetensors"
    figure.tab.context.route(weights, lambda route: route.fulfill(status=204))
    figure.tab.evaluate(asks.ANEW, "strength")
    figure.until_it_says("did not come")
    figure.tab.context.unroute(weights)
    figure.press("Start the model (22 kB)")
    figure.text.wait_for()
    figure.text.fill("Zoe is in Rome!")
    assert figure.state()["units"] == ["is", "in", "Rome"]
    assert "leaves out: Zoe !" in figure.words()
    figure.text.fill("")
    assert "Nothing is read yet" in figure.words()
    figure.text.fill("<b>Ada</b> is in <img src=x>")
    assert figure.css(":is(.fw-betas, .fw-words) :is(img, b b)").count() == 0
