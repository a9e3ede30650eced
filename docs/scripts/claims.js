// The table of all claims: which of them are shown. Without this script, all are.
{
  const table = document.querySelector(".fw-claims");
  const choose = document.querySelector(".fw-choose");
  const choices = [...choose.querySelectorAll("select")];
  const rows = [...table.tBodies[0].rows];
  const show = () => {
    for (const row of rows) {
      row.hidden = choices.some(({ name, value }) => value && row.dataset[name] !== value);
    }
    const shown = rows.filter((row) => !row.hidden).length;
    choose.querySelector("output").textContent = `${shown} of ${rows.length} claims`;
  };
  choose.addEventListener("input", show);
  // What a mark leads to may have been left out.
  document.querySelector(".fw-chart").addEventListener("click", () => {
    choose.reset();
    show();
  });
  choose.hidden = false;
  show();
}
