"""Take a screenshot of every type of page of a built site.

    python docs/tools/screenshots.py [SITE] [--out FOLDER] [PAGE ...]

Each page is taken in light, in dark, and at the width of a phone, down to
a few screens. Without PAGE, the first two pages of each folder are taken.
"""

import argparse
import sys
from pathlib import Path

from browser import OPTIONS, chromium, served
from playwright.sync_api import sync_playwright

LOOKS = {
    "light": {"color_scheme": "light", "viewport": {"width": 1440, "height": 900}},
    "dark": {"color_scheme": "dark", "viewport": {"width": 1440, "height": 900}},
    "phone": {"color_scheme": "light", "viewport": {"width": 390, "height": 844}},
}
LONGEST = 4000  # pixels


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("site", nargs="?", type=Path, default=Path("site"))
    parser.add_argument("pages", nargs="*")
    parser.add_argument("--out", type=Path, default=Path("runs/screenshots"))
    given = parser.parse_args()
    path = chromium() or sys.exit("there is no Chromium here")
    folders: dict[Path, list[str]] = {}
    for page in sorted(given.site.rglob("*.html")):
        name = page.relative_to(given.site).as_posix()
        folders.setdefault(page.parent, []).append(name)
    pages = given.pages or [name for names in folders.values() for name in names[:2]]
    given.out.mkdir(parents=True, exist_ok=True)
    with served(given.site.resolve()) as base, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=OPTIONS)
        for look, options in LOOKS.items():
            tab = browser.new_context(**options).new_page()
            for page in pages:
                tab.goto(base + page)
                height = min(
                    tab.evaluate("document.documentElement.scrollHeight"), LONGEST
                )
                width = options["viewport"]["width"]
                name = page.removesuffix(".html").replace("/", "-")
                tab.set_viewport_size({"width": width, "height": height})
                tab.evaluate("scrollTo(0, 0)")
                tab.screenshot(path=given.out / f"{name}-{look}.png")
                tab.set_viewport_size(options["viewport"])
    print(f"{len(pages) * len(LOOKS)} pictures in {given.out}")


if __name__ == "__main__":
    main()
