"""Test the results, the display and the index of the site's search."""

import gzip
import json
import re
import subprocess
from urllib.parse import parse_qs, urlsplit

import npm
import pytest
from built import asks, search

from fwlab.exercises import EXERCISES, QUESTIONS
from fwlab.exercises.notation import printed

#: Queries, by the page that must be the first result.
#: Queries are terms, synonyms, symbols, questions, misspellings and prefixes.
FOUND = {
    "annotated/aft-window": ["aft-local"],
    "annotated/equations": ["eq24", "equation 24"],
    "annotated/equations.html#schlag2021-24": ["Eq. 24"],
    "api/models": ["kv cache", "prefill"],
    "api/ops": ["gated_delta_rule"],
    "cheatsheet": ["numbers to remember", "cheatsheet"],
    "contribute": ["how do I add a rule"],
    "errata": ["nan", "errors in the papers"],
    "exercises": ["answers"],
    "figures/capacity": ["capacity", "hopfield", "capcity"],  # codespell:ignore
    "figures/shakespeare": ["shakespeare"],
    "kernels/index": ["gpu", "spilled registers"],
    "notation": ["β", "d1", "ELU+1", "hebbian", "⊗"],
    "notation.html#symbol-beta": ["beta"],
    "notebooks/00_start_here": ["tutorial"],
    "notebooks/01_fast_weights": [
        *("what is a fast weight", "linear attention"),
        "fast weigth",  # codespell:ignore
    ],
    "notebooks/03_dpfp": ["DPFP", "dpfb", "dpff", "dfpf", "dpfp sparsity"],
    "notebooks/04_delta_rule": ["delta rule", "del", "deltanet", "dleta rule"],
    "notebooks/05_normalisation": ["normalize"],
    "notebooks/06_retrieval": ["retrievl"],
    "notebooks/07_transformer": ["generate text"],
    "notebooks/08_memory": [
        *("memories", "memory efficient backward", "gradient checkpointing"),
    ],
    "notebooks/09_chunks": ["chunked_sum", "chunkwise"],
    "notebooks/11_to_qwen": ["qwen"],
    "notebooks/12_regression": ["ttt"],
    "notebooks/14_aft_stability": ["AFT stability", "log-sum-exp"],
    "published": ["qwen3 next"],
    "references.html#cite": ["bibtex"],
    "reproduce/favor-underflow": ["performer"],
    "reproduce/state-tracking": ["permutations"],
    "results": ["what failed", "3.98"],
    "results/speed": ["is delta faster than softmax", "benchmark", "how fast"],
    "rules": ["state space", "ssm", "mamba"],
    "run": ["install", "pip", "MIT"],
    "run.html#colab": ["colab"],
    "tested": ["mutants"],
    "training": ["checkpoint resume", "train on my own text"],
    "transformers": ["hugging face", "use with huggingface"],
}
QUERIES = {query: place for place, queries in FOUND.items() for query in queries}
#: JavaScript that runs the search script in Node.
ASK = """
const [script, ...queries] = process.argv.slice(1);
const worker = vm.createContext({ URLSearchParams });
vm.runInContext(fs.readFileSync(script, "utf8"), worker);
const first = (data) => worker.answered({ type: 2, data }).data.items[0]?.[0].location ?? "";
console.log(JSON.stringify(queries.map(first)));
"""


@pytest.fixture(scope="module")
def sections(site) -> list[dict]:
    """Return the sections in the search index."""
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
    """The search index contains all text and code once; the theme's index is empty."""
    theme = json.loads((site / "search" / "search_index.json").read_text("utf-8"))
    assert theme["docs"] == []
    said = {"title": "", "text": "", "code": ""}
    for section in sections:
        for kind in said:
            said[kind] += section[kind] + "\n"
    # The index contains a table row, a question, commands and a code cell.
    assert re.search(r"^delta · 1\.\d+ · ", said["text"], re.MULTILINE)
    question = QUESTIONS["same_key"]
    assert question.text in said["text"] and "Copied!" not in said["text"]
    assert "pip install" in said["code"] and "_ = check(delta_step)" in said["code"]
    assert said["code"].count("def delta_step(W: Tensor, k: Tensor,") == 1
    # Answers and solutions are not in the index.
    assert question.because not in said["text"]
    assert printed(EXERCISES["few_features"]).splitlines()[-1] not in said["code"]


def test_it_arrives_while_a_reader_types(site):
    """The compressed search index loads in 1.5 s at 4 Mbit/s."""
    assert len(gzip.compress((site / "assets" / "search.js").read_bytes())) < 750_000


def test_it_leads_to_sections(sections):
    """Text of a notebook is indexed under the heading above it, not under the page."""
    found = [e["location"] for e in sections if "One of x and −x" in e["text"]]
    assert "notebooks/03_dpfp.html#1-in-the-plane" in found
    assert "notebooks/03_dpfp.html" not in found


def test_formulas_are_readable(sections):
    """Formulas are indexed as readable text without TeX."""
    # Skip the page for contributors, which shows TeX as code.
    texts = (e["text"] for e in sections if "contribute.html" not in e["location"])
    text = " ".join(texts)
    # A backslash, a brace or a dollar in code is not TeX.
    assert not re.search(r"\\[a-zA-Z]{2,}\b|\\[\[(]|\$\$|[_^]\{|\\tag", text)
    assert "W_t = W_(t−1) + " in text and "v ⊗ k" in text


def test_a_press_lands_where_enter_lands(look):
    """A click and Enter open the same section, which marks only the typed words."""
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
