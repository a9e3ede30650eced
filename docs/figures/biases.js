// @ts-check
// The biases of AFT, one by one: four forms of one table, and the weights and
// outputs that follow from it.
import * as fwlab from "./fwlab.js";
import { text, small, box, group, BOLD, MIDDLE, CENTRED } from "./fwlab.js";

fwlab.figure("biases", (figure) => {
  const T = 8;
  const WINDOW = 3;
  const LIMIT = 4; // of a bias
  const KEYS = [0, 0, 1, 0, 0, 0, 2, 0];
  const VALUES = [0, 1, 0, 0, 0, 1, 0, 0];
  const steps = [...Array(T).keys()];
  const table = (bias) => steps.map((t) => steps.map((j) => bias(t, j)));
  const near = (t, j) => j <= t && t - j < WINDOW;
  const FULL = [
    [0],
    [1, 0],
    [0, 2, -1],
    [3, 0, 0, 1],
    [0, 3, -2, 0, 0],
    [0, 0, 0, 2, 0, -1],
    [1, 0, 0, 0, -2, 0, -3],
    [0, 4, 0, 0, 0, 2, -2, 0],
  ];
  // What a bias may be: where it is free, and which others go with it.
  const FORMS = {
    simple: { label: "simple", free: () => false, start: () => 0 },
    local: { label: "local", free: near, start: (t, j) => ((3 * t + 5 * j) % 6) - 2 },
    conv: { label: "conv", free: near, start: (t, j) => [0, 3, -1][t - j], shared: true },
    full: { label: "full", free: (t, j) => j <= t, start: (t, j) => FULL[t][j] },
  };
  for (const each of Object.values(FORMS))
    each.bias = table((t, j) => (each.free(t, j) ? each.start(t, j) : 0));

  let form = "conv";
  let [row, key] = [5, 4];

  const compute = () => {
    const { bias } = FORMS[form];
    const seen = (values) => table((t, j) => (j <= t ? values(t, j) : NaN));
    const sum = (t, term) => steps.slice(0, t + 1).reduce((all, j) => all + term(j), 0);
    const exp = (t, j) => Math.exp(KEYS[j] + bias[t][j]);
    const weights = seen((t, j) => exp(t, j) / sum(t, (i) => exp(t, i)));
    const outputs = steps.map((t) => sum(t, (j) => weights[t][j] * VALUES[j]));
    return { bias: seen((t, j) => bias[t][j]), weights, outputs };
  };

  // --- The picture ---------------------------------------------------------
  const CELL = 37;
  const ROW = 25;
  const LEFT = 26;
  const [TOP, BELOW] = [44, 330];
  const picture = figure.picture(
    LEFT + (T + 1) * CELL + 8,
    BELOW + T * ROW + 4,
    "The biases of each row and key, and the weights and outputs that follow",
  );
  const show = (digits) => (x) => (Number.isNaN(x) ? "" : fwlab.number(x, digits));
  const matrix = (y, options) => fwlab.matrix(T, T, { x: LEFT, y, cell: CELL, height: ROW, ...options });
  const at = (j) => LEFT + (j + 0.5) * CELL;
  const numbers = (y, label, all) => [
    small(0, y, label, MIDDLE),
    ...all.map((x, j) => small(at(j), y, x, { ...MIDDLE, ...CENTRED })),
  ];
  const rows = (y) =>
    steps.map((t) => small(0, y + (t + 0.5) * ROW, t + 1, MIDDLE));
  const biases = matrix(TOP, { limit: LIMIT, show: show(1) });
  const weights = matrix(BELOW, { limit: 1, show: show(2) });
  const outputs = steps.map((t) =>
    text(at(T) + 4, BELOW + (t + 0.5) * ROW, "", { class: "fw-cell-text" }),
  );
  const upper = group({ role: "img" });
  upper.append(
    text(0, 14, "Biases w: rows t, keys t′", BOLD),
    ...numbers(34, "", steps.map((j) => j + 1)),
    ...rows(TOP),
    biases.element,
  );
  const lower = group({ role: "img" });
  lower.append(
    text(0, BELOW - 60, "Weights a, and outputs y", BOLD),
    ...numbers(BELOW - 38, "K", KEYS),
    ...numbers(BELOW - 16, "V", VALUES),
    small(at(T) + 4, BELOW - 16, "y", { ...MIDDLE, ...CENTRED }),
    ...rows(BELOW),
    weights.element,
    ...outputs,
  );

  // The frame around a bias: it is moved, and the slider sets what it holds.
  const frame = { fill: "none", stroke: "var(--fw-other)", "stroke-width": 3 };
  const handle = group();
  handle.append(box(-CELL / 2, -ROW / 2, CELL, ROW, frame), fwlab.reach(13));
  const go = (t, j) => {
    row = Math.max(0, Math.min(t, T - 1));
    key = Math.max(0, Math.min(j, row));
    update();
  };
  const to = (x, y) => go(Math.floor((y - TOP) / ROW), Math.floor((x - LEFT) / CELL));
  fwlab.drag(handle, "Chosen bias", {
    move: to,
    nudge: (x, y) => go(row - y, key + x),
  });
  upper.addEventListener("click", (event) => {
    const matrix = picture.getScreenCTM().inverse();
    const { x, y } = new DOMPoint(event.clientX, event.clientY).matrixTransform(matrix);
    if (y > TOP) to(x, y);
  });
  picture.append(upper, lower, handle);

  // --- Controls --------------------------------------------------------------
  const slider = fwlab.slider(
    "Bias",
    { min: -LIMIT, max: LIMIT, step: 0.5, value: 0, show: (x) => fwlab.number(x, 1) },
    (value) => {
      const { bias, shared } = FORMS[form];
      for (const t of steps)
        for (const j of steps)
          if ((t === row && j === key) || (shared && t - j === row - key)) bias[t][j] = value;
      update();
    },
  );
  const choice = fwlab.choice(
    "Form",
    Object.fromEntries(Object.entries(FORMS).map(([name, { label }]) => [name, label])),
    form,
    (name) => {
      form = name;
      update();
    },
  );
  const note = fwlab.html("p", { class: "fw-note" });

  // --- Words -----------------------------------------------------------------
  const RULES = {
    simple: "all biases are 0",
    local: `biases for the ${WINDOW} latest keys of each row, 0 for older ones`,
    conv: `one bias per distance, for the ${WINDOW} latest keys, 0 for older ones`,
    full: "a bias for every row and key",
  };
  let shown;
  const update = () => {
    shown = compute();
    biases.update(shown.bias);
    weights.update(shown.weights);
    shown.outputs.forEach((y, t) => (outputs[t].textContent = fwlab.number(y)));
    const bias = shown.bias[row][key];
    const free = FORMS[form].free(row, key);
    slider.value = bias;
    slider.querySelector("input").disabled = !free;
    note.textContent = free
      ? FORMS[form].shared
        ? "It moves the whole diagonal."
        : ""
      : "In this form, this bias is always 0. The key still counts.";
    const place = `row ${row + 1}, key ${key + 1}`;
    handle.setAttribute("transform", `translate(${at(key)} ${TOP + (row + 0.5) * ROW})`);
    handle.setAttribute("aria-valuenow", row * T + key);
    handle.setAttribute("aria-valuetext", `${place}: ${fwlab.number(bias, 1)}`);
    const list = (all) => all.map((x) => fwlab.number(x)).join(", ");
    upper.setAttribute("aria-label", `Biases of AFT-${form}: ${RULES[form]}`);
    lower.setAttribute(
      "aria-label",
      `Keys ${KEYS.join(", ")}. Values ${VALUES.join(", ")}. Outputs ${list(shown.outputs)}.`,
    );
    figure.say(
      `AFT-${form}: ${RULES[form]}. Bias of ${place}: ${fwlab.number(bias, 1)}; ` +
        `its weight is ${fwlab.number(shown.weights[row][key])} of 1. ` +
        `Outputs: ${list(shown.outputs)}.`,
    );
  };
  figure.beside(fwlab.controls(choice), fwlab.controls(slider), note);
  update();

  return {
    state: () => ({ form, row: row + 1, key: key + 1, keys: KEYS, values: VALUES, ...shown }),
  };
});
