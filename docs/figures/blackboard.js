// @ts-check
// The language of the blackboard: one step of a rule as text, for one head.
//
//   def step(W, k, v, beta):
//       old = W @ k
//       return W + beta * outer(v - old, k)
//
// It is the part of Python that such a step needs, and means what it means with
// PyTorch's tensors, except that nothing changes in place: W += x is W = W + x. What
// it does not know it refuses, with the line; nothing of the page can be reached.

/**
 * A number, a vector or a matrix, row by row.
 * @typedef {{shape: number[], data: Float64Array}} Value
 * @typedef {Record<string, Value>} Scope
 * @typedef {(scope: Scope) => Value} Expression
 */

/** At most: characters of a rule, brackets of a line, products and the like of a step. */
const [LONGEST, BRACKETS, MOST] = [2000, 50, 2e6];
let work = 0;
const spend = (amount) => {
  work += amount;
  if (work > MOST) throw Error("this takes too long: more than two million products");
};

// --- Values -----------------------------------------------------------------

export const value = (shape, data) => /** @type {Value} */ ({ shape, data });
export const number = (x) => value([], Float64Array.of(x));
export const vector = (x) => value([x.length], Float64Array.from(x));

const kind = ({ shape }) =>
  ["a number", "a vector of ", "a matrix of "][shape.length] + shape.join(" × ");

/** Apply `f` number by number: a number goes with all, a vector with every row. */
const each = (f, sign = "") => (...values) => {
  const { shape } = values.reduce((a, b) => {
    const [big, small] = a.shape.length < b.shape.length ? [b, a] : [a, b];
    const tail = big.shape.slice(big.shape.length - small.shape.length);
    if (String(tail) === String(small.shape)) return big;
    throw Error(`${kind(a)} ${sign} ${kind(b)} do not fit`);
  });
  const all = new Float64Array(shape.reduce((product, n) => product * n, 1));
  spend(all.length);
  const [{ data: a }, { data: b } = values[0], { data: c } = values[0]] = values;
  for (let i = 0; i < all.length; i++)
    all[i] = f(a[i % a.length], b[i % b.length], c[i % c.length]);
  return value(shape, all);
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

const total = (x) => x.data.reduce((sum, a) => sum + a, 0);
const vectors = (name, ...values) => {
  for (const x of values)
    if (x.shape.length !== 1) throw Error(`${name} takes vectors, not ${kind(x)}`);
};
const outer = (a, b) => {
  vectors("outer", a, b);
  return product(value([a.data.length, 1], a.data), value([1, b.data.length], b.data));
};
const diagonal = (x) => {
  vectors("diag", x);
  const n = x.data.length;
  const at = (_, i) => (i % (n + 1) ? 0 : x.data[i / (n + 1)]);
  return value([n, n], new Float64Array(n * n).map(at));
};

/** The functions, with the number of their arguments. @type {Record<string, [number, any]>} */
const FUNCTIONS = {
  __proto__: null,
  outer: [2, outer],
  diag: [1, diagonal],
  sum: [1, (x) => number(total(x))],
  norm: [1, (x) => number(Math.sqrt(total(each((a) => a * a)(x))))],
  exp: [1, each(Math.exp)],
  log: [1, each(Math.log)],
  sqrt: [1, each(Math.sqrt)],
  abs: [1, each(Math.abs)],
  sign: [1, each(Math.sign)],
  relu: [1, each((x) => (x > 0 ? x : x - x))], // NaN stays
  tanh: [1, each(Math.tanh)],
  sigmoid: [1, each((x) => 1 / (1 + Math.exp(-x)))],
  maximum: [2, each((a, b) => (a > b || a !== a ? a : b), "and")],
  minimum: [2, each((a, b) => (a < b || a !== a ? a : b), "and")],
  where: [3, each((c, x, y) => (c ? x : y), "and")],
};
/** The operators, with their ranks. @type {Record<string, [number, any]>} */
const OPERATORS = {
  __proto__: null,
  "<": [0, each((a, b) => +(a < b), "<")],
  ">": [0, each((a, b) => +(a > b), ">")],
  "<=": [0, each((a, b) => +(a <= b), "<=")],
  ">=": [0, each((a, b) => +(a >= b), ">=")],
  "+": [1, each((a, b) => a + b, "+")],
  "-": [1, each((a, b) => a - b, "-")],
  "*": [2, each((a, b) => a * b, "*")],
  "/": [2, each((a, b) => a / b, "/")],
  "@": [2, product],
  "**": [4, each((a, b) => a ** b, "**")],
};
const SIGN = 3; // the rank of one before its operand: -x ** 2 is -(x ** 2)
const negative = each((a) => -a);

// --- From text to functions -------------------------------------------------

const WORD = /\*\*|\/\/|[<>]=|[A-Za-z_]\w*|(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?|\S/gi;
const WORDS_OF_PYTHON = /^(False|None|True|and|as|assert|async|await|break|class|continue|def|del|elif|else|except|finally|for|from|global|if|import|in|is|lambda|nonlocal|not|or|pass|raise|return|try|while|with|yield)$/;

/** Read one expression. @returns {Expression} */
const parse = (text, known, fail) => {
  const words = text.match(WORD) ?? [];
  if (words.filter((word) => word === "(").length > BRACKETS) fail("there are too many brackets");
  let at = 0;
  const take = (word) => words[at] === word && !!++at;
  const need = (word) => take(word) || fail(`expected ${word} before ${words[at] ?? "the end"}`);
  const strange = (word) => {
    if (word === ".") fail("there are no methods here, such as W.T");
    if (word === "[") fail("there are no parts here, such as k[0]");
    if (OPERATORS[word]?.[0] === 0) fail(`${word} is for where(k > 0, k, 0) alone`);
    return fail(word === "//" ? "there is no //" : `did not expect ${word}`);
  };
  const join = (f, a, b) => (scope) => f(a(scope), b(scope));
  /** Read what operators of this rank or above join. */
  const joined = (least) => {
    const minus = take("-");
    const first = minus || take("+") ? joined(SIGN) : operand();
    let left = minus ? (scope) => negative(first(scope)) : first;
    for (;;) {
      const [rank, f] = OPERATORS[words[at]] ?? [-1];
      if (rank < least) return left;
      at++;
      // From the left; but 2 ** 3 ** 2 is 2 ** 9.
      left = join(f, left, joined(Math.min(rank + 1, SIGN)));
    }
  };
  const sum = () => joined(1);
  const condition = () => {
    const left = sum();
    const [rank, f] = OPERATORS[words[at++]] ?? [];
    if (rank !== 0) fail("where begins with a comparison, such as where(k > 0, k, 0)");
    return join(f, left, sum());
  };
  const call = (name) => {
    const [count, f] =
      FUNCTIONS[name] ?? fail(`no function ${name}; there are ${Object.keys(FUNCTIONS).join(", ")}`);
    const parts = [];
    while (!take(")")) {
      if (parts.length) need(",");
      parts.push(name === "where" && !parts.length ? condition() : sum());
    }
    if (parts.length !== count) fail(`${name} takes ${count}, not ${parts.length}`);
    return (scope) => f(...parts.map((part) => part(scope)));
  };
  const operand = () => {
    const word = words[at++];
    if (!word || word in OPERATORS || /[,)]/.test(word)) fail(`something is missing before ${word ?? "the end"}`);
    if (/^\.?\d/.test(word)) {
      const x = number(+word);
      return () => x;
    }
    if (word === "(") {
      const inner = sum();
      need(")");
      return inner;
    }
    if (!/^[A-Za-z_]\w*$/.test(word)) strange(word);
    if (take("(")) return call(word);
    if (!known.has(word)) fail(`no name ${word}; there are ${[...known].join(", ")}`);
    return (scope) => scope[word];
  };
  const whole = sum();
  if (at < words.length) strange(words[at]);
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
 *   Both throw errors that name a line.
 */
export const compile = (text, inputs) => {
  const fails = (at) => (message) => {
    throw Error(`line ${at}: ${message}`);
  };
  if (text.length > LONGEST) fails(1)(`a rule has at most ${LONGEST} characters`);
  const [head, ...body] = text
    .split("\n")
    .map((line, i) => ({ line: line.replace(/#.*/, "").trimEnd(), at: i + 1 }))
    .filter(({ line }) => line);
  const takes = HEAD.exec(head?.line ?? "")?.[1].match(/[^\s,]+/g);
  if (!takes) fails(1)("write def step(W, k, v, beta): and nothing else");
  const other = takes.find((name) => !inputs.includes(name));
  if (other) fails(head.at)(`no input ${other}; there are ${inputs.join(", ")}`);
  const known = new Set(takes);
  if (known.size < takes.length) fails(head.at)("an input stands there twice");
  let ended = false;
  const steps = body.map(({ line, at }) => {
    const fail = fails(at);
    if (ended) fail("nothing comes after return");
    if (!/^\s/.test(line)) fail("put spaces before it, since it is inside step");
    const { result, name = "", sign, right } = LINE.exec(line)?.groups ?? fail("write name = ... or return ...");
    if (WORDS_OF_PYTHON.test(name)) fail(`${name} is a word of Python, not a name`);
    if (name in FUNCTIONS) fail(`${name} is a function; take another name`);
    if (sign) parse(right, known, fail); // it is an expression by itself
    const run = parse(sign ? `${name} ${sign} (${right})` : (result ?? right), known, fail);
    ended = result !== undefined;
    known.add(name);
    return { name, run, at };
  });
  const last = fails((body.at(-1) ?? head).at);
  if (!ended) last("end with return, and the new W");
  return (given) => {
    work = 0;
    const scope = Object.fromEntries(takes.map((name) => [name, given[name]]));
    for (const { name, run, at } of steps)
      try {
        scope[name] = run(scope); // what is returned has no name
      } catch (error) {
        fails(at)(error.message);
      }
    const W = scope[""];
    if (String(W.shape) !== String(given.W.shape))
      last(`return the new W, ${kind(given.W)}, not ${kind(W)}`);
    return W;
  };
};
