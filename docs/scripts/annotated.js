// Annotated source. The equation or line that the address names, and all
// lines that carry the same number, light up together; and so do all uses of
// a symbol that is clicked, in formulas and in code. Versions beside each
// other are kept in line; a recorded run lights up the lines that compute.
document.addEventListener("DOMContentLoaded", () => {
  const page = document.querySelector(".annotated");
  if (!page) return;

  // Equations and lines

  const named = () => document.getElementById(location.hash.slice(1));
  const numbers = (element) => element.dataset.eq?.split(" ") ?? [];

  const light = () => {
    const target = named();
    const wanted = target ? numbers(target) : [];
    for (const element of page.querySelectorAll(".line, .equation"))
      element.classList.toggle(
        "lit",
        element === target || numbers(element).some((n) => wanted.includes(n)),
      );
  };

  // Versions: on a wide screen one beside the one that stays, else one alone.

  const wide = matchMedia("(min-width: 64em)");
  const columns = [...page.querySelectorAll(".column")];
  const rows = new Map(columns.map((c) => [c, [...c.querySelectorAll(".row")]]));
  const list = page.querySelector(".tabs");
  const tabs = [...(list?.children ?? [])];
  const { stays } = page.dataset;
  let beside = list?.querySelector(".chosen").textContent;
  let alone = stays;

  const arrange = () => {
    const shown = wide.matches ? [stays, beside] : [alone];
    for (const part of page.querySelectorAll("[data-version]"))
      part.classList.toggle("away", !shown.includes(part.dataset.version));
    for (const tab of tabs) {
      const selected = shown.at(-1) === tab.textContent;
      tab.setAttribute("aria-selected", selected);
      tab.tabIndex = selected ? 0 : -1;
    }
    for (const column of columns) {
      const fixed = wide.matches && column.dataset.version === stays;
      column.setAttribute("role", fixed ? "region" : "tabpanel");
    }
    follow();
    tell();
  };

  const bring = (version) => {
    alone = version;
    if (version !== stays) beside = version;
    arrange();
  };

  if (list) {
    list.setAttribute("role", "tablist");
    list.setAttribute("aria-label", "Version");
    for (const tab of tabs) {
      tab.setAttribute("role", "tab");
      const panels = columns.filter((c) => c.dataset.version === tab.textContent);
      tab.setAttribute("aria-controls", panels.map((c) => c.id).join(" "));
    }
    list.addEventListener("click", (event) => {
      const tab = event.target.closest("a");
      if (!tab || event.ctrlKey || event.metaKey || event.shiftKey) return;
      event.preventDefault();
      event.stopPropagation(); // it is no link to an equation
      bring(tab.textContent);
      if (!wide.matches && page.getBoundingClientRect().top < 0) page.scrollIntoView();
    });
    list.addEventListener("keydown", (event) => {
      const all = tabs.filter((tab) => tab.checkVisibility());
      const at = all.indexOf(event.target);
      const next = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: -1 };
      if (event.key in next) {
        all.at(next[event.key] % all.length).focus();
        bring(document.activeElement.textContent);
      } else if (event.key === " ") event.target.click();
      else return;
      event.preventDefault();
    });
  }

  // The left column scrolls by itself, and follows: the function that computes
  // the same equations stands beside the one that is read. Once it is moved by
  // hand, it stays until the next function.

  let held = null;
  const top = (element) => element.getBoundingClientRect().top;
  const shown = (left) =>
    columns.filter((c) => c.checkVisibility() && c.matches(".left") === left);
  // The reading line is a third down the window, at the end of the page lower.
  const passed = (row) => {
    const rest = document.documentElement.scrollHeight - innerHeight - scrollY;
    return top(row) <= Math.max(innerHeight / 3, innerHeight - rest);
  };
  const twin = (row, column) => {
    const name = `${column.id.replace("column-", "")}-`;
    const [place] = row.dataset.beside?.match(`${name}\\d+`) ?? [];
    return place && rows.get(column)[place.replace(name, "")];
  };

  // What is read on the right, and its twin on the left.
  const pair = () => {
    const [column] = shown(true);
    const all = shown(false).flatMap((c) => rows.get(c));
    const paired = column ? all.filter((row) => twin(row, column)) : [];
    const row = paired.findLast(passed) ?? paired[0];
    if (!row) return {};
    const same = twin(row, column);
    // Of neighbours with the same twin, the first.
    const until = paired.indexOf(row);
    const other = paired.findLastIndex((r, i) => i < until && twin(r, column) !== same);
    return { column, row: paired[other + 1], same };
  };

  // Notes have headings, too, which the list does not have.
  const listed = ({ id }) =>
    page.querySelector(`.functions a[href="#${CSS.escape(id)}"]`);

  // Its end, too, can stand beside what is read. Below that there is no room: there
  // the wheel moves the page.
  const move = (column, by) => {
    const to = column.scrollTop + by;
    const end = column.lastElementChild.getBoundingClientRect().bottom - by;
    const room = top(column) + column.clientHeight - end;
    column.style.setProperty("--room", `${Math.max(room, 0)}px`);
    column.scrollTop = to;
  };

  const follow = () => {
    const { column, row, same } = wide.matches ? pair() : {};
    for (const lit of page.querySelectorAll(".pair")) lit.classList.remove("pair");
    for (const lit of [row, same]) lit?.classList.add("pair");
    if (row && held !== row) {
      held = null;
      const header = document.querySelector(".md-header").offsetHeight;
      move(column, top(same) - Math.max(top(row), top(column), header));
    }
    for (const link of page.querySelectorAll(".map [aria-current]"))
      link.removeAttribute("aria-current");
    const others = columns.filter((c) => c.checkVisibility() && c !== column);
    for (const c of [column, others.findLast(passed) ?? others[0]]) {
      if (!c) continue;
      const headings = [...c.querySelectorAll("h2, h3")].filter(listed);
      const read = headings.findLast(passed) ?? headings[0];
      const link = listed((c === column && same.querySelector("h3")) || read);
      link?.setAttribute("aria-current", "true");
      if (link) keep(link);
    }
  };

  // The list is a column that may be too long, or a line that is.
  const keep = (link) => {
    const box = link.getBoundingClientRect();
    for (const part of [link.closest(".map"), link.parentElement]) {
      const { top, bottom, left, right } = part.getBoundingClientRect();
      part.scrollTop += Math.min(box.top - top, 0) + Math.max(box.bottom - bottom, 0);
      part.scrollLeft += Math.min(box.left - left, 0) + Math.max(box.right - right, 0);
    }
  };

  const hold = () => (held = pair().row);
  for (const column of columns)
    if (column.matches(".left"))
      for (const kind of ["wheel", "touchmove", "keydown", "pointerdown"])
        column.addEventListener(kind, hold, { passive: true });

  let frame;
  const later = () => {
    frame ??= requestAnimationFrame(() => {
      frame = null;
      follow();
    });
  };

  // The browser's own jump into a column that scrolls by itself would move
  // the page, too.
  const reveal = (target) => {
    const column = target.closest(".column");
    if (column && getComputedStyle(column).position === "sticky") {
      const [box, place] = [column, target].map((e) => e.getBoundingClientRect());
      if (place.top < box.top || place.bottom > box.bottom)
        column.scrollTop += place.top - box.top - box.height / 3;
    } else
      target.scrollIntoView({ block: target.matches("h2, h3") ? "start" : "center" });
  };

  const show = (target) => {
    const away = target.closest(".away");
    if (away) bring(away.dataset.version);
    target.closest("details:not([open])")?.setAttribute("open", "");
    reveal(target);
    hold();
    if (!target.hasAttribute("tabindex")) target.tabIndex = -1;
    target.focus({ preventScroll: true });
  };

  const go = (hash) => {
    history.pushState(null, "", hash);
    light();
    show(named());
  };

  page.addEventListener("click", (event) => {
    if (event.ctrlKey || event.metaKey || event.shiftKey) return;
    const link = event.target.closest("a[href^='#']");
    if (!link) return;
    event.preventDefault();
    link.closest("[popover]")?.hidePopover?.();
    go(link.hash);
  });
  addEventListener("popstate", () => {
    light();
    const target = named();
    if (target?.closest(".annotated")) show(target);
  });
  addEventListener("load", () => {
    const target = named();
    if (!target?.closest(".annotated")) return;
    if (target.closest(".column")) page.scrollIntoView();
    show(target);
  });
  light();

  // Symbols. k_t of the code is k of the formulas, v_bar is v with a bar.

  const LETTERS =
    "alpha α beta β gamma γ Gamma Γ delta δ Delta Δ epsilon ϵ zeta ζ eta η theta θ " +
    "kappa κ lambda λ Lambda Λ mu μ nu ν xi ξ pi π rho ρ sigma σ Sigma Σ tau τ " +
    "phi ϕ Phi Φ chi χ psi ψ omega ω Omega Ω ell ℓ";
  const greek = Object.fromEntries(
    [...LETTERS.matchAll(/(\w+) (\S)/g)].map(([, name, letter]) => [letter, name]),
  );
  const accents = { ˉ: "_bar", "^": "_hat", "~": "_tilde" };

  // Without the index of a step, a layer, or a place.
  const ofName = (name) => name.replace(/(?<=[A-Za-z])_[til]$/, "");
  const ofFormula = (element) => {
    const letter = element.textContent;
    // dY is the gradient of Y, as in the code, and not d times Y.
    const of = element.nextElementSibling?.textContent[0] ?? "";
    if (letter === "d" && /[A-Zβ]/.test(of)) return `d${greek[of] ?? of}`;
    const accent = element
      .closest(".accent, .katex-accent")
      ?.querySelector(".accent-body")
      ?.textContent.trim();
    return (greek[letter] ?? letter) + (accents[accent] ?? "");
  };

  // { symbol: { code: [ranges], formulas: [elements] } }
  const index = () => {
    const uses = new Map();
    const of = (symbol) => {
      if (!uses.has(symbol)) uses.set(symbol, { code: [], formulas: [] });
      return uses.get(symbol);
    };
    for (const element of page.querySelectorAll(
      ".katex-html :is(.mathnormal, .mathrm, .mathbf)",
    ))
      if (/^\p{L}+$/u.test(element.textContent))
        of(ofFormula(element)).formulas.push(element);
    const walk = document.createTreeWalker(page, NodeFilter.SHOW_TEXT);
    while (walk.nextNode()) {
      const node = walk.currentNode;
      const parent = node.parentElement;
      if (!parent.closest(".line") || parent.closest("a, .c1, [class^=s], [class^=k], .ow"))
        continue;
      for (const match of node.data.matchAll(/[A-Za-z_]\w*/g))
        of(ofName(match[0])).code.push(
          new StaticRange({
            startContainer: node,
            startOffset: match.index,
            endContainer: node,
            endOffset: match.index + match[0].length,
          }),
        );
    }
    return uses;
  };

  let uses;
  let chosen = null;
  const bar = document.querySelector(".symbols");
  const count = bar.querySelector("[role=status]");

  const tell = () => {
    if (!chosen) return;
    const { code, formulas } = uses.get(chosen);
    const places = [...formulas, ...code.map((range) => range.startContainer.parentElement)];
    const hidden = places.filter((element) => element.closest(".away")).length;
    count.textContent =
      `${chosen}: ${formulas.length} in formulas, ${code.length} in code` +
      (hidden ? `; ${hidden} of them in a version that is not shown` : "");
  };

  const choose = (symbol) => {
    chosen = symbol === chosen || !uses.has(symbol) ? null : symbol;
    const { code, formulas } = uses.get(chosen) ?? { code: [], formulas: [] };
    if (globalThis.CSS?.highlights) CSS.highlights.set("symbol", new Highlight(...code));
    for (const element of page.querySelectorAll(".symbol"))
      element.classList.remove("symbol");
    for (const element of formulas) element.classList.add("symbol");
    for (const button of bar.querySelectorAll("button"))
      button.setAttribute("aria-pressed", button.value === chosen);
    count.textContent = "";
    tell();
  };

  const wordAt = (event) => {
    const place =
      document.caretPositionFromPoint?.(event.clientX, event.clientY) ??
      document.caretRangeFromPoint?.(event.clientX, event.clientY);
    const node = place?.offsetNode ?? place?.startContainer;
    if (node?.nodeType !== Node.TEXT_NODE) return null;
    const offset = place.offset ?? place.startOffset;
    const range = [...uses.values()]
      .flatMap((use) => use.code)
      .find(
        (r) =>
          r.startContainer === node && r.startOffset <= offset && offset <= r.endOffset,
      );
    return range && ofName(node.data.slice(range.startOffset, range.endOffset));
  };

  // Formulas are set after this script has been read.
  addEventListener("load", () => {
    uses = index();
    const both = [...uses]
      .filter(([, use]) => use.code.length && use.formulas.length)
      .sort(([, a], [, b]) => b.formulas.length - a.formulas.length)
      .slice(0, 16);
    for (const [symbol] of both) {
      const button = document.createElement("button");
      button.type = "button";
      button.value = button.textContent = symbol;
      button.setAttribute("aria-pressed", false);
      button.addEventListener("click", () => choose(symbol));
      bar.append(button);
    }
    // Any other name can be typed.
    const [names, field] = [bar.querySelector("datalist"), bar.querySelector("input")];
    const sorted = [...uses.keys()].filter((name) => uses.get(name).code.length).sort();
    for (const name of sorted) names.append(new Option(name));
    field.addEventListener("change", () => {
      if (field.value !== chosen) choose(field.value);
      if (field.value && !uses.has(field.value))
        count.textContent = `${field.value} is not on this page`;
    });
    page.addEventListener("click", (event) => {
      if (event.target.closest("a, summary")) return;
      if (!getSelection().isCollapsed) return;
      const formula = event.target.closest(".mathnormal, .mathrm, .mathbf");
      const symbol = formula ? ofFormula(formula) : wordAt(event);
      if (symbol) choose(symbol);
    });
    addEventListener("keydown", (event) => {
      if (event.key === "Escape" && chosen) choose(chosen);
    });
  });

  if (list) {
    page.classList.add("ready");
    arrange();
    wide.addEventListener("change", arrange);
  }
  if (page.querySelector(".map")) {
    addEventListener("scroll", later, { passive: true });
    addEventListener("resize", later);
    addEventListener("load", follow); // formulas are set
  }
});
