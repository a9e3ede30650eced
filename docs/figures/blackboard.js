// @ts-check
// The language of the blackboard: one step of a rule as text, for one head.
//
//   def step(W, k, v, beta):
//       old = W @ k
//       return W + beta * outer(v - old, k)
//
// It is the part of Python that such a step needs, and means what it means with
// PyTorch's tensors, but that nothing changes in place: W += x is W = W + x. What it
// does not know it refuses, with the line. Nothing of the
// page or of JavaScript can be reached from it.

/**
 * A number, a vector or a matrix, row by row.
 * @typedef {{shape: number[], data: Float64Array}} Value
 * @typedef {Record<string, Value>} Scope
 * @typedef {(scope: Scope) => Value} Expression
 */

/** An error in the reader's text, at one of its lines. */
export class Mistake extends Error {
  /** @param {number} line @param {string} message */
  constructor(line, message) {
    super(`line ${line}: ${message}`);
    this.line = line;
  }
}

/** Characters of a rule, and products and the like of one step, at most. */
const [LONGEST, MOST] = [2000, 2e6];
let work = 0;
const spend = (amount) => {
  work += amount;
  if (work > MOST) throw Error("this takes too long: more than two million products");
};

// --- Values -----------------------------------------------------------------

/** @type {(shape: number[], data: Float64Array) => Value} */
export const value = (shape, data) => ({ shape, data });
export const number = (x) => value([], Float64Array.of(x));
export const vector = (x) => value([x.length], Float64Array.from(x));
const size = (shape) => shape.reduce((product, n) => product * n, 1);

/** Say what a value is. */
export const kind = ({ shape }) =>
  ["a number", `a vector of ${shape[0]}`, `a matrix of ${shape.join(" × ")}`][
    shape.length
  ];

const map = (f) => ({ shape, data }) => {
  spend(data.length);
  const all = new Float64Array(data.length);
  for (let i = 0; i < all.length; i++) all[i] = f(data[i]);
  return value(shape, all);
};

/** Apply `f` to pairs of numbers: a number goes with all, a vector with every row. */
const pairs = (f, sign) => (a, b) => {
  const [big, small] = a.shape.length < b.shape.length ? [b, a] : [a, b];
  const tail = big.shape.slice(big.shape.length - small.shape.length);
  if (small.shape.some((n, i) => n !== tail[i]))
    throw Error(`${kind(a)} ${sign} ${kind(b)} do not fit`);
  const [n, left, right] = [size(big.shape), size(a.shape), size(b.shape)];
  spend(n);
  const [all, of, and] = [new Float64Array(n), a.data, b.data];
  for (let i = 0, x = 0, y = 0; i < n; i++) {
    all[i] = f(of[x], and[y]);
    if (++x === left) x = 0;
    if (++y === right) y = 0;
  }
  return value(big.shape, all);
};

/** Multiply matrices and vectors: a vector is a row on the left, a column on the right. */
const product = (a, b) => {
  const [rows, inner] = a.shape.length === 2 ? a.shape : [1, ...a.shape];
  const [same, columns] = b.shape.length === 2 ? b.shape : [...b.shape, 1];
  if (!a.shape.length || !b.shape.length)
    throw Error(`@ takes vectors and matrices, not ${kind(a.shape.length ? b : a)}`);
  if (inner !== same) throw Error(`${kind(a)} @ ${kind(b)} do not fit`);
  spend(rows * inner * columns);
  const [all, of, and] = [new Float64Array(rows * columns), a.data, b.data];
  for (let i = 0; i < rows; i++)
    for (let c = 0; c < columns; c++) {
      let sum = 0;
      for (let j = 0; j < inner; j++) sum += of[i * inner + j] * and[j * columns + c];
      all[i * columns + c] = sum;
    }
  return value([...a.shape.slice(0, -1), ...b.shape.slice(1)], all);
};

/** @type {(name: string, ...x: Value[]) => void} */
const vectors = (name, ...x) => {
  for (const each of x)
    if (each.shape.length !== 1) throw Error(`${name} takes vectors, not ${kind(each)}`);
};
const total = (x) => x.data.reduce((sum, a) => sum + a, 0);
const outer = (a, b) => {
  vectors("outer", a, b);
  return product(value([a.data.length, 1], a.data), value([1, b.data.length], b.data));
};
const diagonal = (x) => {
  vectors("diag", x);
  const n = x.data.length;
  spend(n * n);
  return value([n, n], new Float64Array(n * n).map((_, i) => (i % (n + 1) ? 0 : x.data[i / (n + 1)])));
};
const COMPARISONS = new Map([
  ["<", pairs((a, b) => +(a < b), "<")],
  [">", pairs((a, b) => +(a > b), ">")],
  ["<=", pairs((a, b) => +(a <= b), "<=")],
  [">=", pairs((a, b) => +(a >= b), ">=")],
]);
/** Keep `x` where a condition is 1, and take `y` elsewhere. */
const where = (condition, x, y) => {
  const like = pairs((a) => a, "and")(pairs((_, a) => a, "and")(condition, x), y);
  const wide = (part) => pairs((_, a) => a, "and")(like, part).data;
  const [yes, a, b] = [condition, x, y].map(wide);
  return value(like.shape, Float64Array.from(yes, (c, i) => (c ? a[i] : b[i])));
};

/** The functions, with the number of their arguments. @type {Record<string, [number, any]>} */
export const FUNCTIONS = {
  outer: [2, outer],
  diag: [1, diagonal],
  sum: [1, (x) => number(total(x))],
  norm: [1, (x) => number(Math.sqrt(total(map((a) => a * a)(x))))],
  exp: [1, map(Math.exp)],
  log: [1, map(Math.log)],
  sqrt: [1, map(Math.sqrt)],
  abs: [1, map(Math.abs)],
  sign: [1, map(Math.sign)],
  relu: [1, map((x) => (x > 0 ? x : x - x))], // NaN stays
  tanh: [1, map(Math.tanh)],
  sigmoid: [1, map((x) => 1 / (1 + Math.exp(-x)))],
  maximum: [2, pairs((a, b) => (a > b || a !== a ? a : b), "and")],
  minimum: [2, pairs((a, b) => (a < b || a !== a ? a : b), "and")],
  where: [3, where],
};

// --- From text to functions -------------------------------------------------

const WORD = /\*\*|[<>]=|[A-Za-z_]\w*|(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?|\S/gi;
const NAME = /^[A-Za-z_]\w*$/;
const SUMS = {
  "+": pairs((a, b) => a + b, "+"),
  "-": pairs((a, b) => a - b, "-"),
};
const PRODUCTS = {
  "*": pairs((a, b) => a * b, "*"),
  "/": pairs((a, b) => a / b, "/"),
  "@": product,
};
const WORDS_OF_PYTHON =
  /^(and|as|assert|async|await|break|class|continue|def|del|elif|else|except|finally|for|from|global|if|import|in|is|lambda|nonlocal|not|or|pass|raise|return|try|while|with|yield|True|False|None)$/;
const power = pairs((a, b) => a ** b, "**");
const list = (names) => [...names].join(", ");
const strange = (word) => {
  if (word === ".") return "there are no methods here, such as W.T";
  if (word === "[") return "there are no parts here, such as k[0]";
  return `did not expect ${word}`;
};

/** Read one expression. @returns {Expression} */
const parse = (text, known, fail) => {
  const words = text.match(WORD) ?? [];
  let at = 0;
  const take = (word) => words[at] === word && !!++at;
  const need = (word) => {
    if (!take(word)) fail(`expected ${word} ${at in words ? `before ${words[at]}` : "at the end"}`);
  };
  /** Join what `next` reads by operators of one rank, from the left. */
  const chain = (operators, next) => () => {
    let left = next();
    while (Object.hasOwn(operators, words[at] ?? "")) {
      const [f, a, b] = [operators[words[at++]], left, next()];
      left = (scope) => f(a(scope), b(scope));
    }
    return left;
  };
  const signed = () => {
    if (take("+")) return signed();
    if (!take("-")) return raised();
    const x = signed();
    return (scope) => map((a) => -a)(x(scope));
  };
  const raised = () => {
    const base = atom();
    if (!take("**")) return base;
    const exponent = signed(); // to the right: 2 ** 3 ** 2 is 2 ** 9
    return (scope) => power(base(scope), exponent(scope));
  };
  const sum = chain(SUMS, chain(PRODUCTS, signed));
  const condition = () => {
    const left = sum();
    const f = COMPARISONS.get(words[at]);
    if (!f) return fail("where begins with a comparison, such as where(k > 0, k, 0)");
    at++;
    const right = sum();
    return (scope) => f(left(scope), right(scope));
  };
  const call = (name) => {
    const [count, f] = Object.hasOwn(FUNCTIONS, name) ? FUNCTIONS[name] : [];
    if (!f) fail(`no function ${name}; there are ${list(Object.keys(FUNCTIONS))}`);
    const parts = [];
    while (!take(")")) {
      if (parts.length) need(",");
      parts.push(name === "where" && !parts.length ? condition() : sum());
    }
    if (parts.length !== count) fail(`${name} takes ${count}, not ${parts.length}`);
    return (scope) => f(...parts.map((part) => part(scope)));
  };
  const atom = () => {
    const word = words[at++];
    if (word === undefined) return fail("something is missing at the end");
    if (word === "(") {
      const inner = sum();
      need(")");
      return inner;
    }
    if (/^[\d.]/.test(word) && !Number.isNaN(+word)) {
      const x = number(+word);
      return () => x;
    }
    if (!NAME.test(word)) return fail(strange(word));
    if (take("(")) return call(word);
    if (!known.has(word)) fail(`no name ${word}; there are ${list(known)}`);
    return (scope) => scope[word];
  };
  let whole;
  try {
    whole = sum();
  } catch (error) {
    if (error instanceof RangeError) fail("there are too many brackets");
    throw error;
  }
  if (COMPARISONS.has(words[at])) fail(`${words[at]} is for where(k > 0, k, 0) alone`);
  if (at < words.length) fail(strange(words[at]));
  return whole;
};

const HEAD = /^def\s+\w+\s*\(([^)]*)\)\s*:\s*$/;
const LINE =
  /^\s+(?:return\b(?<result>.*)|(?<name>[a-z_]\w*)\s*(?<sign>\*\*|[-+*/@])?=(?!=)(?<right>.*))$/i;

/**
 * Read a rule.
 * @param {string} text a function `step`, as above.
 * @param {string[]} inputs names that it may take, W first.
 * @returns {(given: Scope) => Value} a function of these inputs that returns the next W.
 *   Both throw `Mistake`.
 */
export const compile = (text, inputs) => {
  const fails = (at) => (message) => {
    throw new Mistake(at, message);
  };
  if (text.length > LONGEST) fails(1)(`a rule has at most ${LONGEST} characters`);
  const [head, ...body] = text
    .split("\n")
    .map((line, i) => ({ line: line.replace(/#.*/, "").trimEnd(), at: i + 1 }))
    .filter(({ line }) => line);
  const takes = HEAD.exec(head?.line ?? "")?.[1].match(/[^\s,]+/g);
  if (!takes) fails(1)("write def step(W, k, v, beta): and nothing else");
  for (const name of takes)
    if (!inputs.includes(name))
      fails(head.at)(`no input ${name}; there are ${list(inputs)}`);
  const known = new Set(takes);
  if (known.size < takes.length) fails(head.at)("an input stands there twice");
  let ended = false;
  const steps = body.map(({ line, at }) => {
    const fail = fails(at);
    if (ended) fail("nothing comes after return");
    if (!/^\s/.test(line)) fail("put spaces before it, since it is inside step");
    const { result, name = "", sign, right } = LINE.exec(line)?.groups ?? {};
    if (result === undefined && !name) fail("write name = ... or return ...");
    if (WORDS_OF_PYTHON.test(name)) fail(`${name} is a word of Python, not a name`);
    if (Object.hasOwn(FUNCTIONS, name)) fail(`${name} is a function; take another name`);
    if (sign) parse(right, known, fail); // it is an expression by itself
    const run = parse(sign ? `${name} ${sign} (${right})` : (result ?? right), known, fail);
    ended = result !== undefined;
    known.add(name);
    return { name, run, at };
  });
  const last = (body.at(-1) ?? head).at;
  if (!ended) fails(last)("end with return, and the new W");
  return (given) => {
    work = 0;
    const scope = Object.fromEntries(takes.map((name) => [name, given[name]]));
    for (const { name, run, at } of steps)
      try {
        scope[name] = run(scope); // what is returned has no name
      } catch (error) {
        throw new Mistake(at, error.message);
      }
    const W = scope[""];
    if (String(W.shape) !== String(given.W.shape))
      fails(last)(`return the new W, ${kind(given.W)}, not ${kind(W)}`);
    return W;
  };
};
