// A table of numbers is sorted by the column whose name is pressed, and the other
// way round when it is pressed again. Where a cell spans columns, rows belong
// together and stay as they are.
for (const table of document.querySelectorAll("article table")) {
  const [body] = table.tBodies;
  const heads = [...(table.tHead?.rows[0].cells ?? [])];
  const rows = [...(body?.rows ?? [])];
  if (rows.length < 3 || rows.some((row) => row.cells.length !== heads.length)) continue;
  // "1,877" is a number, "from T = 256" one after words, "–" is last.
  const key = (row, column) => {
    const text = row.cells[column].textContent.trim();
    const number = text.replaceAll(",", "").match(/-?\d+(\.\d+)?/);
    return number ? Number(number[0]) : text === "–" ? Infinity : text;
  };
  const compare = (a, b) =>
    typeof a === typeof b ? (a < b ? -1 : Number(a > b)) : typeof a === "number" ? -1 : 1;
  heads.forEach((head, column) => {
    const button = Object.assign(document.createElement("button"), { type: "button" });
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const sign = head.ariaSort === "ascending" ? -1 : 1;
      for (const each of heads) each.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", sign > 0 ? "ascending" : "descending");
      rows.sort((a, b) => sign * compare(key(a, column), key(b, column)));
      body.append(...rows);
    });
  });
}
