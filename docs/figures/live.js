// @ts-check
// Two language models side by side that differ only in their rule. Both read
// the same facts; then each is asked where everybody is. Beside the answers is
// the memory of each, as it is written and as it is read.
import { button, figure, html, mark, motion, share as bar } from "./kit.js";
import { ends, frozen, heat, loadModel, softmax } from "./model.js";
import { list, percent } from "./words.js";

// What each rule writes, and the one term in which they differ.
const RULES = {
  sum: { name: "Sum rule", writes: html`W + β v ⊗ k` },
  delta: { name: "Delta rule", writes: html`W + β (v <mark>− W k</mark>) ⊗ k` },
};
const KINDS = Object.keys(RULES);
const MOST = 24; // sentences, as long as the texts of the training
/** @param {string} text */
const pairs = (text) => text.split(", ").map((fact) => fact.split(" "));
const TOLD = pairs("Ada Rome, Ben Oslo, Cleo Cairo, Dan Delhi, Eve Kyoto");
// Chosen: the sum rule keeps guessing the old place after each of them. Of all
// changes, it guesses about half right.
const MOVES = pairs("Ada Tunis, Ben Sofia, Cleo Zagreb, Dan Bern, Eve Paris");
const ALL = TOLD.length + MOVES.length;
// How it begins: two moves are left to play, or to press.
const OPENING = [...TOLD, ...MOVES.slice(0, 3)];
const EXAMPLES = [
  ...MOVES.slice(3),
  ...pairs("Eve Delhi, Cleo Oslo, Dan Sofia, Ada Cairo, Ben Lima, Eve Bern, Cleo Rome, Dan Kyoto"),
];
const STATEMENT = /(\p{L}+)\s+(?:is|lives|moved|moves|went)\s+(?:in|to)\s+(\p{L}+)/giu;
// A picture of a memory: its numbers, above them the key, on the left what is
// written, on the right what is read, each behind a gap.
const EDGE = 2;
const STRONG = 2; // the number in W that is opaque
const GROWS = 700; // milliseconds until a write is done
const TURN = 1900; // between two moves

/** @param {string[]} fact */
const statement = ([name, place]) => `${name} is in ${place}.`;
const proper = (word) => word[0].toUpperCase() + word.slice(1).toLowerCase();
/** @param {any} object @param {(made: any) => any} of */
const each = (object, of) => Object.fromEntries(Object.entries(object).map(([rule, made]) => [rule, of(made)]));
const largest = (x) => x.reduce((top, a) => Math.max(top, Math.abs(a)), 1e-9);

// Where everybody is, and whether they have moved, in the order of telling.
const people = (facts) => {
  const found = new Map();
  for (const [name, place] of facts) {
    const before = found.get(name);
    const moved = before ? before.moved + (before.place !== place) : 0;
    found.set(name, { name, place, moved });
  }
  return [...found.values()];
};

const read = (model, words, state) => {
  let last;
  for (const word of words) last = model.step(model.words.indexOf(word), state);
  return { ...last, ...last.trace[0][0] };
};

// The memory after all facts, and before the last; the key and the value of
// that one, written with its place; and for every person, how likely the
// model takes each place to be after "Where is … ?". A question leaves no
// trace: it is asked of a copy.
const run = (model, facts) => {
  const state = model.start();
  let before = state;
  let wrote = {};
  for (const [name, place] of facts) {
    before = model.copy(state);
    wrote = read(model, [name, "is", "in", place], state);
    read(model, ["."], state);
  }
  const answers = people(facts).map(({ name, place, moved }) => {
    const copy = model.copy(state);
    const { logits, query, read: y } = read(model, ["Where", "is", name, "?"], copy);
    const shares = softmax(logits);
    const said = model.words[shares.indexOf(Math.max(...shares))];
    const chance = (word) => shares[model.words.indexOf(word)];
    return {
      name,
      place,
      moved,
      said,
      right: said === place,
      share: chance(said),
      truth: chance(place),
      logits: Array.from(logits),
      asks: { W: copy[0][0].W, query, read: y },
    };
  });
  const { key = [], written = [] } = wrote;
  return { W: state[0][0].W, before: before[0][0].W, key, written, answers };
};

// The pixels of a memory, `share` of the way through its last write; or what a
// question reads: each number times that of the query.
const pixels = ({ W, before, key, written, answers }, share, asked) => {
  const asks = answers.find(({ name }) => name === asked)?.asks;
  const side = Math.sqrt(W.length);
  const wide = side + 2 * EDGE;
  const all = new Float32Array(wide * (side + EDGE));
  const [top, left, right] = [asks?.query ?? key, asks ? [] : written, asks?.read ?? []].map(
    (x) => Array.from(x, (a) => a / largest(x)),
  );
  top.forEach((a, j) => (all[EDGE + j] = a));
  for (let i = 0; i < side; i++) {
    const row = (EDGE + i) * wide;
    all[row] = left[i] ?? 0;
    all[row + wide - 1] = right[i] ?? 0;
    for (let j = 0; j < side; j++) {
      const n = i * side + j;
      const held = before[n] + share * (W[n] - before[n]);
      all[row + EDGE + j] = (asks ? asks.W[n] * top[j] : held) / STRONG;
    }
  }
  return { width: wide, height: side + EDGE, numbers: all };
};

const sentence = (facts, asked) => {
  const known = people(facts);
  if (!known.length) return "Both memories are empty. Tell them where somebody is.";
  if (asked)
    return (
      `Asked where ${asked} is, each model reads from its memory: lit is W times the ` +
      "query, its sum is on the right. Press the name again to see all of W."
    );
  const moved = known.filter(({ moved }) => moved).map(({ name }) => name);
  if (!moved.length)
    return "Nobody has moved yet, and the sum rule remembers as well as the delta rule.";
  const all = moved.length === known.length;
  return (
    `${all ? "Everyone" : list(moved)} ${moved.length > 1 && !all ? "have" : "has"} moved; ` +
    "what is no longer true is crossed out. The sum rule adds the new place to the old " +
    "one and can only guess between them; the delta rule replaces it. The percentages " +
    "say how sure each model is."
  );
};

// --- What is drawn -------------------------------------------------------------

const story = (facts) => {
  const known = people(facts);
  return facts.map((fact, i) => {
    const said = statement(fact);
    const gap = i ? " " : ""; // before it: one at the end would move
    const { moved } = known.find(({ name }) => name === fact[0]);
    if (facts.slice(i + 1).some(([name]) => name === fact[0]))
      return html`${gap}<s>${said}</s>`;
    return moved ? html`${gap}<strong>${said}</strong>` : html`${gap}<span>${said}</span>`;
  });
};
const cell = ({ said, right, share }) =>
  html`<td class=${right ? "fw-right" : "fw-wrong"}>${mark(right)} ${said} <em>${percent(share)}</em>${bar(share)}</td>`;
const score = ({ answers }) =>
  answers.length ? `${answers.filter(({ right }) => right).length} of ${answers.length}` : "–";
const map = (rule, asked) => {
  const name = `Memory of the ${RULES[rule].name.toLowerCase()}`;
  return asked ? `${name}, as the question about ${asked} reads it` : name;
};
const picture = ({ facts, runs, asked }, own) => html`<div class="fw-picture fw-pair" @focusin=${() => stop(own)}><p>${story(facts)}</p>
  <div class="fw-memories">${KINDS.map((rule) => html`<div><b>${RULES[rule].name}</b><i>${RULES[rule].writes}</i><canvas
    role="img" data-rule=${rule} aria-label=${map(rule, asked)}></canvas></div>`)}
    <small>W: blue +, pink −. Above: the key. Left: written. Right: read.</small></div>
  <table class="fw-answers"><thead><tr><th scope="col">Where is …</th>${KINDS.map(
    (rule) => html`<th scope="col">${RULES[rule].name} <strong>${score(runs[rule])}</strong></th>`,
  )}</tr></thead><tbody>${people(facts).map(({ name }, i) => html`<tr><th scope="row"><button type="button" class="fw-button"
    aria-label="Ask where ${name} is" aria-pressed=${asked === name} @click=${() => ask(own, name)}>${name}?</button></th>
    ${KINDS.map((rule) => cell(runs[rule].answers[i]))}</tr>`)}</tbody></table></div>`;
const paint = (root, { runs, asked }, share) => {
  const colours = ends(root);
  for (const rule of KINDS) {
    const canvas = root.querySelector(`[data-rule=${rule}]`);
    const { width, height, numbers } = pixels(runs[rule], share, asked);
    Object.assign(canvas, { width, height });
    // The square root of a number: most are small.
    heat(canvas, numbers.map((a) => Math.sign(a) * Math.sqrt(Math.abs(a))), colours);
  }
};

// Words of the last sentence grow out of it, and go into both memories: its name
// as the key, its place as the value; then the memory changes.
let frame;
const fly = (root) => {
  const begin = performance.now();
  const next = () => {
    const share = Math.min((performance.now() - begin) / GROWS, 1);
    paint(root, state, share);
    if (share < 1) frame = requestAnimationFrame(next);
  };
  next();
  const pair = root.querySelector(".fw-pair");
  const corner = pair.getBoundingClientRect();
  const told = [...pair.querySelectorAll("p > *")].at(-1);
  const words = [...told.childNodes].find((node) => node instanceof Text);
  const { bottom } = pair.querySelector("p").getBoundingClientRect();
  const range = document.createRange();
  for (const canvas of pair.querySelectorAll("canvas")) {
    const { x, y, width, height } = canvas.getBoundingClientRect();
    const [name, place] = state.facts.at(-1);
    for (const [word, ...to] of [[name, x + width / 2, y], [place, x, y + height / 2]]) {
      const start = words.data.indexOf(word);
      range.setStart(words, start);
      range.setEnd(words, start + word.length);
      const from = range.getBoundingClientRect();
      const ghost = document.createElement(told.localName);
      Object.assign(ghost, { className: "fw-ghost", ariaHidden: "true", textContent: word });
      pair.append(ghost);
      const at = (left, top, size) => ({
        transform: `translate(${left - corner.x}px, ${top - corner.y}px) scale(${size})`,
      });
      const way = [at(from.x, from.y, 0), at(from.x, bottom - from.height, 1), at(...to, 0.5)];
      ghost.animate(way, { duration: GROWS, easing: "ease-in" }).onfinish = () => ghost.remove();
    }
  }
};

// --- What a reader does ------------------------------------------------------------

// - runs: by rule, what its model makes of the facts, once the weights (44 kB) are there;
// - asked: whose question shows what it reads;
// - unknown: whether something was told that they cannot read.
const state = { facts: OPENING, runs: null, asked: null, unknown: false, playing: false };
let begun = false; // whether the moves have played
const models = {};
// Once, also for who presses twice while they come; again after a failure.
let loading;
const load = () => {
  const fetchOne = async (rule) => {
    models[rule] = await loadModel(`live/${rule}`);
  };
  loading ??= Promise.all(KINDS.map(fetchOne)).catch((error) => {
    loading = undefined;
    throw error;
  });
  return loading;
};
// A change that is one press away.
const following = (facts) => {
  const told = facts.map(statement);
  const left = EXAMPLES.filter((fact) => !told.includes(statement(fact)));
  return left[0] ?? EXAMPLES[facts.length % EXAMPLES.length];
};

// Until the weights come, the kept picture is shown. Returns whether they came.
const change = async ({ root, set, tell }, edit) => {
  try {
    await load();
  } catch (error) {
    tell(`The weights could not be fetched. ${error.message}`);
    return false;
  }
  const count = state.facts.length;
  const facts = edit();
  set({ facts, asked: null, unknown: false, runs: each(models, (model) => run(model, facts)) });
  if (facts.length > count && !motion.matches) fly(root);
  return true;
};
// The same by the reader, after which nothing plays by itself.
const stop = ({ play }) => {
  begun = true;
  play.stop();
};
const told = (own, edit) => {
  stop(own);
  return change(own, edit);
};
const ask = (own, name) => {
  stop(own); // a click does not focus a button everywhere
  own.set({ asked: state.asked === name ? null : name });
};
const clear = async (own) => {
  if (await told(own, () => [])) own.root.querySelector("input").focus();
};
const typed = async (own, event) => {
  event.preventDefault();
  const input = event.target.querySelector("input");
  const news = [...input.value.matchAll(STATEMENT)].map(([, ...fact]) => fact.map(proper));
  if (!(await told(own, () => state.facts))) return;
  const { names, places } = models.delta;
  const known = news.filter(([name, place]) => names.includes(name) && places.includes(place));
  const room = MOST - state.facts.length;
  if (known.length > room)
    own.tell(`They read ${MOST} sentences at most: ${room} more, not ${known.length}.`);
  else if (known.length && known.length === news.length) {
    await told(own, () => [...state.facts, ...known]);
    input.value = "";
  } else {
    own.set({ unknown: true });
    own.tell(
      "These two read only sentences such as “Dan is in Rome.”, with names and places " +
        `that they know. Names: ${names.join(", ")}. Places: ${places.join(", ")}.`,
    );
  }
};
const move = (own) => change(own, () => [...state.facts, MOVES[state.facts.length - TOLD.length]]);

export default figure("live", {
  state,
  run,
  // The moves play once by themselves, and whenever the reader wants.
  plays: (own) => ({
    names: ["Replay the moves", "Pause"],
    every: TURN,
    begin: async () => {
      // At first it goes on with what is seen. Not if the reader has done something
      // while the weights came.
      const first = !begun;
      begun = true;
      own.set({ playing: true });
      await change(own, () => (first || !state.playing ? state.facts : TOLD));
      if (first && state.playing) move(own);
    },
    step: () => {
      if (!state.runs) return Boolean(loading);
      move(own);
      return state.facts.length < ALL - 1; // the move is on its way
    },
    end: () => own.set({ playing: false }),
  }),
  page: ({ facts, runs, unknown, playing }, _, own) => {
    const full = facts.length >= MOST;
    const next = following(facts);
    return html`<div class="fw-controls">${button(
        full ? `${MOST} sentences: full` : `Tell both: ${statement(next)}`,
        () => told(own, () => [...facts, next]),
        { disabled: full },
      )}<small ?hidden=${!playing}>▶ Replaying the five moves</small></div>
      ${runs ? picture(state, own) : own.stood}
      <form class="fw-controls" @submit=${(event) => typed(own, event)}><label class="fw-wide">Or type: <input type="text"
        class="fw-text" placeholder="Dan is in Rome." autocomplete="off" spellcheck="false" @focusin=${() => stop(own)}></label>
        <button type="submit" class="fw-button" ?disabled=${full}>Tell</button>${own.play.button}
        ${motion.matches ? button("Start again", () => told(own, () => OPENING)) : ""}
        ${button("Empty both memories", () => clear(own))}</form>
      <p class="fw-note" ?hidden=${!unknown}>Another model here takes any text:
        <a href="figures/shakespeare.html">the one that has read Shakespeare</a>.</p>`;
  },
  drawn: ({ root }) => {
    cancelAnimationFrame(frame);
    if (state.runs) paint(root, state, 1);
  },
  say: ({ facts, runs, asked }) => runs && sentence(facts, asked),
  begin: (own) => {
    motion.addEventListener("change", () => own.set());
    if (motion.matches) change(own, () => state.facts);
    else own.play.whenSeen(own.root);
    return {
      // How the figure begins, for readers without scripts.
      still: async () => {
        await told(own, () => OPENING);
        const kept = frozen(own.root.querySelector(".fw-pair"), ends(own.root));
        return kept.replace(/<!--.*?-->/g, "").replace(/\s+/g, " ");
      },
      state: () => ({
        ...state,
        answers: state.runs && each(state.runs, ({ answers }) => answers),
        memories: each(state.runs ?? {}, ({ W }) => Array.from(W)),
        pixels: each(state.runs ?? {}, (made) => Array.from(pixels(made, 1, state.asked).numbers)),
      }),
    };
  },
});
