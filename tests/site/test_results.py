"""The pages of results draw and say what docs/results/*.json says."""

import gzip
import json
import re
import sys
from collections import defaultdict
from html import unescape
from statistics import mean, median

import pytest
import rates
from built import ROOT
from frame import Points

sys.path.insert(0, str(ROOT / "docs" / "hooks"))
import kernels
import plots

RESULTS = ROOT / "docs" / "results"
PAGE, SPEED, TABLES = "results.html", "results/speed.html", "results/tables.html"
#: The plots of each page, in their order.
DRAWN = {
    PAGE: "losses erasing decay hybrids longer carried fla operations steps",
    SPEED: "operations peers steps lengths batches decoding generation",
    TABLES: "",
}


def read(name: str) -> dict:
    return json.loads((RESULTS / f"{name}.json").read_text("utf-8"))


def points(name: str) -> list[dict]:
    return read(f"../reproduce/{name}")["points"]


def bench() -> dict:
    return read("bench-cpu")


def runs() -> list[dict]:
    """Return the training runs, the usual seed of each mixer first."""
    paths = RESULTS.glob("nanogpt-cpu-*.json")
    return [read(p.stem) for p in sorted(paths, key=lambda p: (len(p.stem), p.stem))]


@pytest.fixture(scope="module")
def pages_of(site) -> dict[str, str]:
    return {page: (site / page).read_text("utf-8") for page in DRAWN}


@pytest.fixture(scope="module")
def html(pages_of) -> str:
    return pages_of[TABLES]


@pytest.fixture(scope="module")
def labels(pages_of) -> dict[str, str]:
    """Return what each plot of the pages says to those who do not see it."""
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
    """And a link to its evidence; no paragraph of the pages is long."""
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


def test_every_table_has_its_numbers(html, site):
    """As files beside it; and as many cells in each row."""
    for section in html.split("<h2 ")[1:]:
        files = re.findall(
            r'<a href="([\w-]+\.json)">(?:JSON|all numbers)</a>', section
        )
        assert files and all((site / "results" / file).is_file() for file in files)
        rows = [row.count("<t") for row in re.findall(r"<tr>(.*?)</tr>", section, re.S)]
        assert len(rows) > 4 and len({*rows}) == 1, section[:80]


def test_names_are_unique_and_the_ink_is_that_of_the_text(pages_of):
    for html in (pages_of[PAGE], pages_of[SPEED]):
        drawings = re.findall(
            r'<svg id="plot-\w+" role="img".*?</svg>', html, re.DOTALL
        )
        for drawing in drawings:
            assert len(gzip.compress(drawing.encode())) < 15_000  # as it is sent
            assert "#707685" not in drawing.lower() and "currentColor" in drawing
        together = "".join(drawings)
        ids = re.findall(r'\sid="([^"]+)"', together)
        assert len(ids) == len(set(ids))
        # What is referred to is there.
        targets = re.findall(r'(?:href="|url\()#([^")]+)', together)
        assert targets and set(targets) <= set(ids)


# --- Plots ----------------------------------------------------------------


def runs_of(mixer: str) -> list[dict]:
    return [run for run in runs() if run["config"]["mixer"] == mixer]


def final() -> dict[str, list[float]]:
    """Return the losses of each mixer's runs."""
    losses = defaultdict(list)
    for run in runs():
        losses[run["config"]["mixer"]].append(run["validation_loss"])
    return losses


def said(label: str) -> dict[str, list[float]]:
    """Return the numbers of each row of a chart."""
    label = re.sub(r"(?<=\d),(?=\d{3})", "", label.replace("−", "-"))
    rows = label.partition("): ")[2].removesuffix(".").split("; ")
    found = (re.match(r"(.*?) ([+-]?\d[\d.]*(?: / [\d.]+)*)$", row) for row in rows)
    return {row[1]: [float(x) for x in row[2].split(" / ")] for row in found}


def near(numbers, digits: int = 2):
    numbers = numbers if isinstance(numbers, float) else [*numbers]
    return pytest.approx(numbers, abs=0.51 * 10**-digits)


def test_charts_have_the_numbers_of_the_results(labels):
    """One of each source; the hook computes all the same way."""
    losses = [r["validation_loss"] for r in runs() if r["config"]["mixer"] == "delta"]
    assert said(labels["losses"])["delta"] == near([mean(losses)], 3)
    ends = [
        p["loss"]
        for p in points("replacing")
        if (p["layer"], p["conv_size"]) == ("delta", 4)
    ]
    assert said(labels["erasing"])["delta"][1] == near(median(ends))
    for row in bench()["decoding"]:
        name = row["layer"].removeprefix("fast weights, ")
        assert said(labels["decoding"])[name] == near(row["microseconds"].values(), 0)
    slower = {
        (row["case"], row["shape"]["T"]): row["times_slower"]
        for row in bench()["rows"]
        if row["side"].startswith("naive")
    }
    for name, (time, _) in said(labels["operations"]).items():
        case, _, length = name.partition(", T ")
        if (case, int(length)) in slower:
            assert time == near(slower[case, int(length)], 1)


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
    assert len(lower - {"convolution alone"}) == 8  # the control has no memory
    assert chart["carried"]["delta, ELU + 1"][0] > chart["carried"]["sum"][0] + 1
    time, memory = chart["operations"]["delta_rule, T 4096"]
    assert (round(time), round(memory)) == (20, 10)


def test_a_chart_draws_its_numbers(monkeypatch):
    """A mark at each, in the row of its name."""
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


def test_stacks_are_equally_large():
    """To within 2 %, as the tables say."""
    (softmax,) = {run["parameters"] for run in runs_of("softmax")}
    stacks = [read(path.stem) for path in RESULTS.glob("hybrid-cpu-*.json")]
    for run in [*stacks, *runs_of("transformer-xl")]:
        assert run["config"]["steps"] == 2000 and run["config"]["d_model"] == 128
        assert abs(run["parameters"] / softmax - 1) < 0.02


def no_memory() -> list[float]:
    """Return the losses of the control, by seed."""
    own = [
        p
        for p in points("language-model")
        if (p["mixer"], p["size"]) == ("convolution", "nanogpt")
    ]
    assert [(p["size"], p["seed"]) for p in own] == [("nanogpt", n) for n in (1, 2, 3)]
    return [p["loss"] for p in own]


def test_the_table_has_the_losses_of_every_run(html):
    rows = final() | {"convolution alone, no memory": no_memory()}
    for mixer, losses in rows.items():
        seeds = ", ".join(f"{x:.3f}" for x in losses)
        name = mixer if " " in mixer else f"<code>{mixer}</code>"
        row = f"<td>{name}</td>\n<td><strong>{mean(losses):.3f}</strong></td>"
        assert re.search(rf"{row}\n<td>({seeds}|one seed)</td>", html), mixer


def test_the_readme_has_each_mixer_at_its_own_rate():
    text, own = (ROOT / "README.md").read_text("utf-8"), Points(points("rates"))
    found = re.findall(r"^\| ([\w+, -]+) \| ([\d.]+) \| ([\d., ]+) \|$", text, re.M)
    best = rates.best(own)
    assert {name: float(rate) for name, rate, _ in found} == best
    for name, _, losses in found:
        seeds = sorted(own(mixer=name, lr=best[name]), key=lambda p: p["seed"])
        assert losses == ", ".join(f"{p['loss']:.3f}" for p in seeds)


def test_no_bare_mixer_but_feedback_is_below_no_memory():
    """What README and the results say of windows of 64 characters."""
    below = {name for name, seeds in final().items() if min(seeds) < max(no_memory())}
    assert below == {"feedback", "feedback-shared"}


def test_attention_by_distance_is_below_every_fast_weight_rule():
    loss = {name: mean(seeds) for name, seeds in final().items()}
    rules = ("sum", "gated", "delta", "gated-delta", "fwp")
    assert loss["softmax"] > loss["delta"]
    assert max(final()["transformer-xl"]) < min(loss[rule] for rule in rules)
    for path in RESULTS.glob("hybrid-cpu-*.json"):
        assert read(path.stem)["validation_loss"] < min(
            *final()["transformer-xl"], *no_memory()
        )


def test_pages_of_kernels_say_what_was_measured():
    """At their top; and of which GPU each rate and each time is."""
    for path in sorted((ROOT / "docs" / "kernels").glob("*.md")):
        page = path.read_text("utf-8")
        page = page if path.stem == "index" else page.partition("\n# ")[2]
        paragraphs = page.split("\n\n")
        index = path.stem == "index"
        top = "Counted, then measured" if index else "Counted, not measured"
        # On the first one, after a sentence and a picture of each.
        assert paragraphs[5 if index else 1].startswith(f"**{top}.**")
        for paragraph in paragraphs:
            told = re.search(r"\b(TB|GB|TFLOP)/s|\d ms\b|\d µs\b", paragraph)
            assert not told or re.search("H[12]00", paragraph), paragraph
        measured = "results.md#on-a-gpu" in page or "no kernel on this page" in page
        assert measured, path


def test_bars_of_kernels_are_the_longest_of_each_operation():
    drawn = kernels.measured()
    for op, (_, times) in drawn["rows"].items():
        same = [row for row in drawn["run"]["rows"] if row["op"] == op]
        longest = max(row["shape"]["T"] for row in same)
        rows = [row for row in same if row["shape"]["T"] == longest]
        assert times == {row["side"]: row["ms"] for row in rows}
    faster = f"faster than fla in {sum(x > 1 for x in drawn['ratios']['fla'])} of 15;"
    assert faster in drawn["run"]["verdict"] and len(drawn["ratios"]["fla"]) == 15
