"""What only one figure does: its keys, its drags, its words for what is wrong."""

import json
import re
import tomllib
from itertools import pairwise
from urllib.parse import parse_qs, urlencode

import pytest
import torch
from built import ROOT, asks, until
from export_web import export_web
from safetensors import safe_open

from fwlab import training

FIGURES = ROOT / "docs" / "figures"


# Memory playground


def test_a_memory_is_filled_and_emptied_by_keyboard(fresh):
    """The keyboard is not left on a button that is off."""
    figure = fresh("memory")
    write = figure.role("button", name="Write", exact=True)
    undo = figure.role("button", name="Undo", exact=True)
    write.focus()
    for _ in range(3):
        figure.tab.keyboard.press("Enter")
    assert write.is_disabled() and figure.focused() == "Undo"
    assert "undo one to write another" in figure.words()
    for _ in range(5):
        figure.tab.keyboard.press("Space")
    assert undo.is_disabled() and figure.focused() == "Write"
    assert "The memory is empty" in figure.words()


def test_a_key_is_dragged_and_overwritten(fresh):
    figure = fresh("memory")
    begins = figure.words()
    assert "B reads (−1.00, 0.50), right" in begins and "25° apart" in begins
    assert "Before B was written, A read (0.90, 0.80)." in begins
    figure.drag(figure.slider("Key B"), 101 - 51, 124 - 61)  # to 130°
    assert "90° apart: k · k′ = 0.00" in figure.words()
    figure.tab.mouse.move(5, 5)
    figure.drag(figure.slider("New value"), 201 + 93 - 57, 28 + 93 - 38)
    assert figure.state()["next"]["value"] == [-1.2, 0.8]
    figure.press("Overwrite a key")
    figure.press("Write")
    first = figure.state()["pairs"][0]
    assert first["replacedBy"] == "C" and "A: same key as C" in figure.words()
    # All round, a key goes where the arrow points, and then stays.
    turned = figure.slider("Key A").evaluate(asks.ARROWS)
    for (places, end), wanted in zip(turned, ("180", "0", "90", "270"), strict=True):
        assert min(b - a for a, b in pairwise(places)) >= 0 and end == wanted


# DPFP


def test_a_key_on_an_axis_has_no_features(fresh):
    figure = fresh("dpfp")
    key = figure.css("g[data-key='k']")
    figure.drag(key, 104, 120 - 45 * 1.2)
    shown = figure.state()
    assert shown["fires"][0] == [] and shown["cosine"] == 0
    assert "k = (0.0, 1.2) lies on an axis: no feature fires" in figure.words()
    figure.drag(key, 104 + 45 * 1.5, 120 - 45 * 3)  # stays in the plane
    assert figure.state()["keys"][0] == [1.5, 2]


# AFT


def test_a_bias_is_chosen_by_press_and_by_keys(fresh):
    """Within the triangle; it keeps the keyboard, and what it is set to."""
    figure = fresh("biases")
    figure.css("td[aria-selected=true]").press("ArrowLeft")
    figure.tab.keyboard.press("ArrowDown")
    assert [figure.state()[x] for x in ("row", "key")] == [7, 4]
    assert figure.slider("Bias").is_disabled()  # further back than the window
    figure.css("td[tabindex]").nth(0).click()
    for key in ("ArrowRight", "ArrowUp"):
        figure.tab.keyboard.press(key)
        assert [figure.state()[x] for x in ("row", "key")] == [1, 1]
    figure.choose("full")
    figure.slide("Bias", 3.5)
    figure.choose("conv")
    figure.choose("full")
    assert figure.state()["bias"][0][0] == 3.5


@pytest.mark.parametrize("width", [390, 1280])
def test_plot_lies_under_the_slider(fresh, width):
    """The line of the plot is below the thumb, wherever that is."""
    figure = fresh("aft", (width, 900))
    box = figure.slider("Large key").bounding_box()
    line = "(({ x, width }) => x + width / 2)(all('[data-part=marker]')[0].getBoundingClientRect())"
    for value in (-20, 60, 200):
        figure.slide("Large key", value)
        thumb = box["x"] + 8 + (value + 20) / 220 * (box["width"] - 16)
        assert figure.ask(line) == pytest.approx(thumb, abs=2)


# Chunks


def test_the_race_plays_and_can_be_paused(fresh):
    figure = fresh("chunks", timed=True)
    slider, clock = figure.slider("Tick"), figure.tab.clock
    for key in ("ArrowRight", "Home"):  # whether it has begun by itself, or not yet
        slider.press(key)
    figure.press("Play")
    clock.run_for(5 * 300)
    assert figure.state()["running"] and figure.state()["tick"] == 5
    assert "With each tick" in figure.words()
    figure.role("button", name="Pause").press("Enter")
    clock.run_for(3000)
    assert figure.state()["tick"] == 5
    figure.press("Next")
    assert "Step by step: step 3 of 12 has written" in figure.words()
    figure.press("Play")
    clock.run_for(30 * 300)
    assert figure.state()["tick"] == 24 and not figure.state()["running"]
    assert figure.words().startswith("Both have finished, with the same outputs.")


def test_each_tick_is_another_picture(fresh):
    """Step there and back. Where only the loop goes on, one press takes it to its end."""
    figure = fresh("chunks", motion="reduce")
    for size in (3, 4, 6):
        figure.choose(str(size))
        there, back = figure.ask(asks.WALK)
        assert [tick for tick, _ in there] == [*range(2 * 12 // size + 3), 24]
        assert len({words for _, words in there}) == len(there)
        assert back == there[::-1]


# Feedback


def test_the_path_is_drawn_layer_by_layer(fresh):
    figure = fresh("feedback", timed=True)
    cell = figure.css("svg").first.locator("[data-state='1,3']")
    cell.click()
    for drawn in range(7):
        models = figure.state()["models"]
        assert [models[name]["drawn"] for name in models] == [min(drawn, 1), drawn]
        figure.tab.clock.run_for(350)
    assert not figure.state()["running"]
    cell.press("ArrowUp")
    assert figure.state()["chosen"] == [2, 3]


# Who forgets?


def test_scores_are_counted_from_the_answers(fresh):
    """As presets promise: each memory but the sum is the best of one of them."""
    figure = fresh("forgets")
    best = {"Keys change": "delta", "Many keys": "softmax", "New topic": "gated delta"}
    for preset, name in best.items():
        figure.press(preset)
        figure.until("state().complete")
        shown = figure.state()
        assert shown["means"].pop(name) > max(shown["means"].values())
        rights = [sum(one["right"] for one in x) for x in shown["memories"].values()]
        scores = [f"{right} of {len(shown['asked'])}" for right in rights]
        assert figure.texts("thead strong") == scores


def test_what_is_typed_is_text_and_what_is_left_out_is_said(fresh):
    figure = fresh("forgets")
    box = figure.tab.get_by_label("Pairs, or a text")
    box.fill("<img/src=x> a=<b>bold</b> <script>alert(1)</script>=1 __proto__=2")
    keys = [one["key"] for one in figure.state()["asked"]]
    assert keys == ["<img/src", "a", "<script>alert(1)</script>", "__proto__"]
    assert figure.css("tbody :is(img, script, b b)").count() == 0
    box.fill(" ".join(f"k{i}={i}" for i in range(130)))
    assert "100 pairs at most: 30 are left out" in figure.words()
    box.fill("a=red and b=blue")
    assert "Words without “=” are left out" in figure.words()
    box.fill("a=1 b=2 c=3 | c=4 d=5")  # the last topic counts
    asked = [(x["key"], x["changed"]) for x in figure.state()["asked"]]
    assert asked == [("c", False), ("d", False)]
    box.fill("|")
    assert "memories are empty" in figure.words()


def test_address_carries_the_setting(fresh):
    figure = fresh("forgets")
    assert "#" not in figure.tab.url
    text = "ä&b=c#d 100%=? ann=<red> ann=blue"
    figure.tab.get_by_label("Pairs, or a text").fill(text)
    figure.slide("Width", 1)
    figure.slide("Decay", 0.73)
    figure.press("New draw")
    until(figure.tab, "location.hash.endsWith('draw=2')")
    found = {k: v[0] for k, v in parse_qs(figure.tab.url.partition("#")[2]).items()}
    assert found == dict(text=text, width="8", beta="0.8", decay="0.73", draw="2")
    figure.until("state().complete")
    before = figure.state()
    other = fresh("forgets", place="#" + figure.tab.url.partition("#")[2])
    other.until("state().complete")
    assert other.state() == before
    figure.ask("location.hash = given", urlencode({"text": "a=b", "draw": 7}))
    figure.until("state().draw === 7")
    assert figure.state()["pairs"] == [["a", "b"]]


def test_what_does_not_fit_in_an_address_is_as_at_first(fresh):
    figure = fresh("forgets")
    for wrong in ("width=99", "beta=NaN&decay=-1", "draw=%3Cimg%20src=x%3E"):
        figure.ask("location.hash = given", f"text=a%3Db&{wrong}")
        figure.until("state().text === 'a=b'")
        shown = figure.state()
        assert (shown["width"], shown["beta"], shown["draw"]) == (16, 0.8, 1)
        assert shown["decay"] == 0.95


# A model of Shakespeare


def test_a_text_is_typed_written_on_and_full(fresh):
    figure = fresh("shakespeare")
    figure.start()
    figure.text.fill("Größe")
    assert figure.state()["text"] == "Gre" and "left out: ö ß" in figure.words()
    figure.text.fill("o" * 230)
    more = figure.role("button", name="Let it write")
    more.press("Enter")
    assert "240 characters at most" in figure.words()
    assert more.is_disabled() and figure.focused() == "Empty"
    figure.tab.keyboard.press("Enter")
    assert "memory is empty" in figure.words()
    # What changes with every key is not announced with every key.
    figure.ask(asks.SPOKEN)
    figure.until("said.length > 0")
    figure.tab.wait_for_timeout(300)
    assert figure.ask("said") == [figure.words()]


# Puzzles


@pytest.fixture
def puzzles(fresh):
    fresh("puzzles").tab.evaluate("localStorage.clear()")
    return fresh("puzzles")


def fill(figure, typed: dict[str, str]):
    for label, text in typed.items():
        figure.role("textbox", name=label, exact=True).fill(text)


def pick(figure, name: str):
    title = tomllib.loads((FIGURES / "puzzles.toml").read_text("utf-8"))[name]["title"]
    figure.role("button", name=title).click()


def test_a_puzzle_is_solved_by_hand(puzzles):
    """Blank, wrong, right; and it is kept."""
    pick(puzzles, "swap")
    assert puzzles.words() == "Still blank: a=, b=, swap, a?, b?."
    fill(puzzles, {"a=: key": "1 0", "a=: value": "x"})
    # The matrix and what is read, before all rows are there.
    tape = ".fw-tape > div:first-child i"
    assert puzzles.texts(tape) == ["3", "0", "1", "0"]
    fill(puzzles, {"b=: key": "0 1", "b=: value": "x", "a?: query": "1 0"})
    assert puzzles.texts(".fw-tape em") == ["3,1", "→ 3,1"]
    fill(puzzles, {"b?: query": "0, 1", "swap: key": "1 −1", "swap: β": "1/2"})
    assert puzzles.texts(".fw-tape em") == ["✗ 3.5,1.5,\nexpected 4,2"]
    fill(puzzles, {"swap: β": ""})
    assert puzzles.words().startswith("✓ Right in all 8 sequences: 1 step × 2 columns")
    assert puzzles.state()["solved"] == ["keep", "swap"]
    assert puzzles.role("button", name="10 ★ Swap two").count() == 1
    puzzles.tab.reload()
    pick(puzzles, "swap")
    assert puzzles.words().startswith("✓ Right")
    puzzles.press("Clear")
    assert puzzles.words().startswith("Still blank")
    # Below what is typed there is a row for a further step; the query moves down.
    pick(puzzles, "difference")
    fill(puzzles, {"x=: query": "1 −1", "x=: key": "1 −1"})
    fill(puzzles, {"x=, step 2: key": "1 0", "x=, step 2: value": "x"})
    assert puzzles.words().startswith("✓ Right in all")
    assert puzzles.role("textbox", name="x=, step 3: query").input_value() == "1 −1"
    puzzles.role("button", name="Hint").click()
    assert puzzles.texts(".fw-note")[1] == "The memory has to hold the number before."


def test_a_right_answer_is_played(fresh):
    """Step by step; where less motion is asked for, it is there at once."""
    for motion in ("no-preference", "reduce"):
        puzzles = fresh("puzzles", motion=motion)
        pick(puzzles, "flip")
        fill(puzzles, {"a=: key": "1", "a=: value": "x", "a?: query": "1"})
        fill(puzzles, {"flip: key": "1"})
        assert puzzles.ask("document.getAnimations().length") == 0
        fill(puzzles, {"flip: β": "2"})
        steps = len(puzzles.texts(".fw-tape > div")) if motion != "reduce" else 0
        assert puzzles.ask("document.getAnimations().length") == steps


def test_nothing_kept_that_cannot_be_read(puzzles):
    kept = {"swap": {"a=": [{"key": "1 0"}]}, "none": 3}
    for text in (json.dumps(kept), "{", "[1]", '{"swap": 1}'):
        puzzles.ask("localStorage.setItem('fwlab.puzzles', given)", text)
        puzzles.tab.reload()
        pick(puzzles, "swap")
        assert puzzles.words().startswith("Still blank: ")


# The command that makes the files of weights


def test_export_web(tmp_path):
    run = training.Config(
        "delta", layers=1, heads=2, d_model=8, block=4, batch=2, steps=1, device="cpu"
    )
    trainer = training.Trainer(run, "the quick brown fox " * 20)
    for _ in trainer.run():
        pass
    trainer.save(tmp_path / "checkpoint.safetensors")
    checkpoint = training.load(tmp_path / "checkpoint.safetensors")
    export_web(tmp_path / "web.safetensors", checkpoint)
    with safe_open(tmp_path / "web.safetensors", framework="pt") as file:
        about = json.loads(file.metadata()["model"])
        for name, weight in trainer.model.state_dict().items():
            assert torch.equal(file.get_tensor(name), weight.half())
    assert about["alphabet"] == trainer.vocabulary.alphabet
    config = training.Config("softmax", layers=1, heads=1, d_model=4, block=4)
    made = training.checkpoint.new_model(config, 3)
    characters = training.checkpoint.Characters("abc")
    checkpoint = training.Checkpoint(made, characters, config, 0, {}, [], "")
    with pytest.raises(training.CheckpointError, match=re.escape("got softmax")):
        export_web(tmp_path / "other.safetensors", checkpoint)


# Write a rule

HEAD = "def step(W, k, v, beta):\n    "


def judged(figure, body):
    """Write a rule, and return the share of keys that it is said to read rightly."""
    figure.css("textarea").fill(HEAD + "return W")  # nothing is read
    figure.until_it_says("Yours: 0")
    figure.css("textarea").fill(HEAD + body)
    figure.until("words().startsWith('Yours: ') && !words().startsWith('Yours: 0')")
    return int(re.search(r"\d+", figure.words())[0])


def test_a_rule_is_judged_while_it_is_written(fresh):
    figure = fresh("write", motion="reduce")
    kept = judged(figure, "return W + outer(v, k)")
    assert judged(figure, "return W + beta * outer(v - W @ k, k)") > kept + 5
    panel = figure.role("group", name="Yours")
    assert panel.locator(".fw-panel-score").inner_text().startswith("87")
    assert "wrong: key" in panel.inner_text()
    # What fails, on the fewest pairs that do.
    assert re.search(r"With \d pairs key \d reads .*, not ", figure.words())
    # A rule that leaves the room of numbers, and one that is none.
    figure.css("textarea").fill(HEAD + "return 1e99 * W + outer(v, k)")
    figure.until_it_says("After token 5 W is no longer finite")
    figure.css("textarea").fill(HEAD + "return W + kk")
    figure.until_it_says("line 2: no name kk; there are W, k, v, beta")
    assert figure.css("textarea").get_attribute("aria-invalid") == "true"


def test_the_address_holds_the_rule(fresh, look):
    figure = fresh("write", motion="reduce")
    figure.css("textarea").fill(f"{HEAD}return 0.5 * W  # ü & +")
    figure.slider("Pairs").fill("7")
    figure.role("radio", name="Forget: the topic changes").check()
    url = figure.tab.url
    assert "#rule=def+step" in url and "pairs=7" in url and "task=forget" in url
    figure.tab.goto("about:blank")
    figure.tab.goto(url)
    assert figure.css("textarea").input_value().endswith("0.5 * W  # ü & +")
    assert figure.slider("Pairs").input_value() == "7"
    assert figure.slider("Token").input_value() == "14"
    # A link that is put into the same tab.
    link = "rule=def+step%28W%29%3A%0A++return+W&pairs=4"
    with figure.tab.expect_event("load"):
        figure.tab.evaluate(
            "(link) => void setTimeout(() => (location.hash = link))", link
        )
    figure.until_it_says("Yours: 0")
    assert figure.css("textarea").input_value() == "def step(W):\n  return W"
    assert figure.slider("Pairs").input_value() == "4"


def test_what_edit_replaces_comes_back(fresh):
    figure = fresh("write", motion="reduce")
    text, undo = figure.css("textarea"), figure.role("button", name="Undo Edit")
    assert undo.is_disabled()
    text.fill(f"{HEAD}return 0.5 * W")
    figure.role("button", name="Edit the text of: RWKV-7").click()
    undo.click()
    assert text.input_value() == f"{HEAD}return 0.5 * W"
    figure.until_it_says("Yours: 0")
    undo.click()
    assert "maximum(alphas, 0.545)" in text.input_value()


def test_pictures_follow_the_token_and_the_rule(fresh):
    figure = fresh("write", motion="reduce")
    image = "all('canvas')[0].toDataURL()"
    last = figure.ask(image)
    figure.slider("Token").fill("3")
    figure.until("root.innerText.includes('Token 3 of 15: key 3 gets value 3.')")
    assert figure.ask(image) != last
    figure.slider("Token").fill("15")
    assert figure.ask(image) == last
    figure.role("radio", name="W", exact=True).check()
    assert figure.ask(image) != last
    figure.role("button", name="Edit the text of: RWKV-7").click()
    assert "maximum(alphas, 0.545)" in figure.css("textarea").input_value()
    assert figure.css("textarea").evaluate("e => e === document.activeElement")


def test_a_new_line_begins_below_the_last(fresh):
    figure = fresh("write", motion="reduce")
    text = figure.css("textarea")
    text.fill("def step(W):")
    text.press("End")
    figure.tab.keyboard.type("\nx = 2\nreturn W")
    assert text.input_value() == "def step(W):\n    x = 2\n    return W"


# Ten rules


def test_ten_rules_fail_where_the_page_says(fresh):
    """By fwlab's own numbers; which rule can what is known from the papers."""
    figure = fresh("ten", motion="reduce")
    figure.slider("Token").fill("8")
    said = figure.css(".fw-panel-reads").all_inner_texts()
    assert [int(words[-1]) for words in said] == [4, 2, 5, 5, 6, 7, 5, 5, 5, 5]
    figure.slider("Token").fill("1")
    assert "All ten rules are right." in figure.words()
