// @ts-check
// One small picture for each rule, all after the same token: its memory, what it reads
// wrongly, and its score.
import { html, percent } from "./fwlab.js";
import { readings, wrong } from "./tasks.js";

/** Pixels of a cell, before the page makes it larger or smaller. */
const CELL = 8;

/**
 * @param {{name: string, title: string, page?: string, text?: string}[]} rules
 * @param {(rule: any) => void} edit what the button of a rule does.
 */
export const panels = (rules, edit) => {
  const found = {};
  const parts = rules.map((rule) => {
    const canvas = /** @type {HTMLCanvasElement} */ (html("canvas", { role: "img" }));
    const score = html("span", { class: "fw-panel-score" });
    const reads = html("span", { class: "fw-panel-reads" });
    const title = rule.page
      ? html("a", { href: `../annotated/${rule.page}.html` }, rule.title)
      : html("strong", {}, rule.title);
    const element = html("div", { class: "fw-panel", role: "group", "aria-label": rule.title });
    element.append(title, score, canvas, reads);
    if (rule.text) {
      const button = html("button", { type: "button", class: "fw-button" }, "Edit");
      button.setAttribute("aria-label", `Edit the text of: ${rule.title}`);
      button.addEventListener("click", () => edit(rule));
      element.append(button);
    }
    return { rule, element, canvas, score, reads };
  });
  /** Show memories after a token, as they are or by what they read. */
  const at = (token, byReading, only = "") => {
    for (const { rule, element, canvas, reads } of parts) {
      if (only && rule.name !== only) continue;
      const own = found[rule.name];
      const W = own?.memories[token - 1];
      const fails = W && token ? wrong(W, own.drawn, token) : [];
      element.classList.toggle("fw-fails", Boolean(own && token) && (!W || fails.length > 0));
      reads.textContent = own && token ? words(W, fails, own.drawn) : "";
      canvas.setAttribute("aria-label", `Memory of ${rule.title}: ${reads.textContent}`);
      if (W && byReading) paint(canvas, readings(W, own.drawn), own.drawn.tokens[token - 1]?.want);
      else paint(canvas, W ?? { shape: [1, 1], data: [0] });
    }
  };
  /** Keep the memories of a rule after each token, and the tokens; null = no rule. */
  const set = (name, result) => {
    found[name] = result;
    if (!result) score(name, NaN, NaN);
  };
  const score = (name, mean, spread) => {
    const { score } = parts.find(({ rule }) => rule.name === name);
    const known = Number.isFinite(mean);
    score.textContent = known ? `${percent(mean)} ± ${Math.round(100 * spread)}` : "–";
    score.style.setProperty("--share", `${known ? 100 * mean : 0}%`);
  };
  return { elements: parts.map(({ element }) => element), at, set, score };
};

/** Say what a memory reads wrongly. */
const words = (W, fails, { keys, values }) => {
  if (!W) return "no longer finite";
  if (!fails.length) return "nothing is wrong";
  const [{ key, reads }] = fails;
  const read = reads < 0 ? "nothing" : values[reads].words;
  return `${fails.length} wrong: ${keys[key].words} reads ${read}`;
};

/**
 * Paint a matrix: a cell is as strong as its number is large beside the largest. A frame
 * is around the cell of each column that should be the largest.
 */
const paint = (canvas, { shape, data }, want = []) => {
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
