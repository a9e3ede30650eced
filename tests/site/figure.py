"""Operate interactive figures in a browser, and read their state and text."""

import json
import re

import pytest
from built import PATIENCE, until
from keep_figures import address as page_of

#: JavaScript helpers for expressions about `root`, the element of a figure.
SHORT = """
  const state = () => root.figure.state();
  const words = () => root.querySelector(".fw-words").textContent;
  const all = (css, of = root) => [...of.querySelectorAll(css)];
  const texts = (css, of) => all(css, of).map((e) => e.textContent);
  const seen = (e) =>
    e.getBoundingClientRect().width > 0 && e.checkVisibility({ visibilityProperty: true });
"""


def number(text: str) -> float:
    return float(text.replace("−", "-"))


def parted(still: str) -> tuple[list[str], list[str]]:
    """Split HTML into a list of texts and a list of numbers; drop image data."""
    still = re.sub(r"data:image/png;base64,[\w+/=]+", "image", still)
    parts = re.split(r"([−-]?\d+(?:\.\d+)?)", still.strip())
    return parts[::2], parts[1::2]


def near(one: str, other: str) -> bool:
    """Return True if two numbers, as text, differ by at most one in the last decimal.

    Processors round `exp` differently, which can change the last decimal shown.
    """
    decimals = max(len(x.partition(".")[2]) for x in (one, other))
    off = abs(number(one) - number(other))
    return off < 1.1 * 10**-decimals if decimals else one == other


class Figure:
    """Operate one interactive figure in a tab of the browser."""

    def __init__(self, tab, name: str):
        self.tab, self.name = tab, name
        self.root = tab.locator(f"#figure-{name}")
        self.css, self.role = self.root.locator, self.root.get_by_role
        self.text = tab.get_by_label("Text to read")

    # --- Read the figure ---

    def ask(self, expression: str, given=None):
        """Evaluate JavaScript that may use `given` and `root`, the figure's element.

        One long expression is much faster than many short ones.
        """
        ask = f"(root, given) => {{ {SHORT} return {expression}; }}"
        return self.root.evaluate(ask, given)

    def state(self) -> dict:
        return self.ask("state()")

    def words(self) -> str:
        return self.ask("words()")

    def texts(self, css: str) -> list[str]:
        return self.ask("texts(given)", css)

    def focused(self) -> str:
        return self.tab.evaluate("document.activeElement.textContent")

    def fetched(self) -> list[str]:
        """List the weight files that the page has fetched."""
        entries = "performance.getEntriesByType('resource').map((e) => e.name)"
        names = [n for n in self.tab.evaluate(entries) if n.endswith(".safetensors")]
        return [name.partition("figures/")[2] for name in names]

    # --- Use the figure ---

    def press(self, name: str):
        self.role("button", name=name, exact=True).click()

    def choose(self, name: str):
        self.role("radio", name=name, exact=True).check()

    def slider(self, label: str):
        # Match the beginning of the label, because a value may follow it.
        return self.role("slider", name=re.compile(f"^{re.escape(label)}"))

    def slide(self, label: str, value: float):
        self.slider(label).fill(str(value))

    def until(self, expression: str):
        until(
            self.tab,
            f"""(name) => {{
              const root = document.getElementById(`figure-${{name}}`);
              {SHORT} return {expression};
            }}""",
            self.name,
        )

    def until_it_says(self, text: str):
        self.until(f"words().includes({json.dumps(text)})")

    def starter(self):
        """Return the button that starts the model, or the home page's first button."""
        if self.name == "live":
            return self.css("button").first
        return self.role("button", name="Start the model")

    def start(self):
        """Start the figure's model, except on the home page, and wait for it."""
        if self.name == "live":
            self.until("state().answers !== null")
        else:
            self.starter().click()
            self.text.wait_for()


@pytest.fixture
def look(browser, address):
    """Return a function that opens a page; fail at teardown if a page logs a message.

    Also fail if a page requested another host. This needs no route, because OPTIONS
    prevent any page from finding another host.
    """
    contexts, seen = [], []

    def look(
        page: str,
        scheme: str = "light",
        width: int = 1440,
        height: int = 900,
        base: str = address,
        motion: str = "no-preference",
        timed: bool = False,
        script: str = "",
        **options,
    ):
        """Open a tab with a page of the site, or of a copy at `base`.

        - `timed`: stop the clock of the page until a test advances the clock.
        - `script`: JavaScript that runs before the scripts of the page.
        """
        window = {"width": width, "height": height}
        looks = {"viewport": window, "reduced_motion": motion, "color_scheme": scheme}
        context = browser.new_context(**looks, **options)
        contexts.append(context)
        context.set_default_timeout(PATIENCE)

        def refused(request):
            if not request.url.startswith((base, "data:")):
                seen.append(f"request: {request.url}")

        def watch(tab):
            tab.on("console", lambda m: seen.append(f"console {m.type}: {m.text}"))
            tab.on("pageerror", lambda error: seen.append(f"error: {error}"))

        if base.startswith("file:"):  # Over HTTP, the route would block the site.
            context.route("http*://**", lambda route: route.abort())
        context.on("requestfailed", refused)
        context.on("page", watch)
        tab = context.new_page()
        if script:
            tab.add_init_script(script)
        if timed:
            # The theme's timers fail under a stopped clock; replace the theme's script.
            context.route("**/bundle.*.min.js", lambda r: r.fulfill(body=""))
            tab.clock.install()
        tab.goto(base + page, wait_until="load")
        tab.evaluate("document.fonts.ready.then(() => 0)")
        if timed:
            tab.clock.pause_at("2100-01-01")
        return tab

    yield look
    for context in contexts:
        context.close()
    assert not seen, seen


@pytest.fixture
def fresh(look):
    """Return a function that opens the page of a figure and returns its `Figure`."""

    def fresh(
        name: str, size: tuple[int, int] = (1440, 900), place: str = "", **options
    ):
        width, height = size
        tab = look(page_of(name) + place, width=width, height=height, **options)
        return Figure(tab, name)

    return fresh
