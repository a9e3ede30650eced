// @ts-check
// What a rule has to remember: three tasks, and how well it does.
//
// All rules read the same tokens and are told the same gates. A reading is right if the
// value that the task wants is the nearest, by direction, of all values that were written.
import { direction, dot, random } from "./algebra.js";
import { number, value, vector } from "./blackboard.js";

/**
 * @typedef {import("./blackboard.js").Value} Value
 * @typedef {{task: string, pairs: number, width: number, length: number,
 *   strength: number, two: boolean}} Setting
 * A token, what each key should hold after it (-1 = it is not asked), and how many
 * values are known by then.
 * @typedef {{words: string, given: Record<string, Value>, want: number[],
 *   known: number}} Token
 * @typedef {{words: string, numbers: number[]}} Named
 * @typedef {{tokens: Token[], keys: Named[], values: Named[], width: number}} Draw
 */

export const TASKS = {
  replace: "Replace: half of the keys get another value",
  forget: "Forget: the topic changes",
  track: "Track: values change places",
};

/** The inputs of a step, and where they come from. */
export const INPUTS = {
  W: "the memory, a row for each channel of a value, a column for each of a key",
  k: "the key",
  v: "the value; 0 where values change places",
  beta: "the strength β: that of the slider, or the largest where values change places",
  alpha: "the decay α: 0 at the first token of a new topic, otherwise 1",
  alphas: "the same for each channel of a key",
  erase: "β for each channel of a key",
  write: "β for each channel of a value",
  c: "what Comba asks its key with: 1",
  n: "tokens since the topic began",
  k2: "the key of a second step: that of the token before",
  v2: "the value of a second step",
  beta2: "its strength; 0 where values change places",
};

const all = (n, x) => vector(Array(n).fill(x));
const count = (n) => Array.from({ length: n }, (_, i) => i);

/**
 * Draw the tokens of a task.
 * @param {Setting} setting
 * @param {number} seed the same number gives the same tokens.
 * @returns {Draw}
 */
export const draw = ({ task, pairs, width, length, strength, two }, seed) => {
  const normal = random(`${task} ${seed}`);
  const below = (n) => Math.floor(1e6 * Math.abs(normal())) % n;
  /** @type {Draw} */
  const drawn = { tokens: [], keys: [], values: [], width };
  const want = [];
  let [n, before] = [0, { k: all(width, 0), v: all(width, 0), beta: number(0) }];
  const key = (words, numbers = direction(normal, width)) => {
    want.push(-1);
    return drawn.keys.push({ words, numbers }) - 1;
  };
  const named = (words, numbers = direction(normal, width)) =>
    drawn.values.push({ words, numbers }) - 1;
  const token = (words, at, numbers, beta, alpha = 1) => {
    n = alpha < 1 ? 1 : n + 1;
    const own = { k: vector(at.map((x) => length * x)), v: vector(numbers), beta: number(beta) };
    const again = task === "track" || alpha < 1 ? 0 : 1;
    drawn.tokens.push({
      words,
      want: [...want],
      known: drawn.values.length,
      given: {
        ...own,
        ...{ alpha: number(alpha), alphas: all(width, alpha), c: number(1), n: number(n) },
        ...{ erase: all(width, beta), write: all(width, beta) },
        ...{ k2: before.k, v2: before.v, beta2: number(again * before.beta.data[0]) },
      },
    });
    before = own;
  };
  /** Write a value under a key. */
  const put = (at, id, alpha = 1) => {
    want[at] = id;
    const { keys, values } = drawn;
    const words = `${keys[at].words} gets ${values[id].words}`;
    token(words, keys[at].numbers, values[id].numbers, strength, alpha);
  };
  if (task === "replace") {
    for (const i of count(pairs)) put(key(`key ${i + 1}`), named(`value ${i + 1}`));
    for (const i of count(pairs).filter((i) => i % 2 === 0))
      put(i, named(`new value ${i + 1}`));
  }
  if (task === "forget") {
    for (const i of count(pairs)) put(key(`old key ${i + 1}`), named(`old value ${i + 1}`));
    want.fill(-1);
    for (const i of count(pairs))
      put(key(`key ${i + 1}`), named(`value ${i + 1}`), i === 0 ? 0 : 1);
  }
  if (task === "track") {
    const places = Math.min(pairs, width - 1);
    const axis = (i) => count(width).map((j) => +(i === j));
    for (const i of count(places)) put(key(`place ${i + 1}`, axis(i)), named(`value ${i + 1}`));
    const sign = key("the sign", axis(places));
    const plus = named("plus");
    const minus = named("minus", drawn.values[plus].numbers.map((x) => -x));
    put(sign, plus);
    const turn = two ? 2 : 1;
    for (const _ of count(2 * places)) {
      const [i, j] = [below(places), below(places + 1)];
      if (i === j || j === places) {
        want[sign] = want[sign] === plus ? minus : plus;
        token("the sign turns", axis(places), Array(width).fill(0), turn);
      } else {
        [want[i], want[j]] = [want[j], want[i]];
        const between = axis(i).map((x, c) => (x - axis(j)[c]) * Math.SQRT1_2);
        const words = `places ${i + 1} and ${j + 1} swap`;
        token(words, between, Array(width).fill(0), turn);
      }
    }
  }
  return drawn;
};

/** Measure how much of each value each key reads: a row for each value. */
export const readings = ({ data }, { keys, values, width }) => {
  const out = new Float64Array(values.length * keys.length);
  for (const [j, { numbers: key }] of keys.entries()) {
    const y = Array.from({ length: width }, (_, i) => dot(data, key, i * width));
    for (const [i, { numbers }] of values.entries()) out[i * keys.length + j] = dot(numbers, y);
  }
  return value([values.length, keys.length], out);
};

/**
 * Run a rule on tokens.
 * @param {(given: any) => Value} step
 * @param {Draw} drawn
 * @param {(W: Value) => unknown} [after] is given W after each token.
 * @returns {{W: Value, diverged: number}} the last W, and the number of the token at
 *   which it was no longer finite; -1 = none.
 */
export const run = (step, { tokens, width }, after) => {
  let W = value([width, width], new Float64Array(width * width));
  for (const [at, { given }] of tokens.entries()) {
    W = step({ W, ...given });
    after?.(W);
    if (!Number.isFinite(W.data.reduce((sum, x) => sum + x, 0))) return { W, diverged: at + 1 };
  }
  return { W, diverged: -1 };
};

/**
 * List what is read wrongly after a token: the key, what it should read, and the value
 * that it reads; -1 = nothing.
 */
export const wrong = (W, drawn, at = drawn.tokens.length) => {
  const { data } = readings(W, drawn);
  const columns = drawn.keys.length;
  return drawn.tokens[at - 1].want
    .map((want, key) => {
      let [reads, most] = [-1, 1e-9];
      for (let i = 0; i < drawn.tokens[at - 1].known; i++)
        if (want >= 0 && data[i * columns + key] > most)
          [reads, most] = [i, data[i * columns + key]];
      return { key, want, reads };
    })
    .filter(({ want, reads }) => want !== reads);
};

/** Return the share of keys that read what they should; 0 if W diverges. */
export const share = (step, drawn) => {
  const { W, diverged } = run(step, drawn);
  if (diverged >= 0) return 0;
  const asked = drawn.tokens.at(-1).want.filter((want) => want >= 0).length;
  return 1 - wrong(W, drawn).length / asked;
};

/** Say what a rule gets wrong in the first draw; "" = nothing. */
export const failure = (step, setting) => {
  const drawn = draw(setting, 0);
  const { W, diverged } = run(step, drawn);
  if (diverged >= 0) return "W is no longer finite";
  const [first] = wrong(W, drawn);
  if (!first) return "";
  const { key, want, reads } = first;
  const [read, right] = [reads, want].map((i) => (i < 0 ? "nothing" : drawn.values[i].words));
  return `${drawn.keys[key].words} reads ${read}, not ${right}`;
};
