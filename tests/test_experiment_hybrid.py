"""`hybrid`: what is asked, by a dictionary and a count, and the claims."""

import torch

from fwlab.experiments import hybrid
from fwlab.experiments.recall import UNASKED
from fwlab.layers import FastWeightAttention, SoftmaxAttention


def test_the_parity_says_which_neighbour_counts():
    torch.manual_seed(0)
    pairs, asks = 6, 9
    bit, question = pairs + hybrid.VALUES, pairs + hybrid.VALUES + 2
    for tokens, wanted in zip(
        *map(torch.Tensor.tolist, hybrid.sequences(40, pairs, asks)), strict=True
    ):
        shown, rest = tokens[: 2 * pairs], tokens[2 * pairs :]
        held = dict(zip(shown[::2], shown[1::2], strict=True))
        assert sorted(held) == [*range(pairs)]
        assert {pairs <= value < bit for value in held.values()} == {True}
        assert wanted[: 2 * pairs] == [UNASKED] * 2 * pairs
        ones = 0
        for at in range(0, 2 * asks, 2):
            ones += rest[at] - bit
            key = rest[at + 1] - question
            if ones % 2:
                key = key - 1 if key % 2 else key + 1
            assert wanted[2 * pairs + at :][:2] == [bit + ones % 2, held[key]]


def test_scores_are_of_parities_and_of_values():
    """One that says the right parity, and always the value of the key itself."""

    def answers(tokens):
        parity = (tokens[:, 8::2] - 4 - hybrid.VALUES).cumsum(1) % 2
        held = (
            torch.zeros(len(tokens), 4)
            .long()
            .scatter(1, tokens[:, :8:2], tokens[:, 1:8:2])
        )
        found = held.gather(1, tokens[:, 9::2] - 4 - hybrid.VALUES - 2)
        said = torch.zeros_like(tokens)
        said[:, 8::2], said[:, 9::2] = parity + 4 + hybrid.VALUES, found
        return torch.nn.functional.one_hot(said)

    torch.manual_seed(0)
    found = hybrid.score(answers, 4, 20)
    assert found["parity"] == 1 and abs(found["value"] - hybrid.HALF) < 0.03


def test_claims_follow_the_shares():
    def verdicts(both, others):
        points = hybrid.points(False)
        for p in points:
            p["value"] = (
                both
                if p["stack"] == hybrid.BOTH or p["pairs"] == hybrid.FEW
                else others
            )
            p["parity"] = 1 if p["stack"] in (hybrid.BOTH, hybrid.DELTA) else others
        return {c.verdict for c in hybrid.claims(points)}

    assert verdicts(0.97, 0.5) == {"holds"}
    # That gated delta alone counts is still so.
    assert verdicts(0.5, 0.9) == {"does not", "holds"}
    assert {c.verdict for c in hybrid.claims([])} == {"not run"}


def test_a_stack_has_the_layers_and_the_strength_of_its_name():
    for stack, (mixers, limit) in hybrid.STACKS.items():
        model = hybrid.build(stack, 4)
        names = {FastWeightAttention: "gated-delta", SoftmaxAttention: "softmax"}
        assert [names[type(block.mixer)] for block in model.blocks] == mixers
        for block in model.blocks:
            delta = isinstance(block.mixer, FastWeightAttention)
            assert block.mixer.beta_max == limit if delta else not block.mixer.rope
        assert not any("position" in name for name, _ in model.named_parameters())
    both, weak, turned = (
        hybrid.STACKS[s] for s in (hybrid.BOTH, hybrid.WEAK, hybrid.TURNED)
    )
    assert both[0] == weak[0] == turned[0][::-1] == ["gated-delta", "softmax"]
    assert (both[1], weak[1]) == (2, 1)
