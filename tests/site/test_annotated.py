"""Annotated source: nothing lost, everything linked, symbols light up."""

import re
import sys
from html import unescape
from itertools import pairwise, product
from pathlib import Path

import pytest
from bs4 import BeautifulSoup
from built import ROOT, asks, some, until
from test_build import MODULES, PACKAGE
from test_pages import WIDTH

sys.path.insert(0, str(ROOT / "docs" / "hooks"))
import annotated
import equations
from literate import TAG, Source, named

from fwlab.ops import TABLE

VERSIONS = ("naive", "chunked", "efficient", "kernels")
OPS = PACKAGE / "ops"
#: The specifications, by the name of their page: those of softmax have none,
#: since its efficient version is PyTorch's.
LOOPS = {
    p.stem: p
    for folder in annotated.RECURRENCES
    for p in sorted((OPS / folder).glob("*.py"))
    if "\ndef loop(" in p.read_text("utf-8")
} | {
    "-".join(p.parent.relative_to(OPS).parts): p
    for p in sorted(OPS.rglob("naive.py"))
    if p.parent.name != "softmax"
}


def versions(page: str) -> dict[str, Path]:
    """The files of a page, in its order."""
    files = annotated.PAGES[page].files
    return {name: ROOT / files[name] for name in VERSIONS if name in files}


#: What stands beside kernels that are built from other files, too.
SHARED = {
    "linear": {"tiles": OPS / "triton_tiles.py"},
    "delta": {"chunks": OPS / "linear" / "kernels.py"},
    "aft/full": {"windows": OPS / "aft" / "window" / "kernels.py"},
    "aft/window": {"scan": OPS / "aft" / "simple" / "kernels.py"},
}
OPERATIONS = {
    page: files
    | (SHARED.get(annotated.PAGES[page].folder, {}) if "kernels" in files else {})
    for page in LOOPS
    for files in [versions(page)]
}
#: Pages of kernels, and the page that shows the same versions.
PAGES = {"linear": "sum", "delta": "delta", "aft": "aft-window"}
PAGES["feedback"] = "feedback"
#: Two or more columns: half a page each.
HALVES = {
    **{f"annotated/{name}": files for name, files in OPERATIONS.items()},
    **{f"kernels/{page}": OPERATIONS[name] for page, name in PAGES.items()},
}


def alone(path) -> str:
    name = path.relative_to(PACKAGE).with_suffix("").as_posix()
    return f"annotated/source/{name.replace('__init__', 'init')}"


SOURCES = {alone(path): {"": path} for path in MODULES}
NAIVE = "annotated/source/ops/delta/delta.html"
STEP = Source("fwlab/ops/delta/delta.py")
#: A line of the efficient version that is shown.
LATER = f"efficient-L{Source('fwlab/ops/efficient.py').computed['e3'][0]}"


def test_lines_fit_the_page():
    """Beside their notes; half a page scrolls where they are longer than that."""
    halves = {path for files in HALVES.values() for path in files.values()}
    assert [
        f"{path}:{number}"
        for path in halves.union(MODULES)
        for row in Source(path.relative_to(ROOT).as_posix()).rows
        for number in row.lines
        if len(path.read_text("utf-8").splitlines()[number - 1]) > 90
    ] == []


#: Code lines below a note, at most: with their signature, about 15.
LONGEST = 16


def test_every_block_has_a_note_and_the_core_more():
    files = {path for files in HALVES.values() for path in files.values()}
    core = {versions(page)[name] for page in ("sum", "delta") for name in VERSIONS[:3]}
    core |= {LOOPS[page] for page in ("kimi", "aft-simple", "aft-full")}
    core.add(OPS / "softmax" / "naive.py")
    for path in files | core:
        file = Source(path.relative_to(ROOT).as_posix())
        lines, count = file.text.splitlines(), 0
        for row in file.rows:
            place = f"{path}:{row.lines[0]} {row.name}"
            code = sum(bool(lines[number - 1].strip()) for number in row.lines)
            assert row.note.strip() or not code or path not in files, place
            # What has no note continues what is above it.
            count = code if row.note.strip() else count + code
            if row.name.lower() in TABLE:
                count = 0  # a record, or the call that passes all on to it
            assert count <= LONGEST or path not in core, f"{place}: {count} lines"


def test_pages_show_all_code(site):
    """Each line that is code stands there, in order, with its number."""
    line = re.compile(
        r'<span class="line" id="([\w-]*?)L(\d+)"[^>]*><a [^>]*>(\d+)</a>(.*?)\n</span>',
        re.DOTALL,
    )
    for page, files in (HALVES | SOURCES).items():
        html = (site / f"{page}.html").read_text(encoding="utf-8")
        shown: dict[str, list] = {f"{name}-" if name else "": [] for name in files}
        for prefix, *rest in line.findall(html):
            shown[prefix].append(rest)
        for path, rows in zip(files.values(), shown.values(), strict=True):
            lines = path.read_text("utf-8").splitlines()
            numbers = [int(number) for number, *_ in rows]
            assert numbers == sorted(set(numbers)), (page, path)
            for number, label, code in rows:
                assert label == number
                plain = unescape(re.sub("<[^>]*>", "", code))
                assert plain == lines[int(number) - 1], f"{page}: {path}:{number}"
            hidden = set(range(1, len(lines) + 1)) - set(numbers)
            rest = "\n".join(lines[number - 1] for number in sorted(hidden))
            rest = re.sub(r'r?"""(.*?)"""', "", rest, flags=re.DOTALL)
            rest = re.sub(r"^\s*#.*$", "", rest, flags=re.MULTILINE)
            assert rest.strip() == "", (page, path)


def test_every_reference_to_an_equation_is_a_link(site):
    """In comments of code; the number leads where the equation stands."""
    html = (site / NAIVE).read_text("utf-8")
    for tag in ("20", "24", "26", "27", "28"):
        assert f'<a class="eq" href="#eq-{tag}">Eq. {tag}</a>' in html
    layers = site / "annotated" / "source" / "layers"
    layer = (layers / "fast_weight_attention.html").read_text("utf-8")
    # Stated in another file; and stated nowhere, but listed.
    assert 'source/ops/linear/sum.html#eq-19">' in layer
    gates = (layers / "gates.html").read_text("utf-8")
    assert 'annotated/equations.html#schlag2021-21">' in gates


def test_the_list_of_equations_shows_formulas(site):
    """Of all that a notebook or the package states; and the section that does."""
    html = (site / "annotated" / "equations.html").read_text("utf-8")
    page = BeautifulSoup(html, "html.parser")
    rows = page.select("article tbody tr")
    without = [row.find("td").get_text() for row in rows if not row.select(".katex")]
    # Of Eqs. 41-50, a notebook states what they have in common.
    of_many = ", ".join(map(str, range(41, 51)))
    assert without == ["12", "13", "16", of_many, "7", "8"]
    links = [a["href"] for a in page.select("tbody a[href^='../notebooks/']")]
    assert len(links) > 60 and not [link for link in links if "#" not in link]
    delta = page.find(id="schlag2021-24").find_parent("tr")
    assert r"W_{i-1} + \beta_i\," in delta.find("annotation").get_text()
    assert "04_delta_rule.html#2-derive-the-rule" in str(delta)


# In the browser


def lit(tab) -> list[str]:
    return tab.evaluate("[...document.querySelectorAll('.lit')].map((e) => e.id)")


def boxes(tab, *names: str):
    return [tab.locator(f".column-{name}").bounding_box() for name in names]


def beside(tab, *names: str) -> bool:
    """Whether one column is left of the other, and only long lines have to scroll."""
    left, right = boxes(tab, *names)
    lines = (re.sub(r"^\d+", "", code, flags=re.M) for code in tab.evaluate(CUT))
    longest = [max(map(len, code.splitlines())) for code in lines]
    return left["x"] + left["width"] <= right["x"] and min(longest, default=88) > 72


CUT = """() => [...document.querySelectorAll(".annotated pre > code")]
    .filter((e) => e.scrollWidth > e.clientWidth).map((e) => e.textContent)"""


def shown(tab) -> list[str]:
    """The columns that are visible, from left to right and down."""
    return tab.evaluate(
        """[...document.querySelectorAll(".column")].filter((e) => e.checkVisibility())
          .map((e) => e.className.match(/column-(\\w+)/)[1])"""
    )


def tab_of(tab, name: str):
    return tab.get_by_role("tab", name=name, exact=True)


@pytest.mark.parametrize("operation", some(OPERATIONS, "delta", "aft-simple"))
def test_one_version_beside_naive(look, operation):
    """Links choose which, without a script, too."""
    halves = HALVES[f"annotated/{operation}"]
    others = [name for name in VERSIONS[1:] if name in halves]
    shared = [name for name in halves if name not in VERSIONS]
    tab = look(f"annotated/{operation}.html", java_script_enabled=False)
    for index, name in enumerate(others):
        if index:  # the first is there
            tab.locator(".tabs").get_by_role("link", name=name, exact=True).click()
        assert shown(tab)[:2] == ["naive", name]
        assert beside(tab, "naive", name)
        tab.set_viewport_size({"width": 1024, "height": 768})
        assert beside(tab, "naive", name)
        tab.set_viewport_size({"width": 1440, "height": 900})
    tab.set_viewport_size({"width": 390, "height": 844})
    assert shown(tab) == [*halves]
    # Each begins where the one before it ends.
    places = boxes(tab, *halves)
    assert all(a["y"] + a["height"] <= b["y"] for a, b in pairwise(places))
    tab = look(f"annotated/{operation}.html")
    for name in others:
        if len(others) > 1:
            tab_of(tab, name).click()
        also = shared if name == "kernels" else []
        assert shown(tab) == ["naive", name, *also]
        assert beside(tab, "naive", name)


#: A phone, and a desk at 200 %.
SMALL = [(390, 844), (640, 400)]


@pytest.mark.parametrize("page", some(HALVES, "annotated/delta", "kernels/aft"))
def test_tabs_on_a_small_screen(look, page):
    """One version at a time, by the pattern of ARIA for tabs."""
    halves = HALVES[page]
    names = [name for name in VERSIONS if name in halves]
    tab = look(f"{page}.html", width=390)
    tabs = tab.get_by_role("tablist", name="Version").get_by_role("tab")
    assert tabs.all_inner_texts() == names
    stays = "kernels" if page.startswith("kernels/") else "naive"
    for width, height in SMALL:
        tab.set_viewport_size({"width": width, "height": height})
        tab_of(tab, stays).focus()
        for key in ["Home", *["ArrowRight"] * (len(names) - 1), "ArrowRight"]:
            tab.keyboard.press(key)
            chosen = tab.locator("[role=tab][aria-selected=true]")
            (name,) = chosen.all_inner_texts()
            # The focus is on what is chosen, and Tab finds only that.
            assert tab.evaluate("document.activeElement.textContent") == name
            assert tab.locator("[role=tab][tabindex='0']").all_inner_texts() == [name]
            also = [n for n in halves if n not in VERSIONS] * (name == "kernels")
            assert shown(tab) == [name, *also]
            panels = tab.locator("[role=tabpanel]:visible")
            ids = panels.evaluate_all("all => all.map((e) => e.id)")
            assert chosen.get_attribute("aria-controls") == " ".join(ids)
            assert tab.evaluate(WIDTH) <= width
        assert name == names[0]  # round and round
        tab_of(tab, names[-1]).focus()
        tab.keyboard.press("Home")
        assert shown(tab) == [names[0]]
        tab_of(tab, stays).click()


def test_a_small_screen_is_not_endless(look):
    """All versions below each other were 39,000 px high. The tabs stay in view."""
    tab = look("annotated/delta.html", width=390, height=844)
    assert first_line(tab) < 844
    assert tab.evaluate("document.documentElement.scrollHeight") < 9000
    tab.evaluate("scrollTo(0, 3000)")
    tab_of(tab, "kernels").click()
    assert shown(tab) == ["kernels", "chunks"]
    # What was chosen begins here.
    box = tab.locator(".column-kernels").bounding_box()
    assert 0 <= box["y"] < 300
    assert 0 <= tab_of(tab, "naive").bounding_box()["y"] < 100
    # The functions of this version are a list that opens, and closes behind a link.
    assert tab.locator(".functions:visible").count() == 0
    tab.get_by_role("button", name="Functions").click()
    links = tab.locator(".functions a:visible")
    boxes_ = [link.bounding_box() for link in links.all()]
    assert len(boxes_) > 10 and min(box["height"] for box in boxes_) >= 24
    assert all(box["x"] >= 0 and box["x"] + box["width"] <= 390 for box in boxes_)
    heading = heading_of(tab, links.nth(3))
    links.nth(3).click()
    assert tab.locator(".functions:visible").count() == 0
    assert 40 <= heading.bounding_box()["y"] < 844
    # A link into another version shows it.
    tab.evaluate(f"location.hash = '#{LATER}'")
    tab.locator(f"#{LATER}").wait_for()
    assert shown(tab) == ["efficient"]


def functions(path: Path) -> list[str]:
    source = Source(path.relative_to(ROOT).as_posix())
    return [row.name for row in source.rows if row.name]


def listed(tab, path: Path):
    """The links of the list of functions of a file."""
    name = f"Functions of {path.relative_to(ROOT)}"
    found = tab.get_by_role("navigation", name=name, include_hidden=True)
    return found.get_by_role("link", include_hidden=True)


def heading_of(tab, link):
    return tab.locator(f"[id='{link.get_attribute('href')[1:]}']")


def first_line(tab) -> float:
    """Where the first function that computes something ends, in the window."""
    line = tab.locator(".column-naive .row:nth-of-type(2) .line", has_text="return")
    box = line.first.bounding_box()
    return box["y"] + box["height"]


@pytest.mark.parametrize("page", some(HALVES, "annotated/sum", "kernels/aft"))
def test_a_list_of_functions_stands_beside(look, page):
    """Of the versions that are shown, in view wherever the reader is."""
    halves = HALVES[page]
    tab = look(f"{page}.html", width=1280)
    lists = tab.locator(".functions:visible")
    assert lists.count() == len(shown(tab))
    for name in shown(tab):
        links = listed(tab, halves[name])
        assert links.all_inner_texts() == [name, *functions(halves[name])]
    last = links.last
    last.press("Enter")
    box, place = heading_of(tab, last).bounding_box(), lists.first.bounding_box()
    assert 40 <= box["y"] < 900
    assert place["x"] + place["width"] <= boxes(tab, shown(tab)[0])[0]["x"]
    until(
        tab,
        """(name) => [...document.querySelectorAll(".map [aria-current]")]
          .some((e) => e.textContent === name)""",
        last.inner_text(),
    )
    current = lists.last.locator("[aria-current]").bounding_box()
    assert 0 <= current["y"] < 900
    assert tab.evaluate(WIDTH) <= 1280


@pytest.mark.parametrize("name", some(["feature_maps", "layers/aft"], "layers/aft"))
def test_a_file_alone_has_a_list_of_its_functions(look, name):
    """In view wherever the reader is; it marks what is read."""
    path = PACKAGE / f"{name}.py"
    tab = look(f"{alone(path)}.html")
    links = listed(tab, path)
    assert links.all_inner_texts() == functions(path)
    for width, link in product([390, 1280, 1920], (links.last, links.nth(1))):
        tab.set_viewport_size({"width": width, "height": 900})
        # Not by mouse: to bring a link into view, it would scroll the page, and
        # with it the list, while it presses.
        if width == 390:
            tab.get_by_role("button", name="Functions").click()
        link.press("Enter")
        heading = heading_of(tab, link)
        until(
            tab,
            """(e) => e.getBoundingClientRect().y >= 40
              && e.getBoundingClientRect().y < 900""",
            heading.element_handle(),
        )
        # A short one is at the top of the window, and the next one is read.
        until(
            tab,
            """link => [link, link.nextElementSibling]
              .some((e) => e?.hasAttribute("aria-current"))""",
            link.element_handle(),
        )
        assert tab.locator(".map [aria-current]").count() == 1
        if width > 390:
            place = link.bounding_box()
            assert 40 <= place["y"] < 900 and 0 <= place["x"] < width
            assert place["x"] + place["width"] <= heading.bounding_box()["x"]
        assert tab.evaluate(WIDTH) <= width


def test_every_file_with_functions_has_their_list(site):
    for page, files in SOURCES.items():
        html = (site / f"{page}.html").read_text("utf-8")
        lists = re.findall(r'<nav [^>]*class="functions".*?</nav>', html, re.DOTALL)
        names = functions(files[""])
        if len(names) < 2:
            assert lists == [], page
            continue
        links = re.findall(r'href="#([^"]+)">(.*?)</a>', lists[0])
        assert [re.sub("<wbr>", "", name) for _, name in links] == names, page
        assert all(f' id="{anchor}"' in html for anchor, _ in links), page


def tags(source: Source, index: int) -> set[str]:
    """The equations of the function whose first row this is."""
    numbers: set[str] = set()
    for row in source.rows[index:]:
        if row.name and row is not source.rows[index]:
            break
        lines = {*row.lines}
        numbers |= {tag for tag, at in source.computed.items() if lines & {*at}}
        numbers |= {*TAG.findall(row.note)}
    return numbers or named(source.rows[index].note)


#: What must stand beside what.
BESIDE = [
    ("delta", "chunked", "delta", "loop"),
    ("delta", "chunked", "normalized_delta", "normalized_loop"),
    ("delta", "efficient", "summarize", "delta_step"),
    ("kimi", "chunked", "delta", "loop"),
    ("sum", "efficient", "forward", "read"),
    ("sum", "kernels", "forward", "normalized_loop"),
    ("feedback", "efficient", "attend", "feedback_attention"),
    ("feedback", "kernels", "attend", "feedback_attention"),
    ("aft-full", "efficient", "_forward", "mean_of"),
    ("fwp", "efficient", "_forward", "apply"),
]
#: The rows of two functions, and where they are in the window.
ROWS = """([right, left]) => {
  const row = (id) => document.getElementById(id).closest(".row");
  const top = (id) => row(id).getBoundingClientRect().top;"""


@pytest.mark.parametrize(
    "operation", some(dict.fromkeys(b[0] for b in BESIDE), "delta", "feedback")
)
def test_columns_are_aligned_by_equation(look, operation):
    """What computes the same equation stands beside what is read."""
    page = annotated.PAGES[operation]
    sources = {v: Source(path, v) for v, path in page.files.items()}
    tab = look(f"annotated/{operation}.html", width=1280, height=800)
    for _, version, name, twin in (b for b in BESIDE if b[0] == operation):
        indices = {
            v: next(i for i, row in enumerate(sources[v].rows) if row.name == n)
            for v, n in ((version, name.replace("-", ".")), ("naive", twin))
        }
        ours, theirs = (
            equations.by_steps(page.folder, tags(sources[v], i))
            for v, i in indices.items()
        )
        assert ours & theirs
        if tab_of(tab, version).count():
            tab_of(tab, version).click()
        both = [f"{version}-{name}", f"naive-{twin}"]
        tab.evaluate(f"{ROWS} scrollBy(0, top(right) - 200); }}", both)
        # Exactly, where the left column is long enough.
        aligned = "Math.abs(top(right) - top(left)) < 2"
        marked = "row(right).classList.contains('pair')"
        until(tab, f"{ROWS} return {aligned} && {marked}; }}", both)
        (link,) = tab.locator(".functions[data-version=naive] [aria-current]").all()
        assert link.inner_text() == twin


#: Where the left column ends in the window, and where its last row does.
LAST = """() => {
  const column = document.querySelector(".column-naive");
  const [bottom, last] = [column, column.lastElementChild]
    .map((e) => e.getBoundingClientRect().bottom);"""


def test_the_left_column_can_be_moved(look):
    """Until the next function is read."""
    tab = look("annotated/delta.html", width=1280)
    assert first_line(tab) < 800
    tab.locator("#chunked-delta").evaluate("e => e.scrollIntoView()")
    place = "() => document.querySelector('.column-naive').scrollTop"
    until(tab, f"({place})() > 500")
    tab.locator(".column-naive").hover()
    before = tab.evaluate(place)
    tab.mouse.wheel(0, -300)
    until(tab, f"(before) => ({place})() < before", before)
    moved, y = tab.evaluate(place), tab.evaluate("scrollY")
    tab.evaluate("scrollBy(0, 20)")
    until(tab, "(y) => scrollY === y + 20", y)
    tab.evaluate("new Promise(requestAnimationFrame)")
    assert tab.evaluate(place) <= moved
    other = tab.locator("#chunked-normalized_delta")
    other.evaluate("e => e.scrollIntoView()")
    until(tab, f"(before) => ({place})() > before", before)
    # Its last line is its end: from there on, the wheel moves the page.
    tab.evaluate("scrollTo(0, 0)")
    until(tab, f"({place})() < 700")
    tab.mouse.wheel(0, 99_999)
    until(tab, f"{LAST} return Math.abs(last - bottom) < 40 && scrollY === 0; }}")
    tab.wait_for_timeout(600)  # another turn of the wheel
    tab.mouse.wheel(0, 500)
    until(tab, "scrollY > 100")


#: Pages of files alone, of each kind.
ALONE = (
    *("ops/delta/delta", "ops/linear/kernels"),
    "layers/fast_weight_attention",
)


@pytest.mark.parametrize(
    "sources",
    [
        [f"annotated/source/{name}" for name in ALONE],
        pytest.param([*SOURCES], marks=pytest.mark.slow),
    ],
    ids=["some", "all"],
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
              .map((row) => [".note", ".highlight"]
                .map((s) => row.querySelector(`:scope > ${s}`)))
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
        assert tab.evaluate(asks.RAW) + tab.evaluate(asks.RED) == [], page
        tab.set_viewport_size({"width": 390, "height": 844})
        assert tab.evaluate(WIDTH) <= 390, page
        tab.set_viewport_size({"width": 1440, "height": 900})


@pytest.mark.parametrize("page", some(PAGES, "delta"))
def test_one_version_beside_the_kernels(look, page):
    halves = OPERATIONS[PAGES[page]]
    kernels = [name for name in halves if name not in VERSIONS[:-1]]
    others = [name for name in halves if name not in kernels]
    tab = look(f"kernels/{page}.html")
    first = others[1]  # not the specification
    assert shown(tab) == [first, *kernels]
    assert beside(tab, first, "kernels")
    for name in others:
        tab_of(tab, name).click()
        assert shown(tab) == [name, *kernels]
    # An address in a hidden version brings it forth.
    tab_of(tab, "naive").click()
    tab.evaluate("document.querySelector('.column-kernels').scrollIntoView()")
    line = tab.locator(".column-efficient .line .eq").first
    place = line.evaluate("e => e.closest('.line').id")
    tab.evaluate(f"location.hash = '#{place}'")
    tab.locator(f"#{place}").wait_for()
    assert shown(tab) == ["efficient", *kernels]
    assert tab.evaluate("document.activeElement.id") == place
    tab_of(tab, "naive").click()
    tab.goto(f"{tab.url.split('#')[0]}?again#{place}")
    assert shown(tab) == ["efficient", *kernels]


def test_a_link_shows_its_version_without_a_script(look):
    tab = look(f"annotated/delta.html#{LATER}", java_script_enabled=False)
    assert "efficient" in shown(tab)


def test_a_repeated_equation_is_in_view(look):
    """A comment leads to the equation of the same file, if that states it."""
    tab = look("annotated/sum.html")
    tab_of(tab, "kernels").click()
    tab.locator(".column-kernels .line .eq", has_text="(c1)").first.click()
    assert tab.url.endswith("#kernels-eq-c1")
    assert shown(tab) == ["naive", "kernels", "tiles"]
    assert {"eq-c1", "kernels-eq-c1"} <= set(lit(tab))


def versions_lit(tab) -> set[str]:
    return {place.partition("-")[0] for place in lit(tab)}


def test_an_equation_leads_to_the_line_of_a_kernel(look):
    tab = look("kernels/delta.html")
    equation = tab.locator(".column-kernels .equation[data-eq=d4]")
    link = equation.locator(".places a[href^='#chunks']").first
    link.evaluate("e => e.click()")
    assert versions_lit(tab) == {"eq", "chunks"}


def test_equation_and_its_lines_light_up(look):
    tab = look("annotated/delta.html")
    link = tab.locator(".column-chunked .line .eq", has_text="Eq. 28").first
    link.scroll_into_view_if_needed()
    before = tab.evaluate("scrollY")
    link.focus()
    tab.keyboard.press("Enter")
    assert tab.url.endswith("#eq-28") and "eq-28" in lit(tab)
    assert versions_lit(tab) == {"eq", "naive", "chunked", "efficient"}
    # The equation comes into view, the code that was read stays in place.
    assert tab.evaluate("scrollY") == before
    box = tab.locator("#eq-28").bounding_box()
    assert 0 <= box["y"] < 900


def test_number_of_an_equation_leads_to_its_line_and_back(look):
    tab = look(NAIVE)
    tab.locator("#eq-24 .fw-number").click()
    line = tab.url.partition("#")[2]
    assert "# Eq. 24" in tab.locator(f"#{line}").inner_text()
    assert tab.evaluate("document.activeElement.id") == line
    assert {"eq-24", line} <= set(lit(tab))
    tab.locator(f"#{line} .eq").first.click()
    assert tab.url.endswith("#eq-24")
    tab.go_back()
    assert tab.url.endswith(f"#{line}") and line in lit(tab)


def test_address_of_a_line_opens_there(look):
    line = f"L{STEP.computed['20'][0]}"
    tab = look(f"{NAIVE}#{line}")
    assert tab.evaluate("document.activeElement.id") == line
    assert line in lit(tab)
    assert 0 <= tab.locator(f"#{line}").bounding_box()["y"] < 900
    # Each row with a name has a link to itself.
    assert tab.locator("#delta_step .headerlink").get_attribute("href") == "#delta_step"
    # What is copied from there has no numbers of lines.
    copied = tab.evaluate(
        """() => {
          const code = document.querySelector(".line").closest("pre");
          getSelection().selectAllChildren(code);
          return getSelection().toString();
        }"""
    )
    lines = STEP.text.splitlines()
    first = lines.index("from typing import Unpack")
    assert copied.split("\n")[:6] == lines[first : first + 6]


def marked(tab) -> list[str]:
    return tab.evaluate(
        "[...CSS.highlights.get('symbol') ?? []].map((r) => "
        "r.startContainer.data.slice(r.startOffset, r.endOffset))"
    )


def type_name(tab, name: str) -> None:
    field = tab.get_by_label("Another name of the code")
    field.fill(name)
    field.press("Enter")


def test_a_symbol_and_a_name_light_up_in_formulas_and_code(look):
    tab = look(NAIVE)
    tab.locator(".annotated .mathnormal", has_text="β").first.click()
    # Each name of the code that is this symbol, and no other.
    lines = "\n".join(tab.locator(".annotated .line").all_inner_texts())
    code = re.sub('#.*|"[^"]*"', "", lines)
    names = re.findall(r"\bbeta(?:_t)?\b", code)
    assert sorted(marked(tab)) == sorted(names) and len(names) >= 10
    formulas = tab.locator(".annotated .symbol").all_inner_texts()
    assert set(formulas) == {"β"} and len(formulas) > 1
    status = tab.locator(".symbols [role=status]")
    said = f"beta: {len(formulas)} in formulas, {len(names)} in code"
    assert status.inner_text() == said
    # Clicked again it goes out.
    tab.locator(".annotated .symbol").first.click()
    assert marked(tab) == [] and tab.locator(".annotated .symbol").count() == 0
    # So does a name of the code that is clicked.
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
    assert marked(tab) == re.findall("v_bar", lines)
    # The same letter with a bar, and not the plain one.
    symbols = tab.locator(".annotated .symbol")
    assert symbols.count() == 5 and set(symbols.all_inner_texts()) == {"v"}
    tab.keyboard.press("Escape")
    assert marked(tab) == []


def test_names_that_differ_are_not_mixed_up(look):
    """Only an index of a step, a layer or a place is left out of a name."""
    tab = look("annotated/source/layers/fast_weight_attention.html")
    type_name(tab, "to_q")
    assert set(marked(tab)) == {"to_q"} and len(marked(tab)) >= 2
    type_name(tab, "")
    assert marked(tab) == []
    # Words of the language are no names.
    options = tab.locator("#names option")
    options = options.evaluate_all("all => all.map((o) => o.value)")
    assert "to_v" in options and not {"for", "def", "return", "in"} & set(options)


def test_other_clicks_are_the_browsers(look):
    tab = look(NAIVE)
    with tab.context.expect_page() as opened:
        tab.locator(".line .eq").first.click(modifiers=["Control"])
    opened.value.wait_for_url(re.compile("#"))  # it begins empty
    assert "#" not in tab.url


def test_symbols_by_keyboard_elsewhere_and_as_gradients(look):
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
    # In a version that is not shown, or not on the page.
    said = tab.locator(".symbols [role=status]")
    type_name(tab, "E")
    hidden = "in a version that is not shown"
    assert hidden in said.inner_text()
    both, code = map(int, re.findall(r"\d+", said.inner_text())[:2])
    assert f"{both + code} of them {hidden}" in said.inner_text()
    tab_of(tab, "kernels").click()
    assert f"{both + code} of them" not in said.inner_text()
    type_name(tab, "nosuch")
    assert said.inner_text() == "nosuch is not on this page"
    assert marked(tab) == []
    # The decay d_t lights up and not the d of dW, which is dW of the code.
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
    tab = look("annotated/sum.html")
    link = tab.locator(".line a[href*='/delta/'][href$='#eq-d3']").first
    link.evaluate("e => e.click()")
    tab.wait_for_url("**/delta/**#eq-d3")
    assert tab.locator("#eq-d3 .katex").count() == 1


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
