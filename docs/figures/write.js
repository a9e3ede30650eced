// @ts-check
// Write a rule, and see beside ten others what it remembers.
import * as fwlab from "./fwlab.js";
import { html } from "./fwlab.js";
import { compile } from "./blackboard.js";
import { panels } from "./panels.js";
import rules from "./rules.json";
import * as tasks from "./tasks.js";

/** What readers can set, also in the address. */
const RANGES = {
  pairs: { min: 2, max: 32, step: 1 },
  width: { min: 4, max: 32, step: 1 },
  strength: { min: 0.1, max: 1, step: 0.05 },
  length: { min: 0.5, max: 2, step: 0.1 },
};
/** Draws behind a score. */
const DRAWS = 20;
const FIRST = rules.find(({ name }) => name === "delta").text;
const PICTURES = { reads: "what each key reads", W: "W" };
const names = Object.keys(tasks.INPUTS);

fwlab.figure("write", (figure) => {
  const address = new URLSearchParams(location.hash.slice(1));
  const held = (name) => Number(address.get(name) || NaN);
  /** @type {import("./tasks.js").Setting} */
  const setting = { task: "replace", pairs: 10, width: 16, length: 1, strength: 0.9, two: false };
  if (Object.hasOwn(tasks.TASKS, address.get("task") ?? "")) setting.task = address.get("task");
  setting.two = address.get("two") === "true";
  for (const [name, { min, max, step }] of Object.entries(RANGES)) {
    const near = Math.round(Math.min(max, Math.max(min, held(name))) / step) * step;
    if (Number.isFinite(near)) setting[name] = Number(near.toFixed(2));
  }
  let text = address.get("rule") ?? FIRST;
  let [draws, jobs, timer, at, picture, before] = [[], [], 0, 0, "reads", ""];

  // --- What the reader writes and moves ---------------------------------------
  const area = /** @type {HTMLTextAreaElement} */ (
    html("textarea", { class: "fw-rule", spellcheck: "false", autocapitalize: "off", rows: 7, "aria-label": "Your rule, as a function step", "aria-describedby": "fw-rule-says" })
  );
  const says = html("p", { class: "fw-rule-says", id: "fw-rule-says" });
  area.addEventListener("input", () => changed(area.value));
  area.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.isComposing || event.ctrlKey || event.metaKey) return;
    event.preventDefault(); // the next line begins below this one
    const line = area.value.slice(0, area.selectionStart).split("\n").at(-1);
    const inside = line.trimEnd().endsWith(":") ? "    " : "";
    area.setRangeText(`\n${/^\s*/.exec(line)[0]}${inside}`, area.selectionStart, area.selectionEnd, "end");
    changed(area.value);
  });
  const move = (name) => (x) => {
    setting[name] = x;
    restart();
  };
  const slider = (label, name, show) =>
    fwlab.slider(label, { ...RANGES[name], value: setting[name], show }, move(name));
  const token = fwlab.slider("Token", { min: 0, max: 1, value: 0 }, (x) => show(x));
  const tokens = /** @type {HTMLInputElement} */ (token.querySelector("input"));
  const now = html("p", { class: "fw-now" });
  /** Put another rule into the box; what was there can come back. */
  const edit = (next) => {
    undo.disabled = false;
    before = text;
    area.value = next;
    changed(next);
    area.focus();
  };
  const undo = /** @type {HTMLButtonElement} */ (fwlab.button("Undo Edit", () => edit(before)));
  undo.disabled = true;
  const shown = panels([{ name: "yours", title: "Yours" }, ...rules], (rule) => edit(rule.text));
  const [yours, ...others] = shown.elements;
  figure.root.append(
    html("div", { class: "fw-editor" }, html("div", {}, area, fwlab.controls(undo), says), yours),
    fwlab.controls(
      fwlab.choice("Task", tasks.TASKS, setting.task, move("task")),
      slider("Pairs", "pairs"),
      slider("Width", "width"),
      slider("Strength β", "strength", (x) => fwlab.number(x)),
      slider("Length of keys", "length", (x) => fwlab.number(x, 1)),
      fwlab.checkbox("β up to 2", setting.two, move("two")),
      fwlab.choice("Pictures", PICTURES, picture, (x) => {
        picture = x;
        show(at);
      }),
    ),
    token, now, html("div", { class: "fw-panels" }, ...others),
  );

  // --- What follows from it ----------------------------------------------------
  /** Draw the tokens of a seed once. */
  const drawn = (seed) => (draws[seed] ??= tasks.draw(setting, seed));
  /** Work in pieces of a few milliseconds, so that no key press waits. */
  const work = () => {
    const end = performance.now() + 12;
    while (jobs.length && performance.now() < end)
      if (jobs[0].job.next().done) jobs.shift();
    timer = jobs.length ? window.setTimeout(work) : 0;
  };
  /** Show what a rule does in the first draw, and begin to judge it by all. */
  const begin = (name, step, first) => {
    const memories = [];
    const { diverged } = tasks.run(step, drawn(0), (W) => memories.push(W));
    shown.set(name, { memories, drawn: drawn(0) });
    const job = { name, job: judge(name, step, diverged) };
    if (first) jobs.unshift(job);
    else jobs.push(job);
    timer ||= window.setTimeout(work);
  };
  function* judge(name, step, diverged) {
    const shares = [];
    while (shares.length < DRAWS) yield shares.push(tasks.share(step, drawn(shares.length)));
    const mean = shares.reduce((sum, x) => sum + x, 0) / DRAWS;
    const off = shares.reduce((sum, x) => sum + (x - mean) ** 2, 0);
    const spread = Math.sqrt(off / (DRAWS - 1));
    shown.score(name, mean, spread);
    if (name !== "yours") return;
    let sentence = `Yours: ${fwlab.percent(mean)} of the keys read what they should, ± ${Math.round(100 * spread)} from draw to draw (${DRAWS} draws).`;
    if (diverged >= 0) sentence = `After token ${diverged} W is no longer finite: it grows without bound, or something is divided by 0.`;
    for (let n = 2; mean < 1 && diverged < 0 && n <= setting.pairs; n++) {
      const fails = tasks.failure(step, { ...setting, pairs: n });
      if (fails) {
        sentence += ` With ${n} pairs ${fails}.`;
        break;
      }
      yield;
    }
    say(sentence);
  }
  const say = (sentence) => {
    says.textContent = sentence;
    figure.say(sentence);
  };
  const changed = (next) => {
    text = next;
    const kept = Object.entries({ rule: text, ...setting }).map(([name, x]) => [name, String(x)]);
    location.replace(`#${new URLSearchParams(kept)}`);
    own = location.hash;
    jobs = jobs.filter(({ name }) => name !== "yours");
    let mistake;
    try {
      begin("yours", compile(text, names), true);
    } catch (error) {
      mistake = error.message;
      shown.score("yours", NaN, NaN); // its picture stays, pale, until the text is a rule
      say(mistake);
    }
    area.setAttribute("aria-invalid", String(Boolean(mistake)));
    shown.at(at, picture === "reads", "yours");
  };
  const show = (x) => {
    at = x;
    const words = at ? drawn(0).tokens[at - 1].words : "nothing is written yet";
    now.textContent = `Token ${at} of ${drawn(0).tokens.length}: ${words}.`;
    tokens.setAttribute("aria-valuetext", now.textContent);
    shown.at(at, picture === "reads");
  };
  let own = location.hash;
  // Another address, such as a link that is put into this tab: begin with what it holds.
  addEventListener("hashchange", () => location.hash === own || location.reload());
  /** Draw other tokens, and run all rules on them. */
  const restart = () => {
    [draws, jobs] = [[], []];
    shown.set("yours", null);
    for (const { name, text } of rules) begin(name, compile(text, names));
    tokens.max = String(drawn(0).tokens.length);
    token.value = drawn(0).tokens.length;
    at = token.value;
    changed(text);
    show(at);
  };
  area.value = text;
  restart();
  for (const { name, job } of jobs) if (name === "yours") while (!job.next().done);
  /** Without scripts there are the texts to read. */
  const still = () =>
    html("div", { class: "fw-picture fw-panels" }, ...rules.map(({ title, text }) =>
      html("div", { class: "fw-panel" }, html("strong", {}, title), html("pre", {}, text)),
    )).outerHTML;
  return { state: () => ({ text, setting, says: says.textContent }), still };
});
