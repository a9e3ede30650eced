// @ts-check
// A language model that runs in the page: its text, the fast weights of
// every head after each character, and what they still hold.
import * as fwlab from "./fwlab.js";
import { number, percent } from "./fwlab.js";
import { button, choice, draw, html, nothing, slider } from "./kit.js";

const folder = new URL("shakespeare/", fwlab.here);
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
  const length = Math.sqrt(fwlab.dot(a, a) * fwlab.dot(b, b));
  return length === 0 ? 0 : fwlab.dot(a, b) / length;
};

fwlab.figure("shakespeare", (figure) => {
  const models = {}; // by rule, as they are asked for
  const runs = {}; // by rule: text, and what the model made of it
  let rule = "delta";
  let text = FIRST; // as it was typed
  let position = 0; // how many characters were read
  let head = [0, 2]; // layer and head, from 0
  let onlyLast = false;
  let begun = false;

  const model = () => models[rule];
  const run = () => runs[rule];

  // The model

  const fetchModel = async (name) => {
    if (models[name]) return;
    figure.say(`Fetching the weights of the ${RULES[name]} (460 kB) …`);
    models[name] = await fwlab.loadModel(new URL(`${name}.safetensors`, folder));
    runs[name] = { text: "", steps: [], skipped: "" };
  };

  // Read what is new of the text; what did not change is kept.
  const read = () => {
    const known = model().alphabet;
    const all = [...text];
    const wanted = all.filter((c) => known.includes(c)).join("");
    const made = run();
    made.skipped = [...new Set(all.filter((c) => !known.includes(c)))].join(" ");
    let same = 0;
    while (same < wanted.length && wanted[same] === made.text[same]) same++;
    made.steps.length = Math.min(made.steps.length, same);
    const state = same ? model().copy(made.steps[same - 1].state) : model().start();
    for (const character of wanted.slice(same)) {
      const token = known.indexOf(character);
      const before = made.steps.at(-1)?.probabilities;
      const { logits, trace } = model().step(token, state);
      made.steps.push({
        logits,
        trace,
        state: model().copy(state),
        probabilities: fwlab.softmax(logits),
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
    if (!position) return [];
    const memory = steps[position - 1].state[layer][number];
    const written = steps.slice(0, position).map(({ trace }) => trace[layer][number]);
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
    return found / (layers * heads * position);
  };

  // Mean of all characters so far but the first, in bits.
  const surprise = ({ steps }) => {
    const bits = steps.slice(1, position).map((step) => step.bits);
    return bits.length ? bits.reduce((a, b) => a + b) / bits.length : null;
  };

  // The score of always guessing the most frequent character.
  const commonest = () => {
    const read = [...run().text.slice(0, position)];
    const counts = read.map((a) => read.filter((b) => a === b).length);
    return Math.max(...counts) / position;
  };

  // How strongly the chosen head has written a character; and on average each kind,
  // strongest first.
  const strength = (i) => run().steps[i].trace[head[0]][head[1]].strength;
  const strengths = () => {
    /** @type {Record<string, number[]>} */
    const found = {};
    [...run().text.slice(0, position)].forEach((character, i) => {
      const [kind] = Object.entries(KINDS).find(([, letters]) => letters.test(character));
      (found[kind] ??= []).push(strength(i));
    });
    const mean = (kind) => found[kind].reduce((a, b) => a + b) / found[kind].length;
    return Object.keys(found).sort((a, b) => mean(b) - mean(a)).map((kind) => ({ kind, mean: mean(kind) }));
  };

  // Drawing

  const box = (character, i, answer) => {
    const { bits } = run().steps[i];
    // Without digits that nobody sees, and that processors round differently.
    const red = (Math.min((bits ?? 0) / 8, 1) * 35).toFixed(1);
    const now = i === position - 1 ? "fw-now" : i >= position ? "fw-later" : "";
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
    if (!position) return [];
    const { probabilities } = run().steps[position - 1];
    return probabilities
      .map((share, token) => [model().alphabet[token], share])
      .sort(([, a], [, b]) => b - a)
      .slice(0, 5);
  };

  const guesses = () => html`<div class="fw-guesses"><strong>Next character</strong>${likeliest().map(
    ([character, chance]) => html`<div class=${character === run().text[position] ? "fw-now" : ""}><b>${shown(character)}</b>
      <span><i style=${`width: ${(100 * chance).toFixed(1)}%`}></i></span><em>${percent(chance)}</em></div>`,
  )}</div>`;

  // The numbers of a head, or what the last character changed of them.
  const numbers = (layer, number) => {
    const { steps } = run();
    if (!position) return new Float32Array(model().width * model().features);
    const after = steps[position - 1].state[layer][number].W;
    if (!onlyLast || position === 1) return after;
    const before = steps[position - 2].state[layer][number].W;
    return after.map((a, i) => a - before[i]);
  };

  const span = (count) => [...Array(count).keys()];
  const heads = () => html`<div class="fw-heads">${span(model().layers).map((layer) =>
    span(model().heads).map((number) => {
      const choose = () => {
        head = [layer, number];
        show();
      };
      return html`<button type="button" aria-pressed=${head.join() === [layer, number].join()} @click=${choose}><canvas
        width=${model().features} height=${model().width} aria-hidden="true"></canvas>layer ${layer + 1}, head ${number + 1}</button>`;
    }),
  )}</div>`;
  const paint = () => {
    const ends = fwlab.ends(figure.root);
    figure.root.querySelectorAll("canvas").forEach((canvas, i) => {
      const W = numbers(Math.floor(i / model().heads), i % model().heads);
      const limit = W.reduce((top, a) => Math.max(top, Math.abs(a)), 1e-9);
      fwlab.heat(canvas, W.map((a) => a / limit), ends);
    });
  };

  const sentence = (places) => {
    const made = run();
    const parts = [];
    if (position) {
      const [[character, chance]] = likeliest();
      parts.push(
        `After ${position} characters, the ${RULES[rule]} expects “${shown(character)}” ` +
          `with ${percent(chance)}. Queried with every key so far, layer ${head[0] + 1}, ` +
          `head ${head[1] + 1} recalls ${right(rule, places)} of ${position} characters ` +
          "correctly.",
      );
    } else
      parts.push(
        `The memory is empty. ${made.text ? "Move the slider." : "Type a text."}`,
      );
    if (position && model().strength) {
      const kinds = strengths().map(({ kind, mean }) => `${kind} ${number(mean)}`);
      parts.push(`Its mean write strength β: ${kinds.join(", ")}.`);
    }
    const read = Object.keys(RULES).filter((name) => runs[name]?.text === made.text);
    for (const name of position ? read : [])
      parts.push(
        `All heads of the ${RULES[name]}: ${percent(share(name))}; its surprise: ` +
          `${number(surprise(runs[name]) ?? 0)} bits per character.`,
      );
    if (position)
      parts.push(
        `Always guessing the most frequent character scores ${percent(commonest())}.`,
      );
    if (text.length >= LONGEST)
      parts.push(`It reads ${LONGEST} characters at most.`);
    if (made.skipped) parts.push(`Not in its alphabet, left out: ${made.skipped}.`);
    return parts.join(" ");
  };

  const show = () => {
    const places = answers(rule, head);
    draw(view(places), figure.root);
    paint();
    figure.say(sentence(places));
  };
  const full = () => text.length >= LONGEST;
  const view = (places) => html`
    ${choice("Memory", Object.keys(RULES), rule, use, (name) => RULES[name])}
    <div class="fw-controls"><label class="fw-wide">Text to read<textarea class="fw-text" maxlength=${LONGEST} rows="4"
      spellcheck="false" .value=${text} @input=${(e) => type(e.target.value)}></textarea></label></div>
    <div class="fw-picture">${stripOf(places)}${guesses()}${LEGEND}${heads()}</div>
    ${slider("Characters read", { min: 0, max: run().text.length, value: position, shown: String(position) }, go)}
    <div class="fw-controls">${replay.button}</div>
    <div class="fw-controls">${button("Empty", () => {
      type("");
      figure.root.querySelector("textarea").focus();
    })}${button("Let it write 40 characters", write, { disabled: full() })}
      <label class="fw-checkbox"><input type="checkbox" .checked=${onlyLast} @change=${(e) => {
        onlyLast = e.target.checked;
        show();
      }}>only what the last character changed</label></div>`;

  // What a reader does

  const go = (to) => {
    replay.stop();
    position = to;
    show();
  };
  const type = (typed) => {
    text = typed;
    const chosen = rule;
    for (rule of Object.keys(runs)) read(); // the twin, too
    rule = chosen;
    go(run().text.length);
  };
  const write = () => {
    for (let i = 0; i < 40 && !full(); i++) {
      read();
      const p = run().steps.at(-1)?.probabilities;
      text += p ? model().alphabet[p.indexOf(Math.max(...p))] : "\n";
    }
    type(text);
  };
  const replay = fwlab.player({
    names: ["Replay", "Stop"],
    every: 120,
    begin: () => (position = 0),
    step: () => {
      position = Math.min(position + 1, run().text.length);
      show();
      return position < run().text.length;
    },
  });

  // Between asking for a model and having it, the reader may ask for the
  // other one: the last word counts.
  let asked = null;
  const use = async (name) => {
    replay.stop();
    asked = name;
    const first = !model();
    try {
      await fetchModel(name);
    } catch (error) {
      const chosen = figure.root.querySelector(`input[value=${rule}]`);
      if (chosen) chosen.checked = true;
      figure.say(`The weights of the ${RULES[name]} did not come. ${error.message}`);
      return;
    }
    if (asked !== name) return;
    rule = name;
    read();
    position = first ? run().text.length : Math.min(position, run().text.length);
    show();
  };
  const begin = async () => {
    if (begun) return;
    begun = true;
    const own = figure.root.querySelector("button");
    await use("delta");
    begun = Boolean(model());
    // Not if the reader has gone elsewhere meanwhile.
    if (begun && [own, document.body].includes(document.activeElement))
      figure.root.querySelector("textarea").focus({ preventScroll: true });
  };
  draw(
    html`<div class="fw-controls">${button("Start the model (460 kB)", begin)}</div>${figure.placeholder ?? nothing}`,
    figure.root,
  );

  return {
    // A copy of the picture that needs no script.
    still: () => fwlab.frozen(figure.root.querySelector(".fw-picture"), fwlab.ends(figure.root)),
    state: () => ({
      rule,
      text: run()?.text ?? null,
      position,
      head,
      bits: run()?.steps.map((step) => step.bits) ?? null,
      logits: position ? Array.from(run().steps[position - 1].logits) : null,
      W: model() ? Array.from(numbers(...head)) : null,
      answers: model() ? answers(rule, head) : null,
      share: position ? share(rule) : null,
      strengths: model() && position ? run().steps.map((_, i) => strength(i)) : null,
      likeliest: model() ? likeliest() : null,
    }),
  };
});
