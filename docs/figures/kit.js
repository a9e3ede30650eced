// @ts-check
// Figures as functions of their state, with matrices as tables:
//
//   figure("name", { state, compute, view, controls, say, ...more });
//
// and it is wherever a page says <!-- figure: name -->. `compute` makes numbers of the
// state; `view` and `controls` are drawn again, and `say` is said, whenever `set` changes
// it. A figure that is laid out in another
// way has `page` for all of them; one with canvases paints them when it is `drawn`;
// `plays` returns the plan of a player; `begin` is called once, and returns more for
// tests, as `more` is. These get the figure's own `root`, `set` and `play`, the picture
// that `stood` there, and `tell` for words that do not follow from the state.
// `make figures` keeps all but the controls, for pages without scripts; `state` returns
// what the figure shows, as plain numbers. A script exports what `figure` returns, so
// that tests compute without a page.
import { html, nothing, render, svg } from "lit-html";
import { number, signed } from "./words.js";

export { html, nothing, render, svg };

// The picture and its controls, side by side where there is room.
const beside = (state, found, own, { view, controls }) => {
  const [picture, side] = [view, controls].map((part) => part?.(state, found, own.set, own) ?? nothing);
  return html`<div class="fw-picture fw-tables">${picture}</div><div class="fw-side">${side}</div>`;
};

/** @param {string} name @param {any} parts */
export const figure = (name, { state, compute = () => ({}), plays, drawn, say, begin, ...parts }) => {
  for (const root of document.querySelectorAll(`[data-figure="${name}"]`)) {
    const words = root.parentElement.querySelector(".fw-words");
    const status = document.createElement("div");
    status.className = "fw-status";
    status.role = "status";
    words.after(status);
    let found;
    let begun = false;
    let timer;
    // Who listens hears it when nothing has changed for a moment, and neither how the
    // figure begins nor what plays by itself.
    const tell = (text) => {
      if (words.textContent === text && begun) return;
      words.textContent = text;
      clearTimeout(timer);
      if (begun && !state.playing) timer = setTimeout(() => (status.textContent = text), 800);
    };
    const own = { root, stood: root.firstElementChild ?? nothing, tell, set: undefined, play: undefined };
    root.replaceChildren();
    own.set = (changes = {}) => {
      Object.assign(state, changes);
      found = compute(state);
      draw((parts.page ?? beside)(state, found, own, parts), root);
      drawn?.(own);
      const text = say(state, found);
      if (text) tell(text);
    };
    own.play = plays && player(plays(own));
    own.set();
    const more = begin?.(own);
    Object.assign(root.parentElement, { figure: { state: () => ({ ...state, ...found }), ...parts, ...more } });
    begun = true;
    root.parentElement.classList.add("fw-live");
  }
  return { state, compute, say, ...parts };
};

// Nothing moves where readers ask for less motion, and nothing offers to. They
// may ask at any time.
export const motion = matchMedia("(prefers-reduced-motion: reduce)");

// The keyboard is not left on a button that is off: another one of its row is next, or
// the last one.
const draw = (template, root) => {
  const lost = document.activeElement;
  render(template, root);
  if (!(lost instanceof HTMLButtonElement && lost.disabled)) return;
  const [row, all] = [lost.parentElement, root].map((e) => [...e.querySelectorAll("button:enabled")]);
  (row[0] ?? all.at(-1))?.focus();
};

// A button that plays, and stops what it plays: after `begin` it calls `step`
// every so many milliseconds until that returns false; then comes `end`.
// `whenSeen` starts it once an element is in view, unless the reader has used
// it by then.
/**
 * @param {{every: number, begin: () => unknown, step: () => unknown,
 *   end?: () => unknown, names?: string[]}} plan
 */
const player = ({ every, begin, step, end, names: [play, pause] = ["Play", "Pause"] }) => {
  let timer = null;
  let observer;
  const turn = (on) => {
    const ran = timer !== null;
    observer?.disconnect();
    clearInterval(timer);
    timer = on ? setInterval(() => step() || turn(false), every) : null;
    own.textContent = on ? pause : play;
    if (on) begin();
    else if (ran) end?.();
  };
  const own = document.createElement("button");
  Object.assign(own, { type: "button", className: "fw-button", onclick: () => turn(timer === null) });
  own.textContent = play;
  own.hidden = motion.matches;
  motion.addEventListener("change", () => {
    own.hidden = motion.matches;
    if (motion.matches) turn(false);
  });
  return {
    button: own,
    start: () => turn(!motion.matches),
    stop: () => turn(false),
    whenSeen: (element) => {
      if (motion.matches) return;
      /** @param {IntersectionObserverEntry[]} entries */
      const seen = ([{ isIntersecting }]) => isIntersecting && turn(true);
      observer = new IntersectionObserver(seen, { threshold: 0.5 });
      observer.observe(element);
    },
  };
};

// Small letters of a drawing, in the middle of their line; and lines.
export const note = (x, y, words, anchor = "start") =>
  svg`<text x=${x} y=${y} text-anchor=${anchor} class="fw-small" dominant-baseline="central">${words}</text>`;
/** @param {string} d @param {string} style @param {any} part */
export const line = (d, style = "", part = nothing) =>
  svg`<path d=${d} fill="none" stroke="currentcolor" style=${style} data-part=${part} />`;

// Where handles can be taken, the circles around them, overlap, the nearest is taken.
const nearest = (own, event) => {
  const distance = (handle) => {
    const { e, f } = handle.getScreenCTM();
    return Math.hypot(event.clientX - e, event.clientY - f);
  };
  const all = [...own.ownerSVGElement.querySelectorAll(".fw-handle")];
  return all.reduce((a, b) => (distance(b) < distance(a) ? b : a), own);
};

// Listeners of a handle that can be moved by pointer (`move` gets a point in the units
// of the picture) and by arrow keys (`nudge` gets -1, 0 or 1 in each direction, up being
// positive).
const STEPS = {
  ArrowLeft: [-1, 0],
  ArrowRight: [1, 0],
  ArrowUp: [0, 1],
  ArrowDown: [0, -1],
  PageUp: [0, 1, 5],
  PageDown: [0, -1, 5],
};
/** @returns {Record<string, (event: any) => void>} */
const dragging = ({ move, nudge }) => ({
  pointerdown: (event) => {
    if (event.button) return;
    event.preventDefault();
    const taken = nearest(event.currentTarget, event);
    taken.focus({ preventScroll: true });
    taken.setPointerCapture(event.pointerId);
  },
  // So that a finger moves the handle and not the page: `touch-action` has no
  // effect on the shapes and groups of a drawing.
  touchstart: (event) => event.preventDefault(),
  pointermove: (event) => {
    const handle = event.currentTarget;
    if (!handle.hasPointerCapture(event.pointerId)) return;
    const matrix = handle.ownerSVGElement.getScreenCTM().inverse();
    const { x, y } = new DOMPoint(event.clientX, event.clientY).matrixTransform(matrix);
    move(x, y);
  },
  keydown: (event) => {
    if (!(event.key in STEPS)) return;
    event.preventDefault();
    const [x, y, times = 1] = STEPS[event.key];
    for (let i = 0; i < times; i++) nudge(x, y);
  },
});

// A part of a drawing that can be moved.
/** @param {string} label @param {any} options @param {any} listeners @param {any} body */
export const handle = (label, { name, at: [x, y], now, told, range: [min, max], reach }, listeners, body) => {
  const { pointerdown, touchstart, pointermove, keydown } = dragging(listeners);
  return svg`<g role="slider" tabindex="0" class="fw-handle" data-key=${name} aria-label=${label}
    aria-valuemin=${min} aria-valuemax=${max} aria-valuenow=${now} aria-valuetext=${told}
    transform=${`translate(${x} ${y})`} @pointerdown=${pointerdown} @touchstart=${touchstart}
    @pointermove=${pointermove} @keydown=${keydown}>
    <circle r=${reach} class="fw-reach" fill="none" pointer-events="all" />${body}</g>`;
};

// Right or wrong, by a sign and not only by colour.
export const mark = (right) =>
  html`<b role="img" aria-label=${right ? "correct:" : "wrong:"}>${right ? "✓" : "✗"}</b>`;
export const share = (part) => html`<i style=${`--share: ${(100 * part).toFixed(0)}%`}></i>`;

/** @param {string} words @param {(e: any) => unknown} press @param {any} options */
export const button = (words, press, { label = nothing, disabled = false } = {}) =>
  html`<button type="button" class="fw-button" aria-label=${label} ?disabled=${disabled}
    @click=${press}>${words}</button>`;

export const choice = (label, names, chosen, choose, title = (/** @type {any} */ name) => name) => html`<div class="fw-controls">
  <fieldset class="fw-choice"><legend>${label}</legend>${names.map(
    (name) => html`<label><input type="radio" name=${`fw-${label}`} value=${name}
      .checked=${name === chosen} @change=${() => choose(name)}>${title(name)}</label>`,
  )}</fieldset></div>`;

/**
 * @param {string} label
 * @param {{min: number, max: number, step?: number, value: number, shown: string,
 *   spoken?: string, disabled?: boolean, axis?: boolean}} range
 */
export const slider = (
  label,
  { min, max, step = 1, value, shown, spoken = shown, disabled = false, axis = false },
  changed,
) =>
  html`<div class="fw-controls"><label class=${`fw-slider${axis ? " fw-axis" : ""}`}>${label}<input type="range"
    min=${min} max=${max} step=${step} .value=${String(value)} ?disabled=${disabled}
    aria-valuetext=${spoken} @input=${(e) => changed(Number(e.target.value))}><span
    class="fw-value">${shown}</span></label></div>`;

const ARROWS = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };

// Numbers in cells whose colour is their sign and size, up to `limit`; `heads` are
// rows above them, `rows` of numbers may have a name and a number after them. With
// `choose`, a cell is chosen by pointer or by arrow keys.
/** @param {any} options */
export const table = ({ title, heads = [], rows, limit = 1, digits = 1, chosen, choose }) => {
  const move = (e, i, j) => {
    if (!(e.key in ARROWS)) return;
    e.preventDefault();
    const body = e.currentTarget.closest("tbody");
    choose(i + ARROWS[e.key][0], j + ARROWS[e.key][1]);
    body.querySelector('[tabindex="0"]').focus();
  };
  const cell = (x, i, j) => {
    if (Number.isNaN(x)) return html`<td></td>`;
    const colour = `background: ${signed(0.45 * Math.max(-1, Math.min(x / limit, 1)))}`;
    if (!choose) return html`<td style=${colour}>${number(x, digits)}</td>`;
    const here = chosen[0] === i && chosen[1] === j;
    return html`<td style=${colour} class=${here ? "fw-chosen" : nothing} aria-selected=${here}
      tabindex=${here ? 0 : -1} @click=${() => choose(i, j)}
      @keydown=${(e) => move(e, i, j)}>${number(x, digits)}</td>`;
  };
  const head = ([name, cells]) => html`<tr><th scope="row">${name}</th>${cells.map((x) => html`<th scope="col">${x}</th>`)}</tr>`;
  return html`<table class="fw-numbers" role=${choose ? "grid" : nothing}>
    <caption>${title}</caption><thead>${heads.map(head)}</thead>
    <tbody>${rows.map(([name, numbers, after], i) => html`<tr><th scope="row">${name}</th>${numbers.map(
      (x, j) => cell(x, i, j),
    )}${after === undefined ? nothing : html`<td>${after}</td>`}</tr>`)}</tbody></table>`;
};
