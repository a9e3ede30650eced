"""On a phone, tables and plots are shown whole and can be read."""

import pytest

#: Tables of which something is cut, or that take words out of a reader's sight.
CUT = """() => {
  for (const fold of document.querySelectorAll("details")) fold.open = true;
  dispatchEvent(new Event("resize"));
  const cut = [];
  for (const table of document.querySelectorAll("article table"))
    for (const cell of table.querySelectorAll("td, tbody th")) {
      const { left, right, width } = cell.getBoundingClientRect();
      const inside = left >= 0 && right <= innerWidth + 0.5;
      if (width && inside && cell.scrollWidth <= cell.clientWidth + 1) continue;
      if (width || cell.textContent.trim()) cut.push(cell.textContent.slice(0, 60));
    }
  return cut;
}"""
#: Cells of a table that is shown as a list, without the name of their column.
NAMELESS = """() => [...document.querySelectorAll("[data-rows]")].flatMap((table) => {
  const names = [...table.tHead.rows[0].cells].map((cell) => cell.textContent.trim());
  return [...table.tBodies].flatMap((body) => [...body.rows]).flatMap((row) => {
    const cells = [...row.cells];
    if (cells.some((cell) => cell.colSpan > 1)) return [];
    return cells.slice(1).filter((cell, i) => cell.dataset.label !== names[i + 1]
      || !getComputedStyle(cell, "::before").content.includes(names[i + 1]));
  });
}).map((cell) => cell.textContent)"""
#: Letters that are too small, cut, or on top of each other. Text of matplotlib is
#: drawn in units of a hundredth of its size.
LETTERS = """() => [...document.querySelectorAll("article svg[role=img]")].flatMap((plot) => {
  const name = plot.querySelector("[id]").id;
  const frame = plot.getBoundingClientRect();
  const texts = [...plot.querySelectorAll("g[id*=-text_]")].flatMap((group) => {
    const letters = group.querySelector("g[transform*=scale]");
    if (!letters) return [];
    const { c, d } = letters.getScreenCTM();
    return [{ id: group.id, size: 100 * Math.hypot(c, d), box: group.getBoundingClientRect() }];
  });
  const found = texts.length ? [] : [`${name}: no text`];
  for (const [i, { id, size, box }] of texts.entries()) {
    if (size < 11) found.push(`${id}: ${size} px`);
    if (box.left < frame.left - 1 || box.right > frame.right + 1
      || box.top < frame.top - 1 || box.bottom > frame.bottom + 1) found.push(`${id}: cut`);
    for (const other of texts.slice(0, i)) {
      // Two pixels apart, or they read as one word.
      const wide = Math.min(box.right, other.box.right) - Math.max(box.left, other.box.left);
      const high = Math.min(box.bottom, other.box.bottom) - Math.max(box.top, other.box.top);
      if (wide > -2 && high > 2) found.push(`${id} on ${other.id}`);
    }
  }
  return found;
})"""


@pytest.fixture
def phone(look, pages):
    """Pages of a phone, one by one: their address and the tab."""

    def phone(names):
        tab = look("index.html", width=390)
        base = tab.url.removesuffix("index.html")
        for name in names:
            tab.goto(base + name, wait_until="load")
            tab.evaluate("document.fonts.ready.then(() => 0)")
            yield name, tab

    return phone


def of_results(pages) -> list[str]:
    folders = ("reproduce/", "kernels/")
    return [p for p in pages if p == "results.html" or p.startswith(folders)]


def test_no_column_of_a_table_is_cut(phone, pages):
    lists, wrong = 0, {}
    for name, tab in phone([*of_results(pages), "notation.html", "tested.html"]):
        if found := tab.evaluate(CUT):
            wrong[name] = found
        assert tab.evaluate(NAMELESS) == [], name
        lists += tab.locator("[data-rows]").count()
    assert wrong == {}
    assert lists > 5


def test_a_wide_page_has_tables(look):
    tab = look("results.html", width=1440)
    assert tab.locator("article table").count() > 5
    assert tab.locator("[data-rows]").count() == 0
    # What was a list becomes a table again, and the other way round.
    tab.set_viewport_size({"width": 390, "height": 844})
    tab.locator("[data-rows]").first.wait_for()
    tab.set_viewport_size({"width": 1440, "height": 844})
    tab.wait_for_function("!document.querySelector('[data-rows]')")


def test_letters_of_plots_can_be_read(phone, pages):
    wrong, plots = {}, 0
    for name, tab in phone(of_results(pages)):
        plots += tab.locator("article svg[role=img]").count()
        if found := tab.evaluate(LETTERS):
            wrong[name] = found
    assert wrong == {}
    assert plots > 20
