// @ts-check
// What drawings of a 2 x 2 memory share: keys as arrows from the middle of a
// circle, values as points of a plane, and a mark for each pair.
import * as fwlab from "./common.js";
import {
  small, path, circle, group, round, BOLD, MIDDLE, CENTRED, WRONG,
} from "./common.js";

export const FAST = "var(--fw-fast)";

export const distance = (a, b) => Math.hypot(a[0] - b[0], a[1] - b[1]);

/** @param {Element} element @param {number[]} place */
export const put = (element, [x, y]) =>
  element.setAttribute("transform", `translate(${round(x)} ${round(y)})`);
export const show = (element, visible) => {
  element.style.display = visible ? "" : "none";
};
/** @param {Element} element @param {number[]} from @param {number[]} to */
export const line = (element, [x1, y1], [x2, y2]) =>
  element.setAttribute("d", `M${round(x1)} ${round(y1)}L${round(x2)} ${round(y2)}`);

// One shape per pair, around 0, for those who see no letter or colour.
const polygon = (...corners) => {
  return (size) => {
    const points = corners.map(([x, y]) => `${round(x * size)} ${round(y * size)}`);
    return `M${points.join("L")}Z`;
  };
};
export const SHAPES = [
  (r) => `M${-r} 0a${r} ${r} 0 1 0 ${2 * r} 0a${r} ${r} 0 1 0 ${-2 * r} 0Z`,
  polygon([-0.9, -0.9], [0.9, -0.9], [0.9, 0.9], [-0.9, 0.9]),
  polygon([-1.2, 0.75], [0, -1.3], [1.2, 0.75]),
  polygon([-1.25, 0], [0, -1.25], [1.25, 0], [0, 1.25]),
  polygon([-1.2, -0.75], [0, 1.3], [1.2, -0.75]),
];

// The circle of keys of length 1, as [elements, place of a key].
/**
 * @param {number[]} centre
 * @param {number} radius
 * @returns {[Element[], (key: number[], reach?: number) => number[]]}
 */
export const ring = ([x, y], radius) => {
  const reach = radius + 10;
  const elements = [
    circle({ cx: x, cy: y, r: radius, "stroke-opacity": 0.6 }),
    path({
      d: `M${x - reach} ${y}h${2 * reach}M${x} ${y - reach}v${2 * reach}`,
      "stroke-opacity": 0.3,
    }),
  ];
  return [elements, ([right, up], r = radius) => [x + r * right, y - r * up]];
};

// The plane of values: its elements; `at`, the place of a value; and
// `rescale`, which shows values up to `range`.
export const values = (box) => {
  const middle = [box.x + box.size / 2, box.y + box.size / 2];
  const ticks = group();
  let scale = 0;
  /** @param {number[]} value */
  const at = ([x, y]) => [middle[0] + scale * x, middle[1] - scale * y];
  const rescale = (range) => {
    scale = box.size / 2 / range;
    const step = range > 3 ? 2 : 1;
    ticks.replaceChildren();
    const [left, bottom] = [box.x, box.y + box.size];
    for (let size = step; size < range; size += step)
      for (const number of [-size, size]) {
        const x = round(at([number, 0])[0]);
        const y = round(at([0, number])[1]);
        const label = fwlab.number(number, 0);
        ticks.append(
          path({ d: `M${x} ${bottom}v-5M${left} ${y}h5` }),
          small(x, bottom - 9, label, CENTRED),
          small(left + 8, y, label, MIDDLE),
        );
      }
  };
  const { x, y, size } = box;
  const elements = [
    fwlab.box(x, y, size, size, { class: "fw-cell" }),
    path({
      d: `M${x} ${middle[1]}h${size}M${middle[0]} ${y}v${size}`,
      "stroke-opacity": 0.3,
    }),
    ticks,
  ];
  const valueAt = (px, py) => [(px - middle[0]) / scale, (middle[1] - py) / scale];
  return { elements, at, valueAt, rescale };
};

// The mark of pair j: its value, what is read, what was read before the
// last write, and the lines between them.
export const mark = (name, j) => {
  const target = path({ d: SHAPES[j](10), "stroke-width": 1.5 });
  const error = path({ stroke: WRONG, "stroke-width": 2.5, "data-error": name });
  const found = path({ d: SHAPES[j](5), fill: FAST, stroke: FAST });
  found.dataset.read = name;
  target.dataset.value = name;
  const ghost = path({ d: SHAPES[j](4), stroke: FAST, "data-before": name });
  const trail = path({ stroke: FAST, "stroke-dasharray": "1 3" });
  const label = small(0, 0, name, { ...BOLD, ...CENTRED, ...MIDDLE });
  const all = group();
  all.append(target, error, trail, ghost, found, label);
  return { all, target, error, found, ghost, trail, label };
};
// The letter of a mark is on the right, unless something that is read lies
// there.
/** @param {Element} label @param {number[]} place @param {number[][]} found */
export const letter = (label, [x, y], found) => {
  const free = (side) => Math.min(...found.map((p) => distance(p, [x + 17 * side, y])));
  const side = free(1) >= Math.min(16, free(-1)) ? 1 : -1;
  label.setAttribute("x", String(round(x + 17 * side)));
  label.setAttribute("y", String(round(y)));
};
