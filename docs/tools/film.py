"""Save the figure of ten rules as one animated picture, for README and previews.

    python docs/tools/film.py [SITE]

moves the slider of the built page through all tokens, and writes
docs/images/ten-rules.gif.
"""

import io
import sys
from pathlib import Path

from browser import OPTIONS, chromium, served
from PIL import Image
from playwright.sync_api import sync_playwright

PICTURE = Path(__file__).resolve().parents[1] / "images" / "ten-rules.gif"
#: Milliseconds of a token, and of the last one.
TOKEN, LAST = 1800, 4000


def main() -> None:
    path = chromium() or sys.exit("there is no Chromium here")
    site = Path(sys.argv[1] if len(sys.argv) > 1 else "site").resolve()
    pictures = []
    with served(site) as base, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=OPTIONS)
        tab = browser.new_page(viewport={"width": 1280, "height": 900})
        tab.goto(f"{base}rules.html")
        figure = tab.locator("#figure-ten")
        slider = figure.locator("input[type=range]")
        for token in range(1, int(slider.get_attribute("max") or 1) + 1):
            slider.fill(str(token))
            shot = figure.screenshot(animations="disabled")
            pictures.append(Image.open(io.BytesIO(shot)).convert("RGB"))
        browser.close()
    size = pictures[0].size
    first, *rest = (x.resize(size).quantize(64) for x in pictures)
    times = [TOKEN] * len(rest) + [LAST]
    first.save(PICTURE, save_all=True, append_images=rest, duration=times, loop=0)
    print(f"{PICTURE}: {PICTURE.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
