"""Who forgets: the five memories are fwlab's, the scores are counted from what
they return, and the address of the page carries the setting.
"""

import re
from urllib.parse import parse_qs, urlencode

import pytest
import torch
from built import asks, until

from fwlab import ops

NAMES = ("sum", "gated", "delta", "gated delta", "softmax")
PRESETS = ("Keys change", "Many keys", "New topic", "A long text", "Room for all")


@pytest.fixture
def figure(fresh):
    return fresh("forgets")


def state(figure) -> dict:
    """With the means, which come last."""
    figure.until("state().complete")
    shown = figure.state()
    return shown | {name: dict(shown[name]) for name in ("keys", "values")}


def write(figure, text: str):
    figure.tab.get_by_label("Pairs, or a text").fill(text)


def reads(shown: dict, name: str) -> torch.Tensor:
    """What fwlab's rule reads under each key that is asked for."""
    double = torch.float64
    k = torch.tensor([shown["keys"][key] for key, _ in shown["pairs"]], dtype=double)
    v = torch.tensor([shown["values"][x] for _, x in shown["pairs"]], dtype=double)
    q = [shown["keys"][one["key"]] for one in shown["asked"]]
    q = torch.tensor(q, dtype=double)
    # A batch for each query, which is that of the last step.
    batch, time = len(q), len(k)
    q = q[:, None, None].expand(-1, time, -1, -1)
    k, v = (x[None, :, None].expand(batch, -1, -1, -1) for x in (k, v))
    beta = torch.full((batch, time, 1), shown["beta"], dtype=double)
    if name == "softmax":
        root = shown["width"] ** 0.5
        y = ops.softmax_attention(root * q, root * k, v)
    elif name == "sum":
        y = ops.sum_rule(q, k, v, normalize=False)
    elif name == "gated delta":
        decay = torch.full_like(beta, shown["decay"]).log()
        y = ops.gated_delta_rule(q, k, v, beta, decay)
    else:
        y = {"gated": ops.gated_rule, "delta": ops.delta_rule}[name](q, k, v, beta)
    return y[:, -1, 0]


def compare(figure) -> dict:
    """All of the state and of the table, against fwlab."""
    shown = state(figure)
    words, names, marked, scores, cells = figure.ask(
        """[words(), texts("thead th:has(strong) span"),
          all("thead th:has(strong)").map((e) => e.className === "fw-wins"),
          texts("thead strong"), all("tbody td").map((e) => e.innerText)]"""
    )
    last = dict(shown["pairs"])
    assert all(one["value"] == last[one["key"]] for one in shown["asked"])
    for vector in [*shown["keys"].values(), *shown["values"].values()]:
        assert len(vector) == shown["width"]
        assert sum(x * x for x in vector) == pytest.approx(1)
    values = list(shown["values"])
    V = torch.tensor(list(shown["values"].values()), dtype=torch.float64)
    assert names == list(NAMES)
    counts = []
    for column, name in enumerate(NAMES):
        answers = shown["memories"][name]
        y = torch.tensor([one["y"] for one in answers], dtype=torch.float64)
        torch.testing.assert_close(y, reads(shown, name), atol=1e-10, rtol=0)
        for row, (one, asked) in enumerate(zip(answers, shown["asked"], strict=True)):
            likeness = V @ y[row]
            near = [
                values[i] for i in (likeness > likeness.max() - 1e-9).nonzero()[:, 0]
            ]
            assert one["said"] == (near if y[row].any() else [])
            assert one["right"] == (one["said"] == [asked["value"]])
            mark = "✓" if one["right"] else "✗"
            said = " = ".join(one["said"]) or "nothing"
            assert cells[5 * row + column] == f"{mark} {said}"
        right = sum(one["right"] for one in answers)
        counts.append(right)
        assert scores[column] == f"{right} of {len(answers)}"
        long = "softmax attention" if name == "softmax" else f"{name} rule"
        assert re.search(rf"(: |, ){long} {right}[,.]", words)
    assert marked == [count == max(counts) for count in counts]
    return shown


def test_memories_are_those_of_fwlab(figure):
    for preset in PRESETS:
        figure.press(preset)
        compare(figure)


def test_sliders_reach_the_memories(figure):
    for width, beta, decay in ((0, 0.35, 0.7), (4, 1, 0.5), (2, 0, 1)):
        figure.slide("Width", width)
        figure.slide("Write strength", beta)
        figure.slide("Decay", decay)
        shown = compare(figure)
        assert shown["width"] == (4, 8, 16, 32, 64)[width]
        assert (shown["beta"], shown["decay"]) == (beta, decay)
    # Nothing written, nothing returned.
    assert shown["memories"]["delta"][0]["said"] == []


def test_a_new_draw_has_new_vectors_and_a_word_keeps_its_own(figure):
    first = state(figure)
    write(figure, f"zoe=teal {first['text']}")
    assert state(figure)["keys"]["bob"] == first["keys"]["bob"]
    figure.press("New draw")
    assert state(figure)["draw"] == 2
    assert state(figure)["keys"]["bob"] != first["keys"]["bob"]
    # A word is another vector as a value.
    write(figure, "bob=bob")
    assert state(figure)["keys"]["bob"] != state(figure)["values"]["bob"]


def test_mean_is_that_of_twenty_draws(figure):
    figure.press("Many keys")
    means = state(figure)["means"]
    draws = figure.ask(asks.TWENTY_DRAWS)
    assert state(figure)["means"] == means
    for name in NAMES:
        right = [one["right"] for memories in draws for one in memories[name]]
        assert means[name] == pytest.approx(sum(right) / 20 / 24)
    assert figure.texts("thead th:has(strong) small") == [
        f"{100 * means[name]:.0f}\u00a0%" for name in NAMES
    ]


def test_the_mean_follows(figure):
    """100 pairs at width 64: what was drawn is there at once."""
    figure.slide("Width", 4)
    state(figure)
    seen = figure.ask(
        """(() => {
          const element = all("textarea")[0];
          element.value = [...Array(100).keys()].map((i) => `k${i}=${i}`).join(" ");
          element.dispatchEvent(new Event("input"));
          return [state().complete, root.innerText];
        })()"""
    )
    assert seen[0] is False
    assert "After 100 pairs, 100 keys are asked for" in seen[1]
    assert "draws of random vectors: …." in seen[1] and "%" not in seen[1]
    compare(figure)  # which waits
    figure.until("!root.innerText.includes('…')")


def test_presets_do_what_the_page_says(figure):
    """By the means, so that it is no luck."""

    def means(name: str) -> dict:
        figure.press(name)
        return state(figure)["means"]

    change = means("Keys change")
    assert change["delta"] > 1.1 * max(change["sum"], change["softmax"])
    assert change["gated"] < 0.5 * change["sum"]
    many = means("Many keys")
    assert many["softmax"] > many["sum"] > 1.3 * many["delta"] > many["gated"]
    figure.slide("Write strength", 0.3)
    assert state(figure)["means"]["delta"] > many["sum"]
    topic = means("New topic")
    assert min(topic["gated"], topic["gated delta"]) > topic["delta"] > topic["sum"]
    assert topic["softmax"] < topic["sum"]
    figure.slide("Width", 2)
    wide = state(figure)["means"]
    assert wide["softmax"] == max(wide.values()) > topic["gated delta"]
    assert max(means("A long text").values()) < 0.9
    room = means("Room for all")
    assert room.pop("gated") < 0.5 and min(room.values()) == 1
    # Each memory but the sum is the best of one of them; each fails at another.
    assert change["delta"] == max(change.values())
    assert many["softmax"] == max(many.values())
    assert topic["gated delta"] == max(topic.values())


def test_what_is_asked(figure):
    write(figure, "The cat sat. The dog’s cat-flap shut!")  # word by word
    shown = compare(figure)
    assert shown["pairs"] == [
        *(["the", "cat"], ["cat", "sat"], ["sat", "the"]),
        *(["the", "dog’s"], ["dog’s", "cat-flap"], ["cat-flap", "shut"]),
    ]
    assert [one["key"] for one in shown["asked"] if one["changed"]] == ["the"]
    assert "changed" in figure.css("tbody th").first.inner_text()
    # Equally near values are wrong.
    write(figure, "a=green a=red a=red a=green")
    shown = compare(figure)
    for name in ("sum", "softmax"):
        assert shown["memories"][name][0]["said"] == ["green", "red"]
        assert not shown["memories"][name][0]["right"]
    assert figure.css("td").first.inner_text() == "✗ green = red"
    # The last topic only; that c had another value was in another one.
    write(figure, "a=1 b=2 c=3 | c=4 d=5")
    shown = compare(figure)
    assert len(shown["pairs"]) == 5
    asked = [(x["key"], x["changed"]) for x in shown["asked"]]
    assert asked == [("c", False), ("d", False)]


def test_what_is_left_out_is_said(figure):
    write(figure, " ".join(f"k{i}={i}" for i in range(130)))
    assert len(state(figure)["pairs"]) == 100
    assert "100 pairs at most: 30 are left out" in figure.words()
    write(figure, "a=red and b=blue")
    assert len(compare(figure)["pairs"]) == 2
    assert "Words without “=” are left out" in figure.words()
    for empty in ("", "word", "a= =b", "|"):
        write(figure, empty)
        assert state(figure)["pairs"] == []
        assert "memories are empty" in figure.words()
    assert "NaN" not in figure.root.inner_text()


def test_text_of_the_reader_is_only_text(figure):
    for text in (
        "<img/src=x> a=<b>bold</b> <script>alert(1)</script>=1",
        "__proto__=1 constructor=2 toString=3 __proto__=4",
    ):
        write(figure, text)
        shown = compare(figure)
        assert [key for key, _ in shown["pairs"]] == re.findall(r"(\S+?)=", text)
        assert figure.css("tbody :is(img, script, b b)").count() == 0
        heads = [head.split()[0] for head in figure.texts("tbody th")]
        assert heads == [x["key"] for x in shown["asked"]]


# The address


def fragment(tab) -> dict:
    return {k: v[0] for k, v in parse_qs(tab.url.partition("#")[2]).items()}


def test_address_carries_the_setting(fresh, figure):
    asked, tab = [], figure.tab
    tab.on("request", lambda request: asked.append(request.url))
    assert "#" not in tab.url
    text = "ä&b=c#d 100%=? ann=<red> ann=blue"
    write(figure, text)
    figure.slide("Width", 1)
    figure.slide("Write strength", 0.35)
    figure.slide("Decay", 0.73)
    figure.press("New draw")
    wanted = {
        **{"text": text, "width": "8", "beta": "0.35"},
        **{"decay": "0.73", "draw": "2"},
    }
    until(tab, "location.hash.endsWith('draw=2')")
    assert fragment(tab) == wanted
    assert asked == []  # of no server
    before, table = state(figure), figure.root.inner_text()
    other = fresh("forgets", place="#" + tab.url.partition("#")[2])
    assert state(other) == before
    assert other.root.inner_text() == table
    assert other.tab.get_by_label("Pairs, or a text").input_value() == text
    tab.reload()
    assert state(figure) == before


def test_a_changed_address_is_followed(figure):
    figure.ask("location.hash = given", urlencode({"text": "a=b", "draw": 7}))
    figure.until("state().draw === 7")
    assert state(figure)["pairs"] == [["a", "b"]]
    assert state(figure)["width"] == 16
    # Also just after a change, which would have become the address.
    to = urlencode({"text": "a=b", "draw": 9})
    figure.role("button", name="New draw").evaluate(
        """(button, to) => {
          button.click();
          location.hash = to;
          return new Promise((done) => setTimeout(done, 500));
        }""",
        to,
    )
    assert state(figure)["draw"] == 9
    assert figure.tab.url.partition("#")[2] == to


#: What an address asks for that is not there, by what it is called.
WRONG = {
    "text=a%3Db&width=99": "width = 99",
    "text=a%3Db&width=": "width = ",
    "text=a%3Db&beta=NaN&decay=-1": "beta = NaN and decay = -1",
    "text=a%3Db&beta=0.333": "beta = 0.333",
    "text=a%3Db&draw=1e99": "draw = 1e99",
    "text=a%3Db&draw=%3Cimg%20src=x%3E": "draw = <img src",
    "text=%E0%A4%A": "a text that is damaged",
    "text=" + 2001 * "a": "a text of more than 2000 letters",
}


def test_a_wrong_address_is_ignored_in_plain_words(fresh):
    """`fresh` fails for every error of the page. The first one comes with the page,
    the others while it is there."""
    figure = None
    for address, said in WRONG.items():
        if figure is None:
            figure = fresh("forgets", place=f"#{address}")
        else:
            figure.ask("location.hash = given", address)
            figure.until_it_says(f"The address of this page asks for {said}")
        words = figure.words()
        assert words.startswith(f"The address of this page asks for {said}")
        assert "ignored" in words
        shown = state(figure)
        assert (shown["width"], shown["beta"], shown["draw"]) == (16, 0.8, 1)
        assert len(shown["pairs"]) == (1 if "text=a%3Db" in address else 11)
        # It is said once.
        figure.press("Many keys")
        assert "address" not in figure.words()


def test_other_addresses_mean_nothing(figure):
    before, words = state(figure), figure.words()
    for address in ("what-to-try", "%", "=&=", 'x"]', "width=4"):
        figure.ask(
            """new Promise((done) => {
              addEventListener("hashchange", () => setTimeout(done), { once: true });
              location.hash = given;
            })""",
            address,
        )
        assert (state(figure), figure.words()) == (before, words), address
