// @ts-check
// Figures as functions of their state, with matrices as tables:
//
//   figure("name", { state, compute, view, controls, say, ...more });
//
// `compute` makes numbers of the state; `view` and `controls` are drawn again, and
// `say` is said, whenever `set` changes it; `below` is a picture as wide as the figure.
// `begin` is called once, and returns more for tests, as `more` is.
import { html, nothing, render, svg } from "lit-html";
import * as fwlab from "./common.js";
import { number, signed } from "./common.js";

export { html, nothing, render, svg };

/** @param {string} name @param {any} parts */
export const figure = (name, { state, compute, view, controls, below, say, begin, ...more }) =>
  fwlab.figure(name, (figure) => {
    let found;
    const set = (changes) => {
      Object.assign(state, changes);
      found = compute(state);
      const [picture, side, rest] = [view, controls, below].map((part) => part?.(state, found, set) ?? nothing);
      draw(
        html`<div class="fw-picture fw-tables">${picture}</div><div class="fw-side">${side}</div>${rest}`,
        figure.root,
      );
      figure.say(say(state, found));
    };
    set({});
    return { state: () => ({ ...state, ...found }), ...more, ...begin?.(set, figure.root) };
  });

// The keyboard is not left on a button that is off: another one of its row is next, or
// the last one.
export const draw = (template, root) => {
  const lost = document.activeElement;
  render(template, root);
  if (!(lost instanceof HTMLButtonElement && lost.disabled)) return;
  const [row, all] = [lost.parentElement, root].map((e) => [...e.querySelectorAll("button:enabled")]);
  (row[0] ?? all.at(-1))?.focus();
};

// Small letters of a drawing, in the middle of their line; and lines.
export const note = (x, y, words, anchor = "start") =>
  svg`<text x=${x} y=${y} text-anchor=${anchor} class="fw-small" dominant-baseline="central">${words}</text>`;
/** @param {string} d @param {string} style @param {any} part */
export const line = (d, style = "", part = nothing) =>
  svg`<path d=${d} fill="none" stroke="currentcolor" style=${style} data-part=${part} />`;

// A part of a drawing that can be moved, as `drag` of common.js makes it.
/** @param {string} label @param {any} options @param {any} listeners @param {any} body */
export const handle = (label, { name, at: [x, y], now, told, range: [min, max], reach }, listeners, body) => {
  const { pointerdown, touchstart, pointermove, keydown } = fwlab.dragging(listeners);
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
 *   disabled?: boolean, axis?: boolean}} range
 */
export const slider = (
  label,
  { min, max, step = 1, value, shown, disabled = false, axis = false },
  changed,
) =>
  html`<div class="fw-controls"><label class=${`fw-slider${axis ? " fw-axis" : ""}`}>${label}<input type="range"
    min=${min} max=${max} step=${step} .value=${String(value)} ?disabled=${disabled}
    aria-valuetext=${shown} @input=${(e) => changed(Number(e.target.value))}><span
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
