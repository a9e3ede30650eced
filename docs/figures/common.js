// @ts-check
// What the figures share: elements, controls, colours. A figure is
//
//   import * as fwlab from "./fwlab.js";
//   fwlab.figure("name", (figure) => { ...; return { state: () => ({...}) }; });
//
// and is wherever a page says <!-- figure: name -->. It has a picture, and
// beside it, or below it on a phone, its controls and what else it draws, so
// that a control and what it changes are seen together. `make figures` keeps
// all but the controls, for pages without scripts; `state` returns what the
// figure shows, as plain numbers.

export const html = (name, attributes = {}, ...children) => {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes))
    if (value !== undefined && value !== false) element.setAttribute(key, value);
  element.append(...children);
  return element;
};

// Start a figure: `figure.root` takes its elements, `figure.say` the sentence
// that says in words what is to be seen. What `setup` returns is kept as
// `element.figure`.
export const figure = (name, setup) => {
  for (const root of document.querySelectorAll(`[data-figure="${name}"]`)) {
    const words = root.parentElement.querySelector(".fw-words");
    const placeholder = root.firstElementChild;
    root.replaceChildren();
    const status = html("div", { class: "fw-status", role: "status" });
    words.after(status);
    let begun = false;
    let timer;
    const figure = {
      root,
      placeholder, // the picture that stood there
      // Who listens hears it when nothing has changed for a moment, and
      // neither how the figure begins nor what plays by itself: that is not `aloud`.
      say: (text, aloud = true) => {
        if (words.textContent === text && begun) return;
        words.textContent = text;
        clearTimeout(timer);
        if (begun && aloud) timer = setTimeout(() => (status.textContent = text), 800);
      },
    };
    Object.assign(root.parentElement, { figure: setup(figure) ?? {} });
    begun = true;
    root.parentElement.classList.add("fw-live");
  }
};

// The address of this script, to which those of weights are relative.
/** @type {string} */
export const here = /** @type {HTMLScriptElement} */ (document.currentScript).src;

// A row of controls.
export const controls = (...elements) =>
  html("div", { class: "fw-controls" }, ...elements);

export const button = (label, press) => {
  const button = html("button", { type: "button", class: "fw-button" }, label);
  button.addEventListener("click", press);
  return button;
};

// Nothing moves where readers ask for less motion, and nothing offers to. They
// may ask at any time.
export const motion = matchMedia("(prefers-reduced-motion: reduce)");

// A button that plays, and stops what it plays: after `begin` it calls `step`
// every so many milliseconds until that returns false; then comes `end`.
// `whenSeen` starts it once an element is in view, unless the reader has used
// it by then.
/**
 * @param {{every: number, begin: () => unknown, step: () => unknown,
 *   end?: () => unknown, names?: string[]}} plan
 */
export const player = ({ every, begin, step, end, names: [play, pause] = ["Play", "Pause"] }) => {
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
  const own = button(play, () => turn(timer === null));
  own.hidden = motion.matches;
  motion.addEventListener("change", () => {
    own.hidden = motion.matches;
    if (motion.matches) turn(false);
  });
  return {
    button: own,
    running: () => timer !== null,
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

// A slider with its value beside it; `element.value` can be read and set.
/**
 * @param {string} label
 * @param {{min: number, max: number, step?: number | string, value: number,
 *   show?: (value: number) => string | number}} range
 * @param {(value: number) => unknown} changed
 */
export const slider = (label, { min, max, step, value, show = String }, changed) => {
  const input = html("input", { type: "range", min, max, step });
  const output = html("span", { class: "fw-value" });
  const element = html("label", { class: "fw-slider" }, label, input, output);
  const update = () => {
    output.textContent = show(Number(input.value));
    input.setAttribute("aria-valuetext", output.textContent);
  };
  input.addEventListener("input", () => {
    update();
    changed(Number(input.value));
  });
  Object.defineProperty(element, "value", {
    get: () => Number(input.value),
    set: (number) => {
      input.value = number;
      update();
    },
  });
  element.value = value;
  return element;
};

let choices = 0;

// One of several: radio buttons. `options` is { value: label }.
export const choice = (label, options, value, changed) => {
  const name = `fw-choice-${++choices}`;
  const element = html(
    "fieldset",
    { class: "fw-choice" },
    html("legend", {}, label),
    ...Object.entries(options).map(([key, text]) => {
      const input = html("input", { type: "radio", name, value: key });
      input.checked = key === String(value);
      input.addEventListener("change", () => changed(key));
      return html("label", {}, input, text);
    }),
  );
  return element;
};

export const checkbox = (label, value, changed) => {
  const input = html("input", { type: "checkbox" });
  input.checked = value;
  input.addEventListener("change", () => changed(input.checked));
  return html("label", { class: "fw-checkbox" }, input, label);
};

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
const ARROWS = {
  ArrowLeft: [-1, 0],
  ArrowRight: [1, 0],
  ArrowUp: [0, 1],
  ArrowDown: [0, -1],
  PageUp: [0, 1, 5],
  PageDown: [0, -1, 5],
};
/** @returns {Record<string, (event: any) => void>} */
export const dragging = ({ move, nudge }) => ({
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
    if (!(event.key in ARROWS)) return;
    event.preventDefault();
    const [x, y, times = 1] = ARROWS[event.key];
    for (let i = 0; i < times; i++) nudge(x, y);
  },
});

// A signed number from -1 to 1 as a colour: the page shines through at 0.
export const signed = (x) => {
  const share = Math.round(100 * Math.min(Math.abs(x), 1));
  const end = x < 0 ? "--fw-negative" : "--fw-positive";
  return `color-mix(in srgb, var(${end}) ${Number.isNaN(x) ? 0 : share}%, transparent)`;
};

// A colour that letters can be read on.
export const tint = (colour, share = 28) =>
  `color-mix(in srgb, ${colour} ${share}%, transparent)`;

// Numbers as readers want them: two decimals, and a true minus.
export const number = (x, digits = 2) => {
  if (!Number.isFinite(x)) return Number.isNaN(x) ? "NaN" : x < 0 ? "−∞" : "∞";
  const text = x.toFixed(digits);
  return (Number(text) === 0 ? (0).toFixed(digits) : text).replace("-", "−");
};

export const vector = (v, digits) => `(${v.map((x) => number(x, digits)).join(", ")})`;
export const percent = (share) => `${Math.round(100 * share)}\u00a0%`;

// A place in a drawing, without digits that nobody sees.
export const round = (x) => Math.round(100 * x) / 100;

// A linear scale: d3-scale has this and more, in eleven kilobytes.
/** @param {number[]} from @param {number[]} to */
export const scale = ([a, b], [low, high]) => (x) => low + ((x - a) / (b - a)) * (high - low);

// Names as in a sentence: "a, b and c".
export const list = (names) =>
  names.length < 2 ? names.join("") : `${names.slice(0, -1).join(", ")} and ${names.at(-1)}`;
