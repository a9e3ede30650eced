// @ts-check
// How many pairs fit: what three memories with untrained keys lose, pair by
// pair, beside the law that no memory of their size can beat.
// @ts-expect-error: medians of docs/reproduce, by docs/hooks/frames.py
import TRAINED from "fwlab-capacity";
import { direction, dot, dpfp, random, rules, unit } from "./algebra.js";
import { button, choice, figure, html, line, note, slider, svg } from "./kit.js";
import { number, round, scale } from "./words.js";

const MOST = 128; // pairs
const TOP = 1.2; // of the plot; a loss of 1/2 is that of returning nothing
const KEYS = { orthogonal: "as orthogonal as possible", random: "random" };

// --- The memories --------------------------------------------------------------
const law = (S, features) => Math.max(0, (1 - features / S) / 2);

// As many orthonormal vectors as there are dimensions (Gram and Schmidt).
const orthonormal = (normal, width) => {
  const basis = [];
  while (basis.length < width) {
    let key = direction(normal, width);
    for (const other of basis) {
      const overlap = dot(key, other);
      key = key.map((x, i) => x - overlap * other[i]);
    }
    basis.push(unit(key));
  }
  return basis;
};
// The key with which only feature n of DPFP fires: two entries of [k; -k]
// are positive, at the distance of that feature.
const firing = (n, width) => {
  const key = Array(width).fill(0);
  const first = n % (2 * width);
  const distance = Math.floor(n / (2 * width)) + 1;
  for (const i of [first, (first + distance) % (2 * width)])
    key[i % width] = i < width ? 1 : -1;
  return unit(key);
};
const all = (make) => Array.from({ length: MOST }, (_, n) => make(n));

// Features of length 1, of all keys.
const memories = ({ width, nu, kind, draw }) => {
  const normal = random(`capacity ${draw}`);
  const room = 2 * nu * width;
  let keys;
  let forDpfp;
  if (kind === "random") keys = forDpfp = all(() => direction(normal, width));
  else {
    const basis = orthonormal(normal, width);
    keys = all((n) => basis[n % width]);
    forDpfp = all((n) => firing(n % room, width));
  }
  const features = forDpfp.map((key) => unit(dpfp(key, nu)));
  return {
    sum: { keys, features: keys, room: width, rule: "sum" },
    delta: { keys, features: keys, room: width, rule: "delta" },
    dpfp: { keys: forDpfp, features, room, rule: "delta" },
  };
};

// Write the pairs one by one. The values are one-hot, so entry j of what
// key i reads is the share of value j in it. A write adds, to what key i
// reads, what is new times the overlap of the two keys: Eq. 17, or Eq. 24
// with a strength of 1. Returns, after each pair, the mean loss over all
// keys so far, and how many of them read their own value most of all.
const run = ({ features, rule }) => {
  const { corrects } = rules[rule](1);
  const reads = features.map(() => new Float64Array(MOST));
  return features.map((phi, t) => {
    const news = reads[t].map((held) => (corrects ? -held : 0));
    news[t] += 1;
    let loss = 0;
    let right = 0;
    reads.forEach((read, i) => {
      const overlap = dot(phi, features[i]);
      for (let j = 0; j <= t; j++) read[j] += overlap * news[j];
      if (i > t) return;
      let best = -Infinity; // of the other values
      for (let j = 0; j <= t; j++) {
        loss += (read[j] - (i === j ? 1 : 0)) ** 2 / 2;
        if (j !== i) best = Math.max(best, read[j]);
      }
      if (read[i] > best + 1e-9) right += 1;
    });
    return { loss: loss / (t + 1), right };
  });
};

// The last setting that was computed: another number of pairs has the same.
const last = { made: "", found: null };
const compute = ({ width, nu, kind, draw }) => {
  const made = [width, nu, kind, draw].join();
  if (made !== last.made) {
    /** @type {Record<string, any>} */
    const found = memories({ width, nu, kind, draw });
    for (const memory of Object.values(found)) {
      const steps = run(memory);
      memory.losses = steps.map(({ loss }) => loss);
      memory.right = steps.map(({ right }) => right);
      memory.law = steps.map((_, t) => law(t + 1, memory.room));
    }
    Object.assign(last, { made, found });
  }
  const { linear = [], [`dpfp-${nu}`]: dpfp = [] } = TRAINED[width] ?? {};
  return { memories: last.found, trained: { linear, dpfp } };
};

// --- The picture -----------------------------------------------------------------
const PLOT = { left: 30, right: 384, top: 8, bottom: 216 };
const across = scale([0, MOST], [PLOT.left, PLOT.right]);
const upwards = scale([0, TOP], [PLOT.bottom, PLOT.top]);
const place = (S, loss) => `${round(across(S))} ${round(upwards(loss))}`;
const LOOKS = {
  sum: "stroke: var(--fw-other); stroke-dasharray: 2 2",
  delta: "stroke: var(--fw-fast)",
  dpfp: "stroke: var(--fw-features); stroke-dasharray: 8 3",
};
const LAW = "stroke-width: 1.5; stroke-dasharray: 1 3; stroke-linecap: round";
const LAWS = { plain: LAW, dpfp: `${LAW}; stroke: var(--fw-features)` };
const MARKS = {
  linear: "m-4 0a4 4 0 1 0 8 0a4 4 0 1 0 -8 0",
  dpfp: "m-5 0l5-5 5 5-5 5z",
};
const TRAINED_LOOK = "stroke: var(--fw-trained); stroke-width: 2";
const names = Object.keys(LOOKS);
const titles = (nu) => ({ sum: "sum rule", delta: "delta rule", dpfp: `delta rule, DPFP-${nu}` });

const curve = (name, { losses }, count) => {
  const inside = losses.map((loss) => loss <= TOP);
  const points = losses.map(
    (loss, t) => inside[t] && `${inside[t - 1] ? "L" : "M"}${place(t + 1, loss)}`,
  );
  return svg`${line(points.filter(Boolean).join(""), `${LOOKS[name]}; stroke-width: 2`)}
    <circle r="4" cx=${round(across(count))} cy=${round(upwards(Math.min(losses[count - 1], TOP)))}
      style=${LOOKS[name].replace("stroke:", "fill:").replace(/;.*/, "")} />`;
};
const lawOf = (room, look) => {
  const from = Math.min(room, MOST);
  const sizes = Array.from({ length: MOST - from + 1 }, (_, n) => from + n);
  return line(`M${place(0, 0)}L${sizes.map((S) => place(S, law(S, room))).join("L")}`, look);
};
const plot = ({ width, count }, { memories, trained }) => html`<svg class="fw-picture"
  role="img" viewBox="0 0 388 236"
  aria-label="Loss of three memories against the number of pairs, and the law">
  ${[0, 0.5, 1].map(
    (loss) => svg`${line(`M${PLOT.left} ${upwards(loss)}H${PLOT.right}`, `stroke-opacity: ${loss ? 0.2 : 0.6}`)}
      ${note(PLOT.left - 5, upwards(loss), loss === 0.5 ? "½" : loss, "end")}`,
  )}
  ${note(PLOT.right, upwards(0.5) - 9, "½: returns nothing", "end")}
  ${note(PLOT.left + 4, upwards(TOP) + 6, "loss")}
  ${[0, 32, 64, 96, 128].map((S) => note(across(S), PLOT.bottom + 12, S, S === 128 ? "end" : "middle"))}
  ${note(across(80), PLOT.bottom + 12, "pairs S", "middle")}
  ${line(`M${round(across(count))} ${PLOT.top}V${PLOT.bottom}`)}
  ${lawOf(width, LAWS.plain)}${lawOf(memories.dpfp.room, LAWS.dpfp)}
  ${names.map((name) => curve(name, memories[name], count))}
  ${Object.entries(trained).map(([name, points]) =>
    line(points.map(([S, loss]) => `M${place(S, loss)}${MARKS[name]}`).join(""), TRAINED_LOOK, `trained-${name}`),
  )}</svg>`;
const sample = (d, look) =>
  html`<svg class="fw-sample" viewBox="0 0 26 12" aria-hidden="true">${line(d, look)}</svg>`;

export default figure("capacity", {
  // More pairs than the width, and fewer than DPFP has features.
  state: { width: 16, count: 24, nu: 1, kind: "orthogonal", draw: 1 },
  compute,
  view: (state, found) => {
    const { width, count, nu } = state;
    const { memories, trained } = found;
    const row = (name) => {
      const { room, losses, right, law } = memories[name];
      return html`<tr><th scope="row">${sample("M0 6h26", `${LOOKS[name]}; stroke-width: 2`)} ${titles(nu)[name]}</th>
        <td>${room}</td><td>${number(losses[count - 1])}</td><td>${number(law[count - 1])}</td>
        <td>${right[count - 1]} of ${count}</td></tr>`;
    };
    return html`${plot(state, found)}
      <div class="fw-legend"><span>${sample("M0 6h26", LAWS.plain)} law: the least for ${width} features</span>
        <span>${sample("M0 6h26", LAWS.dpfp)} law for ${memories.dpfp.room} features</span>${
          trained.linear.length
            ? html`<span>${sample(`M13 6${MARKS.linear}`, TRAINED_LOOK)} trained keys, ELU + 1</span>
                <span>${sample(`M13 6${MARKS.dpfp}`, TRAINED_LOOK)} trained keys, DPFP-${nu}</span>`
            : html`<span>trained keys: only at widths 16 and 64</span>`
        }</div>
      <table class="fw-answers fw-losses"><thead><tr><th></th>${["features", "loss", "law", "right"].map(
        (name) => html`<th scope="col">${name}</th>`,
      )}</tr></thead><tbody>${names.map(row)}</tbody></table>`;
  },
  controls: ({ width, count, nu, kind, draw }, _, set) => html`
    ${slider("Pairs S", { min: 1, max: MOST, value: count, shown: String(count) }, (count) => set({ count }))}
    ${slider("Width of a key", { min: 4, max: 64, step: 4, value: width, shown: String(width) }, (width) => set({ width }))}
    ${choice("Keys", Object.keys(KEYS), kind, (kind) => set({ kind }), (name) => KEYS[name])}
    ${choice("DPFP", [1, 2, 3], nu, (nu) => set({ nu }), (nu) => `ν = ${nu}`)}
    <div class="fw-controls">${button("New draw", () => set({ draw: draw + 1 }))}</div>`,
  say: ({ width, count, nu, kind }, { memories }) => {
    const at = (name) => memories[name].losses[count - 1];
    const called = { ...titles(nu), dpfp: `delta rule with DPFP-${nu}` };
    const floor = (room) => number(law(count, room));
    const how =
      kind === "random" ? "random" : "orthogonal until all features are used, then repeated";
    const nothing = names.filter((name) => at(name) > 0.5).map((name) => called[name]);
    const { room } = memories.dpfp;
    return (
      `${count === 1 ? "1 pair" : `${count} pairs`}; keys of width ${width}, ${how}. ` +
      `Loss: ${names.map((name) => `${called[name]} ${number(at(name))}`).join(", ")}. ` +
      `No memory with ${width} features can have a loss below ${floor(width)}, ` +
      `and none with ${room} below ${floor(room)}.` +
      (nothing.length ? ` Worse than returning nothing (0.50): ${nothing.join(", ")}.` : "")
    );
  },
});
