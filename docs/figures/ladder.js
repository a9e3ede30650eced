// @ts-check
// A ladder of rules: the same eight tokens on every rung. A token wants a step
// with all gates; a rung takes of it what its rule has.
import * as fwlab from "./fwlab.js";
import {
  text, small, box, path, group, BOLD, MIDDLE, CENTRED, html,
} from "./fwlab.js";

fwlab.figure("ladder", (figure) => {
  const KEYS = { A: [0.8, 0.6, 0], B: [-0.6, 0.8, 0], C: [0, 0, 1] };
  const NAMES = Object.keys(KEYS);
  const ONE = [1, 1, 1];
  const swap = (a, b) => ({
    k: fwlab.unit(KEYS[a].map((x, i) => x - KEYS[b][i])),
    v: [0, 0],
    erase: 2,
  });
  const put = (key, v, erase = 1) => ({ k: KEYS[key], v, erase });
  // A step erases none, once or twice of what its key holds, and writes all of v.
  // `fade` is for the rung that cannot erase.
  const TOKENS = [
    { label: "A", says: "A gets a value", steps: [put("A", [1, 0])] },
    { label: "B", says: "B gets a value", steps: [put("B", [0, 1])] },
    { label: "C", says: "C gets a value", steps: [put("C", [1, 1])] },
    { label: "A", says: "A gets another value", fade: 0.5, steps: [put("A", [0, -1])] },
    {
      label: "| A",
      says: "a new topic: only C still counts, A gets a value",
      decay: [0, 0, 1],
      fade: 0,
      steps: [put("A", [0, 1])],
    },
    { label: "+ C", says: "something is added to C", steps: [put("C", [1, -1], 0)] },
    { label: "− C", says: "C changes its sign", steps: [put("C", [0, 0], 2)] },
    {
      label: "↻",
      says: "values move round: A’s to B, B’s to C, C’s to A",
      steps: [swap("B", "C"), swap("A", "B")],
    },
  ];
  const none = () => ONE;
  const perHead = ({ decay = ONE }) => ONE.map(() => Math.min(...decay));
  const perChannel = ({ decay = ONE }) => decay;
  const upTo = (limit) => ({ erase }) => Math.min(erase, limit);
  // How a rung fades, how much it erases, how many steps it takes.
  const RUNGS = {
    sum: { adds: "write pairs", fades: none, erases: () => 0 },
    decay: {
      adds: "fade",
      fades: ({ fade = 1 }) => ONE.map(() => fade),
      erases: () => 0,
    },
    delta: { adds: "replace", fades: none, erases: () => 1 },
    "gated delta": { adds: "fade and replace", fades: perHead, erases: () => 1 },
    "per channel": { adds: "fade a column", fades: perChannel, erases: () => 1 },
    "erase, write": { adds: "write, not erase", fades: perChannel, erases: upTo(1) },
    "β up to 2": { adds: "change a sign", fades: perChannel, erases: upTo(2) },
    "more steps": { adds: "turn", fades: perChannel, erases: upTo(2), many: true },
  };

  // --- The recurrence ------------------------------------------------------
  // What each step of a token gives to the recurrence: d, r, k and v.
  const given = (rung, token) =>
    token.steps.slice(0, rung.many ? undefined : 1).map((step, i) => ({
      d: i ? ONE : rung.fades(token),
      r: step.k.map((x) => rung.erases(step) * x),
      k: step.k,
      v: step.v,
    }));
  const take = (W, { d, r, k, v }) => {
    const faded = W.map((row) => row.map((w, j) => w * d[j]));
    const found = fwlab.read(faded, r);
    const u = v.map((x, i) => x - found[i]);
    return { found, u, W: faded.map((row, i) => row.map((w, j) => w + u[i] * k[j])) };
  };
  const run = (rung) => {
    let W = [ONE.map(() => 0), ONE.map(() => 0)];
    return TOKENS.map((token) => {
      const before = W;
      const steps = given(rung, token).map((step) => {
        const taken = take(W, step);
        W = taken.W;
        return { ...step, ...taken };
      });
      return { before, steps, W, reads: NAMES.map((name) => fwlab.read(W, KEYS[name])) };
    });
  };
  const runs = Object.fromEntries(Object.entries(RUNGS).map(([name, rung]) => [name, run(rung)]));
  // The last rung does all that is wanted.
  const wanted = runs["more steps"].map(({ reads }) => reads);
  const right = (reads, t, n) => reads.every((x, i) => Math.abs(x - wanted[t][n][i]) < 1e-9);
  const marks = (name) => runs[name].map(({ reads }, t) => reads.map((y, n) => right(y, t, n)));
  // The tokens after which every key reads what it should.
  const score = (name) => marks(name).filter((all) => all.every(Boolean)).length;

  let rung = "delta";
  let at = 4; // the token, from 0

  // --- The picture -----------------------------------------------------------
  const [LEFT, CELL, ROW, TOP, LINE] = [22, 43, 40, 60, 19];
  const [WIDE, HIGH, BELOW] = [44, 26, TOP + 3 * ROW + 66];
  const AFTER = LEFT + TOKENS.length * CELL - 3 * WIDE;
  const picture = figure.picture(
    LEFT + TOKENS.length * CELL + 2,
    BELOW + 2 * HIGH + 5 * LINE + 8,
    "What each key reads after each token, and the memory before and after one of them",
  );
  const readings = group({ role: "img" });
  const cells = TOKENS.map(() =>
    NAMES.map((name, n) => ({
      frame: box(0, TOP + n * ROW, CELL, ROW, { class: "fw-cell" }),
      numbers: [0, 1].map((i) =>
        text(CELL - 16, TOP + n * ROW + 12 + 17 * i, "", { class: "fw-cell-text" }),
      ),
      mark: small(2, TOP + (n + 0.5) * ROW, "", MIDDLE),
    })),
  );
  readings.append(
    text(0, 14, "What each key reads after each token", BOLD),
    ...NAMES.map((name, n) => small(4, TOP + (n + 0.5) * ROW, name, { ...MIDDLE, ...BOLD })),
  );
  cells.forEach((column, t) => {
    const all = group({ class: "fw-tap", transform: `translate(${LEFT + t * CELL} 0)` });
    all.append(
      small(CELL / 2, TOP - 24, t + 1, CENTRED),
      text(CELL / 2, TOP - 8, TOKENS[t].label, CENTRED),
      ...column.flatMap(({ frame, numbers, mark }) => [frame, ...numbers, mark]),
    );
    all.addEventListener("click", () => go(t));
    readings.append(all);
  });
  const chosen = box(0, TOP - 37, CELL, 3 * ROW + 38, {
    fill: "none",
    stroke: "var(--fw-other)",
    "stroke-width": 3,
    "pointer-events": "none",
  });
  const memory = group({ role: "img" });
  const [before, after] = [LEFT, AFTER].map((x) =>
    fwlab.matrix(2, 3, { x, y: BELOW, cell: WIDE, height: HIGH, limit: 2 }),
  );
  const task = text(0, BELOW - 36, "", BOLD);
  const middle = BELOW + HIGH;
  const [from, to] = [LEFT + 3 * WIDE + 14, AFTER - 14];
  // Under them, what each step is given, and what comes of it.
  const lines = [...Array(5).keys()].map((line) => {
    const y = BELOW + 2 * HIGH + 6 + (line + 0.5) * LINE;
    return [
      small(4, y, "", { ...MIDDLE, ...BOLD }),
      ...ONE.map((_, i) => text(LEFT + (i + 0.5) * WIDE, y, "", { class: "fw-cell-text" })),
      small(AFTER, y, "", MIDDLE),
    ];
  });
  memory.append(
    ...lines.flat(),
    before.element,
    after.element,
    task,
    small(LEFT, BELOW - 10, "W before"),
    small(AFTER, BELOW - 10, "W after"),
    path({ d: `M${from} ${middle}H${to}m-6 -5l6 5l-6 5` }),
  );
  picture.append(readings, chosen, memory);

  // --- Beside it ---------------------------------------------------------------
  const ladder = html("table", { class: "fw-answers" });
  const drawLadder = () => {
    const heads = ["Rung", "can also", `tokens, of ${TOKENS.length}`];
    const rows = Object.entries(RUNGS).map(([name, { adds }]) => {
      const share = ((100 * score(name)) / TOKENS.length).toFixed(0);
      const bar = html("i", { style: `--share: ${share}%` });
      return html(
        "tr",
        {},
        html("th", { scope: "row" }, name === rung ? html("b", {}, name) : name),
        html("td", {}, adds),
        html("td", {}, score(name), bar),
      );
    });
    ladder.replaceChildren(
      html("thead", {}, html("tr", {}, ...heads.map((x) => html("th", { scope: "col" }, x)))),
      html("tbody", {}, ...rows),
    );
  };

  const choice = fwlab.choice("Rung", Object.fromEntries(Object.keys(RUNGS).map((x) => [x, x])), rung, (name) => {
    rung = name;
    update();
  });
  const slider = fwlab.slider(
    "Token",
    { min: 1, max: TOKENS.length, step: 1, value: at + 1, show: (t) => `${t} of ${TOKENS.length}` },
    (t) => go(t - 1),
  );
  const go = (t) => {
    at = t;
    slider.value = t + 1;
    update();
  };

  const update = () => {
    const shown = runs[rung];
    const all = marks(rung);
    shown.forEach(({ reads }, t) =>
      reads.forEach((y, n) => {
        const { frame, numbers, mark } = cells[t][n];
        numbers.forEach((label, i) => (label.textContent = fwlab.number(y[i], 1)));
        mark.textContent = all[t][n] ? "✓" : "✗";
        mark.setAttribute("fill", all[t][n] ? "currentcolor" : fwlab.WRONG);
        frame.style.fill = all[t][n] ? "transparent" : fwlab.tint(fwlab.WRONG, 12);
      }),
    );
    chosen.setAttribute("x", LEFT + at * CELL);
    const now = shown[at];
    before.update(now.before);
    after.update(now.W);
    task.textContent = `${at + 1}: ${TOKENS[at].says}`;
    const parts = now.steps.flatMap(({ d, r, k, v, found, u }, i) => [
      ...(i ? [] : [["d", d, `value v ${fwlab.vector(v, 1)}`]]),
      ["r", r, `r finds ${fwlab.vector(found, 1)}`],
      ["k", k, `k adds ${fwlab.vector(u, 1)}`],
    ]);
    lines.forEach(([name, ...rest], i) => {
      const [head = "", vector = [], found = ""] = parts[i] ?? [];
      const texts = [...ONE.map((_, j) => (vector.length ? fwlab.number(vector[j], 1) : "")), found];
      name.textContent = head;
      rest.forEach((label, j) => (label.textContent = texts[j]));
    });
    drawLadder();
    const rows = (W) => W.map((x) => x.map((w) => fwlab.number(w, 1)).join(" ")).join("; ");
    memory.setAttribute("aria-label", `W before token ${at + 1}: ${rows(now.before)}. After: ${rows(now.W)}.`);
    const told = NAMES.map((name, n) => {
      const y = `${name} reads ${fwlab.vector(now.reads[n], 1)}`;
      return all[at][n] ? `${y} ✓` : `${y} ✗, expected ${fwlab.vector(wanted[at][n], 1)}`;
    });
    readings.setAttribute(
      "aria-label",
      TOKENS.map(({ label }, t) => `${label}: ${all[t].filter(Boolean).length} of 3 right`).join(". "),
    );
    figure.say(
      `Rung “${rung}”, token ${at + 1} of ${TOKENS.length}: ${TOKENS[at].says}. ${told.join("; ")}. ` +
        `On this rung, all keys are right after ${score(rung)} of ${TOKENS.length} tokens.`,
    );
  };
  figure.beside(fwlab.controls(slider), fwlab.controls(choice), ladder);
  update();

  return {
    state: () => ({
      rung,
      token: at + 1,
      keys: Object.values(KEYS),
      tokens: runs[rung].map(({ steps: all, W, reads }, t) => ({
        steps: all.map(({ d, r, k, v }) => ({ d, r, k, v })),
        W,
        reads,
        wanted: wanted[t],
        right: marks(rung)[t],
      })),
      scores: Object.fromEntries(Object.keys(RUNGS).map((name) => [name, score(name)])),
    }),
  };
});
