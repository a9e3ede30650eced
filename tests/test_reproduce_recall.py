"""`recall`, `mqar`, `formal`, `hybrid`: their tasks, models and training."""

import formal
import hybrid
import mqar
import recall
import torch
from answers import UNASKED, Recaller, growing, right
from torch.nn import functional as F


def rows(batch):
    """Tokens and answers of each sequence, as lists."""
    return zip(*map(torch.Tensor.tolist, batch), strict=True)


def test_every_key_is_asked_once_for_its_most_recent_value():
    for shows in (1, 2, 3):
        end = 8 * shows
        for row, answers in rows(recall.sequences(30, 4, 12, shows)):
            keys, values = row[:end:2], row[1:end:2]
            assert max(keys) < 12 <= min(values) and max(values) < 24
            assert {keys.count(key) for key in keys} == {shows}
            assert len({*values}) == len(values)
            memory = dict(zip(keys, values, strict=True))  # the last one wins
            assert sorted(row[end:]) == sorted(memory)
            assert answers == [UNASKED] * end + [memory[key] for key in row[end:]]
    # The order of pairs and of queries is random.
    tokens, wanted = recall.sequences(3000, 3, 6, 2)
    newest = (tokens[:, 11] == wanted[:, 12]).double().mean()
    again = (tokens[:, 0] == tokens[:, 2]).double().mean()
    assert abs(newest - 1 / 3) < 0.05 and abs(again - 1 / 5) < 0.05


def test_embeddings_contain_the_token_before():
    model = Recaller("delta", "own", 16, 1, 2, 20)
    model.blocks = torch.nn.ModuleList()
    tokens, _ = recall.sequences(3, 4, 8)
    x = model.embedding(tokens)
    x[:, 1:] += model.before(tokens[:, :-1])
    assert torch.equal(model(tokens), model._logits(x))


def test_other_features_keep_the_weights():
    models = []
    for features in ("own", "dpfp-1"):
        torch.manual_seed(3)
        models.append(Recaller("sum", features, 16, 2, 4, 20))
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(one, other)
    # Layers, heads, values of width 8 and the denominator, features.
    sizes = [2 * 4 * (8 + 1) * 8, 2 * 4 * (8 + 1) * 16]
    assert [model.state_size(20) for model in models] == sizes


def test_runs_of_recall(monkeypatch):
    """Of two keys that return once: what delta learns and sum cannot."""
    point = {"map": "own", "shows": 2, "pairs": 2, "heads": 2, "layers": 1}
    point |= {"symbols": 4, "lr": 2e-2, "seed": 1, "budget": 100}
    delta, add = (recall.run(point | {"mixer": rule}) for rule in ("delta", "sum"))
    assert delta["accuracy"] > 0.9 and add["accuracy"] < 0.75, (delta, add)
    # A run without a rate ends at chance: its second half begins with step 50.
    monkeypatch.setattr(recall, "EVERY", 10)
    chance = recall.run(point | {"mixer": "sum", "symbols": 64, "shows": 1, "lr": 1e-9})
    assert chance["steps"] == 60 and chance["accuracy"] < 0.15


def test_sequences_of_zoology():
    """Pairs, those that return, and each key once more among random tokens."""
    torch.manual_seed(1)
    for returns in (0, 2, 4):
        end = 2 * (4 + returns)
        batch = mqar.sequences(500, returns, 256, 64)
        for row, answers in rows(batch):
            keys, values = row[:end:2], row[1:end:2]
            assert len({*keys[:4]}) == 4 and {*keys[4:]} <= {*keys[:4]}
            assert 0 < min(keys) <= max(keys) < 128 <= min(values) <= max(values) < 256
            assert len({*values}) == len(values) and len({*keys[4:]}) == returns
            memory = dict(zip(keys, values, strict=True))  # the last one wins
            asked = [at for at, answer in enumerate(answers) if answer != UNASKED]
            assert {row[at]: answers[at] for at in asked} == memory
            assert len(asked) == 4 and {*asked} <= {*range(end, 64, 2)}
        # The first place is asked most, with 1 of 1 + 1/2 + 1/3 + ... in the first draw.
        places = (batch[1] != UNASKED)[:, end::2].double().mean(0)
        assert len(places) == 28 - returns
        assert places[0] > 0.6 > 0.1 > places[-4:].mean()


def test_epochs_of_zoology(monkeypatch):
    """All training sequences in every epoch, up to the first that solves the task."""
    seen, usual = [], mqar.loss
    for name, size in {"TRAIN": 8, "TEST": 50, "BATCH": 4}.items():
        monkeypatch.setattr(mqar, name, size)
    monkeypatch.setattr(mqar, "loss", lambda *x: seen.append(x[1][0]) or usual(*x))
    point = {"mixer": "delta", "returns": 4, "epochs": 2}
    point |= {"vocabulary": 64, "time": 32, "seed": 1}
    assert len(mqar.run(point)["curve"]) == 2
    one, other = (torch.cat(seen[at : at + 2]).unique(dim=0) for at in (0, 2))
    assert len(seen) == 4 and len(one) == 8 and torch.equal(one, other)
    monkeypatch.setattr(mqar, "SOLVED", -1)
    assert len(mqar.run(point)["curve"]) == 1


def test_answers_of_formal_languages_are_those_of_python():
    """Of every prefix of an expression, by `eval`, and of bits, by counting."""
    letters = "01234" + formal.OPERATORS
    for tokens, answers in rows(formal.arithmetic(20, 40)):
        text = "".join(letters[t] for t in tokens)
        assert answers == [
            UNASKED if t % 2 else eval(text[: t + 1]) % formal.MODULUS
            for t in range(40)
        ]
    for bits, odd in rows(formal.asked(formal.TASKS["parity"], 20, 3, 30)):
        assert odd[:2] == [UNASKED] * 2
        assert odd[2:] == [bits[: t + 1].count(1) % 2 for t in range(2, 30)]


def test_scores_are_shares_of_right_answers():
    answers = torch.tensor([[UNASKED, 1, 0, 1]])
    logits = torch.tensor([[[3, 2, 9], [1, 2, 9], [1, 2, 0], [1, 2, 0]]])
    assert right(lambda _: logits, None, answers).tolist() == [0, 0, 1]
    assert right(lambda _: logits, None, answers, among=2).tolist() == [1, 0, 1]

    def odd(bits, shown=0, bit=0):
        """Say always the right parity, and nothing else."""
        said = torch.zeros_like(bits)
        step = 2 if shown else 1
        said[:, shown::step] = (bits[:, shown::step] - bit).cumsum(1) % 2 + bit
        return F.one_hot(said)

    parity = formal.TASKS["parity"]
    assert formal.score(odd, parity, 3, 40) == 1
    assert formal.score(lambda bits: 1 - odd(bits), parity, 3, 40) == -1
    found = hybrid.score(lambda tokens: odd(tokens, 8, 4 + hybrid.VALUES), 4, 20)
    assert found == {"parity": 1, "value": 0}


def test_a_run_of_arithmetic_begins_with_short_sequences(monkeypatch):
    task = formal.TASKS["arithmetic"]
    drawn = []
    short = {"draw": lambda *x: drawn.append(x[1]) or formal.arithmetic(2, x[1])}
    short |= {"sizes": task.sizes | {"steps": 4}}
    monkeypatch.setitem(formal.TASKS, "arithmetic", task._replace(**short))
    point = formal.run({"task": "arithmetic", "limit": 2, "conv": 0, "seed": 1})
    assert drawn == [3, 23, 40, 40, formal.NEAR[1], formal.FAR[1]]
    assert len(point["curve"]) == 4
    assert [growing(step, 10, 8) for step in (0, 2, 3, 9)] == [2, 5, 6, 8]


def test_the_parity_says_which_neighbour_counts():
    bit = 6 + hybrid.VALUES
    for tokens, wanted in rows(hybrid.sequences(40, 6, 9)):
        held = dict(zip(tokens[:12:2], tokens[1:12:2], strict=True))
        assert sorted(held) == [*range(6)]
        assert {6 <= value < bit for value in held.values()} == {True}
        assert wanted[:12] == [UNASKED] * 12
        ones = 0
        for at in range(12, 30, 2):
            ones += tokens[at] - bit
            key = tokens[at + 1] - bit - 2
            if ones % 2:
                key = key - 1 if key % 2 else key + 1
            assert wanted[at : at + 2] == [bit + ones % 2, held[key]]


def test_stacks_and_a_run_of_one(monkeypatch):
    for stack, (mixers, limit) in hybrid.STACKS.items():
        model = hybrid.build(stack, 4)
        for name, block in zip(mixers, model.blocks, strict=True):
            limits = {"beta_max": limit} if name == "gated-delta" else {"rope": 0}
            assert limits.items() <= vars(block.mixer).items()
        assert not any("position" in name for name, _ in model.named_parameters())

    monkeypatch.setattr(hybrid, "TEST", 4)
    point = hybrid.run({"stack": hybrid.BOTH, "pairs": 4, "budget": 2, "seed": 1})
    assert 0 <= point["value"] < 0.6 and len(point["curve"]) == 2
