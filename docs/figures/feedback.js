// Which states of a stack a state can see: a transformer, or the feedback
// transformer of fwlab.ops.feedback_memory. Only `reads` knows a model; all that is
// shown follows from it.
fwlab.figure("feedback", (figure) => {
  const L = 3;
  const T = 6;
  const names = { transformer: "Transformer", feedback: "Feedback transformer" };
  let model = "feedback";
  let chosen = [2, 4];

  const span = (from, to) =>
    Array.from({ length: Math.max(0, to - from + 1) }, (_, i) => from + i);
  const key = ([l, t]) => `${l},${t}`;
  const all = span(1, T).flatMap((t) => span(0, L).map((l) => [l, t]));
  const memories = (kind, [l, t]) =>
    kind === "feedback" && l > 0 ? span(1, t - 1) : [];
  const reads = (kind, [l, t]) => {
    if (l === 0) return [];
    if (kind === "transformer") return span(1, t).map((j) => [l - 1, j]);
    const mixed = memories(kind, [l, t]).flatMap((j) => span(0, L).map((k) => [k, j]));
    return [...mixed, [l - 1, t]];
  };

  // Time by time and upwards: whatever a state reads comes before it.
  const graphs = {};
  for (const kind of Object.keys(names)) {
    const nodes = {};
    for (const state of all) {
      const direct = reads(kind, state);
      const reachable = new Set(direct.map(key));
      let longest = 0;
      for (const other of direct) {
        for (const name of nodes[key(other)].reachable) reachable.add(name);
        longest = Math.max(longest, 1 + nodes[key(other)].longest);
      }
      nodes[key(state)] = { direct, reachable, longest };
    }
    const sequential = Math.max(...Object.values(nodes).map((node) => node.longest));
    graphs[kind] = { nodes, sequential };
  }

  const W = 52;
  const H = 58;
  const wide = 40;
  const high = 34;
  const left = (t) => 72 + (t - 1) * W;
  const top = (l) => 88 + (L - l) * H;
  const memoryY = 52;
  const picture = figure.picture(
    382,
    350,
    "States of a stack: layers upwards, steps to the right",
  );
  const price = fwlab.picture(388, 76, "Layers one after the other");
  const text = (x, y, content, attributes = {}) => {
    const element = fwlab.svg("text", { x, y, ...attributes }, content);
    picture.append(element);
    return element;
  };
  const title = text(4, 18, "", { "font-weight": 600 });
  const lines = fwlab.svg("g", {
    fill: "none",
    stroke: "var(--fw-fast)",
    "stroke-width": 2,
    "aria-hidden": "true",
  });
  picture.append(lines);
  const memoryLabel = text(4, memoryY + 5, "memory");
  const circles = span(1, T).map((t) => {
    const circle = fwlab.svg("circle", {
      cx: left(t) + wide / 2,
      cy: memoryY,
      r: 13,
      stroke: "currentcolor",
    });
    const label = fwlab.svg(
      "text",
      { x: left(t) + wide / 2, y: memoryY + 5, "text-anchor": "middle" },
      "m",
    );
    const group = fwlab.svg("g", { "aria-hidden": "true" }, circle, label);
    picture.append(group);
    return { group, circle, label };
  });
  for (const l of span(0, L))
    text(4, top(l) + high / 2 + 5, l ? `layer ${l}` : "input 0");
  const axisY = top(0) + high + 18;
  text(4, axisY, "step");
  for (const t of span(1, T))
    text(left(t) + wide / 2, axisY, String(t), { "text-anchor": "middle" });

  const looks = {
    chosen: { fill: "var(--fw-trained)", stroke: "currentcolor", width: 3 },
    direct: { fill: "var(--fw-fast)", stroke: "var(--fw-fast)", width: 1.5 },
    reachable: {
      fill: "color-mix(in srgb, var(--fw-fast) 20%, var(--md-default-bg-color))",
      stroke: "var(--fw-fast)",
      width: 1.5,
      dash: "5 3",
    },
    none: {
      fill: "var(--md-default-bg-color)",
      stroke: "var(--md-default-fg-color--light)",
      width: 1,
    },
  };
  const paint = (shape, label, look) => {
    const { fill, stroke, width, dash } = looks[look];
    shape.setAttribute("style", `fill: ${fill}; stroke: ${stroke}`);
    shape.setAttribute("stroke-width", width);
    shape.setAttribute("stroke-dasharray", dash ?? "none");
    const inverse = look === "chosen" || look === "direct";
    label.setAttribute("fill", inverse ? "var(--md-default-bg-color)" : "currentcolor");
  };

  const cells = {};
  for (const state of all) {
    const [l, t] = state;
    const box = fwlab.svg("rect", {
      x: left(t),
      y: top(l),
      width: wide,
      height: high,
      rx: 4,
    });
    const label = fwlab.svg("text", {
      x: left(t) + wide / 2,
      y: top(l) + high / 2 + 5,
      "text-anchor": "middle",
    });
    const cell = fwlab.svg(
      "g",
      {
        role: "button",
        class: "fw-tap",
      },
      // A finger finds the whole field of the cell.
      fwlab.svg("rect", {
        x: left(t) - (W - wide) / 2,
        y: top(l) - (H - high) / 2,
        width: W,
        height: H,
        fill: "none",
        "pointer-events": "all",
      }),
      box,
      label,
    );
    cell.dataset.state = key(state);
    cell.addEventListener("click", () => choose(state));
    cell.addEventListener("keydown", (event) => {
      const moves = {
        ArrowLeft: [0, -1],
        ArrowRight: [0, 1],
        ArrowUp: [1, 0],
        ArrowDown: [-1, 0],
      };
      if (event.key === "Enter" || event.key === " ") {
        event.preventDefault();
        choose(state);
      }
      if (!(event.key in moves)) return;
      event.preventDefault();
      const [up, right] = moves[event.key];
      const to = [l + up, t + right];
      if (key(to) in cells) choose(to);
    });
    picture.append(cell);
    cells[key(state)] = { cell, box, label };
  }

  const legendY = axisY + 28;
  const legend = [
    ["direct", "read directly", 4],
    ["reachable", "through others", 134],
    ["none", "hidden", 270],
  ];
  for (const [look, name, x] of legend) {
    const box = fwlab.svg("rect", { x, y: legendY - 12, width: 14, height: 14, rx: 2 });
    paint(box, fwlab.svg("text"), look);
    picture.append(box);
    text(x + 20, legendY, name);
  }
  price.append(
    fwlab.svg(
      "text",
      { x: 4, y: 14, "font-weight": 600 },
      "Layers one after the other, whole sequence",
    ),
  );
  const bars = Object.keys(names).map((kind, row) => {
    const y = 40 + 24 * row;
    const { sequential } = graphs[kind];
    price.append(fwlab.svg("text", { x: 4, y }, `${kind}: ${sequential}`));
    const bar = fwlab.svg("g", { "aria-hidden": "true" });
    for (const i of span(0, sequential - 1))
      bar.append(
        fwlab.svg("rect", { x: 112 + i * 15.5, y: y - 12, width: 12, height: 14 }),
      );
    price.append(bar);
    return [kind, bar];
  });

  const steps = (from, to) => (from === to ? `step ${from}` : `steps ${from} to ${to}`);
  const place = ([l, t]) => `${l ? `Layer ${l}` : "The input (layer 0)"} at step ${t}`;
  const sentence = () => {
    const [l, t] = chosen;
    const { reachable, longest } = graphs[model].nodes[key(chosen)];
    const { sequential } = graphs[model];
    const total = `The whole sequence takes ${sequential} layers one after the other.`;
    const start = `${names[model]}. ${place(chosen)}`;
    if (l === 0) return `${start} reads no other state. ${total}`;
    let read = `reads layer ${l - 1} at ${steps(1, t)}`;
    if (model === "feedback") {
      const m = t === 2 ? "the memory" : "the memories";
      read = `reads layer ${l - 1} at step ${t}`;
      read +=
        t === 1
          ? " and no memory, because none comes before it"
          : ` and ${m} of ${steps(1, t - 1)}; ` +
            `a memory mixes all ${L + 1} states of its step`;
    }
    const others = `${reachable.size} of the other ${all.length - 1} states`;
    const count = `It can depend on ${others}.`;
    const way = `The longest path to it has ${longest} layer${longest > 1 ? "s" : ""}.`;
    return `${start} ${read}. ${count} ${way} ${total}`;
  };

  const path = (d, attributes = {}) =>
    lines.append(fwlab.svg("path", { d, ...attributes }));
  const drawLines = () => {
    lines.replaceChildren();
    const [l, t] = chosen;
    const centre = (step) => left(step) + wide / 2;
    if (l > 0)
      for (const j of model === "transformer" ? span(1, t) : [t])
        path(`M${centre(j)} ${top(l - 1)}L${centre(t)} ${top(l) + high}`);
    const read = memories(model, chosen);
    for (const j of read) path(`M${centre(j)} ${top(0)}V${memoryY}`);
    if (read.length) {
      const gap = left(t) - (W - wide) / 2;
      const y = top(l) + high / 2;
      path(`M${centre(1)} ${memoryY}H${gap}V${y}H${left(t)}`);
    }
  };

  const update = () => {
    const { nodes } = graphs[model];
    const { direct, reachable } = nodes[key(chosen)];
    const near = new Set(direct.map(key));
    title.textContent = `${names[model]}: longest path to a state`;
    for (const state of all) {
      const name = key(state);
      const { cell, box, label } = cells[name];
      const own = name === key(chosen);
      const look = own
        ? "chosen"
        : near.has(name)
          ? "direct"
          : reachable.has(name)
            ? "reachable"
            : "none";
      paint(box, label, look);
      label.textContent = nodes[name].longest;
      cell.dataset.look = look;
      cell.setAttribute("tabindex", own ? 0 : -1);
      cell.setAttribute("aria-pressed", own);
      const said = {
        chosen: "chosen",
        direct: "read directly",
        reachable: "reached through others",
        none: "hidden",
      }[look];
      const length = `longest path ${nodes[name].longest}`;
      cell.setAttribute("aria-label", `${place(state)}: ${said}, ${length}`);
    }
    const read = memories(model, chosen);
    const shown = model === "feedback" ? "visible" : "hidden";
    memoryLabel.setAttribute("visibility", shown);
    circles.forEach(({ group, circle, label }, i) => {
      group.setAttribute("visibility", shown);
      paint(circle, label, read.includes(i + 1) ? "direct" : "none");
    });
    for (const [kind, bar] of bars) {
      bar.setAttribute("fill", kind === model ? "var(--fw-fast)" : "none");
      bar.setAttribute("stroke", "var(--fw-fast)");
    }
    drawLines();
    figure.say(sentence());
  };

  const choose = (state) => {
    chosen = state;
    update();
    cells[key(state)].cell.focus();
  };

  figure.beside(
    fwlab.controls(
      fwlab.choice("Model", names, model, (kind) => {
        model = kind;
        update();
      }),
    ),
    price,
  );
  update();

  return {
    state: () => {
      const { direct, reachable, longest } = graphs[model].nodes[key(chosen)];
      return {
        model,
        layers: L,
        steps: T,
        chosen,
        direct,
        reachable: all.filter((state) => reachable.has(key(state))),
        memories: memories(model, chosen),
        longest,
        sequential: graphs[model].sequential,
      };
    },
  };
});
