"""`capacity-law`: its predictions are those that were written down, and simulations."""

import csv
from importlib import import_module
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

law = import_module("capacity-law")
FILE = Path(law.__file__).with_name("capacity-law.predicted.csv")


def test_the_predictions_are_those_that_were_written_down():
    with FILE.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    points = law.points(False)
    assert len(rows) == len(points) == 200
    for row, point in zip(rows, points, strict=True):
        assert {name: str(x) for name, x in point.items()} == {
            name: row[name] for name in point
        }
        assert float(row["predicted"]) == pytest.approx(law.predicted(point), abs=6e-5)


@pytest.mark.parametrize(
    ("features", "rank", "decay", "writes"),
    [
        *((20, 40, 1.0, 1), (40, 20, 1.0, 1), (20, 20, 1.0, 1), (40, 40, 0.95, 1)),
        *((40, 40, 1.0, 3), (40, 40, 0.97, 2), (20, 20, 0.97, 2)),
    ],
)
def test_the_best_memory_of_random_directions_has_the_loss_of_the_law(
    features, rank, decay, writes
):
    """Without training: keys and values are projected, and the scale is the best one."""
    S, generator = 40, torch.Generator().manual_seed(1)
    torch.manual_seed(1)
    keys, values, last = law.draw_pairs(1000, S, writes)
    K, V = (
        torch.linalg.qr(torch.randn(S, n, generator=generator).double()).Q
        for n in (features, rank)
    )
    age = torch.arange(S * writes).flip(0).double()
    match = F.embedding(keys, K @ K.mT).mT * decay**age
    found = match @ F.one_hot(values, S).double() @ (V @ V.mT)
    wanted = F.one_hot(last, S).double()
    scale = (found * wanted).sum() / found.square().sum()
    loss = (scale * found - wanted).square().sum(-1).mean().item() / 2
    point = {"S": S, "map": "linear", "d_key": features, "rank": rank}
    point |= {"decay": decay, "writes": writes}
    # That a key returns with the value it had, by chance, the law does not count.
    assert loss == pytest.approx(law.predicted(point), abs=0.008)
