"""The capacity figure: losses are those of fwlab's rules, no curve is below
the law, and trained points are those of the results.
"""

import json
import re
from statistics import median

import pytest
import torch
from built import ROOT, asks

from fwlab import ops
from fwlab.data.retrieval import law, loss
from fwlab.feature_maps import DPFP, l2_normalize

SIZES = (1, 2, 15, 16, 17, 40, 128)
NAMES = ("sum", "delta", "dpfp")


@pytest.fixture
def figure(fresh):
    return fresh("capacity")


def choose(figure, width: int, nu: int = 1, kind: str = "random") -> dict:
    """The state with this setting; no memory in it beats the law."""
    figure.slide("Width of a key", width)
    figure.choose(f"ν = {nu}")
    figure.css(f"input[value={kind}]").check()
    shown = figure.state()
    assert [shown[x] for x in ("width", "nu", "kind")] == [width, nu, kind]
    for memory in shown["memories"].values():
        both = zip(memory["losses"], memory["law"], strict=True)
        assert all(loss >= limit - 1e-9 for loss, limit in both)
    return shown


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
def test_losses_are_those_of_fwlab(figure, width, nu, kind):
    shown = choose(figure, width, nu, kind)
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


def test_orthogonal_keys_lose_nothing_then_twice_the_law(figure):
    """What the page says; n times under the sum rule, if keys have n values."""
    for name, memory in choose(figure, 16, 1, "orthogonal")["memories"].items():
        for S in range(1, 129):
            n = S / memory["room"] if name == "sum" else 2
            if n > 2 and n % 1:
                continue  # some keys have a value more
            wanted = max(n, 2) * law(S, memory["room"])
            assert memory["losses"][S - 1] == pytest.approx(wanted, abs=1e-9)
        assert memory["right"][: memory["room"]] == list(range(1, memory["room"] + 1))


def test_random_keys_are_random_and_can_be_drawn_again(figure):
    """The mean loss of the sum over draws is (S - 1) / 2 d, as the page says."""
    figure.choose("random")
    draws = figure.role("button", name="New draw").evaluate(
        """(button) => Array.from({ length: 12 }, () => {
          button.click();
          return button.closest("#figure-capacity").figure.state().memories.sum;
        })"""
    )
    assert len({str(draw["keys"][0]) for draw in draws}) == len(draws)
    for S in (17, 64):
        mean = sum(draw["losses"][S - 1] for draw in draws) / len(draws)
        assert mean == pytest.approx((S - 1) / 32, rel=0.1)
    keys = torch.tensor([draw["keys"] for draw in draws]).flatten(0, 1)
    assert keys.mean(0).abs().max() < 0.03
    assert (keys.square().mean(0) - 1 / 16).abs().max() < 0.01


def test_what_is_drawn_is_what_is_computed(figure):
    """The row of the table, the dots and the words, at several sizes."""
    sizes = (1, 32, 100)
    for S, drawn in zip(
        sizes, figure.sweep("Pairs S", sizes, asks.CAPACITY), strict=True
    ):
        shown, dots = drawn["state"], drawn["dots"]
        assert shown["count"] == S
        for n, name in enumerate(NAMES):
            memory = shown["memories"][name]
            loss = memory["losses"][S - 1]
            assert drawn["table"][5 * n + 1 : 5 * n + 5] == [
                str(memory["room"]),
                f"{loss:.2f}",
                f"{memory['law'][S - 1]:.2f}",
                f"{memory['right'][S - 1]} of {S}",
            ]
            assert f" {loss:.2f}" in drawn["words"]
            wanted = pytest.approx(216 - min(loss, 1.2) / 1.2 * 208, abs=0.06)
            assert float(dots[name][1]) == wanted
        # The curve goes through the dot.
        points = re.findall(r"[ML]([\d.]+) ([\d.]+)", drawn["curve"])
        assert len(points) == 128 and list(points[S - 1]) == dots["delta"]
        for path, name in zip(drawn["laws"], ("sum", "dpfp"), strict=True):
            limit = shown["memories"][name]["law"][-1]
            end = [float(x) for x in path.rpartition("L")[2].split()]
            assert end == pytest.approx([384, 216 - limit / 1.2 * 208], abs=0.06)


def test_trained_points_are_those_of_the_results(figure):
    """Medians of all seeds up to 128 pairs; none below the law."""
    runs = []
    for name in ("capacity.quick", "capacity"):
        text = (ROOT / "docs" / "reproduce" / f"{name}.json").read_text("utf-8")
        points = json.loads(text)["points"]
        runs += [p for p in points if p["ask"] == "all keys"]
    for width, expected in ((16, 4), (64, 6), (32, 0)):
        for nu in (1, 2, 3):
            shown = choose(figure, width, nu)["trained"]
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
                (marks,) = figure.ask("values(given, 'd')", f"[data-trained={kind}]")
                assert (marks or "").count("M") == len(shown[kind])
        assert len(shown["linear"]) == expected
