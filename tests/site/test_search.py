"""The search: what it finds first, what it shows, and what it has of the pages."""

import gzip
import json
import re
import subprocess
from urllib.parse import parse_qs, urlsplit

import npm
import pytest
from built import ROOT, asks, search

from fwlab.exercises import EXERCISES, QUESTIONS
from fwlab.exercises.notation import printed

#: What readers type, and what comes first: as terms of the site, in other words, in
#: symbols, as a question, misspelled, and unfinished.
QUERIES = {
    "delta rule": "notebooks/04_delta_rule",
    "del": "notebooks/04_delta_rule",
    "deltanet": "notebooks/04_delta_rule",
    "tutorial": "notebooks/00_start_here",
    "what is a fast weight": "notebooks/01_fast_weights",
    "linear attention": "notebooks/01_fast_weights",
    "DPFP": "notebooks/03_dpfp",
    "normalize": "notebooks/05_normalisation",
    "retrievl": "notebooks/06_retrieval",
    "generate text": "notebooks/07_transformer",
    "memories": "notebooks/08_memory",
    "AFT stability": "notebooks/14_aft_stability",
    "log-sum-exp": "notebooks/14_aft_stability",
    "qwen": "notebooks/11_to_qwen",
    "beta": "notation.html#symbol-beta",
    "β": "notation",
    "d1": "notation",
    "ELU+1": "notation",
    "hebbian": "notation",
    "Eq. 24": "annotated/equations.html#schlag2021-24",
    "eq24": "annotated/equations",
    "equation 24": "annotated/equations",
    "aft-local": "annotated/aft-window",
    "capacity": "figures/capacity",
    "kv cache": "api/models",
    "shakespeare": "figures/shakespeare",
    "install": "run",
    "what failed": "results",
    "pip": "run",
    "colab": "run.html#colab",
    "numbers to remember": "cheatsheet",
    "bibtex": "references.html#cite",
    "gpu": "kernels/index",
    "spilled registers": "kernels/index",
    "is delta faster than softmax": "results/speed",
    "benchmark": "results/speed",
    "performer": "reproduce/favor-underflow",
    "permutations": "reproduce/state-tracking",
    "3.98": "results",
    "nan": "errata",
    "chunked_sum": "notebooks/09_chunks",
    "gated_delta_rule": "api/ops",
    "prefill": "api/models",
    "hugging face": "transformers",
    "checkpoint resume": "training",
    "how do I add a rule": "contribute",
    "mutants": "tested",
    "how fast": "results/speed",
    "memory efficient backward": "notebooks/08_memory",
    "chunkwise": "notebooks/09_chunks",
    "state space": "rules",
    "ssm": "rules",
    "mamba": "rules",
    "gradient checkpointing": "notebooks/08_memory",
    "ttt": "notebooks/12_regression",
    "hopfield": "figures/capacity",
    "cheatsheet": "cheatsheet",
    "⊗": "notation",
    "MIT": "run",
    "answers": "exercises",
    "dpfb": "notebooks/03_dpfp",
    "dpff": "notebooks/03_dpfp",
    "dfpf": "notebooks/03_dpfp",
    "fast weigth": "notebooks/01_fast_weights",  # codespell:ignore
    "dleta rule": "notebooks/04_delta_rule",
    "capcity": "figures/capacity",  # codespell:ignore
}
#: Asks the script of the search, outside a browser.
ASK = """
const [script, ...queries] = process.argv.slice(1);
const worker = vm.createContext({ URLSearchParams });
vm.runInContext(fs.readFileSync(script, "utf8"), worker);
const first = (data) => worker.answered({ type: 2, data }).data.items[0]?.[0].location ?? "";
console.log(JSON.stringify(queries.map(first)));
"""


@pytest.fixture(scope="module")
def sections(site) -> list[dict]:
    """Return what the search has of the pages."""
    script = (site / "assets" / "search.js").read_text("utf-8")
    (line,) = re.findall(r"^const SECTIONS = (.+);$", script, re.MULTILINE)
    return json.loads(line)


def test_what_comes_first(site):
    done = subprocess.run(
        [*npm.program("node"), "-e", ASK, site / "assets" / "search.js", *QUERIES],
        capture_output=True,
        encoding="utf-8",
        check=True,
    )
    places = [re.sub(r"\?[^#]*", "", place) for place in json.loads(done.stdout)]
    found = dict(zip(QUERIES, places, strict=True))
    wrong = {q: place for q, place in found.items() if not place.startswith(QUERIES[q])}
    assert wrong == {}


def test_it_has_the_whole_text(site, sections):
    """Notes, tables and code, once; the index of the theme has nothing."""
    theme = json.loads((site / "search" / "search_index.json").read_text("utf-8"))
    assert theme["docs"] == []
    said = {"title": "", "text": "", "code": ""}
    for section in sections:
        for kind in said:
            said[kind] += section[kind] + "\n"
    # A row with its cells apart, a question, a note, commands, a cell and its output.
    assert re.search(r"^delta · 1\.\d+ · ", said["text"], re.MULTILINE)
    question = QUESTIONS["same_key"]
    assert question.text in said["text"] and "Copied!" not in said["text"]
    assert "pip install" in said["code"] and "_ = check(delta_step)" in said["code"]
    assert said["code"].count("def delta_step(W: Tensor, k: Tensor,") == 1
    # What a reader should not be told before.
    assert question.because not in said["text"]
    assert printed(EXERCISES["few_features"]).splitlines()[-1] not in said["code"]


def test_it_arrives_while_a_reader_types(site):
    """In a second and a half at 4 Mbit/s."""
    assert len(gzip.compress((site / "assets" / "search.js").read_bytes())) < 750_000


def test_it_leads_to_sections(sections):
    """Text of a notebook belongs to the heading above it, not to the page."""
    for entry in sections:
        if entry["location"].startswith("notebooks/") and "#" not in entry["location"]:
            # Only what stands before the first section: time, needs, questions.
            assert len(entry["text"]) < 1700 and "What to notice" not in entry["text"]
    (found,) = (
        entry["location"]
        for entry in sections
        if "notebooks/" in entry["location"] and "One of x and −x" in entry["text"]
    )
    assert found == "notebooks/03_dpfp.html#1-in-the-plane"


def test_formulas_are_readable(sections):
    """As text: neither dropped nor TeX."""
    # Where contributors read how to write a formula, the TeX is code.
    texts = (e["text"] for e in sections if "contribute.html" not in e["location"])
    text = " ".join(texts)
    # A backslash, a brace or a dollar of code is not TeX.
    assert not re.search(r"\\[a-zA-Z]{2,}\b|\\[\[(]|\$\$|[_^]\{|\\tag", text)
    assert "W_t = W_(t−1) + " in text and "v ⊗ k" in text


def test_a_press_lands_where_enter_lands(look):
    """At the section that says most; only what was typed is in the address, and marked."""
    tab = look("index.html")
    search(tab, "generate text")
    results = tab.locator(".md-search-result__article:visible")
    shown = [result.inner_text() for result in results.all()]
    assert len(shown) > 5
    assert [text for text in shown if len(text) > 600] == []
    tab.locator(".md-search-result__link").first.click()
    tab.locator("article mark:visible").first.wait_for()
    pressed = tab.url
    assert asked_in(pressed) == "generate text"
    marks = {text.lower() for text in tab.locator("article mark").all_text_contents()}
    assert marks and all(re.match("gener|text", mark) for mark in marks)
    assert tab.evaluate(asks.CUT) == []
    tab.go_back()
    search(tab, "generate text")
    tab.keyboard.press("Enter")
    tab.locator("article mark:visible").first.wait_for()
    assert urlsplit(tab.url).path == urlsplit(pressed).path
    assert urlsplit(tab.url).fragment == urlsplit(pressed).fragment != ""


def asked_in(url: str) -> str:
    return parse_qs(urlsplit(url).query)["h"][0]


FORMULAS = [
    (r"\bar v_t = W_{t-1}\, \phi(k_t) \tag{20}", "v̄_t = W_(t−1) φ(k_t)"),
    (r"\tfrac12 \lVert v - \hat v \rVert^2", "1/2‖v − v̂‖²"),
    (r"\frac{h(x)}{\sqrt{2m}}", "(h(x))/(√2m)"),
    (r"U = X^\top dY \odot \Gamma", "U = Xᵀ dY ⊙ Γ"),
    (r"\mathrm{softmax}(w)_l \quad \text{if } l < L", "softmax(w)_l if l < L"),
    (r"d_{\text{key}} \log d_{\text{key}}", "d_key log d_key"),
    (r"e^{-\lambda} \to 0", "e^(−λ) → 0"),
]


def test_formula_in_words(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs" / "hooks")
    import tex

    assert [(formula, tex.plain(formula)) for formula, _ in FORMULAS] == FORMULAS
