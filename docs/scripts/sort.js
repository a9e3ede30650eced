// A table of numbers is sorted by the column whose name is pressed, and the other
// way round when it is pressed again. Where a cell spans columns, rows belong
// together and stay as they are.
for (const table of document.querySelectorAll("article table")) {
  const [body] = table.tBodies;
  const heads = [...(table.tHead?.rows[0].cells ?? [])];
  const rows = [...(body?.rows ?? [])];
  if (rows.length < 3 || rows.some((row) => row.cells.length !== heads.length)) continue;
  const text = (cell) => 
    cell.dataset.rank ?? cell.textContent.trim().replace(/(?<=\d),(?=\d{3})/g, "");
  // "1,877" is a number, "from T = 256" one after words, "–" is last; "delta, 1" is none.
  const number = (cell) => {
    const found = text(cell).match(/^(?:from\D*|[<×] )?([+-]?\d+(\.\d+)?)/);
    return found ? Number(found[1]) : text(cell) === "–" ? Infinity : NaN;
  };
  const byText = (a, b) => text(a).localeCompare(text(b), "en", { numeric: true });
  const byNumber = (a, b) => (number(a) === number(b) ? 0 : number(a) - number(b));
  heads.forEach((head, column) => {
    const button = Object.assign(document.createElement("button"), { type: "button" });
    button.append(...head.childNodes);
    head.append(button);
    const words = rows.some((row) => Number.isNaN(number(row.cells[column])));
    const compare = words ? byText : byNumber;
    button.addEventListener("click", () => {
      const sign = head.ariaSort === "ascending" ? -1 : 1;
      for (const each of heads) each.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", sign > 0 ? "ascending" : "descending");
      rows.sort((a, b) => sign * compare(a.cells[column], b.cells[column]));
      body.append(...rows);
    });
  });
}
