"""Loop and chunks computed by the figure are those of fwlab, forward and backward.

fwlab's naive version goes through the same sequence chunk by chunk, and
autograd back; what the efficient version saves is counted, not assumed.
"""

import re
from itertools import chain

import pytest
import torch
from built import asks
from figure import number

from fwlab import ops
from fwlab.ops import _chunks, efficient

T, D = 12, 2
SIZES = (3, 4, 6)
#: Units of the picture: a pair, and where the first is.
CELL, LEFT, TOP = 16, 20, 46
#: Ticks of the loop: a look-up and a write per step.
RACE = 2 * T
#: Milliseconds of a tick.
TICK = 300


@pytest.fixture
def figure(fresh):
    """Where nothing moves by itself, with all of its drawings."""
    figure = fresh("chunks", motion="reduce")
    assert figure.slider("Tick").get_attribute("max") == str(RACE)
    figure.css("summary").click()
    figure.until("root.querySelector('input').max > 24")
    return figure


@pytest.fixture
def race(fresh):
    """From its start, in a time that the tests advance."""
    figure = fresh("chunks", timed=True)
    # Whether it has begun by itself, or not yet: the slider stops it.
    figure.slider("Tick").press("End")
    figure.slider("Tick").press("Home")
    figure.press("Play")
    return figure


def ticks(figure, count: int):
    figure.tab.clock.run_for(count * TICK)


def close(got, wanted):
    got = torch.tensor(got, dtype=torch.float64)
    torch.testing.assert_close(got, wanted.detach(), atol=1e-9, rtol=0)


def inputs(shown: dict) -> list[torch.Tensor]:
    """q, k, v and beta, as fwlab takes them."""
    rows = [shown[name] for name in ("queries", "keys", "values", "betas")]
    tensors = [torch.tensor(x, dtype=torch.float64)[None, :, None] for x in rows]
    return [x.requires_grad_() for x in tensors]


@pytest.mark.parametrize("size", SIZES)
def test_numbers(figure, size):
    figure.choose(str(size))
    shown = figure.state()
    assert shown["C"] == size
    arguments = q, k, v, beta = inputs(shown)
    for rows in (k, q):
        assert torch.allclose(rows.norm(dim=-1), torch.ones(1, T, 1).double())

    def rule(steps: slice, W: torch.Tensor) -> tuple:
        here, options = (x[:, steps] for x in arguments), {"implementation": "naive"}
        return ops.delta_rule(*here, state=W, return_state=True, **options)

    W = torch.zeros(1, 1, D, D).double().requires_grad_()
    states, outputs, errors = [W], [], []
    for start in range(0, T, size):
        before, (y, W) = W, rule(slice(start, start + size), W)
        # Without the last reading of this chunk, which is of the same tensor.
        W = W.clone()
        W.retain_grad()
        states.append(W)
        outputs.append(y)
        for i in range(start, start + size):
            errors.append(v[0, i] - k[0, i] @ before[0, 0].mT)
            _, before = rule(slice(i, i + 1), before)
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


def saved(implementation: str, arguments: list[torch.Tensor]) -> list[torch.Tensor]:
    kept = []

    def keep(x):
        # Detached: a node that keeps its own output is never freed.
        kept.append(x.detach())
        return len(kept) - 1

    with torch.autograd.graph.saved_tensors_hooks(keep, kept.__getitem__):
        ops.delta_rule(*arguments, implementation=implementation)
    return kept


def account(kept: int, multiplications: int, order: int) -> dict[str, int]:
    return {"kept": kept, "multiplications": multiplications, "order": order}


def inverse(c: int) -> int:
    """Multiplications: its entry i, j is a sum over what lies between j and i."""
    return sum((i - 1) * (c - i) for i in range(1, c))


@pytest.mark.parametrize("size", SIZES)
def test_account(figure, size, monkeypatch):
    figure.choose(str(size))
    shown = figure.state()
    assert shown["arrival"] == 2 * T // size + 2 < RACE / 2
    here = shown["counts"]["here"]
    arguments = inputs(shown)
    # So short a sequence would be one chunk.
    monkeypatch.setattr(efficient, "ONE_CHUNK", 0)
    monkeypatch.setattr(_chunks, "CHUNK", size)
    kept = sum(x.numel() for x in saved("efficient", arguments))
    # The states before all chunks are in one tensor with the last one.
    assert kept - D * D == here["inputs"] + here["chunked"]["kept"]
    # One state per step, and the empty one before them.
    states = {
        x.data_ptr(): x.numel()
        for x in saved("naive", arguments)
        if x.shape[-2:] == (D, D)
    }
    assert sum(states.values()) - D * D == here["naive"]["kept"]

    for time, d, c, counts in (
        (T, D, size, here),
        (4096, 64, 64, shown["counts"]["large"]),
    ):

        def products(c, time=time, d=d) -> int:
            """Both products of keys, (d1) to (d3), and the inverse."""
            pairs, through = 2 * c * c * d, 2 * c * d * d
            return time // c * (2 * pairs + through + c * d * d + inverse(c))

        assert counts == {
            "inputs": time * (3 * d + 1),
            "naive": account(time * d * d, time * 3 * d * d, time),
            "full": account(2 * time * time, products(time), 1),
            "chunked": account(time // c * d * d, products(c), time // c),
        }
    # The race ends with this account.
    assert costs(size, RACE) == {way: here[way] for way in ("naive", "chunked")}
    for name in ("naive", "full", "chunked"):
        cells = figure.texts(f".fw-account [data-account={name}] td")
        assert [int(re.sub(r"\D", "", cell)) for cell in cells] == list(
            here[name].values()
        )
    (table,) = figure.texts(".fw-account")
    assert f"chunks of {size}" in table and f"{here['inputs']} inputs" in table


def test_the_page_says_what_a_real_size_costs(figure):
    large, page = figure.state()["counts"]["large"], figure.tab.inner_text("article")
    for key, name in (
        ("naive", "step by step"),
        ("full", "full triangle"),
        ("chunked", "chunks of 64"),
    ):
        kept, multiplied, order = large[key].values()
        wanted = f"{kept:,} kept, {multiplied:,} multiplications, {order:,} in order"
        assert f"{name}: {wanted}" in page
    assert f"{large['inputs']:,}" in page
    assert "Chunks of 4 need 8 ticks" in page
    assert "needs 24, has finished 4 of its 12 steps" in page


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
    """What the race has cost after a tick, by the shapes of matrix products."""
    n, ticks = T // size, min(tick, RACE)
    pairs, through, steps = size * size * D, size * D * D, ticks // 2
    chunked = {
        "start": 0,
        "inverse": n * (pairs + inverse(size)),
        "errors": through + pairs,
        "state": through,
        "outputs": n * (2 * pairs + through),
    }
    names = [name for name, *_ in expected(size)]
    past = names[: min(tick, names.index("outputs")) + 1]
    written = past.count("state")
    kept = min(written + (len(past) > 1), n)
    # A step of the loop looks up; then it writes, and reads.
    looked = 3 * steps + ticks % 2
    return {
        "naive": account(steps * D * D, looked * D * D, steps),
        "chunked": account(kept * D * D, sum(chunked[x] for x in past), written),
    }


def check(figure, size: int, tick: int):
    """What the pictures show after a tick."""
    check_drawn(figure.ask(asks.CHUNKS), size, tick)


def check_drawn(drawn: dict, size: int, tick: int):
    name, chunk, lit = expected(size)[tick]
    shown, n = drawn["state"], T // size
    labels = (shown["tick"], shown["name"], shown["chunk"], shown["C"])
    assert labels == (tick, name, chunk, size)
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
def test_every_tick(figure, size):
    """By the slider, then by the buttons."""
    figure.choose(str(size))
    stages = [name for name, *_ in expected(size)]
    for tick, drawn in enumerate(figure.sweep("Tick", range(len(stages)), asks.CHUNKS)):
        check_drawn(drawn, size, tick)
    figure.slide("Tick", 0)
    there, back = figure.ask(asks.WALK)
    # Where only the loop goes on, one press takes it to its end.
    ticks = [*range(stages.index("outputs") + 1), *range(RACE, len(stages))]
    assert [tick for tick, _ in there] == ticks
    assert len({words for _, words in there}) == len(ticks)
    assert back == there[::-1]


def test_the_race_plays_and_ends(race):
    """The first tick is at the top of it; both lanes are drawn after every tick."""
    for tick in range(1, RACE + 1):
        shown, words = race.ask("[state(), words()]")
        assert shown["running"] and shown["tick"] == tick - 1
        assert "With each tick" in words  # the same all the time
        ticks(race, 1)
    check(race, 4, RACE)
    assert not race.state()["running"]
    ticks(race, 20)
    assert race.state()["tick"] == RACE
    race.press("Play")  # from the beginning
    ticks(race, 2)
    assert race.state()["tick"] == 2


def test_the_race_can_be_paused(race):
    button = race.role("button", name=re.compile("Play|Pause"))

    def less_motion():
        race.tab.emulate_media(reduced_motion="reduce")
        button.wait_for(state="hidden")

    # Who uses another control pauses it, too, and so does who asks for less motion.
    for count, pause, tick in (
        (5, lambda: button.press("Enter"), 5),
        (2, lambda: race.press("Next"), 8),
        (2, less_motion, 10),
    ):
        ticks(race, count)
        pause()
        ticks(race, 10)
        check(race, 4, tick)
        race.tab.emulate_media(reduced_motion="no-preference")
        button.click()
    ticks(race, 2)
    assert race.state()["tick"] == 12


def test_the_race_waits_until_it_is_seen(fresh):
    figure = fresh("chunks", (1440, 300), timed=True)
    ticks(figure, 10)
    check(figure, 4, 0)
    figure.tab.set_viewport_size({"width": 1280, "height": 800})
    figure.until("state().running")


def test_by_keyboard_and_mouse(figure):
    figure.role("button", name="Next").focus()
    for keys, size, tick in (
        *(("Enter", 4, 1), ("Space", 4, 2)),
        # Then nothing is left to go back to: the focus is on Next, not lost.
        ("Shift+Tab Enter Enter", 4, 0),
        *(("Tab End", 4, 29), ("ArrowLeft", 4, 28), ("Tab ArrowRight", 6, 0)),
    ):
        for key in keys.split():
            figure.tab.keyboard.press(key)
        check(figure, size, tick)
    slider = figure.slider("Tick")
    assert slider.get_attribute("max") == "28"
    slider.click()  # in the middle
    check(figure, 6, 14)
    assert slider.get_attribute("aria-valuetext") == "14 of 28"
