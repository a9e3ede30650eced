"""The matched pair on the home page: only the rule differs, and the page
computes what PyTorch computes.
"""

import functools
import json
import random
import re
from itertools import pairwise

import pytest
import torch
from built import ROOT, asks
from figure import Figure
from moves import NAMES, PLACES, WORDS, moves
from pair import PairConfig, pair_model, score
from safetensors import safe_open
from torch.utils._pytree import tree_leaves

from fwlab.models import LanguageModel

FOLDER = ROOT / "docs" / "figures" / "live"
RULES = ("sum", "delta")


def result(rule: str) -> dict:
    path = ROOT / "docs" / "results" / f"live-{rule}.json"
    return json.loads(path.read_text("utf-8"))


def weights(rule: str) -> tuple[dict, dict]:
    """The header of a weight file, and its tensors."""
    with safe_open(FOLDER / f"{rule}.safetensors", framework="pt") as file:
        about = json.loads(file.metadata()["model"])
        return about, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


@functools.cache
def model(rule: str) -> LanguageModel:
    """The weights of the page in PyTorch."""
    made = pair_model(PairConfig(**result(rule)["config"]))
    made.load_state_dict({name: w.float() for name, w in weights(rule)[1].items()})
    return made.eval()


def words(facts: list[list[str]]) -> list[str]:
    return [word for name, place in facts for word in (name, "is", "in", place, ".")]


def logits_in_pytorch(rule: str, facts: list[list[str]], name: str) -> torch.Tensor:
    text = [*words(facts), "Where", "is", name, "?"]
    with torch.no_grad():
        return model(rule)(torch.tensor([[WORDS.index(word) for word in text]]))[0, -1]


@pytest.fixture
def home(fresh):
    """At rest."""
    return fresh("live", motion="reduce")


def press(figure, times: int = 1):
    """The change that is one press away."""
    for _ in range(times):
        count = figure.ask("state().facts.length")
        figure.starter().click()
        figure.until(f"state().facts.length === {count + 1}")


def tell(figure, text: str):
    field = figure.tab.get_by_label("Or type:")
    field.fill(text)
    field.press("Enter")


# The pair


def test_only_the_rule_differs():
    one, other = (result(rule) for rule in RULES)
    assert one["config"] | {"rule": "delta"} == other["config"]
    assert one["config"]["rule"] == "sum"
    for name in ("feature_map", "key_norm", "normalize", "parameters", "shapes"):
        assert one[name] == other[name], name
    assert one["state_size"] == other["state_size"]
    (about, tensors), (about_other, tensors_other) = map(weights, RULES)
    assert about | {"mixer": "delta"} == about_other
    shapes = {name: list(w.shape) for name, w in tensors.items()}
    assert shapes == {name: list(w.shape) for name, w in tensors_other.items()}
    assert shapes == one["shapes"]
    assert sum(w.numel() for w in tensors.values()) == one["parameters"]
    # They also began alike; training has moved them apart.
    start, start_other = (
        pair_model(PairConfig(**run["config"])).state_dict() for run in (one, other)
    )
    assert all(torch.equal(start[name], start_other[name]) for name in start)
    assert not torch.equal(
        tensors["embedding.weight"], tensors_other["embedding.weight"]
    )


def test_weights_are_light():
    assert sum(p.stat().st_size for p in FOLDER.iterdir()) < 500_000
    script = (FOLDER.parent / "live.js").read_text("utf-8")
    kb = sum(p.stat().st_size for p in FOLDER.iterdir()) / 1000
    assert f"({kb:.0f} kB)" in script


@pytest.mark.parametrize("rule", RULES)
def test_results_are_those_of_the_weights(rule):
    run = result(rule)
    config = PairConfig(**run["config"])
    rng = random.Random(config.seed + 2)
    texts = moves(config.eval_texts, config.sentences, config.people, rng)
    once, changed = score(model(rule), texts)
    assert once == pytest.approx(run["right"]["given once"], abs=2e-3)
    assert changed == pytest.approx(run["right"]["changed"], abs=2e-3)
    assert {"command", "date", "machine", "torch", "commit"} <= run.keys()
    assert f"--rule {rule}" in run["command"]


def test_only_delta_follows_a_change():
    added, corrected = (result(rule)["right"] for rule in RULES)
    assert min(added["given once"], corrected["given once"]) > 0.95
    assert abs(added["given once"] - corrected["given once"]) < 0.02
    assert corrected["changed"] > 0.95 and added["changed"] < 0.7


def test_home_page_says_what_was_measured():
    text = (ROOT / "docs" / "index.md").read_text("utf-8")
    for rule in RULES:
        for share in result(rule)["right"].values():
            assert re.search(rf"\b{100 * share:.1f} %", text)
    run = result("sum")
    assert f"models of {run['bytes'] / 1000:.0f} kB" in text
    assert f"{run['parameters']:,} parameters" in text
    assert f"{run['config']['eval_texts']:,} unseen texts" in text
    assert f"{len(NAMES)} people and {len(PLACES)} places" in text


# The first screen


def test_first_screen_has_promise_model_and_three_ways_on(look):
    tab = look("index.html", motion="reduce")
    home = Figure(tab, "live")
    for width, height in ((1280, 800), (390, 844)):
        tab.set_viewport_size({"width": width, "height": height})
        tab.evaluate("window.scrollTo(0, 0)")
        check_first_screen(tab, home, width, height)
    # The theme would hide the tabs here.
    tab.set_viewport_size({"width": 1024, "height": 800})
    assert tab.locator(".md-tabs").is_visible()


def check_first_screen(tab, home, width: int, height: int):
    ways = tab.locator("article a.fw-way")
    assert ways.all_inner_texts() == ["Start the course", "Play", "Read the code"]
    if width == 390:
        assert min(way.bounding_box()["height"] for way in ways.all()) >= 44
    shown = [
        *[tab.locator("article h1"), tab.locator("article h1 + p")],
        *ways.all(),
        # The model: what was read, all answers, scores, and the change to press.
        *[home.css(part) for part in ("p", ".fw-memories", "table")],
        home.starter(),
    ]
    top = tab.locator("header.md-header").bounding_box()["height"]
    for each in shown:
        box = each.bounding_box()
        assert box["y"] >= top - 1 and box["y"] + box["height"] <= height, each
        assert box["x"] >= 0 and box["x"] + box["width"] <= width, each
    # The picture has stood there before its script came.
    assert abs(home.ask(asks.PUSHED)) < 1
    if width == 1280:  # and the sentence that says what to see
        shown = home.css(".fw-words").bounding_box()
        assert shown["y"] + shown["height"] <= height
    # Formulas come after.
    formula = tab.locator("article .katex").first.bounding_box()
    figure = home.root.bounding_box()
    assert formula["y"] > figure["y"] + figure["height"]
    # The press and what it changes are seen together.
    press(home)
    assert tab.evaluate("window.scrollY") == 0
    box = home.css("table").bounding_box()
    assert box["y"] + box["height"] <= height


# The model in the page


def compare(shown: dict, every: int = 1):
    """The logits of answers, to 1e-4; and what the page makes of them."""
    facts = shown["facts"]
    for rule in RULES:
        for answer in shown["answers"][rule][::every]:
            wanted = logits_in_pytorch(rule, facts, answer["name"])
            logits = torch.tensor(answer["logits"])
            torch.testing.assert_close(logits, wanted, atol=1e-4, rtol=0)
            assert answer["said"] == WORDS[int(wanted.argmax())]
            told = [place for name, place in facts if name == answer["name"]]
            assert answer["place"] == told[-1]  # the most recent
            assert answer["right"] == (answer["said"] == answer["place"])
            assert answer["moved"] == sum(a != b for a, b in pairwise(told))
            share = torch.softmax(wanted, -1)[WORDS.index(answer["place"])].item()
            assert answer["truth"] == pytest.approx(share, abs=1e-4)


def test_one_press_shows_the_difference(home):
    """A change that the sum rule cannot follow. It opens at the strongest contrast."""
    assert home.texts("thead strong") == ["0 of 5", "5 of 5"]
    for _ in range(3):
        sentence = home.starter().inner_text().removeprefix("Tell both: ")
        assert re.fullmatch(r"\w+ is in \w+\.", sentence)
        press(home)
        name, _, _, place = sentence.rstrip(".").split()
        shown = home.ask(asks.LIVE)
        answers = shown["state"]["answers"]
        assert shown["state"]["facts"][-1] == [name, place]
        added, corrected = (
            next(a for a in answers[rule] if a["name"] == name) for rule in RULES
        )
        assert corrected["said"] == place and corrected["truth"] > 0.9
        assert not added["right"] and added["truth"] < 0.6
        assert all(a["right"] for a in answers["delta"])
    assert [len(answers[rule]) for rule in RULES] == [5, 5]
    compare(shown["state"])
    # The table counts them.
    wanted = [f"{sum(a['right'] for a in answers[r])} of 5" for r in RULES]
    assert shown["scores"] == wanted
    # Right and wrong have signs, not only colours.
    right = [a["right"] for pair in zip(*answers.values(), strict=True) for a in pair]
    assert shown["marks"] == ["✓" if each else "✗" for each in right]
    assert "The sum rule adds the new place" in shown["words"]
    assert len(home.fetched()) == 2  # once


def memory_in_pytorch(rule: str, facts: list[list[str]]) -> torch.Tensor:
    tokens = torch.tensor([[WORDS.index(word) for word in words(facts)]])
    with torch.no_grad():
        _, state = model(rule).prefill(tokens)
    leaves = filter(torch.is_tensor, tree_leaves(state))
    (W,) = (each for each in leaves if each.shape == (1, 1, 32, 32))
    return W[0, 0]


def test_memories_are_drawn_as_written_and_as_read(home):
    """Each number of W is a pixel; a question lights up what it reads."""
    press(home)
    before = home.ask(asks.LIVE)
    home.press("Ask where Dan is")
    during = home.ask(asks.LIVE)
    assert during["state"]["asked"] == "Dan" and "Asked where Dan is" in during["words"]
    home.press("Ask where Dan is")
    assert home.ask(asks.LIVE) == before
    maps = [torch.tensor([s["maps"][i] for s in (before, during)]) for i in range(2)]
    for rule, (plain, lit) in zip(RULES, maps, strict=True):
        W = memory_in_pytorch(rule, before["state"]["facts"])
        shown = torch.tensor(before["state"]["memories"][rule]).reshape(W.shape)
        torch.testing.assert_close(shown, W, atol=1e-4, rtol=0)
        wanted = 255 * (W.abs() / 2).clamp(max=1)
        torch.testing.assert_close(plain[2:, 2:-2].float(), wanted, atol=1, rtol=0)
        # The key above, what was written on the left, what is read on the right.
        assert plain[0].max() == plain[:, 0].max() == 255 and plain[:, -1].max() == 0
        assert lit[0].max() == lit[:, -1].max() == 255 and lit[:, 0].max() == 0
        # What the query does not ask for is dark.
        asked = lit[0, 2:-2]
        assert lit[2:, 2:-2][:, asked < 5].max() < 10
        assert (lit[2:, 2:-2] > plain[2:, 2:-2] + 10).sum() == 0
        # With its sign, so that the sum of a row is what is read there.
        pixels = torch.tensor(during["state"]["pixels"][rule]).reshape(lit.shape)
        sums, read = pixels[2:, 2:-2].sum(1), pixels[2:, -1]
        torch.testing.assert_close(sums / sums.abs().max(), read, atol=1e-4, rtol=0)
        assert read.min() < -0.1 and read.max() > 0.1


#: The words that fly into the memories, as they come.
FLOWN = """globalThis.flown = [];
const note = ({ addedNodes }) => addedNodes.forEach((node) => {
  if (node.className !== "fw-ghost") return;
  const [flight] = node.getAnimations();
  flight.pause();
  flight.currentTime = 0;
  const story = document.querySelector("#figure-live p").lastElementChild.firstChild;
  const range = document.createRange();
  const at = story.data.indexOf(node.textContent);
  range.setStart(story, at);
  range.setEnd(story, at + node.textContent.length);
  const [from, word] = [node, range].map((each) => each.getBoundingClientRect());
  flown.push([node.textContent, Math.hypot(from.x - word.x, from.y - word.y) < 1]);
  flight.play();
});
new MutationObserver((changes) => changes.forEach(note)).observe(
  document.getElementById("figure-live"), { childList: true, subtree: true });"""


def test_moves_play_once_by_themselves(fresh):
    home = fresh("live", timed=True)  # its time begins when the wait is over
    home.until("state().answers !== null")
    assert len(home.state()["facts"]) == 5 and home.state()["playing"]
    sign = home.css("small", has_text="Replaying the five moves")
    assert sign.is_visible()
    scores = []
    for _ in range(5):
        home.tab.clock.run_for(1600)
        scores.append(home.texts("thead strong"))
    assert scores == [[f"{n} of 5", "5 of 5"] for n in (4, 3, 2, 1, 0)]
    home.tab.clock.run_for(20_000)
    assert len(home.state()["facts"]) == 10 and not home.state()["playing"]
    assert not sign.is_visible()
    # Again where the reader wants it, until the reader does something else.
    home.press("Replay the moves")
    assert len(home.state()["facts"]) == 5
    home.tab.evaluate(FLOWN)
    home.tab.clock.run_for(1600)
    home.until("state().facts.length === 6")
    # Each word leaves the place where it is read, for each memory.
    assert home.tab.evaluate("flown") == [["Ada", True], ["Tunis", True]] * 2
    home.until("texts('.fw-ghost').length === 0")
    home.starter().click()
    home.tab.clock.run_for(20_000)
    assert len(home.state()["facts"]) == 7
    # Nothing moves for who asks for less motion.
    calm = fresh("live", timed=True, motion="reduce")
    calm.tab.clock.run_for(20_000)
    state = calm.state()
    assert state["answers"] is None and not state["playing"]
    assert not calm.css("small", has_text="Replaying").is_visible()


def test_a_press_while_the_opening_loads_is_kept(fresh):
    home = fresh("live", timed=True)
    held = []
    home.tab.context.route("**/sum.safetensors", lambda route: held.append(route))
    home.tab.clock.run_for(2000)
    home.until("state().playing")
    home.starter().click()
    home.tab.context.unroute("**/sum.safetensors")
    held[0].continue_()
    home.until("state().answers !== null")
    assert len(home.state()["facts"]) == 11 and not home.state()["playing"]


def test_agrees_with_pytorch_for_many_people(home):
    facts = [[NAMES[i % 16], PLACES[5 * i % 16]] for i in range(20)]
    home.press("Empty both memories")
    home.until("state().answers !== null")
    home.tab.get_by_label("Or type:").fill(" ".join(words(facts)))
    home.press("Tell")
    home.until("state().facts.length === 20")
    assert home.state()["facts"] == facts
    compare(home.state(), every=5)


def test_changes_can_be_typed(home):
    tell(home, "but now eve  is in BERN. Dan is in Rome")
    home.until("state().facts.length === 12")
    shown = home.ask(asks.LIVE)
    assert shown["state"]["facts"][-2:] == [["Eve", "Bern"], ["Dan", "Rome"]]
    assert home.tab.get_by_label("Or type:").input_value() == ""
    # What is no longer true is crossed out, what is new is strong.
    crossed = [text.strip() for text in shown["crossed"]]
    assert "Eve is in Paris." in crossed and "Dan is in Bern." in crossed
    assert "Eve is in Bern." in [text.strip() for text in shown["strong"]]


def test_says_which_words_it_knows(home):
    for text in ("Zoe is in Bern.", "Eve is in Berlin.", "Hello!"):
        tell(home, text)
        home.until_it_says("Places:")
        said = home.words()
        assert ", ".join(NAMES) in said and ", ".join(PLACES) in said
        assert len(home.state()["facts"]) == 10
        assert home.tab.get_by_label("Or type:").input_value() == text
        home.press("Back to the five moves")
        home.until_it_says("Everyone has moved")


def test_can_be_emptied_filled_and_begun_again(home):
    begun = home.state()["facts"]
    home.press("Empty both memories")
    home.until_it_says("memories are empty")
    assert home.ask("document.activeElement.type") == "text"
    for count in range(1, 25):
        home.starter().press("Enter")
        assert len(home.state()["facts"]) == count
    assert home.starter().is_disabled()
    # The keyboard is not left on a button that is off.
    assert home.focused() == "Empty both memories"
    home.press("Back to the five moves")
    assert home.state()["facts"] == begun
    assert home.starter().is_enabled()
    home.press("Empty both memories")
    tell(home, "Ada is in Rome. Ben is in Oslo.")
    home.until("state().facts.length === 2")
    shown = home.ask(asks.LIVE)
    assert "Nobody has moved yet" in shown["words"]
    assert shown["scores"] == ["2 of 2", "2 of 2"]


def test_weights_that_do_not_come_are_said_to(home):
    context = home.tab.context
    context.route("**/sum.safetensors", lambda route: route.fulfill(status=204))
    home.starter().click()
    home.until_it_says("could not be fetched")
    assert len(home.state()["facts"]) == 10
    context.unroute("**/sum.safetensors")
    press(home)
    assert home.state()["answers"] is not None
