// @ts-check
// Fast weight puzzles: rows of numbers, typed by hand, that make one matrix do a job.
// What the puzzles are is in puzzles.toml, which docs/hooks/frames.py reads; the rules
// are texts of the rule editor, and so is what is typed.
// @ts-expect-error: it is made when the figures are bundled
import puzzles from "fwlab-puzzles";
import { compile, number, value, vector } from "./blackboard.js";
import { dot } from "./algebra.js";
import { button, figure, html, nothing } from "./kit.js";
import rules from "./rules.json";
import { signed } from "./words.js";

const [SMALL, LARGE] = [0.01, 100];
const MOST = 12; // steps that are drawn
const FIELDS = { key: "key", value: "value", beta: "β", query: "query" };
const EQUATIONS = {
  delta: "W ← W + β (v − W k) ⊗ k, then y = W q",
  sum: "W ← W + v ⊗ k, then y = W q",
};
const KEPT = "fwlab.puzzles";

class Wrong extends Error {}

const step = (name) =>
  compile(rules.find((rule) => rule.name === name).text, ["W", "k", "v", "beta"]);
const STEPS = { delta: step("delta"), sum: step("sum") };
const list = (text) => (text ? text.split(",").map(Number) : []);
const token = (text) => {
  const [written, expected] = text.split(":");
  const at = written.indexOf("=") + 1 || written.length;
  const wanted = expected === undefined ? null : list(expected);
  return { kind: written.slice(0, at), x: list(written.slice(at)), expected: wanted };
};
const each = (object, make) =>
  Object.fromEntries(Object.entries(object).map(([name, x]) => [name, make(x, name)]));
const PUZZLES = each(puzzles, (puzzle, name) => ({
  given: {},
  strength: 1,
  ...puzzle,
  name,
  rows: each(puzzle.rows, (fields) => fields.split(" ")),
  cases: puzzle.cases.map((text) => text.split(" ").map(token)),
}));
const names = Object.keys(PUZZLES);
const [first] = names;
const kindsOf = ({ rows, given }) => [...new Set([...Object.keys(rows), ...Object.keys(given)])];

// --- Words ------------------------------------------------------------

const short = (n) => String(Number((Number(n.toFixed(4)) + 0).toPrecision(6)));
const shown = (numbers) => Array.from(numbers, short).join(",");
const told = ({ kind, x }) => kind + shown(x);
const counted = (count, what) => `${count} ${what}${count > 1 ? "s" : ""}`;
/** @param {number[]} size */
const sized = ([steps, columns]) => `${counted(steps, "step")} × ${counted(columns, "column")}`;

// --- From what is typed to steps --------------------------------------

/** Read "0.5", "1/2", "2√3/3" or "-x", which `given` has: a function of `given`. */
const expression = (text, given, place) => {
  const more = place.endsWith("value") ? ", or an expression of x" : "";
  const plain = text
    .replaceAll("−", "-")
    .replace(/([\d.]*)√([\d.]+)/g, (_, times, root) => `(${times || 1} * sqrt(${root}))`);
  const all = Object.keys(given);
  try {
    const f = compile(`def step(${all}):\n    return (${plain}) + 0 * W`, all);
    f(given);
    return f;
  } catch {
    throw new Wrong(`${place}: expected numbers such as 1, 0.5, 1/2 or √3${more}, got ${text}.`);
  }
};
const numbers = (text, place) =>
  text.split(/[\s,;]+/).map((part) => {
    const given = { W: number(0) };
    if (/\bW\b/.test(part)) throw new Wrong(`${place}: expected numbers, got ${part}.`);
    const [x] = expression(part, given, place)(given).data;
    const size = Math.abs(x);
    if (x !== 0 && !(size >= SMALL && size <= LARGE))
      throw new Wrong(`${place}: numbers are 0, or ${SMALL} to ${LARGE} in size; got ${part}.`);
    return x;
  });

/** What a step writes, as a function of the numbers of its token. */
const written = (text, kind, puzzle) => {
  const place = `${kind}, value`;
  const W = vector(Array(puzzle.numbers).fill(0));
  if (!/\bx\b/.test(text)) {
    const all = numbers(text, place);
    if (![1, puzzle.numbers].includes(all.length))
      throw new Wrong(`${kind}: expected ${puzzle.numbers} numbers as the value.`);
    return () => vector(W.data.map((_, i) => all[i % all.length]));
  }
  if (!kind.endsWith("="))
    throw new Wrong(`${kind}: no number comes with this token, so there is no x.`);
  const f = expression(text, { W, x: W }, place);
  return (x) => f({ W, x: vector(x) });
};

/** Read the steps of one kind of token, and which of its fields are still blank. */
const stepsOf = (puzzle, kind, typed) => {
  const [wanted, given] = [puzzle.rows[kind] ?? [], puzzle.given[kind]];
  const filled = (row) => wanted.some((field) => row[field]?.trim());
  const rows = given?.map((_, i) => typed[kind]?.[i] ?? {}) ?? typed[kind].filter(filled);
  if (wanted.length && !rows.some(filled)) return { steps: null, blank: [kind] };
  const blank = [];
  const query = rows.find((row) => row.query?.trim());
  const steps = rows.map((row, i) => {
    const last = i === rows.length - 1;
    const own = { beta: [1], ...given?.[i] };
    for (const field of wanted) {
      const from = field !== "query" ? row : last ? query : null;
      const text = (from?.[field] ?? "").trim();
      if (text) own[field] = field === "value" ? text : numbers(text, `${kind}, ${FIELDS[field]}`);
      else if (field === "query" ? last : !wanted.includes("key")) blank.push(field);
    }
    const [beta, ...more] = [own.beta].flat();
    if (more.length) throw new Wrong(`${kind}: expected one number as β.`);
    const strength = own.key ? beta * dot(own.key, own.key) : 0;
    if (puzzle.rule === "delta" && !(beta >= 0 && strength <= puzzle.strength + 1e-9))
      throw new Wrong(`${kind}: expected β · |key|² from 0 to ${puzzle.strength}, got ${short(strength)}.`);
    return { ...own, beta, put: written(String(own.value ?? 0), kind, puzzle), keeps: 1 - strength };
  });
  return { steps, blank: blank.map((field) => `the ${FIELDS[field]} of ${kind}`) };
};

/** Read all rows: a kind of token that is blank, or cannot be read, has no steps. */
const read = (puzzle, typed) => {
  const [steps, blank, faults] = [{}, [], []];
  for (const kind of kindsOf(puzzle))
    try {
      const found = stepsOf(puzzle, kind, typed);
      steps[kind] = found.steps;
      blank.push(...found.blank);
    } catch (error) {
      if (!(error instanceof Wrong)) throw error;
      faults.push(error.message);
    }
  const vectors = Object.values(steps).flatMap((all) => all ?? []).flatMap(({ key, query }) => [key, query]);
  const [columns = puzzle.best[1], ...other] = new Set(vectors.filter(Boolean).map((x) => x.length));
  const most = puzzle.limit[1];
  if (other.length)
    faults.push(`All keys and queries need the same length; there are ${[columns, ...other].join(" and ")}.`);
  else if (columns > most) faults.push(`At most ${counted(most, "column")}, got ${columns}.`);
  return { steps: other.length ? {} : steps, blank, faults, columns };
};

// --- Running them -----------------------------------------------------

const near = (found, expected) =>
  found.every((a, i) => Math.abs(a - expected[i]) <= 1e-8 * (1 + Math.abs(expected[i])));
const rowsOfW = ({ shape: [rows, columns], data }) =>
  Array.from({ length: rows }, (_, i) => Array.from(data.slice(i * columns, (i + 1) * columns)));
const reading = (W, query) => rowsOfW(W).map((row) => dot(row, query));

/** Run tokens: each step with the matrix after it, and what is read. */
const run = (puzzle, { steps, columns }, tokens) => {
  let W = value([puzzle.numbers, columns], new Float64Array(puzzle.numbers * columns));
  let sure = true; // that no token was blank
  return tokens.flatMap((of) => {
    sure &&= Boolean(steps[of.kind]);
    return (steps[of.kind] ?? [{}]).map(({ key, beta, put, query }, i, all) => {
      if (key) W = STEPS[puzzle.rule]({ W, k: vector(key), v: put(of.x), beta: number(beta) });
      const asked = i === all.length - 1 && of.expected !== null;
      const y = asked && query && reading(W, query);
      const right = asked && sure && y ? near(y, of.expected) : null;
      return { token: of, step: i + 1, of: all.length, W, query, asked, y, right };
    });
  });
};

/** An answer as if it were typed. */
const typed = (answer) =>
  each(answer, (rows) => rows.map((row) => each(row, (x) => [x].flat().join(" "))));

/**
 * Say which idea fails. A query that only reads has to read at all times what that of
 * the known answer reads; the first token after which it does not is where it fails.
 */
const idea = (puzzle, steps, frames) => {
  const ends = frames.filter(({ step, of }) => step === of);
  const { token: asked, query } = ends.at(-1);
  const answer = read(puzzle, typed(puzzle.answer));
  const known = run(puzzle, answer, ends.map(({ token }) => token)).filter(({ step, of }) => step === of);
  const [ours, theirs] = [ends, known].map((all) => all.map(({ W }) => reading(W, all.at(-1).query)));
  const none = Array(puzzle.numbers).fill(0);
  const before = (all, i) => all[i - 1] ?? none;
  const reads = answer.steps[asked.kind].every(({ key }) => !key);
  const apart = reads ? ours.findIndex((y, i) => !near(y, theirs[i])) : -1;
  const at = apart < 0 ? ends.length - 1 : apart;
  const { token: now } = ends[at];
  const [was, is] = [before(ours, at), ours[at]];
  const keys = (kind) => (steps[kind] ?? []).flatMap(({ key }) => (key ? [key] : []));
  const product = keys(now.kind).map((key) => dot(key, query)).find((x) => x) ?? 0;
  const of = reads ? `the query of ${asked.kind}` : "its query";
  if (reads && near(before(theirs, at), theirs[at])) {
    const changes = (i) => !near(before(theirs, i), theirs[i]);
    const writer = ends.map(({ token }) => token.kind).findLast((_, i) => i < at && changes(i));
    const along = (a, b) => dot(a, b) ** 2 > 0.999999 * dot(a, a) * dot(b, b);
    const same = keys(now.kind).some((a) => keys(writer).some((b) => along(a, b)));
    if (same && writer !== now.kind)
      return `${writer} and ${now.kind} share a key: what one writes takes the place of the other’s.`;
    return `${told(now)} should leave it alone: its key and ${of} overlap, with a product of ${short(product)}.`;
  }
  if (near(was, is) && !keys(now.kind).length) return `${told(now)} has no key, so it writes nothing.`;
  if (near(was, is))
    return product
      ? `${told(now)} changes nothing: its key holds that value already, or β is 0.`
      : `What ${told(now)} writes is not read: its key and ${of} are orthogonal.`;
  const wanted = reads ? theirs[at] : asked.expected;
  const moves = `${told(now)} takes it from ${shown(was)} to ${shown(is)}, not to ${shown(wanted)}`;
  const [{ keeps }, ...more] = steps[now.kind].filter(({ key }) => key);
  if (more.length || puzzle.rule === "sum") return `${moves}.`;
  return `${moves}; of what its key held, ${short(keeps)} stays (1 − β · |key|²).`;
};

const judge = (name, rows) => {
  const puzzle = PUZZLES[name];
  const { steps, blank, faults, columns } = read(puzzle, rows);
  const runs = puzzle.cases.map((tokens) => run(puzzle, { steps, columns }, tokens));
  const open = { right: false, size: null, frames: runs[0] };
  if (faults.length) return { ...open, says: `✗ ${faults[0]}` };
  if (blank.length) return { ...open, says: `Still blank: ${blank.join(", ")}.` };
  const size = [Math.max(...Object.values(steps).map((all) => all.length)), columns];
  for (const all of runs) {
    const at = all.findIndex(({ right }) => right === false);
    if (at < 0) continue;
    const frames = all.slice(0, at + 1);
    const { token: of, y } = frames[at];
    const came = frames.filter(({ step }) => step === 1).map(({ token }) => told(token)).join(" ");
    const says =
      `✗ Wrong in the sequence ${came}: the last reading is ${shown(y)}, expected ` +
      `${shown(of.expected)}. ${idea(puzzle, steps, frames)}`;
    return { ...open, size, frames, fails: true, says };
  }
  const [score, best] = [size, puzzle.best].map(([a, b]) => a * b);
  const end =
    score > best
      ? `A smaller one is known: ${sized(puzzle.best)}, score ${best}.`
      : `Nothing smaller exists: ${puzzle.why}.`;
  const says = `✓ Right in all ${runs.length} sequences: ${sized(size)}, score ${score}. ${end}`;
  return { ...open, right: true, size, says, smallest: score <= best };
};

// --- What is typed ------------------------------------------------------

// It stays in this browser. The first puzzle begins as an example.
const empty = ({ rows }) => each(rows, () => []);
const answers = each(PUZZLES, empty);
answers[first] = typed(PUZZLES[first].answer);
try {
  const kept = JSON.parse(localStorage.getItem(KEPT)) ?? {};
  for (const name of names.slice(1).filter((name) => name in kept))
    answers[name] = each(answers[name], (rows, kind) => kept[name][kind] ?? rows);
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
const verdicts = each(PUZZLES, (_, name) => judge(name, answers[name]));

// --- What is drawn ------------------------------------------------------

/** The matrix after a step, and what is read. */
const drawn = ({ token: of, step, of: all, W, asked, y, right }, limit) => {
  const numbers = rowsOfW(W).map((row) => row.map(short).join(" "));
  const expected = asked && shown(of.expected);
  const sign = right ? "✓ " : right === false ? "✗ " : "";
  const said = y ? `${sign}${shown(y)}${sign === "✗ " ? `,\nexpected ${expected}` : ""}` : `→ ${expected}`;
  return html`<div role="listitem"><b>${told(of)}${all > 1 ? ` ${step}/${all}` : ""}</b>
    <span class="fw-grid" role="img" aria-label=${`W: ${numbers.join("; ")}`}
      style=${`grid-template-columns: repeat(${W.shape[1]}, 1fr)`}>${Array.from(
        W.data,
        (n) => html`<i style=${`background: ${signed((0.45 * n) / limit)}`}>${short(n)}</i>`,
      )}</span>${asked ? html`<em class=${right === false ? "fw-wrong" : ""}>${said}</em>` : nothing}</div>`;
};

/**
 * The rows of a kind of token: what is given, and what is to be typed. Below the rows
 * that are used there is one for a further step; a query comes after all steps.
 */
const rowsOf = (puzzle, kind, columns, change) => {
  const [wanted, given] = [puzzle.rows[kind] ?? [], puzzle.given[kind]];
  const rows = (answers[puzzle.name][kind] ??= []);
  const used = rows.findLastIndex((row) => row.key || row.value || row.beta) + 1;
  const most = wanted[0] === "query" ? 1 : Math.min(used + 1, puzzle.limit[0]);
  const count = given?.length ?? Math.max(most, 1);
  const asks = rows.find((row) => row.query) ?? (rows[0] ??= {});
  return Array.from({ length: count }, (_, i) => {
    const field = (f) => {
      const there = given?.[i]?.[f];
      if (there !== undefined) return html`<span>${[there].flat().join(" ")}</span>`;
      if (!wanted.includes(f) || (f === "query" && i < count - 1)) return html`<span></span>`;
      const row = f === "query" ? asks : (rows[i] ??= {});
      return html`<input type="text" class="fw-text" autocapitalize="off" autocomplete="off"
        spellcheck="false" aria-label=${`${kind}${count > 1 ? `, step ${i + 1}` : ""}: ${FIELDS[f]}`}
        .value=${row[f] ?? ""} @input=${(e) => change(() => (row[f] = e.target.value))}>`;
    };
    return html`<span>${i ? "" : html`<code>${kind}</code>`}${count > 1 ? html`<small> ${i + 1}</small>` : ""}</span>
      ${columns.map(field)}`;
  });
};

export default figure("puzzles", {
  state: { name: first, hints: 0 },
  compute: ({ name }) => {
    verdicts[name] = judge(name, answers[name]);
    const solved = names.filter((n) => verdicts[n].right);
    return { rows: answers[name], solved, ...verdicts[name] };
  },
  view: ({ name }, { frames: all, fails }, set) => {
    const { title, task, rule } = PUZZLES[name];
    const frames = all.slice(-MOST);
    const limit = Math.max(1e-3, ...frames.flatMap(({ W }) => Array.from(W.data, Math.abs)));
    const tile = (n, i) => {
      const sign = n !== first && verdicts[n].right ? (verdicts[n].smallest ? " ★" : " ✓") : "";
      return html`<button type="button" class="fw-button" aria-pressed=${n === name}
        @click=${() => set({ name: n, hints: 0 })}><b>${i}${sign}</b> ${PUZZLES[n].title}</button>`;
    };
    return html`<div class="fw-controls fw-tiles" role="group" aria-label="Puzzles">${names.map(tile)}</div>
      <div class="fw-main fw-puzzle" role="region" tabindex="0" aria-label="The puzzle, and its matrix step by step">
      <p><strong>${title}</strong><br>${task}</p><p>${EQUATIONS[rule]}</p>
      <div><small>${fails ? "The first sequence that fails" : "An example"}${all.length > MOST ? `, its last ${MOST} steps:` : ":"}</small>
        <div class="fw-tape" role="list">${frames.map((frame) => drawn(frame, limit))}</div></div></div>`;
  },
  controls: ({ name, hints }, _, set) => {
    const puzzle = PUZZLES[name];
    const change = (make) => {
      make();
      keep();
      set({});
    };
    const clear = () => change(() => (answers[name] = empty(puzzle)));
    const columns = Object.keys(FIELDS).filter((f) => Object.values(puzzle.rows).flat().includes(f));
    const left = puzzle.hints.length - hints;
    const most = puzzle.rule === "delta" ? `β · |key|² up to ${puzzle.strength}; at` : "No strengths; at";
    return html`<p class="fw-note">${most} most ${counted(puzzle.limit[0], "step")} for a token,
        ${counted(puzzle.limit[1], "column")}. Left empty, a value is 0 and β is 1.</p>
      <div class="fw-rows" style=${`--fields: ${columns.length}`}><b></b>${columns.map(
        (f) => html`<b>${FIELDS[f]}</b>`,
      )}${kindsOf(puzzle).map((kind) => rowsOf(puzzle, kind, columns, change))}</div>
      <div class="fw-controls">${button(`Hint (${left} left)`, () => set({ hints: hints + 1 }), { disabled: !left })}
        ${button("Clear", clear)}</div>
      <p class="fw-note" role="status">${puzzle.hints.slice(0, hints).join(" ")}</p>`;
  },
  say: (_, { says }) => says,
  judge: (name, answer) => judge(name, typed(answer)),
});
