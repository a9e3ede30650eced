// @ts-check
// One small picture for each rule, all after the same token: its memory, what it reads
// wrongly, and its score.
import { button, html, nothing } from "./kit.js";
import { readings, wrong } from "./tasks.js";
import { percent } from "./words.js";

/** Pixels of a cell, before the page makes it larger or smaller. */
const CELL = 8;

/** Say what a memory reads wrongly. */
const said = (W, fails, { keys, values }) => {
  if (!W) return "no longer finite";
  if (!fails.length) return "nothing is wrong";
  const [{ key, reads }] = fails;
  const read = reads < 0 ? "nothing" : values[reads].words;
  return `${fails.length} wrong: ${keys[key].words} reads ${read}`;
};

/**
 * @param {{name: string, title: string, page?: string, text?: string}} rule
 * @param {{memories: any[], mean: number, spread: number} | undefined} own what it has
 *   made of the tokens, and its score, NaN until it is known; undefined = it is no rule.
 * @param {number} token after which it is shown.
 * @param {import("./tasks.js").Draw} drawn
 * @param {(e: any) => void} edit what the button of a rule does.
 */
export const panel = ({ name, title, page, text }, own, token, drawn, edit) => {
  const W = own?.memories[token - 1];
  const fails = W ? wrong(W, drawn, token) : [];
  const reads = own && token ? said(W, fails, drawn) : "";
  const bad = own && token && (!W || fails.length);
  const known = own && Number.isFinite(own.mean);
  return html`<div class=${bad ? "fw-panel fw-fails" : "fw-panel"} role="group" aria-label=${title}>
    ${page ? html`<a href=${`../annotated/${page}.html`}>${title}</a>` : html`<strong>${title}</strong>`}
    <span class="fw-panel-score" style=${`--share: ${known ? 100 * own.mean : 0}%`}>${
      known ? `${percent(own.mean)} ± ${Math.round(100 * own.spread)}` : "–"
    }</span>
    <canvas role="img" data-rule=${name} aria-label=${`Memory of ${title}: ${reads}`}></canvas>
    <span class="fw-panel-reads">${reads}</span>
    ${text ? button("Edit", edit, { label: `Edit the text of: ${title}` }) : nothing}</div>`;
};

/** Paint a memory after a token, as it is or by what it reads. */
export const paint = (canvas, own, token, drawn, byReading) => {
  const W = own?.memories[token - 1];
  if (W && byReading) matrix(canvas, readings(W, drawn), drawn.tokens[token - 1].want);
  else matrix(canvas, W ?? { shape: [1, 1], data: [0] });
};

/**
 * Paint a matrix: a cell is as strong as its number is large beside the largest. A frame
 * is around the cell of each column that should be the largest.
 */
const matrix = (canvas, { shape, data }, want = []) => {
  const [rows, columns] = shape;
  Object.assign(canvas, { width: columns * CELL, height: rows * CELL });
  const style = getComputedStyle(canvas);
  const colour = (name) => style.getPropertyValue(name);
  const pen = canvas.getContext("2d");
  const limit = Math.max(1e-9, ...Array.from(data, Math.abs));
  for (let i = 0; i < rows; i++)
    for (let j = 0; j < columns; j++) {
      const x = data[i * columns + j];
      pen.globalAlpha = Math.min(1, Math.abs(x) / limit);
      pen.fillStyle = colour(x < 0 ? "--fw-negative" : "--fw-positive");
      pen.fillRect(j * CELL, i * CELL, CELL, CELL);
    }
  pen.globalAlpha = 1;
  for (const [key, i] of want.entries()) {
    if (i < 0) continue;
    const column = Array.from({ length: rows }, (_, row) => data[row * columns + key]);
    pen.strokeStyle = column[i] < Math.max(...column) ? colour("--fw-wrong") : style.color;
    pen.strokeRect(key * CELL + 0.5, i * CELL + 0.5, CELL - 1, CELL - 1);
  }
};
