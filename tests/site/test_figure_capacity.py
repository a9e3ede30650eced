"""The capacity figure: losses are those of fwlab's rules, no curve is below
the law, and trained points are those of the results.
"""

import json
import re
from statistics import median

import pytest
import torch
from built import ROOT

from fwlab import ops
from fwlab.data.retrieval import law, loss
from fwlab.feature_maps import DPFP, l2_normalize

STATE = "document.querySelector('#figure-capacity').figure.state()"
SIZES = (1, 2, 15, 16, 17, 40, 128)
NAMES = ("sum", "delta", "dpfp")


@pytest.fixture
def tab(fresh):
    return fresh("capacity").tab


def state(tab) -> dict:
    return tab.evaluate(STATE)


def move(tab, label: str, value: int):
    tab.get_by_role("slider", name=label).fill(str(value))


def read_back(name: str, keys: torch.Tensor, nu: int) -> torch.Tensor:
    """What fwlab reads under each key after all of them were written."""
    phi = l2_normalize(DPFP(nu)(keys)) if name == "dpfp" else keys
    k, v = phi[None, :, None], torch.eye(len(keys), dtype=keys.dtype)[None, :, None]
    if name == "sum":
        _, W = ops.sum_rule(k, k, v, normalize=False, return_state=True)
    else:
        one = torch.ones(k.shape[:3], dtype=keys.dtype)
        _, W = ops.delta_rule(k, k, v, one, return_state=True)
    return phi @ W[0, 0].mT


@pytest.mark.parametrize(
    ("width", "nu", "kind"),
    [
        (16, 1, "random"),
        (12, 3, "random"),
        (16, 1, "orthogonal"),
        (4, 3, "orthogonal"),
    ],
)
def test_losses_are_those_of_fwlab(tab, width, nu, kind):
    move(tab, "Width of a key", width)
    tab.get_by_role("radio", name=f"ν = {nu}").check()
    tab.locator(f"#figure-capacity input[value={kind}]").check()
    shown = state(tab)
    assert [shown[x] for x in ("width", "nu", "kind")] == [width, nu, kind]
    rooms = {"sum": width, "delta": width, "dpfp": DPFP(nu).width(width)}
    for name in NAMES:
        memory = shown["memories"][name]
        assert memory["room"] == rooms[name]
        keys = torch.tensor(memory["keys"], dtype=torch.float64)
        assert keys.shape == (128, width)
        assert torch.allclose(keys.norm(dim=1), torch.ones(128).double())
        for S in SIZES:
            read = read_back(name, keys[:S], nu)
            wanted = loss(read, torch.arange(S)).item()
            assert memory["losses"][S - 1] == pytest.approx(wanted, abs=1e-9)
            own = read.diagonal()
            others = read - torch.diag(own) - torch.diag(torch.full((S,), 1e9))
            right = (own > others.amax(1) + 1e-9).sum().item() if S > 1 else 1
            assert memory["right"][S - 1] == right
            assert memory["law"][S - 1] == pytest.approx(law(S, rooms[name]))


def test_no_memory_beats_the_law(tab):
    for width in (4, 16, 64):
        move(tab, "Width of a key", width)
        for kind in ("random", "orthogonal"):
            tab.locator(f"#figure-capacity input[value={kind}]").check()
            for memory in state(tab)["memories"].values():
                both = zip(memory["losses"], memory["law"], strict=True)
                assert all(found >= limit - 1e-9 for found, limit in both)


def test_orthogonal_keys_lose_nothing_then_twice_the_law(tab):
    """What the page says; n times under the sum rule, if keys have n values."""
    tab.locator("#figure-capacity input[value=orthogonal]").check()
    for name, memory in state(tab)["memories"].items():
        for S in range(1, 129):
            n = S / memory["room"] if name == "sum" else 2
            if n > 2 and n % 1:
                continue  # some keys have a value more
            wanted = max(n, 2) * law(S, memory["room"])
            assert memory["losses"][S - 1] == pytest.approx(wanted, abs=1e-9)
        assert memory["right"][: memory["room"]] == list(range(1, memory["room"] + 1))


def test_random_keys_are_random_and_can_be_drawn_again(tab):
    """The mean loss of the sum over draws is (S - 1) / 2 d, as the page says."""
    draws = []
    for _ in range(12):
        draws.append(state(tab)["memories"]["sum"])
        tab.get_by_role("button", name="New draw").click()
    assert len({str(draw["keys"][0]) for draw in draws}) == len(draws)
    for S in (17, 64):
        mean = sum(draw["losses"][S - 1] for draw in draws) / len(draws)
        assert mean == pytest.approx((S - 1) / 32, rel=0.1)
    keys = torch.tensor([draw["keys"] for draw in draws]).flatten(0, 1)
    assert keys.mean(0).abs().max() < 0.03
    assert (keys.square().mean(0) - 1 / 16).abs().max() < 0.01


def test_what_is_drawn_is_what_is_computed(tab):
    """The row of the table, the dots and the words, at several sizes."""
    figure = tab.locator("#figure-capacity")
    for S in (1, 32, 100):
        move(tab, "Pairs S", S)
        shown = state(tab)
        assert shown["count"] == S
        words = figure.locator(".fw-words").inner_text()
        rows = figure.locator("[data-part=table] text").all_text_contents()[5:]
        for n, name in enumerate(NAMES):
            memory = shown["memories"][name]
            cells = rows[5 * n : 5 * n + 5]
            found = memory["losses"][S - 1]
            assert cells[1:] == [
                str(memory["room"]),
                f"{found:.2f}",
                f"{memory['law'][S - 1]:.2f}",
                f"{memory['right'][S - 1]} of {S}",
            ]
            assert f" {found:.2f}" in words
            y = float(figure.locator(f"[data-dot={name}]").get_attribute("cy"))
            assert y == pytest.approx(216 - min(found, 1.2) / 1.2 * 208, abs=0.06)
        # The curve goes through the dot.
        path = figure.locator("[data-curve=delta]").get_attribute("d")
        points = re.findall(r"[ML]([\d.]+) ([\d.]+)", path)
        assert len(points) == 128
        dot = figure.locator("[data-dot=delta]")
        assert list(points[S - 1]) == [dot.get_attribute(x) for x in ("cx", "cy")]
        for law_name, name in (("plain", "sum"), ("dpfp", "dpfp")):
            path = figure.locator(f"[data-law={law_name}]").get_attribute("d")
            x, y = map(float, path.rpartition("L")[2].split())
            assert x == pytest.approx(384, abs=0.06)
            limit = shown["memories"][name]["law"][-1]
            assert y == pytest.approx(216 - limit / 1.2 * 208, abs=0.06)


def test_trained_points_are_those_of_the_results(tab):
    """Medians of all seeds up to 128 pairs; none below the law."""
    runs = []
    for name in ("quick/capacity", "capacity"):
        text = (ROOT / "docs" / "results" / f"{name}.json").read_text("utf-8")
        runs += json.loads(text)["points"]
    for width, expected in ((16, 4), (64, 6), (32, 0)):
        move(tab, "Width of a key", width)
        for nu in (1, 2, 3):
            tab.get_by_role("radio", name=f"ν = {nu}").check()
            shown = state(tab)["trained"]
            for kind, label in (("linear", "linear"), ("dpfp", f"dpfp-{nu}")):
                losses = {}
                for run in runs:
                    if (run["map"], run["d_key"]) == (label, width) and run["S"] <= 128:
                        losses.setdefault(run["S"], []).append(run["loss"])
                wanted = [
                    [S, pytest.approx(median(each), abs=5.1e-5)]
                    for S, each in sorted(losses.items())
                ]
                assert shown[kind] == wanted
                room = width if kind == "linear" else DPFP(nu).width(width)
                assert all(y >= law(S, room) - 1e-4 for S, y in shown[kind])
                marks = tab.locator(f"#figure-capacity [data-trained={kind}]")
                drawn = (marks.get_attribute("d") or "").count("M")
                assert drawn == len(shown[kind])
        assert len(shown["linear"]) == expected
