// @ts-check
// A fast weight memory that is a 2 x 2 matrix: write pairs of a key and a
// value by three rules, and see what each stored key reads back.
import { dot, read, rules, towards, write } from "./algebra.js";
import { number, vector } from "./words.js";
import { button, choice, figure, handle, html, line, slider, svg, table } from "./kit.js";
import { FAST, NEW, WRONG, distance, keys, letter, mark, shape, through, values } from "./plane.js";

const NAMES = ["A", "B", "C", "D", "E"];
const RULES = { sum: "Sum rule", gated: "Gated rule", delta: "Delta rule" };
const LIMIT = 1.5; // of a new value
const pair = (degrees, value) => ({ degrees, value });
const ORTHOGONAL = [pair(20, [0.9, 0.8]), pair(110, [-1, 0.5])];
const CLOSE = [pair(40, [0.9, 0.8]), pair(65, [-1, 0.5])];
// What is written, and what is not yet.
const PRESETS = {
  "Two orthogonal keys": { pairs: ORTHOGONAL, next: pair(155, [0.6, -1]) },
  "Two close keys": { pairs: CLOSE, next: pair(140, [0.6, -1]) },
  "Overwrite a key": { pairs: ORTHOGONAL, next: pair(20, [0.6, -1]) },
};
const state = { rule: "delta", beta: 1, ...PRESETS["Two close keys"] };

// --- The memory --------------------------------------------------------------------
// All writes once more, in their order, since any key may have moved.
const compute = ({ rule, beta, pairs, next }) => {
  const empty = [[0, 0], [0, 0]];
  const memories = [empty];
  for (const { degrees, value } of pairs)
    memories.push(write(memories.at(-1), towards(degrees), value, rules[rule](beta)));
  const [before, W] = [empty, ...memories].slice(-2);
  const ask = (one) => {
    const key = towards(one.degrees);
    const readback = read(W, key);
    return { ...one, key, readback, error: distance(readback, one.value), before: read(before, key) };
  };
  // A key that came again is no longer asked for its old value.
  const asked = pairs.map((one, j) => {
    const last = pairs.findLastIndex(({ degrees }) => degrees === one.degrees);
    return { name: NAMES[j], ...ask(one), replacedBy: last > j ? NAMES[last] : null };
  });
  const reach = Math.max(...[W, before].flat().map((row) => Math.hypot(...row)));
  const range = [2, 3, 4, 6, 8].find((size) => reach <= 0.95 * size) ?? 8;
  return { W, pairs: asked, next: ask(next), range };
};

// --- The picture -------------------------------------------------------------------
const CENTRE = [101, 124];
const [RADIUS, RING] = [62, 86];
const BOX = { x: 201, y: 28, size: 186 };
const DASHED = `stroke: ${NEW}; stroke-width: 2; stroke-dasharray: 4 2.3`;
const { circle, at: keyAt } = keys(CENTRE, RADIUS);
const turned = (degrees) => ((Math.round(degrees) % 360) + 360) % 360;
const between = (a, b) => {
  const turn = Math.abs(a - b) % 360;
  return Math.min(turn, 360 - turn);
};
// Adding 0 turns −0 into 0.
const tenths = (x) => Math.round(10 * Math.max(-LIMIT, Math.min(LIMIT, x))) / 10 + 0;

// A key that can be turned: to where it is dragged, or by 5° to where an arrow points,
// where it stays.
const turnable = (label, name, now, degrees, radius, turn, body) =>
  handle(
    label,
    { name, at: keyAt(towards(degrees), radius), now: degrees, told: `${degrees} degrees`, range: [0, 359], reach: 18 },
    {
      move: (x, y) => turn(turned((Math.atan2(CENTRE[1] - y, x - CENTRE[0]) * 180) / Math.PI)),
      nudge: (right, up) => {
        const aim = right ? 90 - 90 * right : 180 - 90 * up;
        const way = ((aim - now() + 540) % 360) - 180;
        turn(turned(now() + Math.max(-5, Math.min(5, way))));
      },
    },
    body,
  );
// Of keys at nearly the same angle, each handle is further in than the one before.
const levels = (pairs) => {
  const found = [];
  pairs.forEach(({ degrees }, j) => {
    const taken = found.filter((_, i) => between(pairs[i].degrees, degrees) < 23);
    found[j] = [0, 1, 2].find((level) => !taken.includes(level)) ?? 2;
  });
  return found;
};

const picture = (_, { W, pairs, next, range }, set) => {
  const { at, drawn, valueAt } = values(BOX, range);
  const inwards = levels(pairs);
  const turn = (j) => (degrees) =>
    set({ pairs: state.pairs.map((one, i) => (i === j ? { ...one, degrees } : one)) });
  // The new key catches on a stored one, so that it can be the same.
  const turnNew = (degrees) => {
    const near = state.pairs.find((one) => between(one.degrees, degrees) <= 4);
    set({ next: { ...state.next, degrees: near ? near.degrees : degrees } });
  };
  const move = (value) => set({ next: { ...state.next, value: value.map(tenths) } });
  const stored = ({ name, degrees }, j) =>
    turnable(`Key ${name}`, name, () => state.pairs[j].degrees, degrees, RADIUS - 24 * inwards[j], turn(j),
      svg`${shape(j, 11, "fill: var(--md-default-bg-color); stroke-width: 1.5")}${letter(name)}`);
  const [right, up] = next.value.map((x) => number(x, 1));
  const readings = pairs.map(({ readback }) => at(readback));
  const written = ({ name, value, readback, before, replacedBy }, j) => {
    const place = at(value);
    // Pairs with one value have their letters below each other.
    const same = pairs.slice(0, j).filter((other) => distance(other.value, value) === 0).length;
    return mark(name, j, {
      place,
      label: [place[0], place[1] + 14 * same],
      others: readings,
      old: replacedBy !== null,
      ...(replacedBy === null && { read: at(readback), error: true, before: at(before), trail: true }),
    });
  };
  const outline = Array.from({ length: 60 }, (_, n) => at(read(W, towards(6 * n))));
  return html`<svg viewBox="0 0 388 228" role="group"
    aria-label="Keys on a circle, values in a plane: the new pair, the written ones, and what is read">
    <text y="14" font-weight="600">Keys, of length 1</text><text x=${BOX.x} y="14" font-weight="600">Values, read back</text>
    ${circle}${line(through(CENTRE, keyAt(next.key, RING - 12)), `stroke: ${NEW}; stroke-width: 1.5; stroke-dasharray: 4 3`)}
    ${pairs.map(({ key }) => line(through(CENTRE, keyAt(key)), "stroke-width: 1.5"))}${pairs.map(stored)}
    ${turnable("New key", "new", () => state.next.degrees, next.degrees, RING, turnNew,
      svg`${shape(0, 12, DASHED)}<text class="fw-cell-text" style=${`fill: ${NEW}; font-size: 16px`}>+</text>`)}
    ${drawn}${line(`${through(...outline)}Z`, `stroke: ${FAST}`, "ellipse")}
    ${line(through(at(next.value), at(next.readback)), `stroke: ${NEW}; stroke-dasharray: 4 3`)}
    ${shape(0, 3, `fill: ${NEW}; stroke: ${NEW}`, at(next.readback))}${pairs.map(written)}
    ${handle(
      "New value",
      {
        name: "value",
        at: at(next.value),
        now: next.value[0],
        told: `${right} right, ${up} up`,
        range: [-LIMIT, LIMIT],
        reach: 18,
      },
      {
        move: (x, y) => move(valueAt(x, y)),
        nudge: (x, y) => move([state.next.value[0] + x / 10, state.next.value[1] + y / 10]),
      },
      shape(0, 12, DASHED),
    )}</svg>`;
};
const sample = (drawn) => html`<svg class="fw-sample" viewBox="0 0 26 12" aria-hidden="true">${drawn}</svg>`;
const LEGEND = html`<div class="fw-legend">${[
  [shape(0, 5, `stroke: ${NEW}; stroke-width: 2; stroke-dasharray: 3 2`, [13, 6]), "the new pair: drag it, or turn a key"],
  [shape(0, 5, "stroke-width: 1.5", [13, 6]), "written"],
  [shape(0, 4, `fill: ${FAST}; stroke: ${FAST}`, [13, 6]), "read"],
  [line("M2 6h22", `stroke: ${WRONG}; stroke-width: 2.5`), "error"],
  [line("M2 6h22", `stroke: ${FAST}`), "all that can be read"],
  [
    svg`${shape(0, 4, `stroke: ${FAST}`, [7, 6])}${line("M12 6h14", `stroke: ${FAST}; stroke-dasharray: 1 3`)}`,
    "read before the last write",
  ],
].map(([drawn, words]) => html`<span>${sample(drawn)} ${words}</span>`)}</div>`;

// --- Numbers and words ------------------------------------------------------------------
const bare = (v, digits) => v.map((x) => number(x, digits)).join(", ");
const numbers = ({ W, pairs, next }) => {
  const row = ({ name = "+", degrees, value, readback, error, replacedBy }) => html`<tr class=${name === "+" ? "fw-new" : ""}>
    <th scope="row"><b>${name}</b></th><td>${degrees}°</td><td>${bare(value, 1)}</td><td>${bare(readback, 2)}</td>
    <td>${replacedBy ? `now ${replacedBy}` : number(error)}</td></tr>`;
  return html`<div class="fw-beside" style="grid-template-columns: 5fr 9fr">${table({
    title: "Memory W",
    heads: [["", ["k₁", "k₂"]]],
    rows: W.map((w, i) => [["v₁", "v₂"][i], w]),
    limit: 2,
    digits: 2,
  })}<table class="fw-numbers fw-pairs"><thead><tr><th></th>${["key", "value v", "read Wk", "error"].map(
    (name) => html`<th scope="col">${name}</th>`,
  )}</tr></thead><tbody>${pairs.map(row)}${row(next)}</tbody></table></div>`;
};
const say = ({ rule, beta }, { pairs, next }) => {
  const start = `${RULES[rule]}${rule === "sum" ? "" : `, β = ${number(beta)}`}. `;
  if (!pairs.length) return `${start}The memory is empty: every key reads (0.00, 0.00).`;
  const parts = pairs.map(({ name, readback, error, replacedBy }) => {
    if (replacedBy) return `${name}: same key as ${replacedBy}`;
    const off = number(error);
    return `${name} reads ${vector(readback)}, ${Number(off) === 0 ? "right" : `error ${off}`}`;
  });
  // What the last write did to the others.
  const moved = pairs.slice(0, -1).filter(
    ({ before, readback, replacedBy }) => !replacedBy && distance(before, readback) >= 0.005,
  );
  const were = moved.map(({ name, before }) => `${name} read ${vector(before)}`).join(", ");
  const [a, b] = pairs;
  const angle =
    pairs.length === 2 && !a.replacedBy
      ? ` The keys are ${between(a.degrees, b.degrees)}° apart: k · k′ = ${number(dot(a.key, b.key))}.`
      : "";
  const full =
    pairs.length === NAMES.length
      ? ` No more than ${NAMES.length} pairs are drawn: undo one to write another.`
      : "";
  return (
    `${start}${parts.join("; ")}.${were && ` Before ${pairs.at(-1).name} was written, ${were}.`}${angle} ` +
    `Under the new key the memory holds ${vector(next.readback)}, ${number(next.error)} away from the new value.${full}`
  );
};

export default figure("memory", {
  state,
  compute,
  view: (...all) => html`${picture(...all)}${LEGEND}`,
  controls: ({ rule, beta, pairs, next }, found, set) => html`<div class="fw-controls">
      ${button("Write", () => set({ pairs: [...pairs, next] }), { disabled: pairs.length === NAMES.length })}
      ${button("Undo", () => set({ pairs: pairs.slice(0, -1), next: pairs.at(-1) }), { disabled: !pairs.length })}
      ${button("Start again", () => set({ pairs: [] }))}</div>
    ${choice("Rule", Object.keys(RULES), rule, (rule) => set({ rule }))}
    ${slider(
      "Write strength β",
      { min: 0, max: 1, step: 0.05, value: beta, shown: number(beta), disabled: rule === "sum" },
      (beta) => set({ beta }),
    )}
    <div class="fw-controls">${Object.entries(PRESETS).map(([name, preset]) => button(name, () => set(preset)))}</div>
    ${numbers(found)}`,
  say,
});
