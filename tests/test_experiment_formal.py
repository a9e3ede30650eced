"""`formal`: what is asked, by rules of its own, and the claims."""

import torch

from fwlab.experiments import formal
from fwlab.experiments.recall import UNASKED


def test_answers_are_those_of_python():
    """Of every prefix of an expression, by `eval`, and of bits, by counting."""
    torch.manual_seed(1)
    for tokens, answers in zip(*formal.arithmetic(20, 40), strict=True):
        said = [*map(str, range(formal.MODULUS)), *formal.OPERATORS]
        text = "".join(said[t] for t in tokens)
        for t, answer in enumerate(answers.tolist()):
            if t % 2:
                assert answer == UNASKED
            else:
                assert answer == eval(text[: t + 1]) % formal.MODULUS
    tokens, answers = formal.asked(formal.TASKS["parity"], 20, 3, 30)
    for bits, odd in zip(tokens.tolist(), answers.tolist(), strict=True):
        assert odd[:2] == [UNASKED] * 2
        assert odd[2:] == [bits[: t + 1].count(1) % 2 for t in range(2, 30)]


def test_claims_follow_the_scores():
    def verdicts(beta_1, beta_2):
        for p in formal.points(False):
            p["far"] = beta_1 if p["limit"] == 1 else beta_2
            yield p

    right = formal.claims([*verdicts(0.01, 0.99)])
    assert {c.verdict for c in right} == {"reproduced", "holds"}
    wrong = formal.claims([*verdicts(0.7, 0.6)])
    assert {c.verdict for c in wrong} == {"not", "does not"}


def test_a_score_is_1_without_errors_and_0_by_chance():
    """Of the answers that count alone: the first two do not."""
    task = formal.TASKS["parity"]

    def odd(bits):
        right = bits.cumsum(1) % 2
        right[:, :2] = 1 - right[:, :2]
        return torch.nn.functional.one_hot(right, 2).double()

    assert formal.score(odd, task, 3, 40) == 1
    assert formal.score(lambda bits: 1 - odd(bits), task, 3, 40) == -1
    assert abs(formal.score(lambda bits: torch.rand(*bits.shape, 2), task, 3, 40)) < 0.1


def test_arithmetic_begins_with_short_sequences(monkeypatch):
    lengths, usual = [], formal.asked

    def asked(task, batch, first, length):
        lengths.append(length)
        return usual(task, 2, first, length)

    monkeypatch.setattr(formal, "asked", asked)
    for name, wanted in (("parity", [40] * 4), ("arithmetic", [3, 23, 40, 40])):
        monkeypatch.setitem(formal.TASKS, name, formal.TASKS[name]._replace(budget=4))
        lengths.clear()
        point = formal.run({"task": name, "limit": 2, "conv": 0, "seed": 1})
        assert lengths == [*wanted, formal.NEAR[1], formal.FAR[1]]
        assert len(point["curve"]) == 4
