// @ts-check
// AFT-simple, causal, one channel, in float32: four ways to keep e^K in range,
// and the future key that breaks three of them.
import { number, round, scale } from "./words.js";
import { choice, figure, html, line, note, slider, svg } from "./kit.js";

const [T, TILE] = [8, 4];
const BOUND = 1e-3; // where a relative error counts as a wrong number
const KEYS = [-1.5, 0.5, 2, -0.5, 1, 0.5, 0, 1.5];
const VALUES = [3, 1, 2.5, 1.5, 2, 4, 1, 3.5];
const [LEAST, MOST] = [-20, 200]; // of the large key
const SIZES = Array.from({ length: MOST - LEAST + 1 }, (_, n) => LEAST + n);
const METHODS = {
  none: {
    title: "c = 0: nothing is subtracted",
    short: "no maximum",
    look: "stroke: var(--fw-trained); stroke-dasharray: 7 3",
  },
  global: {
    title: "c = largest key of all steps",
    short: "one maximum of all steps",
    look: "stroke: var(--fw-other); stroke-dasharray: 2 2",
  },
  tile: {
    title: "c = largest key up to the tile’s end",
    short: "one maximum per tile",
    look: "stroke: var(--fw-features); stroke-dasharray: 7 2 2 2",
  },
  running: {
    title: "c = max(L, K): running log-sum-exp",
    short: "the running log-sum-exp",
    look: "stroke: var(--fw-fast)",
  },
};
const names = Object.keys(METHODS);
const rows = [...Array(T).keys()];

// --- The arithmetic ----------------------------------------------------------
// Every operation rounds to float32, as it does on the machines that fail.
const f32 = Math.fround;
const exp = (x) => f32(Math.exp(f32(x)));

// The quotient of row t, with c taken off every key that it sees.
const quotient = (k, t, c) => {
  let [above, below] = [0, 0];
  for (let j = 0; j <= t; j++) {
    const weight = exp(k[j] - c);
    above = f32(above + f32(weight * VALUES[j]));
    below = f32(below + weight);
  }
  return f32(above / below);
};

// The running log-sum-exp (n1): a row needs the one before, no later key.
const running = (k) => {
  let [logSum, mean] = [-Infinity, 0];
  return k.map((key, t) => {
    const top = Math.max(logSum, key);
    const [before, now] = [exp(logSum - top), exp(key - top)];
    const total = f32(before + now);
    mean = f32(f32(f32(before * mean) + f32(now * VALUES[t])) / total);
    logSum = f32(top + f32(Math.log(total)));
    return mean;
  });
};

// As it stands, in float64, where e^200 is an ordinary number.
const exactly = (k) =>
  rows.map((t) => {
    const weights = k.slice(0, t + 1).map(Math.exp);
    const sum = (terms) => terms.reduce((a, b) => a + b, 0);
    return sum(weights.map((weight, j) => weight * VALUES[j])) / sum(weights);
  });

const run = (step, size) => {
  const keys = KEYS.map((key, i) => f32(i === step - 1 ? size : key));
  const exact = exactly(keys);
  const largest = (end) => Math.max(...keys.slice(0, end));
  const outputs = {
    none: rows.map((t) => quotient(keys, t, 0)),
    global: rows.map((t) => quotient(keys, t, largest(T))),
    tile: rows.map((t) => quotient(keys, t, largest((Math.floor(t / TILE) + 1) * TILE))),
    running: running(keys),
  };
  const methods = {};
  for (const name of names) {
    const errors = outputs[name].map((y, t) => Math.abs(y / exact[t] - 1));
    const steps = (fits) => rows.filter(fits).map((t) => t + 1);
    const lost = steps((t) => !Number.isFinite(outputs[name][t]));
    const wrong = steps((t) => errors[t] > BOUND && !lost.includes(t + 1));
    methods[name] = { outputs: outputs[name], errors, lost, wrong };
  }
  return { keys, exact, methods };
};

// By method and size, the worst of the rows that are not lost; and whether one is.
const curves = (step) => {
  const all = SIZES.map((size) => run(step, size).methods);
  const worst = ({ errors, lost }) => ({
    error: Math.max(...errors.map((error, t) => (lost.includes(t + 1) ? 0 : error))),
    lost: lost.length > 0,
  });
  return Object.fromEntries(names.map((name) => [name, all.map((one) => worst(one[name]))]));
};
const kept = {}; // by step

// --- The plot: the error of the worst row, against the size of the key ----------
// As wide as the way of the slider's thumb above it: nothing is left of -20.
const PLOT = { width: 340, height: 190, top: 78, bottom: 170 };
const across = scale([LEAST, MOST], [0, PLOT.width]);
const exponents = scale([0, -8], [PLOT.top, PLOT.bottom]); // 1, and 10⁻⁸ or less
const upwards = (error) => exponents(Math.log10(Math.max(1e-8, Math.min(1, error))));
// Where a method fails, a line in a lane above the errors, which begins with its name.
const curve = (name, lane, worst, large) => {
  const { look, short } = METHODS[name];
  const y = 20 + 14 * lane;
  const draw = (height) => {
    const points = worst.map((one, n) => [across(SIZES[n]), height(one)].map(round));
    const there = points.map(([, high]) => !Number.isNaN(high));
    return points.map((at, n) => there[n] && `${there[n - 1] ? "L" : "M"}${at.join(" ")}`);
  };
  const path = (d, width, part) =>
    line(d.filter(Boolean).join(""), `${look}; stroke-width: ${width}`, part);
  const { error, lost } = worst[large - LEAST];
  return svg`${path(draw((one) => (one.lost ? NaN : upwards(one.error))), 2, "curve")}
    ${path(draw((one) => (one.lost ? y : NaN)), 4, "lost")}${path([`M0 ${y}h24`], 2, "name")}
    ${note(30, y, short.replace(/^(one|the) /, ""))}
    <circle r="4" cx=${round(across(large))} cy=${round(lost ? y : upwards(error))}
      style=${look.replace("stroke:", "fill:").replace(/;.*/, "")} />`;
};

const plot = ({ step, large }) => html`<svg class="fw-picture" role="img"
  viewBox=${`0 0 ${PLOT.width} ${PLOT.height}`}
  aria-label="The largest relative error of the rows, against the size of the large key">
  ${note(PLOT.width, 6, "lost: NaN or ∞", "end")}
  ${[1, BOUND, 1e-8].map((error) => line(`M0 ${upwards(error)}H${PLOT.width}`, `stroke-opacity: ${error === BOUND ? 0.6 : 0.25}`))}
  ${note(0, upwards(1) + 9, "relative error 1")}
  ${note(0, upwards(BOUND) - 9, "0.001: wrong above")}
  ${note(0, upwards(1e-7) - 14, "10⁻⁷: rounding")}
  ${[0, 50, 100, 150].map(
    (size) => svg`${line(`M${across(size)} ${PLOT.bottom}v4`)}
      ${note(across(size), PLOT.bottom + 13, size, "middle")}`,
  )}
  ${line(`M${round(across(large))} 0V${PLOT.bottom}`, "stroke: var(--md-default-fg-color--light)", "marker")}
  ${names.map((name, lane) => curve(name, lane, kept[step][name], large))}</svg>`;

// --- The table, and words ---------------------------------------------------------
const brief = ({ lost, wrong }) =>
  [lost.length && `${lost.length} lost`, wrong.length && `${wrong.length} wrong`]
    .filter(Boolean)
    .join(", ") || "all 8 right";
const cells = (name, texts, look = undefined) =>
  html`<tr><th scope="row">${name}</th>${texts.map((x, t) => html`<td class=${look?.(t + 1) ?? ""}>${x}</td>`)}</tr>`;

const listed = (steps) => {
  const ranges = [];
  for (const t of steps) {
    const last = ranges.at(-1);
    if (last?.[1] === t - 1) last[1] = t;
    else ranges.push([t, t]);
  }
  const named = ranges.map(([a, b]) => (a === b ? a : `${a}–${b}`));
  return steps.length === 1 ? `row ${named} is` : `rows ${named.join(", ")} are`;
};
const judge = ({ lost, wrong, outputs, errors }) => {
  const parts = [];
  if (lost.length) {
    const kinds = new Set(lost.map((t) => number(outputs[t - 1])));
    parts.push(`${listed(lost)} ${[...kinds].join(" or ")}`);
  }
  if (wrong.length) {
    const worst = 100 * Math.max(...wrong.map((t) => errors[t - 1]));
    parts.push(`${listed(wrong)} wrong by up to ${number(worst, worst < 1 ? 1 : 0)} %`);
  }
  return parts.join(" and ");
};

export default figure("aft", {
  state: { step: 6, large: 103 },
  compute: ({ step, large }) => {
    kept[step] ??= curves(step);
    return { ...run(step, large), values: VALUES, worst: kept[step] };
  },
  view: ({ step }, { keys, exact, methods }) => html`<table class="fw-numbers fw-forms">
    <caption>The sequence: keys, values, exact outputs</caption>
    <colgroup><col>${rows.map((t) => html`<col class=${t === TILE ? "fw-tile" : ""}>`)}</colgroup>
    <tbody><tr><th scope="row">step</th>${rows.map((t) => html`<th scope="col">${t + 1}</th>`)}</tr>
    ${cells("K", keys.map((key) => number(key, 1)), (t) => (t === step ? "fw-chosen" : ""))}
    ${cells("V", VALUES.map((value) => number(value, 1)))}
    ${cells("y", exact.map((y) => number(y, 3)))}
    <tr><th colspan="9">y = Σ exp(K − c) V ⁄ Σ exp(K − c), in float32, with</th></tr>
    ${names.map((name) => {
      const { outputs, lost, wrong } = methods[name];
      const look = (t) => (lost.includes(t) ? "fw-lost" : wrong.includes(t) ? "fw-off" : "");
      return html`<tr><th colspan="6"><strong>${METHODS[name].title}</strong></th><th
        colspan="3">${brief(methods[name])}</th></tr>
        ${cells("y", outputs.map((y) => number(y, 3)), look)}`;
    })}</tbody></table>
    <small><span class="fw-lost">NaN</span> lost: NaN or ∞
      <span class="fw-off">0.00</span> wrong: relative error above 0.001</small>`,
  controls: (state, _, set) => {
    const range = { min: LEAST, max: MOST, value: state.large, shown: number(state.large, 0) };
    return html`<div>${slider("Large key", { ...range, axis: true }, (large) => set({ large }))}
      ${plot(state)}</div>
      ${choice("Step with the large key", [3, 4, 5, 6, 7, 8], state.step, (step) => set({ step }))}`;
  },
  say: ({ step, large }, { methods }) => {
    const key = `K${step} = ${number(large, 0)}.`;
    const failed = names.filter((name) => judge(methods[name]));
    if (!failed.length) return `${key} All four ways are right in all 8 rows, up to rounding.`;
    const told = failed.map((name) => `with ${METHODS[name].short}, ${judge(methods[name])}`);
    const right = names.filter((name) => !failed.includes(name));
    const worst = Math.max(...methods.running.errors);
    return (
      `${key} W${told.join("; ").slice(1)}. ` +
      `Right in all 8 rows: ${right.map((name) => METHODS[name].short).join(", ")}. ` +
      `Relative error of the running log-sum-exp: at most ` +
      `${worst === 0 ? "0" : worst.toExponential(0).replace("-", "−")}.`
    );
  },
});
