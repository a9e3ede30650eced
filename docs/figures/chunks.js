// @ts-check
// The delta rule in chunks, with fwlab's numbers, in a race with the loop.
// @ts-expect-error: docs/hooks/frames.py computes it
import { loop, sizes } from "fwlab-chunks";
import { number, tint, vector } from "./words.js";
import { button, choice, figure, html, nothing, slider } from "./kit.js";

const [T, D] = [12, 2];
const RACE = 2 * T; // ticks of the loop: a look-up and a write for each step
const ONCE = D * D; // multiplications with a state
const span = (n) => [...Array(n).keys()];
const whole = (x) => Math.round(x).toLocaleString("en");
const subscript = (n) => "₀₁₂₃₄₅₆"[n];

// A tick of the chunked form is a look-up or a write of one chunk; there is one before
// all chunks, and one after them.
const plan = (C) => {
  const forward = [
    { name: "start", chunk: 0 },
    { name: "inverse", chunk: 0 },
    ...span(T / C).flatMap((chunk) => ["errors", "state"].map((name) => ({ name, chunk }))),
    { name: "outputs", chunk: T / C - 1 },
  ];
  const arrival = forward.length - 1;
  return { stages: span(RACE + 1).map((tick) => forward[Math.min(tick, arrival)]), arrival };
};

// Scalars kept for the way back besides the inputs; multiplications of the matrix
// products of the way forward; and how many steps or chunks wait for another.
const totals = (C) => {
  const each = 4 * C * C * D + 3 * C * ONCE + (C * (C - 1) * (C - 2)) / 6;
  return {
    naive: { order: T, multiplications: 3 * T * ONCE, kept: T * ONCE },
    chunked: { order: T / C, multiplications: (T / C) * each, kept: (T / C) * ONCE },
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

const compute = ({ C, tick }) => {
  const race = plan(C);
  const stage = race.stages[tick];
  const { chunks } = sizes[C];
  return { ...race, stage, costs: costs(race, C, tick), all: totals(C), shown: sizes[C], chunks };
};

// --- The race --------------------------------------------------------------------
const INSIDE = "var(--fw-features)";
const STATE = "var(--fw-fast)";
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
  <thead><tr><th colspan="5" scope="col">Forward, tick ${state.tick}</th>
    ${[2, 3, 2].map((wide, i) => html`<th colspan=${wide} scope="col">${Object.values(COSTS)[i]}</th>`)}</tr></thead>${["naive", "chunked"].map((kind) => lane(kind, state, found))}</table>`;

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
  const { U, X, Y } = chunks[chunk];
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
        ? `It is kept, and replaces all pairs of a later step with chunk ${c}.`
        : "It is returned. This was the last thing that had to wait."),
    outputs:
      "Forward, all chunks at once, (d2): Y is what the queries read in the state before their chunk, " +
      `plus tril(QKᵀ)U inside it. Step ${last} reads ${vector(Y.at(-1))}. Then the inverses, ` +
      `tril(QKᵀ) and U are discarded; the inputs and ${n} states are kept.`,
  }[name];
  return tick ? `${words} ${inLoop(tick)}` : words;
};

const state = { C: 4, tick: 0, running: false };
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
  controls: ({ C, tick }, { arrival }, set, { play }) => {
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
      "Next", () => go(next), { disabled: tick === RACE },
    )}</div>
      ${slider("Tick", { min: 0, max: RACE, value: tick, shown: `${tick} of ${RACE}` }, go)}
      ${choice("Steps per chunk", [3, 4, 6], C, resize)}`;
  },
  say: (state, found) => (state.running ? RUNNING : sentence(state, found)),
  begin: ({ root, set, play }) => {
    play.whenSeen(root.firstElementChild);
    // The chunks have finished, the loop has not.
    return { still: () => set({ tick: plan(state.C).arrival }) };
  },
});
