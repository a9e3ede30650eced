// @ts-check
// Which states of a stack a state can see, in a transformer and in the feedback
// transformer of fwlab.ops.feedback, and the longest path that ends there.
// Only `reads` knows a model; all that is shown follows from it.
import * as fwlab from "./fwlab.js";
import { text, small, group, box, BOLD, CENTRED } from "./fwlab.js";

fwlab.figure("feedback", (figure) => {
  const L = 3;
  const T = 6;
  const NAMES = { transformer: "Transformer", feedback: "Feedback transformer" };
  let chosen = [2, 4];
  let drawn = 0; // layers of the longest path

  const span = (from, to) =>
    Array.from({ length: Math.max(0, to - from + 1) }, (_, i) => from + i);
  /** @param {number[]} state */
  const key = ([l, t]) => `${l},${t}`;
  const all = span(1, T).flatMap((t) => span(0, L).map((l) => [l, t]));
  /** @param {string} kind @param {number[]} state */
  const memories = (kind, [l, t]) =>
    kind === "feedback" && l > 0 ? span(1, t - 1) : [];
  /** @param {string} kind @param {number[]} state */
  const reads = (kind, [l, t]) => {
    if (l === 0) return [];
    if (kind === "transformer") return span(1, t).map((j) => [l - 1, j]);
    const mixed = memories(kind, [l, t]).flatMap((j) => span(0, L).map((k) => [k, j]));
    return [...mixed, [l - 1, t]];
  };

  // Time by time and upwards: whatever a state reads comes before it. Of
  // several longest paths, the one that is longest in the past.
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

  const W = 52;
  const H = 52;
  const wide = 40;
  const high = 34;
  const left = (t) => 70 + (t - 1) * W;
  const centre = (t) => left(t) + wide / 2;
  const top = (l) => 66 + (L - l) * H;
  const memoryY = 40;
  const axisY = top(0) + high + 15;
  const PATH = "var(--fw-other)";
  const PAPER = "var(--md-default-bg-color)";

  const looks = {
    chosen: { fill: "var(--fw-trained)", stroke: "currentcolor", width: 3 },
    direct: { fill: "var(--fw-fast)", stroke: "var(--fw-fast)", width: 1.5 },
    reachable: {
      fill: `color-mix(in srgb, var(--fw-fast) 20%, ${PAPER})`,
      stroke: "var(--fw-fast)",
      width: 1.5,
      dash: "5 3",
    },
    none: { fill: PAPER, stroke: "var(--md-default-fg-color--light)", width: 1 },
  };
  const SAID = {
    chosen: "chosen",
    direct: "read directly",
    reachable: "reached through others",
    none: "not seen",
  };
  const paint = (shape, label, look) => {
    const { fill, stroke, width, dash } = looks[look];
    shape.setAttribute("style", `fill: ${fill}; stroke: ${stroke}`);
    shape.setAttribute("stroke-width", width);
    shape.setAttribute("stroke-dasharray", dash ?? "none");
    const inverse = look === "chosen" || look === "direct";
    label.setAttribute("fill", inverse ? PAPER : "currentcolor");
  };
  const layersInWords = (n) => `${n} layer${n === 1 ? "" : "s"}`;
  const steps = (from, to) => (from === to ? `step ${from}` : `steps ${from} to ${to}`);
  /** @param {number[]} state */
  const place = ([l, t]) => `${l ? `Layer ${l}` : "Input 0"} at step ${t}`;

  // One model: its drawing, and what of it changes with the choice.
  const draw = (kind) => {
    const { nodes, layers, sequential } = graph(kind);
    const picture = figure.picture(
      382,
      axisY + 56,
      `${NAMES[kind]}: layers upwards, steps to the right`,
    );
    const add = (element) => {
      picture.append(element);
      return element;
    };
    const hidden = (attributes) => add(group({ fill: "none", "aria-hidden": "true", ...attributes }));
    add(text(4, 14, NAMES[kind], BOLD));
    const lines = hidden({ stroke: "var(--fw-fast)", "stroke-width": 2 });
    const way = hidden({
      "data-part": "path",
      stroke: PATH,
      "stroke-width": 5,
      "stroke-linejoin": "round",
    });
    // In the colour of its group.
    const line = (d) => fwlab.svg("path", { d });

    for (const l of span(0, L))
      add(text(4, top(l) + high / 2 + 5, l ? `layer ${l}` : "input 0"));
    add(text(4, axisY, "step"));
    for (const t of span(1, T)) add(text(centre(t), axisY, t, CENTRED));

    const circles = (kind === "feedback" ? span(1, T) : []).map((t) => {
      const circle = fwlab.circle({ cx: centre(t), cy: memoryY, r: 12 });
      const label = text(centre(t), memoryY + 5, "m", CENTRED);
      hidden().append(circle, label);
      return [circle, label];
    });
    if (kind === "feedback") add(text(4, memoryY + 5, "memory"));
    else {
      // A transformer has no memories: here is room for the legend.
      const samples = [["direct", "read directly"], ["reachable", "through others"], ["none", "not seen"]];
      for (const [i, [look, name]] of samples.entries()) {
        const x = [4, 100, 202][i];
        const sample = box(x, 33, 13, 13, { rx: 2 });
        paint(sample, text(), look);
        picture.append(sample, small(x + 18, 45, name));
      }
      const sample = line("M281 40h16");
      sample.setAttribute("style", `stroke: ${PATH}; stroke-width: 5`);
      picture.append(sample, small(302, 45, "longest path"));
    }

    const cells = {};
    for (const state of all) {
      const [l, t] = state;
      const shape = box(left(t), top(l), wide, high, { rx: 4 });
      const label = text(centre(t), top(l) + high / 2 + 5, `${layers(state)}`, CENTRED);
      // A finger finds the whole field of the cell.
      const field = box(left(t) - (W - wide) / 2, top(l) - (H - high) / 2, W, H, {
        fill: "none",
        "pointer-events": "all",
      });
      const cell = group({ role: "button", class: "fw-tap", "data-state": key(state) });
      // Under the number, once as many layers have been drawn.
      const known = box(left(t) + 8, top(l) + high - 8, wide - 16, 3, { stroke: "none" });
      cell.append(field, shape, label, known);
      const take = (to) => {
        choose(to);
        cells[key(to)].cell.focus();
      };
      cell.addEventListener("click", () => take(state));
      cell.addEventListener("keydown", (event) => {
        const moves = {
          ArrowLeft: [0, -1],
          ArrowRight: [0, 1],
          ArrowUp: [1, 0],
          ArrowDown: [-1, 0],
          Enter: [0, 0],
          " ": [0, 0],
        };
        if (!(event.key in moves)) return;
        event.preventDefault();
        const [up, right] = moves[event.key];
        const to = [l + up, t + right];
        if (key(to) in cells) take(to);
      });
      picture.append(cell);
      cells[key(state)] = { cell, shape, label, known };
    }

    // A box per layer of the whole sequence; those of the path are filled.
    const counter = add(text(4, axisY + 26, "", { "data-part": "counter" }));
    const bar = hidden({ "data-part": "bar", stroke: PATH });
    bar.append(...span(0, sequential - 1).map((i) => box(5 + i * 20.6, axisY + 36, 16, 13)));

    // From a memory, and from all below it, to the left of a cell.
    /** @param {number} j @param {number[]} state */
    const fromMemory = (j, [l, t]) => {
      const gap = left(t) - (W - wide) / 2;
      return `M${centre(j)} ${memoryY}H${gap}V${top(l) + high / 2}H${left(t)}`;
    };
    /** @param {number} j @param {number[]} state */
    const upwards = (j, [l, t]) =>
      `M${centre(j)} ${top(l - 1)}L${centre(t)} ${top(l) + high}`;
    // One layer of the longest path: from the layer below, or from the top of
    // an earlier step through its memory.
    /** @param {number[]} from @param {number[]} state */
    const hop = ([k, j], state) =>
      kind === "transformer" || j === state[1]
        ? upwards(j, state)
        : `M${centre(j)} ${top(k)}V${memoryY}${fromMemory(j, state)}`;

    const update = () => {
      const { direct, reachable, path } = nodes[key(chosen)];
      const read = memories(kind, chosen);
      const count = Math.min(drawn, path.length - 1);
      const near = new Set(direct.map(key));
      const passed = new Set(path.slice(0, count + 1).map(key));
      for (const state of all) {
        const name = key(state);
        const { cell, shape, label, known } = cells[name];
        const own = name === key(chosen);
        const look = own
          ? "chosen"
          : near.has(name)
            ? "direct"
            : reachable.has(name)
              ? "reachable"
              : "none";
        paint(shape, label, look);
        known.setAttribute("fill", layers(state) <= drawn ? label.getAttribute("fill") : "none");
        if (count && passed.has(name) && !own) {
          shape.style.stroke = PATH;
          shape.setAttribute("stroke-width", 5);
          shape.setAttribute("stroke-dasharray", "none");
        }
        cell.dataset.look = look;
        cell.setAttribute("tabindex", own ? 0 : -1);
        cell.setAttribute("aria-pressed", own);
        const length = `longest path ${layers(state)}`;
        cell.setAttribute(
          "aria-label",
          `${NAMES[kind]}, ${place(state).toLowerCase()}: ${SAID[look]}, ${length}`,
        );
      }
      circles.forEach((circle, i) =>
        paint(...circle, read.includes(i + 1) ? "direct" : "none"),
      );
      const below = kind === "transformer" || !direct.length ? direct : [direct.at(-1)];
      lines.replaceChildren(
        ...below.map(([, j]) => line(upwards(j, chosen))),
        ...read.map((j) => line(`M${centre(j)} ${top(0)}V${memoryY}`)),
        ...(read.length ? [line(fromMemory(1, chosen))] : []),
      );
      way.replaceChildren(
        ...path.slice(1, count + 1).map((state, i) => line(hop(path[i], state))),
      );
      const length = path.length - 1;
      counter.textContent =
        (length ? `longest path: ${count} of ${layersInWords(length)}` : "no path: an input") +
        `; whole sequence: ${sequential}`;
      [...bar.children].forEach((one, i) =>
        one.setAttribute("fill", i < count ? PATH : "none"),
      );
    };

    const sentence = () => {
      const [l, t] = chosen;
      const { reachable, path } = nodes[key(chosen)];
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
        `${all.length - 1} states; the longest path to it has ` +
        `${layersInWords(path.length - 1)}. ${total()}`
      );
    };
    const total = () =>
      `The whole sequence takes ${layersInWords(sequential)}, one after the other.`;

    return {
      update,
      sentence,
      layers,
      state: () => {
        const { direct, reachable, path } = nodes[key(chosen)];
        return {
          direct,
          reachable: all.filter((state) => reachable.has(key(state))),
          memories: memories(kind, chosen),
          path,
          drawn: Math.min(drawn, path.length - 1),
          longest: layers(chosen),
          sequential,
        };
      },
    };
  };

  const longest = () => Math.max(...Object.values(models).map((m) => m.layers(chosen)));
  const update = () => {
    for (const model of Object.values(models)) model.update();
    const both = Object.values(models).map((model) => model.sentence());
    const what = chosen[0]
      ? `${place(chosen)}. ${both.join(" ")}`
      : `${place(chosen)} reads no other state, in either model.`;
    figure.say(what);
  };
  const player = fwlab.player({
    every: 350,
    begin: () => {
      drawn = drawn < longest() ? drawn : 0;
      update();
    },
    step: () => {
      drawn += 1;
      update();
      return drawn < longest();
    },
    end: () => {
      if (fwlab.motion.matches) drawn = longest();
      update();
    },
  });
  const choose = (state) => {
    chosen = state;
    drawn = fwlab.motion.matches ? longest() : 0;
    update();
    if (longest()) player.start();
    else player.stop();
  };

  figure.root.append(
    fwlab.controls(player.button, "Choose a state in either model."),
  );
  const models = Object.fromEntries(
    Object.keys(NAMES).map((kind) => [kind, draw(kind)]),
  );
  drawn = fwlab.motion.matches ? longest() : 0;
  update();
  player.whenSeen(figure.root);

  return {
    state: () => ({
      layers: L,
      steps: T,
      chosen,
      running: player.running(),
      models: Object.fromEntries(
        Object.entries(models).map(([kind, model]) => [kind, model.state()]),
      ),
    }),
  };
});
