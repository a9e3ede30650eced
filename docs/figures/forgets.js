// @ts-check
// Who forgets? Five memories are written the same pairs, and each is asked
// for every key. The address of the page keeps the setting.
import { direction, dot, random, read, rules, write } from "./algebra.js";
import { button, figure, html, mark, share, slider } from "./kit.js";
import { list, number, percent } from "./words.js";

const MOST = 100; // pairs
const LETTERS = 2000;
const DRAWS = 20; // of which the mean is taken
const WIDTHS = [4, 8, 16, 32, 64];
const MEMORIES = ["sum", "gated", "delta", "gated delta", "softmax"];
const NAMES = {
  sum: "sum rule",
  gated: "gated rule",
  delta: "delta rule",
  "gated delta": "gated delta rule",
  softmax: "softmax attention",
};
const PRESETS = {
  "Keys change": {
    text:
      "ann=red bob=blue cat=green dan=gold eve=pink fay=grey gus=black hal=white " +
      "bob=lime dan=navy fay=teal",
    width: 16,
    beta: 0.8,
    decay: 0.95,
  },
  "Many keys": {
    text:
      "ant=red bat=blue cod=green doe=gold eel=pink fox=grey gnu=black hen=white " +
      "ibis=lime jay=navy koi=teal lynx=plum mole=rust newt=sand owl=mint pig=rose " +
      "quail=jade ram=onyx seal=ruby toad=opal urchin=pearl vole=coral wasp=ivory yak=amber",
    width: 16,
    beta: 1,
    decay: 0.95,
  },
  "New topic": {
    text:
      "a=yes b=no c=yes d=no e=yes f=no g=yes h=no i=yes j=no k=yes l=no m=yes n=no " +
      "o=yes p=no q=yes r=no s=yes t=no u=yes v=no w=yes x=no y=yes z=no | " +
      "ann=red bob=blue cat=green dan=gold eve=pink",
    width: 8,
    beta: 0.2,
    decay: 0.9,
  },
  "A long text": {
    text:
      "The king sent a letter to the queen. The queen read the letter and gave it to the " +
      "fool. The fool lost the letter in the garden, and the king asked the queen for an " +
      "answer. The queen asked the fool, and the fool asked the gardener. The gardener gave " +
      "the letter back to the king, who had forgotten why he sent it.",
    width: 16,
    beta: 0.8,
    decay: 0.95,
  },
  "Room for all": {
    text: "ann=red bob=blue cat=green dan=gold eve=pink",
    width: 64,
    beta: 1,
    decay: 1,
  },
};

// --- What the reader wrote -----------------------------------------------
// Pairs "key=value"; without any, each word of a text is a key, and the
// word that follows is its value. A bar begins a new topic: of the keys,
// only those of the last topic are asked.
const parse = (text) => {
  const topics = text.split("|").map((topic) => {
    if (text.includes("="))
      return [...topic.matchAll(/([^\s=]+)=([^\s=]+)/gu)].map(([, ...pair]) => pair);
    const words = topic.toLowerCase().match(/[\p{L}\p{N}]+(?:['’-][\p{L}\p{N}]+)*/gu) ?? [];
    return words.slice(1).map((word, i) => [words[i], word]);
  });
  const all = topics.flatMap((topic, n) => topic.map((pair) => [...pair, n]));
  const read = all.slice(0, MOST);
  const asked = new Map();
  for (const [key, value, topic] of read) {
    if (topic !== read.at(-1)[2]) continue;
    const before = asked.get(key);
    const changed = before !== undefined && (before.changed || before.value !== value);
    asked.set(key, { key, value, changed });
  }
  return {
    pairs: read.map((pair) => pair.slice(0, 2)),
    asked: [...asked.values()],
    dropped: all.length - read.length,
    // Text between pairs is not read.
    ignored: text.includes("=") && all.length !== text.split(/[\s|]+/u).filter(Boolean).length,
  };
};

// --- The memories --------------------------------------------------------------
// A word has the same vector wherever it stands, and another in each draw.
const vectors = (kind, words, draw, width) =>
  new Map([...new Set(words)].map((word) => [word, direction(random(`${draw} ${kind} ${word}`), width)]));

// Keys and queries as long as the square root of their width, as in a
// trained model, and their product divided by that: Eq. 7.
const attend = (pairs, keys, values, query) => {
  const weights = pairs.map(([key]) => Math.exp(Math.sqrt(query.length) * dot(keys.get(key), query)));
  const total = weights.reduce((a, b) => a + b, 0);
  return query.map((_, i) =>
    pairs.reduce((sum, [, value], j) => sum + (weights[j] / total) * values.get(value)[i], 0),
  );
};

const recall = ({ pairs, asked }, { width, beta, decay }, draw) => {
  const keys = vectors("key", pairs.map(([key]) => key), draw, width);
  const values = vectors("value", pairs.map(([, value]) => value), draw, width);
  const memories = MEMORIES.map((name) => {
    let answer = (query) => attend(pairs, keys, values, query);
    if (name !== "softmax") {
      const rule = rules[name](beta, decay);
      let W = Array.from({ length: width }, () => Array(width).fill(0));
      for (const [key, value] of pairs) W = write(W, keys.get(key), values.get(value), rule);
      answer = (query) => read(W, query);
    }
    const answers = asked.map(({ key, value }) => {
      const y = answer(keys.get(key));
      // All values have length 1: the nearest has the largest product.
      const near = [...values].map(([word, v]) => [word, dot(y, v)]);
      const best = Math.max(...near.map(([, likeness]) => likeness));
      const alike = near.filter(([, likeness]) => likeness > best - 1e-9);
      const said = dot(y, y) === 0 ? [] : alike.map(([word]) => word);
      return { y, said, right: said.length === 1 && said[0] === value };
    });
    return [name, answers];
  });
  return { keys: [...keys], values: [...values], memories: Object.fromEntries(memories) };
};
const count = (answers) => answers.filter(({ right }) => right).length;

// The last setting, and how many each memory has right in each draw so far.
let last = { made: "", told: null, shown: null, draws: [] };
const complete = () => last.draws.length === DRAWS;
const compute = (state) => {
  const made = String(address(state));
  if (made !== last.made) {
    const told = parse(state.text);
    last = { made, told, shown: recall(told, state, state.draw), draws: [] };
  }
  const { told, shown, draws } = last;
  const mean = (name) => draws.reduce((sum, rights) => sum + rights[name], 0) / DRAWS / told.asked.length;
  const means = complete() ? Object.fromEntries(MEMORIES.map((name) => [name, mean(name)])) : {};
  return { ...told, ...shown, means, complete: complete() };
};
// One more draw of which the mean is taken.
const add = () => {
  const draw = last.draws.length + 1;
  const { memories } = draw === state.draw ? last.shown : recall(last.told, state, draw);
  last.draws.push(Object.fromEntries(MEMORIES.map((name) => [name, count(memories[name])])));
};

// --- Drawing and words ------------------------------------------------------------
const view = (_, { asked, memories, means, complete }) => {
  const best = Math.max(...MEMORIES.map((name) => count(memories[name])));
  const head = (name) => {
    const right = count(memories[name]);
    const wins = asked.length > 0 && right === best;
    return html`<th scope="col" class=${wins ? "fw-wins" : ""}><span>${name}</span>
      <strong>${right} of ${asked.length}</strong>${share(asked.length ? right / asked.length : 0)}
      <small>${asked.length ? (complete ? percent(means[name]) : "…") : "–"}</small></th>`;
  };
  const cell = ({ said, right }) =>
    html`<td class=${right ? "fw-right" : "fw-wrong"}>${mark(right)} ${said.join(" = ") || "nothing"}</td>`;
  const row = ({ key, value, changed }, i) =>
    html`<tr><th scope="row"><b>${key}</b> ${value}${changed ? html`<small> changed</small>` : ""}</th>
      ${MEMORIES.map((name) => cell(memories[name][i]))}</tr>`;
  return html`<div class="fw-main" role="region" aria-label="What each memory recalls" tabindex="0">
    <table class="fw-answers fw-arena"><thead><tr><th scope="col">key, last value<small>mean of ${DRAWS} draws:</small></th>
      ${MEMORIES.map(head)}</tr></thead><tbody>${asked.map(row)}</tbody></table></div>`;
};
const say = ({ width }, { pairs, asked, dropped, ignored, memories, means, complete }) => {
  const parts = [];
  if (!pairs.length)
    parts.push("All memories are empty. Write pairs such as a=red b=blue, or a text.");
  else {
    const ranked = [...MEMORIES].sort((a, b) => count(memories[b]) - count(memories[a]));
    const scores = ranked.map((name) => `${NAMES[name]} ${count(memories[name])}`);
    const many = pairs.length === 1 ? "1 pair" : `${pairs.length} pairs`;
    const each = asked.length === 1 ? "1 key is" : `${asked.length} keys are`;
    parts.push(
      `After ${many}, ${each} asked for; all vectors have width ${width}. Correct: ${scores.join(", ")}.`,
    );
    const changed = asked.flatMap(({ changed }, i) => (changed ? [i] : []));
    const of = (name) => changed.filter((i) => memories[name][i].right).length;
    if (changed.length)
      parts.push(
        `Of the ${changed.length} that changed, the delta rule has ${of("delta")} correct, ` +
          `the sum rule ${of("sum")} and softmax attention ${of("softmax")}.`,
      );
    const top = Math.max(...Object.values(means));
    const best = list(MEMORIES.filter((name) => means[name] > top - 0.005).map((name) => NAMES[name]));
    const over = `Best over ${DRAWS} draws of random vectors`;
    parts.push(complete ? `${over}, with ${percent(top)}: ${best}.` : `${over}: ….`);
  }
  if (dropped) parts.push(`The memories read ${MOST} pairs at most: ${dropped} are left out.`);
  if (ignored) parts.push("Words without “=” are left out.");
  return parts.join(" ");
};

// --- The address ---------------------------------------------------------------------
// After "#", so that no browser sends it anywhere.
const RANGES = {
  width: (x) => WIDTHS.includes(x),
  beta: (x) => x >= 0 && x <= 1,
  decay: (x) => x >= 0.5 && x <= 1,
  draw: (x) => Number.isInteger(x) && x >= 1 && x < 1e6,
};
const address = ({ text, width, beta, decay, draw }) =>
  new URLSearchParams(/** @type {any} */ ({ text, width, beta, decay, draw }));
/** @returns {any} What the address holds; what does not fit is as at first. */
const fromAddress = () => {
  const parts = new URLSearchParams(location.hash.slice(1));
  if (!parts.has("text")) return {}; // another place of this page
  const wanted = { ...START, text: parts.get("text").slice(0, LETTERS) };
  for (const [name, fits] of Object.entries(RANGES)) {
    const value = Number(parts.get(name) || NaN);
    if (fits(value)) wanted[name] = value;
  }
  return wanted;
};

const START = { ...PRESETS["Keys change"], draw: 1 };
const state = { ...START, ...fromAddress() };
let timer;
let rest;
// The mean follows, once nothing has changed for a moment, and draw by draw, so that
// the page goes on: long texts at width 64 take a second. So does the address:
// browsers limit how often a page may change it.
const change = (set, changes) => {
  set(changes);
  const follow = () => {
    add();
    if (complete()) set({});
    else rest = setTimeout(follow);
  };
  clearTimeout(rest);
  if (!complete()) rest = setTimeout(follow, 150);
  clearTimeout(timer);
  timer = setTimeout(() => history.replaceState(null, "", `#${address(state)}`), 400);
};
export default figure("forgets", {
  state,
  compute,
  view,
  controls: ({ text, width, beta, decay, draw }, _, set) => {
    const from = (label, name, range) =>
      slider(label, { max: 1, ...range, shown: number(range.value) }, (value) => change(set, { [name]: value }));
    return html`<div class="fw-controls">
      ${Object.entries(PRESETS).map(([name, preset]) => button(name, () => change(set, { ...preset, draw: 1 })))}
      ${button("New draw", () => change(set, { draw: draw + 1 }))}</div>
    <div class="fw-controls"><label class="fw-wide">Pairs, or a text<textarea class="fw-text" rows="3" maxlength=${LETTERS}
      spellcheck="false" autocomplete="off" .value=${text}
      @input=${(e) => change(set, { text: e.target.value })}></textarea></label></div>
    ${from("Write strength β", "beta", { min: 0, step: 0.05, value: beta })}
    ${from("Decay of gated delta", "decay", { min: 0.5, step: 0.01, value: decay })}
    ${slider(
      "Width",
      { min: 0, max: WIDTHS.length - 1, value: WIDTHS.indexOf(width), shown: String(width) },
      (i) => change(set, { width: WIDTHS[i] }),
    )}`;
  },
  say,
  begin: ({ set }) => {
    const all = () => {
      clearTimeout(timer); // what was to become the address
      clearTimeout(rest);
      set(fromAddress());
      while (!complete()) add();
      set({});
    };
    addEventListener("hashchange", all);
    all();
  },
});
