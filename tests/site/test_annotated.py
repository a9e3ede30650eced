"""Annotated source: nothing lost, everything linked, symbols light up."""

import re
import sys
from html import unescape
from itertools import pairwise, product
from pathlib import Path

import pytest
from built import ROOT
from test_build import MODULES, PACKAGE
from test_pages import RAW, RED, WIDTH

sys.path.insert(0, str(ROOT / "docs" / "hooks"))
from annotated import versions_of
from literate import Source


def folders(file: str) -> dict[str, Path]:
    """The folders of operations with such a file, by the name of their page."""
    ops = PACKAGE / "ops"
    found = (path.parent for path in sorted(ops.rglob(file)))
    return {f.relative_to(ops).as_posix().replace("/", "-"): f for f in found}


OPERATIONS = folders("naive.py")
del OPERATIONS["softmax"]  # has no page: its efficient version is PyTorch's
VERSIONS = ("naive", "chunked", "efficient", "kernels")


def versions(folder: Path) -> dict[str, Path]:
    """The files of an operation, in the order of its page: its own, and
    those that its record takes from another folder.
    """
    operation = folder.relative_to(PACKAGE / "ops").as_posix()
    paths = {name: ROOT / path for name, path in versions_of(operation).items()}
    paths |= {path.stem: path for path in folder.glob("*.py") if path.stem in VERSIONS}
    return {name: paths[name] for name in VERSIONS if name in paths}


#: Operations with kernels, and the files that stand on their pages.
KERNELS = {name: versions(folder) for name, folder in folders("kernels.py").items()}
KERNELS["linear"]["tiles"] = PACKAGE / "ops" / "tiles.py"
KERNELS["delta"]["chunks"] = KERNELS["linear"]["kernels"]
KERNELS["aft-full"]["windows"] = KERNELS["aft-window"]["kernels"]
KERNELS["aft-window"]["scan"] = KERNELS["aft-simple"]["kernels"]
#: Pages of kernels, and the operation whose versions they show.
PAGES = {name.partition("-")[0]: name for name in KERNELS}
#: Two or more columns: half a page each.
HALVES = {
    **{
        f"annotated/{name}": KERNELS.get(name, versions(folder))
        for name, folder in OPERATIONS.items()
    },
    **{f"kernels/{page}": KERNELS[name] for page, name in PAGES.items()},
}


def alone(path) -> str:
    name = path.relative_to(PACKAGE).with_suffix("").as_posix()
    return f"annotated/source/{name.replace('__init__', 'init')}"


SOURCES = {alone(path): {"": path} for path in MODULES}
NAIVE = "annotated/source/ops/delta/naive.html"


@pytest.mark.parametrize("page", HALVES)
def test_lines_fit_half_a_page(page):
    for path in HALVES[page].values():
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
            assert len(line) <= 72, f"{path}:{number}"


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_lines_fit_beside_their_notes(path):
    for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
        assert len(line) <= 90, f"{path}:{number}"


#: Code lines below a note, at most: with their signature, about 15.
LONGEST = 16


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        *product(["linear", "delta"], ["naive", "chunked", "efficient"]),
        *product(["kimi", "softmax", "aft/simple", "aft/full"], ["naive"]),
    ],
)
def test_no_code_is_far_from_its_note(folder, name):
    file = Source(f"fwlab/ops/{folder}/{name}.py")
    lines, count = file.text.splitlines(), 0
    for row in file.rows:
        # What has no note continues what is above it.
        count = 0 if row.note.strip() else count
        count += sum(bool(lines[number - 1].strip()) for number in row.lines)
        assert count <= LONGEST, f"{file.path}:{row.lines[0]}: {count} lines"


@pytest.mark.parametrize("page", [*HALVES, *SOURCES])
def test_page_shows_all_code(site, page):
    """Each line that is code stands there, in order, with its number."""
    html = (site / f"{page}.html").read_text(encoding="utf-8")
    for name, path in (HALVES | SOURCES)[page].items():
        lines = path.read_text("utf-8").splitlines()
        prefix = f"{name}-" if name else ""
        shown = re.findall(
            rf'<span class="line" id="{prefix}L(\d+)"[^>]*><a [^>]*>(\d+)</a>(.*?)\n</span>',
            html,
            re.DOTALL,
        )
        numbers = [int(number) for number, *_ in shown]
        assert numbers == sorted(set(numbers))
        for number, label, code in shown:
            assert label == number
            assert unescape(re.sub("<[^>]*>", "", code)) == lines[int(number) - 1]
        hidden = set(range(1, len(lines) + 1)) - set(numbers)
        rest = "\n".join(lines[number - 1] for number in sorted(hidden))
        rest = re.sub(r'r?"""(.*?)"""', "", rest, flags=re.DOTALL)
        assert re.sub(r"^\s*#.*$", "", rest, flags=re.MULTILINE).strip() == ""


def test_every_reference_to_an_equation_is_a_link(site):
    """In comments of code; the number leads where the equation stands."""
    html = (site / NAIVE).read_text("utf-8")
    for tag in ("20", "24", "25", "26", "27", "28"):
        assert f'<a class="eq" href="#eq-{tag}">Eq. {tag}</a>' in html
    layer = (site / "annotated/source/layers/fast_weight_attention.html").read_text(
        "utf-8"
    )
    # Stated in another file; and stated nowhere, but listed.
    assert 'source/ops/linear/naive.html#eq-19">' in layer
    assert 'annotated/equations.html#schlag2021-21">' in layer


# In the browser


def lit(tab) -> list[str]:
    return tab.evaluate("[...document.querySelectorAll('.lit')].map((e) => e.id)")


def boxes(tab, *names: str):
    return [tab.locator(f".column-{name}").bounding_box() for name in names]


CUT = """() => [...document.querySelectorAll(".annotated pre > code")]
    .filter((e) => e.scrollWidth > e.clientWidth).map((e) => e.textContent)"""


def shown(tab) -> list[str]:
    """The columns that are visible, from left to right and down."""
    return tab.evaluate(
        """[...document.querySelectorAll(".column")].filter((e) => e.checkVisibility())
          .map((e) => e.className.match(/column-(\\w+)/)[1])"""
    )


def below(tab, names: list[str]) -> bool:
    """Whether each column begins where the one before it ends."""
    found = boxes(tab, *names)
    return all(a["y"] + a["height"] <= b["y"] for a, b in pairwise(found))


@pytest.mark.parametrize("operation", OPERATIONS)
def test_one_version_beside_naive(look, operation):
    """The tabs choose which, without a script, too; on a phone all are there."""
    halves = HALVES[f"annotated/{operation}"]
    others = [name for name in VERSIONS[1:] if name in halves]
    shared = [name for name in halves if name not in VERSIONS]
    tab = look(f"annotated/{operation}.html", java_script_enabled=False)
    tabs = tab.locator(".tabs").get_by_role("radio")
    assert tabs.count() == (len(others) if len(others) > 1 else 0)
    for index, name in enumerate(others):
        if index:  # the first is there
            tab.get_by_role("radio", name=name, exact=True).check()
        assert shown(tab) == ["naive", name, *(shared if name == "kernels" else [])]
        naive, other = boxes(tab, "naive", name)
        assert naive["y"] == other["y"]
        assert naive["x"] + naive["width"] <= other["x"]
        assert tab.evaluate(CUT) == []
    tab.set_viewport_size({"width": 390, "height": 844})
    assert shown(tab) == [*halves]
    assert below(tab, [*halves])
    tab = look(f"annotated/{operation}.html", width=390)  # formulas are set
    assert shown(tab) == [*halves] and tab.evaluate(WIDTH) <= 390


#: Pages of files with equations of their own, and the others.
EQUATIONS = [p for p in SOURCES if Path(p).name in VERSIONS]
OTHERS = [p for p in SOURCES if p not in EQUATIONS]


@pytest.mark.parametrize(
    "sources",
    [EQUATIONS, pytest.param(OTHERS, marks=pytest.mark.slow)],
    ids=["equations", "others"],
)
def test_notes_stand_beside_their_code(look, address, sources):
    """Notes left, code right, in one row; Greek letters of formulas are mapped
    to what the code calls them; formulas are set; nothing is too wide for a
    phone.
    """
    known = (ROOT / "docs" / "scripts" / "annotated.js").read_text("utf-8")
    tab = look("index.html")
    for page in sources:
        tab.goto(f"{address}{page}.html")
        rows = tab.evaluate(
            """() => [...document.querySelectorAll(".annotated.one .row")]
              .map((row) => [".note", ".highlight"].map((s) => row.querySelector(s)))
              .filter(([note, code]) => note.textContent.trim() && code)
              .map((pair) => pair.map((e) => e.getBoundingClientRect().toJSON()))"""
        )
        assert rows, page
        for note, code in rows:
            assert note["right"] <= code["left"] and note["top"] == code["top"], page
        assert tab.evaluate(CUT) == [], page
        letters = tab.evaluate(
            """[...document.querySelectorAll(".annotated .katex-html .mathnormal")]
              .map((e) => e.textContent).filter((c) => /^[Α-ωϕϵϑ]$/u.test(c))"""
        )
        assert {c for c in letters if f" {c}" not in known} == set(), page
        assert tab.evaluate(RAW) + tab.evaluate(RED) == [], page
        tab.set_viewport_size({"width": 390, "height": 844})
        assert tab.evaluate(WIDTH) <= 390, page
        tab.set_viewport_size({"width": 1440, "height": 900})


@pytest.mark.parametrize(
    ("operation", "tag"), [("delta", "24"), ("feedback_memory", "f4")]
)
def test_one_equation_across_three_versions(look, operation, tag):
    tab = look(f"annotated/{operation}.html#eq-{tag}")
    columns = tab.evaluate(
        "[...document.querySelectorAll('.line.lit')]"
        ".map((e) => e.closest('.column').className.match(/column-(\\w+)/)[1])"
    )
    assert {"naive", "kernels"} <= set(columns)


@pytest.mark.parametrize("page", PAGES)
def test_one_version_beside_the_kernels(look, page):
    halves = KERNELS[PAGES[page]]
    kernels = [name for name in halves if name not in VERSIONS[:-1]]
    others = [name for name in halves if name not in kernels]
    tab = look(f"kernels/{page}.html")
    first = others[1]  # not the specification
    assert shown(tab) == [first, *kernels]
    left, right = boxes(tab, first, "kernels")
    assert left["x"] + left["width"] <= right["x"]
    for name in others:
        tab.get_by_role("radio", name=name, exact=True).check()
        assert shown(tab) == [name, *kernels]
    # An address in a hidden version brings it forth.
    tab.get_by_role("radio", name="naive", exact=True).check()
    tab.evaluate("document.querySelector('.column-kernels').scrollIntoView()")
    line = tab.locator(".column-efficient .line .eq").first
    place = line.evaluate("e => e.closest('.line').id")
    tab.evaluate(f"location.hash = '#{place}'")
    assert shown(tab) == ["efficient", *kernels]
    assert tab.evaluate("document.activeElement.id") == place
    tab.get_by_role("radio", name="naive", exact=True).check()
    tab.goto(f"{tab.url.split('#')[0]}?again#{place}")
    assert shown(tab) == ["efficient", *kernels]
    tab.set_viewport_size({"width": 390, "height": 844})
    assert shown(tab) == [*halves]
    assert tab.evaluate(WIDTH) <= 390


def test_a_link_shows_its_version_without_a_script(look):
    tab = look("annotated/delta.html#efficient-L40", java_script_enabled=False)
    assert "efficient" in shown(tab)


def test_a_repeated_equation_is_in_view(look):
    """A comment leads to the equation of the same file, if that states it."""
    tab = look("annotated/linear.html")
    tab.get_by_role("radio", name="efficient").check()
    tab.locator(".column-efficient .line .eq", has_text="(c1)").first.click()
    assert tab.url.endswith("#efficient-eq-c1")
    assert shown(tab) == ["naive", "efficient"]
    assert {"eq-c1", "efficient-eq-c1", "kernels-eq-c1"} <= set(lit(tab))


def test_an_equation_leads_to_the_line_of_a_kernel(look):
    tab = look("kernels/delta.html")
    equation = tab.locator(".column-efficient .equation[data-eq=d4]")
    link = equation.locator(".places a[href^='#chunks']").first
    link.evaluate("e => e.click()")
    assert {i.split("-")[0] for i in lit(tab)} == {
        *("eq", "efficient", "chunks"),
        "kernels",  # which repeat the equation
    }


def test_equation_and_its_lines_light_up(look):
    tab = look("annotated/delta.html")
    link = tab.locator(".column-chunked .line .eq", has_text="Eq. 28").first
    link.scroll_into_view_if_needed()
    before = tab.evaluate("scrollY")
    link.focus()
    tab.keyboard.press("Enter")
    assert tab.url.endswith("#eq-28")
    assert "eq-28" in lit(tab)
    computed = {"naive", "chunked", "efficient"}
    assert {i.split("-")[0] for i in lit(tab)} == {"eq", *computed}
    # The equation comes into view, the code that was read stays in place.
    assert tab.evaluate("scrollY") == before
    box = tab.locator("#eq-28").bounding_box()
    assert 0 <= box["y"] < 900


def test_number_of_an_equation_leads_to_its_line_and_back(look):
    tab = look(NAIVE)
    tab.locator("#eq-24 .katex-tag").click()
    line = tab.url.partition("#")[2]
    assert "# Eq. 24" in tab.locator(f"#{line}").inner_text()
    assert tab.evaluate("document.activeElement.id") == line
    assert {"eq-24", line} <= set(lit(tab))
    tab.locator(f"#{line} .eq").first.click()
    assert tab.url.endswith("#eq-24")
    tab.go_back()
    assert tab.url.endswith(f"#{line}") and line in lit(tab)


def test_address_of_a_line_opens_there(look):
    tab = look(NAIVE + "#L78")
    assert tab.evaluate("document.activeElement.id") == "L78"
    assert "L78" in lit(tab)
    assert 0 <= tab.locator("#L78").bounding_box()["y"] < 900
    # Each row with a name has a link to itself.
    assert tab.locator("#delta_step .headerlink").get_attribute("href") == "#delta_step"


def marked(tab) -> list[str]:
    return tab.evaluate(
        "[...CSS.highlights.get('symbol') ?? []].map((r) => "
        "r.startContainer.data.slice(r.startOffset, r.endOffset))"
    )


def type_name(tab, name: str) -> None:
    field = tab.get_by_label("Another name of the code")
    field.fill(name)
    field.press("Enter")


def test_a_symbol_lights_up_in_formulas_and_code(look):
    tab = look(NAIVE)
    tab.locator(".annotated .mathnormal", has_text="β").first.click()
    # Each name of the code that is this symbol, and no other.
    lines = "\n".join(tab.locator(".annotated .line").all_inner_texts())
    code = re.sub("#.*", "", lines)
    names = re.findall(r"\bbeta(?:_t)?\b", code)
    assert sorted(marked(tab)) == sorted(names) and len(names) > 10
    formulas = tab.locator(".annotated .symbol").all_inner_texts()
    assert set(formulas) == {"β"} and len(formulas) > 1
    status = tab.locator(".symbols [role=status]")
    assert status.inner_text() == (
        f"beta: {len(formulas)} in formulas, {len(names)} in code"
    )
    # Clicked again it goes out.
    tab.locator(".annotated .symbol").first.click()
    assert marked(tab) == [] and tab.locator(".annotated .symbol").count() == 0


def test_a_name_in_the_code_lights_up(look):
    tab = look(NAIVE)
    line = tab.locator(".line", has_text="v_bar = read(W, k)")
    line.scroll_into_view_if_needed()
    place = line.evaluate(
        """(line) => {
          const walk = document.createTreeWalker(line, NodeFilter.SHOW_TEXT);
          let node;
          while ((node = walk.nextNode()) && !node.data.includes("v_bar"));
          const range = document.createRange();
          range.setStart(node, node.data.indexOf("v_bar"));
          range.setEnd(node, node.data.indexOf("v_bar") + 5);
          const box = range.getBoundingClientRect();
          return [box.x + box.width / 2, box.y + box.height / 2];
        }"""
    )
    tab.mouse.click(*place)
    lines = "\n".join(tab.locator(".annotated .line").all_inner_texts())
    assert marked(tab) == re.findall("v_bar", lines)
    # The same letter with a bar, and not the plain one.
    symbols = tab.locator(".annotated .symbol")
    assert symbols.count() == 3 and set(symbols.all_inner_texts()) == {"v"}
    tab.keyboard.press("Escape")
    assert marked(tab) == []


def test_names_that_differ_are_not_mixed_up(look):
    """Only an index of a step, a layer or a place is left out of a name."""
    tab = look("annotated/source/layers/fast_weight_attention.html")
    type_name(tab, "to_q")
    assert set(marked(tab)) == {"to_q"} and len(marked(tab)) >= 3
    type_name(tab, "")
    assert marked(tab) == []
    # Words of the language are no names.
    options = tab.locator("#names option").evaluate_all(
        "all => all.map((o) => o.value)"
    )
    assert "to_v" in options and not {"for", "def", "return", "in"} & set(options)


def test_other_clicks_are_the_browsers(look):
    tab = look(NAIVE)
    with tab.context.expect_page() as opened:
        tab.locator(".line .eq").first.click(modifiers=["Control"])
    opened.value.wait_for_url(re.compile("#"))  # it begins empty
    assert "#" not in tab.url


def test_a_symbol_lights_up_by_keyboard(look):
    tab = look("annotated/delta.html")
    button = tab.get_by_role("button", name="W", exact=True)
    button.focus()
    tab.keyboard.press("Space")
    assert button.get_attribute("aria-pressed") == "true"
    assert set(marked(tab)) == {"W"}
    columns = tab.evaluate(
        """[...CSS.highlights.get("symbol")].map((r) => r.startContainer.parentElement
          .closest(".column").className.match(/column-(\\w+)/)[1])"""
    )
    assert set(columns) == set(HALVES["annotated/delta"])


def test_a_symbol_is_told_to_be_elsewhere(look):
    """In a version that is not shown, or not on the page."""
    tab = look("annotated/delta.html")
    said = tab.locator(".symbols [role=status]")
    tab.get_by_role("button", name="E", exact=True).click()
    hidden = "in a version that is not shown"
    assert hidden in said.inner_text()
    both, code = map(int, re.findall(r"\d+", said.inner_text())[:2])
    assert f"{both + code} of them {hidden}" in said.inner_text()
    tab.get_by_role("radio", name="kernels").check()
    assert f"{both + code} of them" not in said.inner_text()
    type_name(tab, "nosuch")
    assert said.inner_text() == "nosuch is not on this page"
    assert marked(tab) == []


def test_a_gradient_is_no_product(look):
    """The decay d_t lights up and not the d of dW, which is dW of the code."""
    tab = look("annotated/delta.html")
    after = """[...document.querySelectorAll(".symbol")]
        .map((e) => e.nextElementSibling?.textContent ?? "")"""
    type_name(tab, "d")
    lit = tab.evaluate(after)
    assert lit and not [letters for letters in lit if re.match("[A-Zβ]", letters)]
    type_name(tab, "dW")
    lit = tab.evaluate(after)
    assert lit and {letters[0] for letters in lit} == {"W"}
    assert set(marked(tab)) == {"dW"}


def test_numbers_of_our_own_lead_to_another_folder(look):
    """The kernels of the sum rule compute (d3) of the delta rules, too."""
    tab = look("annotated/linear.html")
    link = tab.locator(".line a[href*='delta'][href$='#eq-d3']").first
    link.evaluate("e => e.click()")
    tab.wait_for_url("**/delta/**#eq-d3")
    assert tab.locator("#eq-d3 .katex").count() == 1


def test_copied_code_has_no_line_numbers(look):
    tab = look(NAIVE)
    copied = tab.evaluate(
        """() => {
          const code = document.querySelector("#L20").closest("pre");
          getSelection().selectAllChildren(code);
          return getSelection().toString();
        }"""
    )
    lines = (ROOT / "fwlab/ops/delta/naive.py").read_text("utf-8").splitlines()[17:23]
    assert copied.split("\n")[:6] == lines


@pytest.mark.parametrize("page", ["annotated/delta.html", NAIVE])
def test_print_shows_everything(look, page):
    """No header, no column that scrolls, no line cut off."""
    tab = look(page)
    tab.emulate_media(media="print")
    tab.set_viewport_size({"width": 794, "height": 1123})  # A4
    assert not tab.locator(".md-header").is_visible()
    assert not tab.locator(".symbols").is_visible()
    hidden = tab.evaluate(
        """() => [...document.querySelectorAll(".column, .annotated pre, .annotated code")]
          .filter((e) => e.scrollHeight > e.clientHeight + 1 || e.scrollWidth > e.clientWidth + 1)
          .map((e) => e.className + e.textContent.slice(0, 60))"""
    )
    assert hidden == []
