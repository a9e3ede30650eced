"""Take a screenshot of every type of page of a built site.

    python docs/tools/screenshots.py [SITE] [--out FOLDER] [PAGE ...]

Each page is taken in light, in dark, and at the width of a phone, down to
a few screens. Without PAGE, one page of each type is taken.
"""

import argparse
import sys
from pathlib import Path

from browser import OPTIONS, chromium, served
from playwright.sync_api import sync_playwright

#: One page of each type.
TYPES = [
    "index.html",
    "memory_essay.html",
    "course.html",
    "notebooks/04_delta_rule.html",
    "exercises.html",
    "annotated/index.html",
    "annotated/equations.html",
    "annotated/delta.html",
    "annotated/source/feature_maps.html",
    "kernels/index.html",
    "kernels/delta.html",
    "figures/index.html",
    "figures/memory.html",
    "figures/dpfp.html",
    "figures/aft.html",
    "figures/chunks.html",
    "figures/feedback.html",
    "results.html",
    "errata.html",
    "api/ops.html",
    "notation.html",
    "references.html",
    "tested.html",
    "contribute.html",
    "changelog.html",
]
LOOKS = {
    "light": {"color_scheme": "light", "viewport": {"width": 1440, "height": 900}},
    "dark": {"color_scheme": "dark", "viewport": {"width": 1440, "height": 900}},
    "phone": {"color_scheme": "light", "viewport": {"width": 390, "height": 844}},
}
LONGEST = 4000  # pixels


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("site", nargs="?", type=Path, default=Path("site"))
    parser.add_argument("pages", nargs="*", default=TYPES)
    parser.add_argument("--out", type=Path, default=Path("runs/screenshots"))
    given = parser.parse_args()
    path = chromium() or sys.exit("there is no Chromium here")
    given.out.mkdir(parents=True, exist_ok=True)
    with served(given.site.resolve()) as base, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=OPTIONS)
        for look, options in LOOKS.items():
            tab = browser.new_context(**options).new_page()
            for page in given.pages:
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
    print(f"{len(given.pages) * len(LOOKS)} pictures in {given.out}")


if __name__ == "__main__":
    main()
