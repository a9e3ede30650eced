// @ts-check
// Which states of a stack a state can see, in a transformer and in the feedback
// transformer of fwlab.ops.feedback, and the longest path that ends there.
// Only `reads` knows a model; all that is shown follows from it.
import { figure, html, motion, svg } from "./kit.js";

const [L, T] = [3, 6];
const NAMES = { transformer: "Transformer", feedback: "Feedback transformer" };
const span = (from, to) => Array.from({ length: Math.max(0, to - from + 1) }, (_, i) => from + i);
/** @param {number[]} state */
const key = ([l, t]) => `${l},${t}`;
const all = span(1, T).flatMap((t) => span(0, L).map((l) => [l, t]));
/** @param {string} kind @param {number[]} state */
const memories = (kind, [l, t]) => (kind === "feedback" && l > 0 ? span(1, t - 1) : []);
/** @param {string} kind @param {number[]} state */
const reads = (kind, [l, t]) => {
  if (l === 0) return [];
  if (kind === "transformer") return span(1, t).map((j) => [l - 1, j]);
  const mixed = memories(kind, [l, t]).flatMap((j) => span(0, L).map((k) => [k, j]));
  return [...mixed, [l - 1, t]];
};
// Time by time and upwards: whatever a state reads comes before it. Of several
// longest paths, the one that is longest in the past.
const graph = (kind) => {
  const nodes = {};
  for (const state of all) {
    const direct = reads(kind, state);
    const reachable = new Set(direct.map(key));
    let before = [];
    for (const other of direct) {
      for (const name of nodes[key(other)].reachable) reachable.add(name);
      const { path } = nodes[key(other)];
      if (path.length > before.length) before = path;
    }
    nodes[key(state)] = { direct, reachable, path: [...before, state] };
  }
  const layers = (state) => nodes[key(state)].path.length - 1;
  return { nodes, layers, sequential: Math.max(...all.map(layers)) };
};
const KINDS = Object.keys(NAMES);
const GRAPHS = { transformer: graph("transformer"), feedback: graph("feedback") };
const longest = (state) => Math.max(...Object.values(GRAPHS).map(({ layers }) => layers(state)));

// --- The picture -----------------------------------------------------------------
const [W, H] = [52, 52];
const [WIDE, HIGH] = [40, 34];
const left = (t) => 70 + (t - 1) * W;
const centre = (t) => left(t) + WIDE / 2;
const top = (l) => 66 + (L - l) * H;
const MEMORY = 40;
const AXIS = top(0) + HIGH + 15;
const PATH = "var(--fw-other)";
const PAPER = "var(--md-default-bg-color)";
const LOOKS = {
  chosen: "fill: var(--fw-trained); stroke: currentcolor; stroke-width: 3",
  direct: "fill: var(--fw-fast); stroke: var(--fw-fast); stroke-width: 1.5",
  reachable: `fill: color-mix(in srgb, var(--fw-fast) 20%, ${PAPER}); stroke: var(--fw-fast); stroke-width: 1.5; stroke-dasharray: 5 3`,
  none: `fill: ${PAPER}; stroke: var(--md-default-fg-color--light); stroke-width: 1`,
};
const SAID = {
  chosen: "chosen",
  direct: "read directly",
  reachable: "reached through others",
  none: "not seen",
};
const letters = (look) => (["chosen", "direct"].includes(look) ? PAPER : "currentcolor");
const inWords = (n) => `${n} layer${n === 1 ? "" : "s"}`;
const steps = (from, to) => (from === to ? `step ${from}` : `steps ${from} to ${to}`);
/** @param {number[]} state */
const place = ([l, t]) => `${l ? `Layer ${l}` : "Input 0"} at step ${t}`;
const text = (x, y, words, anchor = "start") => svg`<text x=${x} y=${y} text-anchor=${anchor}>${words}</text>`;
const MOVES = {
  ArrowLeft: [0, -1],
  ArrowRight: [0, 1],
  ArrowUp: [1, 0],
  ArrowDown: [-1, 0],
  Enter: [0, 0],
  " ": [0, 0],
};

// From a memory, and from all below it, to the left of a cell.
/** @param {number} j @param {number[]} state */
const fromMemory = (j, [l, t]) =>
  `M${centre(j)} ${MEMORY}H${left(t) - (W - WIDE) / 2}V${top(l) + HIGH / 2}H${left(t)}`;
/** @param {number} j @param {number[]} state */
const upwards = (j, [l, t]) => `M${centre(j)} ${top(l - 1)}L${centre(t)} ${top(l) + HIGH}`;
// One layer of the longest path: from the layer below, or from the top of an earlier
// step through its memory.
/** @param {number[]} from @param {number[]} state */
const hop = ([k, j], state, kind) =>
  kind === "transformer" || j === state[1]
    ? upwards(j, state)
    : `M${centre(j)} ${top(k)}V${MEMORY}${fromMemory(j, state)}`;

// A transformer has no memories: in their place is the legend.
const legend = () => svg`${[
  ["direct", "read directly", 4],
  ["reachable", "through others", 100],
  ["none", "not seen", 202],
].map(
  ([look, words, x]) => svg`<rect x=${x} y="33" width="13" height="13" rx="2" style=${LOOKS[look]} />
    <text class="fw-small" x=${Number(x) + 18} y="45">${words}</text>`,
)}<path d="M281 40h16" style=${`stroke: ${PATH}; stroke-width: 5`} />
  <text class="fw-small" x="302" y="45">longest path</text>`;

const model = (kind, { chosen, drawn }) => {
  const { nodes, layers, sequential } = GRAPHS[kind];
  const { direct, reachable, path } = nodes[key(chosen)];
  const count = Math.min(drawn, path.length - 1);
  return { layers, sequential, direct, reachable, path, count, read: memories(kind, chosen) };
};

// One model, with what of it changes with the choice.
const draw = (kind, { chosen, drawn }, { layers, sequential, direct, reachable, path, count, read }, choose) => {
  const near = new Set(direct.map(key));
  const passed = new Set(count ? path.slice(0, count + 1).map(key) : []);
  const lookOf = (name) => {
    if (name === key(chosen)) return "chosen";
    return near.has(name) ? "direct" : reachable.has(name) ? "reachable" : "none";
  };
  const cell = (state) => {
    const [l, t] = state;
    const name = key(state);
    const own = name === key(chosen);
    const look = lookOf(name);
    const on = passed.has(name) && !own;
    const take = (svg, to) => {
      choose(to);
      svg.querySelector(`[data-state="${key(to)}"]`).focus();
    };
    const press = (event) => {
      if (!(event.key in MOVES)) return;
      event.preventDefault();
      const [up, right] = MOVES[event.key];
      const to = [l + up, t + right];
      if (all.map(key).includes(key(to))) take(event.currentTarget.ownerSVGElement, to);
    };
    const said = `${NAMES[kind]}, ${place(state).toLowerCase()}: ${SAID[look]}, longest path ${layers(state)}`;
    const way = on ? `; stroke: ${PATH}; stroke-width: 5; stroke-dasharray: none` : "";
    // A finger finds the whole field of the cell; under the number is a line, once as
    // many layers have been drawn.
    return svg`<g role="button" class="fw-tap" data-state=${name} data-look=${look} tabindex=${own ? 0 : -1}
      aria-pressed=${own} aria-label=${said} @keydown=${press}
      @click=${(event) => take(event.currentTarget.ownerSVGElement, state)}>
      <rect x=${left(t) - (W - WIDE) / 2} y=${top(l) - (H - HIGH) / 2} width=${W} height=${H}
        fill="none" pointer-events="all" />
      <rect x=${left(t)} y=${top(l)} width=${WIDE} height=${HIGH} rx="4" style=${LOOKS[look] + way} />
      <text x=${centre(t)} y=${top(l) + HIGH / 2 + 5} text-anchor="middle" fill=${letters(look)}>${layers(state)}</text>
      <rect x=${left(t) + 8} y=${top(l) + HIGH - 8} width=${WIDE - 16} height="3"
        fill=${layers(state) <= drawn ? letters(look) : "none"} /></g>`;
  };
  const below = kind === "transformer" || !direct.length ? direct : [direct.at(-1)];
  const lines = [
    ...below.map(([, j]) => upwards(j, chosen)),
    ...read.map((j) => `M${centre(j)} ${top(0)}V${MEMORY}`),
    ...(read.length ? [fromMemory(1, chosen)] : []),
  ];
  const length = path.length - 1;
  const memory = (t) => {
    const look = read.includes(t) ? "direct" : "none";
    return svg`<circle cx=${centre(t)} cy=${MEMORY} r="12" style=${LOOKS[look]} />
      <text x=${centre(t)} y=${MEMORY + 5} text-anchor="middle" fill=${letters(look)}>m</text>`;
  };
  return html`<svg class="fw-picture" viewBox=${`0 0 382 ${AXIS + 56}`} role="group"
    aria-label=${`${NAMES[kind]}: layers upwards, steps to the right`}>
    <text x="4" y="14" font-weight="600">${NAMES[kind]}</text>
    <g fill="none" stroke="var(--fw-fast)" stroke-width="2" aria-hidden="true">${lines.map((d) => svg`<path d=${d} />`)}</g>
    <g fill="none" stroke=${PATH} stroke-width="5" stroke-linejoin="round" aria-hidden="true" data-part="path">${path
      .slice(1, count + 1)
      .map((state, i) => svg`<path d=${hop(path[i], state, kind)} />`)}</g>
    ${span(0, L).map((l) => text(4, top(l) + HIGH / 2 + 5, l ? `layer ${l}` : "input 0"))}
    ${text(4, AXIS, "step")}${span(1, T).map((t) => text(centre(t), AXIS, t, "middle"))}
    ${kind === "feedback" ? svg`<g aria-hidden="true">${span(1, T).map(memory)}</g>${text(4, MEMORY + 5, "memory")}` : legend()}
    ${all.map(cell)}
    ${text(4, AXIS + 26, `${length ? `longest path: ${count} of ${inWords(length)}` : "no path: an input"}; whole sequence: ${sequential}`)}
    <g stroke=${PATH} aria-hidden="true" data-part="bar">${span(0, sequential - 1).map(
      (i) => svg`<rect x=${5 + i * 20.6} y=${AXIS + 36} width="16" height="13" fill=${i < count ? PATH : "none"} />`,
    )}</g></svg>`;
};

const sentence = (kind, chosen, { reachable, path, sequential }) => {
  const [l, t] = chosen;
  let read = `reads layer ${l - 1} at ${steps(1, t)}`;
  if (kind === "feedback")
    read =
      `reads layer ${l - 1} at step ${t} and ` +
      (t === 1
        ? "no memory, because none comes before it"
        : `the ${t === 2 ? "memory" : "memories"} of ${steps(1, t - 1)}, each a mix of ` +
          `all ${L + 1} states of its step`);
  return (
    `${NAMES[kind]}: it ${read}. It can depend on ${reachable.size} of the other ` +
    `${all.length - 1} states; the longest path to it has ${inWords(path.length - 1)}. ` +
    `The whole sequence takes ${inWords(sequential)}, one after the other.`
  );
};

// `drawn`: layers of the longest path.
const begun = (chosen) => ({ chosen, drawn: motion.matches ? longest(chosen) : 0 });
const state = { ...begun([2, 4]), running: false };
export default figure("feedback", {
  state,
  compute: (state) => Object.fromEntries(KINDS.map((kind) => [kind, model(kind, state)])),
  plays: ({ set }) => ({
    every: 350,
    begin: () => set({ running: true, drawn: state.drawn < longest(state.chosen) ? state.drawn : 0 }),
    step: () => {
      set({ drawn: state.drawn + 1 });
      return state.drawn < longest(state.chosen);
    },
    end: () => set({ running: false, drawn: motion.matches ? longest(state.chosen) : state.drawn }),
  }),
  page: (state, models, { set, play }) => {
    const choose = (chosen) => {
      play.stop();
      set(begun(chosen));
      if (longest(chosen)) play.start();
    };
    return html`<div class="fw-controls">${play.button} Choose a state in either model.</div>
      ${KINDS.map((kind) => draw(kind, state, models[kind], choose))}`;
  },
  say: ({ chosen }, models) =>
    chosen[0]
      ? `${place(chosen)}. ${KINDS.map((kind) => sentence(kind, chosen, models[kind])).join(" ")}`
      : `${place(chosen)} reads no other state, in either model.`,
  begin: ({ root, play }) => {
    play.whenSeen(root);
    const told = (kind) => {
      const { reachable, layers, count, read, ...more } = model(kind, state);
      const found = all.filter((one) => reachable.has(key(one)));
      return { ...more, reachable: found, memories: read, drawn: count, longest: layers(state.chosen) };
    };
    return {
      state: () => ({ ...state, models: Object.fromEntries(KINDS.map((kind) => [kind, told(kind)])) }),
    };
  },
});
