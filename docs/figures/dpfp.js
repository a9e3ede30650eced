// @ts-check
// DPFP of two keys of width 2: which products fire, in which quadrant, and
// how much two keys still overlap afterwards.
import { dot, dpfp, unit } from "./algebra.js";
import { choice, figure, handle, html, line, note, svg } from "./kit.js";
import { number, signed, tint, vector } from "./words.js";

const LIMIT = 2;
const ENTRIES = ["x", "y", "−x", "−y"];
const NAMES = ["k", "k′"];
const COLOURS = ["var(--fw-features)", "var(--fw-other)"];
// In the order of ENTRIES: shift 1 begins there, entry i with entry i + 1.
const QUADRANTS = [[1, 1], [-1, 1], [-1, -1], [1, -1]];
const NOTES = [
  "one product per quadrant",
  "never: r(x) or r(−x) is 0, and r(y) or r(−y)",
  "shift 1 again, its factors swapped",
];
const product = (n) => [ENTRIES[n % 4], ENTRIES[((n % 4) + Math.floor(n / 4) + 1) % 4]];
const spoken = (n) => product(n).map((name) => `r(${name})`).join(" ");

// --- The arithmetic --------------------------------------------------------------
// 0/0 is 0: an empty vector is at right angles to everything.
const divide = (a, b) => (b === 0 ? 0 : a / b);
const cosine = (a, b) => dot(unit(a), unit(b));
const compute = ({ keys, nu }) => {
  const r = keys.map((key) => [...key, ...key.map((x) => -x)].map((x) => (x > 0 ? x : 0)));
  const features = keys.map((key) => dpfp(key, nu));
  const normalised = features.map((phi) => {
    const sum = phi.reduce((a, b) => a + b, 0);
    return phi.map((x) => divide(x, sum));
  });
  const both = (of) => [dot(of[0], of[1]), cosine(of[0], of[1])];
  const [plainDot, plainCosine] = both(keys);
  const [all, cosineOfFeatures] = both(features);
  return {
    r,
    features,
    normalised,
    fires: features.map((phi) => phi.flatMap((x, n) => (x > 0 ? [n] : []))),
    dot: all,
    cosine: cosineOfFeatures,
    normalisedDot: dot(normalised[0], normalised[1]),
    plainDot,
    plainCosine,
  };
};

// --- The plane ---------------------------------------------------------------------
const SCALE = 45;
const CENTRE = [104, 120];
const SIDE = LIMIT * SCALE;
const at = ([x, y]) => [Math.round(CENTRE[0] + SCALE * x), Math.round(CENTRE[1] - SCALE * y)];
// From the centre to the edge, slices of 5°, so that none lies on two sides of an axis.
const SLICES = Array.from({ length: 72 }, (_, n) => {
  const point = (angle) => [Math.cos(angle), Math.sin(angle)];
  const edge = [n, n + 1].map((i) => {
    const [x, y] = point((i * Math.PI) / 36);
    const far = LIMIT / Math.max(Math.abs(x), Math.abs(y));
    return `L${at([far * x, far * y]).join(" ")}`;
  });
  return { d: `M${CENTRE.join(" ")}${edge.join("")}Z`, middle: point(((n + 0.5) * Math.PI) / 36) };
});
// Adding 0 turns −0 into 0.
const tenths = (x) => Math.round(10 * Math.max(-LIMIT, Math.min(LIMIT, x))) / 10 + 0;

const key = (j, state, set) => {
  const { keys } = state;
  const move = (place) =>
    set({ keys: state.keys.map((old, i) => (i === j ? place.map(tenths) : old)) });
  const [right, up] = keys[j].map((x) => number(x, 1));
  const paint = `fill: var(--md-default-bg-color); stroke: ${COLOURS[j]}; stroke-width: 2`;
  // Where both keys are at one place, the square lies inside the circle, and each can
  // still be taken.
  return handle(
    `Key ${NAMES[j]}, ${j ? "the square" : "the circle"}`,
    {
      name: NAMES[j],
      at: at(keys[j]),
      now: keys[j][0],
      told: `x ${right}, y ${up}`,
      range: [-LIMIT, LIMIT],
      reach: j ? 14.5 : 18,
    },
    {
      move: (x, y) => move([(x - CENTRE[0]) / SCALE, (CENTRE[1] - y) / SCALE]),
      // Of the key as it is then: PageUp moves it five times.
      nudge: (x, y) => move([state.keys[j][0] + x / 10, state.keys[j][1] + y / 10]),
    },
    svg`${j ? svg`<rect x="-10" y="-10" width="20" height="20" style=${paint} />` : svg`<circle r="14" style=${paint} />`}
      <text class="fw-cell-text" font-weight="600">${NAMES[j]}</text>`,
  );
};
const plane = (state, { fires, features }, set) => {
  const { keys, nu, coloured } = state;
  // A cosine depends on the direction alone.
  const overlap = (direction) =>
    coloured === "before"
      ? cosine(direction, keys[0])
      : cosine(dpfp(direction, nu), features[0]);
  const [left, top] = at([-LIMIT, LIMIT]);
  return html`<svg class="fw-picture" viewBox="6 14 202 202" role="group"
    aria-label="Two keys in a plane, and their overlap">
    <g data-part="plane">${SLICES.map(
      ({ d, middle }) => svg`<path d=${d} shape-rendering="crispEdges"
        style=${`fill: ${signed(0.45 * overlap(middle))}`} />`,
    )}</g>
    ${QUADRANTS.map(([x, y], n) => {
      const bold = fires.some((all) => all.includes(n)) ? 700 : 400;
      const place = [CENTRE[0] + x * (SIDE - 6), CENTRE[1] - y * (SIDE - 10)];
      return svg`<g font-weight=${bold}>${note(place[0], place[1], product(n).join(" · "), x > 0 ? "end" : "start")}</g>`;
    })}
    <rect class="fw-cell" x=${left} y=${top} width=${2 * SIDE} height=${2 * SIDE} />
    ${line(`M${left} ${CENTRE[1]}h${2 * SIDE}M${CENTRE[0]} ${top}v${2 * SIDE}`, "stroke-opacity: 0.7")}
    ${note(left + 4, CENTRE[1] + 10, "−2")}${note(left + 2 * SIDE - 4, CENTRE[1] + 10, "2", "end")}
    ${note(left + 2 * SIDE + 5, CENTRE[1], "x")}${note(CENTRE[0], top - 8, "y", "middle")}
    ${keys.map((to, j) =>
      line(`M${CENTRE.join(" ")}L${at(to).join(" ")}`, `stroke: ${COLOURS[j]}; stroke-width: 2; stroke-dasharray: ${j ? "5 3" : "none"}`),
    )}
    ${NAMES.map((_, j) => key(j, state, set))}</svg>`;
};

// --- Tables ----------------------------------------------------------------------------
const rectified = ({ r }) => html`<table class="fw-numbers"><caption>r([k; −k])</caption>
  <thead><tr><th></th>${NAMES.map((name) => html`<th scope="col"><b>${name}</b></th>`)}</tr></thead>
  <tbody>${ENTRIES.map((entry, i) => html`<tr><th scope="row">r(${entry})</th>${NAMES.map((_, j) => {
    const share = (100 * r[j][i]) / LIMIT;
    const bar = `linear-gradient(to right, ${tint(COLOURS[j], 45)} ${share}%, transparent 0)`;
    return html`<td style=${`background: ${bar}`}>${number(r[j][i], 1)}</td>`;
  })}</tr>`)}</tbody></table>`;
const overlaps = (found) => html`<table class="fw-numbers fw-named"><caption>Overlap</caption>
  <thead><tr><th></th><th scope="col">dot</th><th scope="col">cosine</th></tr></thead>
  <tbody>${[
    ["k, k′", found.plainDot, found.plainCosine],
    ["φ(k), φ(k′)", found.dot, found.cosine],
    ["φ / Σφ", found.normalisedDot, found.cosine],
  ].map(([name, ...both]) => html`<tr><th scope="row">${name}</th>${both.map(
    (x) => html`<td style="border-color: transparent">${number(x)}</td>`,
  )}</tr>`)}</tbody></table>`;
// A block for each shift, a row for each key.
const products = ({ nu }, { features, normalised }) => html`<table class="fw-numbers fw-forms">
  <caption>${4 * nu} features φ = rᵢ rⱼ, and divided by their sum</caption>
  <tbody>${NOTES.slice(0, nu).map((words, s) => html`
    <tr><th colspan="5" scope="colgroup"><b>Shift ${s + 1}</b>: ${words}</th></tr>
    <tr><th></th>${ENTRIES.map((_, i) => html`<th scope="col">${product(4 * s + i).join(" · ")}</th>`)}</tr>
    ${NAMES.map((name, j) => html`<tr><th scope="row"><b>${name}</b></th>${ENTRIES.map((_, i) => {
      const n = 4 * s + i;
      const fires = features[j][n] > 0;
      const look = fires ? `background: ${tint(COLOURS[j])}; font-weight: 600` : "";
      const said = fires ? `${number(features[j][n])} → ${number(normalised[j][n])}` : s === 1 ? "always 0" : "0";
      return html`<td style=${look} data-feature=${n}>${said}</td>`;
    })}</tr>`)}`)}</tbody></table>`;

// --- Words -------------------------------------------------------------------------------
const position = ([x, y]) => {
  if (x === 0 && y === 0) return "is 0";
  if (x === 0 || y === 0) return "lies on an axis";
  return `has x ${x > 0 ? ">" : "<"} 0, y ${y > 0 ? ">" : "<"} 0`;
};
const say = ({ keys, nu, coloured }, { fires, features, normalised, ...shown }) => {
  const parts = NAMES.map((name, j) => {
    const start = `${name} = ${vector(keys[j], 1)} ${position(keys[j])}: `;
    if (!fires[j].length)
      return `${start}no feature fires, and the sum-normalised features are 0.`;
    const [first, second] = fires[j];
    const value = number(features[j][first]);
    const twice = second === undefined ? "" : ", twice";
    return `${start}${spoken(first)} = ${value} fires${twice}, ${number(normalised[j][first])} of the sum.`;
  });
  const verdict = fires.every((one) => one.length)
    ? shown.cosine > 0
      ? ": the same product fires, and only its size tells the two apart."
      : ": different products fire, and the keys are told apart."
    : ", as 0/0 counts as 0: nothing can be stored under a key without features.";
  const where = {
    before: "Before DPFP, k overlaps with all keys less than 90° away (blue).",
    after: fires[0].length
      ? "After DPFP, k overlaps with the keys of its own quadrant (blue) and no others."
      : "After DPFP, k overlaps with no key.",
  };
  return (
    `DPFP with ν = ${nu} has ${4 * nu} features. ${parts.join(" ")} The keys have cosine ` +
    `${number(shown.plainCosine)}, their features ${number(shown.cosine)}${verdict} ${where[coloured]}`
  );
};

export default figure("dpfp", {
  state: { keys: [[0.6, 1.2], [-0.4, 1.4]], nu: 1, coloured: "after" },
  compute,
  view: (state, found, set) => html`<div class="fw-beside" style="grid-template-columns: 5fr 4fr">
    <div><strong>Keys: drag them</strong>${plane(state, found, set)}
      <small class="fw-scale">Colour: cosine with ${state.coloured === "after" ? "φ(k)" : "k"}
        <span>−1<i style=${`background: linear-gradient(to right, ${signed(-0.45)}, transparent, ${signed(0.45)})`}></i>1</span></small></div>
    <div>${rectified(found)}${overlaps(found)}</div></div>`,
  controls: (state, found, set) => html`
    ${choice("Colour", ["before", "after"], state.coloured, (coloured) => set({ coloured }), (name) => `${name} DPFP`)}
    ${choice("Shifts", [1, 2, 3], state.nu, (nu) => set({ nu }), (nu) => `ν = ${nu}`)}
    ${products(state, found)}`,
  say,
});
