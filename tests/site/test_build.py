"""Test the built site without a browser."""

import json
import re
import xml.etree.ElementTree as ET
import zipfile
from html import unescape
from urllib.parse import unquote, urljoin, urlsplit

import pytest
import yaml
from built import MOVED, REPOSITORY, ROOT, SITE

import fwlab

NOTEBOOKS = sorted(path.stem for path in (ROOT / "notebooks").glob("*.ipynb"))
PACKAGE = ROOT / "fwlab"


def test_pages_are_there(site, pages):
    """Every Markdown page and every notebook has a page in the site.

    Every old URL redirects to the new URL.
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


def test_citation_is_that_of_the_package():
    text = (ROOT / "CITATION.cff").read_text("utf-8")
    citation = yaml.safe_load(text)
    assert citation["version"] == fwlab.__version__
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
            # The rule editor reads its fragment as a rule, not as an id of its page.
            fragment = "" if url.fragment.startswith("rule=") else url.fragment
            known = target not in pages or not fragment
            if not (site / target).is_file() or not (
                known or unquote(fragment) in pages[target].ids
            ):
                wrong.append(f"{name}: {link}")
    assert wrong == []


def test_pages_load_only_what_is_beside_them(site, pages):
    """No link begins with a slash, so that the site works in any folder.

    Scripts, styles, images and fonts come from the site itself, even if no browser
    would load them.
    """
    for name, page in pages.items():
        rooted = [u for u in [*page.links, *page.loads] if u.startswith("/")]
        assert rooted == [], name
        loads = [u for u in page.loads if re.match(r"https?:|//", u)]
        canonical = [SITE + name] if SITE else []
        assert loads == canonical, name
        assert len(page.ids) == len({*page.ids}), name
    for path in site.rglob("*.css"):
        urls = re.findall(r"url\(\s*['\"]?(https?:|//)", path.read_text("utf-8"))
        assert urls == [], path


def test_wheel_can_be_downloaded(site, pages):
    """Two pages link to the wheel, which contains all files of the package."""
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
    """A notebook can be downloaded with and without outputs, and opened in Colab."""
    page, source = pages[f"notebooks/{name}.html"], f"{name}.ipynb"
    (wheel,) = site.glob("*.whl")
    offered = {f"results/{source}", f"working/{source}", f"../{wheel.name}"}
    assert offered <= {*page.links}
    original = (ROOT / "notebooks" / source).read_bytes()
    assert (site / "notebooks" / "results" / source).read_bytes() == original
    # The working copy of a notebook differs only in its empty outputs.
    working = json.loads((site / "notebooks" / "working" / source).read_bytes())
    whole = json.loads(original)
    for cell in whole["cells"]:
        if cell["cell_type"] == "code":
            cell["outputs"], cell["execution_count"] = [], None
    assert working == whole
    assert f"drop <code>{wheel.name}</code> into the files pane" in page.html
    colab = [u for u in page.links if "colab.research" in u]
    host, _, path = REPOSITORY.partition("github.com/")
    place = f"https://colab.research.google.com/github/{path}/blob/main/notebooks/"
    assert colab == [f"{place}{source}"] * (host == "https://")


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_begins_with_a_picture(pages, name):
    """The page of a notebook shows a picture within the first 100 words."""
    page = pages[f"notebooks/{name}.html"]
    begin, _, rest = page.html.partition("<h1")[2].partition('<div class="nb-picture">')
    (drawing,) = re.findall('<use href="#(fig\\d+)"', rest.partition("</div>")[0])
    assert drawing in page.ids
    shown = re.sub("<details.*?</details>", "", begin, flags=re.DOTALL)
    assert len(re.sub("<[^>]*>", " ", shown).split()) < 100


def test_sitemap_lists_every_page(site, pages):
    """The sitemap lists the full URL of every page if the site has a URL."""
    if not SITE:
        assert list(site.glob("sitemap*")) == []
        return
    tree = ET.parse(site / "sitemap.xml")
    listed = {e.text for e in tree.iter() if e.tag.endswith("}loc")}
    assert listed == {SITE + name for name in pages}


def test_every_page_says_what_it_is(site, pages):
    """Every page has a unique description, and a title and an image for previews."""
    described = set()
    for name, page in pages.items():
        meta = r'<meta (?:name|property)="([^"]+)" content="([^"]*)"'
        metas = dict(re.findall(meta, page.html))
        assert metas["og:title"], name
        assert metas.get("og:url", "") == (SITE and SITE + name), name
        base = SITE or f"{site.as_uri()}/"
        assert urljoin(base + name, metas["og:image"]) == f"{base}images/card.png", name
        assert 40 <= len(metas["og:description"]) <= 300, name
        assert unescape(metas["description"]) == unescape(metas["og:description"]), name
        described.add(metas["description"])
    assert len(described) == len(pages)


def test_pages_lead_to_the_repository_if_it_has_an_address(pages):
    """Buttons, edit links and `git clone` appear only if the repository has a URL."""
    repository, pencils = REPOSITORY, {}
    for name, page in pages.items():
        code = "<code.*?</code>|<pre.*?</pre>"
        assert "{{" not in re.sub(code, "", page.html, flags=re.S)
        buttons = re.findall(r'<a href="([^"]*)"[^>]*class="md-source"', page.html)
        assert set(buttons) == ({repository} if repository else set()), name
        pencils[name] = re.findall(r'<a href="([^"]*)"[^>]*rel="edit"', page.html)
    files = {
        "tested.html": "edit/main/docs/tested.md",
        "notebooks/01_fast_weights.html": "blob/main/notebooks/01_fast_weights.ipynb",
    }
    for name, path in files.items():
        assert pencils[name] == [f"{repository}/{path}"] * bool(repository)
    text = re.sub("<[^>]*>", "", pages["run.html"].html)
    clone = f"git clone {repository} fwlab" in text
    assert ("git clone" in text) == clone == bool(repository)


def test_lock_file_names_no_host():
    lock = (ROOT / "docs" / "package-lock.json").read_text("utf-8")
    assert "resolved" not in lock and "registry" not in lock
    assert lock.count('"integrity"') == lock.count('"node_modules/')


def test_example_of_the_page_on_installing_runs():
    text = (ROOT / "docs" / "run.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    exec(compile(example, "docs/run.md", "exec"), {})
