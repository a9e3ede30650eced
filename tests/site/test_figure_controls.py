"""Test keys, sliders, inputs and error messages of single interactive figures."""

import json
import re
import tomllib
from urllib.parse import parse_qs, urlencode

from built import ROOT, until

FIGURES = ROOT / "docs" / "figures"


def test_a_memory_is_filled_and_emptied_by_keyboard(fresh):
    """When a button is disabled, the keyboard focus moves to an enabled button."""
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


def test_a_key_is_turned_and_overwritten(fresh):
    """Each arrow key turns a key vector towards the direction of the arrow."""
    figure = fresh("memory")
    assert "Before B was written, A read (0.90, 0.80)." in figure.words()
    figure.press("Overwrite a key")
    figure.press("Write")
    assert "A: same key as C" in figure.words()
    key = figure.slider("Key A")
    for arrow, end in (("Left", "180"), ("Down", "270"), ("Right", "0"), ("Up", "90")):
        for _ in range(40):
            key.press(f"Arrow{arrow}")
        assert key.get_attribute("aria-valuenow") == end


def test_a_key_on_an_axis_has_no_features(fresh):
    figure = fresh("dpfp")
    for _ in range(6):
        figure.css("g[data-key='k']").press("ArrowLeft")
    assert "k = (0.0, 1.2) lies on an axis: no feature fires" in figure.words()


def test_a_bias_is_chosen_by_press_and_by_keys(fresh):
    """Clicks and arrow keys select a bias; the AFT form does not change its value."""
    figure = fresh("biases")
    figure.css("td[aria-selected=true]").press("ArrowLeft")
    figure.tab.keyboard.press("ArrowDown")
    assert [figure.state()[x] for x in ("row", "key")] == [7, 4]
    assert figure.slider("Bias").is_disabled()  # The bias is outside the window.
    figure.css("td[tabindex]").nth(0).click()
    for key in ("ArrowRight", "ArrowUp"):
        figure.tab.keyboard.press(key)
        assert [figure.state()[x] for x in ("row", "key")] == [1, 1]
    figure.choose("full")
    figure.slide("Bias", 3.5)
    figure.choose("conv")
    figure.choose("full")
    assert figure.state()["bias"][0][0] == 3.5


def test_the_race_plays_and_can_be_paused(fresh):
    figure = fresh("chunks", timed=True)
    slider, clock = figure.slider("Tick"), figure.tab.clock
    for key in ("ArrowRight", "Home"):  # The animation may have started.
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


def test_what_is_typed_is_text_and_what_is_left_out_is_said(fresh):
    figure = fresh("forgets")
    box = figure.tab.get_by_label("Pairs, or a text")
    box.fill("<img/src=x> a=<b>bold</b> <script>alert(1)</script>=1 __proto__=2")
    keys = [one["key"] for one in figure.state()["asked"]]
    assert keys == ["<img/src", "a", "<script>alert(1)</script>", "__proto__"]
    assert figure.css("tbody :is(img, script, b b)").count() == 0
    for text, said in {
        " ".join(f"k{i}={i}" for i in range(130)): "100 pairs at most: 30 are left out",
        "a=red and b=blue": "Words without “=” are left out",
        "|": "memories are empty",
    }.items():
        box.fill(text)
        assert said in figure.words()
    box.fill("a=1 b=2 c=3 | c=4 d=5")  # Only the last topic is queried.
    asked = [(x["key"], x["changed"]) for x in figure.state()["asked"]]
    assert asked == [("c", False), ("d", False)]


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


def test_what_does_not_fit_in_an_address_is_as_at_first(fresh):
    wrong = "text=a%3Db&width=99&beta=NaN&decay=-1&draw=%3Cimg%20src=x%3E"
    shown = fresh("forgets", place=f"#{wrong}").state()
    assert (shown["width"], shown["beta"], shown["draw"]) == (16, 0.8, 1)


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


def fill(figure, typed: dict[str, str]):
    for label, text in typed.items():
        figure.role("textbox", name=label, exact=True).fill(text)


def pick(figure, name: str):
    title = tomllib.loads((FIGURES / "puzzles.toml").read_text("utf-8"))[name]["title"]
    figure.role("button", name=title).click()


def test_a_puzzle_is_solved_by_hand(fresh):
    """A puzzle reports blank, wrong and right answers, and stores a right answer."""
    puzzles = fresh("puzzles")
    pick(puzzles, "swap")
    assert puzzles.words() == "Still blank: a=, b=, swap, a?, b?."
    fill(puzzles, {"a=: key": "1 0", "a=: value": "x"})
    # The matrix and retrieved values are visible before all rows are complete.
    assert puzzles.texts(".fw-tape > div:first-child i") == ["3", "0", "1", "0"]
    fill(puzzles, {"b=: key": "0 1", "b=: value": "x", "a?: query": "1 0"})
    assert puzzles.texts(".fw-tape em") == ["3,1", "→ 3,1"]
    fill(puzzles, {"b?: query": "0, 1", "swap: key": "1 −1", "swap: β": "1/2"})
    assert puzzles.texts(".fw-tape em") == ["✗ 3.5,1.5,\nexpected 4,2"]
    fill(puzzles, {"swap: β": ""})
    assert puzzles.words().startswith("✓ Right in all 8 sequences: 1 step × 2 columns")
    puzzles.tab.reload()
    assert puzzles.role("button", name="10 ★ Swap two").count() == 1
    pick(puzzles, "swap")
    assert puzzles.words().startswith("✓ Right")
    puzzles.press("Clear")
    assert puzzles.words().startswith("Still blank")
    # Typing in the last row adds a row, to which the query moves.
    pick(puzzles, "difference")
    fill(puzzles, {"x=: query": "1 −1", "x=: key": "1 −1"})
    fill(puzzles, {"x=, step 2: key": "1 0", "x=, step 2: value": "x"})
    assert puzzles.words().startswith("✓ Right in all")
    assert puzzles.role("textbox", name="x=, step 3: query").input_value() == "1 −1"
    puzzles.role("button", name="Hint").click()
    assert puzzles.texts(".fw-note")[1] == "The memory has to hold the number before."
    # Stored text that cannot be parsed is ignored.
    kept = {"swap": {"a=": [{"key": "1 0"}]}, "none": 3}
    for text in (json.dumps(kept), "{", "[1]", '{"swap": 1}'):
        puzzles.ask("localStorage.setItem('fwlab.puzzles', given)", text)
        puzzles.tab.reload()
        pick(puzzles, "swap")
        assert puzzles.words().startswith("Still blank: ")


# --- Rule editor ---

HEAD = "def step(W, k, v, beta):\n    "


def judged(figure, body):
    """Type a rule into the editor, and return the score that the figure shows."""
    figure.css("textarea").fill(HEAD + "return W")  # This rule leaves W empty.
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
    # Each error is shown with the fewest pairs that cause it.
    assert re.search(r"With \d pairs key \d reads .*, not ", figure.words())
    # The figure reports overflow, and text that is not a rule.
    text = figure.css("textarea")
    text.fill(HEAD + "return 1e99 * W + outer(v, k)")
    figure.until_it_says("After token 5 W is no longer finite")
    text.fill(HEAD + "return W + kk")
    figure.until_it_says("line 2: no name kk; there are W, k, v, beta")
    assert text.get_attribute("aria-invalid") == "true"
    # A new line gets the indentation of the line above.
    text.fill("def step(W):")
    text.press("End")
    figure.tab.keyboard.type("\nx = 2\nreturn W")
    assert text.input_value() == "def step(W):\n    x = 2\n    return W"


def test_the_address_holds_the_rule(fresh):
    figure = fresh("write", motion="reduce")
    figure.css("textarea").fill(f"{HEAD}return 0.5 * W  # ü & +")
    figure.slider("Pairs").fill("7")
    figure.role("radio", name="Forget: the topic changes").check()
    place = figure.tab.url.partition("#")[2]
    assert "rule=def+step" in place and "pairs=7" in place and "task=forget" in place
    figure = fresh("write", place=f"#{place}")
    assert figure.css("textarea").input_value().endswith("0.5 * W  # ü & +")
    assert figure.slider("Pairs").input_value() == "7"
    assert figure.slider("Token").input_value() == "14"
    # A link that is opened in the same tab replaces the rule.
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
    assert text.evaluate("e => e === document.activeElement")
    undo.click()
    assert text.input_value() == f"{HEAD}return 0.5 * W"
    figure.until_it_says("Yours: 0")
    undo.click()
    assert "maximum(alphas, 0.545)" in text.input_value()


def test_ten_rules_fail_where_the_page_says(fresh):
    """Each of the ten rules recalls the expected number of values correctly."""
    figure = fresh("ten", motion="reduce")
    figure.slider("Token").fill("8")
    said = figure.css(".fw-panel-reads").all_inner_texts()
    assert [int(words[-1]) for words in said] == [4, 2, 5, 5, 6, 7, 5, 5, 5, 5]
    figure.slider("Token").fill("1")
    assert "All ten rules are right." in figure.words()
