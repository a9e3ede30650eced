// What is too wide scrolls in a box of its own. Such a box can be reached by
// keyboard, as long as there is something to scroll. A table that is too wide
// becomes a list instead: of its rows, with the name of its column at each cell.
// A long list is folded below the number of its rows.
{
  const boxes =
    "article :is(.katex-display, .fw-equations .arithmatex, .nb-output, pre, code, .md-typeset__scrollwrap)";
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
    const others = columns.slice(1);
    const long = others.map((cells) =>
      cells.some((cell) => cell.textContent.trim().length > LONG),
    );
    // A single short column among long ones looks like them.
    if (long.includes(true) && long.filter((each) => !each).length === 1) long.fill(true);
    others.forEach((cells, column) => {
      for (const cell of cells) {
        cell.dataset.label = names[column + 1];
        cell.toggleAttribute("data-long", long[column]);
      }
    });
  };
  const MANY = 8;
  const folds = new Map(); // by box
  const fold = (box, count) => {
    if (!folds.has(box)) {
      const summary = document.createElement("summary");
      summary.textContent = `Show the table (${count} rows)`;
      const details = Object.assign(document.createElement("details"), { className: "fw-folded" });
      details.append(summary);
      folds.set(box, details);
    }
    box.replaceWith(folds.get(box));
    folds.get(box).append(box);
  };
  const reflow = (table) => {
    const box = table.closest(".md-typeset__scrollwrap");
    if (!box) return;
    delete table.dataset.rows;
    if (folds.get(box)?.contains(box)) folds.get(box).replaceWith(box);
    if (box.scrollWidth <= box.clientWidth + 1) return;
    label(table);
    table.dataset.rows = "";
    const rows = [...table.tBodies].flatMap((body) => [...body.rows]);
    const count = rows.filter((row) => !row.matches(".origin")).length;
    if (count > MANY && !box.closest(".fw-equations")) fold(box, count);
  };
  const mark = () => {
    for (const box of document.querySelectorAll(boxes)) {
      const scrolls = /auto|scroll/.test(getComputedStyle(box).overflowX);
      if (scrolls && box.scrollWidth > box.clientWidth) box.tabIndex = 0;
      else if (box.dataset.scrolls) box.removeAttribute("tabindex");
      box.dataset.scrolls = scrolls && box.tabIndex === 0 ? "yes" : "";
    }
  };
  const fit = (part) => {
    for (const table of part.querySelectorAll("article table")) reflow(table);
    mark();
  };
  addEventListener("load", () => {
    fit(document);
    if (!document.querySelector("[data-rows]")) return;
    // What became a list has moved what the address names, or folded it.
    const there = document.querySelector(":target");
    there?.closest(".fw-folded")?.setAttribute("open", "");
    there?.scrollIntoView();
  });
  let width = innerWidth;
  addEventListener("resize", () => {
    if (width === innerWidth) return; // on a phone, scrolling changes the height
    width = innerWidth;
    fit(document);
  });
  // What a summary unfolds has no width before.
  addEventListener("toggle", ({ target }) => (target.matches(".fw-folded") ? mark() : fit(target)), true);
}
