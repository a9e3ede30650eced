// @ts-check
// The picture of the essay "A memory that can be corrected": a 2 x 2 matrix
// that remembers where people are. Each section of the essay has a setting
// below, a few numbers; on the way to the next section they move, and the
// picture is computed from them. Between the sections of a page without
// scripts are the pictures of all settings.
import * as fwlab from "./fwlab.js";
import {
  text, small, path, group, round, BOLD, MIDDLE, CENTRED, WRONG, dot, read,
} from "./fwlab.js";
import { FAST, SHAPES, distance, put, show, line } from "./plane.js";

fwlab.figure("essay", (figure) => {
  const PEOPLE = ["Nora", "Max", "Pia"];
  // Who is where, in the order in which it is written. The same fact once
  // more, three times, is for the key that is too long.
  const FACTS = [
    { who: 0, place: [1, 0.5] },
    { who: 1, place: [-1, 1] },
    { who: 0, place: [0.5, -1] },
    { who: 2, place: [0.8, 0.3] },
    { who: 0, place: [1, 0.5] },
    { who: 0, place: [1, 0.5] },
    { who: 0, place: [1, 0.5] },
  ];
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
  const AGAIN = { strengths: [1, 0, 0, 0, 1, 1, 1], wrote: 0, asked: 0, corrects: 1 };
  const SETTINGS = {
    pair: { strengths: [1], wrote: 0 },
    read: { strengths: [1], asked: 0 },
    second: { strengths: [1, 1], wrote: 1, asked: 1 },
    overlap: { strengths: [1, 1], angle: 90, asked: 0, overlaps: [[1, 0]] },
    moved: { strengths: [1, 1, 1], wrote: 2, asked: 0, was: true },
    delta: { strengths: [1, 1, 1], corrects: 1, wrote: 2, asked: 0, was: true },
    strength: { strengths: [1, 1, 0.8], corrects: 1, wrote: 2, asked: 0, was: true },
    third: {
      strengths: [1, 1, 1, 1],
      corrects: 1,
      wrote: 3,
      asked: 2,
      overlaps: [
        [2, 0],
        [2, 1],
      ],
      was: true,
    },
    long: { ...AGAIN, length: 1.5, range: 3.25, again: true },
    unit: { ...AGAIN, again: true },
    chunk: { strengths: [1, 1, 1], corrects: 1, chunk: true },
  };
  const NAMES = Object.keys(SETTINGS);
  const settings = NAMES.map((name) => {
    const strengths = FACTS.map((_, i) => SETTINGS[name].strengths[i] ?? 0);
    return { ...START, ...SETTINGS[name], strengths };
  });

  // --- The arithmetic --------------------------------------------------------
  const compute = (setting) => {
    const { strengths, angle, length, corrects } = setting;
    const keys = [NORA, angle, PIA].map(fwlab.towards);
    keys[0] = keys[0].map((x) => length * x);
    let W = [
      [0, 0],
      [0, 0],
    ];
    const writes = FACTS.map(({ who, place }, i) => {
      const k = keys[who];
      const held = read(W, k);
      const u = place.map((x, row) => strengths[i] * (x - corrects * held[row]));
      const before = W;
      W = W.map((row, n) => row.map((w, m) => w + u[n] * k[m]));
      return { u, before, after: W };
    });
    return { keys, W, writes };
  };
  // All writes of the delta rule at once: (I + A) U = V, then W = U' K.
  const solve = ({ keys }) => {
    const facts = FACTS.slice(0, 3);
    const K = facts.map(({ who }) => keys[who]);
    const A = K.map((a, i) => K.map((b, j) => (j < i ? dot(a, b) : 0)));
    const V = facts.map(({ place }) => place);
    const U = [];
    V.forEach((v, i) => {
      const held = (n) => U.reduce((all, u, j) => all + A[i][j] * u[n], 0);
      U.push(v.map((x, n) => x - held(n)));
    });
    const sum = (n, m) => U.reduce((all, u, i) => all + u[n] * K[i][m], 0);
    const W = [0, 1].map((n) => [0, 1].map((m) => sum(n, m)));
    return { A, U, V, W };
  };

  // --- The picture -----------------------------------------------------------
  const CENTRE = [82, 100];
  const RADIUS = 54;
  const BOX = { x: 206, y: 24, size: 150 };
  const WRITTEN = "var(--fw-other)";
  const PAPER = "var(--md-default-bg-color)";
  const bare = (x) => fwlab.number(x).replace(/\.?0+$/, "");
  const pair = (v) => v.map(bare).join(", ");
  const controls = fwlab.controls();
  figure.root.append(controls);
  const picture = figure.picture(
    360,
    296,
    "Keys on a circle, values in a plane, and the memory as numbers",
  );
  const plane = group();
  const system = group();
  picture.append(plane, system);

  const [circle, keyAt] = fwlab.plane.ring(CENTRE, RADIUS);
  const values = fwlab.plane.values(BOX);
  const { at } = values;
  const corner = path({ "stroke-opacity": 0.6, "data-part": "right angle" });
  plane.append(
    text(0, 16, "Keys: who", BOLD),
    ...circle,
    corner,
    text(BOX.x, 16, "Values: where", BOLD),
    ...values.elements,
  );
  // The product of two keys of length 1: how far one reaches along the other.
  const overlaps = [0, 1].map(() => {
    const drop = path({ stroke: WRONG, "stroke-dasharray": "3 2" });
    const along = path({ stroke: WRONG, "stroke-width": 8, "stroke-opacity": 0.6 });
    const label = small(0, 0, "", { ...BOLD, ...CENTRED, ...MIDDLE });
    label.style.fill = WRONG;
    const all = group({ "data-part": "overlap" });
    all.append(along, drop, label);
    plane.append(all);
    return { all, drop, along, label };
  });
  const keys = PEOPLE.map((name, j) => {
    const arrow = path({});
    const tip = group({ "data-key": name });
    tip.append(
      path({ d: SHAPES[j](10), fill: PAPER, "stroke-width": 1.5 }),
      text(0, 0.5, name[0], { class: "fw-cell-text", "font-weight": 600 }),
    );
    plane.append(arrow, tip);
    return { arrow, tip };
  });
  const bounce = path({ stroke: WRONG, "stroke-width": 1.5 });
  plane.append(bounce);
  const marks = PEOPLE.map((name, j) => {
    const mark = fwlab.plane.mark(name, j);
    mark.label.textContent = name[0];
    plane.append(mark.all);
    return mark;
  });
  const written = path({ stroke: WRITTEN, "stroke-width": 2 });
  const turns = [1, 2, 3, 4].map((number) => {
    const dot = path({ d: SHAPES[0](4), fill: FAST, stroke: FAST });
    const label = small(0, -12, String(number), { ...CENTRED, ...MIDDLE });
    const all = group();
    all.append(dot, label);
    plane.append(all);
    return all;
  });
  plane.append(written);

  // All writes at once.
  const block = (rows, columns, x, title) => {
    const matrix = fwlab.matrix(rows, columns, { x, y: 42, cell: 40, limit: 1.5, show: bare });
    const width = 40 * columns;
    system.append(
      text(x + width / 2, 32, title, { ...BOLD, ...CENTRED }),
      matrix.element,
    );
    return matrix;
  };
  const blocks = {
    A: block(3, 3, 28, "I + A"),
    U: block(3, 2, 168, "U, written"),
    V: block(3, 2, 268, "V, places"),
  };
  system.append(
    text(158, 102, "·", { ...CENTRED, ...MIDDLE }),
    text(258, 102, "=", { ...CENTRED, ...MIDDLE }),
    ...FACTS.slice(0, 3).flatMap(({ who }, i) => {
      const y = 62 + 40 * i;
      const mark = path({ d: SHAPES[who](9), transform: `translate(13 ${y})` });
      return [mark, text(13, y + 0.5, PEOPLE[who][0], { class: "fw-cell-text", ...BOLD })];
    }),
  );

  // Below: the memory, with a key, what is written and what is read.
  const TOP = 192;
  const strip = { cell: 38, height: 32, limit: 1.5, show: bare };
  const memory = fwlab.matrix(2, 2, { ...strip, x: 46, y: TOP + 26 });
  const vectors = {
    key: fwlab.matrix(1, 2, { ...strip, x: 46, y: TOP, height: 22 }),
    written: fwlab.matrix(2, 1, { ...strip, x: 2, y: TOP + 26 }),
    read: fwlab.matrix(2, 1, { ...strip, x: 128, y: TOP + 26 }),
  };
  const under = (x, name, colour) =>
    small(x, TOP + 101, name, { ...CENTRED, style: `fill: ${colour}` });
  const names = {
    key: small(40, TOP + 11, "key", { ...fwlab.END, ...MIDDLE }),
    written: under(21, "written", WRITTEN),
    read: under(147, "read", FAST),
  };
  picture.append(memory.element, under(84, "memory W", "inherit"));
  for (const part of ["key", "written", "read"]) {
    vectors[part].element.dataset.vector = part;
    picture.append(vectors[part].element, names[part]);
  }
  memory.element.dataset.vector = "memory";
  const END = { ...fwlab.END, ...MIDDLE };
  const first = small(180, TOP + 8, "", MIDDLE);
  const table = group({ "data-part": "table" });
  table.append(
    first,
    small(255, TOP + 8, "is at", END),
    small(342, TOP + 8, "memory says", END),
    path({ d: `M180 ${TOP + 19}h180`, "stroke-opacity": 0.5 }),
  );
  const rows = [0, 1, 2, 3].map((i) => {
    const y = TOP + 34 + 22 * i;
    const cells = [
      small(180, y, "", { ...MIDDLE, ...BOLD }),
      small(255, y, "", END),
      small(342, y, "", END),
      small(354, y, "", { ...CENTRED, ...MIDDLE }),
    ];
    const row = group();
    row.append(...cells);
    table.append(row);
    return { row, cells };
  });
  picture.append(table);

  // --- Showing ---------------------------------------------------------------
  const between = (a, b, share) => a + share * (b - a);
  const near = (a, b) => distance(a, b) < 0.005;
  let shown;
  const draw = (setting) => {
    const { strengths, chunk, again } = setting;
    const found = compute(setting);
    const solved = solve(found);
    if (chunk) found.W = solved.W;
    const { W, writes } = found;
    values.rescale(setting.range);
    show(plane, !chunk);
    show(system, Boolean(chunk));

    // Who is where now: the last fact of each that has been written.
    const people = PEOPLE.map((name, who) => {
      const last = FACTS.findLastIndex((fact, i) => fact.who === who && strengths[i] > 0);
      if (last < 0) return null;
      const key = found.keys[who];
      const place = FACTS[last].place;
      const readback = read(W, key);
      const before = setting.was ? read(writes[setting.wrote].before, key) : null;
      return { name, who, key, place, readback, before, error: distance(readback, place) };
    });
    const there = people.filter(Boolean);
    const silent = setting.asked === undefined && !chunk; // nobody has asked yet

    // Keys.
    people.forEach((one, who) => {
      const { arrow, tip } = keys[who];
      show(arrow, one);
      show(tip, one);
      if (!one) return;
      line(arrow, CENTRE, keyAt(one.key));
      const used = who === (FACTS[setting.wrote]?.who ?? setting.asked);
      arrow.setAttribute("stroke-width", used ? 3 : 1.5);
      put(tip, keyAt(one.key));
    });
    const [a, b] = found.keys;
    const square = people[1] && Math.abs(dot(a, b)) < 1e-9;
    show(corner, square);
    if (square) {
      const [p, q, r] = [a, a.map((x, i) => x + b[i]), b].map((k) => keyAt(k, 9));
      corner.setAttribute("d", `M${[p, q, r].map((x) => x.map(round)).join("L")}`);
    }
    overlaps.forEach(({ all, drop, along, label }, i) => {
      const [from, onto] = (setting.overlaps[i] ?? []).map((who) => found.keys[who]);
      show(all, from);
      if (!from) return;
      const product = dot(from, onto);
      const foot = onto.map((x) => product * x);
      line(along, CENTRE, keyAt(foot));
      line(drop, keyAt(from), keyAt(foot));
      label.textContent = bare(product);
      // Beside the foot, on the side away from the other key.
      const away = foot.map((x, n) => x - 0.28 * (from[n] - foot[n]) / distance(from, foot));
      put(label, keyAt(away));
    });

    // Values.
    show(written, false);
    PEOPLE.forEach((_, who) => {
      const { all, target, error, found: dot, ghost, trail, label } = marks[who];
      const one = people[who];
      show(all, one);
      if (!one) return;
      const [place, readback] = [at(one.place), at(one.readback)];
      put(target, place);
      put(dot, readback);
      line(error, place, readback);
      const moved = one.before && !near(one.before, one.readback);
      const wrote = who === FACTS[setting.wrote]?.who;
      show(ghost, moved);
      show(trail, moved && !wrote);
      if (moved) {
        put(ghost, at(one.before));
        line(trail, at(one.before), readback);
        if (wrote) arrowTo(written, at(one.before), readback);
      }
      show(dot, !silent && !again);
      show(error, !silent && !again && !near(one.place, one.readback));
      // Beside the mark, or above it where a line passes.
      const others = there.flatMap(({ place, readback, before }) => [
        readback,
        before ?? readback,
        place.map((x, n) => between(x, readback[n], 0.4)),
      ]);
      fwlab.plane.letter(label, [place[0], place[1] - 8], others.map(at));
      if (again) put(label, [-17, -10]);
      else label.removeAttribute("transform");
    });
    // Nora's place, written again and again.
    const written4 = [0, 4, 5, 6].map((i) => read(writes[i].after, found.keys[0]));
    const spread = again && distance(written4[0], written4[1]) > 0.05;
    turns.forEach((turn, i) => {
      show(turn, again);
      put(turn, at(written4[i]));
      show(turn.lastChild, spread);
    });
    show(bounce, again);
    bounce.setAttribute("d", `M${written4.map((v) => at(v).map(round)).join("L")}`);

    // Numbers.
    memory.update(W);
    const fact = FACTS[setting.wrote];
    const key = found.keys[fact?.who ?? setting.asked ?? 0];
    const parts = {
      key: !chunk && [key],
      written: fact && !again && writes[setting.wrote].u.map((x) => [x]),
      read: !silent && !chunk && read(W, key).map((x) => [x]),
    };
    for (const [part, numbers] of Object.entries(parts)) {
      show(vectors[part].element, numbers);
      show(names[part], numbers);
      if (numbers) vectors[part].update(numbers);
    }
    if (chunk) {
      const { A, U, V } = solved;
      blocks.A.update(A.map((row, i) => row.map((x, j) => (i === j ? 1 : x))));
      blocks.A.element.querySelectorAll("text").forEach((cell, n) => {
        if (n % 3 > Math.floor(n / 3)) cell.textContent = "";
      });
      blocks.U.update(U);
      blocks.V.update(V);
    }
    const lines = again
      ? written4.map((v, i) => [String(i + 1), people[0].place, v])
      : there.map(({ name, place, readback }) => [name, place, readback]);
    first.textContent = again ? "write" : "";
    rows.forEach(({ row, cells }, i) => {
      show(row, lines[i]);
      if (!lines[i]) return;
      const [name, place, says] = lines[i];
      const right = near(place, says);
      const texts = [name, pair(place), silent ? "?" : pair(says)];
      texts.push(silent ? "" : right ? "✓" : "✗");
      cells.forEach((cell, n) => (cell.textContent = texts[n]));
      for (const cell of cells.slice(2)) cell.style.fill = silent || right ? "" : WRONG;
    });
    shown = { W, people: there, writes, solved, key, again: written4 };
  };
  const arrowTo = (element, from, to) => {
    const long = distance(from, to);
    show(element, long > 8);
    const [x, y] = [(to[0] - from[0]) / long, (to[1] - from[1]) / long];
    const tip = [to[0] - 7 * x, to[1] - 7 * y];
    const side = (s) => [tip[0] - 7 * x + 4 * s * y, tip[1] - 7 * y - 4 * s * x].map(round);
    const points = [tip.map(round), side(1), side(-1)];
    element.setAttribute(
      "d",
      `M${from.map(round)}L${tip.map(round)}M${side(1)}L${points[0]}L${side(-1)}`,
    );
  };

  // --- Words -----------------------------------------------------------------
  const vector = (v) => `(${v.map(bare).join(",\u00a0")})`;
  const rule = ({ corrects, strengths, chunk, again }) => {
    if (!corrects) return "Sum rule";
    const beta = !again && strengths.find((s) => s > 0 && s < 1);
    return `Delta rule, β = ${bare(beta || 1)}${chunk ? ", all at once" : ""}`;
  };
  const sentence = (setting) => {
    const { W, people, again, solved } = shown;
    const parts = [];
    if (setting.again) {
      parts.push(
        `Nora is at ${vector(people[0].place)}, her key is ${vector(shown.key)}. ` +
          `After each of four writes it reads ${again.map(vector).join(", ")}`,
      );
    } else if (setting.chunk) {
      parts.push(`What the three writes add: ${solved.U.map(vector).join(", ")}`);
    } else {
      const fact = FACTS[setting.wrote];
      if (fact) {
        const { u } = shown.writes[setting.wrote];
        parts.push(`Written under ${PEOPLE[fact.who]}'s key ${vector(shown.key)}: ${vector(u)}`);
      }
    }
    if (!setting.again && (setting.asked !== undefined || setting.chunk))
      for (const { name, place, readback, error } of people)
        parts.push(
          `${name} is at ${vector(place)}; the memory says ${vector(readback)}` +
            (near(place, readback) ? ", right" : `, off by ${bare(error)}`),
        );
    parts.push(`Memory: first row ${pair(W[0])}; second row ${pair(W[1])}`);
    return `${rule(setting)}. ${parts.join(". ")}.`;
  };

  // --- From section to section -------------------------------------------------
  let step = -1;
  let numbers; // as drawn now, somewhere between two settings
  let frame = null;
  const mixed = (from, to, share) => {
    const mix = { ...to };
    for (const name of ["angle", "length", "corrects", "range"])
      mix[name] = between(from[name], to[name], share);
    mix.strengths = to.strengths.map((s, i) => between(from.strengths[i], s, share));
    return mix;
  };
  const go = (next, jump) => {
    if (next === step) return;
    step = next;
    cancelAnimationFrame(frame);
    frame = null;
    const to = settings[step];
    const from = numbers;
    caption.textContent = rule(to);
    count.textContent = `${step + 1} of ${settings.length}`;
    previous.disabled = step === 0;
    following.disabled = step === settings.length - 1;
    if (jump || fwlab.motion.matches || to.chunk || from.chunk) {
      numbers = to;
      draw(to);
      tell();
      return;
    }
    const begun = performance.now();
    const advance = (now) => {
      const time = fwlab.motion.matches ? 1 : Math.min(1, Math.max(0, (now - begun) / 700));
      numbers = time < 1 ? mixed(from, to, time * time * (3 - 2 * time)) : to;
      draw(numbers);
      frame = time < 1 ? requestAnimationFrame(advance) : null;
      if (time === 1) tell();
    };
    frame = requestAnimationFrame(advance);
  };
  // Words once the picture is as they say.
  const tell = () => figure.say(sentence(settings[step]));

  const sections = NAMES.map((name) => document.querySelector(`[data-step="${name}"]`));
  let goal = null; // the step that the page scrolls to, so that presses add up
  const turn = (by) => () => {
    goal = Math.max(0, Math.min((goal ?? step) + by, sections.length - 1));
    sections[goal].scrollIntoView({ behavior: fwlab.motion.matches ? "instant" : "smooth" });
  };
  const caption = fwlab.html("strong", {});
  const count = fwlab.html("span", {});
  const [previous, following] = [
    ["‹", "Previous step", -1],
    ["›", "Next step", 1],
  ].map(([sign, label, by]) => {
    const button = fwlab.button(sign, turn(by));
    button.setAttribute("aria-label", label);
    return button;
  });
  controls.append(caption, count, previous, following);

  // The section that is read: the last one that begins above a line in the
  // window, below the picture where that is above the text.
  const follow = () => {
    const box = figure.root.parentElement.getBoundingClientRect();
    const above = box.left < sections[0].getBoundingClientRect().right;
    const top = above ? Math.min(box.bottom, innerHeight) : 0;
    const reading = top + 0.4 * (innerHeight - top);
    const begun = sections.findLastIndex((one) => one.getBoundingClientRect().top <= reading);
    go(Math.max(0, begun));
    sections.forEach((one, i) => one.classList.toggle("fw-current", i === step));
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
    goal = null;
  });
  /** @param {any} event */
  const leave = ({ target, key }) => {
    const pressed = controls.contains(target) && [" ", "Enter"].includes(key);
    if (!pressed) goal = null;
  };
  for (const name of ["wheel", "touchmove", "keydown"])
    addEventListener(name, leave, { passive: true });
  numbers = settings[0];
  go(0, true);
  later();

  return {
    steps: NAMES,
    // Without what another step shows.
    still: () => {
      const stage = figure.root.cloneNode(true);
      const away = '.fw-controls, [style*="display: none"]';
      for (const element of stage.querySelectorAll(away)) element.remove();
      return stage.innerHTML;
    },
    // Without a move, for the pictures that are kept.
    jump: (name) => go(NAMES.indexOf(name), true),
    state: () => ({
      step: NAMES[step],
      moving: frame !== null,
      goal,
      rule: rule(settings[step]),
      ...shown,
    }),
  };
});
