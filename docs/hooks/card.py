"""Draws the picture of a link to the site, as a preview shows it.

It is a memory whose values have all been replaced, by the sum rule and by the
delta rule: its fast weights, and for how many keys the new value is what it
returns.
"""

import io
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from fontTools.ttLib import TTFont
from matplotlib.figure import Figure
from mkdocs.structure.files import File
from packages import MODULES, fetched
from torch.nn.functional import normalize

from fwlab import ops
from fwlab.plots import FAST, SIGNED, WRONG

NAME = "assets/card.png"
#: Inches of 100 pixels: the size that previews ask for.
WIDTH, HEIGHT = 12, 6.3
PAIRS, SIZE = 16, 32
SAYS = "Sequence layers beyond softmax attention: read them, run them, change them"


def on_files(files, config):
    if not config.site_url:
        return files  # a preview needs a whole address
    config.extra["card"] = NAME
    files.append(File.generated(config, NAME, content=drawn(config.site_name)))
    return files


@cache
def drawn(name: str) -> bytes:
    """The picture as a PNG, the same each time."""
    figure, out = Figure((WIDTH, HEIGHT), dpi=100, facecolor="white"), io.BytesIO()
    with TemporaryDirectory() as folder:
        plain, bold = (_face(weight, folder) for weight in (400, 600))
        figure.text(0.06, 0.82, "A memory that can be corrected", font=bold, size=44)
        figure.text(0.06, 0.73, SAYS, font=plain, size=21)
        figure.text(0.94, 0.08, name, font=bold, size=32, ha="right")
        for left, rule in ((0.06, "sum"), (0.36, "delta")):
            W, right = _memory(rule)
            axes = figure.add_axes((left, 0.16, 0.24, 0.24 * WIDTH / HEIGHT))
            axes.imshow(W, cmap=SIGNED, vmin=-0.5, vmax=0.5)
            axes.set(xticks=[], yticks=[])
            said = f"{rule} rule: {right} of {PAIRS} right"
            colour = FAST if right == PAIRS else WRONG
            figure.text(left, 0.08, said, font=bold, size=21, color=colour)
        figure.savefig(out, format="png", metadata={"Software": None})
    return out.getvalue()


def _memory(rule: str):
    """Fast weights after each of the pairs was written twice, with two values, and
    how many keys return the second one rather than any other value.
    """
    make = torch.Generator().manual_seed(0)
    key, value = normalize(torch.randn(2, 2 * PAIRS, SIZE, generator=make), dim=-1)
    key[PAIRS:] = key[:PAIRS]
    k, v = (x[None, :, None] for x in (key, value))
    if rule == "sum":
        _, W = ops.sum_rule(k, k, v, normalize=False, return_state=True)
    else:
        _, W = ops.delta_rule(k, k, v, torch.ones(1, len(key), 1), return_state=True)
    said = (key[PAIRS:] @ W[0, 0].T @ value.T).argmax(1)
    return W[0, 0].numpy(), int((said == torch.arange(PAIRS, 2 * PAIRS)).sum())


def _face(weight: int, folder: str) -> Path:
    """The site's typeface as a file that matplotlib reads."""
    (packed,) = fetched(MODULES, f"@fontsource/**/*sans-latin-{weight}-normal.woff")
    font, path = TTFont(packed), Path(folder, f"{weight}.ttf")
    font.flavor = None
    font.save(path)
    return path
