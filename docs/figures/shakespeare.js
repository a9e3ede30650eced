// @ts-check
// A language model that runs in the page: its text, the fast weights of
// every head after each character, and what they still hold.
import { dot } from "./algebra.js";
import { button, choice, figure, html, slider } from "./kit.js";
import { ends, frozen, heat, loadModel, softmax } from "./model.js";
import { number, percent } from "./words.js";

const LONGEST = 240;
const LEGEND = html`<div class="fw-legend">
  <span><u></u> how strongly the chosen head writes it: β, from 0 to 1</span>
  <span><b class="fw-red">e</b> not expected: the redder, the bigger the surprise</span>
  <span><i class="fw-same">e</i> below a character: the chosen head recalls it</span>
  <span><i>e</i> recalls another one</span>
  <span><b class="fw-plus">&nbsp;</b> entry of W above 0</span>
  <span><b class="fw-minus">&nbsp;</b> below 0</span></div>`;
const FIRST =
  "MENENIUS:\nWhat is the city?\n\nSICINIUS:\nThe people are the city.\n\nMENENIUS:\nThe pe";
const RULES = { delta: "delta rule", sum: "sum rule" };

// Kinds of characters, by the first that fits.
const KINDS = {
  capitals: /[A-Z]/,
  vowels: /[aeiou]/,
  consonants: /[a-z]/,
  "line breaks": /\n/,
  spaces: / /,
  "other marks": /./,
};

const shown = (character) => ({ "\n": "↵", " ": "␣" })[character] ?? character;
const cosine = (a, b) => {
  const length = Math.sqrt(dot(a, a) * dot(b, b));
  return length === 0 ? 0 : dot(a, b) / length;
};

// - text: as it was typed;
// - position: how many characters were read;
// - head: layer and head, from 0.
const state = { rule: "delta", text: FIRST, position: 0, head: [0, 2] };
const models = {}; // by rule, as they are asked for
const runs = {}; // by rule: text, and what the model made of it
const model = () => models[state.rule];
const run = () => runs[state.rule];

// --- The model ----------------------------------------------------------------

const fetchModel = async ({ tell }, name) => {
  if (models[name]) return;
  tell(`Fetching the weights of the ${RULES[name]} (460 kB) …`);
  models[name] = await loadModel(`shakespeare/${name}`);
  runs[name] = { text: "", steps: [], skipped: "" };
};

// Read what is new of the text; what did not change is kept.
const read = () => {
  const known = model().alphabet;
  const all = [...state.text];
  const wanted = all.filter((c) => known.includes(c)).join("");
  const made = run();
  made.skipped = [...new Set(all.filter((c) => !known.includes(c)))].join(" ");
  let same = 0;
  while (same < wanted.length && wanted[same] === made.text[same]) same++;
  made.steps.length = Math.min(made.steps.length, same);
  const memory = same ? model().copy(made.steps[same - 1].memory) : model().start();
  for (const character of wanted.slice(same)) {
    const token = known.indexOf(character);
    const before = made.steps.at(-1)?.probabilities;
    const { logits, trace } = model().step(token, memory);
    made.steps.push({
      logits,
      trace,
      memory: model().copy(memory),
      probabilities: softmax(logits),
      bits: before ? -Math.log2(before[token]) : null,
    });
  }
  made.text = wanted;
};

// Ask a memory for every key that was written so far. Of all values
// written, which one is its answer most like? Returns their places.
/** @param {string} name @param {number[]} head */
const answers = (name, [layer, number]) => {
  const { steps } = runs[name];
  if (!state.position) return [];
  const memory = steps[state.position - 1].memory[layer][number];
  const written = steps.slice(0, state.position).map(({ trace }) => trace[layer][number]);
  return written.map(({ key }) => {
    const answer = models[name].read(memory, key);
    const likeness = written.map(({ value }) => cosine(answer, value));
    return likeness.indexOf(Math.max(...likeness));
  });
};

// How many of them are values of the same character.
const right = (name, places) => {
  const read = runs[name].text;
  return places.filter((place, i) => read[place] === read[i]).length;
};

const share = (name) => {
  const { layers, heads } = models[name];
  let found = 0;
  for (let layer = 0; layer < layers; layer++)
    for (let number = 0; number < heads; number++)
      found += right(name, answers(name, [layer, number]));
  return found / (layers * heads * state.position);
};

// Mean of all characters so far but the first, in bits.
const surprise = ({ steps }) => {
  const bits = steps.slice(1, state.position).map((step) => step.bits);
  return bits.length ? bits.reduce((a, b) => a + b) / bits.length : null;
};

// The score of always guessing the most frequent character.
const commonest = () => {
  const read = [...run().text.slice(0, state.position)];
  const counts = read.map((a) => read.filter((b) => a === b).length);
  return Math.max(...counts) / state.position;
};

// How strongly the chosen head has written a character; and on average each kind,
// strongest first.
const strength = (i) => run().steps[i].trace[state.head[0]][state.head[1]].strength;
const strengths = () => {
  /** @type {Record<string, number[]>} */
  const found = {};
  [...run().text.slice(0, state.position)].forEach((character, i) => {
    const [kind] = Object.entries(KINDS).find(([, letters]) => letters.test(character));
    (found[kind] ??= []).push(strength(i));
  });
  const mean = (kind) => found[kind].reduce((a, b) => a + b) / found[kind].length;
  return Object.keys(found).sort((a, b) => mean(b) - mean(a)).map((kind) => ({ kind, mean: mean(kind) }));
};

// --- What is drawn ------------------------------------------------------------

const box = (character, i, answer) => {
  const { bits } = run().steps[i];
  // Without digits that nobody sees, and that processors round differently.
  const red = (Math.min((bits ?? 0) / 8, 1) * 35).toFixed(1);
  const now = i === state.position - 1 ? "fw-now" : i >= state.position ? "fw-later" : "";
  return html`<span class=${now}>${model().strength ? html`<u style=${`--beta: ${strength(i).toFixed(2)}`}></u>` : ""}<b
    style=${`background: color-mix(in srgb, var(--fw-wrong) ${red}%, transparent)`}>${shown(character)}</b><i
    class=${answer === character ? "fw-same" : ""}>${answer ? shown(answer) : "\u00a0"}</i></span>`;
};
// Letter by letter it would be noise to listen to; the words say the same.
const stripOf = (places) => {
  const { text: characters } = run();
  const lines = [[]];
  [...characters].forEach((character, i) => {
    lines.at(-1).push(box(character, i, characters[places[i]]));
    if (character === "\n") lines.push([]);
  });
  return html`<div class="fw-strip" aria-hidden="true">${lines.map((line) => html`<div>${line}</div>`)}</div>`;
};

const likeliest = () => {
  if (!state.position) return [];
  const { probabilities } = run().steps[state.position - 1];
  return probabilities
    .map((share, token) => [model().alphabet[token], share])
    .sort(([, a], [, b]) => b - a)
    .slice(0, 5);
};

const guesses = () => html`<div class="fw-guesses"><strong>Next character</strong>${likeliest().map(
  ([character, chance]) => html`<div class=${character === run().text[state.position] ? "fw-now" : ""}><b>${shown(character)}</b>
    <span><i style=${`width: ${(100 * chance).toFixed(1)}%`}></i></span><em>${percent(chance)}</em></div>`,
)}</div>`;

// The numbers of a head.
const numbers = (layer, number) =>
  state.position
    ? run().steps[state.position - 1].memory[layer][number].W
    : new Float32Array(model().width * model().features);

const span = (count) => [...Array(count).keys()];
const heads = ({ set }) => html`<div class="fw-heads">${span(model().layers).map((layer) =>
  span(model().heads).map((number) => {
    const own = [layer, number];
    return html`<button type="button" aria-pressed=${state.head.join() === own.join()} @click=${() => set({ head: own })}><canvas
      width=${model().features} height=${model().width} aria-hidden="true"></canvas>layer ${layer + 1}, head ${number + 1}</button>`;
  }),
)}</div>`;
const paint = (root) => {
  const colours = ends(root);
  root.querySelectorAll("canvas").forEach((canvas, i) => {
    const W = numbers(Math.floor(i / model().heads), i % model().heads);
    const limit = W.reduce((top, a) => Math.max(top, Math.abs(a)), 1e-9);
    heat(canvas, W.map((a) => a / limit), colours);
  });
};

const sentence = (places) => {
  const made = run();
  const parts = [];
  if (state.position) {
    const [[character, chance]] = likeliest();
    parts.push(
      `After ${state.position} characters, the ${RULES[state.rule]} expects “${shown(character)}” ` +
        `with ${percent(chance)}. Queried with every key so far, layer ${state.head[0] + 1}, ` +
        `head ${state.head[1] + 1} recalls ${right(state.rule, places)} of ${state.position} characters ` +
        "correctly.",
    );
  } else
    parts.push(
      `The memory is empty. ${made.text ? "Move the slider." : "Type a text."}`,
    );
  if (state.position && model().strength) {
    const kinds = strengths().map(({ kind, mean }) => `${kind} ${number(mean)}`);
    parts.push(`Its mean write strength β: ${kinds.join(", ")}.`);
  }
  const read = Object.keys(RULES).filter((name) => runs[name]?.text === made.text);
  for (const name of state.position ? read : [])
    parts.push(
      `All heads of the ${RULES[name]}: ${percent(share(name))}; its surprise: ` +
        `${number(surprise(runs[name]) ?? 0)} bits per character.`,
    );
  if (state.position)
    parts.push(
      `Always guessing the most frequent character scores ${percent(commonest())}.`,
    );
  if (state.text.length >= LONGEST)
    parts.push(`It reads ${LONGEST} characters at most.`);
  if (made.skipped) parts.push(`Not in its alphabet, left out: ${made.skipped}.`);
  return parts.join(" ");
};

// --- What a reader does ---------------------------------------------------------

const go = ({ set, play }, position) => {
  play.stop();
  set({ position });
};
const full = () => state.text.length >= LONGEST;
const type = (own, text) => {
  const { rule } = state;
  state.text = text;
  for (state.rule of Object.keys(runs)) read(); // the twin, too
  state.rule = rule;
  go(own, run().text.length);
};
const write = (own) => {
  for (let i = 0; i < 40 && !full(); i++) {
    read();
    const p = run().steps.at(-1)?.probabilities;
    state.text += p ? model().alphabet[p.indexOf(Math.max(...p))] : "\n";
  }
  type(own, state.text);
};
// Between asking for a model and having it, the reader may ask for the
// other one: the last word counts.
let asked = null;
const use = async (own, name) => {
  own.play.stop();
  asked = name;
  const first = !model();
  try {
    await fetchModel(own, name);
  } catch (error) {
    const chosen = own.root.querySelector(`input[value=${state.rule}]`);
    if (chosen) chosen.checked = true;
    own.tell(`The weights of the ${RULES[name]} did not come. ${error.message}`);
    return;
  }
  if (asked !== name) return;
  state.rule = name;
  read();
  const all = run().text.length;
  own.set({ position: first ? all : Math.min(state.position, all) });
};
let begun = false;
const start = async (own) => {
  if (begun) return;
  begun = true;
  const pressed = own.root.querySelector("button");
  await use(own, "delta");
  begun = Boolean(model());
  // Not if the reader has gone elsewhere meanwhile.
  if (begun && [pressed, document.body].includes(document.activeElement))
    own.root.querySelector("textarea").focus({ preventScroll: true });
};

figure("shakespeare", {
  state,
  compute: ({ rule, head }) => ({ answers: model() ? answers(rule, head) : null }),
  plays: ({ set }) => ({
    names: ["Replay", "Stop"],
    every: 120,
    begin: () => set({ position: 0 }),
    step: () => {
      set({ position: Math.min(state.position + 1, run().text.length) });
      return state.position < run().text.length;
    },
  }),
  page: ({ rule, text, position }, { answers }, own) =>
    answers
      ? html`
    ${choice("Memory", Object.keys(RULES), rule, (name) => use(own, name), (name) => RULES[name])}
    <div class="fw-controls"><label class="fw-wide">Text to read<textarea class="fw-text" maxlength=${LONGEST} rows="4"
      spellcheck="false" .value=${text} @input=${(e) => type(own, e.target.value)}></textarea></label></div>
    <div class="fw-picture">${stripOf(answers)}${guesses()}${LEGEND}${heads(own)}</div>
    ${slider("Characters read", { min: 0, max: run().text.length, value: position, shown: String(position) }, (to) => go(own, to))}
    <div class="fw-controls">${own.play.button}</div>
    <div class="fw-controls">${button("Empty", () => {
      type(own, "");
      own.root.querySelector("textarea").focus();
    })}${button("Let it write 40 characters", () => write(own), { disabled: full() })}</div>`
      : html`<div class="fw-controls">${button("Start the model (460 kB)", () => start(own))}</div>${own.stood}`,
  drawn: ({ root }) => model() && paint(root),
  say: (_, { answers }) => answers && sentence(answers),
  begin: ({ root }) => ({
    // A copy of the picture that needs no script.
    still: () => frozen(root.querySelector(".fw-picture"), ends(root)),
    state: () => ({
      ...state,
      text: run()?.text ?? null,
      bits: run()?.steps.map((step) => step.bits) ?? null,
      logits: state.position ? Array.from(run().steps[state.position - 1].logits) : null,
      W: model() ? Array.from(numbers(...state.head)) : null,
      answers: model() ? answers(state.rule, state.head) : null,
      strengths: model() && state.position ? run().steps.map((_, i) => strength(i)) : null,
      likeliest: model() ? likeliest() : null,
    }),
  }),
});
