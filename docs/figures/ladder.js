// @ts-check
// A ladder of rules: the same eight tokens on every rung. A token wants a step
// with all gates; a rung takes of it what its rule has.
// @ts-expect-error: docs/hooks/frames.py computes it
import { keys, runs, tokens, wanted } from "fwlab-ladder";
import { number, vector } from "./words.js";
import { choice, figure, html, nothing, slider, table } from "./kit.js";

const T = tokens.length;
const all = ({ right }) => right.every(Boolean);

// What each key reads after each token; a column is chosen by a press.
const readings = (run, at, set) => html`<table class="fw-numbers fw-reads">
  <caption>What each key reads after each token</caption>
  <colgroup><col>${tokens.map((_, t) => html`<col class=${t === at ? "fw-chosen" : nothing}>`)}</colgroup>
  <thead><tr><th></th>${tokens.map(
    ({ label }, t) => html`<th scope="col" @click=${() => set({ token: t + 1 })}>${t + 1}<br>${label}</th>`,
  )}</tr></thead>
  <tbody>${keys.map((name, n) => html`<tr><th scope="row">${name}</th>${run.tokens.map(
    ({ reads, right }, t) => html`<td class=${right[n] ? "" : "fw-wrong"}
      @click=${() => set({ token: t + 1 })}>${number(reads[n][0], 1)}<br>${number(reads[n][1], 1)}
      <b>${right[n] ? "✓" : "✗"}</b></td>`,
  )}</tr>`)}</tbody></table>`;

// The vectors of a step, and what comes of them.
const vectors = (steps) => {
  const rows = steps.flatMap(({ d, r, k, v, found, u }, i) => [
    ...(i ? [] : [["d", d, `value v ${vector(v, 1)}`]]),
    ["r", r, `r finds ${vector(found, 1)}`],
    ["k", k, `k adds ${vector(u, 1)}`],
  ]);
  return html`<table class="fw-numbers fw-given"><tbody>${rows.map(
    ([name, numbers, then]) => html`<tr><th scope="row">${name}</th>${numbers.map(
      (x) => html`<td>${number(x, 1)}</td>`,
    )}<td>${then}</td></tr>`,
  )}</tbody></table>`;
};

figure("ladder", {
  state: { rung: "delta", token: 5 },
  compute: ({ rung, token }) => ({ run: runs[rung], now: runs[rung].tokens[token - 1] }),
  view: ({ token }, { run, now }, set) => html`${readings(run, token - 1, set)}
    <strong>${token}: ${tokens[token - 1].says}</strong>
    <div class="fw-beside">${[["W before", now.before], ["W after", now.W]].map(
      ([title, W]) => table({ title, rows: W.map((row) => ["", row]), limit: 2 }),
    )}</div>
    ${vectors(now.steps)}`,
  controls: ({ rung, token }, _, set) => html`
    ${slider("Token", { min: 1, max: T, value: token, shown: `${token} of ${T}` }, (token) => set({ token }))}
    ${choice("Rung", Object.keys(runs), rung, (rung) => set({ rung }))}
    <table class="fw-answers"><thead><tr>${["Rung", "can also", `tokens, of ${T}`].map(
      (name) => html`<th scope="col">${name}</th>`,
    )}</tr></thead><tbody>${Object.entries(runs).map(
      ([name, { adds, score }]) => html`<tr><th scope="row">${
        name === rung ? html`<b>${name}</b>` : name
      }</th><td>${adds}</td><td>${score}<i style=${`--share: ${((100 * score) / T).toFixed(0)}%`}></i></td></tr>`,
    )}</tbody></table>`,
  say: ({ rung, token }, { run, now }) => {
    const told = keys.map((name, n) => {
      const y = `${name} reads ${vector(now.reads[n], 1)}`;
      return now.right[n] ? `${y} ✓` : `${y} ✗, expected ${vector(wanted[token - 1][n], 1)}`;
    });
    return (
      `Rung “${rung}”, token ${token} of ${T}: ${tokens[token - 1].says}. ${told.join("; ")}. ` +
      `On this rung, all keys are right after ${run.tokens.filter(all).length} of ${T} tokens.`
    );
  },
});
