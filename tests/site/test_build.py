"""What can be said of the built site without opening a browser."""

import gzip
import json
import re
import shutil
import sys
import xml.etree.ElementTree as ET
import zipfile
from html import unescape
from urllib.parse import unquote, urljoin, urlsplit

import pytest
import yaml
from built import MOVED, REPOSITORY, ROOT, SITE
from owners import strangers

sys.path.insert(0, str(ROOT / "docs" / "hooks"))

import fwlab

NOTEBOOKS = sorted(path.stem for path in (ROOT / "notebooks").glob("*.ipynb"))
PACKAGE = ROOT / "fwlab"


def test_pages_are_there(site, pages):
    """Build each Markdown page and each notebook.

    An old name leads to the new one.
    """
    docs = ROOT / "docs"
    written = {p.relative_to(docs).with_suffix(".html") for p in docs.rglob("*.md")}
    names = {path.as_posix() for path in written}
    names |= {f"notebooks/{name}.html" for name in NOTEBOOKS}
    assert names <= pages.keys()
    for old, new in MOVED.items():
        led = re.search(
            r'http-equiv="refresh" content="0; url=(.*?)"',
            (site / old).read_text("utf-8"),
        )
        assert led and urljoin(old, led[1]) == new and new in pages


def test_a_changed_file_is_read_again(tmp_path, monkeypatch):
    """As `mkdocs serve` does before it builds once more."""
    import equations
    import literate

    loop = "fwlab/ops/delta/delta.py"
    for name in (loop, "docs/equations.toml"):
        (tmp_path / name).parent.mkdir(parents=True)
        shutil.copy(ROOT / name, tmp_path / name)
    for module in (equations, literate):
        monkeypatch.setattr(module, "ROOT", tmp_path)
    number, text = ("schlag2021", "12"), (tmp_path / loop).read_text("utf-8")
    assert text.count("# Eq. 20") == 1
    equations.forget()
    try:
        assert number not in equations.code()[0]
        (tmp_path / loop).write_text(text.replace("# Eq. 20", "# Eq. 12"), "utf-8")
        equations.forget()
        assert equations.code()[0][number]
    finally:
        equations.forget()


def test_citation_is_that_of_the_package(site):
    text = (ROOT / "CITATION.cff").read_text("utf-8")
    citation = yaml.safe_load(text)
    assert citation["version"] == fwlab.__version__
    # Its BibTeX is one click from home.
    assert 'href="references.html#cite"' in (site / "index.html").read_text("utf-8")
    page = (ROOT / "docs" / "references.md").read_text("utf-8")
    entry = page[page.index("@software{fwlab") :]
    (author,) = citation["authors"]
    for said in (citation["title"], f"{{{author['name']}}}", citation["version"]):
        assert f"= {{{said}}}," in entry


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
            # The editor reads a rule there: that is no place on its page.
            fragment = "" if url.fragment.startswith("rule=") else url.fragment
            known = target not in pages or not fragment
            if not (site / target).is_file() or not (
                known or unquote(fragment) in pages[target].ids
            ):
                wrong.append(f"{name}: {link}")
    assert wrong == []


def test_pages_load_only_what_is_beside_them(pages):
    """Move the site to any folder: no link begins at the root.

    No script, style, image or font comes from elsewhere, also where no browser would
    ask.
    """
    for name, page in pages.items():
        rooted = [u for u in [*page.links, *page.loads] if u.startswith("/")]
        assert rooted == [], name
        loads = [u for u in page.loads if re.match(r"https?:|//", u)]
        canonical = [SITE + name] if SITE else []
        assert loads == canonical, name
        assert len(page.ids) == len({*page.ids}), name


def test_styles_load_nothing_from_elsewhere(site):
    for path in site.rglob("*.css"):
        urls = re.findall(r"url\(\s*['\"]?(https?:|//)", path.read_text("utf-8"))
        assert urls == [], path


def test_html_is_small(site, pages):
    large = {n: len((site / n).read_bytes()) for n in pages}
    assert {n: size for n, size in large.items() if size >= 640_000} == {}


def test_wheel_can_be_downloaded(site, pages):
    """From the pages that say how to install it; with all of the package."""
    name = f"fwlab-{fwlab.__version__}-py3-none-any.whl"
    assert [path.name for path in site.rglob("*.whl")] == [name]
    for page in ("index.html", "run.html"):
        assert name in pages[page].links
        assert f"{name}" in (site / page).read_text("utf-8").replace("</span>", "")
    with zipfile.ZipFile(site / name) as wheel:
        held = {n: wheel.read(n) for n in wheel.namelist() if "dist-info" not in n}
    kinds = ("**/*.py", "**/*.json", "exercises/**/*.toml", "data/results/*.pt")
    files = [path for kind in kinds for path in PACKAGE.glob(kind)]
    assert held == {p.relative_to(ROOT).as_posix(): p.read_bytes() for p in files}


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_notebook_can_be_downloaded(site, pages, name):
    """With results, for working, and into Colab; and what it needs."""
    page, source = f"notebooks/{name}.html", f"{name}.ipynb"
    (wheel,) = site.glob("*.whl")
    offered = {f"results/{source}", f"working/{source}", f"../{wheel.name}"}
    assert offered <= {*pages[page].links}
    original = (ROOT / "notebooks" / source).read_bytes()
    assert (site / "notebooks" / "results" / source).read_bytes() == original
    # Nothing but outputs is missing from the edition for working.
    text = (site / "notebooks" / "working" / source).read_text("utf-8")
    working, whole = json.loads(text), json.loads(original)
    assert "image/" not in text
    for cell in whole["cells"]:
        if cell["cell_type"] == "code":
            cell["outputs"], cell["execution_count"] = [], None
    assert working == whole
    words = (site / page).read_text("utf-8")
    assert f"drop <code>{wheel.name}</code> into the files pane" in words
    colab = [u for u in pages[page].links if "colab.research" in u]
    host, _, path = REPOSITORY.partition("github.com/")
    github = [path] if host == "https://" else []
    assert colab == [
        f"https://colab.research.google.com/github/{path}/blob/main/notebooks/{source}"
        for path in github
    ]


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_begins_with_a_picture(site, pages, name):
    """One of its own, before word 100."""
    page = f"notebooks/{name}.html"
    html = (site / page).read_text("utf-8")
    begin, _, rest = html[html.index("<h1") :].partition('<div class="nb-picture">')
    (drawing,) = re.findall('<use href="#(fig\\d+)"', rest.partition("</div>")[0])
    assert drawing in pages[page].ids
    shown = re.sub("<details.*?</details>", "", begin, flags=re.DOTALL)
    assert len(re.sub("<[^>]*>", " ", shown).split()) < 100


def test_sitemap_lists_every_page(site, pages):
    """Its addresses are whole ones: without an address there is no sitemap."""
    if not SITE:
        assert list(site.glob("sitemap*")) == []
        return
    tree = ET.parse(site / "sitemap.xml")
    listed = {e.text for e in tree.iter() if e.tag.endswith("}loc")}
    assert listed == {SITE + name for name in pages}
    packed = gzip.decompress((site / "sitemap.xml.gz").read_bytes())
    assert b"<loc>" in packed


def test_every_page_says_what_it_is(site, pages):
    """The text, and the picture, that are shown where a page is linked to."""
    for name in pages:
        html = (site / name).read_text("utf-8")
        meta = r'<meta (?:name|property)="([^"]+)" content="([^"]*)"'
        metas = dict(re.findall(meta, html))
        assert metas["og:title"], name
        wanted = SITE and SITE + name
        assert metas.get("og:url", "") == wanted, name
        there = urljoin(SITE or f"{site.as_uri()}/{name}", metas["og:image"])
        assert there == f"{SITE or f'{site.as_uri()}/'}images/card.png", name
        assert 40 <= len(metas["og:description"]) <= 300, name
        assert unescape(metas["description"]) == unescape(metas["og:description"]), name


def test_site_leads_to_no_strangers(site):
    """Neither do the notebooks, the wheel and what else it offers."""
    old = ("github.com" + "/fwlab", "fwlab" + ".github.io")
    searched = 0
    for path in site.rglob("*"):
        for name, data in _content(path):
            text = data.decode(errors="ignore")
            for ours in filter(None, (REPOSITORY, SITE)):
                text = text.replace(ours, "")
            assert [words for words in old if words in text] == [], (path, name)
            # The theme and KaTeX name their authors.
            if path.relative_to(site).parts[0] != "assets":
                assert strangers(text) == set(), (path, name)
                searched += 1
    assert searched > 100


def _content(path):
    """Name and bytes of a file, or of all files in a wheel."""
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            yield from ((n, wheel.read(n)) for n in wheel.namelist())
    elif path.is_file():
        yield path.name, path.read_bytes()


def test_pages_lead_to_the_repository_if_it_has_an_address(site, pages):
    """The button, the pencil, and the lines of pages that name it."""
    repository, pencils = REPOSITORY, {}
    for name in pages:
        html = (site / name).read_text("utf-8")
        assert "{{" not in re.sub("<code.*?</code>|<pre.*?</pre>", "", html, flags=re.S)
        buttons = re.findall(r'<a href="([^"]*)"[^>]*class="md-source"', html)
        assert set(buttons) == ({repository} if repository else set()), name
        pencils[name] = re.findall(r'<a href="([^"]*)"[^>]*rel="edit"', html)
    files = {
        "tested.html": "edit/main/docs/tested.md",
        "notebooks/01_fast_weights.html": "blob/main/notebooks/01_fast_weights.ipynb",
    }
    for name, path in files.items():
        wanted = [f"{repository}/{path}"] if repository else []
        assert pencils[name] == wanted
    clone = f"git clone {repository} fwlab"
    for name in ("run.html",):
        text = re.sub("<[^>]*>", "", (site / name).read_text("utf-8"))
        assert ("git clone" in text) == (clone in text) == bool(repository)
    links = pages["annotated/source/feature_maps.html"].links
    file = "blob/main/fwlab/feature_maps.py"
    there = [link for link in links if link.endswith(file)]
    assert there == [f"{repository}/{file}"] * bool(repository)


def test_lock_file_names_no_host():
    lock = (ROOT / "docs" / "package-lock.json").read_text("utf-8")
    assert "resolved" not in lock and "registry" not in lock
    assert lock.count('"integrity"') == lock.count('"node_modules/')
    listed = json.loads((ROOT / "docs" / "package.json").read_text("utf-8"))
    root = json.loads(lock)["packages"][""]
    for kind in ("dependencies", "devDependencies"):
        assert listed[kind] == root[kind]


def test_example_of_the_page_on_installing_runs():
    text = (ROOT / "docs" / "run.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    exec(compile(example, "docs/run.md", "exec"), {})
