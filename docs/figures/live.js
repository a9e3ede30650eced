// @ts-check
// Two language models side by side that differ only in their rule. Both read
// the same facts; then each is asked where everybody is. Above the answers is
// the memory of each, as it is written and as it is read.
import * as fwlab from "./fwlab.js";
import { list, percent } from "./fwlab.js";
import { html, mark, render, share } from "./kit.js";

const folder = new URL("live/", fwlab.here);
const RULES = { sum: "Sum rule", delta: "Delta rule" };
const MOST = 24; // sentences, as long as the texts of the training
const TOLD = [
  ["Ada", "Rome"],
  ["Ben", "Oslo"],
  ["Cleo", "Cairo"],
  ["Dan", "Delhi"],
  ["Eve", "Kyoto"],
];
// Chosen: the sum rule keeps guessing the old place after each of them. Of all
// changes, it guesses about half right.
const MOVES = [
  ["Ada", "Tunis"],
  ["Ben", "Sofia"],
  ["Cleo", "Zagreb"],
  ["Dan", "Bern"],
  ["Eve", "Paris"],
];
const OPENING = [...TOLD, ...MOVES];
// Changes that are one press away.
const EXAMPLES = [
  ["Eve", "Delhi"],
  ["Cleo", "Oslo"],
  ["Dan", "Sofia"],
  ["Ada", "Cairo"],
  ["Ben", "Lima"],
  ["Eve", "Bern"],
  ["Cleo", "Rome"],
  ["Dan", "Kyoto"],
];
const STATEMENT = /(\p{L}+)\s+is\s+in\s+(\p{L}+)/giu;
// A picture of a memory: its numbers, above them the key, on the left what is
// written, on the right what is read, each behind a gap.
const EDGE = 2;
const STRONG = 2; // the number in W that is opaque
const GROWS = 700; // milliseconds until a write is done
const WAITS = 2000; // until the moves are played

/** @param {string[]} fact */
const statement = ([name, place]) => `${name} is in ${place}.`;
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

fwlab.figure("live", (figure) => {
  const models = {};
  let facts = [...OPENING];
  let runs = {}; // by rule, what its model makes of the facts
  let asked = null; // whose question shows what it reads
  const kept = figure.placeholder ?? fwlab.html("div");

  const read = (model, words, state) => {
    let last;
    for (const word of words) last = model.step(model.words.indexOf(word), state);
    return { ...last, ...last.trace[0][0] };
  };

  // The memory after all facts, and before the last; the key and the value of
  // that one, written with its place; and for every person, how likely the
  // model takes each place to be after "Where is … ?". A question leaves no
  // trace: it is asked of a copy.
  const run = (model) => {
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
      const shares = fwlab.softmax(logits);
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

  const changed = ({ moved }) => moved;
  const score = ({ answers }) =>
    answers.length ? `${answers.filter(({ right }) => right).length} of ${answers.length}` : "–";

  // Drawing

  const picture = fwlab.html("div", { class: "fw-picture fw-pair" });
  const maps = Object.fromEntries(
    Object.keys(RULES).map((rule) => [rule, fwlab.html("canvas", { role: "img" })]),
  );

  // The pixels of a memory, `share` of the way through its last write; or what a
  // question reads: each number times that of the query.
  const pixels = ({ W, before, key, written, answers }, share) => {
    const asks = answers.find(({ name }) => name === asked)?.asks;
    const above = asks?.query ?? key;
    const side = Math.sqrt(W.length);
    const wide = side + 2 * EDGE;
    const all = new Float32Array(wide * (side + EDGE));
    const [top, left, right] = [above, asks ? [] : written, asks?.read ?? []].map((x) =>
      Array.from(x, (a) => a / largest(x)),
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
    return [wide, side + EDGE, all];
  };
  const paint = (share) => {
    const ends = fwlab.ends(figure.root);
    for (const [rule, canvas] of Object.entries(maps)) {
      const [width, height, all] = pixels(runs[rule], share);
      Object.assign(canvas, { width, height });
      fwlab.heat(canvas, all, ends);
      const name = `Memory of the ${RULES[rule].toLowerCase()}`;
      canvas.ariaLabel = asked ? `${name}, as the question about ${asked} reads it` : name;
    }
  };

  // Words of the last sentence grow out of it, and go into both memories: its name
  // as the key, its place as the value; then the memory changes.
  let frame;
  const fly = () => {
    const begin = performance.now();
    const next = () => {
      const share = Math.min((performance.now() - begin) / GROWS, 1);
      paint(share);
      if (share < 1) frame = requestAnimationFrame(next);
    };
    next();
    const [name, place] = facts.at(-1);
    const corner = picture.getBoundingClientRect();
    const story = picture.querySelector("p");
    const { localName, childNodes } = story.lastElementChild;
    const told = [...childNodes].find(({ nodeType }) => nodeType === Node.TEXT_NODE);
    const { bottom } = story.getBoundingClientRect();
    const range = document.createRange();
    for (const canvas of Object.values(maps)) {
      const { x, y, width, height } = canvas.getBoundingClientRect();
      const ends = { [name]: [x + width / 2, y], [place]: [x, y + height / 2] };
      for (const [word, to] of Object.entries(ends)) {
        const start = told.textContent.indexOf(word);
        range.setStart(told, start);
        range.setEnd(told, start + word.length);
        const from = range.getBoundingClientRect();
        const ghost = fwlab.html(localName, { class: "fw-ghost", "aria-hidden": true }, word);
        picture.append(ghost);
        const at = (left, top, size) => ({
          transform: `translate(${left - corner.x}px, ${top - corner.y}px) scale(${size})`,
        });
        const way = [at(from.x, from.y, 0), at(from.x, bottom - from.height, 1), at(...to, 0.5)];
        ghost.animate(way, { duration: GROWS, easing: "ease-in" }).onfinish = () =>
          ghost.remove();
      }
    }
  };

  const cell = ({ said, right, share: sure }) =>
    html`<td class=${right ? "fw-right" : "fw-wrong"}>${mark(right)} ${said} <em>${percent(sure)}</em>${share(sure)}</td>`;

  const askAfter = (name) => {
    const button = fwlab.button(name, async () => {
      stop(); // a click does not focus a button everywhere
      if (!models.delta && !(await tell((facts) => facts))) return;
      asked = asked === name ? null : name;
      show();
    });
    button.setAttribute("aria-label", `Ask where ${name} is`);
    return button;
  };
  const asks = fwlab.controls();
  asks.classList.add("fw-asks");
  const offerNames = () => {
    const names = people(facts).map(({ name }) => name);
    const offered = [...asks.querySelectorAll("button")].map((e) => e.textContent);
    if (names.join() === offered.join()) return; // who stands on one stays there
    asks.replaceChildren(...(names.length ? ["Show what is read for"] : []), ...names.map(askAfter));
  };
  // What is read lights up, or what was written last.
  const show = () => {
    for (const button of asks.querySelectorAll("button"))
      button.ariaPressed = button.textContent === asked;
    paint(1);
    figure.say(sentence(), !player.running());
  };

  const draw = (news) => {
    cancelAnimationFrame(frame);
    asked = null;
    runs = Object.fromEntries(Object.keys(RULES).map((rule) => [rule, run(models[rule])]));
    const known = people(facts);
    const latest = new Map(facts.map(([name], i) => [name, i]));
    const told = (fact, i) => {
      if (latest.get(fact[0]) !== i) return html`<s>${statement(fact)}</s> `;
      const { moved } = known.find(({ name }) => name === fact[0]);
      return moved ? html`<strong>${statement(fact)}</strong> ` : html`<span>${statement(fact)}</span> `;
    };
    const rules = Object.entries(RULES);
    render(
      html`<p>${facts.map(told)}</p>
        <div class="fw-memories">${rules.map(([rule, name]) => html`<div>${name}: W${maps[rule]}</div>`)}<small>Above:
          the key, or what is asked. Left: what is written. Right: what is read. Blue: positive, pink:
          negative.</small></div>
        <table class="fw-answers"><thead><tr><th scope="col">Where is …</th>${rules.map(
          ([rule, name]) => html`<th scope="col">${name} <strong>${score(runs[rule])}</strong></th>`,
        )}</tr></thead><tbody>${known.map(
          ({ name }, i) => html`<tr><th scope="row">${name}?</th>${rules.map(([rule]) => cell(runs[rule].answers[i]))}</tr>`,
        )}</tbody></table>`,
      picture,
    );
    offer();
    show();
    if (news && !fwlab.motion.matches) fly();
  };

  const sentence = () => {
    const known = people(facts);
    if (!known.length) return "Both memories are empty. Tell them where somebody is.";
    if (asked)
      return (
        `Asked where ${asked} is, each model reads from its memory: lit is W times the ` +
        "query, its sum is on the right. Press the name again to see all of W."
      );
    const moved = known.filter(changed).map(({ name }) => name);
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

  // Telling

  // Once, also for who presses twice while they come; again after a failure.
  let loading;
  const load = () => {
    loading ??= fetchBoth().catch((error) => {
      loading = undefined;
      throw error;
    });
    return loading;
  };
  const fetchBoth = async () => {
    figure.say("Fetching the weights (44 kB) …", !player.running());
    const [sum, delta] = await Promise.all(
      Object.keys(RULES).map((rule) =>
        fwlab.loadModel(new URL(`${rule}.safetensors`, folder)),
      ),
    );
    Object.assign(models, { sum, delta });
  };

  // The weights come on first use; until then the kept picture is shown.
  // Returns whether it worked.
  const change = async (edit) => {
    try {
      await load();
    } catch (error) {
      figure.say(`The weights could not be fetched. ${error.message}`);
      return false;
    }
    if (!picture.isConnected) kept.replaceWith(picture);
    const count = facts.length;
    facts = edit(facts);
    draw(facts.length > count);
    return true;
  };
  // The same by the reader, after which nothing plays by itself.
  const tell = (edit) => {
    stop();
    return change(edit);
  };

  // The moves play once by themselves, and whenever the reader wants.
  const sign = fwlab.html("small", { hidden: true }, "▶ Replaying the five moves");
  const player = fwlab.player({
    names: ["Replay the moves", "Pause"],
    every: 1600,
    begin: () => {
      clearTimeout(opening);
      sign.hidden = false;
      // Not if the reader has done something while the weights came.
      change((facts) => (player.running() ? [...TOLD] : facts));
    },
    step: () => {
      if (!models.delta) return Boolean(loading);
      change((facts) => [...facts, MOVES[facts.length - TOLD.length]]);
      return facts.length < OPENING.length - 1;
    },
    end: () => (sign.hidden = true),
  });
  const opening = setTimeout(() => player.whenSeen(figure.root), WAITS);
  const stop = () => {
    clearTimeout(opening);
    player.stop();
  };
  asks.addEventListener("focusin", stop);
  // In place of that button, for who wants no motion.
  const back = fwlab.button("Back to the five moves", () => tell(() => [...OPENING]));
  const offerBack = () => (back.hidden = !fwlab.motion.matches);
  fwlab.motion.addEventListener("change", offerBack);
  offerBack();

  // A change that is one press away.
  const next = () => {
    const told = facts.map(statement);
    const left = EXAMPLES.filter((fact) => !told.includes(statement(fact)));
    return left[0] ?? EXAMPLES[facts.length % EXAMPLES.length];
  };
  const example = fwlab.button("", () =>
    tell((facts) => (facts.length < MOST ? [...facts, next()] : facts)),
  );
  const offer = () => {
    offerNames();
    const full = facts.length >= MOST;
    const left = [example, send].includes(document.activeElement);
    example.textContent = full
      ? `${MOST} sentences: full`
      : `Tell both: ${statement(next())}`;
    example.disabled = send.disabled = full;
    if (full && left) empty.focus();
  };

  const empty = fwlab.button("Empty both memories", async () => {
    if (await tell(() => [])) input.focus();
  });
  const input = fwlab.html("input", {
    type: "text",
    class: "fw-text",
    placeholder: "Dan is in Rome.",
    autocomplete: "off",
    spellcheck: "false",
  });
  input.addEventListener("focusin", stop);
  const send = fwlab.html("button", { type: "submit", class: "fw-button" }, "Tell");
  const form = fwlab.html(
    "form",
    { class: "fw-controls" },
    fwlab.html("label", { class: "fw-wide" }, "Or type: ", input),
    send,
    player.button,
    back,
    empty,
  );
  const proper = (word) => word[0].toUpperCase() + word.slice(1).toLowerCase();
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const news = [...input.value.matchAll(STATEMENT)].map(([, name, place]) => [
      proper(name),
      proper(place),
    ]);
    if (!(await tell((facts) => facts))) return;
    const { names, places } = models.delta;
    const known = news.filter(
      ([name, place]) => names.includes(name) && places.includes(place),
    );
    const room = MOST - facts.length;
    if (known.length > room)
      figure.say(`They read ${MOST} sentences at most: ${room} more, not ${known.length}.`);
    else if (known.length && known.length === news.length) {
      await tell((facts) => [...facts, ...known]);
      input.value = "";
    } else
      figure.say(
        "Write “Dan is in Rome.”, with a name and a place that they know. " +
          `Names: ${names.join(", ")}. Places: ${places.join(", ")}.`,
      );
  });

  offer();
  figure.root.append(fwlab.controls(example, sign), kept, asks, form);

  return {
    // How the figure begins, for readers without scripts.
    still: async () => {
      await tell(() => [...OPENING]);
      return fwlab.frozen(picture, fwlab.ends(figure.root));
    },
    state: () => ({
      facts,
      answers: models.delta
        ? Object.fromEntries(Object.entries(runs).map(([rule, { answers }]) => [rule, answers]))
        : null,
      memories: Object.fromEntries(
        Object.entries(runs).map(([rule, { W }]) => [rule, Array.from(W)]),
      ),
      pixels: Object.fromEntries(
        Object.entries(runs).map(([rule, made]) => [rule, Array.from(/** @type {any} */ (pixels(made, 1)[2]))]),
      ),
      asked,
      playing: player.running(),
    }),
  };
});
