// @ts-check
// Ten rules read the same tokens, side by side; docs/hooks/frames.py runs them.
// @ts-expect-error: it is made when the site is built
import { keys, rules, tokens, wanted } from "fwlab-ten";
import { figure, html, mark, nothing, slider, table } from "./kit.js";
import { list, vector } from "./words.js";

const T = tokens.length;
const wrong = ({ right }) => right.findIndex((each) => !each);
/** The first token after which a key of a rule reads something else than it should. */
const failed = (rule) => rule.tokens.findIndex((token) => wrong(token) >= 0) + 1 || T + 1;

// The memory of a rule after a token, and what each key reads.
const panel = (rule, token) => {
  const { W, reads, right } = rule.tokens[token - 1];
  const fails = token >= failed(rule);
  return html`<div class=${fails ? "fw-panel fw-fails" : "fw-panel"}>
    <a href=${`annotated/${rule.page}.html`}>${rule.title}</a>
    ${table({ title: nothing, rows: W.map((row) => ["", row]), limit: 2 })}
    ${keys.map((name, n) => html`<span>${mark(right[n])} ${name} reads ${vector(reads[n], 1)}</span>`)}
    <span class="fw-panel-reads">${fails ? `fails at token ${failed(rule)}` : "right so far"}</span></div>`;
};

const state = { token: 4 };
figure("ten", {
  state,
  compute: ({ token }) => ({ fail: rules.filter((rule) => token >= failed(rule)) }),
  plays: ({ set }) => ({
    every: 1600,
    begin: () => set({ token: 1 }),
    step: () => state.token < T && !set({ token: state.token + 1 }),
  }),
  view: ({ token }, _, set, { play }) => {
    const move = (token) => {
      play.stop();
      set({ token });
    };
    return html`<div class="fw-controls">${play.button}</div>
      ${slider("Token", { min: 1, max: T, value: token, shown: `${token} of ${T}` }, move)}
      <strong>${token}: ${tokens[token - 1]}</strong>
      <div class="fw-panels">${rules.map((rule) => panel(rule, token))}</div>`;
  },
  say: ({ token }, { fail }) => {
    const names = fail.map(({ title }) => title);
    const should = keys.map((name, n) => `${name} should read ${vector(wanted[token - 1][n], 1)}`);
    const words = names.length ? `${list(names)} ${names.length > 1 ? "fail" : "fails"} here or before.` : "All ten rules are right.";
    return `Token ${token} of ${T}: ${tokens[token - 1]}. ${list(should)}. ${words}`;
  },
});
