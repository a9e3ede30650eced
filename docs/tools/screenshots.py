"""Take a screenshot of every type of page of a built site.

    python docs/tools/screenshots.py [SITE] [PAGE ...]

Each page is taken in light, in dark, and at the width of a phone, down to
a few screens, into runs/screenshots. Without PAGE, the first two pages of each
folder are taken.
"""

import sys
from pathlib import Path

from browser import OPTIONS, chromium, served
from playwright.sync_api import sync_playwright

LOOKS = {"light": ("light", 1440), "dark": ("dark", 1440), "phone": ("light", 390)}
OUT = Path("runs/screenshots")


def main(site: Path, pages: list[str]) -> None:
    path = chromium() or sys.exit("there is no Chromium here")
    folders: dict[Path, list[str]] = {}
    for page in sorted(site.rglob("*.html")):
        name = page.relative_to(site).as_posix()
        folders.setdefault(page.parent, []).append(name)
    pages = pages or [name for names in folders.values() for name in names[:2]]
    with served(site.resolve()) as base, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=OPTIONS)
        for look, (scheme, width) in LOOKS.items():
            size = {"width": width, "height": 900}
            tab = browser.new_context(color_scheme=scheme, viewport=size).new_page()
            for page in pages:
                tab.goto(base + page)
                height = tab.evaluate("document.documentElement.scrollHeight")
                name = page.removesuffix(".html").replace("/", "-")
                tab.screenshot(
                    path=OUT / f"{name}-{look}.png",
                    full_page=True,
                    clip={"x": 0, "y": 0, "width": width, "height": min(height, 4000)},
                )
    print(f"{len(pages) * len(LOOKS)} pictures in {OUT}")


if __name__ == "__main__":
    site, *pages = sys.argv[1:] or ["site"]
    main(Path(site), pages)
