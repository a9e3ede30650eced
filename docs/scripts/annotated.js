// Annotated source. The equation or line that the address names, and all
// lines that carry the same number, light up together; and so do all uses of
// a symbol that is clicked, in formulas and in code.
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

  // The browser's own jump into a column that stays in view would move
  // the other column, too.
  const show = (target) => {
    const column = target.closest(".column");
    const shown = column?.className.match(/with-(\w+)/)[1];
    const tab = document.getElementById(`show-${shown}`);
    if (tab) tab.checked = true;
    if (column && getComputedStyle(column).position === "sticky") {
      const [box, place] = [column, target].map((e) => e.getBoundingClientRect());
      if (place.top < box.top || place.bottom > box.bottom)
        column.scrollTop += place.top - box.top - box.height / 3;
    } else target.scrollIntoView({ block: "center" });
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
    const number = event.target.closest(".katex-tag");
    const line = number?.closest(".equation")?.querySelector(".places a");
    if (!link && !line) return;
    event.preventDefault();
    go((link ?? line).hash);
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
  const bar = document.createElement("div");
  bar.className = "symbols";
  bar.setAttribute("role", "group");
  bar.setAttribute("aria-label", "Light up a symbol");
  const count = document.createElement("span");
  count.setAttribute("role", "status");

  const tell = () => {
    if (!chosen) return;
    const { code, formulas } = uses.get(chosen);
    const places = [...formulas, ...code.map((range) => range.startContainer.parentElement)];
    const hidden = places.filter((element) => !element.checkVisibility()).length;
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
    const names = document.createElement("datalist");
    names.id = "names";
    const sorted = [...uses.keys()].filter((name) => uses.get(name).code.length).sort();
    for (const name of sorted) names.append(new Option(name));
    const field = document.createElement("input");
    field.setAttribute("list", "names");
    field.placeholder = "another name";
    field.setAttribute("aria-label", "Another name of the code to light up");
    field.addEventListener("change", () => {
      if (field.value !== chosen) choose(field.value);
      if (field.value && !uses.has(field.value))
        count.textContent = `${field.value} is not on this page`;
    });
    bar.prepend("Symbols");
    bar.append(field, names, count);
    page.before(bar);
    page.addEventListener("click", (event) => {
      if (event.target.closest("a, .katex-tag, summary")) return;
      if (!getSelection().isCollapsed) return;
      const formula = event.target.closest(".mathnormal, .mathrm, .mathbf");
      const symbol = formula ? ofFormula(formula) : wordAt(event);
      if (symbol) choose(symbol);
    });
    // Another version is shown.
    document.addEventListener("change", (event) => {
      if (event.target.matches("input[type=radio]")) tell();
    });
    addEventListener("keydown", (event) => {
      if (event.key === "Escape" && chosen) choose(chosen);
    });
  });
});
