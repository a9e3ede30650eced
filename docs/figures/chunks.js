// @ts-check
// The delta rule in chunks, with fwlab's numbers, in a race with the loop. Folded
// below it: which blocks of the triangle of pairs are computed, what is kept, and
// the way back.
// @ts-expect-error: docs/hooks/frames.py computes it
import { loop, sizes } from "fwlab-chunks";
import * as fwlab from "./fwlab.js";
import { html, render } from "./kit.js";
import {
  text, path, group, vector, tint, BOLD, MIDDLE, CENTRED, END,
} from "./fwlab.js";

fwlab.figure("chunks", (figure) => {
  const T = 12;
  const D = 2;
  // Numbers kept for the way back besides the inputs; multiplications of the
  // matrix products of the way forward; and how many must wait for another.
  const count = (time, d, C) => {
    const chunked = (size) =>
      (time / size) *
      (4 * size * size * d + 3 * size * d * d + (size * (size - 1) * (size - 2)) / 6);
    return {
      inputs: time * (3 * d + 1),
      naive: { kept: time * d * d, multiplications: 3 * time * d * d, order: time },
      full: {
        kept: 2 * time * time,
        multiplications: chunked(time),
        order: 1,
      },
      chunked: {
        kept: (time / C) * d * d,
        multiplications: chunked(C),
        order: time / C,
      },
    };
  };

  // A tick of the race is one look-up or one write: of a step in the loop, of
  // a chunk in the chunked form, which needs one more tick before its chunks
  // and one after them. The way back follows when the loop is through.
  const RACE = 2 * T;
  const stagesOf = (C) => {
    const forward = [...Array(T / C).keys()];
    const chunked = [
      { name: "start", chunk: 0 },
      { name: "inverse", chunk: 0 },
      ...forward.flatMap((chunk) => [
        { name: "errors", chunk },
        { name: "state", chunk },
      ]),
      { name: "outputs", chunk: T / C - 1 },
    ];
    const last = chunked.length - 1;
    const stages = Array.from({ length: RACE + 1 }, (_, t) => chunked[Math.min(t, last)]);
    stages.push(
      { name: "recompute", chunk: T / C - 1 },
      ...forward.reverse().map((chunk) => ({ name: "backward", chunk })),
      { name: "gradients", chunk: 0 },
    );
    return { stages, arrival: last };
  };
  // What the race has cost so far. For the whole of it, these are the formulas
  // of `count`.
  const costs = () => {
    const ticks = Math.min(at, RACE);
    const through = Math.floor(ticks / 2);
    const once = D * D; // a state and a key
    const chunks = T / C;
    const price = {
      start: 0,
      inverse: chunks * (C * C * D + (C * (C - 1) * (C - 2)) / 6),
      errors: C * once + C * C * D,
      state: C * once,
      outputs: chunks * (2 * C * C * D + C * once),
    };
    const past = stages.slice(0, Math.min(ticks, arrival) + 1).map(({ name }) => name);
    const written = past.filter((name) => name === "state").length;
    return {
      naive: {
        kept: through * once,
        multiplications: (3 * through + (ticks % 2)) * once,
        order: through,
      },
      chunked: {
        kept: Math.min(written + Number(past.length > 1), chunks) * once,
        multiplications: past.reduce((sum, name) => sum + price[name], 0),
        order: written,
      },
    };
  };

  let C = 4;
  let at = 0;
  let { stages, arrival } = stagesOf(C);
  let shown = sizes[C];
  const gather = (name) => shown.chunks.flatMap((chunk) => chunk[name]);

  // What exists at a stage: the chunks whose rows are there, and which
  // blocks of the triangle take part. `c` is a chunk, from 0.
  const view = () => {
    const { name, chunk } = stages[at];
    const n = T / C;
    const all = [...Array(n).keys()];
    const upTo = (end) => all.slice(0, end);
    const goingBack = ["recompute", "backward", "gradients"].includes(name);
    const later = name === "outputs" || goingBack;
    const everywhere = ["outputs", "recompute", "gradients"].includes(name);
    const left = everywhere ? all.slice(1) : [];
    const done = {
      start: 0,
      inverse: 0,
      errors: chunk + 1,
      state: chunk + 1,
    };
    const gone = { backward: chunk, gradients: 0 }[name] ?? n;
    return {
      name,
      chunk,
      direction: goingBack ? "backward" : "forward",
      diagonal:
        everywhere || name === "inverse"
          ? all
          : ["start", "state"].includes(name)
            ? []
            : [chunk],
      left: name === "errors" && chunk > 0 ? [chunk] : left,
      below: ["state", "backward"].includes(name) && chunk < n - 1 ? [chunk] : [],
      inverses: name !== "start",
      P: later,
      U: later ? all : upTo(done[name]),
      Y: later ? all : [],
      dV: all.slice(gone),
      // W before chunk c, for c = 0 to n; W after the last is returned.
      states: [...all, n].slice(
        0,
        later
          ? n + 1
          : { start: 0, inverse: 1, errors: chunk + 1, state: chunk + 2 }[name],
      ),
      dW: goingBack ? [...all, n].slice(gone) : [],
    };
  };

  // --- The picture ---------------------------------------------------------
  const CELL = 16;
  const [LEFT, TOP] = [20, 46];
  const SIZE = T * CELL;
  const WIDE = 42;
  const COLUMNS = { U: 222, Y: 314, dV: 314 };
  const TAGS = { U: "d1", Y: "d2", dV: "d5" };
  // The lanes of the race: the top of their numbers, and the size of these.
  const LANES = { loop: 39, chunks: 101 };
  const [LANE_WIDTH, LANE_HEIGHT] = [33, 17];
  const LEGIBLE = "font-size: 13px"; // also where the picture is small
  const DIAGONAL = "var(--fw-features)";
  const STATE = "var(--fw-fast)";
  const GRADIENT = "var(--fw-other)";
  const picture = figure.picture(400, 138, "The loop and the chunks in a race");
  const pairs = fwlab.picture(400, TOP + SIZE + 34, "Pairs of steps in blocks");
  const race = group({ role: "img" });
  const drawing = group({ role: "img" });
  picture.append(race);
  pairs.append(drawing);
  const small = (x, y, content, attributes = {}) =>
    fwlab.small(x, y, content, { style: LEGIBLE, ...attributes });
  const title = (x, y, content) => text(x, y, content, BOLD);
  const subscript = (number) => [...String(number)].map((x) => "₀₁₂₃₄₅₆"[x]).join("");
  const lines = (d, attributes = {}) => path({ d, ...attributes });
  const grid = (rows, columns, x, y, width, height) => {
    let d = "";
    for (let i = 0; i <= rows; i++) d += `M${x} ${y + i * height}h${columns * width}`;
    for (let j = 0; j <= columns; j++) d += `M${x + j * width} ${y}v${rows * height}`;
    return lines(d, { "stroke-opacity": 0.35, "stroke-width": 0.5 });
  };
  // The cells have no room for the zero of -0.5.
  const cells = (rows, x, y, width, height) =>
    rows.flatMap((row, i) =>
      row.map((value, j) =>
        text(
          x + (j + 0.5) * width,
          y + (i + 0.5) * height,
          fwlab.number(value, 1).replace(width < 36 ? /\b0\./ : ".", "."),
          { class: "fw-cell-text", style: LEGIBLE },
        ),
      ),
    );
  const part = (name, elements) => {
    const all = group({ "data-part": name });
    all.append(...elements);
    return all;
  };
  const box = (x, y, width, height, colour, dash) =>
    fwlab.box(x, y, width, height, {
      fill: tint(colour),
      stroke: colour,
      "stroke-width": 2,
      "stroke-dasharray": dash,
    });

  const triangle = (now) => {
    const elements = [];
    let d = "";
    for (let i = 0; i < T; i++) {
      d += `M${LEFT} ${TOP + (i + 1) * CELL}h${(i + 1) * CELL}`;
      d += `M${LEFT + i * CELL} ${TOP + i * CELL}v${SIZE - i * CELL}`;
      d += `M${LEFT + i * CELL} ${TOP + i * CELL}h${CELL}v${CELL}`;
    }
    elements.push(lines(d, { "stroke-opacity": 0.25, "stroke-width": 0.5 }));
    let cuts = "";
    for (let start = 0; start < T; start += C) {
      const [x, y] = [LEFT + start * CELL, TOP + start * CELL];
      cuts += `M${LEFT} ${y + C * CELL}h${start * CELL + C * CELL}`;
      cuts += `M${x} ${y}v${SIZE - start * CELL}M${x} ${y}h${C * CELL}v${C * CELL}`;
    }
    elements.push(lines(cuts, { "stroke-opacity": 0.8 }));
    const block = (kind, c, x, y, width, height, colour, label, dash) => {
      const all = group({ "data-block": `${kind} ${c + 1}` });
      all.append(box(x, y, width, height, colour, dash));
      if (label)
        all.append(
          text(x + width / 2, y + height / 2 + 1, label, {
            ...CENTRED,
            ...MIDDLE,
            // On the lines of the grid, not under them.
            style: "paint-order: stroke; stroke: var(--md-default-bg-color); stroke-width: 5px",
          }),
        );
      elements.push(all);
    };
    const edge = C * CELL;
    for (const c of now.left)
      block(
        "left",
        c,
        LEFT,
        TOP + c * edge,
        c * edge,
        edge,
        STATE,
        `W${subscript(c)}`,
        "5 3",
      );
    for (const c of now.below)
      block(
        "below",
        c,
        LEFT + c * edge,
        TOP + (c + 1) * edge,
        edge,
        SIZE - (c + 1) * edge,
        now.name === "state" ? STATE : GRADIENT,
        `${now.name === "state" ? "W" : "dW"}${subscript(c + 1)}`,
        "5 3",
      );
    for (const c of now.diagonal)
      block("diagonal", c, LEFT + c * edge, TOP + c * edge, edge, edge, DIAGONAL);
    for (let i = 0; i < T; i++) {
      const middle = (i + 0.5) * CELL;
      elements.push(
        small(LEFT - 4, TOP + middle, i + 1, { ...END, ...MIDDLE }),
      );
      if (i % 2)
        elements.push(
          small(LEFT + middle, TOP + SIZE + 13, i + 1, CENTRED),
        );
    }
    return part("triangle", elements);
  };

  const legend = ({ name }) => [
    box(114, TOP - 40, 11, 11, DIAGONAL),
    small(130, TOP - 30, "in the chunk"),
    box(114, TOP - 22, 11, 11, name === "backward" ? GRADIENT : STATE, "3 2"),
    small(130, TOP - 12, `through ${name === "backward" ? "dW" : "W"}`),
  ];

  // The race: in each lane the outputs of all steps, as soon as they are there.
  const COSTS = [
    ["order", "in order", 206],
    ["multiplications", "multiplications", 312],
    ["kept", "kept", 398],
  ];
  const titles = () => ({ naive: "Step by step", chunked: `Chunks of ${C}` });
  const ends = () => ({ naive: RACE, chunked: arrival });
  const header = () => [
    small(0, 13, at > RACE ? "Forward, finished" : `Forward, tick ${at}`),
    ...COSTS.map(([, label, x]) => small(x, 13, label, END)),
  ];
  const lane = (name, kind, { length, written, pending, there, outputs, ready = false }) => {
    const top = LANES[name];
    const width = length * LANE_WIDTH;
    const elements = [];
    for (let i = 0; i < T / length; i++) {
      const place = [i * width + 2, top, width - 2, 2 * LANE_HEIGHT];
      if (i < written) elements.push(box(...place, STATE));
      else if (i === pending) elements.push(box(...place, STATE, "5 3"));
      else if (ready) elements.push(box(...place, DIAGONAL));
    }
    let cuts = "";
    for (let i = 0; i <= T; i += length)
      cuts += `M${i * LANE_WIDTH + 1} ${top}v${2 * LANE_HEIGHT}`;
    elements.push(
      grid(1, T, 1, top, LANE_WIDTH, 2 * LANE_HEIGHT),
      lines(cuts, { "stroke-opacity": 0.8 }),
    );
    outputs.forEach((row, i) => {
      const x = i * LANE_WIDTH + 1;
      const output = row.map((number) => [number]);
      if (i < there)
        elements.push(...cells(output, x, top, LANE_WIDTH, LANE_HEIGHT));
      else
        elements.push(
          small(x + LANE_WIDTH / 2, top + LANE_HEIGHT, i + 1, { ...CENTRED, ...MIDDLE }),
        );
    });
    const [so, all] = [costs()[kind], count(T, D, C)[kind]];
    const finished = there === T;
    elements.push(
      title(0, top - 8, `${titles()[kind]}${finished ? ` ✓ tick ${ends()[kind]}` : ""}`),
      ...COSTS.map(([what, , x]) =>
        small(x, top - 8, `${whole(so[what])} of ${whole(all[what])}`, {
          ...END,
          ...(finished ? BOLD : {}),
        }),
      ),
    );
    return part(name, elements);
  };
  const lanes = ({ name, chunk }) => {
    const { naive, chunked } = costs();
    return [
      lane("loop", "naive", {
        length: 1,
        written: naive.order,
        pending: at < RACE && at % 2 ? naive.order : null,
        there: naive.order,
        outputs: loop.map(({ y }) => y),
      }),
      lane("chunks", "chunked", {
        length: C,
        written: chunked.order,
        pending: name === "errors" ? chunk : null,
        ready: name === "inverse",
        there: at >= arrival ? T : 0,
        outputs: gather("Y"),
      }),
    ];
  };
  const account = (kind) => {
    const { order, multiplications, kept } = costs()[kind];
    return (
      `${titles()[kind]}: ${order} in order, ${whole(multiplications)} multiplications, ` +
      `${kept} scalars kept`
    );
  };

  const rows = (now) =>
    ["U", now.name === "backward" || now.name === "gradients" ? "dV" : "Y"].map(
      (name) => {
        const x = COLUMNS[name];
        const colour = name === "dV" ? GRADIENT : STATE;
        const there = now[name];
        const elements = [
          grid(T, D, x, TOP, WIDE, CELL),
          text(x + WIDE, TOP - 8, `${name} (${TAGS[name]})`, { ...CENTRED, ...BOLD }),
          ...there.flatMap((c) =>
            cells(shown.chunks[c][name], x, TOP + c * C * CELL, WIDE, CELL),
          ),
        ];
        // What this stage has just made.
        const made = { errors: "U", outputs: "Y", recompute: "U", backward: "dV" }[
          now.name
        ];
        if (made === name) {
          const chunks = now.name === "errors" || now.name === "backward";
          const first = chunks ? now.chunk : 0;
          const height = chunks ? C * CELL : SIZE;
          elements.unshift(box(x, TOP + first * C * CELL, 2 * WIDE, height, colour));
        }
        return part(name, elements);
      },
    );

  // The numbers of each chunk, in tables.
  const smallMatrix = (title, rows, there, marked = false) => html`<table
    class=${`fw-numbers fw-mini${marked ? " fw-marked" : ""}`}><caption>${title}</caption><tbody>${rows.map(
      (row) => html`<tr>${row.map((x) => html`<td>${there && !Number.isNaN(x) ? fwlab.number(x, 1) : ""}</td>`)}</tr>`,
    )}</tbody></table>`;
  const memories = (name, there, states, marked) => html`<div class="fw-row" data-part=${`states ${name}`}>${states.map(
    (W, c) => {
      const held = name === "W" && there.includes(c);
      const fate = held ? (c < T / C ? " kept" : " returned") : "";
      return smallMatrix(`${name}${subscript(c)}${fate}`, W, there.includes(c), marked.includes(c));
    },
  )}</div>`;
  const numbersOf = (now, marked, markedGradients) => {
    const { X, P } = shown.chunks[now.chunk];
    const lower = (rows) => rows.map((row, i) => row.map((x, j) => (j <= i ? x : NaN)));
    return html`<strong>State W between the chunks (d3)</strong>${memories("W", now.states, shown.states, marked)}
      <strong>Its gradient dW, from right to left (d6)</strong>${memories("dW", now.dW, shown.gradients, markedGradients)}
      <div class="fw-row">${smallMatrix(`(I + A)⁻¹ of chunk ${now.chunk + 1}`, lower(X), now.inverses)}
        ${smallMatrix(`tril(QKᵀ) of chunk ${now.chunk + 1}`, lower(P), now.P)}</div>`;
  };

  // --- Words ---------------------------------------------------------------
  const matrix = (A) => `[${A.map((row) => vector(row)).join(", ")}]`;
  const sentence = ({ name, chunk }) => {
    const n = T / C;
    const c = chunk + 1;
    const { U, X, Y, dV } = shown.chunks[chunk];
    const last = chunk * C + C;
    const W = `W${subscript(chunk)}`;
    const after = `W${subscript(c)}`;
    if (at === RACE)
      return (
        `Both have finished, with the same outputs. ${account("naive")}. ${account("chunked")}: ` +
        "more arithmetic, but it waits less often and keeps less."
      );
    if (at > arrival && at < RACE)
      return `The chunks finished at tick ${arrival}. ${inLoop()}`;
    const words = {
      start:
        `The same 12 steps, computed twice. With each tick the loop looks up or writes for one ` +
        `step, the chunked form for ${C} steps.`,
      inverse:
        `Forward, all ${n} chunks at once: (I + A)⁻¹ of every diagonal block. It depends on ` +
        `keys and β only, not on W. Last row in chunk 1: ${vector(X.at(-1))}.`,
      errors:
        `Forward, chunk ${c} of ${n}, (d1): ` +
        (chunk === 0
          ? "the state before it is zero. "
          : `${W} replaces all ${chunk * C} earlier steps at once; these pairs are never computed. `) +
        `The inverse of the block then gives U, whose rows β(v − v̄) are what is written. ` +
        `Step ${last} writes ${vector(U.at(-1))}.`,
      state:
        `Forward, chunk ${c} of ${n}, (d3): ${after} = ${W} + UᵀK = ${matrix(shown.states[c])}. ` +
        (c < n
          ? `It is kept, and replaces all pairs below the block of chunk ${c}.`
          : "It is returned. This was the last thing that had to wait."),
      outputs:
        `Forward, all chunks at once, (d2): Y is what the queries read in the state before their chunk, ` +
        `plus tril(QKᵀ)U inside it. Step ${last} reads ${vector(Y.at(-1))}. Then the inverses, ` +
        `tril(QKᵀ) and U are discarded; the inputs and ${n} states are kept.`,
      recompute:
        `Backward, all chunks at once: the inverses, tril(QKᵀ), and U by (d1) are recomputed ` +
        `from inputs and the ${n} kept states. No chunk waits for another.`,
      backward:
        `Backward, chunk ${c} of ${n}, right to left: ` +
        (c === n
          ? "nothing comes after it, the gradient of the last state is zero. "
          : `dW${subscript(c)} is the gradient from all later steps. `) +
        `(d5) gives dV, of step ${last} ${vector(dV.at(-1))}; (d6) gives ` +
        `dW${subscript(chunk)} = ${matrix(shown.gradients[chunk])}.`,
      gradients:
        `Backward, all chunks at once: the gradients of queries (c3), keys (c4) and (d8), and β (d7), ` +
        `from what is already computed. Those of the values are known: of step ${last} ${vector(dV.at(-1))}.`,
    }[name];
    return at && at <= arrival ? `${words} ${inLoop()}` : words;
  };
  const inLoop = () => {
    const step = Math.ceil(at / 2);
    const { held, y } = loop[step - 1];
    return at % 2
      ? `Step by step: step ${step} of ${T} looks up ${vector(held)}.`
      : `Step by step: step ${step} of ${T} has written, and reads ${vector(y)}.`;
  };
  const RUNNING =
    "With each tick, the loop looks up or writes for one step, and the chunked form for a whole " +
    "chunk. The chunked form also has a first tick, for the inverses of all chunks, and a last " +
    "one, for all outputs.";

  // --- Account -------------------------------------------------------------
  const whole = (x) => Math.round(x).toLocaleString("en");
  const accountTable = () => {
    const here = count(T, D, C);
    const ways = { naive: "step by step", full: "full triangle", chunked: `chunks of ${C}` };
    const row = ([way, name]) => html`<tr data-account=${way}><th scope="row">${name}</th>${[
      "kept", "multiplications", "order",
    ].map((what) => html`<td>${whole(here[way][what])}</td>`)}</tr>`;
    return html`<table class="fw-answers fw-losses fw-account"><caption>T = ${T}, d = ${D}: scalars kept for the backward pass
      besides the ${here.inputs} inputs, multiplications forward, and steps that wait for the previous one</caption>
      <thead><tr><th></th>${["kept", "multiplications", "in order"].map((name) => html`<th scope="col">${name}</th>`)}</tr></thead>
      <tbody>${Object.entries(ways).map(row)}</tbody></table>`;
  };

  const numbers = fwlab.html("div", { class: "fw-tables" });
  const inside = fwlab.html(
    "details",
    { class: "fw-inside" },
    fwlab.html("summary", {}, "Inside the chunks, and the backward pass"),
    fwlab.html("div", {}, pairs, numbers),
  );

  // --- Showing -------------------------------------------------------------
  const update = () => {
    const now = view();
    const { name, chunk } = now;
    const kept = shown.chunks.map((_, c) => c);
    const marked =
      { errors: [chunk], state: [chunk + 1], inverse: [], backward: [] }[name] ?? kept;
    const markedGradients =
      { backward: [chunk], gradients: kept.map((c) => c + 1) }[name] ?? [];
    race.replaceChildren(...header(), ...lanes(now));
    race.setAttribute("aria-label", `${account("naive")}. ${account("chunked")}.`);
    drawing.replaceChildren(
      title(0, TOP - 30, "Pairs of steps"),
      small(0, TOP + SIZE + 28, "Each row reads what the columns wrote."),
      ...legend(now),
      title(222, TOP - 30, "Per step"),
      triangle(now),
      ...rows(now),
    );
    render(html`${numbersOf(now, marked, markedGradients)}${accountTable()}`, numbers);
    const words = sentence(stages[at]);
    drawing.setAttribute("aria-label", `Tick ${at} of ${stages.length - 1}. ${words}`);
    position.querySelector("input").max = last();
    position.value = at;
    const enable = (button, other, enabled) => {
      const focused = document.activeElement === button;
      button.disabled = !enabled;
      if (focused && !enabled) other.focus();
    };
    back.disabled = next.disabled = false;
    enable(back, next, at > 0);
    enable(next, back, at < last());
    figure.say(player.running() ? RUNNING : words);
  };
  // The way back is only in the drawings that are folded.
  const last = () => (inside.open ? stages.length - 1 : RACE);
  const go = (tick) => {
    player.stop();
    at = tick;
    update();
  };
  const player = fwlab.player({
    every: 300,
    begin: () => {
      if (at >= RACE) at = 0;
      update();
    },
    step: () => {
      at += 1;
      update();
      return at < RACE;
    },
    end: () => update(),
  });
  // Where only the loop goes on, one press takes it to its end, or back.
  const alone = () => at >= arrival && at <= RACE;
  const back = fwlab.button("Back", () =>
    go(alone() && at > arrival ? arrival : at - 1),
  );
  const next = fwlab.button("Next", () => go(alone() && at < RACE ? RACE : at + 1));
  const position = fwlab.slider(
    "Tick",
    {
      min: 0,
      max: RACE,
      step: 1,
      value: 0,
      show: (x) => `${x} of ${last()}`,
    },
    go,
  );
  const size = fwlab.choice(
    "Steps per chunk",
    { 3: "3", 4: "4", 6: "6" },
    C,
    (value) => {
      C = Number(value);
      ({ stages, arrival } = stagesOf(C));
      shown = sizes[C];
      go(0);
    },
  );
  figure.beside(
    fwlab.controls(player.button, back, next, position),
    fwlab.controls(size),
  );
  figure.root.append(inside);
  inside.addEventListener("toggle", () => (at > last() ? go(last()) : update()));
  update();
  player.whenSeen(picture);

  return {
    // The chunks have finished, the loop has not.
    still: () => go(arrival),
    state: () => {
      const now = view();
      return {
        ...now,
        chunk: now.chunk + 1,
        tick: at,
        running: player.running(),
        costs: costs(),
        C,
        counts: { here: count(T, D, C), large: count(4096, 64, 64) },
      };
    },
  };
});
