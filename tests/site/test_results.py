"""Test that pages of results show the values of docs/results/*.json."""

import json
import re
from collections import defaultdict
from html import unescape
from statistics import mean

import plots
import pytest
import rates
from built import ROOT
from frame import Points

RESULTS = ROOT / "docs" / "results"
PAGE, SPEED, TABLES = "results.html", "results/speed.html", "results/tables.html"
#: The names of the plots on each results page, in order.
DRAWN = {
    PAGE: "losses erasing decay hybrids longer carried fla operations steps",
    SPEED: "operations peers steps lengths batches decoding generation",
    TABLES: "",
}


def read(name: str) -> dict:
    return json.loads((RESULTS / f"{name}.json").read_text("utf-8"))


def points(name: str) -> list[dict]:
    return read(f"../reproduce/{name}")["points"]


def final() -> dict[str, list[float]]:
    """Return the final validation losses of all runs, by mixer."""
    losses = defaultdict(list)
    for path in RESULTS.glob("nanogpt-cpu-*.json"):
        run = read(path.stem)
        losses[run["config"]["mixer"]].append(run["validation_loss"])
    return losses


@pytest.fixture(scope="module")
def pages_of(site) -> dict[str, str]:
    return {page: (site / page).read_text("utf-8") for page in DRAWN}


@pytest.fixture(scope="module")
def labels(pages_of) -> dict[str, str]:
    """Return the text alternatives of all plots, by name."""
    found = {}
    for page, html in pages_of.items():
        pattern = r'<svg id="plot-(\w+)" role="img" aria-label="([^"]*)"'
        on_page = re.findall(pattern, html)
        assert " ".join(name for name, _ in on_page) == DRAWN[page]
        assert "<!-- plot:" not in html and "<!-- results:" not in html
        found |= dict(on_page)
    return {name: unescape(label) for name, label in found.items()}


def words(html: str) -> list[str]:
    return re.sub(r"<[^>]*>", " ", html).split()


def test_a_finding_is_a_claim_a_chart_and_forty_words(pages_of):
    """A finding has a claim, a chart, at most 40 words and a link to its evidence."""
    _, *findings = pages_of[PAGE].split("<h2 ")
    assert len(findings) == len(DRAWN[PAGE].split())
    for finding in findings:
        finding = finding.partition("</article>")[0]
        text = finding.rpartition("</svg>")[2].partition("<p")[2]
        assert finding.index("<svg") < finding.index("<p") and "<a href=" in text
        assert len(words(f"<p{text.partition('</p>')[0]}")) <= 40, finding[:80]
    for html in pages_of.values():
        for paragraph in re.findall(r"<p\b.*?</p>", html, re.DOTALL):
            assert len(words(paragraph)) <= 90, paragraph


def test_every_table_has_its_numbers(pages_of, site):
    """Each table links to the numbers, and all rows have the same number of cells."""
    for section in pages_of[TABLES].split("<h2 ")[1:]:
        files = re.findall(
            r'<a href="([\w-]+\.json)">(?:JSON|all numbers)</a>', section
        )
        assert files and all((site / "results" / file).is_file() for file in files)
        rows = [row.count("<t") for row in re.findall(r"<tr>(.*?)</tr>", section, re.S)]
        assert len(rows) > 4 and len({*rows}) == 1, section[:80]


def said(label: str) -> dict[str, list[float]]:
    """Parse the numbers of each row from a chart's text alternative."""
    label = re.sub(r"(?<=\d),(?=\d{3})", "", label.replace("−", "-"))
    rows = label.partition("): ")[2].removesuffix(".").split("; ")
    found = (re.match(r"(.*?) ([+-]?\d[\d.]*(?: / [\d.]+)*)$", row) for row in rows)
    return {row[1]: [float(x) for x in row[2].split(" / ")] for row in found}


def test_charts_show_what_their_titles_claim(labels):
    chart = {name: said(labels[name]) for name in labels if "): " in labels[name]}
    assert sum(x > 1 for row in chart["fla"].values() for x in row) == 15
    bare, with_conv = zip(*chart["erasing"].values(), strict=True)
    assert bare[2] < min(bare[:2]) - 0.2 and max(with_conv[:3]) < 2.07
    decay = chart["decay"]
    for forgets, keeps in (
        ("gated", "delta"),
        ("gated delta, unit keys", "delta, unit keys"),
    ):
        assert all(a < b for a, b in zip(decay[forgets], decay[keeps], strict=True))
    best = min(
        x for own in (chart["erasing"], decay) for row in own.values() for x in row
    )
    assert decay["gated delta, unit keys"][1] == best
    assert [*chart["longer"]][-2:] == ["delta, unit keys", "softmax-rotary"]
    lower = {mixer for mixer, (change,) in chart["longer"].items() if change < 0}
    assert len(lower - {"convolution alone"}) == 8  # The control is excluded.
    assert chart["carried"]["delta, ELU + 1"][0] > chart["carried"]["sum"][0] + 1
    time, memory = chart["operations"]["delta_rule, T 4096"]
    assert (round(time), round(memory)) == (20, 10)


def test_a_chart_draws_its_numbers(monkeypatch):
    """A chart draws a mark at each number, in the row of its series."""
    monkeypatch.setattr(plots, "drawn", lambda figure, *_: figure)
    series = {"a": {"x": [3.0, 1.0], "y": [2.0]}, "b": {"y": [5.0]}}
    (ax,) = plots.chart("name", "", series, "").axes
    marks = {(x, y) for line in ax.lines for x, y in line.get_xydata()}
    marks |= {(x, y) for c in ax.collections for x, y in c.get_offsets()}
    assert {(3, 0), (1, 0), (2, 1), (5, 1)} <= {(x, round(y)) for x, y in marks}


def test_without_scripts_a_wide_table_scrolls(look):
    tab = look(TABLES, width=390, java_script_enabled=False)
    boxes = tab.locator("article table").evaluate_all(
        """tables => tables.filter((t) => t.scrollWidth > t.clientWidth)
          .map((t) => [getComputedStyle(t).overflowX, t.clientWidth <= innerWidth])"""
    )
    assert boxes and {tuple(box) for box in boxes} == {("auto", True)}


def no_memory() -> list[float]:
    """Return the losses of the control, which has no memory, for all seeds."""
    own = Points(points("language-model"))(mixer="convolution", size="nanogpt")
    return [p["loss"] for p in own]


def test_the_readme_has_each_mixer_at_its_own_rate():
    text, own = (ROOT / "README.md").read_text("utf-8"), Points(points("rates"))
    found = re.findall(r"^\| ([\w+, -]+) \| ([\d.]+) \| ([\d., ]+) \|$", text, re.M)
    chosen = rates.tried(own).at_best_rate("mixer", by="chosen_by")
    best = {mixer: some[0]["lr"] for mixer, some in chosen.by("mixer").items()}
    assert {name: float(rate) for name, rate, _ in found} == best
    for name, _, losses in found:
        seeds = sorted(own(mixer=name, lr=best[name]), key=lambda p: p["seed"])
        assert losses == ", ".join(f"{p['loss']:.3f}" for p in seeds)


def test_no_bare_mixer_but_feedback_is_below_no_memory():
    """Of mixers without options, only feedback has a lower loss than the control."""
    loss = final()
    below = {name for name, seeds in loss.items() if min(seeds) < max(no_memory())}
    assert below == {"feedback", "feedback-shared"}
    # Transformer-XL has a lower loss than rules, and a higher loss than hybrids.
    rules = ("sum", "gated", "delta", "gated-delta", "fwp")
    assert mean(loss["softmax"]) > mean(loss["delta"])
    assert max(loss["transformer-xl"]) < min(mean(loss[rule]) for rule in rules)
    for path in RESULTS.glob("hybrid-cpu-*.json"):
        best = min(*loss["transformer-xl"], *no_memory())
        assert read(path.stem)["validation_loss"] < best


def test_pages_of_kernels_say_what_was_measured():
    """On kernel pages, every paragraph that states rates or times names the GPU."""
    for path in sorted((ROOT / "docs" / "kernels").glob("*.md")):
        page = path.read_text("utf-8")
        for paragraph in page.partition("\n# ")[2].split("\n\n"):
            told = re.search(r"\b(TB|GB|TFLOP)/s|\d ms\b|\d µs\b", paragraph)
            assert not told or re.search("H[12]00", paragraph), paragraph
