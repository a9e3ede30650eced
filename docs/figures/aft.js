// @ts-check
// AFT-simple, causal, one channel, in float32: four ways to keep e^K in range,
// and the future key that breaks three of them.
import * as fwlab from "./fwlab.js";
import {
  text, small, path, round, BOLD, MIDDLE, CENTRED, END, WRONG,
} from "./fwlab.js";

fwlab.figure("aft", (figure) => {
  const T = 8;
  const TILE = 4;
  const CELL = 43;
  const LEFT = 28;
  // Where a relative error counts as a wrong number.
  const BOUND = 1e-3;
  const KEYS = [-1.5, 0.5, 2, -0.5, 1, 0.5, 0, 1.5];
  const VALUES = [3, 1, 2.5, 1.5, 2, 4, 1, 3.5];
  const METHODS = {
    none: {
      title: "c = 0: nothing is subtracted",
      short: "no maximum",
      brief: "no maximum",
    },
    global: {
      title: "c = largest key of all steps",
      short: "one maximum of all steps",
      brief: "maximum of all steps",
    },
    tile: {
      title: "c = largest key up to the tile’s end",
      short: "one maximum per tile",
      brief: "maximum per tile",
    },
    running: {
      title: "c = max(L, K): running log-sum-exp",
      short: "the running log-sum-exp",
      brief: "running log-sum-exp",
    },
  };
  const RANGE = [-20, 200]; // of the large key
  const f32 = Math.fround;
  let step = 6;
  let large = 103;

  const keys = (size) => KEYS.map((key, i) => f32(i === step - 1 ? size : key));

  // Every operation rounds to float32, as it does on the machines that fail.
  const exp = (x) => f32(Math.exp(f32(x)));

  // The quotient of row t, with c taken off every key that it sees.
  const quotient = (k, t, c) => {
    let above = 0;
    let below = 0;
    for (let j = 0; j <= t; j++) {
      const weight = exp(k[j] - c);
      above = f32(above + f32(weight * VALUES[j]));
      below = f32(below + weight);
    }
    return f32(above / below);
  };

  // The running log-sum-exp (n1): a row needs the one before, no later key.
  const running = (k) => {
    let logSum = -Infinity;
    let mean = 0;
    const maxima = [];
    const outputs = k.map((key, t) => {
      const top = Math.max(logSum, key);
      maxima.push(top);
      const before = exp(logSum - top);
      const now = exp(key - top);
      const total = f32(before + now);
      mean = f32(f32(f32(before * mean) + f32(now * VALUES[t])) / total);
      logSum = f32(top + f32(Math.log(total)));
      return mean;
    });
    return { maxima, outputs };
  };

  // As it stands, in float64, where e^200 is an ordinary number.
  const exact = (k) =>
    k.map((_, t) => {
      const weights = k.slice(0, t + 1).map(Math.exp);
      const sum = (terms) => terms.reduce((a, b) => a + b, 0);
      return sum(weights.map((weight, j) => weight * VALUES[j])) / sum(weights);
    });

  const compute = (size) => {
    const k = keys(size);
    const rows = [...Array(T).keys()];
    const truth = exact(k);
    const before = (end) => Math.max(...k.slice(0, end));
    const endOfTile = (t) => (Math.floor(t / TILE) + 1) * TILE;
    const subtracted = {
      none: rows.map(() => 0),
      global: rows.map(() => before(T)),
      tile: rows.map((t) => before(endOfTile(t))),
    };
    const methods = {};
    for (const [name, c] of Object.entries(subtracted))
      methods[name] = { maxima: c, outputs: rows.map((t) => quotient(k, t, c[t])) };
    methods.running = running(k);
    for (const method of Object.values(methods)) {
      method.errors = method.outputs.map((y, t) => Math.abs(y / truth[t] - 1));
      method.lost = rows.filter((t) => !Number.isFinite(method.outputs[t]));
      method.wrong = rows.filter((t) => method.errors[t] > BOUND);
      method.wrong = method.wrong.filter((t) => !method.lost.includes(t));
    }
    return { keys: k, exact: truth, methods };
  };

  // --- The picture ---------------------------------------------------------
  const TABLE = 26;
  const FIRST = 166;
  const BLOCK = 52;
  const WIDTH = LEFT + T * CELL + 4;
  const HEIGHT = FIRST + 4 * BLOCK + 22;
  const picture = figure.picture(
    WIDTH,
    HEIGHT,
    "Keys, values and exact outputs of 8 steps, and four ways to compute the outputs",
  );
  const left = (t) => LEFT + t * CELL;
  const cellText = (t, y) => text(left(t) + CELL / 2, y, "", { class: "fw-cell-text" });
  const row = (group, y, label) => {
    const cells = KEYS.map((_, t) => cellText(t, y));
    group.append(small(0, y, label, MIDDLE), ...cells);
    return cells;
  };
  const grid = (y, height) => {
    const lines = KEYS.map((_, t) => `M${left(t)} ${y}v${height}h${CELL}v${-height}z`);
    return path({ class: "fw-cell", d: lines.join("") });
  };

  const table = fwlab.group({ role: "img" });
  table.append(text(0, 14, "The sequence: keys, values, exact outputs", BOLD));
  const tableRows = [0, 1, 2, 3].map((i) => TABLE + 12 + 24 * i);
  const steps = row(table, tableRows[0], "step");
  const [keyCells, valueCells, exactCells] = ["K", "V", "y"].map((label, i) =>
    row(table, tableRows[i + 1], label),
  );
  table.append(
    ...[1, 2, 3].map((i) => grid(tableRows[i] - 12, 24)),
    path({ d: `M${left(TILE)} ${TABLE + 4}v92` }),
    small(0, 144, "y = Σ exp(K − c) V ⁄ Σ exp(K − c), in float32, with"),
  );
  const chosen = fwlab.box(0, tableRows[1] - 12, CELL, 24, {
    fill: "none",
    stroke: "var(--fw-other)",
    "stroke-width": 3,
  });
  table.append(chosen);
  steps.forEach((cell, t) => (cell.textContent = t + 1));
  valueCells.forEach((cell, t) => (cell.textContent = fwlab.number(VALUES[t], 1)));
  picture.append(table);

  const blocks = Object.entries(METHODS).map(([name, { title }], i) => {
    const y = FIRST + i * BLOCK;
    const group = fwlab.group({ role: "img", "data-method": name });
    group.append(text(0, y + 12, title, BOLD));
    const verdict = small(left(T), y + 12, "", END);
    group.append(verdict);
    const shade = path({
      "data-part": "shade",
      fill: fwlab.tint(WRONG, 14),
      stroke: "none",
    });
    const crosses = path({ "data-part": "lost", stroke: WRONG, "stroke-width": 1.5 });
    const dashes = path({
      "data-part": "wrong",
      stroke: WRONG,
      "stroke-width": 2,
      "stroke-dasharray": "5 3",
    });
    group.append(shade, grid(y + 18, 24), crosses, dashes);
    if (name === "tile") group.append(path({ d: `M${left(TILE)} ${y + 18}v24`, "stroke-width": 3 }));
    const outputs = row(group, y + 30, "y");
    picture.append(group);
    return { name, y, group, verdict, shade, crosses, dashes, outputs };
  });
  const legend = HEIGHT - 14;
  picture.append(
    path({ d: `M1 ${legend - 6}h20v12h-20zl20 12m0-12l-20 12`, stroke: WRONG }),
    small(27, legend, "lost: NaN or ∞", MIDDLE),
    path({
      d: `M137 ${legend - 6}h20v12h-20z`,
      stroke: WRONG,
      "stroke-width": 2,
      "stroke-dasharray": "5 3",
    }),
    small(163, legend, "wrong: relative error above 0.001", MIDDLE),
  );

  // --- The plot: the error of the worst row, against the size of the key ----
  // As wide as the way of the slider's thumb above it: nothing is left of -20.
  const PLOT = { width: 340, height: 190, top: 78, bottom: 170 };
  const LOOKS = {
    none: { stroke: "var(--fw-trained)", "stroke-dasharray": "7 3" },
    global: { stroke: "var(--fw-other)", "stroke-dasharray": "2 2" },
    tile: { stroke: "var(--fw-features)", "stroke-dasharray": "7 2 2 2" },
    running: { stroke: "var(--fw-fast)" },
  };
  const plot = fwlab.picture(
    PLOT.width,
    PLOT.height,
    "The largest relative error of the rows, against the size of the large key",
  );
  const across = fwlab.scale(RANGE, [0, PLOT.width]);
  // 10⁻⁸ and less, up to 1.
  const exponents = fwlab.scale([0, -8], [PLOT.top, PLOT.bottom]);
  const upwards = (error) => exponents(Math.log10(Math.max(1e-8, Math.min(1, error))));
  const note = (x, y, content, attributes = {}) =>
    small(x, y, content, { ...MIDDLE, ...attributes });
  plot.append(
    note(PLOT.width, 6, "lost: NaN or ∞", END),
    ...[1, BOUND, 1e-8].map((error) =>
      path({
        d: `M0 ${upwards(error)}H${PLOT.width}`,
        "stroke-opacity": error === BOUND ? 0.6 : 0.25,
      }),
    ),
    note(0, upwards(1) + 9, "relative error 1"),
    note(0, upwards(BOUND) - 9, "0.001: wrong above"),
    note(0, upwards(1e-7) - 14, "10⁻⁷: rounding"),
    ...[0, 50, 100, 150].flatMap((size) => [
      path({ d: `M${across(size)} ${PLOT.bottom}v4` }),
      note(across(size), PLOT.bottom + 13, fwlab.number(size, 0), CENTRED),
    ]),
  );
  const marker = path({
    stroke: "var(--md-default-fg-color--light)",
    "data-part": "marker",
  });
  plot.append(marker);
  const curves = Object.keys(METHODS).map((name, lane) => {
    const look = { ...LOOKS[name], "stroke-width": 2 };
    const curve = path({ ...look, "data-curve": name });
    const lost = path({ ...look, "stroke-width": 4, "data-lost": name });
    const dot = fwlab.circle({ r: 4, fill: LOOKS[name].stroke, stroke: "none", "data-dot": name });
    plot.append(curve, lost, dot);
    // On the left, where no key is large enough, the name of the lane.
    const y = 20 + 14 * lane;
    plot.append(path({ ...look, d: `M0 ${y}h24` }), note(30, y, METHODS[name].brief));
    return { name, y, curve, lost, dot };
  });
  const sizes = Array.from({ length: RANGE[1] - RANGE[0] + 1 }, (_, n) => RANGE[0] + n);
  // The worst of the rows that are not lost; and whether one is.
  const worst = ({ errors, lost }) => ({
    error: Math.max(...errors.map((error, t) => (lost.includes(t) ? 0 : error))),
    lost: lost.length > 0,
  });
  const curvesOf = () => {
    const all = sizes.map((size) => compute(size).methods);
    const entries = Object.keys(METHODS).map((name) => [
      name,
      all.map((methods) => worst(methods[name])),
    ]);
    return Object.fromEntries(entries);
  };
  let worsts;
  const drawCurves = () => {
    worsts = curvesOf();
    for (const { name, y, curve, lost } of curves) {
      const draw = (points) => {
        let d = "";
        sizes.forEach((size, n) => {
          const height = points(worsts[name][n]);
          const last = n > 0 && points(worsts[name][n - 1]) !== null;
          if (height !== null) d += `${last ? "L" : "M"}${round(across(size))} ${round(height)}`;
        });
        return d;
      };
      curve.setAttribute("d", draw((one) => (one.lost ? null : upwards(one.error))));
      lost.setAttribute("d", draw((one) => (one.lost ? y : null)));
    }
  };
  const drawMarker = () => {
    marker.setAttribute("d", `M${round(across(large))} 0V${PLOT.bottom}`);
    for (const { name, y, dot } of curves) {
      const { error, lost } = worsts[name][large - RANGE[0]];
      dot.setAttribute("cx", round(across(large)));
      dot.setAttribute("cy", round(lost ? y : upwards(error)));
    }
  };

  // --- Words ---------------------------------------------------------------
  const scientific = (x) => (x === 0 ? "0" : x.toExponential(0).replace("-", "−"));
  const list = (rows) => {
    const ranges = [];
    for (const t of rows) {
      const last = ranges.at(-1);
      if (last && last[1] === t - 1) last[1] = t;
      else ranges.push([t, t]);
    }
    const named = ranges.map(([a, b]) => (a === b ? a + 1 : `${a + 1}–${b + 1}`));
    return rows.length === 1 ? `row ${named} is` : `rows ${named.join(", ")} are`;
  };
  const percent = (x) => `${fwlab.number(100 * x, 100 * x < 1 ? 1 : 0)} %`;
  const judge = ({ lost, wrong, outputs, errors }) => {
    const parts = [];
    if (lost.length) {
      const kinds = new Set(lost.map((t) => fwlab.number(outputs[t])));
      parts.push(`${list(lost)} ${[...kinds].join(" or ")}`);
    }
    if (wrong.length) {
      const worst = Math.max(...wrong.map((t) => errors[t]));
      parts.push(`${list(wrong)} wrong by up to ${percent(worst)}`);
    }
    return parts.join(" and ");
  };
  const sentence = ({ methods }) => {
    const right = [];
    const failed = [];
    for (const [name, { short }] of Object.entries(METHODS)) {
      const verdict = judge(methods[name]);
      if (verdict) failed.push(`with ${short}, ${verdict}`);
      else right.push(short);
    }
    const key = `K${step} = ${fwlab.number(large, 0)}.`;
    const worst = Math.max(...methods.running.errors);
    if (!failed.length)
      return `${key} All four ways are right in all 8 rows, up to rounding.`;
    const capital = (words) => words[0].toUpperCase() + words.slice(1);
    return (
      `${key} ${capital(failed.join("; "))}. ` +
      `Right in all 8 rows: ${right.join(", ")}. ` +
      `Relative error of the running log-sum-exp: at most ${scientific(worst)}.`
    );
  };
  const brief = ({ lost, wrong }) => {
    const parts = [];
    if (lost.length) parts.push(`${lost.length} lost`);
    if (wrong.length) parts.push(`${wrong.length} wrong`);
    return parts.join(", ") || "all 8 right";
  };

  let shown;
  const update = () => {
    shown = compute(large);
    chosen.setAttribute("x", left(step - 1));
    steps.forEach((cell, t) => {
      cell.style.fontWeight = t === step - 1 ? 700 : "";
    });
    const texts = {
      keys: shown.keys.map((key) => fwlab.number(key, 1)),
      exact: shown.exact.map((y) => fwlab.number(y, 3)),
    };
    keyCells.forEach((cell, t) => (cell.textContent = texts.keys[t]));
    exactCells.forEach((cell, t) => (cell.textContent = texts.exact[t]));
    table.setAttribute(
      "aria-label",
      `Keys ${texts.keys.join(", ")}. Values ${VALUES.join(", ")}. ` +
        `Exact outputs ${texts.exact.join(", ")}.`,
    );
    for (const block of blocks) {
      const { outputs, lost, wrong } = shown.methods[block.name];
      const box = (t) => `M${left(t)} ${block.y + 18}h${CELL}v24h${-CELL}z`;
      const inner = (t) =>
        `M${left(t) + 2} ${block.y + 20}h${CELL - 4}v20h${4 - CELL}z`;
      const cross = (t) => `${inner(t)}l5 5m29 10l5 5m0-20l-5 5m-29 10l-5 5`;
      block.shade.setAttribute("d", [...lost, ...wrong].map(box).join(""));
      block.crosses.setAttribute("d", lost.map(cross).join(""));
      block.dashes.setAttribute("d", wrong.map(inner).join(""));
      outputs.forEach((y, t) => {
        const cell = block.outputs[t];
        cell.style.fill = lost.includes(t) || wrong.includes(t) ? WRONG : "";
        cell.style.fontWeight = lost.includes(t) ? 700 : "";
        cell.textContent = fwlab.number(y, 3);
      });
      block.verdict.textContent = brief(shown.methods[block.name]);
      const said = block.outputs.map((cell) => cell.textContent).join(", ");
      block.group.setAttribute(
        "aria-label",
        `${METHODS[block.name].title}: ${block.verdict.textContent}. Outputs ${said}.`,
      );
    }
    drawMarker();
    figure.say(sentence(shown));
  };

  const slider = fwlab.slider(
    "Large key",
    { min: RANGE[0], max: RANGE[1], step: 1, value: large, show: (x) => fwlab.number(x, 0) },
    (value) => {
      large = value;
      update();
    },
  );
  const places = Object.fromEntries([3, 4, 5, 6, 7, 8].map((t) => [t, String(t)]));
  const place = fwlab.choice("Step with the large key", places, step, (value) => {
    step = Number(value);
    drawCurves();
    update();
  });
  slider.classList.add("fw-axis");
  figure.beside(fwlab.html("div", {}, fwlab.controls(slider), plot), fwlab.controls(place));
  drawCurves();
  update();

  // JSON has no NaN and no infinity.
  const plain = (numbers) => numbers.map((x) => (Number.isFinite(x) ? x : String(x)));
  return {
    state: () => ({
      step,
      large,
      keys: shown.keys,
      values: VALUES,
      exact: shown.exact,
      worst: worsts,
      methods: Object.fromEntries(
        Object.entries(shown.methods).map(([name, method]) => [
          name,
          {
            maxima: method.maxima,
            outputs: plain(method.outputs),
            errors: plain(method.errors),
            lost: method.lost.map((t) => t + 1),
            wrong: method.wrong.map((t) => t + 1),
          },
        ]),
      ),
    }),
  };
});
