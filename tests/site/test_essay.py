"""The essay: its picture follows the text, and both have fwlab's numbers."""

import re
from math import hypot

import pytest
import torch
from built import ROOT, asks
from figure import Figure, number, of_figure
from test_course import article, targets
from test_pages import ALL, AXE

from fwlab import ops
from fwlab.feature_maps import sum_normalize

PAGE = "memory_essay.html"
TEXT = (ROOT / "docs" / "memory_essay.md").read_text("utf-8")
SECTIONS = dict(
    re.findall(r'<section data-step="(\w+)" markdown>(.*?)</section>', TEXT, re.DOTALL)
)
STEPS = list(SECTIONS)
SIZES = [(1280, 800), (390, 844)]


CHUNKED = {"implementation": "chunked"}


def vector(*entries: float) -> torch.Tensor:
    return torch.tensor(entries, dtype=torch.float64)


# What the essay tells: (who, key, place), in order.
NORA, MAX, CLOSE, PIA = (0.8, 0.6), (-0.6, 0.8), (0.0, 1.0), (0.28, 0.96)
LONG = (1.2, 0.9)
HOME, MAX_AT, MOVED, PIA_AT = (1, 0.5), (-1, 1), (0.5, -1), (0.8, 0.3)
FIRST = [("Nora", NORA, HOME), ("Max", MAX, MAX_AT)]
AGAIN = [*FIRST, ("Nora", NORA, MOVED)]
ALL_FOUR = [*AGAIN, ("Pia", PIA, PIA_AT)]
#: By step: the rule, what is written, and the strength of the last write.
STORY = {
    "pair": ("sum", FIRST[:1], 1),
    "read": ("sum", FIRST[:1], 1),
    "second": ("sum", FIRST, 1),
    "overlap": ("sum", [FIRST[0], ("Max", CLOSE, MAX_AT)], 1),
    "moved": ("sum", AGAIN, 1),
    "delta": ("delta", AGAIN, 1),
    "strength": ("delta", AGAIN, 0.8),
    "third": ("delta", ALL_FOUR, 1),
    "long": ("delta", [("Nora", LONG, HOME)] * 4, 1),
    "unit": ("delta", [("Nora", NORA, HOME)] * 4, 1),
    "chunk": ("delta", AGAIN, 1),
}


def memory(rule: str, facts: list, last: float = 1, **options) -> torch.Tensor:
    """fwlab's W after all writes."""
    k = torch.stack([vector(*key) for _, key, _ in facts])[None, :, None]
    v = torch.stack([vector(*place) for *_, place in facts])[None, :, None]
    if rule == "sum":
        _, W = ops.sum_rule(k, k, v, normalize=False, return_state=True)
    else:
        beta = torch.ones(k.shape[:3], dtype=torch.float64)
        beta[0, -1] = last
        _, W = ops.delta_rule(k, k, v, beta, return_state=True, **options)
    return W[0, 0]


def after(step: str, writes: int | None = None) -> torch.Tensor:
    rule, facts, last = STORY[step]
    whole = writes is None or writes == len(facts)
    return memory(rule, facts[:writes], last if whole else 1)


def reading(step: str, key, writes: int | None = None) -> list[float]:
    return (after(step, writes) @ vector(*key)).tolist()


def product(a, b) -> float:
    return vector(*a).dot(vector(*b)).item()


# Numbers


def numbers(text: str) -> list[float]:
    written = re.findall(r"(?<![\w.])[−-]?\d+(?:\.\d+)?", text)
    return [number(x) for x in written]


def told(x) -> str:
    """Write a number, or a vector, as the essay does: two decimals at most."""
    if not isinstance(x, int | float):
        return f"({', '.join(map(told, x))})"
    text = f"{x:.2f}".rstrip("0").rstrip(".").replace("-", "−")
    return "0" if text == "−0" else text


def normalised() -> list[float]:
    """Return what linear attention reads after Nora has moved."""
    k, v = (vector(*x)[None, None, None].repeat(1, 3, 1, 1) for x in (NORA, MOVED))
    k[0, 1, 0], v[0, 0, 0], v[0, 1, 0] = vector(*MAX), vector(*HOME), vector(*MAX_AT)
    return ops.sum_rule(k, k, v, normalize=True)[0, -1, 0].tolist()


def by_sum(key) -> list[float]:
    """Return what a key reads after one write, if keys are divided by their sum."""
    part = sum_normalize(vector(*key))
    return (memory("delta", [("Nora", part.tolist(), HOME)]) @ part).tolist()


def sentences() -> dict[str, str]:
    """Return all of each section that has numbers, with those that fwlab computes."""
    n, W, read = told, after("pair").tolist(), reading
    (x, y), (a, b), (ma, mb) = HOME, NORA, MAX
    wrote = (after("delta") - after("delta", 2)) @ vector(*NORA)
    square = product(LONG, LONG)
    overlap = product(CLOSE, NORA)
    return {
        "pair": f"""Nora is at the point {n(HOME)} of a map
            Hers is {n(NORA)}, and its length is {n(hypot(*NORA))}
            Its first entry is {n(x)} × {n(a)} = {n(W[0][0])};
            the one below is {n(y)} × {n(a)} = {n(W[1][0])}.""",
        "read": f"""The first row gives {n(W[0][0])} × {n(a)} + {n(W[0][1])} × {n(b)} = {n(read("read", NORA)[0])},
            and the second {n(W[1][0])} × {n(a)} + {n(W[1][1])} × {n(b)} = {n(read("read", NORA)[1])}.
            an arrow of length {n(hypot(*NORA))} has $k \\cdot k = {n(product(NORA, NORA))}$""",
        "second": f"""Max is at {n(MAX_AT)}.
            His key, {n(MAX)}, is at a right angle
            Nora's key still reads {n(read("second", NORA))}
            The first product is {n(product(NORA, NORA))} as before,
            the second is {n(ma)} × {n(a)} + {n(mb)} × {n(b)} = {n(product(MAX, NORA))}.""",
        "overlap": f"""towards Nora's, to {n(CLOSE)}
            is no longer {n(product(MAX, NORA))}, but {n(overlap)}:
            So {n(overlap)} of his place leaks
            v_N + {n(overlap)}\\, v_M
            That is {n(HOME)} + {n(overlap)} × {n(MAX_AT)} = {n(read("overlap", NORA))},
            Max's key reads {n(read("overlap", CLOSE))}, since {n(overlap)} of Nora's""",
        "moved": f"""Nora moves to {n(MOVED)}
            Her key reads {n(HOME)} + {n(MOVED)} = {n(read("moved", NORA))},
            a normaliser, which here is {n(read("moved", NORA)[0] / normalised()[0])}, the number
            That gives {n(normalised())}, halfway""",
        "delta": f"""Nora's key holds {n(read("delta", NORA, 2))}, and it should hold {n(MOVED)}.
            the difference, {n(wrote.tolist())}:
            her key reads {n(read("delta", NORA))}, and""",
        "strength": f"""a number between 0 and 1, says
            With $\\beta = 0$ nothing changes, and $\\beta = 1$ is the step before.
            Here $\\beta = {n(STORY["strength"][2])}$, and Nora's key reads {n(read("strength", NORA))}:
            {n(STORY["strength"][2])} of the way""",
        "third": f"""With $\\beta = {n(STORY["third"][2])}$ again, Pia arrives at {n(PIA_AT)}.
            Hers, {n(PIA)}, overlaps with Nora's by {n(product(PIA, NORA))} and with Max's by {n(product(PIA, MAX))}.
            Nora's key reads {n(read("third", NORA))}, and
            Max's reads {n(read("third", MAX))}.""",
        "long": f"""every key had length {n(hypot(*MAX))}.
            only Nora at {n(HOME)}, and
            make her key {n(LONG[0] / a)} times as long: {n(LONG)}.
            $k \\cdot k = {n(square)}$, so
            her key reads {n(read("long", LONG, 1)[0] / x)} times the right place.
            $$1 - \\beta\\, (k \\cdot k)$$
            which is 1 − {n(square)} = {n(1 - square)}, so
            At length $\\sqrt 2$ the factor would be {n(1 - 2)}, and""",
        "unit": f"""Give every key length {n(hypot(*NORA))}
            $k \\cdot k = {n(product(NORA, NORA))}$, and
            the factor is 1 − {n(product(NORA, NORA))} = {n(1 - product(NORA, NORA))}.
            with Nora's long key, {n(by_sum(LONG)[0] / x)} of it.""",
        "chunk": f"""The third row of $A$ begins with {n(product(NORA, NORA))}:
            so {n(MOVED)} − {n(HOME)} = {n(wrote.tolist())} is written""",
    }


def test_numbers_of_the_text():
    """Each is where fwlab's is, and none stands elsewhere."""
    other = r"<!--.*?-->|^## \d+\.|\\tag\{\w+\}|\]\([^)]*\)"
    other += r"|\bEq\. \d+|\b[Nn]otebook \d+|\bstep \d+"
    computed = sentences()
    assert [*computed] == [*STORY] == STEPS
    for i, step in enumerate(STEPS, 1):
        assert SECTIONS[step].strip().startswith(f"## {i}. ")
    for step, lines in computed.items():
        text = SECTIONS[step].replace("\xa0", " ")
        for line in map(str.strip, lines.splitlines()):
            before, found, text = text.partition(line)
            assert found, f"{step}: expected {line!r}, in this order"
            before = re.sub(other, "", before, flags=re.DOTALL | re.MULTILINE)
            assert numbers(before) == [], step
        assert numbers(re.sub(other, "", text, flags=re.DOTALL)) == [], step


def test_the_picture_computes_what_fwlab_does(fresh):
    """The memory, all readings, and the words; the table of a step has them."""
    figure = fresh("essay")
    for step, (rule, facts, _) in STORY.items():
        shown, words, table = figure.ask(asks.ESSAY, step)
        W = after(step)
        torch.testing.assert_close(
            torch.tensor(shown["W"]).double(), W, atol=1e-6, rtol=0
        )
        if step == "chunk":  # the triangular system, whose solution is written
            A, U, V = (vector(*shown["solved"][name]) for name in "AUV")
            K = torch.stack([vector(*key) for _, key, _ in facts])
            torch.testing.assert_close(A, (K @ K.T).tril(-1))
            torch.testing.assert_close(V, vector(*(place for *_, place in facts)))
            torch.testing.assert_close(U.T @ K, memory(rule, facts, **CHUNKED))
        assert shown["rule"].startswith(rule.capitalize())
        assert numbers(words)[-4:] == pytest.approx(W.flatten().tolist(), abs=0.0051)
        now = {name: (key, place) for name, key, place in facts}
        rows = []
        for one in shown["people"]:
            key, place = now.pop(one["name"])
            assert one["key"] == pytest.approx(key) and one["place"] == list(place)
            assert one["readback"] == pytest.approx(reading(step, key), abs=1e-9)
            rows += [*place, *([] if step == "pair" else one["readback"])]
        assert not now
        if step in ("long", "unit"):
            read = [reading(step, facts[0][1], n) for n in (1, 2, 3, 4)]
            assert shown["again"] == [pytest.approx(x, abs=1e-9) for x in read]
            rows = [x for n in range(4) for x in (n + 1, *HOME, *read[n])]
        assert numbers(table) == pytest.approx(rows, abs=0.0051)


# Scrolling


def settle(figure, step: str):
    figure.until(f"state().step === '{step}' && !state().moving")


def scroll(figure, key: str, step: str):
    """Press again a key that comes while the page still scrolls: it may be lost."""
    for _ in range(100):
        figure.tab.keyboard.press(key)
        figure.tab.wait_for_timeout(100)
        if figure.state()["step"] == step:
            break
    settle(figure, step)


@pytest.mark.parametrize(
    ("size", "motion"),
    [(SIZES[0], "reduce"), (SIZES[1], "reduce"), (SIZES[0], "no-preference")],
)
def test_the_picture_follows_the_text(fresh, size, motion):
    """Scroll down and up again: it stays in the window, beside the text or above it.

    It moves only for those who have not asked for rest: for them, two steps.
    """
    figure = fresh("essay", size, motion)
    down = STEPS if motion == "reduce" else STEPS[:2]
    settle(figure, STEPS[0])
    figure.ask(asks.WATCH)
    for step in [*down, *down[-2::-3]]:
        heading = figure.tab.locator(f"[data-step={step}] h2")
        heading.evaluate("(e) => e.scrollIntoView({ behavior: 'instant' })")
        settle(figure, step)
        at = figure.ask(asks.PLACES, step)
        if motion == "reduce":
            assert at["animations"] == 0
        left, top, right, bottom = at["figure"]
        assert top >= at["header"] - 1 and at["picture"][3] <= size[1], step
        assert left >= 0 and right <= size[0]
        # Heading and beginning of the text are seen with it.
        if size[0] < 500:
            assert bottom - top <= 0.45 * size[1]
            assert at["heading"][1] >= bottom - 1 and at["text"][3] <= size[1]
        else:
            assert at["heading"][2] <= left and at["heading"][1] >= at["header"]
        assert at["text"][1] < size[1]
        assert at["current"] == [step]
    assert (figure.ask("moved") == 0) == (motion == "reduce")


def test_a_link_to_a_step_shows_it(fresh):
    figure = fresh("essay", place="#6-look-up-compare-write")
    settle(figure, "delta")
    figure.ask("location.hash = '#8-two-dimensions-two-keys'")
    settle(figure, "third")


@pytest.mark.parametrize("motion", ["no-preference", "reduce"])
def test_by_keyboard_quick_presses_add_up(fresh, motion):
    """However far the page has scrolled in between; the usual keys scroll, too."""
    figure = fresh("essay", SIZES[0], motion)
    press = "(e, times) => { for (let i = 0; i < times; i++) e.click(); }"
    following, previous = (
        figure.tab.get_by_role("button", name=f"{which} step")
        for which in ("Next", "Previous")
    )
    assert previous.is_disabled()
    following.focus()
    for _ in range(4):
        figure.tab.keyboard.press("Enter")
    settle(figure, STEPS[4])
    previous.press("Space")
    previous.evaluate(press, 2)
    settle(figure, STEPS[1])
    # After a scroll, presses count from there.
    figure.until("state().goal === null")
    previous.evaluate("(e) => e.blur()")
    scroll(figure, "End", STEPS[-1])
    assert following.is_disabled()
    figure.until("state().goal === null")
    previous.evaluate(press, 3)
    settle(figure, STEPS[-4])
    scroll(figure, "Home", STEPS[0])


# Without scripts, on paper, in a low window


def test_without_scripts_each_step_has_a_picture(look):
    figure = Figure(look(PAGE, java_script_enabled=False), "essay")
    for width, height in SIZES:
        figure.tab.set_viewport_size({"width": width, "height": height})
        # The picture of the first step is that of the figure.
        assert figure.ask(asks.PICTURES) == [*STEPS[1:], "moving"]
    assert figure.tab.locator(".fw-essay button").count() == 0


def test_on_paper_and_in_a_low_window_each_step_has_a_picture(fresh):
    """At 200 % zoom nothing may cover the text."""
    figure = fresh("essay")
    assert figure.ask(asks.PICTURES) == ["moving"]
    figure.tab.emulate_media(media="print")
    assert figure.ask(asks.PICTURES) == STEPS
    figure.tab.emulate_media(media="screen")
    figure.tab.set_viewport_size({"width": 640, "height": 400})
    assert figure.ask(asks.PICTURES) == STEPS


# The page


def test_every_step_is_accessible(fresh):
    figure = fresh("essay", SIZES[1], "reduce")
    figure.tab.evaluate(AXE.read_text("utf-8"))
    for step in ("overlap", "third", "long", "chunk"):
        figure.tab.locator(f"[data-step={step}]").evaluate("(e) => e.scrollIntoView()")
        settle(figure, step)
        assert figure.tab.evaluate(of_figure("essay"), ALL) == [], step
        assert figure.wide() <= SIZES[1][0]


def test_the_course_begins_with_it(site):
    for page in ("index.html", "course.html", "notebooks/00_start_here.html"):
        assert PAGE in targets(article(site, page), page), page
    end = article(site, PAGE).partition("</section>\n</div>")[2]
    first = targets(end, PAGE)[0]
    assert first == "notebooks/00_start_here.html"
