// Progress through the course: the notebooks that a reader has marked as done,
// and the questions that were answered right, by the notebook's file name.
// They are kept in this browser alone, under one key; where it keeps nothing,
// until the page is left.
{
  const KEY = "fwlab.progress";
  let progress = {};
  let kept = true;
  const read = () => {
    if (!kept) return;
    let text = null;
    try {
      text = localStorage.getItem(KEY);
    } catch {
      kept = false;
      return;
    }
    try {
      progress = { ...JSON.parse(text) };
    } catch {
      progress = {};
    }
  };
  const write = () => {
    try {
      if (Object.keys(progress).length) localStorage.setItem(KEY, JSON.stringify(progress));
      else localStorage.removeItem(KEY);
    } catch {
      kept = false;
    }
  };
  // What is known of a notebook: "done", and the names of its questions.
  const of = (notebook) => new Set([progress[notebook]].flat());
  const change = (notebook, name, on) => {
    read();
    const known = of(notebook).add(name);
    if (!on) known.delete(name);
    const left = [...known].filter(Boolean);
    if (left.length) progress[notebook] = left;
    else delete progress[notebook];
    write();
  };

  const lost = () =>
    kept ? "" : " This browser keeps nothing for this page, so the mark goes when you leave it.";

  // At the foot of a notebook: a button; and its questions remember.
  const foot = document.querySelector(".fw-progress[data-notebook]");
  const questions = [...document.querySelectorAll(".fw-quiz")];
  const nameOf = (form) => JSON.parse(form.dataset.question).name;
  const showNotebook = () => {
    const { notebook } = foot.dataset;
    const known = of(notebook);
    foot.querySelector("button").textContent = known.has("done") ? "Mark as not done" : "Mark as done";
    foot.querySelector("[role=status]").textContent = known.has("done") ? `✓ Done.${lost()}` : "";
    for (const form of questions) {
      const said = form.querySelector("[role=status]");
      if (known.has(nameOf(form)) && !said.textContent) {
        form.dataset.right = "yes";
        said.textContent = "✓ You answered this one before.";
      }
    }
    foot.hidden = false;
  };

  // On the course page: in words, in the map and in the list.
  const all = document.querySelector(".fw-progress[data-of]");
  const showCourse = () => {
    let done = 0;
    let right = 0;
    let asked = 0;
    for (const place of document.querySelectorAll(".fw-known")) {
      const { notebook } = place.dataset;
      const names = place.dataset.questions.split(" ").filter(Boolean);
      const known = of(notebook);
      const answered = names.filter((name) => known.has(name)).length;
      done += known.has("done");
      right += answered;
      asked += names.length;
      place.textContent = [
        known.has("done") ? "✓ Done." : "",
        answered ? `${answered} of ${names.length} question${names.length > 1 ? "s" : ""} answered right.` : "",
      ].filter(Boolean).join(" ");
      const box = document.querySelector(`.course-map a[data-notebook="${notebook}"]`);
      const line = box.querySelector("text:last-of-type");
      box.dataset.minutes ??= line.textContent;
      line.textContent = known.has("done") ? "✓ done" : box.dataset.minutes;
      box.classList.toggle("fw-done", known.has("done"));
    }
    all.querySelector("[role=status]").textContent =
      `${done} of ${all.dataset.of} notebooks done, ${right} of ${asked} questions answered right.`;
    all.querySelector("button").hidden = !done && !right;
    all.hidden = false;
  };

  const show = () => {
    read();
    if (foot) showNotebook();
    if (all) showCourse();
  };
  foot?.querySelector("button").addEventListener("click", () => {
    const { notebook } = foot.dataset;
    change(notebook, "done", !of(notebook).has("done"));
    showNotebook();
  });
  if (foot)
    document.addEventListener("fw-right", ({ target }) =>
      change(foot.dataset.notebook, nameOf(target), true),
    );
  all?.querySelector("button").addEventListener("click", () => {
    progress = {};
    write();
    showCourse();
    all.querySelector("[role=status]").focus();
  });
  addEventListener("pageshow", show); // also when the reader comes back to it
  addEventListener("storage", show); // what another tab has kept
}
