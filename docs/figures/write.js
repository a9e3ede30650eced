// @ts-check
// Write a rule, and see beside ten others what it remembers.
import { compile } from "./blackboard.js";
import { button, choice, figure, html, slider } from "./kit.js";
import { paint, panel } from "./panels.js";
import rules from "./rules.json";
import * as tasks from "./tasks.js";
import { number, percent } from "./words.js";

/** What readers can set, also in the address. */
const RANGES = {
  pairs: { min: 2, max: 32, step: 1 },
  width: { min: 4, max: 32, step: 1 },
  strength: { min: 0.1, max: 1, step: 0.05 },
  length: { min: 0.5, max: 2, step: 0.1 },
};
/** Draws behind a score. */
const DRAWS = 20;
const YOURS = { name: "yours", title: "Yours" };
const FIRST = rules.find(({ name }) => name === "delta").text;
const PICTURES = { reads: "what each key reads", W: "W" };
const INPUTS = Object.keys(tasks.INPUTS);

const address = new URLSearchParams(location.hash.slice(1));
/** @type {import("./tasks.js").Setting} */
const setting = { task: "replace", pairs: 10, width: 16, length: 1, strength: 0.9, two: false };
if (Object.hasOwn(tasks.TASKS, address.get("task") ?? "")) setting.task = address.get("task");
setting.two = address.get("two") === "true";
for (const [name, { min, max, step }] of Object.entries(RANGES)) {
  const held = Number(address.get(name) || NaN);
  const near = Math.round(Math.min(max, Math.max(min, held)) / step) * step;
  if (Number.isFinite(near)) setting[name] = Number(near.toFixed(2));
}
// - before: the text that another rule has replaced, which can come back;
// - mistake, says: what is wrong with the text, or what it remembers;
// - found: by rule, its memories and score; at: the token after which they are shown.
const state = { text: address.get("rule") ?? FIRST, before: null, mistake: "", says: "", found: {}, at: 0, picture: "reads" };

// --- What the rules remember -----------------------------------------------------
let [draws, jobs, timer] = [[], [], 0];
/** Draw the tokens of a seed once. */
const drawn = (seed = 0) => (draws[seed] ??= tasks.draw(setting, seed));
/** Work in pieces of a few milliseconds, so that no key press waits. */
const work = (set) => {
  const end = performance.now() + 12;
  let done = 0;
  while (jobs.length && performance.now() < end)
    if (jobs[0].next().done) done += Number(Boolean(jobs.shift()));
  if (done) set();
  timer = jobs.length ? window.setTimeout(work, 0, set) : 0;
};
/** Run a rule on the first draw; what it returns judges it by all. */
const begin = (name, step) => {
  const memories = [];
  const { diverged } = tasks.run(step, drawn(), (W) => memories.push(W));
  const own = { memories, mean: NaN, spread: NaN };
  state.found[name] = own;
  return judge(own, name === "yours", step, diverged);
};
function* judge(own, yours, step, diverged) {
  const shares = [];
  while (shares.length < DRAWS) yield shares.push(tasks.share(step, drawn(shares.length)));
  const mean = shares.reduce((sum, x) => sum + x, 0) / DRAWS;
  const off = shares.reduce((sum, x) => sum + (x - mean) ** 2, 0);
  Object.assign(own, { mean, spread: Math.sqrt(off / (DRAWS - 1)) });
  if (!yours) return;
  let says = `Yours: ${percent(mean)} of the keys read what they should, ± ${Math.round(100 * own.spread)} from draw to draw (${DRAWS} draws).`;
  if (diverged >= 0) says = `After token ${diverged} W is no longer finite: it grows without bound, or something is divided by 0.`;
  for (let n = 2; mean < 1 && diverged < 0 && n <= setting.pairs; n++) {
    const fails = tasks.failure(step, { ...setting, pairs: n });
    if (fails) {
      says += ` With ${n} pairs ${fails}.`;
      break;
    }
    yield;
  }
  state.says = says;
}
let yours; // the job that judges the rule of the reader
/** Read the rule of the reader. Until its text is a rule again, its picture stays. */
const read = (text) => {
  jobs = jobs.filter((job) => job !== yours);
  Object.assign(state, { text, mistake: "" });
  try {
    yours = begin("yours", compile(text, INPUTS));
    jobs.unshift(yours);
  } catch (error) {
    state.mistake = error.message;
    if (state.found.yours) state.found.yours.mean = NaN;
  }
};
/** Draw other tokens, and run all rules on them. */
const restart = () => {
  [draws, jobs, state.found] = [[], [], {}];
  jobs = rules.map(({ name, text }) => begin(name, compile(text, INPUTS)));
  state.at = drawn().tokens.length;
  read(state.text);
};

// --- What a reader does ------------------------------------------------------------
let own = location.hash;
const go = (set) => {
  const kept = Object.entries({ rule: state.text, ...setting }).map(([name, x]) => [name, String(x)]);
  location.replace(`#${new URLSearchParams(kept)}`);
  own = location.hash;
  timer ||= window.setTimeout(work, 0, set);
  set();
};
const type = (set, text) => {
  read(text);
  go(set);
};
/** Put another rule into the box; what was there can come back. */
const edit = (set, text) => (event) => {
  state.before = state.text;
  type(set, text);
  event.target.closest(".fw-stage").querySelector("textarea").focus();
};
const newLine = (set, event) => {
  if (event.key !== "Enter" || event.isComposing || event.ctrlKey || event.metaKey) return;
  event.preventDefault(); // the next line begins below this one
  const area = event.target;
  const line = area.value.slice(0, area.selectionStart).split("\n").at(-1);
  const inside = line.trimEnd().endsWith(":") ? "    " : "";
  area.setRangeText(`\n${/^\s*/.exec(line)[0]}${inside}`, area.selectionStart, area.selectionEnd, "end");
  type(set, area.value);
};
const move = (set, name) => (x) => {
  setting[name] = x;
  restart();
  go(set);
};
// Another address, such as a link that is put into this tab: begin with what it holds.
addEventListener("hashchange", () => location.hash === own || location.reload());

restart();
while (yours && !yours.next().done);

figure("write", {
  state,
  page: ({ text, before, mistake, says, found, at, picture }, _, { set }) => {
    const range = (label, name, digits = 0) =>
      slider(label, { ...RANGES[name], value: setting[name], shown: number(setting[name], digits) }, move(set, name));
    const { tokens } = drawn();
    const now = `Token ${at} of ${tokens.length}: ${at ? tokens[at - 1].words : "nothing is written yet"}.`;
    const show = (rule) => panel(rule, found[rule.name], at, drawn(), edit(set, rule.text));
    return html`<div class="fw-editor"><div><textarea class="fw-rule" spellcheck="false" autocapitalize="off" rows="7"
        aria-label="Your rule, as a function step" aria-describedby="fw-rule-says" aria-invalid=${Boolean(mistake)}
        .value=${text} @input=${(e) => type(set, e.target.value)} @keydown=${(e) => newLine(set, e)}></textarea>
        <div class="fw-controls">${button("Undo Edit", edit(set, before), { disabled: before === null })}</div>
        <p class="fw-rule-says" id="fw-rule-says">${mistake || says}</p></div>${show(YOURS)}</div>
      <div class="fw-controls">
        ${choice("Task", Object.keys(tasks.TASKS), setting.task, move(set, "task"), (name) => tasks.TASKS[name])}
        ${range("Pairs", "pairs")}${range("Width", "width")}${range("Strength β", "strength", 2)}${range("Length of keys", "length", 1)}
        <label class="fw-checkbox"><input type="checkbox" .checked=${setting.two}
          @change=${(e) => move(set, "two")(e.target.checked)}>β up to 2</label>
        ${choice("Pictures", Object.keys(PICTURES), picture, (picture) => set({ picture }), (name) => PICTURES[name])}</div>
      ${slider("Token", { min: 0, max: tokens.length, value: at, shown: String(at), spoken: now }, (at) => set({ at }))}
      <p class="fw-now">${now}</p><div class="fw-panels">${rules.map(show)}</div>`;
  },
  drawn: ({ root }) => {
    for (const canvas of root.querySelectorAll("canvas"))
      paint(canvas, state.found[canvas.dataset.rule], state.at, drawn(), state.picture === "reads");
  },
  say: ({ mistake, says }) => mistake || says,
  begin: ({ set }) => {
    go(set);
    /** Without scripts there are the texts to read. */
    const still = () =>
      `<div class="fw-picture fw-panels">${rules
        .map(({ title, text }) => `<div class="fw-panel"><strong>${title}</strong><pre>${text}</pre></div>`)
        .join("")}</div>`;
    return { still, state: () => ({ ...state, setting }) };
  },
});
