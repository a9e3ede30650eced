// What tests ask of a page, by name: each is handed to the browser as it stands.

// Of each pair of texts that lie on one another, what they say; and of those
// that stick out of their drawing.
const OVERLAPPING = (() => {
  const found = [], boxes = [];
  for (const text of all("svg text")) {
    const box = text.getBoundingClientRect();
    if (!text.textContent.trim() || !box.width) continue;
    const svg = text.ownerSVGElement.getBoundingClientRect();
    if (box.left < svg.left - 1 || box.right > svg.right + 1)
      found.push(["cut off", text.textContent]);
    for (const [other, said] of boxes) {
      const apart = box.right <= other.left || other.right <= box.left;
      const middle = Math.abs(box.y + box.height / 2 - other.y - other.height / 2);
      // Lines of text lie close: a third of a line is its margin.
      if (!apart && middle <= 0.66 * Math.min(box.height, other.height))
        found.push([said, text.textContent]);
    }
    boxes.push([box, text.textContent]);
  }
  return found;
})();

// Formulas that are still TeX: as arithmatex marks them, or in notebooks.
const RAW = () => {
  const skip = "script, style, pre, code, svg, .katex, textarea";
  const walk = document.createTreeWalker(
    document.querySelector("article"), NodeFilter.SHOW_TEXT);
  const found = [];
  while (walk.nextNode()) {
    const { parentElement, data } = walk.currentNode;
    if (!parentElement.closest(skip) && /\$[^$\d][^$]*\$|\\[([a-z]/.test(data)) found.push(data);
  }
  return found;
};

const RED = () => [...document.querySelectorAll(".katex [style*=color]")]
  .filter((e) => /^rgb\((204, 0, 0|255, 0, 0)\)$/.test(getComputedStyle(e).color))
  .map((e) => e.textContent);

// Drawings of matplotlib that are not in the colours of the page, or mute.
const FIGURES = () => [...document.querySelectorAll("article svg[role=img], article img")]
  .filter((e) => e.outerHTML.toLowerCase().includes("#707685")
    || (e.getAttribute("src") ?? "").startsWith("data:image/svg")
    || (e.alt !== "" && (e.getAttribute("aria-label") ?? e.alt ?? "").length <= 8))
  .map((e) => e.outerHTML.slice(0, 150));

// Figures without a name, and handles that have none or that no key reaches.
const UNNAMED = () => [
  ...document.querySelectorAll("figure:not([aria-label])"),
  // A label names the first control in it only, and an output is one.
  ...[...document.querySelectorAll("button, input, select, summary, textarea")].filter((e) =>
    e.checkVisibility() && !e.labels?.length && !e.ariaLabel && !e.title
    && !e.hasAttribute("aria-labelledby") && !e.textContent.trim()),
  ...[...document.querySelectorAll("[role=slider]")].filter((e) =>
    e.checkVisibility() && (e.tabIndex < 0 || !e.ariaLabel)),
].map((e) => `unnamed: ${e.outerHTML.slice(0, 150)}`);

// Buttons that copy something else than the code they are at.
const MISCOPIED = () => [...document.querySelectorAll("[data-clipboard-target]")]
  .map((e) => [e, document.querySelector(e.dataset.clipboardTarget)])
  .filter(([e, code]) => !code || !e.closest("pre, .highlight").contains(code))
  .map(([e]) => `copies something else: ${e.dataset.clipboardTarget}`);

// Of what takes the focus, one of each kind that looks the same with it. The
// outline of a hidden button is at its label.
const UNFOCUSED = () => {
  const all = "a[href], button, input, select, summary, textarea, [tabindex]:not([tabindex='-1'])";
  const kinds = new Map();
  const kind = (e) => `${e.localName} ${e.type ?? ""} ${e.getAttribute("class")}`;
  for (const e of document.querySelectorAll(all))
    if (e.tabIndex >= 0 && e.checkVisibility({ visibilityProperty: true }))
      kinds.set(`${kind(e)} in ${kind(e.parentElement)}`, e);
  const outlines = (e) => [e, ...(e.labels ?? [])].map((each) => {
    const { outlineStyle, outlineWidth } = getComputedStyle(each);
    return outlineStyle === "none" ? "" : outlineStyle + outlineWidth;
  }).join(" ");
  return [...kinds].filter(([, e]) => {
    document.activeElement.blur();
    const before = outlines(e);
    e.focus({ preventScroll: true });
    return document.activeElement === e && outlines(e) === before;
  }).map(([name]) => `no focus: ${name}`);
};

// Lines of text, as far as they are longer than is easy to read.
const LONG = () => {
  const skip = "pre, code, .katex, svg, .highlight, .md-clipboard, script, style";
  const found = [];
  for (const block of document.querySelectorAll("article :is(p, li, dd, td):not(.fw-picture p, .fw-heard, .fw-still *, .places)")) {
    if (block.querySelector(":is(p, li, table, .katex)")) continue;
    const lines = new Map();
    const walk = document.createTreeWalker(block, NodeFilter.SHOW_TEXT);
    const range = document.createRange();
    while (walk.nextNode()) {
      const { parentElement, data } = walk.currentNode;
      if (parentElement.closest(skip)) continue;
      for (const { 0: word, index } of data.matchAll(/[^\s-]*(-|\s+|$)/g)) {
        range.setStart(walk.currentNode, index);
        range.setEnd(walk.currentNode, index + word.length);
        const { width, y } = range.getBoundingClientRect();
        const top = Math.round(y / 8);
        if (width) lines.set(top, `${lines.get(top) ?? ""}${word}`);
      }
    }
    found.push(...[...lines.values()].map((line) => line.trim()).filter((line) => line.length > 80));
  }
  return found;
};

// Blocks that begin beside the edge of their page, and those that end beyond its
// measure: only pictures, code, tables and long formulas may, up to the end of the column.
const EDGES = () => {
  const article = document.querySelector("article");
  const { left, right } = article.getBoundingClientRect();
  const style = getComputedStyle(article);
  const end = left + parseFloat(style.getPropertyValue("--fw-text")) * 20;
  const text = "p, h1, h2, h3, ul, ol, div.arithmatex, .fw-quiz";
  const wide = "figure, .highlight, table, .nb-output, .nb-facts";
  const nested = `:is(${text}, ${wide}, details, blockquote, .admonition, dd, td, .annotated, .autodoc, .doc, .cheat, .fw-gallery, .fw-essay, .fw-aside, .fw-three) *`;
  const found = [];
  for (const block of article.querySelectorAll(`:is(${text}, ${wide}):not(${nested}, .fw-aside, .fw-heard, [role=status])`)) {
    const box = block.getBoundingClientRect();
    if (!box.width) continue;
    const indent = block.matches("ul:not([class]), ol") ? parseFloat(getComputedStyle(block).marginLeft) : 0;
    const formula = block.querySelector(".katex-html")?.getBoundingClientRect().width > 400;
    const last = formula || block.matches(wide) || block.querySelector(wide) ? right : end;
    // A wide table scrolls in its box.
    const scrolls = block.closest("[data-scrolls=yes]");
    if (Math.abs(box.left - indent - left) > 1 || (box.right > last + 2 && !scrolls))
      found.push(`${block.outerHTML.slice(0, 60)}: ${box.left} to ${box.right} in ${left} to ${last}`);
  }
  return found;
};

// Tables of which something is cut. A wide table scrolls in its box.
const CUT_CELLS = () => [...document.querySelectorAll("article :is(td, tbody th):not(.fw-still *)")]
  .filter((cell) => cell.scrollWidth > cell.clientWidth + 1)
  .map((cell) => cell.textContent.slice(0, 60));

// Letters of plots that are smaller than `least`, cut, or on top of each other, or
// that are outlines and not text.
const LETTERS = (least) => [...document.querySelectorAll("svg:is([id^=fig], [id^=plot-])")].flatMap((plot) => {
  const name = plot.id;
  const frame = plot.getBoundingClientRect();
  if (!frame.width) return []; // in a slider, not at first
  const texts = [...plot.querySelectorAll("text")].map((text) => {
    const { c, d } = text.getScreenCTM();
    const size = Math.hypot(c, d) * parseFloat(getComputedStyle(text).fontSize);
    // Without the room above and below letters.
    const { left, right, top, bottom } = text.getBoundingClientRect();
    const [across, down] = Math.abs(c) > Math.abs(d) ? [0.3 * size, 0] : [0, 0.3 * size];
    const box = { left: left + across, right: right - across, top: top + down, bottom: bottom - down };
    return { id: `${name} ${text.textContent}`, size, box };
  });
  const outlines = plot.querySelector("[id*=DejaVu]");
  const found = texts.length && !outlines ? [] : [`${name}: no text`];
  if (frame.width && (frame.left < 0 || frame.right > innerWidth)) found.push(`${name}: wide`);
  for (const [i, { id, size, box }] of texts.entries()) {
    if (size < least) found.push(`${id}: ${size} px`);
    if (box.left < frame.left - 1 || box.right > frame.right + 1
      || box.top < frame.top - 1 || box.bottom > frame.bottom + 1) found.push(`${id}: cut`);
    for (const other of texts.slice(0, i)) {
      // Two pixels apart, or they read as one word.
      const wide = Math.min(box.right, other.box.right) - Math.max(box.left, other.box.left);
      const high = Math.min(box.bottom, other.box.bottom) - Math.max(box.top, other.box.top);
      if (wide > -2 && high > 2) found.push(`${id} on ${other.id}`);
    }
  }
  return found;
});

// What runs, or would run when something changes.
const MOVES = () => {
  const moves = document.getAnimations().map((a) => a.animationName ?? a.transitionProperty);
  for (const element of document.querySelectorAll("*"))
    for (const pseudo of [null, "::before", "::after"]) {
      const style = getComputedStyle(element, pseudo);
      if (style.scrollBehavior === "smooth" || style.animationName !== "none"
        || style.transitionDuration.split(", ").some((time) => parseFloat(time) > 0))
        moves.push(`${element.localName}.${element.className}${pseudo ?? ""}`);
    }
  return [...new Set(moves)];
};

// Scrolling that a script asks for.
const SMOOTH = (() => {
  globalThis.smooth = [];
  for (const [owner, name] of [
    [window, "scrollTo"], [window, "scroll"], [window, "scrollBy"],
    [Element.prototype, "scrollTo"], [Element.prototype, "scrollBy"],
    [Element.prototype, "scrollIntoView"], [Element.prototype, "animate"],
  ]) {
    const original = owner[name];
    owner[name] = function (...values) {
      const asked = values.some((value) => value?.behavior === "smooth");
      if (asked || name === "animate") smooth.push(name);
      return original.apply(this, values);
    };
  }
})();

// Whether a control is in the window with all drawings, below the header; it
// scrolls as someone who looks at the figure does.
const TOGETHER = (control, css) => {
  const root = control.closest("[id^=figure-]");
  const header = document.querySelector("header.md-header");
  const span = () => {
    const boxes = [control, ...root.querySelectorAll(css)].map((e) => e.getBoundingClientRect());
    return [Math.min(...boxes.map((b) => b.top)), Math.max(...boxes.map((b) => b.bottom))];
  };
  const above = header.getBoundingClientRect().bottom;
  const [top, bottom] = span();
  const by = top - above - 2;
  if (bottom > innerHeight || by < 0) scrollBy({ top: by, behavior: "instant" });
  const seen = span();
  return seen[0] >= header.getBoundingClientRect().bottom && seen[1] <= innerHeight;
};

// Letters below 11.5 px, or with less than 4.5 : 1 against what lies below.
const ILLEGIBLE = (name) => {
  const canvas = new OffscreenCanvas(1, 1);
  const context = canvas.getContext("2d", { willReadFrequently: true });
  const parse = (colour, opacity = 1) => {
    context.clearRect(0, 0, 1, 1);
    context.fillStyle = colour === "none" ? "transparent" : colour;
    context.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = context.getImageData(0, 0, 1, 1).data;
    return [r, g, b, (a / 255) * opacity];
  };
  const over = ([r, g, b, a], below) =>
    [r, g, b].map((c, i) => c * a + below[i] * (1 - a));
  const light = (rgb) => rgb
    .map((c) => ((c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const paint = (e) => {
    const style = getComputedStyle(e);
    if (!(e instanceof SVGGeometryElement)) return parse(style.backgroundColor);
    return parse(style.fill, style.fillOpacity * style.opacity);
  };
  const found = [];
  for (const e of document.querySelectorAll(`#figure-${name} svg text`)) {
    if (!e.textContent.trim() || !e.checkVisibility()) continue;
    const size = parseFloat(getComputedStyle(e).fontSize) * e.getScreenCTM().a;
    if (size < 11.5) found.push([e.textContent, `${size} px`]);
    const box = e.getBoundingClientRect();
    const stack = document
      .elementsFromPoint(box.x + box.width / 2, box.y + box.height / 2)
      .filter((below) => !(below instanceof SVGTextContentElement));
    const below = stack.reduceRight((colour, b) => over(paint(b), colour), [255, 255, 255]);
    const style = getComputedStyle(e);
    const text = over(parse(style.fill, style.opacity * style.fillOpacity), below);
    const [low, high] = [light(text), light(below)].sort((a, b) => a - b);
    const ratio = (high + 0.05) / (low + 0.05);
    if (ratio < 4.5) found.push([e.textContent, ratio.toFixed(2)]);
  }
  return found;
};

// What axe finds, as one line per rule that is broken.
const RULES = ({ rules, of }) => axe.run(of ?? document, {
  resultTypes: ["violations"],
  runOnly: rules ?? ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "best-practice"],
}).then((results) => results.violations
  .filter((v) => ["serious", "critical"].includes(v.impact))
  .map((v) => `${v.id}: ${v.nodes.length} x ${v.nodes[0].html.slice(0, 150)} `
    + v.nodes[0].failureSummary.slice(0, 300)));

// Use every control of a figure once, and also those that come then: of each its
// name, and whether the sentence has changed.
const USED = (async () => {
  const name = (e) => e.dataset.state ?? e.ariaLabel ?? e.labels?.[0]?.textContent.trim() ?? e.textContent;
  const kinds = "button, input, textarea, select, summary, [role=slider], [role=button]";
  const done = new Set(), used = [];
  const next = () => all(kinds).find((e) => seen(e) && !e.disabled && !done.has(e.type + name(e))
    && !(e.type === "radio" && e.checked));
  for (let e = next(); e && used.length < 40; e = next()) {
    done.add(e.type + name(e));
    const [label, said] = [name(e), words()];
    const happen = (kind) => e.dispatchEvent(new Event(kind, { bubbles: true }));
    const press = (key) => e.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true, cancelable: true }));
    if (e.type === "range") e.value = Number(e.value) === Number(e.max) ? e.min : e.max;
    else if (e.matches("textarea, [type=text]")) e.value = "a=b c=d";
    else if (e.matches("select")) e.selectedIndex = e.options.length - 1;
    else if (e.getAttribute("role") === "slider") ["ArrowUp", "ArrowLeft"].forEach(press);
    else e.dispatchEvent(new MouseEvent("click", { bubbles: true, cancelable: true }));
    if (e.matches("input:not([type=radio], [type=checkbox]), textarea, select"))
      ["input", "change"].forEach(happen);
    await new Promise((ready) => setTimeout(ready, 40));
    used.push([label, said !== words()]);
  }
  return used;
})();

// --- Questions -------------------------------------------------------------

// What a page says to each of some answers.
const JUDGED = (answers) => answers.map(([name, answer]) => {
  const form = [...document.querySelectorAll(".fw-quiz")]
    .find((each) => JSON.parse(each.dataset.question).name === name);
  const chosen = form.querySelector(`input[value="${CSS.escape(answer)}"]`);
  if (chosen) chosen.checked = true;
  else form.querySelector("input").value = answer;
  form.requestSubmit();
  return form.querySelector("[role=status]").textContent;
});

// --- The essay -------------------------------------------------------------

// What a step shows: its state, words and table.
const ESSAY = (() => {
  root.figure.jump(given);
  const table = all("[data-part=table] text").filter(seen).map((e) => e.textContent);
  return [state(), words(), table.join(" ")];
})();

// Whether the picture has ever been between two steps.
const WATCH = (() => {
  globalThis.moved = 0;
  const watch = () => {
    if (state().moving) moved += 1;
    requestAnimationFrame(watch);
  };
  watch();
})();

const PLACES = (() => {
  const box = (e) => { const b = e.getBoundingClientRect(); return [b.left, b.top, b.right, b.bottom]; };
  const section = document.querySelector(`[data-step=${given}]`);
  return {
    figure: box(root),
    picture: box(all("svg")[0]),
    heading: box(section.querySelector("h2")),
    text: box(section.querySelector("p")),
    header: box(document.querySelector("header.md-header"))[3],
    current: all(".fw-current", document).map((e) => e.dataset.step),
    animations: document.getAnimations().length,
  };
})();

// By step, whether its own picture is there; and of the one that moves.
const PICTURES = [
  ...all("[data-step]", document).filter((step) =>
    ["svg", ".fw-words"].every((css) => all(`.fw-step ${css}`, step).some(seen))
  ).map((step) => step.dataset.step),
  ...(seen(all("svg")[0]) ? ["moving"] : []),
];

// The number of controls that the tabulator should stop at.
const STOPS = (() => {
  const controls = all(":is(button, input, textarea, [role=slider])");
  // Of radio buttons, and of a grid, one is a stop; arrows lead on.
  const stops = controls.filter((e) => !e.disabled && e.tabIndex >= 0
    && e.getBoundingClientRect().width > 0 && (e.type !== "radio" || e.checked));
  controls.forEach((e, i) => { e.dataset.number = i; });
  return stops.length;
})();

// Keep the names of the controls that get the focus, from the title on.
const REACHED = () => {
  globalThis.reached = {};
  document.addEventListener("focusin", ({ target: e }) => {
    if (e.dataset.number)
      reached[e.dataset.number] = e.ariaLabel || e.labels?.[0]?.textContent || e.textContent;
  });
  const before = document.querySelector("article h1");
  before.tabIndex = -1;
  before.focus();
};

// How far each number is from its formula, and from its top and bottom.
const BESIDE = () => [...document.querySelectorAll(".katex-display:has(.fw-number)")].map((e) => {
  const range = document.createRange();
  range.selectNodeContents(e.querySelector(".fw-number"));
  const [number, formula] = [range, e.querySelector(".katex-html")]
    .map((part) => part.getBoundingClientRect());
  return [number.left - formula.right, number.top + number.height / 2 - formula.top,
    formula.bottom - number.top - number.height / 2];
});

// Marks that are not a whole word.
const CUT = () => [...document.querySelectorAll("mark")]
  .filter(({ previousSibling, nextSibling }) =>
    /\w$/.test(previousSibling?.textContent ?? "") || /^\w/.test(nextSibling?.textContent ?? ""))
  .map((e) => e.parentElement.textContent);
