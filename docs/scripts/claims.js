// The table of all claims: which are shown, and in which order. Without this
// script, all of them are there, by experiment.
{
  const table = document.querySelector(".fw-claims");
  const choose = document.querySelector(".fw-choose");
  const choices = [...choose.querySelectorAll("select")];
  const [body] = table.tBodies;
  const rows = [...body.rows];
  const show = () => {
    for (const row of rows) {
      row.hidden = choices.some(({ name, value }) => value && row.dataset[name] !== value);
    }
    const shown = rows.filter((row) => !row.hidden).length;
    choose.querySelector("output").textContent = `${shown} of ${rows.length} claims`;
  };
  const key = (row, column) => {
    const cell = row.cells[column];
    return cell.dataset.rank ?? cell.textContent.trim();
  };
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = head.textContent;
    head.replaceChildren(button);
    button.addEventListener("click", () => {
      const sign = head.ariaSort === "ascending" ? -1 : 1;
      for (const each of heads) each.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", sign > 0 ? "ascending" : "descending");
      const compare = (a, b) => key(a, column).localeCompare(key(b, column), "en", { numeric: true });
      body.append(...[...rows].sort((a, b) => sign * compare(a, b)));
    });
  });
  choose.addEventListener("input", show);
  choose.hidden = false;
  show();
}
