// @ts-check
// How many pairs fit: what three memories with untrained keys lose, pair by
// pair, beside the law that no memory of their size can beat.
// @ts-expect-error: medians of docs/reproduce, by docs/hooks/frames.py
import TRAINED from "fwlab-capacity";
import * as fwlab from "./fwlab.js";
import { group, round, MIDDLE, CENTRED, END } from "./fwlab.js";

fwlab.figure("capacity", (figure) => {
  const MOST = 128; // pairs
  const TOP = 1.2; // of the plot; a loss of 1/2 is that of returning nothing
  const KEYS = { orthogonal: "as orthogonal as possible", random: "random" };

  let width = 16;
  let count = 24; // pairs, S: more than the width, and less than DPFP has features
  let nu = 1;
  let kind = "orthogonal";
  let draw = 1;

  // --- The memories --------------------------------------------------------
  const law = (S, features) => Math.max(0, (1 - features / S) / 2);

  // As many orthonormal vectors as there are dimensions (Gram and Schmidt).
  const orthonormal = (normal) => {
    const basis = [];
    while (basis.length < width) {
      let key = fwlab.direction(normal, width);
      for (const other of basis) {
        const overlap = fwlab.dot(key, other);
        key = key.map((x, i) => x - overlap * other[i]);
      }
      basis.push(fwlab.unit(key));
    }
    return basis;
  };
  // The key with which only feature n of DPFP fires: two entries of [k; -k]
  // are positive, at the distance of that feature.
  const firing = (n) => {
    const key = Array(width).fill(0);
    const first = n % (2 * width);
    const distance = Math.floor(n / (2 * width)) + 1;
    for (const i of [first, (first + distance) % (2 * width)])
      key[i % width] = i < width ? 1 : -1;
    return fwlab.unit(key);
  };
  const all = (make) => Array.from({ length: MOST }, (_, n) => make(n));

  // Features of length 1, of all keys.
  const memories = () => {
    const normal = fwlab.random(`capacity ${draw}`);
    const room = 2 * nu * width;
    let keys;
    let forDpfp;
    if (kind === "random") keys = forDpfp = all(() => fwlab.direction(normal, width));
    else {
      const basis = orthonormal(normal);
      keys = all((n) => basis[n % width]);
      forDpfp = all((n) => firing(n % room));
    }
    const features = forDpfp.map((key) => fwlab.unit(fwlab.dpfp(key, nu)));
    const dpfp = { keys: forDpfp, features, room };
    return {
      sum: { keys, features: keys, room: width, rule: "sum" },
      delta: { keys, features: keys, room: width, rule: "delta" },
      dpfp: { ...dpfp, rule: "delta" },
    };
  };

  // Write the pairs one by one. The values are one-hot, so entry j of what
  // key i reads is the share of value j in it. A write adds, to what key i
  // reads, what is new times the overlap of the two keys: Eq. 17, or Eq. 24
  // with a strength of 1. Returns, after each pair, the mean loss over all
  // keys so far, and how many of them read their own value most of all.
  const run = ({ features, rule }) => {
    const { corrects } = fwlab.rules[rule](1);
    const reads = features.map(() => new Float64Array(MOST));
    return features.map((phi, t) => {
      const news = reads[t].map((held) => (corrects ? -held : 0));
      news[t] += 1;
      let loss = 0;
      let right = 0;
      reads.forEach((read, i) => {
        const overlap = fwlab.dot(phi, features[i]);
        for (let j = 0; j <= t; j++) read[j] += overlap * news[j];
        if (i > t) return;
        let best = -Infinity; // of the other values
        for (let j = 0; j <= t; j++) {
          loss += (read[j] - (i === j ? 1 : 0)) ** 2 / 2;
          if (j !== i) best = Math.max(best, read[j]);
        }
        if (read[i] > best + 1e-9) right += 1;
      });
      return { loss: loss / (t + 1), right };
    });
  };

  // --- The picture ---------------------------------------------------------
  const WIDTH = 388;
  const PLOT = { left: 30, right: 384, top: 8, bottom: 216 };
  const TABLE = 294;
  const ROW = 21;
  const picture = figure.picture(
    WIDTH,
    TABLE + 3 * ROW + 12,
    "Loss of three memories against the number of pairs, and the law",
  );
  const path = (attributes) => fwlab.path({ "stroke-width": 2, ...attributes });
  const small = (x, y, content, attributes = {}) =>
    fwlab.small(x, y, content, { ...MIDDLE, ...attributes });
  const across = fwlab.scale([0, MOST], [PLOT.left, PLOT.right]);
  const upwards = fwlab.scale([0, TOP], [PLOT.bottom, PLOT.top]);
  const place = (S, loss) => `${round(across(S))} ${round(upwards(loss))}`;

  const LOOKS = {
    sum: { stroke: "var(--fw-other)", "stroke-dasharray": "2 2" },
    delta: { stroke: "var(--fw-fast)" },
    dpfp: { stroke: "var(--fw-features)", "stroke-dasharray": "8 3" },
  };
  const LAW = { "stroke-width": 1.5, "stroke-dasharray": "1 3", "stroke-linecap": "round" };
  const MARKS = {
    linear: "m-4 0a4 4 0 1 0 8 0a4 4 0 1 0 -8 0",
    dpfp: "m-5 0l5-5 5 5-5 5z",
  };
  const mark = (name, d, attributes = {}) =>
    path({ "data-trained": name, stroke: "var(--fw-trained)", d, ...attributes });

  picture.append(
    ...[0, 0.5, 1].flatMap((loss) => [
      path({
        d: `M${PLOT.left} ${upwards(loss)}H${PLOT.right}`,
        "stroke-width": 1,
        "stroke-opacity": loss ? 0.2 : 0.6,
      }),
      small(PLOT.left - 5, upwards(loss), String(loss).replace("0.5", "½"), END),
    ]),
    small(PLOT.right, upwards(0.5) - 9, "½: returns nothing", END),
    small(PLOT.left + 4, upwards(TOP) + 6, "loss"),
    ...[0, 32, 64, 96, 128].map((S) =>
      small(across(S), PLOT.bottom + 12, S, S === 128 ? END : CENTRED),
    ),
    small(across(80), PLOT.bottom + 12, "pairs S", CENTRED),
  );
  const marker = path({ "stroke-width": 1, "data-part": "marker" });
  // The law of each number of features: plain keys, and DPFP in its colour.
  const LAWS = { plain: LAW, dpfp: { ...LAW, stroke: LOOKS.dpfp.stroke } };
  const laws = {
    plain: path({ ...LAWS.plain, "data-law": "plain" }),
    dpfp: path({ ...LAWS.dpfp, "data-law": "dpfp" }),
  };
  const trained = { linear: mark("linear", ""), dpfp: mark("dpfp", "") };
  picture.append(marker, ...Object.values(laws));
  const curves = Object.entries(LOOKS).map(([name, look]) => {
    const curve = path({ ...look, "data-curve": name });
    const dot = fwlab.circle({ r: 4, fill: look.stroke, stroke: "none", "data-dot": name });
    picture.append(curve, dot);
    return { name, curve, dot };
  });
  picture.append(...Object.values(trained));

  // What the dotted lines and the marks are, then a row for each memory.
  const [legendLaw, legend] = [TABLE - 46, TABLE - 28];
  const legendTrained = group();
  legendTrained.append(
    mark("", `M13 ${legend}${MARKS.linear}`),
    small(32, legend, "trained keys, ELU + 1"),
    mark("", `M229 ${legend}${MARKS.dpfp}`),
  );
  const legendDpfp = small(248, legend, "");
  legendTrained.append(legendDpfp);
  const legendNone = small(32, legend, "trained keys: only at widths 16 and 64");
  const legendLaws = { plain: small(32, legendLaw, ""), dpfp: small(248, legendLaw, "") };
  picture.append(
    path({ ...LAWS.plain, d: `M0 ${legendLaw}h26` }),
    path({ ...LAWS.dpfp, d: `M216 ${legendLaw}h26` }),
    ...Object.values(legendLaws),
    legendTrained,
    legendNone,
  );
  const table = group({ role: "img", "data-part": "table" });
  const COLUMNS = [32, 206, 262, 318, WIDTH - 2];
  ["", "features", "loss", "law", "right"].forEach((head, i) =>
    table.append(small(COLUMNS[i], TABLE, head, i ? END : {})),
  );
  const rows = Object.entries(LOOKS).map(([name, look], n) => {
    const y = TABLE + ROW * (n + 1);
    const cells = COLUMNS.map((x, i) => small(x, y, "", i ? END : {}));
    table.append(path({ ...look, d: `M0 ${y}h26` }), ...cells);
    return { name, cells };
  });
  picture.append(table);

  // --- Showing -------------------------------------------------------------
  const titles = () => ({
    sum: "sum rule",
    delta: "delta rule",
    dpfp: `delta rule, DPFP-${nu}`,
  });
  const trainedHere = () => {
    const found = TRAINED[width] ?? {};
    return { linear: found.linear ?? [], dpfp: found[`dpfp-${nu}`] ?? [] };
  };
  let shown; // by memory: its features and what it loses after each pair
  const compute = () => {
    shown = memories();
    for (const memory of Object.values(shown)) memory.steps = run(memory);
  };

  const drawCurves = () => {
    for (const { name, curve } of curves) {
      let d = "";
      let inside = false;
      shown[name].steps.forEach(({ loss }, t) => {
        const drawn = loss <= TOP;
        if (drawn) d += `${inside ? "L" : "M"}${place(t + 1, loss)}`;
        inside = drawn;
      });
      curve.setAttribute("d", d);
    }
    const drawLaw = (room) => {
      const from = Math.min(room, MOST);
      const sizes = Array.from({ length: MOST - from + 1 }, (_, n) => from + n);
      return `M${place(0, 0)}L${sizes.map((S) => place(S, law(S, room))).join("L")}`;
    };
    laws.plain.setAttribute("d", drawLaw(width));
    laws.dpfp.setAttribute("d", drawLaw(shown.dpfp.room));
    const points = trainedHere();
    for (const name of Object.keys(trained))
      trained[name].setAttribute(
        "d",
        points[name].map(([S, loss]) => `M${place(S, loss)}${MARKS[name]}`).join(""),
      );
    const any = points.linear.length > 0;
    legendTrained.style.display = any ? "" : "none";
    legendNone.style.display = any ? "none" : "";
    legendDpfp.textContent = `trained keys, DPFP-${nu}`;
    legendLaws.plain.textContent = `law: the least for ${width} features`;
    legendLaws.dpfp.textContent = `law for ${shown.dpfp.room} features`;
  };

  const sentence = () => {
    const at = (name) => shown[name].steps[count - 1];
    const names = { ...titles(), dpfp: `delta rule with DPFP-${nu}` };
    const one = (name) => `${names[name]} ${fwlab.number(at(name).loss)}`;
    const [plain, dpfp] = [width, shown.dpfp.room];
    const floor = (room) => fwlab.number(law(count, room));
    const pairs = count === 1 ? "1 pair" : `${count} pairs`;
    const limit =
      `No memory with ${plain} features can have a loss below ${floor(plain)}, ` +
      `and none with ${dpfp} below ${floor(dpfp)}.`;
    const how =
      kind === "random"
        ? "random"
        : "orthogonal until all features are used, then repeated";
    const nothing = Object.keys(LOOKS).filter((name) => at(name).loss > 0.5);
    const worse = nothing.length
      ? ` Worse than returning nothing (0.50): ${nothing.map((name) => names[name]).join(", ")}.`
      : "";
    return (
      `${pairs}; keys of width ${width}, ${how}. Loss: ${one("sum")}, ${one("delta")}, ` +
      `${one("dpfp")}. ${limit}${worse}`
    );
  };

  const update = () => {
    marker.setAttribute("d", `M${round(across(count))} ${PLOT.top}V${PLOT.bottom}`);
    for (const { name, dot } of curves) {
      const { loss } = shown[name].steps[count - 1];
      dot.setAttribute("cx", round(across(count)));
      dot.setAttribute("cy", round(upwards(Math.min(loss, TOP))));
    }
    const names = titles();
    const lines = rows.map(({ name, cells }) => {
      const { loss, right } = shown[name].steps[count - 1];
      const { room } = shown[name];
      const texts = [
        names[name],
        room,
        fwlab.number(loss),
        fwlab.number(law(count, room)),
        `${right} of ${count}`,
      ];
      cells.forEach((cell, i) => (cell.textContent = texts[i]));
      return (
        `${names[name]}, ${room} features: loss ${texts[2]}, law ${texts[3]}, ` +
        `${texts[4]} right`
      );
    });
    table.setAttribute("aria-label", lines.join(". "));
    figure.say(sentence());
  };
  const change = () => {
    compute();
    drawCurves();
    update();
  };

  const widths = fwlab.slider(
    "Width of a key",
    { min: 4, max: 64, step: 4, value: width },
    (value) => {
      width = value;
      change();
    },
  );
  const counts = fwlab.slider(
    "Pairs S",
    { min: 1, max: MOST, step: 1, value: count },
    (value) => {
      count = value;
      update();
    },
  );
  const kinds = fwlab.choice("Keys", KEYS, kind, (value) => {
    kind = value;
    change();
  });
  const shifts = fwlab.choice(
    "DPFP",
    { 1: "ν = 1", 2: "ν = 2", 3: "ν = 3" },
    nu,
    (value) => {
      nu = Number(value);
      change();
    },
  );
  const again = fwlab.button("New draw", () => {
    draw += 1;
    change();
  });
  figure.beside(
    fwlab.controls(counts),
    fwlab.controls(widths),
    fwlab.controls(kinds),
    fwlab.controls(shifts, again),
  );
  change();

  return {
    state: () => ({
      width,
      count,
      nu,
      kind,
      draw,
      trained: trainedHere(),
      memories: Object.fromEntries(
        Object.entries(shown).map(([name, memory]) => [
          name,
          {
            room: memory.room,
            keys: memory.keys,
            losses: memory.steps.map(({ loss }) => loss),
            right: memory.steps.map(({ right }) => right),
            law: memory.steps.map((_, t) => law(t + 1, memory.room)),
          },
        ]),
      ),
    }),
  };
});
