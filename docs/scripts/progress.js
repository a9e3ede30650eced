// What follows a prediction is folded until the reader has answered. The names of the
// questions that were answered are kept in this browser alone; where it keeps nothing,
// until the page is left. It runs in the head: a part is folded before it is drawn.
{
  const KEY = "fwlab.progress";
  const ALL = "everything"; // the switch that opens all parts
  let known = new Set();
  const read = () => {
    try {
      known = new Set(JSON.parse(localStorage.getItem(KEY)));
    } catch {
      // Blocked, or written by somebody else.
    }
  };
  const change = (name, on) => {
    if (on) known.add(name);
    else known.delete(name);
    try {
      localStorage.setItem(KEY, JSON.stringify([...known]));
    } catch {
      // Blocked, or full.
    }
  };

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
      for (const name of this.dataset.after.split(" ")) change(`shown:${name}`, open);
      this.show();
    }

    show() {
      const names = this.dataset.after.split(" ");
      const answered = known.has(ALL) || names.every((name) => known.has(name));
      const shown = names.every((name) => known.has(name) || known.has(`shown:${name}`));
      const open = Boolean(answered || shown || this.found);
      const folded = this.hasAttribute("hidden");
      this.hidden = open ? false : "until-found"; // older browsers: just hidden
      this.previousElementSibling.hidden = answered;
      this.button.setAttribute("aria-expanded", open);
      this.button.textContent = open ? "Fold it again" : "Show me anyway";
      if (open && folded) this.dispatchEvent(new Event("toggle")); // it is laid out now
    }
  }
  read();
  customElements.define("fw-fold", Fold);
  document.documentElement.classList.add("fw-folds");

  // Links to what is folded, and addresses that name it.
  const unfold = (hash) => {
    const there = document.getElementById(decodeURIComponent(hash.slice(1)));
    let fold = there?.closest("fw-fold");
    for (; fold; fold = fold.parentElement.closest("fw-fold")) fold.find();
    return there;
  };
  const follow = () => unfold(location.hash)?.scrollIntoView();
  addEventListener("hashchange", follow);
  document.addEventListener("click", (event) => {
    const link = event.target.closest("a[href*='#']");
    if (link?.pathname === location.pathname) unfold(link.hash);
  });

  document.addEventListener("DOMContentLoaded", () => {
    const everything = document.querySelector(".fw-everything input");
    const show = () => {
      if (everything) everything.checked = known.has(ALL);
      for (const fold of document.querySelectorAll("fw-fold")) fold.show();
      for (const form of document.querySelectorAll(".fw-quiz")) {
        const said = form.querySelector("[role=status]");
        const { name } = JSON.parse(form.dataset.question);
        if (known.has(name) && !said.textContent) said.textContent = "You answered this one before.";
      }
    };
    const again = () => {
      read();
      show();
    };
    everything?.addEventListener("change", () => {
      change(ALL, everything.checked);
      show();
    });
    document.addEventListener("fw-answer", ({ target }) => {
      change(JSON.parse(target.dataset.question).name, true);
      show();
    });
    addEventListener("pageshow", again); // also when the reader comes back to it
    addEventListener("storage", again); // what another tab has kept
    if (document.getElementById(location.hash.slice(1))?.closest("fw-fold[hidden]")) follow();
  });
}
