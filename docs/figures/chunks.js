// @ts-check
// The delta rule in chunks, with fwlab's numbers, in a race with the loop. Folded
// below it: which blocks of the triangle of pairs are computed, what is kept, and
// the way back.
// @ts-expect-error: docs/hooks/frames.py computes it
import { loop, sizes } from "fwlab-chunks";
import { number, tint, vector } from "./words.js";
import { button, choice, figure, html, nothing, slider } from "./kit.js";

const [T, D] = [12, 2];
const RACE = 2 * T; // ticks of the loop: a look-up and a write for each step
const ONCE = D * D; // multiplications with a state
const BACKWARD = ["recompute", "backward", "gradients"];
const EVERYWHERE = ["outputs", "recompute", "gradients"]; // all chunks at once
const span = (n) => [...Array(n).keys()];
const whole = (x) => Math.round(x).toLocaleString("en");
const subscript = (n) => "₀₁₂₃₄₅₆"[n];

// A tick of the chunked form is a look-up or a write of one chunk; there is one before
// all chunks, and one after them. The way back follows when the loop is through.
const plan = (C) => {
  const chunks = span(T / C);
  const forward = [
    { name: "start", chunk: 0 },
    { name: "inverse", chunk: 0 },
    ...chunks.flatMap((chunk) => ["errors", "state"].map((name) => ({ name, chunk }))),
    { name: "outputs", chunk: T / C - 1 },
  ];
  const arrival = forward.length - 1;
  const stages = span(RACE + 1).map((tick) => forward[Math.min(tick, arrival)]);
  stages.push({ name: "recompute", chunk: T / C - 1 });
  stages.push(...chunks.reverse().map((chunk) => ({ name: "backward", chunk })));
  stages.push({ name: "gradients", chunk: 0 });
  return { stages, arrival };
};

// Scalars kept for the way back besides the inputs; multiplications of the matrix
// products of the way forward; and how many steps or chunks wait for another.
const totals = (C) => {
  const chunked = (size) =>
    (T / size) * (4 * size * size * D + 3 * size * ONCE + (size * (size - 1) * (size - 2)) / 6);
  return {
    naive: { order: T, multiplications: 3 * T * ONCE, kept: T * ONCE },
    full: { order: 1, multiplications: chunked(T), kept: 2 * T * T },
    chunked: { order: T / C, multiplications: chunked(C), kept: (T / C) * ONCE },
  };
};
// The same of the race so far.
const costs = ({ stages, arrival }, C, tick) => {
  const ticks = Math.min(tick, RACE);
  const through = Math.floor(ticks / 2);
  const price = {
    start: 0,
    inverse: (T / C) * (C * C * D + (C * (C - 1) * (C - 2)) / 6),
    errors: C * ONCE + C * C * D,
    state: C * ONCE,
    outputs: (T / C) * (2 * C * C * D + C * ONCE),
  };
  const past = stages.slice(0, Math.min(ticks, arrival) + 1).map(({ name }) => name);
  const written = past.filter((name) => name === "state").length;
  return {
    naive: {
      order: through,
      multiplications: (3 * through + (ticks % 2)) * ONCE,
      kept: through * ONCE,
    },
    chunked: {
      order: written,
      multiplications: past.reduce((sum, name) => sum + price[name], 0),
      kept: Math.min(written + Number(past.length > 1), T / C) * ONCE,
    },
  };
};

// What there is at a stage: of how many chunks U, how many states; from which chunk on
// there are gradients; and which blocks of the triangle take part.
const blocks = ({ name, chunk }, C) => {
  const n = T / C;
  const back = BACKWARD.includes(name);
  const later = back || name === "outputs";
  const done = later ? n : { start: 0, inverse: 0 }[name] ?? chunk + 1;
  const everywhere = EVERYWHERE.includes(name);
  const own = (c) => everywhere || c === chunk;
  return {
    back,
    later,
    done,
    states: { start: 0, errors: chunk + 1 }[name] ?? done + 1,
    gone: { backward: chunk, gradients: 0 }[name] ?? n,
    diagonal: (c) => name === "inverse" || (!["start", "state"].includes(name) && own(c)),
    left: (c) => c > 0 && (everywhere || name === "errors") && own(c),
    below: (c) => c < n - 1 && ["state", "backward"].includes(name) && c === chunk,
  };
};

const compute = ({ C, tick }) => {
  const race = plan(C);
  const stage = race.stages[tick];
  const { chunks } = sizes[C];
  return { ...race, stage, costs: costs(race, C, tick), all: totals(C), shown: sizes[C], chunks, now: blocks(stage, C) };
};

// --- The race --------------------------------------------------------------------
const INSIDE = "var(--fw-features)";
const STATE = "var(--fw-fast)";
const GRADIENT = "var(--fw-other)";
const COSTS = { order: "in order", multiplications: "multiplications", kept: "kept" };
const paint = (colour, dash = "solid") => `background: ${tint(colour)}; border: 2px ${dash} ${colour}`;
const titles = (C) => ({ naive: "Step by step", chunked: `Chunks of ${C}` });

// A cell is a step or a chunk; in it are the outputs of its steps, as soon as they are
// there.
const lane = (kind, { C, tick }, { stage, arrival, costs, all, chunks }) => {
  const size = kind === "naive" ? 1 : C;
  const outputs = kind === "naive" ? loop.map(({ y }) => y) : chunks.flatMap(({ Y }) => Y);
  const { order } = costs[kind];
  const there = kind === "naive" ? order : tick >= arrival ? T : 0;
  const pending = kind === "naive" ? tick < RACE && tick % 2 : stage.name === "errors";
  const look = (i) => {
    const place = Math.floor(i / size);
    if (place < order) return paint(STATE);
    if (place === order && pending) return paint(STATE, "dashed");
    return kind === "chunked" && stage.name === "inverse" ? paint(INSIDE) : nothing;
  };
  const arrived = there === T ? ` ✓ tick ${kind === "naive" ? RACE : arrival}` : "";
  const cost = (name, wide) => {
    const words = `${whole(costs[kind][name])} of ${whole(all[kind][name])}`;
    return html`<td colspan=${wide}>${arrived ? html`<b>${words}</b>` : words}</td>`;
  };
  return html`<tbody data-part=${kind}>
    <tr><th colspan="5" scope="row"><b>${titles(C)[kind]}${arrived}</b></th>
      ${cost("order", 2)}${cost("multiplications", 3)}${cost("kept", 2)}</tr>
    <tr>${outputs.map((row, i) => html`<td class=${i % size ? "fw-lane fw-joined" : "fw-lane"} style=${look(i)}>${
      i < there ? html`${number(row[0], 1)}<br>${number(row[1], 1)}` : html`<small>${i + 1}</small>`
    }</td>`)}</tr></tbody>`;
};
const view = (state, found) => html`<table class="fw-numbers fw-race">
  <thead><tr><th colspan="5" scope="col">${state.tick > RACE ? "Forward, finished" : `Forward, tick ${state.tick}`}</th>
    ${[2, 3, 2].map((wide, i) => html`<th colspan=${wide} scope="col">${Object.values(COSTS)[i]}</th>`)}</tr></thead>${["naive", "chunked"].map((kind) => lane(kind, state, found))}</table>`;

// --- Inside the chunks -----------------------------------------------------------------
// Pairs of steps: row i reads what column j wrote. A block that is not computed pair by
// pair is one cell.
const pair = (i, j, C, { name }, now) => {
  const [c, d] = [Math.floor(i / C), Math.floor(j / C)];
  if (j > i) return html`<td></td>`;
  const edges = `fw-pair${j % C ? "" : " fw-west"}${i % C ? "" : " fw-north"}`;
  if (c === d) return html`<td class=${edges} style=${now.diagonal(c) ? paint(INSIDE) : nothing}></td>`;
  if (now.left(c))
    return i % C || j ? nothing : html`<td rowspan=${C} colspan=${c * C} style=${paint(STATE, "dashed")}>W${subscript(c)}</td>`;
  if (!now.below(d)) return html`<td class=${edges}></td>`;
  if (i > (d + 1) * C || j % C) return nothing;
  const [colour, words] = name === "state" ? [STATE, "W"] : [GRADIENT, "dW"];
  return html`<td rowspan=${T - (d + 1) * C} colspan=${C} style=${paint(colour, "dashed")}>${words}${subscript(d + 1)}</td>`;
};
const MADE = { errors: "U", outputs: "Y", recompute: "U", backward: "dV" };
const TAGS = { U: "d1", Y: "d2", dV: "d5" };
const pairs = ({ C }, { stage, chunks, now }) => {
  const columns = ["U", ["backward", "gradients"].includes(stage.name) ? "dV" : "Y"];
  const entry = (name, i) => {
    const c = Math.floor(i / C);
    const there = { U: c < now.done, Y: now.later, dV: c >= now.gone }[name];
    const fresh = MADE[stage.name] === name && (EVERYWHERE.includes(stage.name) || c === stage.chunk);
    const style = fresh ? `background: ${tint(name === "dV" ? GRADIENT : STATE)}` : nothing;
    return chunks[c][name][i % C].map((x) => html`<td class="fw-pair" style=${style}>${there ? number(x, 1) : ""}</td>`);
  };
  return html`<table class="fw-numbers fw-pairs-of"><caption>Pairs of steps: each row reads what the columns wrote</caption>
    <colgroup><col><col span=${T}><col span="4" class="fw-entry"></colgroup>
    <thead><tr><th></th>${span(T).map((j) => html`<th scope="col">${j + 1}</th>`)}${columns.map(
      (name) => html`<th scope="col" colspan="2"><b>${name}</b> (${TAGS[name]})</th>`,
    )}</tr></thead>
    <tbody>${span(T).map((i) => html`<tr><th scope="row">${i + 1}</th>
      ${span(T).map((j) => pair(i, j, C, stage, now))}${columns.map((name) => entry(name, i))}</tr>`)}</tbody></table>
    <small><span style=${paint(INSIDE)}>in the chunk</span><span style=${
      stage.name === "backward" ? paint(GRADIENT, "dashed") : paint(STATE, "dashed")
    }>through ${stage.name === "backward" ? "dW" : "W"}</span></small>`;
};
const mini = (title, rows, there, marked = false) => html`<table
  class=${`fw-numbers fw-mini${marked ? " fw-marked" : ""}`}><caption>${title}</caption><tbody>${rows.map(
    (row, i) => html`<tr>${row.map((x, j) => html`<td>${there(i, j) ? number(x, 1) : ""}</td>`)}</tr>`,
  )}</tbody></table>`;
const matrices = ({ C }, { stage: { name, chunk }, shown, chunks, now }) => {
  const n = T / C;
  const marks = {
    W: { start: [], inverse: [], errors: [chunk], state: [chunk + 1], backward: [] }[name] ?? span(n),
    dW: { backward: [chunk], gradients: span(n + 1).slice(1) }[name] ?? [],
  };
  const row = (name, states, there) => html`<div class="fw-row" data-part=${`states ${name}`}>${states.map((W, c) => {
    const fate = name === "dW" || !there(c) ? "" : c < n ? " kept" : " returned";
    return mini(`${name}${subscript(c)}${fate}`, W, () => there(c), marks[name].includes(c));
  })}</div>`;
  const lower = (there) => (i, j) => there && j <= i;
  return html`<strong>State W between the chunks (d3)</strong>${row("W", shown.states, (c) => c < now.states)}
    <strong>Its gradient dW, from right to left (d6)</strong>${row("dW", shown.gradients, (c) => now.back && c >= now.gone)}
    <div class="fw-row">${mini(`(I + A)⁻¹ of chunk ${chunk + 1}`, chunks[chunk].X, lower(name !== "start"))}
      ${mini(`tril(QKᵀ) of chunk ${chunk + 1}`, chunks[chunk].P, lower(now.later))}</div>`;
};
const account = ({ C }, { all }) => {
  const ways = { naive: "step by step", full: "full triangle", chunked: `chunks of ${C}` };
  const columns = ["kept", "multiplications", "order"];
  return html`<table class="fw-answers fw-losses fw-account"><caption>T = ${T}, d = ${D}: scalars kept for the backward pass
    besides the ${T * (3 * D + 1)} inputs, multiplications forward, and steps that wait for the previous one</caption>
    <thead><tr><th></th>${columns.map((name) => html`<th scope="col">${COSTS[name]}</th>`)}</tr></thead>
    <tbody>${Object.entries(ways).map(([way, name]) => html`<tr><th scope="row">${name}</th>${columns.map(
      (what) => html`<td>${whole(all[way][what])}</td>`,
    )}</tr>`)}</tbody></table>`;
};

// --- Words -----------------------------------------------------------------------------
const RUNNING =
  "With each tick, the loop looks up or writes for one step, and the chunked form for a whole " +
  "chunk. The chunked form also has a first tick, for the inverses of all chunks, and a last " +
  "one, for all outputs.";
const matrix = (A) => `[${A.map((row) => vector(row)).join(", ")}]`;
const inLoop = (tick) => {
  const step = Math.ceil(tick / 2);
  const { held, y } = loop[step - 1];
  return tick % 2
    ? `Step by step: step ${step} of ${T} looks up ${vector(held)}.`
    : `Step by step: step ${step} of ${T} has written, and reads ${vector(y)}.`;
};
const sentence = ({ C, tick }, { stage: { name, chunk }, arrival, costs, shown, chunks }) => {
  const [n, c, last] = [T / C, chunk + 1, chunk * C + C];
  const { U, X, Y, dV } = chunks[chunk];
  const [W, after] = [`W${subscript(chunk)}`, `W${subscript(c)}`];
  if (tick === RACE) {
    const [one, other] = ["naive", "chunked"].map((kind) => {
      const { order, multiplications, kept } = costs[kind];
      return `${titles(C)[kind]}: ${order} in order, ${whole(multiplications)} multiplications, ${kept} scalars kept`;
    });
    return (
      `Both have finished, with the same outputs. ${one}. ${other}: ` +
      "more arithmetic, but it waits less often and keeps less."
    );
  }
  if (tick > arrival && tick < RACE)
    return `The chunks finished at tick ${arrival}. ${inLoop(tick)}`;
  const words = {
    start:
      "The same 12 steps, computed twice. With each tick the loop looks up or writes for one " +
      `step, the chunked form for ${C} steps.`,
    inverse:
      `Forward, all ${n} chunks at once: (I + A)⁻¹ of every diagonal block. It depends on ` +
      `keys and β only, not on W. Last row in chunk 1: ${vector(X.at(-1))}.`,
    errors:
      `Forward, chunk ${c} of ${n}, (d1): ` +
      (chunk === 0
        ? "the state before it is zero. "
        : `${W} replaces all ${chunk * C} earlier steps at once; these pairs are never computed. `) +
      "The inverse of the block then gives U, whose rows β(v − v̄) are what is written. " +
      `Step ${last} writes ${vector(U.at(-1))}.`,
    state:
      `Forward, chunk ${c} of ${n}, (d3): ${after} = ${W} + UᵀK = ${matrix(shown.states[c])}. ` +
      (c < n
        ? `It is kept, and replaces all pairs below the block of chunk ${c}.`
        : "It is returned. This was the last thing that had to wait."),
    outputs:
      "Forward, all chunks at once, (d2): Y is what the queries read in the state before their chunk, " +
      `plus tril(QKᵀ)U inside it. Step ${last} reads ${vector(Y.at(-1))}. Then the inverses, ` +
      `tril(QKᵀ) and U are discarded; the inputs and ${n} states are kept.`,
    recompute:
      "Backward, all chunks at once: the inverses, tril(QKᵀ), and U by (d1) are recomputed " +
      `from inputs and the ${n} kept states. No chunk waits for another.`,
    backward:
      `Backward, chunk ${c} of ${n}, right to left: ` +
      (c === n
        ? "nothing comes after it, the gradient of the last state is zero. "
        : `dW${subscript(c)} is the gradient from all later steps. `) +
      `(d5) gives dV, of step ${last} ${vector(dV.at(-1))}; (d6) gives ` +
      `dW${subscript(chunk)} = ${matrix(shown.gradients[chunk])}.`,
    gradients:
      "Backward, all chunks at once: the gradients of queries (c3), keys (c4) and (d8), and β (d7), " +
      `from what is already computed. Those of the values are known: of step ${last} ${vector(dV.at(-1))}.`,
  }[name];
  return tick && tick <= arrival ? `${words} ${inLoop(tick)}` : words;
};

const state = { C: 4, tick: 0, open: false, running: false };
figure("chunks", {
  state,
  compute,
  view,
  plays: ({ set }) => ({
    every: 300,
    begin: () => set({ running: true, tick: state.tick < RACE ? state.tick : 0 }),
    step: () => {
      set({ tick: state.tick + 1 });
      return state.tick < RACE;
    },
    end: () => set({ running: false }),
  }),
  controls: ({ C, tick, open }, { stages, arrival }, set, { play }) => {
    // The way back is only in what is folded.
    const last = open ? stages.length - 1 : RACE;
    const go = (tick) => {
      play.stop();
      set({ tick });
    };
    // Where only the loop goes on, one press takes it to its end, or back.
    const back = tick > arrival && tick <= RACE ? arrival : tick - 1;
    const next = tick >= arrival && tick < RACE ? RACE : tick + 1;
    const resize = (C) => {
      play.stop();
      set({ C, tick: 0 });
    };
    return html`<div class="fw-controls">${play.button}${button("Back", () => go(back), { disabled: tick === 0 })}${button(
      "Next", () => go(next), { disabled: tick === last },
    )}</div>
      ${slider("Tick", { min: 0, max: last, value: tick, shown: `${tick} of ${last}` }, go)}
      ${choice("Steps per chunk", [3, 4, 6], C, resize)}`;
  },
  below: (state, found, set) => html`<details class="fw-inside" @toggle=${(e) => {
    const { open } = e.target;
    set({ open, tick: open ? state.tick : Math.min(state.tick, RACE) });
  }}><summary>Inside the chunks, and the backward pass</summary><div>
    <div class="fw-tables">${pairs(state, found)}</div>
    <div class="fw-tables">${matrices(state, found)}${account(state, found)}</div></div></details>`,
  say: (state, found) => (state.running ? RUNNING : sentence(state, found)),
  begin: ({ root, set, play }) => {
    play.whenSeen(root.firstElementChild);
    // The chunks have finished, the loop has not.
    return { still: () => set({ tick: plan(state.C).arrival }) };
  },
});
