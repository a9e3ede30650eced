"""Compare the pictures in outputs of notebooks by their contents, not their bytes.

Processors add in different orders, so the last digits of coordinates, and the bytes
of a picture, may differ. Two pictures are equal if they have the same
axes, texts and marks, the same styles, and no point has moved by a visible
distance. nbval compares all other outputs, byte for byte.
"""

import base64
import functools
import io
import re
from itertools import zip_longest
from xml.etree import ElementTree

import numpy as np
from nbval.plugin import IPyNbCell
from PIL import Image

SVG = "image/svg+xml"
#: The tag for cells whose pictures depend on rounding errors or on a training run.
#: For tagged cells, only axes, labels and legends are compared, without ticks.
LABELS_ONLY = "compare-labels-only"
#: The largest allowed difference between coordinates, in points.
#: The thinnest line is 0.5 points wide; rounding in float32 moves points by 1e-4.
NEAR = 0.1
#: The largest allowed pixel difference, out of 255; adjacent colours differ by 2.
SHADE = 3
PIXELS = "a picture of pixels"
COORDINATES = re.compile(r' (?:transform|x|y|width|height|viewBox|d)="[^"]*"')
IMAGE = re.compile(r'base64,([^"]+)')
HASH = re.compile(r"\b(?:m|p|h|image)[0-9a-f]{10}\b")


def pytest_collection_modifyitems(items):
    # Tests may run in random order, but cells of a notebook must run in sequence.
    cells = [item for item in items if isinstance(item, IPyNbCell)]
    others = [item for item in items if not isinstance(item, IPyNbCell)]
    if cells:  # Without cached fonts, the first cell would print a message.
        import matplotlib.font_manager  # noqa: F401
    for cell in cells:
        cell.compare_outputs = functools.partial(compare_outputs, cell)
    items[:] = others + sorted(cells, key=lambda cell: (cell.path, cell.cell_num))


def drawings(outputs):
    """List the SVG pictures in a cell's outputs, including the frames of sliders."""
    svgs = []
    for data in (output.get("data", {}) for output in outputs):
        coded = re.findall(
            rf"{re.escape(SVG)};base64,([^\"]+)", data.get("text/html", "")
        )
        svgs += [data[SVG]] if SVG in data else []
        svgs += [base64.b64decode(each).decode() for each in coded]
    return svgs


def compare_outputs(cell, new, stored):
    """Replace nbval's comparison of a cell's outputs; return True if they agree."""
    skip = (*cell.parent.skip_compare, SVG, "text/html")
    if not IPyNbCell.compare_outputs(cell, new, stored, skip):
        return False
    new, stored = drawings(new), drawings(stored)
    labels_only = LABELS_ONLY in cell.cell.metadata.get("tags", [])
    said = [difference(*two, labels_only) for two in zip(new, stored)]  # noqa: B905
    if len(new) != len(stored):
        said.append(f"{len(new)} pictures instead of {len(stored)}")
    cell.comparison_traceback += filter(None, said)
    return not any(said)


def difference(fresh, stored, labels_only=False):
    """Return a description of the first difference between two pictures, or None."""
    pair = [labels(svg) if labels_only else marks(svg) for svg in (fresh, stored)]
    for new, old in zip_longest(*pair, fillvalue=("nothing", [])):
        if new[0] != old[0] or len(new[1]) != len(old[1]):
            return f"{new[0][:200]} instead of {old[0][:200]}"
        far = np.abs(np.subtract(new[1], old[1])).max(initial=0)
        allowed = SHADE if new[0].startswith(PIXELS) else NEAR
        if far > allowed:
            return f"{new[0]} is {far:.2g} off, {allowed} is near"
    return None


def labels(svg):
    """List the axes, legends and texts of an SVG picture, without tick labels."""
    builder = ElementTree.TreeBuilder(insert_comments=True)
    root = ElementTree.fromstring(svg, ElementTree.XMLParser(target=builder))
    for node in root.iter():
        if re.match("[xy]tick", node.get("id", "")):
            node.clear()
    texts = [node.text for node in root.iter(ElementTree.Comment)]
    places = [node.get("id", "") for node in root.iter()]
    places = [name for name in places if re.match("axes|legend", name)]
    return [(name, []) for name in sorted(texts) + sorted(places)]


def marks(svg):
    """Yield the style and the coordinates of each mark in an SVG picture, in order."""
    svg = re.sub("<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    names = {}  # The names of markers, clips, hatches and images are hashes.

    def name(match):
        return names.setdefault(match[0], f"name {len(names)}")

    for tag in re.split(r"(?<=>)\s*", svg):
        if image := IMAGE.search(tag):
            content = io.BytesIO(base64.b64decode(image[1]))
            pixels = np.asarray(Image.open(content).convert("RGBA")).astype(int)
            yield f"{PIXELS} {pixels.shape}", pixels
        at = "".join(COORDINATES.findall(tag))
        look = COORDINATES.sub("", IMAGE.sub("", tag))
        yield HASH.sub(name, look), [float(x) for x in re.findall(r"-?[\d.]+", at)]
