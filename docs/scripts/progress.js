// Progress through the course: the notebooks that a reader has marked as done,
// and the questions, by the notebook's file name. They are kept in this browser
// alone, under one key; where it keeps nothing, until the page is left.
//
// It also folds what follows a prediction, until the reader has answered. So it
// runs in the head of a page: a part is folded before it is drawn.
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
  // What is known of a notebook: "done"; the names of questions that were
  // answered right; "tried:" and a name if the first answer was wrong, "shown:"
  // and a name if there was none.
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

  // The switch that opens all parts is kept beside the notebooks.
  const OPEN = ["folds", "open"];

  // What follows a prediction. `data-after` names the questions of its cell.
  class Fold extends HTMLElement {
    connectedCallback() {
      this.show();
      this.button.addEventListener("click", () => this.press());
      // The browser has found words in it.
      this.addEventListener("beforematch", () => this.find());
    }

    get button() {
      return this.previousElementSibling.querySelector("button");
    }

    find() {
      this.found = true;
      this.show();
    }

    press() {
      const { after, notebook } = this.dataset;
      const open = this.hasAttribute("hidden");
      this.found = false;
      for (const name of after.split(" ")) change(notebook, `shown:${name}`, open);
      this.show();
    }

    show() {
      const { after, notebook } = this.dataset;
      const known = of(notebook);
      const all = (...kinds) =>
        after.split(" ").every((name) => kinds.some((kind) => known.has(kind + name)));
      const done = of(OPEN[0]).has(OPEN[1]) || all("", "tried:");
      const open = done || this.found || all("", "tried:", "shown:");
      const folded = this.hasAttribute("hidden");
      this.hidden = open ? false : "until-found"; // older browsers: just hidden
      this.previousElementSibling.hidden = done;
      this.button.setAttribute("aria-expanded", open);
      this.button.textContent = open ? "Fold it again" : "Show me anyway";
      if (open && folded) this.dispatchEvent(new Event("toggle")); // it is laid out now
    }
  }
  read();
  customElements.define("fw-fold", Fold);
  document.documentElement.classList.add("fw-folds");
  const unfold = (element) => {
    for (let fold = element?.closest("fw-fold"); fold; fold = fold.parentElement.closest("fw-fold"))
      fold.find();
  };

  // Links to what is folded, and addresses that name it.
  const named = (hash) => document.getElementById(decodeURIComponent(hash.slice(1)));
  const follow = () => {
    const there = named(location.hash);
    if (!there?.closest("fw-fold[hidden]")) return;
    unfold(there);
    there.scrollIntoView();
  };
  document.addEventListener("click", (event) => {
    const link = event.target.closest("a[href*='#']");
    if (link?.pathname === location.pathname) unfold(named(link.hash));
  });
  addEventListener("hashchange", follow);

  // What a search has found: in the section that it leads to, if it names one.
  const words = (text) => text.toLowerCase().match(/[\p{L}\p{N}_]+/gu) ?? [];
  const unfoldFound = () => {
    const begins = words(new URLSearchParams(location.search).get("h") ?? "");
    const there = named(location.hash);
    const section = there?.closest("fw-fold")?.dataset.section ?? there?.id;
    for (const fold of document.querySelectorAll("fw-fold[hidden]")) {
      if (section && fold.dataset.section !== section) continue;
      const all = words(fold.textContent);
      if (begins.some((begin) => all.some((word) => word.startsWith(begin)))) fold.find();
    }
  };

  const lost = () =>
    kept ? "" : " This browser keeps nothing for this page, so the mark goes when you leave it.";

  // Of the document, and registered before the theme's, which marks the words of a
  // search where they can be seen.
  document.addEventListener("DOMContentLoaded", () => {
    // At the foot of a notebook: a button; and its questions remember.
    const foot = document.querySelector(".fw-progress[data-notebook]");
    const questions = [...document.querySelectorAll(".fw-quiz")];
    const everything = document.querySelector(".fw-everything input");
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
      if (everything) everything.checked = of(OPEN[0]).has(OPEN[1]);
      for (const fold of document.querySelectorAll("fw-fold")) fold.show();
    };

    // On the course page: in words, in the map and in the list.
    const all = document.querySelector(".fw-progress[data-of]");
    const said = all?.querySelector("[role=status]");
    const showCourse = () => {
      let done = 0;
      let right = 0;
      let asked = 0;
      let again = 0;
      for (const box of document.querySelectorAll(".course-map a[data-notebook]")) {
        const known = of(box.dataset.notebook).has("done");
        done += known;
        const line = box.querySelector("text:last-of-type");
        box.dataset.minutes ??= line.textContent;
        line.textContent = known ? "✓ done" : box.dataset.minutes;
        box.classList.toggle("fw-done", known);
      }
      // Home has the map alone.
      for (const place of document.querySelectorAll(".fw-known")) {
        const names = place.dataset.questions.split(" ").filter(Boolean);
        const known = of(place.dataset.notebook);
        const answered = names.filter((name) => known.has(name)).length;
        const open = names.filter(
          (name) => !known.has(name) && (known.has(`tried:${name}`) || known.has(`shown:${name}`)),
        ).length;
        right += answered;
        asked += names.length;
        again += open;
        place.textContent = [
          known.has("done") ? "✓ Done." : "",
          answered ? `${answered} of ${names.length} question${names.length > 1 ? "s" : ""} answered right.` : "",
          open ? `${open} to look at again.` : "",
        ].filter(Boolean).join(" ");
      }
      // Nothing is counted before something is done.
      const counts = [
        `${done} of ${all.dataset.of} notebooks done`,
        ...(asked ? [`${right} of ${asked} questions answered right`] : []),
      ];
      said.textContent = done + right + again ? `${counts.join(", ")}.` : "";
      const nothing = !Object.keys(progress).length;
      all.querySelector("button").hidden = nothing;
      all.hidden = nothing || (!asked && !done);
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
    everything?.addEventListener("change", () => {
      change(...OPEN, everything.checked);
      showNotebook();
    });
    if (foot)
      document.addEventListener("fw-answer", ({ target, detail }) => {
        const { notebook } = foot.dataset;
        const name = nameOf(target);
        if (detail.right) change(notebook, name, true);
        else if (!of(notebook).has(name)) change(notebook, `tried:${name}`, true);
        for (const fold of document.querySelectorAll("fw-fold")) fold.show();
      });
    all?.querySelector("button").addEventListener("click", () => {
      progress = {};
      write();
      showCourse();
      all.hidden = false;
      said.textContent = "Your progress is forgotten.";
      said.focus();
    });
    addEventListener("pageshow", show); // also when the reader comes back to it
    addEventListener("storage", show); // what another tab has kept
    unfoldFound();
    follow();
  });
}
