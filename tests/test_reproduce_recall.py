"""Test tasks of `recall`, `mqar`, `formal`, `hybrid`, `state-tracking`, `reversal`."""

from importlib import import_module
from itertools import permutations

import formal
import hybrid
import mqar
import recall
import torch
from answers import UNASKED, growing, right
from torch.nn import functional as F

from fwlab.bench.undoing import recovered

tracking = import_module("state-tracking")
EYE, FOUR = torch.eye(4), [*permutations(range(4))]
#: Permutation matrices; each moves entry `i` to position `permutation[i]`.
MATRICES = [EYE[:, permutation] for permutation in FOUR]


def rows(batch):
    """Iterate over the tokens and the answers of all sequences, as lists."""
    return zip(*map(torch.Tensor.tolist, batch), strict=True)


def test_every_key_is_asked_once_for_its_most_recent_value():
    for shows in (1, 2, 3):
        end = 8 * shows
        for row, answers in rows(recall.sequences(30, 4, 12, shows)):
            keys, values = row[:end:2], row[1:end:2]
            assert max(keys) < 12 <= min(values) and max(values) < 24
            assert {keys.count(key) for key in keys} == {shows}
            assert len({*values}) == len(values)
            memory = dict(zip(keys, values, strict=True))  # A key's last value counts.
            assert sorted(row[end:]) == sorted(memory)
            assert answers == [UNASKED] * end + [memory[key] for key in row[end:]]
    # Pairs and queries are in random order.
    tokens, wanted = recall.sequences(3000, 3, 6, 2)
    newest = (tokens[:, 11] == wanted[:, 12]).double().mean()
    again = (tokens[:, 0] == tokens[:, 2]).double().mean()
    assert abs(newest - 1 / 3) < 0.05 and abs(again - 1 / 5) < 0.05


def test_sequences_of_zoology():
    """Sequences of `mqar` have pairs, repeated keys, and one query for each key."""
    torch.manual_seed(1)
    for returns in (0, 2, 4):
        end = 2 * (4 + returns)
        batch = mqar.sequences(500, returns, 256, 64)
        for row, answers in rows(batch):
            keys, values = row[:end:2], row[1:end:2]
            assert len({*keys[:4]}) == 4 and {*keys[4:]} <= {*keys[:4]}
            assert 0 < min(keys) <= max(keys) < 128 <= min(values) <= max(values) < 256
            assert len({*values}) == len(values) and len({*keys[4:]}) == returns
            memory = dict(zip(keys, values, strict=True))  # A key's last value counts.
            asked = [at for at, answer in enumerate(answers) if answer != UNASKED]
            assert {row[at]: answers[at] for at in asked} == memory
            assert len(asked) == 4 and {*asked} <= {*range(end, 64, 2)}
        # Positions follow a power law, so the first position is sampled most often.
        places = (batch[1] != UNASKED)[:, end::2].double().mean(0)
        assert len(places) == 28 - returns
        assert places[0] > 0.6 > 0.1 > places[-4:].mean()


def test_answers_of_formal_languages_are_those_of_python():
    """Answers agree with Python's `eval` of each prefix, and with parities of bits."""
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
        """Predict the right parity of each prefix, and no other token."""
        said = torch.zeros_like(bits)
        step = 2 if shown else 1
        said[:, shown::step] = (bits[:, shown::step] - bit).cumsum(1) % 2 + bit
        return F.one_hot(said)

    parity = formal.TASKS["parity"]
    assert formal.score(odd, parity, 3, 40) == 1
    assert formal.score(lambda bits: 1 - odd(bits), parity, 3, 40) == -1
    found = hybrid.score(lambda tokens: odd(tokens, 8, 4 + hybrid.VALUES), 4, 20)
    assert found == {"parity": 1, "value": 0}
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


def test_compositions_are_products_of_matrices():
    for tokens, answers in zip(*tracking.sequences(4, 50, 9), strict=True):
        product = EYE
        for token, answer in zip(tokens, answers, strict=True):
            product = product @ MATRICES[token]
            assert torch.equal(product, MATRICES[answer])


def test_an_update_with_beta_2_swaps_two_items():
    """Weights set by hand, with beta = 2 and three updates per token, make no error."""
    point = {"task": "compose", "weights": "by hand", "limit": 2, "seed": 1}
    found = tracking.run(point | {"items": 4, "steps": 3})
    assert found["near"] == found["far"] == 1
    for permutation, matrix in zip(FOUR, MATRICES, strict=True):
        turned = EYE
        for i, j in tracking.swaps(torch.tensor(permutation)):
            k = (EYE[i] - EYE[j]) / 2**0.5
            turned = turned @ (EYE - 2 * torch.outer(k, k))
        assert torch.allclose(turned, matrix, atol=1e-6), permutation


def test_an_inverted_update_gives_its_increment():
    W, k, v = (torch.randn(*size).double() for size in ((3, 4), (4,), (3,)))
    beta = torch.tensor(0.7).double()
    increment = beta * (v - W @ k)
    after = W + torch.outer(increment, k)
    assert torch.allclose(recovered(after, k, v, beta), increment)
