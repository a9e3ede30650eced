// @ts-check
// The biases of AFT, one by one: four forms of one table, and the weights and
// outputs that follow from it.
import { number } from "./words.js";
import { choice, figure, html, slider, table } from "./kit.js";

const [T, WINDOW, LIMIT] = [8, 3, 4]; // LIMIT: of a bias
const keys = [0, 0, 1, 0, 0, 0, 2, 0];
const values = [0, 1, 0, 0, 0, 1, 0, 0];
const steps = [...Array(T).keys()];
const square = (cell) => steps.map((t) => steps.map((j) => cell(t, j)));
const near = (t, j) => j <= t && t - j < WINDOW;
const FULL = [
  [0], [1, 0], [0, 2, -1], [3, 0, 0, 1], [0, 3, -2, 0, 0], [0, 0, 0, 2, 0, -1],
  [1, 0, 0, 0, -2, 0, -3], [0, 4, 0, 0, 0, 2, -2, 0],
];
// Where a bias is free, what it is at first, and whether its diagonal goes with it.
const FORMS = {
  simple: { free: () => false, start: () => 0, rule: "all biases are 0" },
  local: {
    free: near,
    start: (t, j) => ((3 * t + 5 * j) % 6) - 2,
    rule: `biases for the ${WINDOW} latest keys of each row, 0 for older ones`,
  },
  conv: {
    free: near,
    start: (t, j) => [0, 3, -1][t - j],
    shared: true,
    rule: `one bias per distance, for the ${WINDOW} latest keys, 0 for older ones`,
  },
  full: {
    free: (t, j) => j <= t,
    start: (t, j) => FULL[t][j],
    rule: "a bias for every row and key",
  },
};
for (const form of Object.values(FORMS))
  form.bias = square((t, j) => (form.free(t, j) ? form.start(t, j) : 0));

export default figure("biases", {
  state: { form: "conv", row: 6, key: 5 },
  compute: ({ form }) => {
    const seen = (cell) => square((t, j) => (j <= t ? cell(t, j) : NaN));
    const bias = seen((t, j) => FORMS[form].bias[t][j]);
    const sum = (t, term) => steps.slice(0, t + 1).reduce((all, j) => all + term(j), 0);
    const e = (t, j) => Math.exp(keys[j] + bias[t][j]);
    const weights = seen((t, j) => e(t, j) / sum(t, (i) => e(t, i)));
    const outputs = steps.map((t) => sum(t, (j) => weights[t][j] * values[j]));
    return { bias, weights, outputs, keys, values };
  },
  view: ({ row, key }, { bias, weights, outputs }, set) => html`
    ${table({
      title: "Biases w: rows t, keys t′",
      heads: [["", steps.map((j) => j + 1)]],
      rows: bias.map((all, t) => [t + 1, all]),
      limit: LIMIT,
      chosen: [row - 1, key - 1],
      choose: (t, j) => {
        const to = Math.max(1, Math.min(t + 1, T));
        set({ row: to, key: Math.max(1, Math.min(j + 1, to)) });
      },
    })}
    ${table({
      title: "Weights a, and outputs y",
      heads: [["K", [...keys, ""]], ["V", [...values, "y"]]],
      rows: weights.map((all, t) => [t + 1, all, number(outputs[t])]),
      digits: 2,
    })}`,
  controls: ({ form, row, key }, { bias }, set) => {
    const { free, shared, bias: own } = FORMS[form];
    const [i, j] = [row - 1, key - 1];
    const value = bias[i][j];
    const range = { min: -LIMIT, max: LIMIT, step: 0.5, value, shown: number(value, 1) };
    const change = (value) => {
      for (const t of steps)
        for (const k of steps)
          if (shared ? t - k === i - j : t === i && k === j) own[t][k] = value;
      set({});
    };
    return html`${choice("Form", Object.keys(FORMS), form, (form) => set({ form }))}
      ${slider("Bias", { ...range, disabled: !free(i, j) }, change)}
      <p class="fw-note">${
        free(i, j)
          ? shared && "It moves the whole diagonal."
          : "In this form, this bias is always 0. The key still counts."
      }</p>`;
  },
  say: ({ form, row, key }, { bias, weights, outputs }) =>
    `AFT-${form}: ${FORMS[form].rule}. Bias of row ${row}, key ${key}: ` +
    `${number(bias[row - 1][key - 1], 1)}; its weight is ${number(weights[row - 1][key - 1])} ` +
    `of 1. Outputs: ${outputs.map((y) => number(y)).join(", ")}.`,
});
