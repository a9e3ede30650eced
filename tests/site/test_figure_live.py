"""The matched pair on the home page: only the rule differs, and the page
computes what PyTorch computes.
"""

import json
import random
import re

import pytest
import torch
from built import ROOT
from safetensors import safe_open

from fwlab.data import moves
from fwlab.data.moves import NAMES, PLACES, WORDS
from fwlab.models import LanguageModel
from fwlab.training.pair import PairConfig, pair_model, score

FOLDER = ROOT / "docs" / "figures" / "live"
RULES = ("sum", "delta")
STATE = "document.querySelector('#figure-live').figure.state()"
WORDS_OF = "document.querySelector('#figure-live .fw-words').textContent"


def result(rule: str) -> dict:
    path = ROOT / "docs" / "results" / f"live-{rule}.json"
    return json.loads(path.read_text("utf-8"))


def weights(rule: str) -> tuple[dict, dict]:
    """The header of a weight file, and its tensors."""
    with safe_open(FOLDER / f"{rule}.safetensors", framework="pt") as file:
        about = json.loads(file.metadata()["model"])
        return about, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


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
    return fresh("live").tab


def example(tab):
    """The change that is one press away."""
    return tab.locator("#figure-live button").first


def press(tab):
    before = tab.evaluate(STATE)["facts"]
    example(tab).click()
    tab.wait_for_function(f"{STATE}.facts.length === {len(before) + 1}")


def scores(tab) -> dict[str, list[str]]:
    """The table as it is on the page: sum, then delta."""
    rows = tab.locator("#figure-live tfoot tr").all()
    found = {
        row.locator("th").inner_text(): row.locator("td").all_inner_texts()
        for row in rows
    }
    found["all"] = tab.locator("#figure-live thead strong").all_inner_texts()
    return found


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
    given, changed = score(model(rule), texts)
    assert given == pytest.approx(run["right"]["given once"], abs=2e-3)
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
    assert f"{run['parameters']:,} parameters" in text
    assert f"{run['config']['eval_texts']:,} unseen texts" in text
    assert f"{len(NAMES)} people and {len(PLACES)} places" in text


# The first screen


@pytest.mark.parametrize(("width", "height"), [(1280, 800), (390, 844)])
def test_first_screen_has_sentence_model_and_three_ways_on(look, width, height):
    tab = look("index.html", "light", width)
    tab.set_viewport_size({"width": width, "height": height})
    tab.evaluate("window.scrollTo(0, 0)")
    ways = tab.locator("article a.fw-way")
    assert ways.all_inner_texts() == ["Start the course", "Play", "Read the code"]
    shown = [
        *[tab.locator("article h1"), tab.locator("article h1 + p")],
        *ways.all(),
        # The model: what was read, all answers, scores, and the change to press.
        *[tab.locator(f"#figure-live {part}") for part in ("p", "table")],
        example(tab),
    ]
    top = tab.locator("header.md-header").bounding_box()["height"]
    for each in shown:
        box = each.bounding_box()
        assert box["y"] >= top - 1 and box["y"] + box["height"] <= height, each
        assert box["x"] >= 0 and box["x"] + box["width"] <= width, each
    if width == 1280:  # and the sentence that says what to see
        shown = tab.locator("#figure-live .fw-words").bounding_box()
        assert shown["y"] + shown["height"] <= height
    # Formulas come after.
    formula = tab.locator("article .katex").first.bounding_box()
    figure = tab.locator("#figure-live").bounding_box()
    assert formula["y"] > figure["y"] + figure["height"]
    # The press and what it changes are seen together.
    press(tab)
    assert tab.evaluate("window.scrollY") == 0
    box = tab.locator("#figure-live table").bounding_box()
    assert box["y"] + box["height"] <= height


def test_ways_on_lead_there(home):
    for name in ("Start the course", "Play", "Read the code"):
        with home.context.expect_page() as opened:
            home.locator("article a.fw-way", has_text=name).click(
                modifiers=["ControlOrMeta"]
            )
        opened.value.locator("article h1").wait_for()
        opened.value.close()


# The model in the page


def weights_asked_for(tab) -> list[str]:
    entries = "performance.getEntriesByType('resource').map((e) => e.name)"
    names = [n.rpartition("/")[2] for n in tab.evaluate(entries)]
    return sorted(n for n in names if n.endswith(".safetensors"))


def test_weights_come_on_first_use(home):
    assert weights_asked_for(home) == []
    # Until then the picture that needs no script is there.
    assert home.locator("#figure-live tbody tr").count() == 5
    press(home)
    assert weights_asked_for(home) == ["delta.safetensors", "sum.safetensors"]
    press(home)
    assert len(weights_asked_for(home)) == 2


@pytest.mark.parametrize("rule", RULES)
def test_agrees_with_pytorch(home, rule):
    """The logits of every answer, to 1e-4; and what the page makes of them."""
    for _ in range(3):
        press(home)
    found = home.evaluate(STATE)
    assert len(found["answers"][rule]) == 5
    for answer in found["answers"][rule]:
        wanted = logits_in_pytorch(rule, found["facts"], answer["name"])
        torch.testing.assert_close(
            torch.tensor(answer["logits"]), wanted, atol=1e-4, rtol=0
        )
        assert answer["said"] == WORDS[int(wanted.argmax())]
        at = dict(found["facts"])  # the most recent place
        assert answer["place"] == at[answer["name"]]
        assert answer["right"] == (answer["said"] == answer["place"])
        told = [place for name, place in found["facts"] if name == answer["name"]]
        assert answer["moved"] == len(told) - 1
        share = torch.softmax(wanted, -1)
        assert answer["truth"] == pytest.approx(
            share[WORDS.index(answer["place"])].item(), abs=1e-4
        )


def test_agrees_with_pytorch_for_many_people(home):
    facts = [[NAMES[i % 16], PLACES[5 * i % 16]] for i in range(20)]
    home.get_by_role("button", name="Empty").click()
    home.wait_for_function(f"{STATE}.answers !== null")
    home.get_by_label("Or type:").fill(" ".join(words(facts)))
    home.get_by_role("button", name="Tell", exact=True).click()
    home.wait_for_function(f"{STATE}.facts.length === 20")
    found = home.evaluate(STATE)
    assert found["facts"] == facts
    for rule in RULES:
        for answer in found["answers"][rule][::5]:
            wanted = logits_in_pytorch(rule, facts, answer["name"])
            torch.testing.assert_close(
                torch.tensor(answer["logits"]), wanted, atol=1e-4, rtol=0
            )


def test_one_press_shows_the_difference(home):
    """A change that the sum rule cannot follow; both keep the other facts."""
    for _ in range(3):
        sentence = example(home).inner_text()
        assert re.fullmatch(r"\w+ is in \w+\.", sentence)
        press(home)
        name, _, _, place = sentence.rstrip(".").split()
        assert home.evaluate(STATE)["facts"][-1] == [name, place]
        answers = home.evaluate(STATE)["answers"]
        added, corrected = (
            next(a for a in answers[rule] if a["name"] == name) for rule in RULES
        )
        assert corrected["said"] == place and corrected["truth"] > 0.9
        assert not added["right"] and added["truth"] < 0.6
        assert all(a["right"] for a in answers["sum"] if not a["moved"])
        assert all(a["right"] for a in answers["delta"])


def test_scores_count_the_answers(home):
    for _ in range(3):
        press(home)
    found = home.evaluate(STATE)["answers"]
    groups = ["Given once:", "Changed:"]
    for kind in groups:
        wanted = []
        for rule in RULES:
            of = [a for a in found[rule] if (a["moved"] > 0) == (kind == "Changed:")]
            right = sum(a["right"] for a in of)
            wanted.append(f"{right} of {len(of)}" if of else "–")
        assert scores(home)[kind] == wanted
    wanted = [f"{sum(a['right'] for a in found[r])} of 5" for r in RULES]
    assert scores(home)["all"] == wanted
    # Right and wrong have signs, not only colours.
    marks = home.locator("#figure-live tbody [role=img]").all_inner_texts()
    right = [a["right"] for pair in zip(*found.values(), strict=True) for a in pair]
    assert marks == ["✓" if each else "✗" for each in right]
    assert "The sum rule adds the new place" in home.evaluate(WORDS_OF)


def test_changes_can_be_typed(home):
    field = home.get_by_label("Or type:")
    field.fill("but now eve  is in BERN. Dan is in Rome")
    field.press("Enter")
    home.wait_for_function(f"{STATE}.facts.length === 9")
    assert home.evaluate(STATE)["facts"][-2:] == [["Eve", "Bern"], ["Dan", "Rome"]]
    assert field.input_value() == ""
    # What is no longer true is crossed out, what is new is strong.
    crossed = home.locator("#figure-live s").all_inner_texts()
    assert "Eve is in Kyoto." in crossed and "Dan is in Delhi." in crossed
    assert "Eve is in Bern." in home.locator("#figure-live p strong").all_inner_texts()


@pytest.mark.parametrize("text", ["Zoe is in Bern.", "Eve is in Berlin.", "Hello!"])
def test_says_which_words_it_knows(home, text):
    home.get_by_label("Or type:").fill(text)
    home.get_by_role("button", name="Tell", exact=True).click()
    home.wait_for_function(f"{WORDS_OF}.includes('Places:')")
    said = home.evaluate(WORDS_OF)
    assert ", ".join(NAMES) in said and ", ".join(PLACES) in said
    assert len(home.evaluate(STATE)["facts"]) == 7
    assert home.get_by_label("Or type:").input_value() == text


def test_can_be_emptied_filled_and_begun_again(home):
    begun = home.evaluate(STATE)["facts"]
    home.get_by_role("button", name="Empty").click()
    home.wait_for_function(f"{WORDS_OF}.includes('memories are empty')")
    assert home.evaluate("document.activeElement.type") == "text"
    button = example(home)
    for _ in range(24):
        button.press("Enter")
        count = len(home.evaluate(STATE)["facts"])
    assert count == 24 and button.is_disabled()
    # The keyboard is not left on a button that is off.
    assert home.evaluate("document.activeElement.textContent") == "Start again"
    home.keyboard.press("Enter")
    assert home.evaluate(STATE)["facts"] == begun
    assert button.is_enabled()


def test_nobody_has_moved(home):
    home.get_by_role("button", name="Empty").click()
    field = home.get_by_label("Or type:")
    field.fill("Ada is in Rome. Ben is in Oslo.")
    field.press("Enter")
    home.wait_for_function(f"{STATE}.facts.length === 2")
    assert "Nobody has moved yet" in home.evaluate(WORDS_OF)
    assert scores(home) == {
        "all": ["2 of 2", "2 of 2"],
        "Given once:": ["2 of 2", "2 of 2"],
        "Changed:": ["–", "–"],
    }


def test_weights_that_do_not_come_are_said_to(home):
    home.context.route("**/sum.safetensors", lambda route: route.fulfill(status=204))
    example(home).click()
    home.wait_for_function(f"{WORDS_OF}.includes('could not be fetched')")
    assert len(home.evaluate(STATE)["facts"]) == 7
    home.context.unroute("**/sum.safetensors")
    press(home)
    assert home.evaluate(STATE)["answers"] is not None


def test_says_why_it_does_not_run_from_disk(look, site):
    tab = look("index.html", base=f"{site.as_uri()}/")
    example(tab).click()
    tab.wait_for_function(f"{WORDS_OF}.includes('python -m http.server')")
    assert tab.locator("#figure-live tbody tr").count() == 5
