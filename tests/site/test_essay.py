"""Test that the picture of the essay follows its text, with fwlab's numbers."""

import re
from itertools import chain, combinations_with_replacement
from math import sqrt

import pytest
import torch
from built import AXE, ROOT, WIDTH, asks
from figure import Figure, number

from fwlab import ops
from fwlab.feature_maps import sum_normalize

PAGE = "memory_essay.html"
TEXT = (ROOT / "docs" / "memory_essay.md").read_text("utf-8")
SECTIONS = dict(
    re.findall(r'<section data-step="(\w+)" markdown>(.*?)</section>', TEXT, re.DOTALL)
)
STEPS = list(SECTIONS)
SIZES = [(1280, 800), (390, 844)]


def vector(*entries: float) -> torch.Tensor:
    return torch.tensor(entries, dtype=torch.float64)


# The essay writes facts in order, each as (name, key, place).
NORA, MAX, CLOSE, PIA = (0.8, 0.6), (-0.6, 0.8), (0.0, 1.0), (0.28, 0.96)
LONG = (1.2, 0.9)
HOME, MAX_AT, MOVED, PIA_AT = (1, 0.5), (-1, 1), (0.5, -1), (0.8, 0.3)
FIRST = [("Nora", NORA, HOME), ("Max", MAX, MAX_AT)]
AGAIN = [*FIRST, ("Nora", NORA, MOVED)]
ALL_FOUR = [*AGAIN, ("Pia", PIA, PIA_AT)]
#: Steps of the essay: the rule, the writes, and the strength of the last write.
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
    """Return the fast weights W that fwlab computes after writing all `facts`."""
    k = torch.stack([vector(*key) for _, key, _ in facts])[None, :, None]
    v = torch.stack([vector(*place) for *_, place in facts])[None, :, None]
    if rule == "sum":
        return ops.sum_rule(k, k, v, normalize=False, return_state=True)[1][0, 0]
    beta = torch.ones(k.shape[:3], dtype=torch.float64)
    beta[0, -1] = last
    return ops.delta_rule(k, k, v, beta, return_state=True, **options)[1][0, 0]


def after(step: str, writes: int | None = None) -> torch.Tensor:
    rule, facts, last = STORY[step]
    whole = writes is None or writes == len(facts)
    return memory(rule, facts[:writes], last if whole else 1)


def reading(step: str, key, writes: int | None = None) -> list[float]:
    return (after(step, writes) @ vector(*key)).tolist()


# --- Numbers ---

NUMBER = r"[−-]?\d+(?:\.\d+)?"


def numbers(text: str) -> list[float]:
    return [number(x) for x in re.findall(rf"(?<![\w.]){NUMBER}", text)]


def told(x: float) -> float:
    """Round a number to at most two decimals, as the essay does."""
    return round(x, 2) + 0.0


def known(step: str) -> tuple[set, set]:
    """Return the vectors and numbers that fwlab computes for a step of the essay."""
    _, facts, last = STORY[step]
    keys, places = ({*x} for x in list(zip(*facts, strict=True))[1:])
    vectors = {*keys, *places, HOME}
    for writes in range(1, len(facts) + 1):
        for key in keys:
            x, y = reading(step, key, writes)
            # Add each retrieved value, half of it (normaliser 2), and its errors.
            vectors |= {(x, y), (x / 2, y / 2)}
            vectors |= {(at[0] - x, at[1] - y) for _, k, at in facts if k == key}
    plain = {*chain(*vectors), *after(step).flatten().tolist(), 0, 1, 2, 1 - 2, last}
    for one, other in combinations_with_replacement([*keys, NORA], 2):
        product = vector(*one).dot(vector(*other)).item()
        plain |= {product, 1 - product, sqrt(product)}
    for key in keys:
        plain.add(sum_normalize(vector(*key)).square().sum().item())
    return {tuple(map(told, x)) for x in vectors}, {*map(told, plain)}


def test_numbers_of_the_text():
    """Every number in the essay agrees with fwlab, and every sum is correct."""
    other = r"<!--.*?-->|^## \d+\.|\\tag\{\w+\}|\]\([^)]*\)"
    other += r"|\bEq\. \d+|\b[Nn]otebook \d+|\bstep \d+"
    sums = 0
    assert [*STORY] == STEPS
    for i, step in enumerate(STEPS, 1):
        assert SECTIONS[step].strip().startswith(f"## {i}. ")
        text = SECTIONS[step].replace("\xa0", " ")
        text = re.sub(other, "", text, flags=re.DOTALL | re.MULTILINE)
        added = rf"({NUMBER}(?: [×+−] {NUMBER})+) = ({NUMBER})"
        for terms, result in re.findall(added, text):
            terms = terms.replace("×", "*").replace("−", "-")
            assert told(eval(terms)) == number(result), (step, terms)
            sums += 1
        vectors, plain = known(step)
        pair = rf"\(({NUMBER}), ({NUMBER})\)"
        found = {(number(x), number(y)) for x, y in re.findall(pair, text)}
        assert found <= vectors, step
        # A minus between two numbers is an operator, not a sign.
        rest = re.sub(r"(?<=[\d)]) − ", " ", re.sub(pair, "", text))
        assert {*numbers(rest)} <= plain, step
    assert sums == 7


def test_the_picture_computes_what_fwlab_does(fresh):
    """The essay's picture and table show fwlab's fast weights and retrieved values."""
    figure = fresh("essay")
    for step, (rule, facts, _) in STORY.items():
        shown, words, table = figure.ask(asks.ESSAY, step)
        W = after(step)
        torch.testing.assert_close(
            torch.tensor(shown["W"]).double(), W, atol=1e-6, rtol=0
        )
        if step == "chunk":  # The writes U solve a triangular system.
            U, K = vector(*shown["solved"]["U"]), [vector(*key) for _, key, _ in facts]
            chunked = memory(rule, facts, implementation="chunked")
            torch.testing.assert_close(U.T @ torch.stack(K), chunked)
        assert shown["rule"].startswith(rule.capitalize())
        assert numbers(words)[-4:] == pytest.approx(W.flatten().tolist(), abs=0.0051)
        rows = []
        for one in shown["people"]:
            (*_, (key, place)) = (x[1:] for x in facts if x[0] == one["name"])
            read = reading(step, key)
            assert one["readback"] == pytest.approx(read, abs=1e-9)
            rows += [*place, *([] if step == "pair" else read)]
        if step in ("long", "unit"):
            read = [reading(step, facts[0][1], n) for n in (1, 2, 3, 4)]
            rows = [x for n in range(4) for x in (n + 1, *HOME, *read[n])]
        assert numbers(table) == pytest.approx(rows, abs=0.0051)


# --- Scrolling ---


def settle(figure, step: str):
    figure.until(f"state().step === '{step}' && !state().moving")


@pytest.mark.parametrize(
    ("size", "motion"),
    [(SIZES[0], "reduce"), (SIZES[1], "reduce"), (SIZES[0], "no-preference")],
)
def test_the_picture_follows_the_text(fresh, size, motion):
    """While a reader scrolls, the picture stays in view beside or above the text.

    With reduced motion, nothing is animated. axe-core finds no violation in any
    step.
    """
    figure = fresh("essay", size, motion=motion)
    down = STEPS if motion == "reduce" else STEPS[:2]
    settle(figure, STEPS[0])
    figure.tab.evaluate(AXE.read_text("utf-8"))
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
        # The heading and the first lines of the text are visible with the picture.
        if size[0] < 500:
            assert bottom - top <= 0.45 * size[1]
            assert at["heading"][1] >= bottom - 1 and at["text"][3] <= size[1]
        else:
            assert at["heading"][2] <= left and at["heading"][1] >= at["header"]
        assert at["text"][1] < size[1]
        assert at["current"] == [step]
        if step in ("overlap", "third", "long", "chunk"):
            assert figure.tab.evaluate(asks.RULES, {"of": "#figure-essay"}) == [], step
            assert figure.tab.evaluate(WIDTH) <= size[0]
    assert (figure.ask("moved") == 0) == (motion == "reduce")


def test_a_link_to_a_step_shows_it(fresh):
    figure = fresh("essay", place="#6-look-up-compare-write")
    settle(figure, "delta")
    figure.ask("location.hash = '#8-two-dimensions-two-keys'")
    settle(figure, "third")


def test_by_keyboard_quick_presses_add_up(fresh):
    """Each press of a button moves one step, even while the page still scrolls."""
    figure = fresh("essay", SIZES[0])
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


# --- No scripts, print, low windows ---


def test_without_scripts_each_step_has_a_picture(look):
    figure = Figure(look(PAGE, java_script_enabled=False), "essay")
    for width, height in SIZES:
        figure.tab.set_viewport_size({"width": width, "height": height})
        # The picture of the first step is the static picture of the figure.
        assert figure.ask(asks.PICTURES) == [*STEPS[1:], "moving"]


def test_on_paper_and_in_a_low_window_each_step_has_a_picture(fresh):
    """In print and at 200 % zoom, each step of the essay has a separate picture."""
    figure = fresh("essay")
    assert figure.ask(asks.PICTURES) == ["moving"]
    figure.tab.emulate_media(media="print")
    assert figure.ask(asks.PICTURES) == STEPS
    figure.tab.emulate_media(media="screen")
    figure.tab.set_viewport_size({"width": 640, "height": 400})
    assert figure.ask(asks.PICTURES) == STEPS
