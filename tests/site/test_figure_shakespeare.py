"""The model of Shakespeare: what the page computes is what PyTorch computes."""

import functools
import json

import pytest
import torch
from built import ROOT, asks
from export_web import export_web
from safetensors import safe_open
from torch.nn import functional as F

from fwlab import training
from fwlab.models import LanguageModel

FOLDER = ROOT / "docs" / "figures" / "shakespeare"
TEXT = "KING:\nWhat say you, sir? The crown, the crown!\n\nQUEEN:\nWhat crown"


@functools.cache
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
    """The figure with its model started."""
    figure = fresh("shakespeare")
    figure.start()
    return figure


def choose(live, rule: str):
    live.role("radio", name=f"{rule} rule").check()
    live.until(f"state().rule === '{rule}'")


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
    choose(live, rule)
    live.text.fill(text)
    tokens = torch.tensor([[alphabet.index(c) for c in text]])
    with torch.no_grad():
        logits = made(tokens)[0]
    losses = F.cross_entropy(logits[:-1], tokens[0, 1:], reduction="none")
    seen = live.state()
    assert seen["text"] == text and seen["position"] == len(text)
    assert seen["bits"][0] is None
    bits = torch.tensor(seen["bits"][1:])
    wanted = losses / torch.log(torch.tensor(2.0))
    torch.testing.assert_close(bits, wanted, atol=1e-4, rtol=0)

    slider = live.css("input[type=range]")
    for position in (1, 30, 119, len(text)):
        slider.fill(str(position))
        with torch.no_grad():
            states = made.prefill(tokens[:, :position])[1][1:]
        memories = [state if rule == "delta" else state.W for state in states]
        # The memory of heads chosen by a click: once of all, else of the last.
        heads = [
            (layer, head)
            for layer, W in enumerate(memories)
            for head in range(0 if position == 30 else W.shape[1] - 1, W.shape[1])
        ]
        names = [f"layer {layer + 1}, head {head + 1}" for layer, head in heads]
        shown = live.ask(asks.CHOOSE_HEADS, names)
        for (layer, head), seen in zip(heads, shown, strict=True):
            assert seen["position"] == position
            assert seen["head"] == [layer, head]
            logits_here, W = torch.tensor(seen["logits"]), torch.tensor(seen["W"])
            wanted = logits[position - 1], memories[layer][0, head].flatten()
            torch.testing.assert_close(logits_here, wanted[0], atol=1e-4, rtol=0)
            # The sum rule's memory has entries of 30 by then.
            torch.testing.assert_close(W, wanted[1], atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("rule", ["delta", "sum"])
def test_answers_are_those_of_the_memory(live, rule):
    """Each key so far is asked for; the value most like the answer."""
    made, alphabet = model(rule)
    live.text.fill(TEXT)
    choose(live, rule)
    seen = live.state()
    layer, head = seen["head"]
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
    chosen = likeness[torch.arange(len(TEXT)), torch.tensor(seen["answers"])]
    torch.testing.assert_close(chosen, best, atol=1e-4, rtol=0)
    # The letters below the text are theirs.
    shown = {"\n": "↵", " ": "␣"}
    letters, same, words = live.ask(
        "[texts('.fw-strip i'), all('.fw-strip .fw-same').length, words()]"
    )
    assert letters == [shown.get(TEXT[i], TEXT[i]) for i in seen["answers"]]
    assert same == sum(TEXT[i] == c for i, c in zip(seen["answers"], TEXT, strict=True))
    assert f"recalls {same} of {len(TEXT)} characters" in words


def test_writes_on_with_the_likeliest_characters(live):
    made, alphabet = model("delta")
    live.text.fill("KING:\n")
    live.role("button", name="Let it write").click()
    tokens = torch.tensor([[alphabet.index(c) for c in "KING:\n"]])
    wanted = made.generate(tokens, 40, temperature=0)[0]
    assert live.state()["text"] == "".join(alphabet[i] for i in wanted)


def test_a_full_text_is_said_to_be(live):
    more = live.role("button", name="Let it write")
    live.text.fill("o" * 230)
    assert "240 characters at most" not in live.words()
    more.press("Enter")
    assert "240 characters at most" in live.words()
    assert more.is_disabled()
    # The keyboard is not left on a button that is off.
    assert live.focused() == "Empty"
    live.tab.keyboard.press("Enter")
    assert more.is_enabled()


def test_typing_continues_where_the_text_changed(live):
    live.text.fill("To be")
    first = live.state()
    live.text.press_sequentially(" or")
    for _ in range(3):
        live.text.press("Backspace")
    again = live.state()
    assert again["text"] == "To be" and again["logits"] == first["logits"]
    # The last write is an outer product: a matrix of rank one.
    live.tab.get_by_label("only what the last character changed").check()
    change = torch.tensor(live.state()["W"], dtype=torch.float64).view(24, 48)
    values = torch.linalg.svdvals(change)
    assert values[0] > 1e-3 and values[1] < 1e-4 * values[0]
    live.text.fill("Größe")  # not in its alphabet
    assert live.state()["text"] == "Gre"
    assert "left out: ö ß" in live.words()
    live.press("Empty")
    assert live.state()["text"] == "" and "memory is empty" in live.words()


@pytest.mark.speed
def test_is_fast_enough_to_type_into(live):
    """The limit is that of the page; the best of three, since the machine
    may be doing other things.
    """
    speeds = []
    for i in range(3):
        live.text.fill("AB C"[i] + TEXT * 3)
        state = live.state()
        assert len(state["text"]) == len(TEXT * 3) + 1
        speeds.append(state["speed"])
    assert max(speeds) >= 200


def test_replay_can_be_stopped(live):
    # In the page: a slow test would come after its end.
    before, after, whole = live.ask(asks.REPLAY)
    assert before == after < whole
    # Of an empty text, it does nothing.
    live.press("Empty")
    live.press("Replay")
    live.tab.wait_for_timeout(400)
    assert live.state()["position"] == 0


def test_the_last_choice_counts_while_weights_are_slow(live):
    waiting, delta = [], live.role("radio", name="delta rule")
    live.tab.context.route("**/sum.safetensors", lambda route: waiting.append(route))
    live.role("radio", name="sum rule").check()
    delta.check()
    live.until("state().rule === 'delta'")
    assert len(waiting) == 1
    with live.tab.expect_response("**/sum.safetensors"):
        waiting[0].continue_()
    live.tab.wait_for_timeout(300)
    assert live.state()["rule"] == "delta"
    assert delta.is_checked()
    live.tab.context.unroute("**/sum.safetensors")


def test_speaks_when_the_reader_pauses(live):
    """What changes with every key is not announced with every key."""
    live.ask(asks.SPOKEN)
    live.until("said.length > 0")
    live.tab.wait_for_timeout(300)
    assert live.ask("said") == [live.words()]


# The command that makes the files


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
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert about["alphabet"] == trainer.vocabulary.alphabet
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
        export_web(tmp_path / "web.safetensors", checkpoint)
    assert list(tmp_path.iterdir()) == []
