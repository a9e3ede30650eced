"""Test that pages of annotated source are complete, aligned and linked."""

import json
import re
from urllib.parse import parse_qs, urlsplit

import annotated
import pytest
from bs4 import BeautifulSoup
from built import ROOT, WIDTH, some
from literate import Source

OPS = ROOT / "fwlab" / "ops"
VERSIONS = ("naive", "chunked", "efficient", "kernels")
PAGES = {page.uri.removesuffix(".md"): page for page in annotated.PAGES.values()}
#: The pages that show several implementations of an operation.
SIDE = [name for name, page in PAGES.items() if "naive" in page.files]
LAYER = "annotated/source/layers/fast_weight_attention"
DELTA, CHUNKED = (Source(f"fwlab/ops/delta/{n}.py") for n in ("delta", "chunked"))
#: The id of a line in the efficient implementation, which is hidden at first.
LATER = f"efficient-L{Source('fwlab/ops/efficient.py').computed['e3'][0]}"


def test_every_operation_has_a_page():
    """Every operation and every other file with formulas has an annotated page."""
    loops = {p.stem for p in OPS.glob("*/*.py") if "\ndef loop(" in p.read_text()}
    naive = (p.parent.relative_to(OPS) for p in OPS.rglob("naive.py"))
    loops |= {"-".join(folder.parts) for folder in naive}
    loops.remove("softmax")  # Softmax attention uses PyTorch's kernel.
    assert loops == {name.partition("/")[2] for name in SIDE}
    for folder in (OPS, ROOT / "fwlab" / "layers"):
        for path in folder.rglob("*.py"):
            name = path.relative_to(ROOT).as_posix()
            assert annotated.page_of(name) or "$$" not in path.read_text("utf-8"), name


@pytest.fixture(scope="module")
def parsed(site):
    """Return the parsed HTML of all annotated pages, by name."""
    return {
        name: BeautifulSoup((site / f"{name}.html").read_text("utf-8"), "lxml")
        for name in PAGES
    }


def test_pages_show_all_code(parsed):
    """Annotated pages show every line of code in order, with its line number."""
    for name, page in PAGES.items():
        shown: dict[str, dict[int, str]] = {}
        for line in parsed[name].select(".line[id]"):
            prefix, _, number = line["id"].rpartition("L")
            label, *code = line.get_text().rstrip("\n").partition(number)[1:]
            assert label == number
            shown.setdefault(prefix.rstrip("-"), {})[int(number)] = code[0]
        assert shown.keys() == page.files.keys(), name
        for version, path in page.files.items():
            lines = (ROOT / path).read_text("utf-8").splitlines()
            assert [*shown[version]] == sorted(shown[version])
            for number, code in shown[version].items():
                assert code == lines[number - 1], (path, number)
            rest = "\n".join(
                text for n, text in enumerate(lines, 1) if n not in shown[version]
            )
            rest = re.sub(r'r?"""(.*?)"""', "", rest, flags=re.DOTALL)
            assert re.sub(r"^\s*#.*$", "", rest, flags=re.M).strip() == "", path


def test_steps_open_in_the_rule_editor(parsed):
    """Only the pages of ten rules link to the rule editor, each with its rule."""
    rules = json.loads((ROOT / "docs/figures/rules.json").read_text("utf-8"))
    texts = {f"annotated/{rule['page']}": rule["text"] for rule in rules}
    for name, page in parsed.items():
        links = page.select('.note a[href*="figures/write.html#"]')
        held = [parse_qs(urlsplit(link["href"]).fragment)["rule"] for link in links]
        assert held == ([[texts[name]]] if name in texts else []), name


def test_the_list_of_equations_shows_formulas(site):
    """The list of equations shows formulas, and links to sections and code."""
    html = (site / "annotated" / "equations.html").read_text("utf-8")
    page = BeautifulSoup(html, "lxml")
    rows = page.select("article tbody tr")
    without = [row.find("td").get_text() for row in rows if not row.select(".katex")]
    # A notebook states Eqs. 41-50 together.
    of_many = ", ".join(map(str, range(41, 51)))
    assert without == ["12", "13", "16", of_many, "7", "8"]
    delta = page.find(id="schlag2021-24").find_parent("tr")
    assert r"W_{i-1} + \beta_i\," in delta.find("annotation").get_text()
    assert "04_delta_rule.html#2-derive-the-rule" in str(delta)
    line = DELTA.computed["24"][0]
    assert f'href="delta.html#naive-L{line}">{line}</a>' in str(delta)


# --- Tests in the browser ---


def lit(tab) -> set[str]:
    return set(tab.evaluate("[...document.querySelectorAll('.lit')].map((e) => e.id)"))


def shown(tab) -> list[str]:
    """Return the names of the visible implementations, from left to right."""
    return tab.evaluate(
        """[...document.querySelectorAll(".part")].filter((e) => e.checkVisibility())
          .map((e) => [e.getBoundingClientRect().x, e.closest('.column').classList[1]])
          .sort(([a], [b]) => a - b).map(([, name]) => name)
          .filter((name, i, all) => all.indexOf(name) === i)"""
    )


def choose(tab, side: str, version: str) -> None:
    tab.get_by_role("group", name=side).get_by_text(version, exact=True).click()


CUT = """() => [...document.querySelectorAll(".annotated pre > code")]
    .filter((e) => e.scrollWidth > e.clientWidth).map((e) => e.textContent)"""


@pytest.mark.parametrize("script", [True, False])
@pytest.mark.parametrize("name", some(SIDE, "annotated/delta", "annotated/aft-simple"))
def test_two_versions_side_by_side(look, name, script):
    """Two versions are side by side, even without scripts; only long lines scroll."""
    tab = look(f"{name}.html", java_script_enabled=script, width=1280)
    first, second, *_ = PAGES[name].files
    assert shown(tab) == [first, second]
    for version in PAGES[name].files:
        choose(tab, "right", version)
        assert shown(tab) == list(dict.fromkeys([first, version]))
        lines = (re.sub(r"^\d+", "", code, flags=re.M) for code in tab.evaluate(CUT))
        longest = [max(map(len, code.splitlines())) for code in lines]
        assert min(longest, default=88) > 72
        assert tab.evaluate(WIDTH) <= 1280
    choose(tab, "left", second)
    choose(tab, "right", first)
    assert shown(tab) == [second, first]


def test_one_version_on_a_phone(look):
    """On a phone, arrow keys or a link choose a version; the control stays in view."""
    tab = look("annotated/delta.html", width=390, height=844)
    for version in VERSIONS:
        assert shown(tab) == [version]
        assert tab.evaluate(WIDTH) <= 390
        assert tab.evaluate("document.documentElement.scrollHeight") < 30_000
        tab.locator(".left :checked").press("ArrowRight")
    assert shown(tab) == ["naive"]
    tab.evaluate("scrollTo(0, 2000)")
    assert 0 <= tab.locator(".left").bounding_box()["y"] < 100
    tab.evaluate(f"location.hash = '#{LATER}'")
    tab.locator(f"#{LATER}").wait_for()
    assert shown(tab) == ["efficient"]


@pytest.mark.parametrize("size", [(1280, 720), (390, 844)])
def test_the_equation_and_its_lines_are_on_the_first_screen(look, size):
    tab = look("annotated/delta.html", width=size[0], height=size[1])
    last = next(row for row in DELTA.rows if row.name == "correct").lines[-1]
    while not DELTA.text.splitlines()[last - 1].strip():
        last -= 1
    for place in ("eq-24", f"naive-L{last}"):
        box = tab.locator(f"#{place}").bounding_box()
        assert box["y"] > 0 and box["y"] + box["height"] <= size[1]


#: Functions in one row: (page, version, its function, function of the naive loop).
BESIDE = [
    ("delta", "chunked", "delta", "loop"),
    ("delta", "chunked", "normalized_delta", "normalized_loop"),
    ("delta", "efficient", "summarize", "delta_step"),
    ("kimi", "chunked", "delta", "loop"),
    ("sum", "kernels", "forward", "normalized_loop"),
    ("feedback", "kernels", "attend", "feedback_attention"),
    ("aft-full", "efficient", "_forward", "gated_means"),
]


@pytest.mark.parametrize("beside", some(BESIDE, BESIDE[0], BESIDE[5]))
def test_versions_are_aligned_by_equation(look, beside):
    """Functions that compute the same equation begin in the same row."""
    operation, version, name, twin = beside
    tab = look(f"annotated/{operation}.html", width=1280, height=800)
    choose(tab, "right", version)
    top = "e => e.closest('.cell').getBoundingClientRect().top"
    ours, theirs = (
        tab.locator(f"[id='{place}']").evaluate(top)
        for place in (f"{version}-{name}", f"naive-{twin}")
    )
    assert abs(ours - theirs) < 2


def test_a_link_shows_its_version(look):
    tab = look(f"annotated/delta.html#{LATER}", java_script_enabled=False)
    assert "efficient" in shown(tab)
    tab = look(f"annotated/delta.html#{LATER}")
    assert shown(tab) == ["naive", "efficient"]
    assert tab.evaluate("document.activeElement.id") == LATER and LATER in lit(tab)
    # A link in the table of contents also shows the version that it points to.
    tab.locator(".md-sidebar--secondary [href='#chunked-delta']").click()
    assert shown(tab) == ["naive", "chunked"]
    assert 40 <= tab.locator("#chunked-delta").bounding_box()["y"] < 900


def test_equation_and_its_lines_light_up(look):
    tab = look("annotated/delta.html")
    # The page does not scroll, because the equation is in view.
    tab.locator(".chunked .note .eq", has_text="(d2)").first.click()
    assert tab.url.endswith("#eq-d2") and tab.evaluate("scrollY") == 0
    tab.locator(".chunked .line .eq", has_text="Eq. 28").first.focus()
    tab.keyboard.press("Enter")
    assert tab.url.endswith("#eq-28")
    versions = {place.partition("-")[0] for place in lit(tab)}
    assert versions == {"eq", "naive", "chunked", "efficient"}
    assert 0 <= tab.locator("#eq-28").bounding_box()["y"] < 900
    # The number of an equation links to a line of code, which links back.
    tab.locator("#eq-24 .fw-number").click()
    line = tab.url.partition("#")[2]
    assert "# Eq. 24" in tab.locator(f"#{line}").inner_text()
    assert tab.evaluate("document.activeElement.id") == line
    assert {"eq-24", line} <= lit(tab) and "eq-28" not in lit(tab)
    tab.locator(f"#{line} .eq").first.click()
    assert tab.url.endswith("#eq-24")
    tab.go_back()
    assert tab.url.endswith(f"#{line}") and line in lit(tab)


def test_what_is_copied_has_no_numbers_of_lines(look):
    tab = look("annotated/source/feature_maps.html")
    tab.evaluate(
        "getSelection().selectAllChildren(document.querySelector('.line').closest('pre'))"
    )
    copied = tab.evaluate("getSelection().toString()").strip()
    assert copied and copied in Source("fwlab/feature_maps.py").text


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_what_matters_has_a_colour(look, scheme):
    """A symbol has one colour in formulas and code; its label toggles a highlight."""
    tab = look("annotated/delta.html", scheme=scheme, java_script_enabled=False)
    colour = "e => getComputedStyle(e).color"
    seen = set()
    for name, letter in (("key", "k"), ("value", "v"), ("W", "W"), ("beta", "β")):
        symbol = tab.locator(f".katex-html .tint-{name}", has_text=letter).first
        code = tab.locator(f".line .tint-{name}").first
        label = tab.locator(f".bar .tint-{name}")
        seen |= {e.evaluate(colour) for e in (symbol, code, label)}
        before, plain = label.bounding_box(), "rgba(0, 0, 0, 0)"
        behind = "e => getComputedStyle(e).backgroundColor"
        assert code.evaluate(behind) == plain
        label.click()
        assert label.bounding_box() == before
        assert plain not in (code.evaluate(behind), symbol.evaluate(behind))
        label.click()
    assert len(seen) == 4


@pytest.mark.parametrize("name", ["annotated/delta", LAYER])
def test_print_shows_what_is_chosen(look, name):
    """A page prints on at most 16 sheets, without header and without clipped lines."""
    tab = look(f"{name}.html")
    tab.emulate_media(media="print")
    tab.set_viewport_size({"width": 1123, "height": 794})  # A4
    assert not tab.locator(".md-header").is_visible()
    assert not tab.locator(".bar").is_visible()
    hidden = tab.evaluate(
        """() => [...document.querySelectorAll(".part, .annotated :is(pre, code)")]
          .filter((e) => e.checkVisibility())
          .filter((e) => e.scrollHeight > e.clientHeight + 1 || e.scrollWidth > e.clientWidth + 1)
          .map((e) => e.className + e.textContent.slice(0, 60))"""
    )
    assert hidden == []
    sheets = len(re.findall(rb"/Type\s*/Page\b", tab.pdf(prefer_css_page_size=True)))
    assert 2 <= sheets <= 16
