// @ts-check
// How strongly a trained model writes each word, or each character, into its
// memory: the strength beta of the delta rule over a text.
import * as fwlab from "./fwlab.js";

const base = fwlab.here;
const letters = (text) => [...text];
const MODELS = {
  people: {
    label: "people who move",
    file: new URL("live/delta.safetensors", base),
    size: "22 kB",
    text:
      "Ada is in Rome. Ben is in Oslo. Cleo is in Cairo. Ada is in Lima. " +
      "Where is Ada? Lima. Where is Ben?",
    unit: "word",
    counted: (n) => (n === 1 ? "1 word or mark" : `${n} words and marks`),
    longest: 400,
    alphabet: (model) => model.words,
    // As the model knows them: "ada?" is "Ada" and "?".
    split: (text, known) =>
      (text.match(/\p{L}+|[^\s\p{L}]/gu) ?? []).map(
        (word) => known.find((one) => one.toLowerCase() === word.toLowerCase()) ?? word,
      ),
    kinds: (model) => ({
      places: (word) => model.places.includes(word),
      names: (word) => model.names.includes(word),
      "other words": (word) => /\p{L}/u.test(word),
      marks: () => true,
    }),
    shown: (word) => word,
  },
  shakespeare: {
    label: "Shakespeare",
    file: new URL("shakespeare/delta.safetensors", base),
    size: "460 kB",
    text: "MENENIUS:\nWhat is the city?\n\nSICINIUS:\nThe people are the city.\n",
    unit: "character",
    counted: (n) => (n === 1 ? "1 character" : `${n} characters`),
    longest: 200,
    alphabet: (model) => [...model.alphabet],
    split: letters,
    kinds: () => ({
      capitals: (c) => /[A-Z]/.test(c),
      vowels: (c) => /[aeiou]/.test(c),
      consonants: (c) => /[a-z]/.test(c),
      "line breaks": (c) => c === "\n",
      spaces: (c) => c === " ",
      "other marks": () => true,
    }),
    shown: (c) => ({ "\n": "↵", " ": "␣" })[c] ?? c,
  },
};

fwlab.figure("strength", (figure) => {
  const models = {}; // by name, as they are asked for
  const texts = Object.fromEntries(
    Object.entries(MODELS).map(([name, { text }]) => [name, text]),
  );
  let name = "people";
  let head = [0, 0]; // layer and head, from 0
  let units = []; // what was read
  let skipped = [];
  let betas = []; // for each unit, by layer and head

  const about = () => MODELS[name];
  const model = () => models[name];
  const strengths = () => betas.map((all) => all[head[0]][head[1]]);
  const mean = (numbers) => numbers.reduce((a, b) => a + b, 0) / numbers.length;

  const read = () => {
    const known = about().alphabet(model());
    const all = about().split(texts[name], known);
    units = all.filter((unit) => known.includes(unit));
    skipped = [...new Set(all.filter((unit) => !known.includes(unit)))];
    const state = model().start();
    betas = units.map((unit) => {
      const { trace } = model().step(known.indexOf(unit), state);
      return trace.map((heads) => heads.map(({ strength }) => strength));
    });
  };

  // The kinds that occur, by their mean, strongest first.
  const kinds = () => {
    const found = new Map();
    const kindOf = Object.entries(about().kinds(model()));
    strengths().forEach((beta, i) => {
      const [kind] = kindOf.find(([, belongs]) => belongs(units[i]));
      found.set(kind, [...(found.get(kind) ?? []), beta]);
    });
    return [...found]
      .map(([kind, all]) => ({
        kind,
        count: all.length,
        mean: mean(all),
        low: Math.min(...all),
        high: Math.max(...all),
      }))
      .sort((a, b) => b.mean - a.mean);
  };

  // Drawing

  const strip = fwlab.html("div", { class: "fw-betas" });
  const picture = fwlab.html(
    "div",
    {
      class: "fw-picture fw-main",
      role: "region",
      "aria-label": "The text, with the write strength above",
      tabindex: 0,
    },
    strip,
  );
  const table = fwlab.html("table", { class: "fw-answers" });
  const bar = (share) => fwlab.html("i", { style: `--share: ${(100 * share).toFixed(0)}%` });

  const drawStrip = () => {
    const boxes = strengths().map((beta, i) =>
      fwlab.html(
        "span",
        {},
        fwlab.html("em", {}, fwlab.number(beta).replace(/^0/, "")),
        fwlab.html("i", { style: `--beta: ${beta.toFixed(3)}` }),
        fwlab.html("b", {}, about().shown(units[i])),
      ),
    );
    strip.dataset.unit = about().unit;
    strip.replaceChildren(...boxes);
  };
  const drawTable = (all) => {
    const cells = (tag, texts, scope) =>
      texts.map((text, i) =>
        i ? fwlab.html(tag, {}, text) : fwlab.html("th", { scope }, text),
      );
    table.replaceChildren(
      fwlab.html(
        "thead",
        {},
        fwlab.html("tr", {}, ...cells("th", ["Kind", "count", "mean β", "from – to"], "col")),
      ),
      fwlab.html(
        "tbody",
        {},
        ...all.map(({ kind, count, mean: each, low, high }) => {
          const range = `${fwlab.number(low)} – ${fwlab.number(high)}`;
          const row = cells("td", [kind, count, fwlab.number(each), range], "row");
          row[2].append(bar(each));
          return fwlab.html("tr", {}, ...row);
        }),
      ),
    );
  };

  const sentence = (all) => {
    const parts = [];
    if (!units.length) parts.push("Nothing is read yet: type a text.");
    else {
      const beta = strengths();
      const extreme = (limit) => {
        const at = beta.indexOf(limit(...beta));
        return `“${about().shown(units[at])}” (${fwlab.number(beta[at])})`;
      };
      const where = name === "people" ? "" : ` in layer ${head[0] + 1}, head ${head[1] + 1}`;
      const list = all.map(({ kind, mean: each }) => `${kind} ${fwlab.number(each)}`);
      parts.push(
        `${about().counted(units.length)}. Mean write strength β${where}: ${list.join(", ")}. ` +
          `The strongest write is ${extreme(Math.max)}, the weakest ${extreme(Math.min)}.`,
      );
    }
    if (skipped.length)
      parts.push(`The model does not know, and leaves out: ${skipped.slice(0, 8).join(" ")}.`);
    if (texts[name].length >= about().longest)
      parts.push(`It reads ${about().longest} letters at most.`);
    return parts.join(" ");
  };

  const draw = () => {
    const all = kinds();
    drawStrip();
    drawTable(all);
    figure.say(sentence(all));
  };

  // Controls

  const input = fwlab.html("textarea", { class: "fw-text", rows: 4, spellcheck: "false" });
  input.addEventListener("input", () => {
    texts[name] = input.value;
    read();
    draw();
    // What is typed at the end is at the end of the bars.
    if (input.selectionStart === input.value.length)
      picture.scrollTop = picture.scrollHeight;
  });
  const label = fwlab.html("label", { class: "fw-wide" }, "Text to read", input);
  const vocabulary = fwlab.html("p", { class: "fw-note" });
  const headChoice = fwlab.html("div", {});

  const settle = () => {
    input.value = texts[name];
    input.maxLength = about().longest;
    head = [0, 0];
    const all = {};
    for (let layer = 0; layer < model().layers; layer++)
      for (let number = 0; number < model().heads; number++)
        all[`${layer} ${number}`] = `${layer + 1}.${number + 1}`;
    const choice = fwlab.choice("Layer.head", all, "0 0", (value) => {
      head = value.split(" ").map(Number);
      draw();
    });
    headChoice.replaceChildren(...(Object.keys(all).length > 1 ? [choice] : []));
    vocabulary.textContent = model().words
      ? `It knows ${list(model().names)}; ${list(model().places)}; and: is, in, Where.`
      : "";
    read();
    draw();
  };
  const list = (words) => words.join(", ");

  // Between asking for a model and having it, the reader may ask for the
  // other one: the last word counts.
  let asked = null;
  const use = async (wanted) => {
    asked = wanted;
    try {
      if (!models[wanted]) {
        if (model()) figure.say(`Fetching the weights (${MODELS[wanted].size}) …`);
        models[wanted] = await fwlab.loadModel(MODELS[wanted].file);
      }
    } catch (error) {
      const before = which.querySelector(`input[value=${name}]`);
      if (asked === wanted) before.checked = true;
      figure.say(`The weights did not come. ${error.message}`);
      return false;
    }
    if (asked !== wanted) return true;
    name = wanted;
    settle();
    return true;
  };
  const which = fwlab.choice(
    "Model",
    Object.fromEntries(
      Object.entries(MODELS).map(([each, { label: text }]) => [each, text]),
    ),
    name,
    use,
  );

  // At once: it is light. Only if that fails, there is a button to try again.
  const start = async () => {
    const here = document.activeElement === begin;
    if (!(await use(name))) return figure.root.prepend(again);
    figure.root.replaceChildren(picture);
    figure.beside(
      fwlab.controls(which),
      fwlab.controls(label),
      vocabulary,
      fwlab.controls(headChoice),
      table,
    );
    if (here) input.focus({ preventScroll: true });
  };
  const begin = fwlab.button("Start the model (22 kB)", start);
  const again = fwlab.controls(begin);
  figure.root.append(...[figure.placeholder].filter(Boolean));
  const started = start();

  return {
    // How the figure begins, for readers without scripts.
    still: async () => {
      await started;
      const side = fwlab.html("div", { class: "fw-side" }, table.cloneNode(true));
      return picture.outerHTML + side.outerHTML;
    },
    state: () => ({
      name,
      text: texts[name],
      head,
      units,
      skipped,
      betas,
      kinds: model() ? kinds() : null,
    }),
  };
});
