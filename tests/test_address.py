"""The address of the repository is set everywhere or nowhere."""

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import nbformat
import pytest
import yaml
from address import ROOT, Address, current
from owners import KNOWN, NOBODY, strangers

PATHS = sorted((ROOT / "notebooks").glob("*.ipynb"))
GITHUB = f"https://github.com/{NOBODY}/my-fwlab"
USER = f"https://github.com/{NOBODY}/{NOBODY}.github.io"
PAGES = f"https://{NOBODY}.github.io/my-fwlab/"


def tracked() -> list[Path]:
    # Of a checkout that may belong to another user, as in a container.
    command = ["git", "-c", "safe.directory=*", "ls-files", "-z", "-co"]
    command += ["--exclude-standard"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    names = done.stdout.decode().split("\0")
    return [ROOT / name for name in names if (ROOT / name).is_file()]


def copy_to(folder: Path) -> None:
    for path in tracked():
        target = folder / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)


def test_no_file_leads_to_strangers():
    files = {path: path.read_bytes().decode(errors="ignore") for path in tracked()}
    assert len(files) > 100
    found = {path: strangers(text) for path, text in files.items()}
    assert {p: names for p, names in found.items() if names - {NOBODY}} == {}
    # Every allowed owner is linked to.
    text = "\n".join(t for p, t in files.items() if p.name != "owners.py")
    unlinked = {name for name in KNOWN if f"/{name}/" not in text}
    assert unlinked <= {"squidfunk", "srush", "sustcsonglin"}


def test_strangers_are_found():
    for text, found in (
        ("https://{}.com/OWNER/fwlab", "OWNER"),
        ("git+https://{}.com/fwlab/fwlab@main", "fwlab"),
        ("https://fwlab.{}.io/fwlab/", "fwlab"),
        ("https://colab.research.google.com/{}/fwlab/fwlab/blob", "fwlab"),
    ):
        assert strangers(text.format("github")) == {found}


@pytest.mark.parametrize(
    ("url", "site", "wanted"),
    [
        ("", "", Address()),
        (GITHUB, "", Address(GITHUB, PAGES)),
        (f" {GITHUB}.git", "", Address(GITHUB, PAGES)),
        (f"{GITHUB}/", "https://a.example", Address(GITHUB, "https://a.example/")),
        (USER, "", Address(USER, f"https://{NOBODY}.github.io/")),
        ("https://git.example/a/b/c", "", Address("https://git.example/a/b/c")),
        ("", "http://localhost:8000/a", Address("", "http://localhost:8000/a/")),
    ],
)
def test_what_is_typed_becomes_an_address(url, site, wanted):
    assert Address.of(url, site) == wanted


@pytest.mark.parametrize(
    ("url", "site"),
    [
        ("fwlab", ""),
        ("https://git.example", ""),
        ("https://git.example/a", ""),
        ("https://git.example/a/b c", ""),
        ('https://git.example/a/b"', ""),
        ("https://me:secret@git.example/a/b", ""),
        ("git@git.example:a/b", ""),
        (f"{GITHUB}/tree/main", ""),
        (GITHUB, "a.example"),
        (GITHUB, "https://a.example/?b"),
    ],
)
def test_what_is_no_address_is_refused_in_a_sentence(url, site):
    with pytest.raises(ValueError, match=r"^'.*' is .*\.$"):
        Address.of(url, site)


@pytest.fixture
def copy(tmp_path) -> Path:
    """Files of the repository, without tests."""
    copy_to(tmp_path / "copy")
    shutil.rmtree(tmp_path / "copy" / "tests")
    return tmp_path / "copy"


def content(folder: Path) -> dict[Path, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {p.relative_to(folder): p.read_bytes() for p in files if "pyc" not in p.name}


def make_address(folder: Path, *given: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        ["make", "-s", "address", f"PYTHON={sys.executable}", *given],
        cwd=folder,
        capture_output=True,
        encoding="utf-8",
        timeout=300,
    )


def test_set_and_unset(copy):
    make_address(copy, "URL=")  # whatever is set here
    unset = content(copy)
    assert make_address(copy, f"URL={GITHUB}").returncode == 0
    once = content(copy)
    changed = {path.as_posix() for path in once if once[path] != unset[path]}
    assert changed == {
        "CITATION.cff",
        "README.md",
        "mkdocs.yml",
        "pyproject.toml",
        *(f"notebooks/{path.name}" for path in PATHS),
    }
    make_address(copy, f"URL={GITHUB}.git")
    assert content(copy) == once

    refused = make_address(copy, "URL=https://git.example")
    assert refused.returncode
    assert "'https://git.example' is not the address" in refused.stderr
    assert "Traceback" not in refused.stderr
    assert content(copy) == once

    config = yaml.load((copy / "mkdocs.yml").read_text("utf-8"), yaml.BaseLoader)
    assert (config["repo_url"], config["site_url"]) == (GITHUB, PAGES)
    citation = yaml.safe_load((copy / "CITATION.cff").read_text("utf-8"))
    assert (citation["repository-code"], citation["url"]) == (GITHUB, PAGES)
    project = tomllib.loads((copy / "pyproject.toml").read_text("utf-8"))["project"]
    assert project["urls"] == {"Repository": GITHUB, "Documentation": PAGES}
    install = f'pip install "fwlab @ git+{GITHUB}@main"\n'
    assert install in (copy / "README.md").read_text("utf-8")
    for path in PATHS:
        badge, setup = addressed(copy / "notebooks" / path.name)
        colab = f"https://colab.research.google.com/github/{NOBODY}/my-fwlab/"
        assert f"({colab}blob/main/notebooks/{path.name})" in badge
        assert f'"git+{GITHUB}@main"' in setup

    make_address(copy, "URL=https://git.example/a/b", "SITE=https://a.example/")
    text = b"\n".join(content(copy).values()).decode(errors="ignore")
    assert NOBODY not in text
    config = yaml.load((copy / "mkdocs.yml").read_text("utf-8"), yaml.BaseLoader)
    assert config["site_url"] == "https://a.example/"
    # Colab opens notebooks of GitHub only.
    assert "colab.research.google.com/github/" not in addressed_text(copy)
    assert "git+https://git.example/a/b@main" in addressed_text(copy)

    make_address(copy, "URL=")
    assert content(copy) == unset
    assert "git+" not in addressed_text(copy) + (copy / "README.md").read_text("utf-8")


def addressed(path: Path) -> tuple[str, str]:
    """The badge ("" if there is none) and the set-up cell."""
    book = nbformat.read(path, as_version=4)
    nbformat.validate(book)
    cells = {cell.id: cell.source for cell in book.cells}
    assert "badge" not in cells or book.cells[0].id == "badge"
    return cells.get("badge", ""), cells["setup"]


def addressed_text(copy: Path) -> str:
    paths = [copy / "notebooks" / path.name for path in PATHS]
    return "\n".join("\n".join(addressed(path)) for path in paths)


def test_this_repository_is_as_make_address_leaves_it(copy):
    address = current()
    before = content(copy)
    make_address(copy, f"URL={address.repository}", f"SITE={address.site}")
    assert content(copy) == before


def test_results_of_the_notebooks_are_those_of_the_site():
    """A notebook that runs alone has no docs folder: the package has copies."""
    folder = ROOT / "fwlab" / "data" / "results"
    copies = sorted(folder.rglob("*.json"))
    # Runs of notebooks alone, by a tool in docs/tools, are nowhere else.
    own = {path for path in copies if path.name.startswith(("feedback-t", "qwen-"))}
    assert len(own) == 5 and len(copies) == 29
    for path in {*copies} - own:
        original = ROOT / "docs" / "results" / path.relative_to(folder)
        assert path.read_bytes() == original.read_bytes(), f"copy {original} to {path}"
    for path in PATHS:
        book = nbformat.read(path, as_version=4)
        for cell in book.cells:
            if cell.cell_type == "code" and cell.id != "setup":
                assert "../" not in cell.source, (path, cell.id)


@pytest.mark.slow
def test_all_holds_where_an_address_is_set(tmp_path):
    """The site of a copy with an address, and the tests of both."""
    folder, site = tmp_path / "copy", tmp_path / "site"
    copy_to(folder)
    subprocess.run([sys.executable, ROOT / "docs" / "tools" / "npm.py"], check=True)
    (folder / ".cache").mkdir()
    (folder / ".cache" / "npm").symlink_to(ROOT / ".cache" / "npm")
    subprocess.run(["git", "init", "-q"], cwd=folder, check=True)
    assert make_address(folder, f"URL={GITHUB}").returncode == 0
    build = ["mkdocs", "build", "--strict", "--site-dir", str(site)]
    tests = ["tests/test_address.py", "tests/test_notebooks.py"]
    tests += ["tests/site/test_build.py", "tests/site/test_course.py"]
    env = {"PYTHONPATH": str(folder), "FWLAB_SITE": str(site)}
    env |= {"NO_MKDOCS_2_WARNING": "1", "PYTEST_ADDOPTS": "", "FWLAB_GROUP": ""}
    for command in (build, ["pytest", "-p", "no:cacheprovider", *tests]):
        done = subprocess.run(
            [sys.executable, "-m", *command],
            cwd=folder,
            env=os.environ | env,
            capture_output=True,
            encoding="utf-8",
            timeout=1800,
        )
        assert done.returncode == 0, done.stdout + done.stderr
    html = (site / "notebooks" / "04_delta_rule.html").read_text("utf-8")
    assert f'<link rel="canonical" href="{PAGES}notebooks/04_delta_rule.html">' in html
    assert f'property="og:url" content="{PAGES}notebooks/04_delta_rule.html"' in html
    assert "<h1" in html and "badge.svg" not in html  # the button is enough
    course = (site / "course.html").read_text("utf-8")
    assert f'github/{NOBODY}/my-fwlab/blob/main/notebooks"' in course
    assert "Colab, from GitHub" in course
