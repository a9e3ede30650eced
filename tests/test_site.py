"""The built site, as a reader without a network sees it.

It is built once, strictly, and opened in headless Chromium. Whatever the
browser asks of anybody but the local server is blocked and recorded.
"""

import functools
import http.server
import os
import re
import shutil
import subprocess
import sys
import threading
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urljoin, urlsplit

import pytest

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted(path.stem for path in (ROOT / "notebooks").glob("*.ipynb"))
ANNOTATED = ["aft", "delta", "feedback", "fwp", "linear"]
#: Pages of kernels, and the files that stand on them.
KERNELS = {
    path.parent.name: {
        name: path.with_name(f"{name}.py") for name in ("naive", "efficient", "kernels")
    }
    for path in sorted((ROOT / "fwlab" / "ops").glob("*/kernels.py"))
}
KERNELS["linear"]["tiles"] = ROOT / "fwlab" / "ops" / "tiles.py"
KERNELS["delta"]["chunks"] = KERNELS["linear"]["kernels"]
PAGES = [
    "index.html",
    *(f"notebooks/{name}.html" for name in NOTEBOOKS),
    *(f"annotated/{name}.html" for name in ANNOTATED),
    "api/ops.html",
    "results.html",
    "kernels/index.html",
    *(f"kernels/{name}.html" for name in KERNELS),
]
WITHOUT_MATHS = ["results.html"]


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The folder of the built site."""
    fetch = [sys.executable, str(ROOT / "docs" / "tools" / "katex.py")]
    done = subprocess.run(fetch, capture_output=True, text=True)
    if done.returncode:
        pytest.fail(f"the site needs KaTeX: {done.stderr.strip()}", pytrace=False)
    folder = tmp_path_factory.mktemp("site")
    # Not with --quiet, which hides warnings from --strict.
    build = ["mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(
        [sys.executable, "-m", *build],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    said = [line for line in done.stderr.splitlines() if "INFO" not in line]
    if done.returncode:
        pytest.fail("\n".join(["mkdocs build --strict:", *said]), pytrace=False)
    return folder


class Page(HTMLParser):
    """What a page links to, what it loads, and what can be linked to."""

    def __init__(self, path: Path):
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.ids: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        if "id" in attributes:
            self.ids.append(attributes["id"])
        if tag == "a" and attributes.get("href"):
            self.links.append(attributes["href"])
        elif target := attributes.get("src") or attributes.get("href"):
            self.loads.append(target)


@pytest.fixture(scope="module")
def pages(site) -> dict[str, Page]:
    return {
        path.relative_to(site).as_posix(): Page(path)
        for path in sorted(site.rglob("*.html"))
        if path.name != "404.html"  # its links are absolute
    }


def test_pages_are_there(pages):
    assert set(PAGES) <= pages.keys()


def test_links_and_anchors_resolve(site, pages):
    wrong = []
    for name, page in pages.items():
        for link in [*page.links, *page.loads]:
            url = urlsplit(urljoin(f"http://site/{name}", link))
            if url.netloc != "site":
                continue
            target = unquote(url.path).lstrip("/")
            if target.endswith("/") or not target:
                target += "index.html"
            known = target not in pages or not url.fragment
            if not (site / target).is_file() or not (
                known or unquote(url.fragment) in pages[target].ids
            ):
                wrong.append(f"{name}: {link}")
    assert wrong == []


def test_nothing_is_loaded_from_elsewhere(pages):
    """No script, style, image or font, also where no browser would ask."""
    for name, page in pages.items():
        loads = [u for u in page.loads if re.match(r"https?:|//", u)]
        assert loads == [], name


def test_ids_are_unique(pages):
    for name, page in pages.items():
        double = {i for i in page.ids if page.ids.count(i) > 1}
        assert double == set(), name


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_notebook_can_be_downloaded(site, pages, name):
    page, source = f"notebooks/{name}.html", f"{name}.ipynb"
    assert source in pages[page].links
    original = (ROOT / "notebooks" / source).read_bytes()
    assert (site / "notebooks" / source).read_bytes() == original
    colab = [u for u in pages[page].links if "colab.research" in u]
    address = re.search(r"^repo_url: https://github.com/(\S+)", _mkdocs_yml(), re.M)
    assert colab == [
        "https://colab.research.google.com/github/"
        f"{address[1]}/blob/main/notebooks/{source}"
    ]


def _mkdocs_yml() -> str:
    return (ROOT / "mkdocs.yml").read_text(encoding="utf-8")


def test_address_is_set_in_one_place():
    address = re.search(r"^repo_url: (\S+)", _mkdocs_yml(), re.M)[1]
    assert _mkdocs_yml().count(address) == 1
    for path in (ROOT / "docs").rglob("*"):
        if path.suffix in (".md", ".py", ".js", ".css", ".json"):
            assert address not in path.read_text(encoding="utf-8"), path


def test_lock_file_names_no_host():
    lock = (ROOT / "docs" / "package-lock.json").read_text()
    assert "resolved" not in lock and "registry" not in lock
    assert lock.count('"integrity"') == lock.count('"node_modules/')


def test_example_of_the_home_page_runs():
    text = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    exec(compile(example, "docs/index.md", "exec"), {})


ANNOTATED_FILES = {
    **{
        f"annotated/{operation}": {
            name: ROOT / "fwlab" / "ops" / operation / f"{name}.py"
            for name in ("naive", "efficient")
        }
        for operation in ANNOTATED
    },
    **{f"kernels/{operation}": files for operation, files in KERNELS.items()},
}


@pytest.mark.parametrize("page", ANNOTATED_FILES)
def test_annotated_files_fit_half_a_page(page):
    for path in ANNOTATED_FILES[page].values():
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
            assert len(line) <= 72, f"{path}:{number}"


@pytest.mark.parametrize("page", ANNOTATED_FILES)
def test_annotated_page_shows_all_code(site, page):
    """Each line that is code stands there, in order, with its number."""
    html = (site / f"{page}.html").read_text(encoding="utf-8")
    assert len(html.encode()) < 600_000
    for name, path in ANNOTATED_FILES[page].items():
        lines = path.read_text("utf-8").splitlines()
        shown = re.findall(rf'id="{name}-L(\d+)"[^>]*>(.*?)\n</span>', html, re.S)
        numbers = [int(number) for number, _ in shown]
        assert numbers == sorted(set(numbers))
        for number, code in shown:
            assert _plain(code) == lines[int(number) - 1]
        hidden = set(range(1, len(lines) + 1)) - set(numbers)
        rest = "\n".join(lines[number - 1] for number in sorted(hidden))
        rest = re.sub(r'r?"""(.*?)"""', "", rest, flags=re.DOTALL)
        assert re.sub(r"^\s*#.*$", "", rest, flags=re.MULTILINE).strip() == ""


def _plain(html: str) -> str:
    from html import unescape

    return unescape(re.sub("<[^>]*>", "", html))


# In the browser


@pytest.fixture(scope="module")
def browser():
    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    path = os.environ.get("CHROMIUM") or next(
        filter(None, map(shutil.which, names)), None
    )
    if path is None:
        reason = "no Chromium to look at the site with: install it, or set CHROMIUM"
        if os.environ.get("CI"):
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as p:
        yield p.chromium.launch(executable_path=path, args=["--no-sandbox"])


@pytest.fixture(scope="module")
def address(site):
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    handler = functools.partial(Quiet, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.fixture
def look(browser, address):
    """Opens pages; complains at the end of each test about all it saw."""
    seen, contexts = [], []

    def look(page: str, scheme: str = "light", width: int = 1440, base: str = address):
        context = browser.new_context(
            color_scheme=scheme, viewport={"width": width, "height": 900}
        )
        contexts.append(context)

        def answer(route):
            url = route.request.url
            if url.startswith((base, "data:")):
                return route.continue_()
            seen.append(f"request: {url}")
            return route.abort()

        context.route("**/*", answer)
        tab = context.new_page()
        tab.on("console", lambda m: seen.append(f"console {m.type}: {m.text}"))
        tab.on("pageerror", lambda error: seen.append(f"error: {error}"))
        tab.goto(base + page, wait_until="load")
        tab.evaluate("document.fonts.ready.then(() => 0)")
        return tab

    yield look
    for context in contexts:
        context.close()
    assert seen == []


#: Formulas that are still TeX: as arithmatex marks them, or in notebooks.
RAW = r"""() => {
  const skip = "script, style, pre, code, svg, .katex, textarea";
  const walk = document.createTreeWalker(
    document.querySelector("article"), NodeFilter.SHOW_TEXT);
  const found = [];
  while (walk.nextNode()) {
    const { parentElement, data } = walk.currentNode;
    if (!parentElement.closest(skip) && /\$[^$\d][^$]*\$|\\[([a-z]/.test(data)) found.push(data);
  }
  return found;
}"""
RED = r"""() => [...document.querySelectorAll(".katex *")]
  .filter((e) => /^rgb\((204, 0, 0|255, 0, 0)\)$/.test(getComputedStyle(e).color))
  .map((e) => e.textContent)"""
CONTRAST = r"""() => {
  const linear = (c) => (c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
  const parse = (text) => {
    const canvas = new OffscreenCanvas(1, 1).getContext("2d");
    canvas.fillStyle = text;
    canvas.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
    return [r, g, b, a / 255];
  };
  const over = ([r, g, b, a], below) =>
    [r, g, b].map((c, i) => c * a + below[i] * (1 - a));
  const back = (e) => {
    const colour = parse(getComputedStyle(e).backgroundColor);
    if (colour[3] === 1 || !e.parentElement) return colour.slice(0, 3);
    return over(colour, back(e.parentElement));
  };
  const light = (rgb) =>
    rgb.map(linear).reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const found = new Map();
  for (const e of document.querySelectorAll("article *")) {
    if (e.closest("svg, .katex-mathml, .headerlink, .md-code__nav, .md-content__button"))
      continue;
    if (![...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim())) continue;
    const below = back(e);
    const text = over(parse(getComputedStyle(e).color), below);
    const [low, high] = [light(text), light(below)].sort((a, b) => a - b);
    const ratio = (high + 0.05) / (low + 0.05);
    if (ratio < 4.5) found.set(`${e.tagName} ${e.className}`, ratio.toFixed(2));
  }
  return [...found];
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("page", PAGES)
def test_page_is_whole(look, page, scheme):
    tab = look(page, scheme)
    wanted = {"light": "default", "dark": "slate"}[scheme]
    assert tab.locator("body").get_attribute("data-md-color-scheme") == wanted
    if page not in WITHOUT_MATHS:
        assert tab.locator("article .katex").count() > 0
        assert tab.evaluate("document.fonts.check('1em KaTeX_Main')")
    assert tab.evaluate(RAW) == []
    assert tab.locator(".katex-error").count() == 0
    assert tab.evaluate(RED) == []
    assert tab.evaluate(CONTRAST) == []


@pytest.mark.parametrize("page", PAGES)
def test_page_fits_a_phone(look, page):
    tab = look(page, width=390)
    assert tab.evaluate("document.documentElement.scrollWidth") == 390


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_figures_follow_the_theme(look, name):
    tab = look(f"notebooks/{name}.html", "dark")
    figures = tab.locator(".nb-output svg[role=img]")
    for figure in figures.all():
        assert len(figure.get_attribute("aria-label")) > len("Figure: ")
    ink = "[...document.querySelectorAll('.nb-output svg')].map(s => s.outerHTML)"
    assert not any("#7b8190" in svg.lower() for svg in tab.evaluate(ink))
    assert tab.locator(".nb-output img[src^='data:image/svg']").count() == 0


@pytest.mark.parametrize("operation", ANNOTATED)
def test_columns_stand_side_by_side(look, operation):
    tab = look(f"annotated/{operation}.html")
    naive, efficient = (
        tab.locator(f".column-{name}").bounding_box() for name in ("naive", "efficient")
    )
    assert naive["y"] == efficient["y"]
    assert naive["x"] + naive["width"] <= efficient["x"]
    cut = """() => [...document.querySelectorAll(".annotated pre > code")]
        .filter((e) => e.scrollWidth > e.clientWidth).map((e) => e.textContent)"""
    assert tab.evaluate(cut) == []
    tab.set_viewport_size({"width": 390, "height": 844})
    naive, efficient = (
        tab.locator(f".column-{name}").bounding_box() for name in ("naive", "efficient")
    )
    assert naive["y"] + naive["height"] <= efficient["y"]


@pytest.mark.parametrize("operation", KERNELS)
def test_one_of_two_versions_beside_the_kernels(look, operation):
    tab = look(f"kernels/{operation}.html")
    naive, efficient, kernels = (
        tab.locator(f".column-{name}") for name in ("naive", "efficient", "kernels")
    )
    assert efficient.is_visible() and not naive.is_visible()
    left, right = efficient.bounding_box(), kernels.bounding_box()
    assert left["x"] + left["width"] <= right["x"]
    tab.get_by_role("radio", name="naive").check()
    assert naive.is_visible() and not efficient.is_visible()
    # An address in the hidden version brings it forth.
    tab.evaluate("document.querySelector('.column-kernels').scrollIntoView()")
    line = tab.locator(".column-efficient .line .eq").first
    place = line.evaluate("e => e.closest('.line').id")
    tab.goto(f"{tab.url.split('#')[0]}?again#{place}")
    assert efficient.is_visible()
    tab.set_viewport_size({"width": 390, "height": 844})
    for column in (naive, efficient, kernels):
        assert column.is_visible()
    assert tab.evaluate("document.documentElement.scrollWidth") <= 390


def test_an_equation_leads_to_the_line_of_a_kernel(look):
    tab = look("kernels/delta.html")
    equation = tab.locator(".column-efficient .equation[data-eq=d4]")
    link = equation.locator(".places a[href^='#chunks']").first
    link.evaluate("e => e.click()")
    lit = tab.evaluate("[...document.querySelectorAll('.lit')].map((e) => e.id)")
    assert {i.split("-")[0] for i in lit} == {"eq", "efficient", "chunks"}


def test_equation_and_its_lines_light_up(look):
    tab = look("annotated/delta.html")
    link = tab.locator(".column-efficient .line .eq", has_text="Eq. 28").first
    link.scroll_into_view_if_needed()
    before = tab.evaluate("scrollY")
    link.focus()
    tab.keyboard.press("Enter")
    assert tab.url.endswith("#eq-28")
    lit = tab.evaluate("[...document.querySelectorAll('.lit')].map((e) => e.id)")
    assert "eq-28" in lit
    assert {i.split("-")[0] for i in lit} == {"eq", "naive", "efficient"}
    # The equation comes into view, the code that was read stays in place.
    assert tab.evaluate("scrollY") == before
    box = tab.locator("#eq-28").bounding_box()
    assert 0 <= box["y"] < 900


def test_site_opens_from_disk(look, site):
    """Formulas, links and search, without any server."""
    tab = look("index.html", base=f"{site.as_uri()}/")
    assert tab.locator("article .katex").count() > 0
    tab.locator("input[name=query]").click()
    tab.keyboard.type("delta rule")
    tab.locator(".md-search-result__item").first.wait_for(timeout=20_000)
    tab.locator("article a[href$='annotated/delta.html']").first.evaluate(
        "e => e.click()"
    )
    tab.wait_for_url("**/annotated/delta.html")
    assert tab.locator("article .katex").count() > 0
