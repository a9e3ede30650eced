// @ts-check
// The picture of the essay "A memory that can be corrected": a 2 x 2 matrix
// that remembers where people are. Each section of the essay has a setting
// below, a few numbers; on the way to the next section they move, and the
// picture is computed from them. Between the sections of a page without
// scripts are the pictures of all settings.
import { dot, read, towards } from "./algebra.js";
import { button, figure, html, line, motion, note, nothing, svg } from "./kit.js";
import { FAST, NEW, WRONG, distance, keys, letter, mark, shape, through, to, values } from "./plane.js";
import { number, round, signed } from "./words.js";

const PEOPLE = ["Nora", "Max", "Pia"];
// Who is where, in the order in which it is written. The same fact once
// more, three times, is for the key that is too long.
const FACTS = [
  { who: 0, place: [1, 0.5] },
  { who: 1, place: [-1, 1] },
  { who: 0, place: [0.5, -1] },
  { who: 2, place: [0.8, 0.3] },
  ...Array(3).fill({ who: 0, place: [1, 0.5] }),
];
const REPEATED = [0, 4, 5, 6]; // writes of one fact, again and again
const degrees = (x, y) => (Math.atan2(y, x) * 180) / Math.PI;
const NORA = degrees(0.8, 0.6);
const PIA = degrees(0.28, 0.96);
// - strengths: how much of each fact is written;
// - angle, length: where Max's key points, how long Nora's is;
// - corrects: 0, the sum rule; 1, the delta rule;
// - wrote: the fact whose write is shown; asked: whose key reads;
// - overlaps: pairs of keys whose product is drawn;
// - was: what was read before that write is drawn.
const START = { angle: NORA + 90, length: 1, corrects: 0, range: 2, overlaps: [] };
const AGAIN = { strengths: [1, 0, 0, 0, 1, 1, 1], wrote: 0, asked: 0, corrects: 1, again: true };
const MOVED = { strengths: [1, 1, 1], wrote: 2, asked: 0, was: true };
const SETTINGS = {
  pair: { strengths: [1], wrote: 0 },
  read: { strengths: [1], asked: 0 },
  second: { strengths: [1, 1], wrote: 1, asked: 1 },
  overlap: { strengths: [1, 1], angle: 90, asked: 0, overlaps: [[1, 0]] },
  moved: MOVED,
  delta: { ...MOVED, corrects: 1 },
  strength: { ...MOVED, strengths: [1, 1, 0.8], corrects: 1 },
  third: {
    strengths: [1, 1, 1, 1],
    corrects: 1,
    wrote: 3,
    asked: 2,
    overlaps: [[2, 0], [2, 1]],
    was: true,
  },
  long: { ...AGAIN, length: 1.5, range: 3.25 },
  unit: AGAIN,
  chunk: { strengths: [1, 1, 1], corrects: 1, chunk: true },
};
const NAMES = Object.keys(SETTINGS);
const settings = NAMES.map((name) => {
  const strengths = FACTS.map((_, i) => SETTINGS[name].strengths[i] ?? 0);
  return { ...START, ...SETTINGS[name], strengths };
});

// --- The arithmetic ------------------------------------------------------------
const compute = ({ strengths, angle, length, corrects, wrote, asked, was }) => {
  const keys = [NORA, angle, PIA].map(towards);
  keys[0] = keys[0].map((x) => length * x);
  let W = [[0, 0], [0, 0]];
  const writes = FACTS.map(({ who, place }, i) => {
    const held = read(W, keys[who]);
    const u = place.map((x, row) => strengths[i] * (x - corrects * held[row]));
    const before = W;
    W = W.map((row, n) => row.map((w, m) => w + u[n] * keys[who][m]));
    return { u, before, after: W };
  });
  // All writes at once: (I + A) U = V, and W = U' K.
  const steps = FACTS.slice(0, 3);
  const A = steps.map((a, i) => steps.map((b, j) => (j < i ? dot(keys[a.who], keys[b.who]) : 0)));
  const solved = { A, U: writes.slice(0, 3).map(({ u }) => u), V: steps.map(({ place }) => place) };
  // Who is where now: the last fact of each that has been written.
  const people = PEOPLE.flatMap((name, who) => {
    const last = FACTS.findLastIndex((fact, i) => fact.who === who && strengths[i] > 0);
    if (last < 0) return [];
    const [key, { place }] = [keys[who], FACTS[last]];
    const readback = read(W, key);
    const before = was ? read(writes[wrote].before, key) : null;
    return [{ name, who, key, place, readback, before, error: distance(readback, place) }];
  });
  const again = REPEATED.map((i) => read(writes[i].after, keys[0]));
  return { keys, W, writes, solved, people, again, key: keys[FACTS[wrote]?.who ?? asked ?? 0] };
};

// --- The picture ---------------------------------------------------------------
const CENTRE = [82, 100];
const BOX = { x: 206, y: 24, size: 150 };
const { circle, at: keyAt } = keys(CENTRE, 54);
const PAPER = "fill: var(--md-default-bg-color); stroke-width: 1.5";
const bare = (x) => number(x).replace(/\.?0+$/, "");
const pair = (v) => v.map(bare).join(", ");
const near = (a, b) => distance(a, b) < 0.005;
const between = (a, b, share) => a + share * (b - a);
const title = (x, y, words, anchor = "start") =>
  svg`<text x=${x} y=${y} text-anchor=${anchor} font-weight="600">${words}</text>`;

// The product of two keys of length 1: how far one reaches along the other.
const overlap = (from, onto) => {
  const product = dot(from, onto);
  const foot = onto.map((x) => product * x);
  // The number is beside the foot, on the side away from the other key.
  const away = foot.map((x, n) => x - (0.28 * (from[n] - foot[n])) / distance(from, foot));
  const [x, y] = keyAt(away);
  return svg`<g data-part="overlap">
    ${line(through(CENTRE, keyAt(foot)), `stroke: ${WRONG}; stroke-width: 8; stroke-opacity: 0.6`)}
    ${line(through(keyAt(from), keyAt(foot)), `stroke: ${WRONG}; stroke-dasharray: 3 2`)}
    <g font-weight="600" style=${`fill: ${WRONG}`}>${note(round(x), round(y), bare(product), "middle")}</g></g>`;
};
const arrow = (from, to) => {
  const long = distance(from, to);
  if (long < 8) return nothing;
  const way = to.map((x, n) => (x - from[n]) / long);
  const tip = to.map((x, n) => x - 7 * way[n]);
  const side = (s) => [tip[0] - 7 * way[0] + 4 * s * way[1], tip[1] - 7 * way[1] - 4 * s * way[0]];
  return line(through(from, tip) + through(side(1), tip, side(-1)), `stroke: ${NEW}; stroke-width: 2`);
};

const plane = ({ asked, wrote, again, overlaps, range }, found) => {
  const { people } = found;
  const { at, drawn } = values(BOX, range);
  const silent = asked === undefined; // nobody has asked yet
  const writer = FACTS[wrote]?.who;
  const [a, b] = found.keys;
  const square = people.some(({ who }) => who === 1) && Math.abs(dot(a, b)) < 1e-9;
  const corner = [a, a.map((x, i) => x + b[i]), b].map((key) => keyAt(key, 9));
  // Letters are beside the mark, or above it where a line passes.
  const others = people.flatMap(({ place, readback, before }) =>
    [readback, before ?? readback, place.map((x, n) => between(x, readback[n], 0.4))].map(at),
  );
  const value = ({ name, who, place, readback, before }) => {
    const [here, there] = [at(place), at(readback)];
    const shown = !silent && !again;
    const moved = before && !near(before, readback);
    return mark(name[0], who, {
      place: here,
      read: shown && there,
      error: shown && !near(place, readback),
      before: moved && at(before),
      trail: moved && who !== writer,
      others: again ? [] : others,
      label: again ? [here[0] - 17, here[1] - 10] : here,
    });
  };
  const last = people.find(({ who, before, readback }) => who === writer && before && !near(before, readback));
  const turns = found.again.map(at);
  const spread = distance(found.again[0], found.again[1]) > 0.05;
  return svg`${title(0, 16, "Keys: who")}${circle}
    ${square ? line(through(...corner), "stroke-opacity: 0.6", "right angle") : nothing}
    ${title(BOX.x, 16, "Values: where")}${drawn}
    ${overlaps.map(([from, onto]) => overlap(found.keys[from], found.keys[onto]))}
    ${people.map(({ name, who, key }) => svg`
      ${line(through(CENTRE, keyAt(key)), `stroke-width: ${who === (writer ?? asked) ? 3 : 1.5}`)}
      <g data-key=${name} transform=${to(keyAt(key))}>${shape(who, 10, PAPER)}${letter(name[0])}</g>`)}
    ${again ? line(through(...turns), `stroke: ${WRONG}; stroke-width: 1.5`) : nothing}
    ${people.map(value)}
    ${again ? turns.map(([x, y], i) => svg`${shape(0, 4, `fill: ${FAST}; stroke: ${FAST}`, [x, y])}
      ${spread ? note(round(x), round(y - 12), i + 1, "middle") : nothing}`) : nothing}
    ${last ? arrow(at(last.before), at(last.readback)) : nothing}`;
};

// Numbers in cells, whose colour is their sign and size.
const grid = (name, rows, x, y, cell, height = cell) => svg`<g data-vector=${name}>${rows.map((row, i) =>
  row.map((value, j) => {
    const [left, top] = [x + j * cell, y + i * height];
    const colour = signed(0.45 * Math.max(-1, Math.min(value / 1.5, 1)));
    return svg`<rect x=${left} y=${top} width=${cell} height=${height} class="fw-cell" style=${`fill: ${colour}`} />
      <text x=${left + cell / 2} y=${top + height / 2} class="fw-cell-text">${Number.isNaN(value) ? "" : bare(value)}</text>`;
  }),
)}</g>`;
// All writes at once.
const system = ({ solved: { A, U, V } }) => {
  const lower = A.map((row, i) => row.map((x, j) => (j > i ? NaN : i === j ? 1 : x)));
  const block = (rows, x, words) =>
    svg`${title(x + 20 * rows[0].length, 32, words, "middle")}${grid(words, rows, x, 42, 40)}`;
  return svg`${block(lower, 28, "I + A")}${block(U, 168, "U, written")}${block(V, 268, "V, places")}
    ${[[158, "·"], [258, "="]].map(
      ([x, sign]) => svg`<text x=${x} y="102" text-anchor="middle" dominant-baseline="central">${sign}</text>`,
    )}
    ${FACTS.slice(0, 3).map(
      ({ who }, i) => svg`<g transform=${to([13, 62 + 40 * i])}>${shape(who, 9, "")}${letter(PEOPLE[who][0])}</g>`,
    )}`;
};

// Below: the memory, with a key, what is written and what is read.
const TOP = 192;
const numbers = ({ wrote, asked, chunk, again }, { W, key, writes }) => {
  const silent = asked === undefined;
  const under = (x, words, colour) => svg`<g style=${`fill: ${colour}`}>${note(x, TOP + 97, words, "middle")}</g>`;
  const column = (name, v, x, colour) =>
    svg`${grid(name, v.map((entry) => [entry]), x, TOP + 26, 38, 32)}${under(x + 19, name, colour)}`;
  return svg`${grid("memory", W, 46, TOP + 26, 38, 32)}${under(84, "memory W", "inherit")}
    ${chunk ? nothing : svg`${grid("key", [key], 46, TOP, 38, 22)}${note(40, TOP + 11, "key", "end")}`}
    ${wrote === undefined || again ? nothing : column("written", writes[wrote].u, 2, NEW)}
    ${silent || chunk ? nothing : column("read", read(W, key), 128, FAST)}`;
};
const table = ({ asked, chunk, again }, found) => {
  const silent = asked === undefined && !chunk;
  const rows = again
    ? found.again.map((v, i) => [i + 1, found.people[0].place, v])
    : found.people.map(({ name, place, readback }) => [name, place, readback]);
  return svg`<g data-part="table">${note(180, TOP + 8, again ? "write" : "")}${note(255, TOP + 8, "is at", "end")}
    ${note(342, TOP + 8, "memory says", "end")}${line(`M180 ${TOP + 19}h180`, "stroke-opacity: 0.5")}
    ${rows.map(([name, place, says], i) => {
      const y = TOP + 34 + 22 * i;
      const right = near(place, says);
      return svg`<g font-weight="600">${note(180, y, name)}</g>${note(255, y, pair(place), "end")}
        <g style=${silent || right ? "" : `fill: ${WRONG}`}>${note(342, y, silent ? "?" : pair(says), "end")}
        ${note(354, y, silent ? "" : right ? "✓" : "✗", "middle")}</g>`;
    })}</g>`;
};

// --- Words -----------------------------------------------------------------------
const vector = (v) => `(${v.map(bare).join(",\u00a0")})`;
const rule = ({ corrects, strengths, chunk, again }) => {
  if (!corrects) return "Sum rule";
  const beta = !again && strengths.find((s) => s > 0 && s < 1);
  return `Delta rule, β = ${bare(beta || 1)}${chunk ? ", all at once" : ""}`;
};
const sentence = (setting, { W, people, again, solved, key, writes }) => {
  const parts = [];
  if (setting.again)
    parts.push(
      `Nora is at ${vector(people[0].place)}, her key is ${vector(key)}. ` +
        `After each of four writes it reads ${again.map(vector).join(", ")}`,
    );
  else if (setting.chunk) parts.push(`What the three writes add: ${solved.U.map(vector).join(", ")}`);
  else if (setting.wrote !== undefined)
    parts.push(
      `Written under ${PEOPLE[FACTS[setting.wrote].who]}'s key ${vector(key)}: ${vector(writes[setting.wrote].u)}`,
    );
  if (!setting.again && (setting.asked !== undefined || setting.chunk))
    for (const { name, place, readback, error } of people)
      parts.push(
        `${name} is at ${vector(place)}; the memory says ${vector(readback)}` +
          (near(place, readback) ? ", right" : `, off by ${bare(error)}`),
      );
  parts.push(`Memory: first row ${pair(W[0])}; second row ${pair(W[1])}`);
  return `${rule(setting)}. ${parts.join(". ")}.`;
};

// --- From section to section -------------------------------------------------------
const mixed = (from, to, share) => {
  const mix = { ...to };
  for (const name of ["angle", "length", "corrects", "range"])
    mix[name] = between(from[name], to[name], share);
  mix.strengths = to.strengths.map((s, i) => between(from.strengths[i], s, share));
  return mix;
};
const sections = NAMES.map((name) => document.querySelector(`[data-step="${name}"]`));
// - setting: what is drawn, somewhere between two settings while it is `moving`;
// - goal: the step that the page scrolls to, so that presses add up.
const state = { at: 0, setting: settings[0], moving: false, goal: null };
let frame;
const turn = (by) => () => {
  state.goal = Math.max(0, Math.min((state.goal ?? state.at) + by, NAMES.length - 1));
  sections[state.goal].scrollIntoView({ behavior: motion.matches ? "instant" : "smooth" });
};
const go = (set, at, jump = false) => {
  if (at === state.at) return;
  cancelAnimationFrame(frame);
  const [from, to] = [state.setting, settings[at]];
  if (jump || motion.matches || to.chunk || from.chunk) {
    set({ at, setting: to, moving: false });
    return;
  }
  set({ at, moving: true });
  const begun = performance.now();
  const advance = (now) => {
    const time = motion.matches ? 1 : Math.min(1, Math.max(0, (now - begun) / 700));
    set(time < 1 ? { setting: mixed(from, to, time * time * (3 - 2 * time)) } : { setting: to, moving: false });
    if (time < 1) frame = requestAnimationFrame(advance);
  };
  frame = requestAnimationFrame(advance);
};

figure("essay", {
  state,
  compute: ({ setting }) => compute(setting),
  page: ({ at, setting }, shown) => html`<div class="fw-controls"><strong>${rule(settings[at])}</strong>
      <span>${at + 1} of ${NAMES.length}</span>
      ${button("‹", turn(-1), { label: "Previous step", disabled: at === 0 })}
      ${button("›", turn(1), { label: "Next step", disabled: at === NAMES.length - 1 })}</div>
    <svg viewBox="0 0 360 296" class="fw-picture" role="group"
      aria-label="Keys on a circle, values in a plane, and the memory as numbers">
    ${setting.chunk ? system(shown) : plane(setting, shown)}${numbers(setting, shown)}${table(setting, shown)}</svg>`,
  // Words once the picture is as they say.
  say: ({ moving, setting }, shown) => (moving ? "" : sentence(setting, shown)),
  begin: ({ root, set }) => {
    // The section that is read: the last one that begins above a line in the
    // window, below the picture where that is above the text.
    const follow = () => {
      const box = root.parentElement.getBoundingClientRect();
      const above = box.left < sections[0].getBoundingClientRect().right;
      const top = above ? Math.min(box.bottom, innerHeight) : 0;
      const reading = top + 0.4 * (innerHeight - top);
      const begun = sections.findLastIndex((one) => one.getBoundingClientRect().top <= reading);
      go(set, Math.max(0, begun));
      sections.forEach((one, i) => one.classList.toggle("fw-current", i === state.at));
    };
    let waiting = null;
    const later = () => {
      waiting ??= requestAnimationFrame(() => {
        waiting = null;
        follow();
      });
    };
    addEventListener("scroll", later, { passive: true });
    addEventListener("resize", later);
    // There, or the reader scrolls.
    addEventListener("scrollend", () => {
      follow();
      state.goal = null;
    });
    /** @param {any} event */
    const leave = ({ target, key }) => {
      const pressed = target.closest?.(".fw-controls") && [" ", "Enter"].includes(key);
      if (!pressed) state.goal = null;
    };
    for (const name of ["wheel", "touchmove", "keydown"])
      addEventListener(name, leave, { passive: true });
    later();
    return {
      steps: NAMES,
      // Without a move, for the pictures that are kept.
      jump: (name) => go(set, NAMES.indexOf(name), true),
      state: () => ({ ...state, step: NAMES[state.at], rule: rule(settings[state.at]), ...compute(state.setting) }),
    };
  },
});
