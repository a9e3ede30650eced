// @ts-check
// Fast weight puzzles: rows of numbers, typed by hand, that make one matrix do a
// job. What the puzzles are is in puzzles.toml, which docs/hooks/frames.py reads.
// @ts-expect-error: it is made when the figures are bundled
import puzzles from "fwlab-puzzles";
import * as fwlab from "./fwlab.js";
import { button, figure, html } from "./kit.js";

const SMALL = 0.01;
const LARGE = 100;
const MOST = 12; // steps that are drawn
const FIELDS = { key: "key", value: "value", beta: "β", query: "query" };
const KEPT = "fwlab.puzzles";

class Wrong extends Error {}

// --- The data ---------------------------------------------------------

const list = (text) => (text ? text.split(",").map(Number) : []);
const token = (text) => {
  const [written, expected] = text.split(":");
  const at = written.indexOf("=") + 1 || written.length;
  return {
    kind: written.slice(0, at),
    x: list(written.slice(at)),
    expected: expected === undefined ? null : list(expected),
  };
};
const PUZZLES = Object.fromEntries(
  Object.entries(puzzles).map(([name, puzzle]) => [
    name,
    {
      given: {},
      strength: 1,
      ...puzzle,
      name,
      rows: Object.fromEntries(
        Object.entries(puzzle.rows).map(([kind, fields]) => [kind, fields.split(" ")]),
      ),
      cases: puzzle.cases.map((text) => text.split(" ").map(token)),
    },
  ]),
);
const kindsOf = (puzzle) => [...new Set([...Object.keys(puzzle.rows), ...Object.keys(puzzle.given)])];

// --- Words ------------------------------------------------------------

const short = (n) => String(Number((Number(n.toFixed(4)) + 0).toPrecision(6)));
const shown = (numbers) => numbers.map(short).join(",");
const told = ({ kind, x }) => kind + shown(x);
const counted = (count, what) => `${count} ${what}${count > 1 ? "s" : ""}`;
/** @param {number[]} size */
const sized = ([steps, columns]) => `${counted(steps, "step")} × ${counted(columns, "column")}`;

// --- From what is typed to numbers ------------------------------------

// "0.5", "1/2", "√3", "-2√3/3", "1/√3"
const NUMBER = /^([-−]?)(\d*\.?\d*)(?:√(\d+\.?\d*))?(?:\/(√?)(\d+\.?\d*))?$/;
const number = (text, place) => {
  const parts = NUMBER.exec(text.replaceAll("sqrt", "√")) ?? [];
  const [found, sign, times, root, under, over] = parts;
  if (!found || !(/\d/.test(times) || root))
    throw new Wrong(`${place}: expected numbers such as 1, 0.5, 1/2 or √3, got ${text}.`);
  const [factor, square, below] = [times || 1, root ?? 1, over ?? 1].map(Number);
  const size = (factor * Math.sqrt(square)) / (under ? Math.sqrt(below) : below);
  if (!Number.isFinite(size) || (size && !(size >= SMALL && size <= LARGE)))
    throw new Wrong(`${place}: numbers are 0, or ${SMALL} to ${LARGE} in size; got ${text}.`);
  return sign ? -size : size;
};
const numbers = (text, place) =>
  text.trim().split(/[\s,;]+/).map((part) => number(part, place));

const blanks = (puzzle, rows) =>
  Object.keys(puzzle.rows).filter(
    (kind) => !(rows[kind] ?? []).some((row) => Object.values(row).some((text) => text?.trim())),
  );

// The steps of each kind of token: what is given, and what is typed as numbers.
const stepsOf = (puzzle, rows) => {
  const steps = {};
  let first = null; // whose length all keys and queries have
  for (const kind of kindsOf(puzzle)) {
    const wanted = puzzle.rows[kind] ?? [];
    const given = puzzle.given[kind];
    const typed = wanted.length ? rows[kind] : given.map(() => ({}));
    if (given && typed.length !== given.length)
      throw new Wrong(`${kind}: expected ${counted(given.length, "step")}, got ${typed.length}.`);
    if (typed.length > puzzle.limit[0])
      throw new Wrong(`${kind}: at most ${counted(puzzle.limit[0], "step")} for a token, got ${typed.length}.`);
    steps[kind] = typed.map((row, i) => {
      const last = i === typed.length - 1;
      const step = { times: 0, plus: Array(puzzle.numbers).fill(0), beta: 1, ...given?.[i] };
      const text = (field) => (wanted.includes(field) ? row[field]?.trim() : "");
      if (text("query") && !last) throw new Wrong(`${kind}: the query belongs into the last row.`);
      for (const field of wanted)
        if (!text(field) && (field === "query" ? last : !wanted.includes("key")))
          throw new Wrong(`${kind}: expected a ${field}.`);
      for (const field of ["key", "query"]) {
        if (text(field)) step[field] = numbers(text(field), `${kind}, ${field}`);
        if (!step[field]) continue;
        const here = `the ${field} of ${kind}`;
        first ??= [here, step[field].length];
        if (step[field].length !== first[1])
          throw new Wrong(
            `All keys and queries need the same length: ${first[0]} has ${first[1]}, ` +
              `${here} has ${step[field].length}.`,
          );
      }
      const value = text("value") || (step.value === undefined ? "" : String(step.value));
      if (/^[-−]?x$/.test(value)) {
        if (!kind.endsWith("="))
          throw new Wrong(`${kind}: no number comes with this token, so there is no x.`);
        step.times = value === "x" ? 1 : -1;
      } else if (value) {
        const all = numbers(value, `${kind}, value`);
        step.plus = all.length === 1 ? Array(puzzle.numbers).fill(all[0]) : all;
        if (step.plus.length !== puzzle.numbers)
          throw new Wrong(`${kind}: expected ${puzzle.numbers} numbers as the value.`);
      }
      if (text("beta")) {
        const all = numbers(text("beta"), `${kind}, β`);
        if (all.length > 1) throw new Wrong(`${kind}: expected one number as β.`);
        step.beta = all[0];
      }
      return step;
    });
  }
  if (!first) throw new Wrong("Expected at least one key.");
  if (first[1] > puzzle.limit[1])
    throw new Wrong(`At most ${counted(puzzle.limit[1], "column")}, got ${first[1]}.`);
  for (const [kind, all] of Object.entries(steps))
    for (const step of all) {
      step.key ??= Array(first[1]).fill(0);
      step.query ??= Array(first[1]).fill(0);
      const strength = step.beta * fwlab.dot(step.key, step.key);
      if (puzzle.rule === "delta" && !(step.beta >= 0 && strength <= puzzle.strength + 1e-9))
        throw new Wrong(
          `${kind}: expected β · |key|² from 0 to ${puzzle.strength}, got ${short(strength)}.`,
        );
    }
  return { steps, columns: first[1] };
};

// --- Running them -----------------------------------------------------

const near = (found, expected) =>
  expected === null ||
  found.every((a, i) => Math.abs(a - expected[i]) <= 1e-8 * (1 + Math.abs(expected[i])));

// Every step of a sequence: its token, the matrix after it, and what is read.
const run = (puzzle, steps, columns, tokens) => {
  let W = Array.from({ length: puzzle.numbers }, () => Array(columns).fill(0));
  return tokens.flatMap((of) =>
    steps[of.kind].map((step, i, all) => {
      const value = step.plus.map((plus, j) => plus + step.times * (of.x[j] ?? 0));
      const rule = puzzle.rule === "delta" ? fwlab.rules.delta(step.beta) : fwlab.rules.sum();
      W = fwlab.write(W, step.key, value, rule);
      return { token: of, step: i + 1, of: all.length, W, read: fwlab.read(W, step.query) };
    }),
  );
};

const judge = (name, rows) => {
  const puzzle = PUZZLES[name];
  const verdict = { right: false, size: null, case: null, frames: null };
  const blank = blanks(puzzle, rows);
  if (blank.length) return { ...verdict, says: `Still blank: ${blank.join(", ")}.` };
  try {
    const { steps, columns } = stepsOf(puzzle, rows);
    const size = [Math.max(...Object.values(steps).map((all) => all.length)), columns];
    for (const [n, tokens] of puzzle.cases.entries()) {
      const frames = run(puzzle, steps, columns, tokens);
      const at = frames.findIndex(
        ({ token: { expected }, step, of, read }) => step === of && !near(read, expected),
      );
      if (at < 0) continue;
      const before = frames.slice(0, at + 1);
      const { token: of, read } = frames[at];
      const came = before.filter(({ step }) => step === 1).map((frame) => told(frame.token));
      const says =
        `✗ Wrong in the sequence ${came.join(" ")}: the last reading is ${shown(read)}, ` +
        `expected ${shown(of.expected)}.`;
      return { ...verdict, size, case: n, frames: before, says };
    }
    const [score, best] = [size, puzzle.best].map(([a, b]) => a * b);
    const end =
      score > best
        ? `A smaller one is known: ${sized(puzzle.best)}, score ${best}.`
        : `Nothing smaller exists: ${puzzle.why}.`;
    const says = `✓ Right in all ${puzzle.cases.length} sequences: ${sized(size)}, score ${score}. ${end}`;
    const frames = run(puzzle, steps, columns, puzzle.cases[0]);
    return { right: true, size, case: null, frames, says, smallest: score <= best };
  } catch (error) {
    if (!(error instanceof Wrong)) throw error;
    return { ...verdict, says: `✗ ${error.message}` };
  }
};

// --- What is typed ------------------------------------------------------

const names = Object.keys(PUZZLES);
const [first] = names;
const empty = (puzzle) =>
  Object.fromEntries(
    Object.keys(puzzle.rows).map((kind) => [kind, (puzzle.given[kind] ?? [{}]).map(() => ({}))]),
  );
// It stays in this browser. The first puzzle begins as an example.
const answers = Object.fromEntries(Object.entries(PUZZLES).map(([n, p]) => [n, empty(p)]));
for (const [kind, rows] of Object.entries(PUZZLES[first].answer))
  answers[first][kind] = rows.map(({ key, value, beta, query }) => ({
    key: key?.join(" "), value, beta: beta && String(beta), query: query?.join(" "),
  }));
try {
  const kept = JSON.parse(localStorage.getItem(KEPT)) ?? {};
  for (const [n, rows] of Object.entries(kept))
    if (n !== first && n in PUZZLES)
      for (const kind of Object.keys(answers[n])) answers[n][kind] = rows[kind] ?? answers[n][kind];
} catch {
  // This browser keeps nothing, or nothing that can be read.
}
const keep = () => {
  try {
    localStorage.setItem(KEPT, JSON.stringify(answers));
  } catch {
    // Then it is kept until the page is left.
  }
};
const verdicts = Object.fromEntries(names.map((n) => [n, judge(n, answers[n])]));

// --- What is drawn: the matrix after each step, and what is read -----------

const cell = (n, limit) =>
  n === null
    ? html`<i>?</i>`
    : html`<i style=${`background: ${fwlab.signed((0.45 * n) / limit)}`}>${short(n)}</i>`;
const drawn = ({ token: of, step, of: all, W, read }, limit) => {
  const numbers = W.map((row) => row.map((n) => (n === null ? "?" : short(n))).join(" "));
  const asked = step === all && of.expected !== null;
  const right = asked && read && near(read, of.expected);
  const said = !read
    ? `→ ${shown(of.expected ?? [])}`
    : right
      ? `✓ ${shown(read)}`
      : `✗ ${shown(read)},\nexpected ${shown(of.expected ?? [])}`;
  return html`<div role="listitem"><b>${told(of)}${all > 1 ? ` ${step}/${all}` : ""}</b>
    <span class="fw-grid" role="img" aria-label=${`W: ${numbers.join("; ")}`}
      style=${`grid-template-columns: repeat(${W[0].length}, 1fr)`}>${W.flat().map((n) => cell(n, limit))}</span>
    ${asked ? html`<em class=${read && !right ? "fw-wrong" : ""}>${said}</em>` : ""}</div>`;
};
const tape = (puzzle, verdict) => {
  const unknown = Array.from({ length: puzzle.numbers }, () => Array(puzzle.best[1]).fill(null));
  const waiting = puzzle.cases[0].map((of) => ({ token: of, step: 1, of: 1, W: unknown }));
  const all = verdict.frames ?? waiting;
  const frames = all.slice(-MOST);
  const limit = Math.max(1e-3, ...frames.flatMap(({ W }) => W.flat().map(Math.abs)));
  const which = verdict.case === null ? "An example" : "The first sequence that fails";
  return html`<small>${which}${all.length > MOST ? `, its last ${MOST} steps:` : ":"}</small>
    <div class="fw-tape" role="list">${frames.map((frame) => drawn(frame, limit))}</div>`;
};

// The rows of a kind of token: what is given, and what is to be typed.
const rowsOf = (puzzle, kind, columns, change) => {
  const wanted = puzzle.rows[kind] ?? [];
  const given = puzzle.given[kind];
  const rows = wanted.length ? answers[puzzle.name][kind] : given;
  const many = rows.length > 1;
  const field = (f, row, i) => {
    const there = given?.[i]?.[f];
    if (there !== undefined) return html`<span>${[there].flat().join(" ")}</span>`;
    if (!wanted.includes(f) || (f === "query" && i < rows.length - 1)) return html`<span></span>`;
    const typed = (e) => change(() => (row[f] = e.target.value));
    return html`<input type="text" class="fw-text" autocapitalize="off" autocomplete="off"
      spellcheck="false" aria-label=${`${kind}${many ? `, step ${i + 1}` : ""}: ${FIELDS[f]}`}
      .value=${row[f] ?? ""} @input=${typed}>`;
  };
  const steps = (make) => (e) => {
    change(() => (answers[puzzle.name][kind] = make(rows)));
    e.target.closest(".fw-rows").querySelector(`[aria-label^="${kind}"]`).focus();
  };
  // The query stays with the last row.
  const more = steps((all) => {
    const { query } = all.at(-1);
    return [...all.slice(0, -1), { ...all.at(-1), query: "" }, { query }];
  });
  const less = steps((all) => {
    const kept = all.slice(0, -1);
    return [...kept.slice(0, -1), { ...kept.at(-1), query: all.at(-1).query }];
  });
  const fixed = !wanted.length || given || puzzle.limit[0] < 2 || wanted[0] === "query";
  return html`${rows.map(
    (row, i) => html`<span>${i ? "" : html`<code>${kind}</code>`}${many ? html`<small> ${i + 1}</small>` : ""}</span>
      ${columns.map((f) => field(f, row, i))}`,
  )}${
    fixed
      ? ""
      : html`<div class="fw-controls">
      ${button("+ step", more, { label: `${kind}: one more step`, disabled: rows.length >= puzzle.limit[0] })}
      ${button("− step", less, { label: `${kind}: one step less`, disabled: rows.length < 2 })}</div>`
  }`;
};

figure("puzzles", {
  state: { name: first, hints: 0 },
  compute: ({ name }) => {
    verdicts[name] = judge(name, answers[name]);
    const solved = names.filter((n) => verdicts[n].right);
    return { rows: answers[name], solved, ...verdicts[name] };
  },
  view: ({ name }, verdict) => {
    const puzzle = PUZZLES[name];
    return html`<div class="fw-main fw-puzzle" role="region" tabindex="0"
      aria-label="The puzzle, and its matrix step by step">
      <p><strong>${puzzle.title}</strong><br>${puzzle.task}</p>
      <div>${tape(puzzle, verdict)}</div></div>`;
  },
  controls: ({ name, hints }, _, set) => {
    const puzzle = PUZZLES[name];
    const show = (name) => set({ name, hints: 0 });
    const change = (make) => {
      make();
      keep();
      set({});
    };
    const option = (n, i) => {
      const { right, smallest } = verdicts[n];
      const sign = n !== first && right ? (smallest ? "★ " : "✓ ") : "";
      return html`<option value=${n} .selected=${n === name}>${i}. ${sign}${PUZZLES[n].title}</option>`;
    };
    const columns = Object.keys(FIELDS).filter((f) =>
      Object.values(puzzle.rows).some((fields) => fields.includes(f)),
    );
    const left = puzzle.hints.length - hints;
    const rule =
      puzzle.rule === "delta"
        ? `Delta rule, β · |key|² up to ${puzzle.strength}`
        : "Sum rule, no strengths";
    return html`<div class="fw-controls"><label class="fw-wide">Puzzle<select class="fw-text"
        aria-label="Puzzle" @change=${(e) => show(e.target.value)}>${names.map(option)}</select></label></div>
      <p class="fw-note">${rule}; at most ${counted(puzzle.limit[0], "step")} for a token,
        ${counted(puzzle.limit[1], "column")}. Left empty, a value is 0 and β is 1.</p>
      <div class="fw-rows" style=${`--fields: ${columns.length}`}><b></b>${columns.map(
        (f) => html`<b>${FIELDS[f]}</b>`,
      )}${kindsOf(puzzle).map((kind) => rowsOf(puzzle, kind, columns, change))}</div>
      <div class="fw-controls">${button(`Hint (${left} left)`, () => set({ hints: hints + 1 }), { disabled: !left })}
        ${button("Clear", () => {
          change(() => (answers[name] = empty(puzzle)));
          show(name);
        })}
        ${button("Next puzzle", () => show(names[(names.indexOf(name) + 1) % names.length]))}</div>
      <p class="fw-note" role="status">${puzzle.hints.slice(0, hints).join(" ")}</p>`;
  },
  say: (_, { says }) => says,
  judge,
});
