"""The ladder: on every rung, memories and readings are those of fwlab's rule."""

from functools import partial

import torch

from fwlab import ops

exact = partial(torch.tensor, dtype=torch.float64)

RUNGS = {
    "sum": 3,
    "decay": 3,
    "delta": 4,
    "gated delta": 4,
    "per channel": 5,
    "erase, write": 6,
    "β up to 2": 7,
    "more steps": 8,
}


def by_fwlab(rung, shown):
    """What the keys read after each step, [steps, keys, value], and the last W."""
    steps = [step for token in shown["tokens"] for step in token["steps"]]
    d, r, k, v = (exact([s[name] for s in steps]) for name in "drkv")
    erase = (r * k).sum(-1, keepdim=True)  # keys have length 1
    # The keys that read are heads of their own.
    q = exact(shown["keys"]).expand(1, len(steps), 3, 3)
    k, v, d, erase = (x[None, :, None].expand(-1, -1, 3, -1) for x in (k, v, d, erase))
    beta, log_d = erase[..., 0], d.log()
    options = {"return_state": True, "implementation": "naive"}
    plain = options | {"normalize": False}
    if rung == "sum":
        y, W = ops.sum_rule(q, k, v, **plain)
    elif rung == "decay":
        y, W = ops.sum_rule(q, k, v, log_decay=log_d[..., 0], **plain)
    elif rung == "delta":
        y, W = ops.delta_rule(q, k, v, beta, **plain)
    elif rung == "gated delta":
        y, W = ops.gated_delta_rule(q, k, v, beta, log_d[..., 0], **options)
    elif rung == "per channel":
        y, W = ops.kimi_delta_rule(q, k, v, beta, log_d, **options)
    else:
        gates = erase.expand_as(k), torch.ones_like(v), log_d
        y, W = ops.gated_delta_rule_2(q, k, v, *gates, **options)
    return y[0], W[0, 0]


def test_rungs_compute_what_fwlab_does(fresh):
    figure = fresh("ladder")
    for rung, score in RUNGS.items():
        figure.choose(rung)
        shown = figure.state()
        tokens = shown["tokens"]
        y, W = by_fwlab(rung, shown)
        last = torch.tensor([len(token["steps"]) for token in tokens]).cumsum(0) - 1
        reads, wanted = (
            exact([token[name] for token in tokens]) for name in ("reads", "wanted")
        )
        torch.testing.assert_close(reads, y[last])
        torch.testing.assert_close(exact(tokens[-1]["W"]), W)
        right = (y[last] - wanted).abs().amax(-1) < 1e-9
        assert [token["right"] for token in tokens] == right.tolist()
        assert right.all(-1).sum() == shown["scores"][rung] == score
    # One step takes all of a rule's gates, the last token of this rung two.
    assert len(y) == len(tokens) + 1


def test_what_is_expected_is_what_a_table_of_keys_holds(fresh):
    table = dict.fromkeys("ABC", (0, 0))
    changes = [{"A": (1, 0)}, {"B": (0, 1)}, {"C": (1, 1)}, {"A": (0, -1)}]
    changes += [{"A": (0, 1), "B": (0, 0)}, {"C": (2, 0)}, {"C": (-2, 0)}]
    changes += [{"A": (-2, 0), "B": (0, 1), "C": (0, 0)}]
    for token, change in zip(fresh("ladder").state()["tokens"], changes, strict=True):
        table |= change
        wanted = exact(token["wanted"])
        torch.testing.assert_close(wanted, exact([*table.values()]))


def shown_as(x):
    return f"{x:.1f}".replace("-0.0", "0.0").replace("-", "−")


def test_the_drawing_shows_them(fresh):
    """Every number and mark, and the matrices of the chosen token."""
    figure = fresh("ladder")
    for rung, at in (("sum", 4), ("more steps", 8)):
        figure.choose(rung)
        figure.slide("Token", at)
        shown = figure.state()
        tokens = shown["tokens"]
        assert shown["token"] == at
        columns = figure.ask("all('svg .fw-tap').map((e) => texts('text', e))")
        for token, (_, _, *texts) in zip(tokens, columns, strict=True):
            expected = []
            for reads, right in zip(token["reads"], token["right"], strict=True):
                expected += [*map(shown_as, reads), "✓" if right else "✗"]
            assert texts == expected
        cells = figure.texts("svg .fw-cell + .fw-cell-text")[-12:]
        both = tokens[at - 2]["W"], tokens[at - 1]["W"]
        assert cells == [shown_as(x) for W in both for row in W for x in row]
    figure.css(".fw-tap").nth(1).click()
    assert figure.state()["token"] == 2
