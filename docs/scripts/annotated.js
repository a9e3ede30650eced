// Annotated source. The equation or line that the address names, and all lines that
// carry the same number, light up together; and so do all uses of a symbol that is
// clicked, in formulas and in code.
document.addEventListener("DOMContentLoaded", () => {
  const page = document.querySelector(".annotated");
  if (!page) return;

  // Equations and lines

  const numbers = (element) => element.dataset.eq?.split(" ") ?? [];

  // Show what the address names, with its version, and light up what belongs to it.
  const show = () => {
    const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
    const wanted = target ? numbers(target) : [];
    for (const element of page.querySelectorAll("[data-eq], .lit"))
      element.classList.toggle(
        "lit",
        numbers(element).some((number) => wanted.includes(number)),
      );
    if (!page.contains(target)) return;
    target.classList.toggle("lit", target.matches(".line, .equation"));
    target.closest("details")?.setAttribute("open", "");
    const version = target.closest(".column").classList[1];
    const shown = [...page.querySelectorAll(":checked")].map((input) => input.value);
    const side = page.querySelector(".right")?.checkVisibility() ? "right" : "left";
    if (version && (!shown.includes(version) || !target.checkVisibility()))
      page.querySelector(`.${side} [value=${version}]`).checked = true;
    // What is in view stays where it is.
    const { top, bottom } = target.getBoundingClientRect();
    if (top < 90 || bottom > innerHeight) target.scrollIntoView();
    if (!target.hasAttribute("tabindex")) target.tabIndex = -1;
    target.focus({ preventScroll: true });
  };

  document.addEventListener("click", (event) => {
    if (event.ctrlKey || event.metaKey || event.shiftKey) return;
    const link = event.target.closest("a[href^='#']");
    if (!link) return;
    event.preventDefault();
    history.pushState(null, "", link.hash);
    show();
  });
  addEventListener("popstate", show);
  addEventListener("load", show);

  // Symbols. k_t of the code is k of the formulas, v_bar is v with a bar.

  const LETTERS =
    "alpha α beta β gamma γ Gamma Γ delta δ Delta Δ epsilon ϵ zeta ζ eta η theta θ " +
    "kappa κ lambda λ Lambda Λ mu μ nu ν xi ξ pi π rho ρ sigma σ Sigma Σ tau τ " +
    "phi ϕ Phi Φ chi χ psi ψ omega ω Omega Ω ell ℓ";
  const greek = Object.fromEntries(
    [...LETTERS.matchAll(/(\w+) (\S)/g)].map(([, name, letter]) => [letter, name]),
  );
  const accents = { ˉ: "_bar", "^": "_hat", "~": "_tilde" };
  const formulas = () => page.querySelectorAll(".katex-html :is(.mathnormal, .mathrm, .mathbf)");

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

  // The places of a name in the code, but for numbers, comments, texts and keywords.
  const uses = (symbol) => {
    const found = [];
    const walk = document.createTreeWalker(page, NodeFilter.SHOW_TEXT);
    while (walk.nextNode()) {
      const { data, parentElement } = walk.currentNode;
      if (!parentElement.closest(".line") || parentElement.closest(SKIPPED)) continue;
      for (const { 0: name, index } of data.matchAll(/[A-Za-z_]\w*/g))
        if (ofName(name) === symbol) {
          const range = new Range();
          range.setStart(walk.currentNode, index);
          range.setEnd(walk.currentNode, index + name.length);
          found.push(range);
        }
    }
    return found;
  };
  const SKIPPED = ".line > a:first-child, .c1, [class^=s], [class^=k], .ow";

  let chosen = null;
  const choose = (symbol) => {
    chosen = symbol === chosen ? null : symbol;
    const code = chosen ? uses(chosen) : [];
    const set = [...formulas()].filter((element) => ofFormula(element) === chosen);
    for (const element of page.querySelectorAll(".symbol"))
      element.classList.remove("symbol");
    for (const element of set) element.classList.add("symbol");
    if (globalThis.CSS?.highlights) CSS.highlights.set("symbol", new Highlight(...code));
    page.querySelector("[role=status]").textContent = chosen
      ? `${chosen}: ${set.length} in formulas, ${code.length} in code`
      : "";
  };

  page.addEventListener("click", (event) => {
    if (event.target.closest("a, summary, .bar") || !getSelection().isCollapsed) return;
    const formula = event.target.closest(".mathnormal, .mathrm, .mathbf");
    if (formula) return choose(ofFormula(formula));
    const place = document.caretPositionFromPoint?.(event.clientX, event.clientY);
    if (place?.offsetNode.nodeType !== Node.TEXT_NODE) return;
    const { data, parentElement } = place.offsetNode;
    if (!parentElement.closest(".line") || parentElement.closest(SKIPPED)) return;
    const [before] = data.slice(0, place.offset).match(/\w*$/);
    const [after] = data.slice(place.offset).match(/^\w*/);
    if (/^[A-Za-z_]/.test(before + after)) choose(ofName(before + after));
  });
  addEventListener("keydown", (event) => {
    if (event.key === "Escape" && chosen) choose(chosen);
  });
});
