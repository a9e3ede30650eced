// Remembers the answers to the questions of a notebook. They are kept in this browser
// alone, under one key; where it keeps nothing, until the page is left.
//
// It also folds what follows a prediction, until the reader has answered. So it
// runs in the head of a page: a part is folded before it is drawn.
{
  const KEY = "fwlab.progress";
  const notebook = location.pathname.match(/([^/]*?)(\.html)?$/)[1];
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
  // What is known of a notebook: the names of questions that were answered right;
  // "tried:" and a name if the first answer was wrong, "shown:" and a name if there
  // was none.
  const of = (place) => new Set([progress[place]].flat());
  const change = (place, name, on) => {
    read();
    const known = of(place).add(name);
    if (!on) known.delete(name);
    const left = [...known].filter(Boolean);
    if (left.length) progress[place] = left;
    else delete progress[place];
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
      const open = this.hasAttribute("hidden");
      this.found = false;
      for (const name of this.dataset.after.split(" ")) change(notebook, `shown:${name}`, open);
      this.show();
    }

    show() {
      const { after } = this.dataset;
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

  // Of the document, and registered before the theme's, which marks the words of a
  // search where they can be seen.
  document.addEventListener("DOMContentLoaded", () => {
    const questions = [...document.querySelectorAll(".fw-quiz")];
    const everything = document.querySelector(".fw-everything input");
    const nameOf = (form) => JSON.parse(form.dataset.question).name;
    const show = () => {
      read();
      for (const form of questions) {
        const said = form.querySelector("[role=status]");
        if (of(notebook).has(nameOf(form)) && !said.textContent) {
          form.dataset.right = "yes";
          said.textContent = "✓ You answered this one before.";
        }
      }
      if (everything) everything.checked = of(OPEN[0]).has(OPEN[1]);
      for (const fold of document.querySelectorAll("fw-fold")) fold.show();
    };
    everything?.addEventListener("change", () => {
      change(...OPEN, everything.checked);
      show();
    });
    document.addEventListener("fw-answer", ({ target, detail }) => {
      const name = nameOf(target);
      if (detail.right) change(notebook, name, true);
      else if (!of(notebook).has(name)) change(notebook, `tried:${name}`, true);
      for (const fold of document.querySelectorAll("fw-fold")) fold.show();
    });
    addEventListener("pageshow", show); // also when the reader comes back to it
    addEventListener("storage", show); // what another tab has kept
    unfoldFound();
    follow();
  });
}
