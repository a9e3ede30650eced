// @ts-check
// A fast weight memory that is a 2 x 2 matrix: write pairs of a key and a
// value by three rules, and see what each stored key reads back.
import * as fwlab from "./fwlab.js";
import {
  text, small, path, circle, group, round, vector, BOLD, MIDDLE, WRONG,
} from "./fwlab.js";
import { html, render, table } from "./kit.js";
import { FAST, SHAPES, distance, put, show, line } from "./plane.js";

fwlab.figure("memory", (figure) => {
  const NAMES = ["A", "B", "C", "D", "E"];
  const RULES = { sum: "Sum rule", gated: "Gated rule", delta: "Delta rule" };
  const LIMIT = 1.5;
  // [degrees, value] of the pairs that are written, and of the one that is not.
  const PRESETS = {
    "Two orthogonal keys": {
      pairs: [
        [20, [0.9, 0.8]],
        [110, [-1, 0.5]],
      ],
      next: [155, [0.6, -1]],
    },
    "Two close keys": {
      pairs: [
        [40, [0.9, 0.8]],
        [65, [-1, 0.5]],
      ],
      next: [140, [0.6, -1]],
    },
    "Overwrite a key": {
      pairs: [
        [20, [0.9, 0.8]],
        [110, [-1, 0.5]],
      ],
      next: [20, [0.6, -1]],
    },
  };

  let rule = "delta";
  let beta = 1;
  let pairs = [];
  let next = null;
  const pair = ([degrees, value]) => ({ degrees, value: [...value] });
  const set = (setting) => {
    pairs = setting.pairs.map(pair);
    next = pair(setting.next);
  };

  const unit = ({ degrees }) => fwlab.towards(degrees);
  const write = (W, k, v) => fwlab.write(W, k, v, fwlab.rules[rule](beta));

  // All writes once more, in their order, since any key may have moved.
  const compute = () => {
    let W = [
      [0, 0],
      [0, 0],
    ];
    let before = W; // the last write
    for (const one of pairs) {
      before = W;
      W = write(W, unit(one), one.value);
    }
    const answer = (one) => {
      const readback = fwlab.read(W, unit(one));
      return {
        readback,
        error: distance(readback, one.value),
        before: fwlab.read(before, unit(one)),
      };
    };
    // A key that came again is no longer asked for its old value.
    const replaced = pairs.map(({ degrees }, j) => {
      const last = pairs.findLastIndex((other) => other.degrees === degrees);
      return last > j ? last : null;
    });
    return { W, before, answers: pairs.map(answer), next: answer(next), replaced };
  };

  // --- The picture ---------------------------------------------------------
  const picture = figure.picture(
    388,
    281,
    "Keys on a circle, values in a plane: the new pair, the written ones, and what is read",
  );
  const CENTRE = [101, 124];
  const RADIUS = 62;
  const RING = 86;
  const BOX = { x: 201, y: 28, size: 186 };
  const NEW = "var(--fw-other)";
  const PAPER = "var(--md-default-bg-color)";

  // Keys: arrows to the unit circle, with handles on it.
  const [circleOfKeys, keyAt] = fwlab.plane.ring(CENTRE, RADIUS);
  picture.append(text(0, 14, "Keys, of length 1", BOLD), ...circleOfKeys);
  const onRing = (degrees, radius) => keyAt(fwlab.towards(degrees), radius);
  const turned = (degrees) => ((Math.round(degrees) % 360) + 360) % 360;
  const angleAt = (x, y) =>
    turned((Math.atan2(CENTRE[1] - y, x - CENTRE[0]) * 180) / Math.PI);
  const between = (a, b) => {
    const turn = Math.abs(a - b) % 360;
    return Math.min(turn, 360 - turn);
  };
  const turnable = (handle, name, which, snap) => {
    fwlab.drag(handle, name, {
      move: (x, y) => {
        which().degrees = snap(angleAt(x, y));
        update();
      },
      nudge: (right, up) => {
        // The key turns to where the arrow points, and stays there.
        const aim = right ? 90 - 90 * right : 180 - 90 * up;
        const turn = ((aim - which().degrees + 540) % 360) - 180;
        const most = Math.max(-5, Math.min(5, turn));
        which().degrees = snap(turned(which().degrees + most));
        update();
      },
    });
    fwlab.fill(handle, { "aria-valuemin": 0, "aria-valuemax": 359 }, []);
  };

  const keyArrows = NAMES.map(() => path({ "stroke-width": 1.5 }));
  const newArrow = path({
    stroke: NEW,
    "stroke-width": 1.5,
    "stroke-dasharray": "4 3",
  });
  picture.append(newArrow, ...keyArrows);
  const keyHandles = NAMES.map((name, j) => {
    const handle = group({ "data-key": name });
    const body = path({ d: SHAPES[j](11), fill: PAPER, "stroke-width": 1.5 });
    const label = text(0, 0.5, name, { class: "fw-cell-text", "font-weight": 600 });
    handle.append(fwlab.reach(18), body, label);
    turnable(
      handle,
      `Key ${name}`,
      () => pairs[j],
      (degrees) => degrees,
    );
    picture.append(handle);
    return handle;
  });
  const newMark = () => [
    fwlab.reach(18),
    circle({ r: 12, stroke: NEW, "stroke-width": 2, "stroke-dasharray": "4 2.3" }),
  ];
  const newKey = group({ "data-key": "new" });
  const plus = { class: "fw-cell-text", style: `fill: ${NEW}; font-size: 16px` };
  newKey.append(...newMark(), text(0, 0, "+", plus));
  // The new key catches on a stored one, so that it can be the same.
  turnable(
    newKey,
    "New key",
    () => next,
    (degrees) => {
      const near = pairs.find((one) => between(one.degrees, degrees) <= 4);
      return near ? near.degrees : degrees;
    },
  );
  picture.append(newKey);

  // Values, what is read back, and all that can be read back.
  const plane = fwlab.plane.values(BOX);
  const { at } = plane;
  picture.append(text(BOX.x, 14, "Values, read back", BOLD), ...plane.elements);
  const ellipse = path({ "data-part": "ellipse", stroke: FAST });
  const newLine = path({ "data-part": "new", stroke: NEW, "stroke-dasharray": "4 3" });
  const newFoot = circle({ r: 3, stroke: NEW, fill: NEW });
  picture.append(ellipse, newLine, newFoot);
  const marks = NAMES.map((name, j) => {
    const mark = fwlab.plane.mark(name, j);
    picture.append(mark.all);
    return mark;
  });
  const newValue = group({ "data-value": "new" });
  newValue.append(...newMark());
  fwlab.drag(newValue, "New value", {
    move: (x, y) => {
      next.value = plane.valueAt(x, y).map(tenths);
      update();
    },
    nudge: (right, up) => {
      next.value = [next.value[0] + right / 10, next.value[1] + up / 10].map(tenths);
      update();
    },
  });
  fwlab.fill(newValue, { "aria-valuemin": -LIMIT, "aria-valuemax": LIMIT }, []);
  picture.append(newValue);
  // Adding 0 turns −0 into 0.
  const tenths = (x) => Math.round(10 * Math.max(-LIMIT, Math.min(LIMIT, x))) / 10 + 0;

  let range = 2;
  const rescale = (...memories) => {
    const reach = Math.max(...memories.flat().map((row) => Math.hypot(...row)));
    range = [2, 3, 4, 6, 8].find((size) => reach <= 0.95 * size) ?? 8;
    plane.rescale(range);
  };

  const LEGEND = 236;
  picture.append(
    small(22, LEGEND, "the new pair:", MIDDLE),
    small(22, LEGEND + 17, "drag it, or turn a key", MIDDLE),
    circle({
      cx: 9,
      cy: LEGEND,
      r: 7,
      stroke: NEW,
      "stroke-width": 2,
      "stroke-dasharray": "3 2",
    }),
    circle({ cx: 210, cy: LEGEND, r: 7, "stroke-width": 1.5 }),
    small(221, LEGEND, "written", MIDDLE),
    circle({ cx: 278, cy: LEGEND, r: 4, stroke: FAST, fill: FAST }),
    small(287, LEGEND, "read", MIDDLE),
    path({ d: `M324 ${LEGEND}h18`, stroke: WRONG, "stroke-width": 2.5 }),
    small(347, LEGEND, "error", MIDDLE),
    path({ d: `M203 ${LEGEND + 17}h14`, stroke: FAST }),
    small(221, LEGEND + 17, "all that can be read", MIDDLE),
    path({ d: `M211 ${LEGEND + 34}h8`, stroke: FAST, "stroke-dasharray": "1 3" }),
    circle({ cx: 207, cy: LEGEND + 34, r: 4, stroke: FAST }),
    small(221, LEGEND + 34, "read before the last write", MIDDLE),
  );

  // Numbers: the memory, and a row per pair.
  const numbers = fwlab.html("div", { class: "fw-beside", style: "grid-template-columns: 5fr 9fr" });
  const drawNumbers = ({ W, answers, replaced, next: held }) => {
    const row = (name, one, { readback, error }, old = null) =>
      html`<tr class=${name === "+" ? "fw-new" : ""}><th scope="row"><b>${name}</b></th><td>${one.degrees}°</td>
        <td>${bare(one.value, 1)}</td><td>${bare(readback, 2)}</td>
        <td>${old === null ? fwlab.number(error) : `now ${NAMES[old]}`}</td></tr>`;
    render(
      html`${table({
          title: "Memory W",
          heads: [["", ["k₁", "k₂"]]],
          rows: W.map((w, i) => [["v₁", "v₂"][i], w]),
          limit: 2,
          digits: 2,
        })}
        <table class="fw-numbers fw-pairs"><thead><tr><th></th>${["key", "value v", "read Wk", "error"].map(
          (name) => html`<th scope="col">${name}</th>`,
        )}</tr></thead><tbody>${pairs.map((one, j) => row(NAMES[j], one, answers[j], replaced[j]))}
        ${row("+", next, held)}</tbody></table>`,
      numbers,
    );
  };

  // --- Words ---------------------------------------------------------------
  const bare = (v, digits) => v.map((x) => fwlab.number(x, digits)).join(", ");
  // What the last write did to the others.
  const moved = (answers, replaced) => {
    const last = answers.length - 1;
    const others = answers.slice(0, last).flatMap(({ before, readback }, j) => {
      const same = distance(before, readback) < 0.005 || replaced[j] !== null;
      return same ? [] : [`${NAMES[j]} read ${vector(before)}`];
    });
    if (!others.length) return "";
    return ` Before ${NAMES[last]} was written, ${others.join(", ")}.`;
  };
  const sentence = ({ answers, replaced, next: held }) => {
    const strength = rule === "sum" ? "" : `, β = ${fwlab.number(beta)}`;
    const start = `${RULES[rule]}${strength}. `;
    const before =
      `Under the new key the memory holds ${vector(held.readback)}, ` +
      `${fwlab.number(held.error)} away from the new value.`;
    if (!pairs.length)
      return `${start}The memory is empty: every key reads (0.00, 0.00).`;
    const parts = answers.map(({ readback, error }, j) => {
      if (replaced[j] !== null) return `${NAMES[j]}: same key as ${NAMES[replaced[j]]}`;
      const how = fwlab.number(error);
      const verdict = Number(how) === 0 ? "right" : `error ${how}`;
      return `${NAMES[j]} reads ${vector(readback)}, ${verdict}`;
    });
    let angle = "";
    if (pairs.length === 2 && replaced[0] === null) {
      const [a, b] = pairs;
      const product = fwlab.dot(unit(a), unit(b));
      const apart = `${between(a.degrees, b.degrees)}° apart`;
      angle = ` The keys are ${apart}: k · k′ = ${fwlab.number(product)}.`;
    }
    const full =
      pairs.length === NAMES.length
        ? ` No more than ${NAMES.length} pairs are drawn: undo one to write another.`
        : "";
    return `${start}${parts.join("; ")}.${moved(answers, replaced)}${angle} ${before}${full}`;
  };

  // --- Showing -------------------------------------------------------------
  const tellAngle = (handle, degrees) => {
    handle.setAttribute("aria-valuenow", degrees);
    handle.setAttribute("aria-valuetext", `${degrees} degrees`);
  };
  let shown;
  const update = () => {
    shown = compute();
    const { W, answers, replaced } = shown;
    rescale(W, shown.before);
    const levels = [];
    NAMES.forEach((name, j) => {
      const there = j < pairs.length;
      const { all, target, error, found, ghost, trail, label } = marks[j];
      for (const element of [all, keyHandles[j], keyArrows[j]]) show(element, there);
      if (!there) return;
      const { degrees, value } = pairs[j];
      // Handles at nearly the same angle go further in, one by one.
      const taken = pairs
        .slice(0, j)
        .map((other, i) => between(other.degrees, degrees) < 23 && levels[i]);
      levels[j] = [0, 1, 2].find((level) => !taken.includes(level)) ?? 2;
      put(keyHandles[j], onRing(degrees, RADIUS - 24 * levels[j]));
      line(keyArrows[j], CENTRE, onRing(degrees, RADIUS));
      tellAngle(keyHandles[j], degrees);
      const old = replaced[j] !== null;
      put(target, at(value));
      put(found, at(answers[j].readback));
      line(error, at(value), at(answers[j].readback));
      put(ghost, at(answers[j].before));
      line(trail, at(answers[j].before), at(answers[j].readback));
      for (const element of [found, error, ghost, trail]) show(element, !old);
      target.setAttribute("stroke-dasharray", old ? "2 2" : "none");
      const [x, y] = at(value);
      // Pairs with one value have their letters below each other.
      const same = pairs
        .slice(0, j)
        .filter((other) => distance(other.value, value) === 0);
      const readings = answers.map(({ readback }) => at(readback));
      fwlab.plane.letter(label, [x, y - 8 + 14 * same.length], readings);
    });
    put(newKey, onRing(next.degrees, RING));
    line(newArrow, CENTRE, onRing(next.degrees, RING - 12));
    put(newValue, at(next.value));
    put(newFoot, at(shown.next.readback));
    line(newLine, at(next.value), at(shown.next.readback));
    tellAngle(newKey, next.degrees);
    const [right, up] = next.value.map((x) => fwlab.number(x, 1));
    newValue.setAttribute("aria-valuenow", next.value[0]);
    newValue.setAttribute("aria-valuetext", `${right} right, ${up} up`);
    const outline = [];
    for (let degrees = 0; degrees < 360; degrees += 6)
      outline.push(
        at(fwlab.read(W, fwlab.towards(degrees)))
          .map(round)
          .join(" "),
      );
    ellipse.setAttribute("d", `M${outline.join("L")}Z`);

    drawNumbers(shown);
    strength.querySelector("input").disabled = rule === "sum";
    const enable = (button, other, enabled) => {
      const focused = document.activeElement === button;
      button.disabled = !enabled;
      if (focused && !enabled) other.focus();
    };
    undoButton.disabled = writeButton.disabled = false;
    enable(writeButton, undoButton, pairs.length < NAMES.length);
    enable(undoButton, writeButton, pairs.length > 0);
    figure.say(sentence(shown));
  };

  const rules = fwlab.choice(
    "Rule",
    { sum: "sum", gated: "gated", delta: "delta" },
    rule,
    (name) => {
      rule = name;
      update();
    },
  );
  const strength = fwlab.slider(
    "Write strength β",
    { min: 0, max: 1, step: 0.05, value: beta, show: (x) => fwlab.number(x) },
    (value) => {
      beta = value;
      update();
    },
  );
  const writeButton = fwlab.button("Write", () => {
    pairs.push(pair([next.degrees, next.value]));
    update();
  });
  const undoButton = fwlab.button("Undo", () => {
    next = pairs.pop();
    update();
  });
  const clear = fwlab.button("Start again", () => {
    pairs = [];
    update();
  });
  const presets = Object.entries(PRESETS).map(([name, setting]) =>
    fwlab.button(name, () => {
      set(setting);
      update();
    }),
  );
  figure.beside(
    fwlab.controls(writeButton, undoButton, clear),
    fwlab.controls(rules, strength),
    fwlab.controls(...presets),
    numbers,
  );
  set(PRESETS["Two close keys"]);
  update();

  const plain = (one, { readback, error, before }) => ({
    degrees: one.degrees,
    key: unit(one),
    value: [...one.value],
    readback,
    error,
    before,
  });
  return {
    state: () => ({
      rule,
      beta,
      W: shown.W,
      pairs: pairs.map((one, j) => ({
        name: NAMES[j],
        ...plain(one, shown.answers[j]),
        replacedBy: shown.replaced[j] === null ? null : NAMES[shown.replaced[j]],
      })),
      next: plain(next, shown.next),
      range,
    }),
  };
});
