// @ts-check
// DPFP of two keys of width 2: which products fire, in which quadrant, and
// how much two keys still overlap afterwards.
import * as fwlab from "./fwlab.js";
import {
  text, small, path, box, group, tint, BOLD, END, CENTRED, MIDDLE,
} from "./fwlab.js";

fwlab.figure("dpfp", (figure) => {
  const LIMIT = 2;
  const ENTRIES = ["x", "y", "−x", "−y"];
  const NAMES = ["k", "k′"];
  const COLOURS = ["var(--fw-features)", "var(--fw-other)"];
  // In the order of ENTRIES: shift 1 begins there, entry i with entry i + 1.
  const QUADRANTS = [
    [1, 1],
    [-1, 1],
    [-1, -1],
    [1, -1],
  ];

  let nu = 1;
  let coloured = "after"; // by the overlap before or after DPFP
  const keys = [
    [0.6, 1.2],
    [-0.4, 1.4],
  ];

  // Of 5°, so that none lies on two sides of an axis.
  const SLICE = Math.PI / 36;
  const SLICES = Array.from({ length: 72 }, (_, n) => ({
    from: n * SLICE,
    middle: (n + 0.5) * SLICE,
    to: (n + 1) * SLICE,
  }));

  // 0/0 is 0: an empty vector is at right angles to everything.
  const divide = (a, b) => (b === 0 ? 0 : a / b);
  const cosine = (a, b) => fwlab.dot(fwlab.unit(a), fwlab.unit(b));
  const rectify = (key) => [...key, ...key.map((x) => -x)].map((x) => (x > 0 ? x : 0));
  const compute = () => {
    const r = keys.map(rectify);
    const features = keys.map((key) => fwlab.dpfp(key, nu));
    const normalised = features.map((phi) => {
      const sum = phi.reduce((a, b) => a + b, 0);
      return phi.map((x) => divide(x, sum));
    });
    // A cosine depends on the direction alone: one for each slice of the plane.
    const directions = SLICES.map(({ middle }) => [Math.cos(middle), Math.sin(middle)]);
    const overlaps = {
      before: directions.map((key) => cosine(key, keys[0])),
      after: directions.map((key) => cosine(fwlab.dpfp(key, nu), features[0])),
    };
    return {
      nu,
      coloured,
      overlaps,
      keys: keys.map((key) => [...key]),
      r,
      features,
      normalised,
      fires: features.map((phi) => phi.flatMap((x, n) => (x > 0 ? [n] : []))),
      dot: fwlab.dot(...features),
      cosine: cosine(...features),
      normalisedDot: fwlab.dot(...normalised),
      plainDot: fwlab.dot(...keys),
      plainCosine: cosine(...keys),
    };
  };

  // --- The picture ---------------------------------------------------------
  const WIDTH = 388;
  const SCALE = 45;
  const CENTRE = [104, 120];
  const FEATURES = 30;
  const BLOCK = 92;
  const CELL = { x: 26, width: 90, height: 24 };

  /** @param {number[]} value */
  const at = ([x, y]) => [
    Math.round(CENTRE[0] + SCALE * x),
    Math.round(CENTRE[1] - SCALE * y),
  ];
  const product = (n) => {
    const shift = Math.floor(n / 4) + 1;
    return [ENTRIES[n % 4], ENTRIES[((n % 4) + shift) % 4]];
  };
  const named = (n) => product(n).join(" · ");
  const spoken = (n) =>
    product(n)
      .map((name) => `r(${name})`)
      .join(" ");

  const choice = fwlab.choice(
    "Shifts",
    { 1: "ν = 1", 2: "ν = 2", 3: "ν = 3" },
    nu,
    (value) => {
      nu = Number(value);
      update();
    },
  );
  const colour = fwlab.choice(
    "Colour",
    { before: "before DPFP", after: "after DPFP" },
    coloured,
    (value) => {
      coloured = value;
      update();
    },
  );
  const picture = figure.picture(WIDTH, 244, "Two keys in a plane, and their overlap");
  const features = fwlab.picture(
    WIDTH,
    FEATURES + BLOCK,
    "The features of DPFP that fire for each key",
  );
  figure.beside(fwlab.controls(colour), fwlab.controls(choice), features);

  // The plane, from its centre to the edge. A quadrant is the region of one
  // product.
  const [left, top] = at([-LIMIT, LIMIT]);
  const side = LIMIT * SCALE;
  const slices = SLICES.map(({ from, to }) => {
    const edge = [from, to].map((angle) => {
      const [x, y] = [Math.cos(angle), Math.sin(angle)];
      const far = LIMIT / Math.max(Math.abs(x), Math.abs(y));
      return `L${at([far * x, far * y]).join(" ")}`;
    });
    // Between two slices, no line.
    const attributes = { stroke: "none", "shape-rendering": "crispEdges" };
    return path({ d: `M${CENTRE.join(" ")}${edge.join("")}Z`, ...attributes });
  });
  const plane = group({ "data-part": "plane" });
  plane.append(...slices);
  picture.append(plane);
  const quadrants = QUADRANTS.map(([x, y], n) => {
    const label = small(
      CENTRE[0] + x * (side - 6),
      CENTRE[1] - y * (side - 10),
      named(n),
      { ...MIDDLE, "text-anchor": x > 0 ? "end" : "start", "data-quadrant": named(n) },
    );
    picture.append(label);
    return label;
  });
  const shade = (overlap) => fwlab.signed(0.45 * overlap); // letters lie on it
  const scale = small(left, 236, "");
  picture.append(scale, small(214, 236, "−1"), small(388, 236, "1", END));
  for (let n = 0; n < 14; n++) {
    const cell = box(238 + 10 * n, 226, 10, 12, { "shape-rendering": "crispEdges" });
    cell.style.fill = shade((n - 6.5) / 6.5);
    picture.append(cell);
  }
  picture.append(
    text(0, 14, "Keys: drag them", BOLD),
    box(left, top, 2 * side, 2 * side, { class: "fw-cell" }),
    path({
      d: `M${left} ${CENTRE[1]}h${2 * side}M${CENTRE[0]} ${top}v${2 * side}`,
      "stroke-opacity": 0.7,
    }),
    small(left + 4, CENTRE[1] + 14, "−2"),
    small(left + 2 * side - 4, CENTRE[1] + 14, "2", END),
    small(left + 2 * side + 5, CENTRE[1], "x", MIDDLE),
    small(CENTRE[0], top - 4, "y", CENTRED),
  );
  const arrows = NAMES.map((_, j) =>
    path({
      stroke: COLOURS[j],
      "stroke-width": 2,
      "stroke-dasharray": j ? "5 3" : false,
    }),
  );
  picture.append(...arrows);
  // Adding 0 turns −0 into 0.
  const tenths = (x) => Math.round(10 * Math.max(-LIMIT, Math.min(LIMIT, x))) / 10 + 0;
  const handle = (j) => {
    const paint = {
      fill: "var(--md-default-bg-color)",
      stroke: COLOURS[j],
      "stroke-width": 2,
    };
    const element = group({ "data-key": NAMES[j] });
    element.append(
      fwlab.reach(j ? 14.5 : 18),
      j ? box(-10, -10, 20, 20, paint) : fwlab.svg("circle", { r: 14, ...paint }),
      text(0, 0, NAMES[j], { class: "fw-cell-text", ...BOLD }),
    );
    const name = `Key ${NAMES[j]}, ${j ? "the square" : "the circle"}`;
    fwlab.drag(element, name, {
      move: (x, y) => {
        const place = [(x - CENTRE[0]) / SCALE, (CENTRE[1] - y) / SCALE];
        keys[j] = place.map(tenths);
        update();
      },
      nudge: (right, up) => {
        keys[j] = [keys[j][0] + right / 10, keys[j][1] + up / 10].map(tenths);
        update();
      },
    });
    return fwlab.fill(element, { "aria-valuemin": -LIMIT, "aria-valuemax": LIMIT }, []);
  };
  // Where both keys are at one place, the square lies inside the circle, and
  // each can still be taken.
  const handles = [handle(0), handle(1)];
  picture.append(...handles);

  // r of both keys.
  const COLUMNS = [256, 326];
  const UNIT = 17;
  const rectified = group({ role: "img", "data-part": "r" });
  rectified.append(text(214, 14, "r([k; −k])", BOLD));
  NAMES.forEach((name, j) => rectified.append(small(COLUMNS[j], 34, name, BOLD)));
  const bars = ENTRIES.map((entry, i) => {
    const y = 51 + 20 * i;
    rectified.append(small(214, y, `r(${entry})`, MIDDLE));
    return NAMES.map((_, j) => {
      const bar = box(COLUMNS[j], y - 6, 0, 12, { fill: COLOURS[j] });
      const number = small(COLUMNS[j] + 60, y, "", { ...MIDDLE, ...END });
      rectified.append(
        path({ d: `M${COLUMNS[j]} ${y - 8}v16`, "stroke-opacity": 0.7 }),
        bar,
        number,
      );
      return { bar, number };
    });
  });
  const overlap = group({ role: "img", "data-part": "overlap" });
  overlap.append(
    text(214, 150, "Overlap", BOLD),
    small(328, 150, "dot", END),
    small(388, 150, "cosine", END),
    path({ d: "M214 157h174", "stroke-opacity": 0.5 }),
  );
  const overlaps = ["k, k′", "φ(k), φ(k′)", "φ / Σφ"].map((name, n) => {
    const y = 169 + 20 * n;
    const numbers = [328, 388].map((x) => small(x, y, "", { ...MIDDLE, ...END }));
    overlap.append(small(214, y, name, MIDDLE), ...numbers);
    return numbers;
  });
  picture.append(rectified, overlap);

  // Features: a block per shift, a row per key.
  const NOTES = [
    "one product per quadrant",
    "never: r(x) or r(−x) is 0, and r(y) or r(−y)",
    "shift 1 again, its factors swapped",
  ];
  const title = text(0, FEATURES - 16, "", BOLD);
  const legend = small(WIDTH, FEATURES - 16, "feature → divided by the sum", END);
  features.append(title, legend);
  const blocks = NOTES.map((note, s) => {
    const top = FEATURES + BLOCK * s;
    const block = group({ role: "img", "data-shift": s + 1 });
    block.append(small(0, top + 4, `Shift ${s + 1}`, BOLD), small(54, top + 4, note));
    const cells = NAMES.map((name, j) => {
      const y = top + 27 + CELL.height * j;
      block.append(small(4, y + CELL.height / 2, name, { ...MIDDLE, ...BOLD }));
      return ENTRIES.map((_, i) => {
        const x = CELL.x + CELL.width * i;
        const frame = box(x, y, CELL.width, CELL.height, {
          class: "fw-cell",
          "data-feature": 4 * s + i,
          "data-of": name,
        });
        const number = small(x + CELL.width / 2, y + CELL.height / 2, "", {
          ...MIDDLE,
          ...CENTRED,
        });
        block.append(frame, number);
        if (s === 1) {
          frame.style.fill = "var(--md-code-bg-color)";
          frame.setAttribute("stroke-dasharray", "2 2");
        }
        return { frame, number };
      });
    });
    ENTRIES.forEach((_, i) =>
      block.append(
        small(CELL.x + CELL.width * (i + 0.5), top + 21, named(4 * s + i), {
          ...CENTRED,
          "data-name": 4 * s + i,
        }),
      ),
    );
    return { block, cells };
  });

  // --- Words ---------------------------------------------------------------
  /** @param {number[]} value */
  const position = ([x, y]) => {
    if (x === 0 && y === 0) return "is 0";
    if (x === 0 || y === 0) return "lies on an axis";
    return `has x ${x > 0 ? ">" : "<"} 0, y ${y > 0 ? ">" : "<"} 0`;
  };
  const sentence = ({ fires, features, normalised, ...shown }) => {
    const parts = NAMES.map((name, j) => {
      const start = `${name} = ${fwlab.vector(keys[j], 1)} ${position(keys[j])}: `;
      if (!fires[j].length)
        return `${start}no feature fires, and the sum-normalised features are 0.`;
      const first = fires[j][0];
      const value = fwlab.number(features[j][first]);
      const share = fwlab.number(normalised[j][first]);
      const twice = fires[j].length > 1 ? ", twice" : "";
      return `${start}${spoken(first)} = ${value} fires${twice}, ${share} of the sum.`;
    });
    const before = `The keys have cosine ${fwlab.number(shown.plainCosine)}, `;
    const after = `their features ${fwlab.number(shown.cosine)}`;
    const verdict = fires.every((one) => one.length)
      ? shown.cosine > 0
        ? ": the same product fires, and only its size tells the two apart."
        : ": different products fire, and the keys are told apart."
      : ", as 0/0 counts as 0: nothing can be stored under a key without features.";
    const where = {
      before: "Before DPFP, k overlaps with all keys less than 90° away (blue).",
      after: fires[0].length
        ? "After DPFP, k overlaps with the keys of its own quadrant (blue) and no others."
        : "After DPFP, k overlaps with no key.",
    };
    const count = `DPFP with ν = ${nu} has ${4 * nu} features. `;
    return `${count}${parts.join(" ")} ${before}${after}${verdict} ${where[coloured]}`;
  };

  // --- Showing -------------------------------------------------------------
  let shown;
  const update = () => {
    shown = compute();
    const height = FEATURES + BLOCK * nu - 10;
    features.setAttribute("viewBox", `0 0 ${WIDTH} ${height}`);
    keys.forEach((key, j) => {
      const [x, y] = at(key);
      handles[j].setAttribute("transform", `translate(${x} ${y})`);
      handles[j].setAttribute("aria-valuenow", key[0]);
      const [right, up] = key.map((number) => fwlab.number(number, 1));
      handles[j].setAttribute("aria-valuetext", `x ${right}, y ${up}`);
      arrows[j].setAttribute("d", `M${CENTRE[0]} ${CENTRE[1]}L${x} ${y}`);
      shown.r[j].forEach((number, i) => {
        bars[i][j].bar.setAttribute("width", UNIT * number);
        bars[i][j].number.textContent = fwlab.number(number, 1);
      });
    });
    slices.forEach((slice, n) => {
      slice.style.fill = shade(shown.overlaps[coloured][n]);
    });
    scale.textContent = `Colour: cosine with ${coloured === "after" ? "φ(k)" : "k"}`;
    // A product is bold when it fires for a key.
    quadrants.forEach((label, n) => {
      const of = [0, 1].filter((j) => shown.fires[j].includes(n));
      label.dataset.active = of.map((j) => NAMES[j]).join(" ");
      label.setAttribute("font-weight", of.length ? 700 : 400);
    });
    const said = NAMES.map((name, j) => {
      const numbers = shown.r[j].map((x, i) => `${ENTRIES[i]} ${fwlab.number(x, 1)}`);
      return `${name}: ${numbers.join(", ")}`;
    });
    rectified.setAttribute("aria-label", `r of each key. ${said.join("; ")}`);
    const rows = [
      [shown.plainDot, shown.plainCosine],
      [shown.dot, shown.cosine],
      [shown.normalisedDot, shown.cosine],
    ];
    rows.forEach((row, n) =>
      row.forEach((x, i) => (overlaps[n][i].textContent = fwlab.number(x))),
    );
    const told = ["keys", "features", "sum-normalised features"].map(
      (name, n) =>
        `${name}: dot ${fwlab.number(rows[n][0])}, cosine ${fwlab.number(rows[n][1])}`,
    );
    overlap.setAttribute("aria-label", `Overlap. ${told.join("; ")}`);
    title.textContent = `${4 * nu} features φ = rᵢ rⱼ`;
    blocks.forEach(({ block, cells }, s) => {
      if (s >= nu) return block.remove();
      features.append(block);
      const lines = cells.map((row, j) => {
        const numbers = row.map(({ frame, number }, i) => {
          const n = 4 * s + i;
          const value = fwlab.number(shown.features[j][n]);
          const share = fwlab.number(shown.normalised[j][n]);
          const fires = shown.features[j][n] > 0;
          frame.dataset.fires = fires;
          if (s !== 1) frame.style.fill = fires ? tint(COLOURS[j]) : "none";
          frame.style.stroke = fires ? COLOURS[j] : "";
          frame.style.strokeWidth = fires ? 2 : "";
          number.textContent = fires
            ? `${value} → ${share}`
            : s === 1
              ? "always 0"
              : "0";
          number.setAttribute("font-weight", fires ? 600 : 400);
          return `${spoken(n)} ${fires ? value : 0}`;
        });
        return `${NAMES[j]}: ${numbers.join(", ")}`;
      });
      block.setAttribute(
        "aria-label",
        `Shift ${s + 1}, ${NOTES[s]}. ${lines.join("; ")}`,
      );
    });
    figure.say(sentence(shown));
  };
  update();
  return { state: () => shown };
});
