"""Insert interactive figures, and static pictures of them, into pages.

A figure goes in place of `<!-- figure: NAME -->`, one picture of it in place of
`<!-- still: NAME -->`, and pictures of all figures in place of `<!-- gallery -->`.

A figure is docs/figures/NAME.js, a module. esbuild makes one script of it and all
that it imports, as a page opened from disk runs no modules; numbers that it imports
are made by docs/hooks/frames.py. Next to it is NAME.html,
the picture it starts with, its words, and its height, so that the text below it does
not move when it begins; docs/tools/keep_figures.py writes it, for readers without
scripts and for print. A figure that changes with the text has a picture of each
step, NAME-STEP.html. docs/templates/theme/main.html loads the scripts of a page.
Drawings are kept out of search; they are in sections, as the search plugin
takes the end of the first nested element of a name for that of the outer one.
The gallery has every page of docs/figures, in the order of the navigation,
with the `description` of its front matter and its picture, made small.
"""

import json
import os
import re
import subprocess
import tomllib
from base64 import b64encode
from pathlib import Path
from tempfile import TemporaryDirectory

from frames import DATA
from markupsafe import Markup
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File
from packages import MODULES, fetched, npm
from repository import ROOT
from templates import render

MARK = re.compile(r"<!-- figure: (\w+) -->")
STILL = re.compile(r"<!-- still: ([\w-]+) -->")
FOLDER = ROOT / "docs" / "figures"
GALLERY = "<!-- gallery -->"
#: Attributes of the element that a figure's script fills: name and height.
STAGE = re.compile(r' data-figure="\w+"(?: style="[^"]*")?')
#: Figures of pages outside docs/figures, with the texts of their gallery cards.
ELSEWHERE = tomllib.loads((FOLDER / "elsewhere.toml").read_text("utf-8"))
#: The figures in each bundled script, by the name of the script.
bundles: dict[str, list[str]] = {}


def on_files(files, config):
    """Convert weight files to scripts: a page opened from disk cannot fetch files."""
    bundles.clear()
    for file in [f for f in files if re.fullmatch(r"figures/\w+\.js", f.src_uri)]:
        files.remove(file)  # The site contains only bundled scripts.
    for path in sorted(FOLDER.glob("*/*.safetensors")):
        name = path.relative_to(FOLDER).as_posix()
        letters = b64encode(path.read_bytes()).decode()
        script = f'(globalThis.packed ??= {{}})["{name}"] = "{letters}";\n'
        files.append(File.generated(config, f"figures/{name}.js", content=script))
    return files


def on_page_content(html, page, config, files):
    """Insert figures into the HTML of a page, since Markdown would change them."""
    if names := MARK.findall(html):
        bundles["-".join(names)] = names
        page.meta.setdefault("scripts", []).append(f"figures/{'-'.join(names)}.js")
    step, begins = 'class="fw-figure fw-step"', 'class="fw-figure" id="figure-{}"'
    html = STILL.sub(lambda mark: _figure(mark[1], step, page), html)
    return MARK.sub(lambda mark: _figure(mark[1], begins.format(mark[1]), page), html)


def on_env(env, config, files):
    """Add figure scripts and the gallery before the search plugin reads the pages."""
    for name, script in bundled(bundles).items():
        files.append(File.generated(config, f"figures/{name}.js", content=script))
    for file in files.documentation_pages():
        if GALLERY in (file.page.content or ""):
            cards = render("gallery.html", cards=list(_cards(file, config, files)))
            file.page.content = file.page.content.replace(GALLERY, cards)


def bundled(figures: dict[str, list[str]]) -> dict[str, str]:
    """Bundle the scripts of several figures into one script per name.

    Errors: `PluginError` with esbuild's message if esbuild finds an error.
    """
    (esbuild,) = fetched(MODULES / "esbuild", "bin/esbuild")
    options = ["--bundle", "--charset=utf8", "--format=iife", "--minify"]
    options += ["--log-level=warning", "--log-override:import-is-undefined=error"]
    with TemporaryDirectory() as folder:
        out = Path(folder, "out")
        options.append(f"--outdir={out}")
        for name, make in DATA.items():
            path = Path(folder, f"data-{name}.json")
            path.write_text(json.dumps(make()), "utf-8")
            options.append(f"--alias:fwlab-{name}={path}")
        for name, modules in figures.items():
            lines = [f"import {json.dumps(f'{FOLDER}/{m}.js')};" for m in modules]
            Path(folder, f"{name}.js").write_text("\n".join(lines), "utf-8")
        done = subprocess.run(
            [
                *npm.program("node"),
                esbuild,
                *(Path(folder, f"{name}.js") for name in figures),
                *options,
            ],
            env=os.environ | {"NODE_PATH": str(MODULES)},
            capture_output=True,
            encoding="utf-8",
        )
        if done.returncode:
            raise PluginError(f"esbuild found an error in a figure:\n{done.stderr}")
        return {name: (out / f"{name}.js").read_text("utf-8") for name in figures}


def _cards(gallery, config, files):
    def card(name: str, file, title: str, about: str, anchor: str = "") -> dict:
        kept = _kept(name).partition("<figcaption")[0]
        picture = re.sub(' (?:data-figure|href)="[^"]*"', "", kept)
        return {
            "url": file.url_relative_to(gallery) + anchor,
            "title": title,
            "about": about,
            "picture": Markup(picture),
        }

    for name, said in ELSEWHERE.items():
        file = files.get_file_from_path(said["page"])
        yield card(name, file, said["title"], said["about"], f"#figure-{name}")
    # `next_page` follows the order of the navigation.
    page = gallery.page.next_page
    while page and page.file.src_uri.startswith("figures/"):
        about = Markup(page.meta["description"])
        yield card(Path(page.file.src_uri).stem, page.file, page.title, about)
        page = page.next_page


def _figure(name: str, attributes: str, page) -> str:
    title = ELSEWHERE.get(name, {"title": page.title})["title"]
    kept = _kept(name)
    if "fw-step" in attributes:  # Pictures of single steps are not interactive.
        kept = STAGE.sub("", kept)
    return f'<figure {attributes} aria-label="{title}">{kept}</figure>'


def _kept(name: str) -> str:
    path = FOLDER / f"{name}.html"
    new = f'<section class="fw-stage" data-figure="{name}"></section>'
    new += '<figcaption class="fw-words"></figcaption>'
    return path.read_text("utf-8").strip() if path.exists() else new
