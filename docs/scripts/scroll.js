// What is too wide scrolls in a box of its own. Such a box can be reached by
// keyboard, as long as there is something to scroll. A table that is too wide
// becomes a list instead: of its rows, with the name of its column at each cell.
{
  const boxes = "article :is(.katex-display, .nb-output, pre, code, .md-typeset__scrollwrap)";
  const LONG = 19; // characters: a column with more has lines for itself
  const label = (table) => {
    const names = [...(table.tHead?.rows[0].cells ?? [])].map((cell) => cell.textContent.trim());
    const columns = names.map(() => []);
    for (const { cells } of [...table.tBodies].flatMap((body) => [...body.rows])) {
      let column = 0;
      for (const cell of cells) {
        if (cell.colSpan === 1) columns[column]?.push(cell);
        column += cell.colSpan;
      }
    }
    columns.slice(1).forEach((cells, column) => {
      const long = cells.some((cell) => cell.textContent.trim().length > LONG);
      for (const cell of cells) {
        cell.dataset.label = names[column + 1];
        cell.toggleAttribute("data-long", long);
      }
    });
  };
  const reflow = (table) => {
    delete table.dataset.rows;
    const box = table.closest(".md-typeset__scrollwrap");
    if (!box || box.scrollWidth <= box.clientWidth + 1) return;
    label(table);
    table.dataset.rows = "";
  };
  const mark = () => {
    for (const table of document.querySelectorAll("article table")) reflow(table);
    for (const box of document.querySelectorAll(boxes)) {
      const scrolls = /auto|scroll/.test(getComputedStyle(box).overflowX);
      if (scrolls && box.scrollWidth > box.clientWidth) box.tabIndex = 0;
      else if (box.dataset.scrolls) box.removeAttribute("tabindex");
      box.dataset.scrolls = scrolls && box.tabIndex === 0 ? "yes" : "";
    }
  };
  addEventListener("load", mark);
  addEventListener("resize", mark);
  // What a summary unfolds has no width before.
  addEventListener("toggle", mark, true);
}
