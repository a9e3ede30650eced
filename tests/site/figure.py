"""One driver for all figures: what a reader does with one, and what it shows.

A page is opened once for each way of looking at it. For each test, its figure
begins again where it is: a tenth of the cost of opening a page.
"""

import functools
import json
import re
from base64 import b64decode
from io import BytesIO

import pytest
from built import PATIENCE, asks, until
from keep_figures import address as page_of
from matplotlib.image import imread

#: Their scripts listen to the whole window, also after their figure has gone, or begin
#: with what the address holds.
LISTEN = {"essay", "forgets", "write"}
#: What an expression about the `root` of a figure may use.
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


def parted(still: str) -> tuple[list[str], list[str], list]:
    """Return its marks and texts, numbers, and pixels of its images, from 0 to 255."""
    data = r"data:image/png;base64,([\w+/=]+)"
    images = [
        255 * imread(BytesIO(b64decode(coded))) for coded in re.findall(data, still)
    ]
    parts = re.split(r"([−-]?\d+(?:\.\d+)?)", re.sub(data, "image", still).strip())
    return parts[::2], parts[1::2], images


def near(one: str, other: str) -> bool:
    """Say whether numbers are the same, or neighbours of as many decimals.

    Processors round `exp` differently, and what is shown may be on the edge.
    """
    decimals = max(len(x.partition(".")[2]) for x in (one, other))
    off = abs(number(one) - number(other))
    return off < 1.1 * 10**-decimals if decimals else one == other


def of_figure(name: str) -> str:
    """Return the rules of accessibility for a figure alone."""
    whole = "axe.run(document"
    assert asks.RULES.count(whole) == 1, "the rules of accessibility run in another way"
    return asks.RULES.replace(whole, f"axe.run('#figure-{name}'")


class Figure:
    """A figure in a tab."""

    def __init__(self, tab, name: str):
        self.tab, self.name = tab, name
        self.root = tab.locator(f"#figure-{name}")
        self.css, self.role = self.root.locator, self.root.get_by_role
        self.text = tab.get_by_label("Text to read")

    # What it shows

    def ask(self, expression: str, given=None):
        """Return the value of an expression in JavaScript of its `root` and `given`.

        Many questions in one are much cheaper than one by one.
        """
        ask = f"(root, given) => {{ {SHORT} return {expression}; }}"
        return self.root.evaluate(ask, given)

    def state(self) -> dict:
        return self.ask("state()")

    def words(self) -> str:
        return self.ask("words()")

    def texts(self, css: str) -> list[str]:
        return self.ask("texts(given)", css)

    def wide(self) -> int:
        return self.tab.evaluate("document.documentElement.scrollWidth")

    def focused(self) -> str:
        return self.tab.evaluate("document.activeElement.textContent")

    def fetched(self) -> list[str]:
        """List the files of weights that its page has fetched."""
        entries = "performance.getEntriesByType('resource').map((e) => e.name)"
        names = [n for n in self.tab.evaluate(entries) if n.endswith(".safetensors")]
        return [name.partition("figures/")[2] for name in names]

    # What a reader does

    def press(self, name: str):
        self.role("button", name=name, exact=True).click()

    def choose(self, name: str):
        self.role("radio", name=name, exact=True).check()

    def slider(self, label: str):
        # Its value may be a part of its name.
        return self.role("slider", name=re.compile(f"^{re.escape(label)}"))

    def slide(self, label: str, value: float):
        self.slider(label).fill(str(value))

    def drag(self, handle, x: float, y: float):
        """Move the middle of a handle to a point, in units of its drawing."""
        handle.scroll_into_view_if_needed()
        box = handle.bounding_box()
        to = handle.evaluate(
            """(handle, [x, y]) => {
              const matrix = handle.ownerSVGElement.getScreenCTM();
              const point = new DOMPoint(x, y).matrixTransform(matrix);
              return [point.x, point.y];
            }""",
            [x, y],
        )
        mouse = self.tab.mouse
        mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
        mouse.down()
        mouse.move(*to, steps=3)
        mouse.up()

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
        """Return what fetches the model; at home, the change that is one press away."""
        if self.name == "live":
            return self.css("button").first
        return self.role("button", name="Start the model")

    def start(self):
        """Wait for the model that it runs; that of the home page comes at once."""
        if self.name == "live":
            self.until("state().answers !== null")
        else:
            self.starter().click()
            self.text.wait_for()


def watched(browser, base: str, seen: list[str], **options):
    """Open a context whose tabs complain into `seen`.

    Also if they ask anybody but `base`, whom OPTIONS let no page find. No route is set,
    since a browser keeps neither files nor compiled scripts beside one.
    """
    context = browser.new_context(**options)
    context.set_default_timeout(PATIENCE)

    def refused(request):
        if not request.url.startswith((base, "data:")):
            seen.append(f"request: {request.url}")

    def watch(tab):
        tab.on("console", lambda m: seen.append(f"console {m.type}: {m.text}"))
        tab.on("pageerror", lambda error: seen.append(f"error: {error}"))

    if base.startswith("file:"):  # else routes that a test sets later see no file
        context.route("http*://**", lambda route: route.abort())
    context.on("requestfailed", refused)
    context.on("page", watch)
    return context


class Tabs:
    """The tabs that are open, and what they complain about.

    Another page in one of them is half the cost of a page in a new one.
    """

    #: This many at a time: each takes memory.
    MOST = 4

    def __init__(self, browser, address: str):
        self.browser, self.address = browser, address
        self.tabs: dict[tuple, object] = {}  # the most recent comes last
        self.seen: list[str] = []

    def kept(self, key, base: str, motion: str, scheme: str, **options):
        """Return the tab of this key, or an empty one; and whether it is that.

        With the key None, nobody else gets it.
        """
        tab = self.tabs.pop(key, None)
        new = tab is None or tab.is_closed()
        if new:
            context = watched(self.browser, base, self.seen, **options)
            tab = context.new_page()
            tab.on("crash", functools.partial(self.forget, context))
        if key:
            self.tabs[key] = tab
        while len(self.tabs) > self.MOST:
            self.tabs.pop(next(iter(self.tabs))).context.close()
        tab.emulate_media(reduced_motion=motion, media="null", color_scheme=scheme)
        tab.mouse.move(0, 0)
        return tab, new

    def fresh(
        self,
        name: str,
        size: tuple[int, int] = (1440, 900),
        motion: str = "no-preference",
        place: str = "",
        scheme: str = "light",
        touch: bool = False,
        timed: bool = False,
    ) -> Figure:
        """Return the figure as it begins.

        - `timed`: time stands still until a test advances it.
        """
        page = page_of(name)
        key = page, touch, timed
        tab, new = self.kept(key, self.address, motion, scheme, has_touch=touch)
        tab.set_viewport_size({"width": size[0], "height": size[1]})
        if new and timed:
            # In such a time, timers of the theme fail.
            tab.context.route("**/bundle.*.min.js", lambda r: r.fulfill(body=""))
            tab.clock.install()
        if new or name in LISTEN or place:
            tab.goto("about:blank")  # what differs after "#" alone is no new page
            tab.goto(self.address + page + place, wait_until="load")
            tab.evaluate("document.fonts.ready.then(() => 0)")
            if timed:
                tab.clock.pause_at("2100-01-01")
        else:
            # The theme follows, then the figure begins in these colours.
            theme = {"light": "default", "dark": "slate"}[scheme]
            tab.locator(f"body[data-md-color-scheme={theme}]").wait_for()
            tab.evaluate(asks.ANEW, name)
        return Figure(tab, name)

    def leave(self, tab):
        """Forget all of a page but what the browser has of its files."""
        if tab not in self.tabs.values():  # of one test, or crashed
            return tab.context.close()
        tab.unroute_all()
        for other in tab.context.pages:
            if other is not tab:
                other.close()
        tab.evaluate("{ try { localStorage.clear(); } catch {} }")
        tab.goto("about:blank")

    def forget(self, context, *_):
        self.tabs = {k: t for k, t in self.tabs.items() if t.context is not context}


@pytest.fixture(scope="session")
def tabs(browser, address):
    return Tabs(browser, address)


@pytest.fixture
def fresh(tabs):
    """Open a figure as it begins; complain at the end of a test about all it saw."""
    yield tabs.fresh
    seen = tabs.seen.copy()
    tabs.seen.clear()
    assert not seen, seen


@pytest.fixture
def look(tabs, address):
    """Open pages; complain at the end of each test about all it saw."""
    opened = []

    def look(
        page: str,
        scheme: str = "light",
        width: int = 1440,
        height: int = 900,
        base: str = address,
        motion: str = "no-preference",
        alone: bool = False,
        **options,
    ):
        """Open a tab with a page of the site, or of a copy at `base`.

        - `alone`: no other test has it, for scripts that stay in it.
        """
        key = None if alone else (len(opened), base, *sorted(options.items()))
        tab, _ = tabs.kept(key, base, motion, scheme, **options)
        opened.append(tab)
        tab.set_viewport_size({"width": width, "height": height})
        tab.goto(base + page, wait_until="load")
        tab.evaluate("document.fonts.ready.then(() => 0)")
        return tab

    yield look
    for tab in opened:
        tabs.leave(tab)
    seen = tabs.seen.copy()
    tabs.seen.clear()
    assert not seen, seen
