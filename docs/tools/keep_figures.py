"""Save the first state of each figure, for readers without scripts and for print.

    python docs/tools/keep_figures.py SITE

opens the figures of a built site in Chromium. For each, it writes the picture that
it begins with, and the words below it, into docs/figures/NAME.html; and the same of
each step of a figure that has steps. With the picture comes how high the figure is
on a phone, with its controls. Run it after a change to a figure; a test compares.
"""

import re
import sys
import tomllib
from html import escape
from pathlib import Path

from browser import OPTIONS, chromium, served
from playwright.sync_api import Page, sync_playwright

FIGURES = Path(__file__).resolve().parents[1] / "figures"
#: Pages outside docs/figures that contain figures, by the name of the figure.
ELSEWHERE = tomllib.loads((FIGURES / "elsewhere.toml").read_text("utf-8"))
#: JavaScript that returns a figure's picture without attributes that need a script.
#: A figure whose first state is not informative defines `still`.
#: This function moves the figure to a better state or returns the picture.
STILL = """async (name) => {
  const root = document.querySelector(`#figure-${name}`);
  const made = await root.figure.still?.();
  const stage = document.createElement("div");
  stage.innerHTML = made || root.querySelector(".fw-stage").innerHTML;
  for (const controls of stage.querySelectorAll(".fw-controls, .fw-rows")) controls.remove();
  for (const e of stage.querySelectorAll(":is([role=slider], [role=button], td[tabindex])")) {
    for (const { name } of [...e.attributes])
      if (/^(tabindex|aria-(value|pressed|selected).*)$/.test(name)) e.removeAttribute(name);
    if (e.role && e.localName === "g") e.role = "img";
  }
  return stage.innerHTML.replace(/<!--.*?-->/g, "");
}"""


def names() -> list[str]:
    """Return the names of all figures, whose scripts call `figure` with their name."""
    return [
        path.stem
        for path in sorted(FIGURES.glob("*.js"))
        if re.search(rf'\bfigure\("{path.stem}"', path.read_text("utf-8"))
    ]


def address(name: str) -> str:
    page = ELSEWHERE.get(name, {"page": f"figures/{name}.md"})["page"]
    return page.removesuffix("md") + "html"


def stills(tab: Page, name: str) -> dict[str, str]:
    """Return the picture and the text of each figure step as HTML, by file name.

    The first state comes first. The figure has already started in `tab`.
    """
    figure = tab.locator(f"#figure-{name}")
    if name == "shakespeare":
        figure.get_by_role("button", name="Start the model").click()
        figure.get_by_label("Text to read").wait_for()
    found = {name: still(tab, name, f' data-figure="{name}"')}
    element = f"document.querySelector('#figure-{name}').figure"
    for step in tab.evaluate(f"{element}.steps?.slice(1) ?? []"):
        tab.evaluate(f"(step) => {element}.jump(step)", step)
        found[f"{name}-{step}"] = still(tab, name)
    return found


def still(tab: Page, name: str, mark: str = "") -> str:
    # Make the picture first, since `still` may move the figure to another state.
    picture = tab.evaluate(STILL, name)
    words = tab.locator(f"#figure-{name} .fw-words").inner_text()
    return (
        f'<section class="fw-stage" data-search-exclude{mark}>{picture}</section>'
        f'<figcaption class="fw-words">{escape(words, quote=False)}</figcaption>\n'
    )


def main() -> None:
    site = Path(sys.argv[1] if len(sys.argv) > 1 else "site").resolve()
    path = chromium() or sys.exit("there is no Chromium here")
    with served(site) as base, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=OPTIONS)
        tab = browser.new_page(reduced_motion="reduce")
        for name in sys.argv[2:] or names():
            tab.set_viewport_size({"width": 390, "height": 844})
            tab.goto(base + address(name), wait_until="load")
            stage = tab.locator(f"#figure-{name} .fw-stage")
            height = stage.evaluate("e => e.offsetHeight")
            tab.set_viewport_size({"width": 1440, "height": 900})
            tab.goto(base + address(name), wait_until="load")
            mark = f'data-figure="{name}"'
            for each, kept in stills(tab, name).items():
                sized = kept.replace(mark, f'{mark} style="--height: {height}px"', 1)
                (FIGURES / f"{each}.html").write_text(sized, "utf-8")


if __name__ == "__main__":
    main()
