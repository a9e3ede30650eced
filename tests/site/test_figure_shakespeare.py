"""The model of Shakespeare: what the page computes is what PyTorch computes."""

import json

import pytest
import torch
from built import ROOT
from safetensors import safe_open
from torch.nn import functional as F

from fwlab import training
from fwlab.models import LanguageModel

FOLDER = ROOT / "docs" / "figures" / "shakespeare"
STATE = "document.querySelector('#figure-shakespeare').figure.state()"
TEXT = "KING:\nWhat say you, sir? The crown, the crown!\n\nQUEEN:\nWhat crown"


def model(rule: str) -> tuple[LanguageModel, str]:
    """The weights of the page in PyTorch, and the alphabet."""
    with safe_open(FOLDER / f"{rule}.safetensors", framework="pt") as file:
        about = json.loads(file.metadata()["model"])
        weights = {name: file.get_tensor(name).float() for name in file.keys()}  # noqa: SIM118
    sizes = {name: about[name] for name in ("layers", "heads", "d_model")}
    made = LanguageModel(len(about["alphabet"]), about["mixer"], **sizes)
    made.load_state_dict(weights)
    return made.eval(), about["alphabet"]


@pytest.fixture
def live(fresh):
    """The page with the model started."""
    figure = fresh("shakespeare")
    figure.start()
    return figure.tab


def weights_asked_for(tab) -> list[str]:
    entries = "performance.getEntriesByType('resource').map((e) => e.name)"
    return [n for n in tab.evaluate(entries) if n.endswith(".safetensors")]


def test_weights_come_on_first_use(fresh):
    tab = fresh("shakespeare").tab
    assert weights_asked_for(tab) == []
    # Until then the picture that needs no script is there.
    assert tab.locator("#figure-shakespeare .fw-heads img").count() == 8
    tab.get_by_role("button", name="Start the model").click()
    tab.get_by_label("Text to read").wait_for()
    assert [n.rpartition("/")[2] for n in weights_asked_for(tab)] == [
        "delta.safetensors"
    ]
    tab.get_by_label("sum rule").check()
    tab.wait_for_function(f"{STATE}.rule === 'sum'")
    assert len(weights_asked_for(tab)) == 2


@pytest.mark.parametrize("rule", ["delta", "sum"])
def test_files_are_small_and_of_trained_models(rule):
    path = FOLDER / f"{rule}.safetensors"
    assert path.stat().st_size < 500_000
    run = json.loads(
        (ROOT / "docs" / "results" / f"shakespeare-{rule}.json").read_text("utf-8")
    )
    with safe_open(path, framework="pt") as file:
        about = json.loads(file.metadata()["model"])
    assert about["mixer"] == rule == run["config"]["mixer"]
    assert about["validation_loss"] == run["validation_loss"]
    # What its page says of it.
    text = (ROOT / "docs" / "figures" / "shakespeare.md").read_text("utf-8")
    assert f"{run['validation_loss']:.2f}" in text


@pytest.mark.parametrize("rule", ["delta", "sum"])
def test_agrees_with_pytorch(live, rule):
    """Losses after every character, logits and all fast weights at some,
    of a text as long as fits: to 1e-4.
    """
    made, alphabet = model(rule)
    text = (TEXT * 4)[:240]
    if rule == "sum":
        live.get_by_label("sum rule").check()
        live.wait_for_function(f"{STATE}.rule === 'sum'")
    live.get_by_label("Text to read").fill(text)
    tokens = torch.tensor([[alphabet.index(c) for c in text]])
    with torch.no_grad():
        logits = made(tokens)[0]
    losses = F.cross_entropy(logits[:-1], tokens[0, 1:], reduction="none")
    found = live.evaluate(STATE)
    assert found["text"] == text and found["position"] == len(text)
    assert found["bits"][0] is None
    bits = torch.tensor(found["bits"][1:])
    wanted = losses / torch.log(torch.tensor(2.0))
    torch.testing.assert_close(bits, wanted, atol=1e-4, rtol=0)

    slider = live.locator("#figure-shakespeare input[type=range]")
    for position in (1, 30, 119, len(text)):
        slider.fill(str(position))
        found = live.evaluate(STATE)
        assert found["position"] == position
        torch.testing.assert_close(
            torch.tensor(found["logits"]), logits[position - 1], atol=1e-4, rtol=0
        )
        with torch.no_grad():
            states = made.prefill(tokens[:, :position])[1][1:]
        # The memory of each head, chosen by a click; of a long text, of the last.
        for layer, state in enumerate(states):
            W = state if rule == "delta" else state.W
            for head in range(0 if position < 50 else W.shape[1] - 1, W.shape[1]):
                name = f"layer {layer + 1}, head {head + 1}"
                live.get_by_role("button", name=name).click()
                found = live.evaluate(STATE)
                assert found["head"] == [layer, head]
                # The sum rule's memory has entries of 30 by then.
                torch.testing.assert_close(
                    torch.tensor(found["W"]), W[0, head].flatten(), atol=1e-4, rtol=1e-5
                )


@pytest.mark.parametrize("rule", ["delta", "sum"])
def test_answers_are_those_of_the_memory(live, rule):
    """Each key so far is asked for; the value most like the answer."""
    made, alphabet = model(rule)
    live.get_by_label("Text to read").fill(TEXT)
    if rule == "sum":
        live.get_by_label("sum rule").check()
        live.wait_for_function(f"{STATE}.rule === 'sum'")
    found = live.evaluate(STATE)
    layer, head = found["head"]
    assert layer == 0
    tokens = torch.tensor([[alphabet.index(c) for c in TEXT]])
    mixer = made.blocks[0].mixer
    with torch.no_grad():
        x = made.blocks[0].norm_mixer(made.embedding(tokens))
        key = mixer._features(mixer.to_k(x).unflatten(-1, (mixer.heads, -1)))[
            0, :, head
        ]
        value = mixer.to_v(x).unflatten(-1, (mixer.heads, -1))[0, :, head]
        state = mixer.prefill(x)[1]
        W = (state if rule == "delta" else state.W)[0, head]
        likeness = torch.cosine_similarity((key @ W.T)[:, None], value[None], dim=-1)
    best = likeness.max(1).values
    chosen = likeness[torch.arange(len(TEXT)), torch.tensor(found["answers"])]
    torch.testing.assert_close(chosen, best, atol=1e-4, rtol=0)
    # The letters below the text are theirs.
    shown = {"\n": "↵", " ": "␣"}
    letters = live.locator("#figure-shakespeare .fw-strip i").all_inner_texts()
    assert letters == [shown.get(TEXT[i], TEXT[i]) for i in found["answers"]]
    same = live.locator("#figure-shakespeare .fw-same").count()
    assert same == sum(
        TEXT[i] == c for i, c in zip(found["answers"], TEXT, strict=True)
    )
    words = live.locator("#figure-shakespeare .fw-words").inner_text()
    assert f"recalls {same} of {len(TEXT)} characters" in words


def test_writes_on_with_the_likeliest_characters(live):
    made, alphabet = model("delta")
    live.get_by_label("Text to read").fill("KING:\n")
    live.get_by_role("button", name="Let it write").click()
    text = live.evaluate(STATE)["text"]
    tokens = torch.tensor([[alphabet.index(c) for c in "KING:\n"]])
    wanted = made.generate(tokens, 40, temperature=0)[0]
    assert text == "".join(alphabet[i] for i in wanted)


def test_a_full_text_is_said_to_be(live):
    field = live.get_by_label("Text to read")
    words = live.locator("#figure-shakespeare .fw-words")
    more = live.get_by_role("button", name="Let it write")
    field.fill("o" * 230)
    assert "240 characters at most" not in words.inner_text()
    more.focus()
    more.press("Enter")
    assert "240 characters at most" in words.inner_text()
    assert more.is_disabled()
    # The keyboard is not left on a button that is off.
    assert live.evaluate("document.activeElement.textContent") == "Empty"
    live.keyboard.press("Enter")
    assert more.is_enabled()


def test_typing_continues_where_the_text_changed(live):
    field = live.get_by_label("Text to read")
    field.fill("To be")
    first = live.evaluate(STATE)
    field.press_sequentially(" or")
    field.press("Backspace")
    field.press("Backspace")
    field.press("Backspace")
    again = live.evaluate(STATE)
    assert again["text"] == "To be" and again["logits"] == first["logits"]
    field.fill("Größe")  # not in its alphabet
    assert live.evaluate(STATE)["text"] == "Gre"
    assert "left out: ö ß" in live.locator("#figure-shakespeare .fw-words").inner_text()
    live.get_by_role("button", name="Empty").click()
    assert live.evaluate(STATE)["text"] == ""
    assert (
        "memory is empty" in live.locator("#figure-shakespeare .fw-words").inner_text()
    )


def test_only_the_last_write_can_be_seen(live):
    """It is an outer product: a matrix of rank one."""
    live.get_by_label("only what the last character changed").check()
    found = live.evaluate(STATE)
    change = torch.tensor(found["W"], dtype=torch.float64).view(24, 48)
    values = torch.linalg.svdvals(change)
    assert values[0] > 1e-3 and values[1] < 1e-4 * values[0]


@pytest.mark.speed
def test_is_fast_enough_to_type_into(live):
    """The limit is that of the page; the best of three, since the machine
    may be doing other things.
    """
    speeds = []
    for i in range(3):
        live.get_by_label("Text to read").fill("AB C"[i] + TEXT * 3)
        found = live.evaluate(STATE)
        assert len(found["text"]) == len(TEXT * 3) + 1
        speeds.append(found["speed"])
    assert max(speeds) >= 200


def test_replay_can_be_stopped(live):
    # In the page: a slow test would come after its end.
    before, after = live.get_by_role("button", name="Replay").evaluate(
        f"""async (button) => {{
          button.click();
          const pause = (time) => new Promise((done) => setTimeout(done, time));
          while ({STATE}.position < 3) await pause(5);
          button.click();
          const before = {STATE}.position;
          await pause(400);
          return [before, {STATE}.position];
        }}"""
    )
    assert before == after < len(live.evaluate(STATE)["text"])


def test_replay_of_an_empty_text_does_nothing(live):
    live.get_by_role("button", name="Empty").click()
    live.get_by_role("button", name="Replay").click()
    live.wait_for_timeout(400)
    assert live.evaluate(STATE)["position"] == 0


def test_the_last_choice_counts_while_weights_are_slow(live):
    waiting = []
    live.context.route("**/sum.safetensors", lambda route: waiting.append(route))
    live.get_by_label("sum rule").check()
    live.get_by_label("delta rule").check()
    live.wait_for_function(f"{STATE}.rule === 'delta'")
    assert len(waiting) == 1
    with live.expect_response("**/sum.safetensors"):
        waiting[0].continue_()
    live.wait_for_timeout(300)
    assert live.evaluate(STATE)["rule"] == "delta"
    assert live.get_by_label("delta rule").is_checked()


def test_weights_that_do_not_come_are_said_to(live):
    live.context.route("**/sum.safetensors", lambda route: route.fulfill(status=204))
    # Not check(): the choice may be back before it is looked at.
    live.get_by_label("sum rule").click()
    words = live.locator("#figure-shakespeare .fw-words")
    live.wait_for_function(
        "document.querySelector('#figure-shakespeare .fw-words').textContent.includes('did not come')"
    )
    assert "weights of the sum rule did not come" in words.inner_text()
    # The choice is again what is shown; and can be made again.
    assert live.get_by_label("delta rule").is_checked()
    live.context.unroute("**/sum.safetensors")
    live.get_by_label("sum rule").check()
    live.wait_for_function(f"{STATE}.rule === 'sum'")


def test_speaks_when_the_reader_pauses(live):
    """What changes with every key is not announced with every key."""
    live.evaluate(
        """() => {
          globalThis.said = [];
          const status = document.querySelector("#figure-shakespeare .fw-status");
          // One record per change, also of several changes at once.
          new MutationObserver((changes) => {
            for (const { addedNodes } of changes) said.push(addedNodes[0]?.textContent);
          })
            .observe(status, { childList: true });
        }"""
    )
    # All in one turn of the browser: nobody can pause in between.
    live.get_by_label("Text to read").evaluate(
        """(box) => {
          for (const letter of "to be") {
            box.value += letter;
            box.dispatchEvent(new Event("input", { bubbles: true }));
          }
        }"""
    )
    live.wait_for_function("said.length > 0")
    live.wait_for_timeout(300)
    words = live.locator("#figure-shakespeare .fw-words").inner_text()
    assert live.evaluate("said") == [words]


def test_says_why_it_does_not_run_from_disk(look, site):
    tab = look("figures/shakespeare.html", base=f"{site.as_uri()}/")
    tab.get_by_role("button", name="Start the model").click()
    words = tab.locator("#figure-shakespeare .fw-words")
    assert "python -m http.server" in words.inner_text()
    assert tab.get_by_role("button", name="Start the model").is_enabled()


# The command that makes the files


def test_export_web(tmp_path):
    from fwlab.cli import export_web

    run = training.Config(
        "delta", layers=1, heads=2, d_model=8, block=4, batch=2, steps=1, device="cpu"
    )
    trainer = training.Trainer(run, "the quick brown fox " * 20)
    for _ in trainer.run():
        pass
    trainer.save(tmp_path / "checkpoint.safetensors")
    export_web(tmp_path / "checkpoint.safetensors", tmp_path / "web.safetensors")
    with safe_open(tmp_path / "web.safetensors", framework="pt") as file:
        about = json.loads(file.metadata()["model"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert about["alphabet"] == trainer.characters.alphabet
    for name, weight in trainer.model.state_dict().items():
        assert torch.equal(tensors[name], weight.half())


def test_export_web_refuses_other_mixers(tmp_path):
    config = training.Config("softmax", layers=1, heads=1, d_model=4, block=4)
    made = training.checkpoint.new_model(config, 3)
    characters = training.checkpoint.Characters("abc")
    checkpoint = training.Checkpoint(made, characters, config, 0, {}, [], "")
    with pytest.raises(
        training.CheckpointError, match="delta or sum for the live figure, got softmax"
    ):
        training.export_web(tmp_path / "web.safetensors", checkpoint)
    assert list(tmp_path.iterdir()) == []
