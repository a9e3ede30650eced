"""Copy the packages that docs/tools/npm.py has fetched into the site."""

import sys
from base64 import b64encode
from pathlib import Path

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File
from repository import ROOT

sys.path.insert(0, str(ROOT / "docs" / "tools"))
import npm

MODULES = npm.MODULES
FONTS = MODULES / "@fontsource"
#: Typefaces: name, weight, style, letters, and True if styles/site.css embeds them.
#: Embedded fonts keep text from moving when a font file arrives late.
FACES = (
    ("Sans", 400, "normal", "latin", True),
    ("Sans", 400, "italic", "latin", True),
    ("Sans", 600, "normal", "latin", True),
    ("Sans", 400, "normal", "greek", False),
    ("Mono", 400, "normal", "latin", False),
    ("Mono", 400, "italic", "latin", False),
    ("Mono", 600, "normal", "latin", False),
)
LETTERS = {
    "latin": "U+0000-00FF, U+2000-206F, U+2191, U+2193, U+2212",
    "greek": "U+0370-03FF",
}


def fetched(package: Path, pattern: str) -> list[Path]:
    """Return the files of a package that match a pattern, or raise `PluginError`."""
    if found := sorted(package.glob(pattern)):
        return found
    raise PluginError(
        f"expected {package.relative_to(ROOT) / pattern}, got no such file: "
        "run `python docs/tools/npm.py` once"
    )


def on_files(files, config):
    katex = MODULES / "katex" / "dist"
    paths = [*fetched(katex, "katex.min.css"), *fetched(katex, "fonts/*.woff2")]
    found = {f"katex/{path.relative_to(katex).as_posix()}": path for path in paths}
    faces = [_file(*face[:4]) for face in FACES]
    found |= {f"fonts/{path.relative_to(FONTS).as_posix()}": path for path in faces}
    for place, path in found.items():
        uri = f"assets/{place}"
        files.append(File.generated(config, uri, abs_src_path=str(path)))
    return files


def on_post_build(config):
    css = Path(config.site_dir) / "styles" / "site.css"
    faces = "".join(_face(*face) for face in FACES)
    css.write_text(faces + css.read_text("utf-8"), "utf-8")


def _file(name: str, weight: int, style: str, letters: str) -> Path:
    font = f"ibm-plex-{name.lower()}"
    pattern = f"{font}/files/{font}-{letters}-{weight}-{style}.woff2"
    (path,) = fetched(FONTS, pattern)
    return path


def _face(name: str, weight: int, style: str, letters: str, inside: bool) -> str:
    """Return the CSS of a typeface, with the font file embedded if `inside`."""
    path = _file(name, weight, style, letters)
    url = f"../assets/fonts/{path.relative_to(FONTS).as_posix()}"
    if inside:
        url = f"data:font/woff2;base64,{b64encode(path.read_bytes()).decode()}"
    return (
        f'@font-face {{font-family: "IBM Plex {name}"; font-weight: {weight}; '
        f"font-style: {style}; font-display: {'block' if inside else 'swap'}; "
        f'src: url("{url}") format("woff2"); unicode-range: {LETTERS[letters]}}}\n'
    )
