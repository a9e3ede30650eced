"""Outputs of notebooks: pictures are compared by what they show.

Processors add in different orders. So the last digits of what is drawn differ,
and with them the bytes of a picture. It is the same picture if it has the same
axes, texts and marks, these look the same, and no point has moved by as much as
one can see. nbval compares all other outputs, byte for byte.
"""

import base64
import functools
import io
import re
from collections import Counter
from operator import itemgetter
from xml.etree import ElementTree

import numpy as np
from nbval.plugin import IPyNbCell
from PIL import Image

SVG = "image/svg+xml"
#: The tag of a cell whose picture shows rounding errors, or how a run of training
#: went: then only its axes, labels and legends are compared, not even the ticks.
LABELS_ONLY = "compare-labels-only"
#: How far a coordinate may be, in points. The thinnest line is 0.5 wide, and what
#: rounding in float32 moves is a thousand times less.
NEAR = 0.1
#: How far a pixel may be, of 255: two colours of a colour map are 2 apart.
SHADE = 3
LINK = "{http://www.w3.org/1999/xlink}href"


def pytest_collection_modifyitems(items):
    # A random order is one of tests, not of the cells of a notebook.
    cells = [item for item in items if isinstance(item, IPyNbCell)]
    others = [item for item in items if not isinstance(item, IPyNbCell)]
    if cells:  # Where there is no list of fonts yet, the first cell would say so.
        import matplotlib.font_manager  # noqa: F401
    for cell in cells:
        cell.compare_outputs = functools.partial(compare_outputs, cell)
    items[:] = others + sorted(cells, key=lambda cell: (cell.path, cell.cell_num))


def drawings(outputs):
    """List the pictures of a cell, those of a slider included."""
    svgs = []
    for data in (output.get("data", {}) for output in outputs):
        coded = re.findall(
            rf"{re.escape(SVG)};base64,([^\"]+)", data.get("text/html", "")
        )
        svgs += [data[SVG]] if SVG in data else []
        svgs += [base64.b64decode(each).decode() for each in coded]
    return svgs


def compare_outputs(cell, new, stored):
    """Say whether outputs are the same; replaces nbval's method of a cell."""
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
    """Say what a picture shows that the stored one does not, or None."""
    fresh, stored = (
        sorted(labels(svg) if labels_only else marks(svg), key=itemgetter(0, 1))
        for svg in (fresh, stored)
    )
    have, want = (Counter(mark[:2] for mark in some) for some in (fresh, stored))
    for place, kind in sorted(want | have):
        a, b = have[place, kind], want[place, kind]
        if a != b:
            return f"{place}: {a} {kind} instead of {b}"
    for new, (place, kind, look, at) in zip(fresh, stored, strict=True):
        if new[2] != look:
            return f"{place}: {kind} {new[2]!r} instead of {look!r}"
        far = np.abs(np.subtract(new[3], at)).max(initial=0)
        allowed, unit = (SHADE, "of 255") if kind == "pixels" else (NEAR, "points")
        if far > allowed:
            return (
                f"{place}: {kind} {look!r} is {far:.2g} {unit} off, {allowed} is near"
            )
    return None


def labels(svg):
    """Yield all places in a picture, and its texts that are no ticks."""
    shown = [*marks(svg)]
    yield from ((place, "place", "", []) for place in {mark[0] for mark in shown})
    for place, kind, look, _ in shown:
        if kind == "text" and "ticks" not in place:
            yield place, kind, look, []


def marks(svg):
    """Yield all that a picture shows, in order: place, kind, look and coordinates."""
    builder = ElementTree.TreeBuilder(insert_comments=True)
    root = ElementTree.fromstring(svg, ElementTree.XMLParser(target=builder))
    named = {node.get("id"): node for node in root.iter()}

    def style(node):
        """Return the target of a name in place of the name, which is a hash."""

        def meant(match):
            return "".join(part.get("style", "") for part in named[match[1]].iter())

        return re.sub(r"url\(#(.*?)\)", meant, node.get("style", ""))

    def walk(parent, place, kind):
        text = None
        for node in parent:
            if node.tag is ElementTree.Comment:  # The letters after it are paths.
                text = node.text.strip()
                continue
            tag = node.tag.rpartition("}")[2]
            at = numbers(node, "transform", "x", "y", "width", "height", "d")
            if text is not None:
                yield place, "text", f"{text} ({style(node)})", at
                text = None
            elif tag == "g":
                yield from walk(node, *inside(node.get("id", ""), place, kind))
            elif tag == "path":
                yield place, kind, f"{style(node)}; {len(at)} coordinates", at
            elif tag == "use":
                shape = named[node.get(LINK)[1:]]
                at += numbers(shape, "d")
                look = f"{style(node)}; {style(shape)}; {len(at)} coordinates"
                yield place, kind, look, at
            elif tag == "image":
                content = base64.b64decode(node.get(LINK).partition(",")[2])
                pixels = np.asarray(Image.open(io.BytesIO(content)).convert("RGBA"))
                yield place, "image", style(node), at
                yield place, "pixels", str(pixels.shape), pixels.astype(int)

    yield from walk(root, "figure", "")


def numbers(node, *attributes):
    values = " ".join(node.get(name, "") for name in attributes)
    return [float(number) for number in re.findall(r"-?[\d.]+", values)]


def inside(name, place, kind):
    """Return the place and kind of what is in a group of this name."""
    name, _, number = name.rpartition("_")
    places = {
        "axes": f"axes {number}",
        "matplotlib.axis": f"{place}, {'x' if number[-1:] in '13579' else 'y'} axis",
        "xtick": f"{place}, ticks",
        "ytick": f"{place}, ticks",
        "legend": f"{place}, legend",
    }
    return places.get(name, place), name or kind
