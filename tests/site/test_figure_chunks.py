"""Loop and chunks computed by the figure are those of fwlab, forward and backward.

fwlab's naive version goes through the same sequence chunk by chunk, and
autograd back; what the efficient version saves is counted, not assumed.
"""

import re
from itertools import chain

import pytest
import torch
from figure import Figure, number

from fwlab import ops
from fwlab.ops import chunks

FIGURE = "#figure-chunks"
T, D = 12, 2
SIZES = (3, 4, 6)
#: Units of the picture: a pair, and where the first is.
CELL, LEFT, TOP = 16, 20, 196
#: Ticks of the loop: a look-up and a write per step.
RACE = 2 * T
#: Milliseconds of a tick.
TICK = 300
STATE = f"document.querySelector('{FIGURE}').figure.state()"


@pytest.fixture
def tab(fresh):
    """Where nothing moves by itself."""
    return fresh("chunks", motion="reduce").tab


@pytest.fixture
def race(fresh):
    """From its start, in a time that the tests advance."""
    tab = fresh("chunks", timed=True).tab
    # Whether it has begun by itself, or not yet: the slider stops it.
    slider = tab.locator(f"{FIGURE} input[type=range]")
    slider.press("End")
    slider.press("Home")
    press(tab, "Play")
    return tab


def state(tab) -> dict:
    return tab.evaluate(STATE)


def words(tab) -> str:
    return tab.inner_text(f"{FIGURE} .fw-words")


def press(tab, name: str):
    tab.locator(FIGURE).get_by_role("button", name=name).click()


def choose(tab, size: int):
    tab.locator(FIGURE).get_by_label(str(size), exact=True).check()


def close(found, wanted):
    found = torch.tensor(found, dtype=torch.float64)
    torch.testing.assert_close(found, wanted.detach(), atol=1e-9, rtol=0)


def inputs(shown: dict) -> list[torch.Tensor]:
    """q, k, v and beta, as fwlab takes them."""
    out = []
    for name in ("queries", "keys", "values", "betas"):
        x = torch.tensor(shown[name], dtype=torch.float64)
        x = x[None, :, None]
        out.append(x.requires_grad_())
    return out


@pytest.mark.parametrize("size", SIZES)
def test_numbers(tab, size):
    choose(tab, size)
    shown = state(tab)
    assert shown["C"] == size
    q, k, v, beta = inputs(shown)
    for rows in (k, q):
        assert torch.allclose(rows.norm(dim=-1), torch.ones(1, T, 1).double())

    W, states, outputs, errors = torch.zeros(1, 1, D, D).double(), [], [], []
    W.requires_grad_()
    states.append(W)
    for start in range(0, T, size):
        steps = slice(start, start + size)
        before = W
        y, W = ops.delta_rule(
            *(x[:, steps] for x in (q, k, v, beta)),
            state=before,
            return_state=True,
            implementation="naive",
        )
        # Without the last reading of this chunk, which is of the same tensor.
        W = W.clone()
        W.retain_grad()
        states.append(W)
        outputs.append(y)
        # What a key holds before it writes is read by a query that is this
        # key and a write of strength 0.
        for i in range(start, start + size):
            held = slice(i, i + 1)
            retrieved, _ = ops.delta_rule(
                k[:, held],
                k[:, held],
                v[:, held],
                0 * beta[:, held],
                state=before,
                return_state=True,
                implementation="naive",
            )
            errors.append((v[:, held] - retrieved)[0, :, 0])
            _, before = ops.delta_rule(
                *(x[:, held] for x in (q, k, v, beta)),
                state=before,
                return_state=True,
                implementation="naive",
            )
    y, E = torch.cat(outputs, 1), torch.cat(errors)
    rows = shown["rows"]
    # The loop of the figure goes through the steps by itself.
    for name, wanted in (("y", y[0, :, 0]), ("held", v[0, :, 0] - E)):
        close([step[name] for step in shown["loop"]], wanted)
    close(shown["loop"][-1]["W"], W[0, 0])
    close(rows["Y"], y[0, :, 0])
    close(rows["E"], E)
    close(rows["U"], beta[0, :] * E)
    close(shown["W"], torch.stack(states)[:, 0, 0])

    keys, queries = k[0, :, 0].detach(), q[0, :, 0].detach()
    for c in range(T // size):
        steps = slice(c * size, (c + 1) * size)
        K, b = keys[steps], beta[0, steps].detach()
        A = (b * (K @ K.T)).tril(-1)
        close(shown["inverseOf"][c], torch.linalg.inv(torch.eye(size) + A))
        close(shown["scores"][c], (queries[steps] @ K.T).tril())

    y.pow(2).sum().div(2).backward()
    gradients = [torch.zeros(D, D) if W.grad is None else W.grad[0, 0] for W in states]
    close(shown["dStates"], torch.stack(gradients).double())
    close(rows["dQ"], q.grad[0, :, 0])
    close(rows["dK"], k.grad[0, :, 0])
    close(rows["dV"], v.grad[0, :, 0])
    close(rows["dBeta"], beta.grad[0, :, 0])


def saved(implementation: str, given: list[torch.Tensor]) -> list[torch.Tensor]:
    found = []

    def keep(x):
        # Detached: a node that keeps its own output is never freed.
        found.append(x.detach())
        return len(found) - 1

    with torch.autograd.graph.saved_tensors_hooks(keep, found.__getitem__):
        ops.delta_rule(*given, implementation=implementation)
    return found


def whole(text: str) -> int:
    return int(re.sub(r"\D", "", text))


@pytest.mark.parametrize("size", SIZES)
def test_account(tab, size, monkeypatch):
    choose(tab, size)
    shown = state(tab)
    here = shown["counts"]["here"]
    given = inputs(shown)
    monkeypatch.setattr(chunks, "LENGTH", size)
    kept = sum(x.numel() for x in saved("efficient", given))
    assert kept == here["inputs"] + here["chunked"]["kept"]
    # One state per step, and the empty one before them.
    states = {
        x.data_ptr(): x.numel() for x in saved("naive", given) if x.shape[-2:] == (D, D)
    }
    assert sum(states.values()) - D * D == here["naive"]["kept"]

    for time, d, c, counts in (
        (T, D, size, here),
        (4096, 64, 64, shown["counts"]["large"]),
    ):

        def products(c, time=time, d=d) -> int:
            """Both products of keys, (d1) to (d3), and the inverse: its
            entry i, j is a sum over what lies between j and i."""
            solve = sum((i - 1) * (c - i) for i in range(1, c))
            pairs, through = 2 * c * c * d, 2 * c * d * d
            return time // c * (2 * pairs + through + c * d * d + solve)

        assert counts == {
            "inputs": time * (3 * d + 1),
            "naive": {
                "kept": time * d * d,
                "multiplications": time * 3 * d * d,
                "order": time,
            },
            "full": {
                "kept": 2 * time * time,
                "multiplications": products(time),
                "order": 1,
            },
            "chunked": {
                "kept": time // c * d * d,
                "multiplications": products(c),
                "order": time // c,
            },
        }
    table = tab.locator(f"{FIGURE} .fw-account")
    for name in ("naive", "full", "chunked"):
        cells = table.locator(f"[data-account={name}] td").all_text_contents()
        assert [whole(cell) for cell in cells] == list(here[name].values())
    assert f"chunks of {size}" in table.inner_text()
    assert f"{here['inputs']} inputs" in table.inner_text()
    # The same account for a real size stands on the page.
    large = shown["counts"]["large"]
    page = tab.inner_text(".md-content")
    for key, name in (
        ("naive", "step by step"),
        ("full", "full triangle"),
        ("chunked", "chunks of 64"),
    ):
        kept, multiplied, order = large[key].values()
        wanted = f"{kept:,} kept, {multiplied:,} multiplications, {order:,} in order"
        assert f"{name}: {wanted}" in page
    assert f"{large['inputs']:,}" in page


def expected(size: int) -> list[tuple[str, int, set[str]]]:
    """Of each tick the name of its stage, its chunk, and the blocks that are lit."""
    n = T // size
    every = {f"diagonal {c}" for c in range(1, n + 1)}
    before = {f"left {c}" for c in range(2, n + 1)}
    out = [("start", 1, set()), ("inverse", 1, every)]
    for c in range(1, n + 1):
        left, below = {f"left {c}"} & before, {f"below {c}"} if c < n else set()
        out += [("errors", c, {f"diagonal {c}"} | left), ("state", c, below)]
    # The chunks wait for the loop.
    out += [("outputs", n, every | before)] * (RACE + 1 - len(out))
    out.append(("recompute", n, every | before))
    for c in range(n, 0, -1):
        below = {f"below {c}"} if c < n else set()
        out.append(("backward", c, {f"diagonal {c}"} | below))
    return [*out, ("gradients", 1, every | before)]


def cells(size: int, block: str) -> tuple[int, int, int, int]:
    """First row, first column, rows and columns of pairs, from 0."""
    kind, c = block.split()
    end = int(c) * size
    start = end - size
    return {
        "diagonal": (start, start, size, size),
        "left": (start, 0, size, start),
        "below": (end, start, T - end, size),
    }[kind]


def costs(size: int, tick: int) -> dict[str, dict[str, int]]:
    """What the race has cost after a tick: matrix products by their shapes, (rows,
    terms of a sum, columns), and states that are kept."""
    n = T // size
    solve = sum((i - 1) * (size - i) for i in range(1, size))
    chunked = {
        "start": [],
        "inverse": n * [(size, D, size), (1, 1, solve)],
        "errors": [(size, D, D), (size, size, D)],
        "state": [(D, size, D)],
        "outputs": n * [(size, D, size), (size, D, D), (size, size, D)],
    }
    names = [name for name, *_ in expected(size)[: RACE + 1]]
    past = names[: min(tick, names.index("outputs")) + 1]
    written = past.count("state")
    ticks = min(tick, RACE)
    # A step looks up; then it writes, and reads.
    products = [(1, D, D), (D, 1, D), (1, D, D)] * (ticks // 2) + [(1, D, D)] * (
        ticks % 2
    )
    total = {
        "naive": products,
        "chunked": [one for name in past for one in chunked[name]],
    }
    kept = {"naive": ticks // 2, "chunked": min(written + (len(past) > 1), n)}
    order = {"naive": ticks // 2, "chunked": written}
    return {
        way: {
            "kept": kept[way] * D * D,
            "multiplications": sum(a * b * c for a, b, c in total[way]),
            "order": order[way],
        }
        for way in total
    }


@pytest.mark.parametrize("size", SIZES)
def test_costs_of_the_whole_race_are_the_formulas(size):
    for way, (kept, multiplications, order) in {
        "naive": (T * D * D, 3 * T * D * D, T),
        "chunked": (
            T * D * D // size,
            T * (4 * size * D + 3 * D * D)
            + T // size * size * (size - 1) * (size - 2) // 6,
            T // size,
        ),
    }.items():
        assert costs(size, RACE)[way] == {
            "kept": kept,
            "multiplications": multiplications,
            "order": order,
        }


#: What the pictures and the words show.
DRAWN = """(() => {
  const parts = {}, blocks = {}, states = {}, lanes = {};
  for (const part of all("[data-part]"))
    parts[part.dataset.part] = texts(".fw-cell-text", part);
  for (const lane of ["loop", "chunks"])
    lanes[lane] = texts(`[data-part=${lane}] text`).filter((text) => /^[0-9]+ of/.test(text));
  for (const block of all("[data-block]")) {
    const { x, y, width, height } = block.querySelector("rect").attributes;
    blocks[block.dataset.block] = [y, x, height, width].map((a) => Number(a.value));
  }
  for (const one of all("[data-state]"))
    states[one.parentNode.dataset.part + one.dataset.state] = texts(".fw-cell-text", one).length;
  const labels = values("svg [role=img]", "aria-label");
  return { state: state(), words: words(), parts, blocks, states, lanes, labels };
})()"""


def check_drawing(tab, size: int, tick: int):
    """What the pictures show after a tick."""
    check_drawn(Figure(tab, "chunks").ask(DRAWN), size, tick)


def check_drawn(drawn: dict, size: int, tick: int):
    name, chunk, lit = expected(size)[tick]
    shown, n = drawn["state"], T // size
    found = (shown["tick"], shown["name"], shown["chunk"], shown["C"])
    assert found == (tick, name, chunk, size)
    assert set(drawn["blocks"]) == lit
    for block, (y, x, height, width) in drawn["blocks"].items():
        at = ((y - TOP) / CELL, (x - LEFT) / CELL, height / CELL, width / CELL)
        assert at == cells(size, block)

    stages = [stage[0] for stage in expected(size)]
    arrival = stages.index("outputs")
    finished = tick >= arrival
    step = min(tick, arrival) - 1  # from the inverses on
    written = T if finished else size * min(step // 2 + step % 2, n)
    going_back = tick > RACE
    back = max(tick - RACE - 1, 0)
    asked = size * min(back, n)
    backward = name in ("backward", "gradients")
    other = "dV" if backward else "Y"
    per_step = {
        "U": shown["rows"]["U"][:written],
        other: shown["rows"]["dV"][T - asked :]
        if backward
        else shown["rows"]["Y"][: T if finished else 0],
    }
    made = n if finished else min(step // 2, n)
    held = [shown["dStates"][c] for c in range(n - min(back, n), n + 1)]
    blocks = {
        "inverse": shown["inverseOf"][chunk - 1] if tick else [],
        "reads": shown["scores"][chunk - 1] if finished else [],
    }
    wanted = {
        **per_step,
        "states W": list(chain(*shown["W"][: made + 1])),
        "states dW": list(chain(*held)) if going_back else [],
        # The race: outputs as soon as they are there.
        "loop": [one["y"] for one in shown["loop"][: tick // 2]],
        "chunks": shown["rows"]["Y"] if finished else [],
        **{key: [row[: i + 1] for i, row in enumerate(M)] for key, M in blocks.items()},
    }
    for part, rows in wanted.items():
        flat = [x for row in rows for x in row]
        got = [number(text) for text in drawn["parts"][part]]
        assert got == pytest.approx(flat, abs=0.0501), part
    filled = {key for key, count in drawn["states"].items() if count}
    assert filled == {f"states W{c}" for c in range(made + 1)} | {
        f"states dW{c}" for c in range(n - min(back, n), n + 1) if going_back
    }

    assert shown["costs"] == costs(size, tick)
    (race, label, *_), said = drawn["labels"], drawn["words"]
    for lane, way, title in (
        ("loop", "naive", "Step by step"),
        ("chunks", "chunked", f"Chunks of {size}"),
    ):
        so_far, whole_race = costs(size, tick)[way], costs(size, RACE)[way]
        assert drawn["lanes"][lane] == [
            f"{so_far[what]} of {whole_race[what]}"
            for what in ("order", "multiplications", "kept")
        ]
        account = (
            f"{title}: {so_far['order']} in order, {so_far['multiplications']} "
            f"multiplications, {so_far['kept']} scalars kept"
        )
        assert account in race
        if tick == RACE:
            assert account in said

    if going_back or 0 < tick <= arrival:
        assert said.startswith("Backward" if going_back else "Forward")
        if name in ("errors", "state", "backward"):
            assert f"chunk {chunk} of {n}" in said
        else:
            assert "all" in said and "chunks at once" in said
    if 0 < tick < RACE:
        assert f"Step by step: step {(tick + 1) // 2} of {T} " in said
    if arrival < tick < RACE:
        assert f"finished at tick {arrival}." in said
    if tick == RACE:
        assert said.startswith("Both have finished, with the same outputs.")
    assert label == f"Tick {tick} of {len(stages) - 1}. {said}"


@pytest.mark.parametrize("size", SIZES)
def test_all_stages_by_buttons(tab, size):
    choose(tab, size)
    arrival = [stage[0] for stage in expected(size)].index("outputs")
    # Where only the loop goes on, one press takes it to its end.
    ticks = [*range(arrival + 1), *range(RACE, len(expected(size)))]
    said = set()
    for tick in ticks:
        assert state(tab)["tick"] == tick
        said.add(words(tab))
        if tick != ticks[-1]:
            press(tab, "Next")
    assert len(said) == len(ticks)
    next_, back = (
        tab.locator(FIGURE).get_by_role("button", name=name)
        for name in ("Next", "Back")
    )
    assert next_.is_disabled()
    for tick in reversed(ticks[:-1]):
        press(tab, "Back")
        assert state(tab)["tick"] == tick
    assert back.is_disabled() and next_.is_enabled()


@pytest.mark.parametrize("size", SIZES)
def test_every_tick_by_the_slider(tab, size):
    choose(tab, size)
    ticks = range(len(expected(size)))
    for tick, drawn in enumerate(Figure(tab, "chunks").sweep("Tick", ticks, DRAWN)):
        check_drawn(drawn, size, tick)


def test_the_loop_is_far_from_its_end_when_the_chunks_finish(tab):
    for size in SIZES:
        choose(tab, size)
        shown = state(tab)
        assert shown["arrival"] == 2 * T // size + 2 < RACE / 2
    page = tab.inner_text(".md-content")
    assert "Chunks of 4 need 8 ticks" in page
    assert "needs 24, has finished 4 of its 12 steps" in page


def test_the_race_plays_and_ends(race):
    """The first tick is at the top of it; both lanes are drawn after every tick."""
    for tick in range(1, RACE + 1):
        assert state(race)["running"]
        assert "With each tick" in words(race)  # the same all the time
        race.clock.run_for(TICK)
        assert state(race)["tick"] == tick
    check_drawing(race, 4, RACE)
    assert not state(race)["running"]
    race.clock.run_for(20 * TICK)
    assert state(race)["tick"] == RACE
    press(race, "Play")  # from the beginning
    race.clock.run_for(2 * TICK)
    assert state(race)["tick"] == 2


def test_the_race_can_be_paused(race):
    race.clock.run_for(5 * TICK)
    button = race.locator(FIGURE).get_by_role("button", name="Pause")
    button.press("Enter")
    race.clock.run_for(10 * TICK)
    check_drawing(race, 4, 5)
    press(race, "Play")
    race.clock.run_for(2 * TICK)
    assert state(race)["tick"] == 7
    # Who uses another control pauses it, too.
    press(race, "Next")
    race.clock.run_for(10 * TICK)
    check_drawing(race, 4, 8)
    assert race.locator(FIGURE).get_by_role("button", name="Play").is_visible()


def test_the_race_stops_when_less_motion_is_asked_for(race):
    race.clock.run_for(5 * TICK)
    button = race.locator(FIGURE).get_by_role("button", name=re.compile("Play|Pause"))
    race.emulate_media(reduced_motion="reduce")
    button.wait_for(state="hidden")
    race.clock.run_for(10 * TICK)
    check_drawing(race, 4, 5)
    race.emulate_media(reduced_motion="no-preference")
    button.click()
    race.clock.run_for(2 * TICK)
    assert state(race)["tick"] == 7


def test_the_race_waits_until_it_is_seen(fresh):
    tab = fresh("chunks", (1440, 300), timed=True).tab
    tab.clock.run_for(10 * TICK)
    check_drawing(tab, 4, 0)
    tab.set_viewport_size({"width": 1280, "height": 800})
    tab.wait_for_function(f"{STATE}.running")


def test_nothing_moves_where_that_is_asked_for(fresh):
    tab = fresh("chunks", motion="reduce", timed=True).tab
    tab.clock.run_for(30 * TICK)
    check_drawing(tab, 4, 0)
    assert tab.evaluate("document.getAnimations().length") == 0
    assert tab.locator(FIGURE).get_by_role("button").all_inner_texts() == [
        "Back",
        "Next",
    ]


def test_by_keyboard(tab):
    focused = "document.activeElement"
    tab.locator(FIGURE).get_by_role("button", name="Next").focus()
    tab.keyboard.press("Enter")
    check_drawing(tab, 4, 1)
    tab.keyboard.press("Space")
    check_drawing(tab, 4, 2)
    tab.keyboard.press("Shift+Tab")
    assert tab.evaluate(f"{focused}.textContent") == "Back"
    tab.keyboard.press("Enter")
    tab.keyboard.press("Enter")
    # Nothing is left to go back to: the focus must not be lost.
    assert tab.evaluate(f"{focused}.textContent") == "Next"
    check_drawing(tab, 4, 0)
    tab.keyboard.press("Tab")
    assert tab.evaluate(f"{focused}.type") == "range"
    tab.keyboard.press("End")
    check_drawing(tab, 4, 29)
    tab.keyboard.press("ArrowLeft")
    check_drawing(tab, 4, 28)
    assert tab.evaluate(f"{focused}.getAttribute('aria-valuetext')") == "28 of 29"
    tab.keyboard.press("Tab")
    tab.keyboard.press("ArrowRight")
    check_drawing(tab, 6, 0)
    assert tab.locator(f"{FIGURE} input[type=range]").get_attribute("max") == "28"


def test_slider_by_mouse(tab):
    choose(tab, 6)
    tab.locator(f"{FIGURE} input[type=range]").click()  # in the middle
    check_drawing(tab, 6, 14)
