"""Save the first state of each figure, for readers without scripts, and print.

    python docs/tools/keep_figures.py SITE

opens the figures of a built site in Chromium. For each, it writes the
picture into docs/figures/NAME.html and its description into NAME.txt, and
those of each step of a figure that has steps. How high each is on a phone, with
its controls, goes into heights.json. Run it after a change to a figure; a test
compares them.
"""

import json
import sys
from pathlib import Path

from browser import OPTIONS, chromium, served
from playwright.sync_api import Page, sync_playwright

FIGURES = Path(__file__).resolve().parents[1] / "figures"
#: The page of a figure without a page of its own.
PAGES = {"essay": "memory_essay.html", "live": "index.html"}
#: A figure that does not begin with what is worth keeping has `still`: it
#: goes there, or makes the picture itself.
STILL = """async (name) => {
  const root = document.querySelector(`#figure-${name}`);
  const made = await root.figure.still?.();
  if (made) return made;
  const stage = root.querySelector(".fw-stage").cloneNode(true);
  for (const controls of stage.querySelectorAll(".fw-controls")) controls.remove();
  return stage.innerHTML;
}"""


def names() -> list[str]:
    """The figures: a script is one if it calls `fwlab.figure`."""
    return [
        path.stem
        for path in sorted(FIGURES.glob("*.js"))
        if f'fwlab.figure("{path.stem}"' in path.read_text("utf-8")
    ]


def begin(tab: Page, base: str, name: str) -> tuple[str, str]:
    """The picture and the words of a figure in its first state."""
    tab.goto(base + PAGES.get(name, f"figures/{name}.html"), wait_until="load")
    return first(tab, name)


def first(tab: Page, name: str) -> tuple[str, str]:
    """The same, on a page that is there."""
    figure = tab.locator(f"#figure-{name}")
    if name == "shakespeare":
        figure.get_by_role("button", name="Start the model").click()
        figure.get_by_label("Text to read").wait_for()
    # The picture first: to make it may take what a reader gets on first use.
    picture = tab.evaluate(STILL, name)
    return picture, figure.locator(".fw-words").inner_text()


def later_steps(tab: Page, name: str) -> dict[str, tuple[str, str]]:
    """The same of a figure in its other steps, by name; it has begun in `tab`."""
    element = f"document.querySelector('#figure-{name}').figure"
    found = {}
    for step in tab.evaluate(f"{element}.steps?.slice(1) ?? []"):
        tab.evaluate(f"(step) => {element}.jump(step)", step)
        words = tab.locator(f"#figure-{name} .fw-words").inner_text()
        found[f"{name}-{step}"] = (tab.evaluate(STILL, name), words)
    return found


def height(tab: Page, base: str, name: str) -> int:
    """How high a figure begins, in pixels; `tab` is as wide as a phone."""
    tab.goto(base + PAGES.get(name, f"figures/{name}.html"), wait_until="load")
    return tab.locator(f"#figure-{name} .fw-stage").evaluate("e => e.offsetHeight")


def main() -> None:
    site = Path(sys.argv[1] if len(sys.argv) > 1 else "site").resolve()
    path = chromium() or sys.exit("there is no Chromium here")
    with served(site) as base, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=OPTIONS)
        tab = browser.new_page(
            viewport={"width": 1440, "height": 900}, reduced_motion="reduce"
        )
        for name in names():
            kept = {name: begin(tab, base, name), **later_steps(tab, name)}
            for still, (picture, words) in kept.items():
                (FIGURES / f"{still}.html").write_text(picture + "\n", "utf-8")
                (FIGURES / f"{still}.txt").write_text(words + "\n", "utf-8")
        tab.set_viewport_size({"width": 390, "height": 844})
        heights = {name: height(tab, base, name) for name in names()}
        content = json.dumps(heights, indent=1) + "\n"
        (FIGURES / "heights.json").write_text(content, "utf-8")


if __name__ == "__main__":
    main()
