// @ts-check
// Who forgets? Five memories are written the same pairs, and each is asked
// for every key. The address of the page keeps the setting.
import * as fwlab from "./fwlab.js";
import { list, percent } from "./fwlab.js";
import { html, mark, render, share } from "./kit.js";

fwlab.figure("forgets", (figure) => {
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
  const START = { ...PRESETS["Keys change"], draw: 1 };
  let setting = { ...START };
  let remark = ""; // on an address that is not understood

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

  // --- The memories --------------------------------------------------------
  // A word has the same vector wherever it stands, and another in each draw.
  const vectors = (kind, words, draw) =>
    new Map(
      [...new Set(words)].map((word) => {
        const normal = fwlab.random(`${draw} ${kind} ${word}`);
        return [word, fwlab.direction(normal, setting.width)];
      }),
    );

  // Keys and queries as long as the square root of their width, as in a
  // trained model, and their product divided by that: Eq. 7.
  const attend = (pairs, keys, values, query) => {
    const sharpness = Math.sqrt(setting.width);
    const weights = pairs.map(([key]) =>
      Math.exp(sharpness * fwlab.dot(keys.get(key), query)),
    );
    const total = weights.reduce((a, b) => a + b, 0);
    return query.map((_, i) =>
      pairs.reduce((sum, [, value], j) => sum + (weights[j] / total) * values.get(value)[i], 0),
    );
  };

  const recall = ({ pairs, asked }, draw) => {
    const keys = vectors("key", pairs.map(([key]) => key), draw);
    const values = vectors("value", pairs.map(([, value]) => value), draw);
    const found = MEMORIES.map((name) => {
      let read = (query) => attend(pairs, keys, values, query);
      if (name !== "softmax") {
        const rule = fwlab.rules[name](setting.beta, setting.decay);
        let W = Array.from({ length: setting.width }, () => Array(setting.width).fill(0));
        for (const [key, value] of pairs)
          W = fwlab.write(W, keys.get(key), values.get(value), rule);
        read = (query) => fwlab.read(W, query);
      }
      const answers = asked.map(({ key, value }) => {
        const y = read(keys.get(key));
        // All values have length 1: the nearest has the largest product.
        const near = [...values].map(([word, v]) => [word, fwlab.dot(y, v)]);
        const best = Math.max(...near.map(([, likeness]) => likeness));
        const nothing = fwlab.dot(y, y) === 0;
        const said = near.filter(([, likeness]) => likeness > best - 1e-9);
        const words = nothing ? [] : said.map(([word]) => word);
        return { y, said: words, right: words.length === 1 && words[0] === value };
      });
      return [name, answers];
    });
    return { keys, values, found: Object.fromEntries(found) };
  };

  const count = (answers) => answers.filter(({ right }) => right).length;
  const compute = () => {
    const told = parse(setting.text);
    const sums = Object.fromEntries(MEMORIES.map((name) => [name, 0]));
    return { ...told, ...recall(told, setting.draw), sums, means: {}, draws: 0 };
  };
  const complete = () => shown.draws === DRAWS;
  // One more draw of which the mean is taken.
  const add = () => {
    shown.draws += 1;
    const { found } = shown.draws === setting.draw ? shown : recall(shown, shown.draws);
    for (const name of MEMORIES) {
      shown.sums[name] += count(found[name]);
      shown.means[name] = shown.sums[name] / shown.draws / shown.asked.length;
    }
  };

  // --- Drawing -------------------------------------------------------------
  const table = fwlab.html("table", { class: "fw-answers fw-arena" });
  const picture = fwlab.html(
    "div",
    {
      class: "fw-picture fw-main",
      role: "region",
      "aria-label": "What each memory recalls",
      tabindex: 0,
    },
    table,
  );
  const cell = ({ said, right }) =>
    html`<td class=${right ? "fw-right" : "fw-wrong"}>${mark(right)} ${said.join(" = ") || "nothing"}</td>`;
  const drawTable = ({ asked, found, means }) => {
    const mean = (name) => (complete() ? percent(means[name]) : "…");
    const best = Math.max(...MEMORIES.map((name) => count(found[name])));
    const head = (name) => {
      const right = count(found[name]);
      const wins = asked.length > 0 && right === best;
      return html`<th scope="col" class=${wins ? "fw-wins" : ""}><span>${name}</span>
        <strong>${right} of ${asked.length}</strong>${share(asked.length ? right / asked.length : 0)}
        <small>${asked.length ? mean(name) : "–"}</small></th>`;
    };
    const row = ({ key, value, changed }, i) =>
      html`<tr><th scope="row"><b>${key}</b> ${value}${changed ? html`<small> changed</small>` : ""}</th>
        ${MEMORIES.map((name) => cell(found[name][i]))}</tr>`;
    render(
      html`<thead><tr><th scope="col">key, last value<small>mean of ${DRAWS} draws:</small></th>
        ${MEMORIES.map(head)}</tr></thead><tbody>${asked.map(row)}</tbody>`,
      table,
    );
  };

  const sentence = ({ pairs, asked, dropped, ignored, found, means }) => {
    const parts = [remark];
    if (!pairs.length)
      parts.push("All memories are empty. Write pairs such as a=red b=blue, or a text.");
    else {
      const ranked = [...MEMORIES].sort((a, b) => count(found[b]) - count(found[a]));
      const scores = ranked.map((name) => `${NAMES[name]} ${count(found[name])}`);
      const many = pairs.length === 1 ? "1 pair" : `${pairs.length} pairs`;
      const each = asked.length === 1 ? "1 key is" : `${asked.length} keys are`;
      parts.push(
        `After ${many}, ${each} asked for; all vectors have width ${setting.width}. ` +
          `Correct: ${scores.join(", ")}.`,
      );
      const changed = asked.flatMap(({ changed }, i) => (changed ? [i] : []));
      if (changed.length) {
        const of = (name) => changed.filter((i) => found[name][i].right).length;
        parts.push(
          `Of the ${changed.length} that changed, the delta rule has ${of("delta")} correct, ` +
            `the sum rule ${of("sum")} and softmax attention ${of("softmax")}.`,
        );
      }
      const top = Math.max(...Object.values(means));
      const best = MEMORIES.filter((name) => means[name] > top - 0.005);
      const of = list(best.map((name) => NAMES[name]));
      const over = `Best over ${DRAWS} draws of random vectors`;
      parts.push(complete() ? `${over}, with ${percent(top)}: ${of}.` : `${over}: ….`);
    }
    if (dropped) parts.push(`The memories read ${MOST} pairs at most: ${dropped} are left out.`);
    if (ignored) parts.push("Words without “=” are left out.");
    return parts.filter(Boolean).join(" ");
  };

  let shown;
  let rest;
  const tell = () => {
    drawTable(shown);
    figure.say(sentence(shown));
  };
  // The mean follows, once nothing has changed for a moment, and draw by
  // draw, so that the page goes on: long texts at width 64 take a second.
  const follow = () => {
    add();
    if (complete()) tell();
    else rest = setTimeout(follow);
  };
  const update = () => {
    clearTimeout(rest);
    shown = compute();
    tell();
    rest = setTimeout(follow, 150);
  };

  // --- The address ---------------------------------------------------------
  // After "#", so that no browser sends it anywhere.
  const whole = (x) => Math.abs(x - Math.round(x)) < 1e-9; // a step of the slider
  const RANGES = {
    width: (x) => WIDTHS.includes(x),
    beta: (x) => x >= 0 && x <= 1 && whole(20 * x),
    decay: (x) => x >= 0.5 && x <= 1 && whole(100 * x),
    draw: (x) => whole(x) && x >= 1 && x < 1e6,
  };
  const fromAddress = () => {
    remark = "";
    const parts = new URLSearchParams(location.hash.slice(1));
    if (!parts.has("text")) return; // another place of this page
    const wrong = [];
    const wanted = { ...START };
    const told = parts.get("text");
    if (told.length > LETTERS) wrong.push(`a text of more than ${LETTERS} letters`);
    else if (told.includes("\ufffd")) wrong.push("a text that is damaged");
    else wanted.text = told;
    for (const [name, fits] of Object.entries(RANGES)) {
      const given = parts.get(name);
      if (given === null) continue;
      const value = given.trim() === "" ? NaN : Number(given);
      if (fits(value)) wanted[name] = value;
      else wrong.push(`${name} = ${given.slice(0, 20)}`);
    }
    setting = wanted;
    if (wrong.length)
      remark = `The address of this page asks for ${list(wrong)}, which is ignored.`;
  };
  let timer;
  const toAddress = () => {
    clearTimeout(timer);
    // Not with every move: browsers limit how often a page may do this.
    timer = setTimeout(() => history.replaceState(null, "", `#${new URLSearchParams(/** @type {any} */ (setting))}`), 400);
  };

  // --- Controls ------------------------------------------------------------
  const text = fwlab.html("textarea", {
    class: "fw-text",
    rows: 3,
    maxlength: LETTERS,
    spellcheck: "false",
    autocomplete: "off",
  });
  const two = (x) => fwlab.number(x);
  const change = (news) => {
    remark = "";
    setting = { ...setting, ...news };
    update();
    toAddress();
  };
  text.addEventListener("input", () => change({ text: text.value }));
  const width = fwlab.slider(
    "Width",
    { min: 0, max: WIDTHS.length - 1, step: 1, value: 0, show: (i) => WIDTHS[i] },
    (i) => change({ width: WIDTHS[i] }),
  );
  const beta = fwlab.slider(
    "Write strength β",
    { min: 0, max: 1, step: 0.05, value: 0, show: two },
    (value) => change({ beta: value }),
  );
  const decay = fwlab.slider(
    "Decay of gated delta",
    { min: 0.5, max: 1, step: 0.01, value: 1, show: two },
    (value) => change({ decay: value }),
  );
  const show = () => {
    text.value = setting.text;
    width.value = WIDTHS.indexOf(setting.width);
    beta.value = setting.beta;
    decay.value = setting.decay;
  };
  const again = fwlab.button("New draw", () => change({ draw: setting.draw + 1 }));
  const presets = Object.entries(PRESETS).map(([name, preset]) =>
    fwlab.button(name, () => {
      change({ ...preset, draw: 1 });
      show();
    }),
  );
  const label = fwlab.html("label", { class: "fw-wide" }, "Pairs, or a text", text);
  figure.root.append(picture);
  figure.beside(
    fwlab.controls(...presets, again),
    fwlab.controls(label),
    fwlab.controls(beta, decay, width),
  );
  const begin = () => {
    clearTimeout(timer); // what was to become the address
    clearTimeout(rest);
    fromAddress();
    show();
    shown = compute();
    while (!complete()) add();
    tell();
  };
  addEventListener("hashchange", begin);
  begin();

  return {
    state: () => ({
      ...setting,
      pairs: shown.pairs,
      asked: shown.asked,
      keys: [...shown.keys],
      values: [...shown.values],
      memories: shown.found,
      means: shown.means,
      complete: complete(),
    }),
  };
});
