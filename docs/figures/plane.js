// @ts-check
// What drawings of a 2 x 2 memory share: keys as arrows from the middle of a
// circle, values as points of a plane, and a mark for each pair.
import { number, round } from "./words.js";
import { line, note, nothing, svg } from "./kit.js";

export const FAST = "var(--fw-fast)";
export const WRONG = "var(--fw-wrong)";
export const NEW = "var(--fw-other)";

export const distance = (a, b) => Math.hypot(a[0] - b[0], a[1] - b[1]);
/** @param {number[]} place */
const point = ([x, y]) => `${round(x)} ${round(y)}`;
/** @param {number[]} place */
export const to = (place) => `translate(${point(place)})`;
/** @param {number[][]} places */
export const through = (...places) => `M${places.map(point).join("L")}`;

// One shape per pair, around 0, for those who see no letter or colour.
const polygon = (...corners) => (size) =>
  `${through(...corners.map((corner) => corner.map((x) => x * size)))}Z`;
const SHAPES = [
  (r) => `M${-r} 0a${r} ${r} 0 1 0 ${2 * r} 0a${r} ${r} 0 1 0 ${-2 * r} 0Z`,
  polygon([-0.9, -0.9], [0.9, -0.9], [0.9, 0.9], [-0.9, 0.9]),
  polygon([-1.2, 0.75], [0, -1.3], [1.2, 0.75]),
  polygon([-1.25, 0], [0, -1.25], [1.25, 0], [0, 1.25]),
  polygon([-1.2, -0.75], [0, 1.3], [1.2, -0.75]),
];
/** @param {number} j @param {number} size @param {string} style @param {number[]} place @param {any} name */
export const shape = (j, size, style, place = [0, 0], name = nothing) =>
  svg`<path d=${SHAPES[j](size)} transform=${to(place)} fill="none" stroke="currentcolor" style=${style} data-part=${name} />`;
export const letter = (words) =>
  svg`<text y="0.5" class="fw-cell-text" font-weight="600">${words}</text>`;

// The circle of keys of length 1, and where a key is.
/** @param {number[]} centre @param {number} radius */
export const keys = ([x, y], radius) => {
  const reach = radius + 10;
  const circle = svg`<circle cx=${x} cy=${y} r=${radius} fill="none" stroke="currentcolor" stroke-opacity="0.6" />
    ${line(`M${x - reach} ${y}h${2 * reach}M${x} ${y - reach}v${2 * reach}`, "stroke-opacity: 0.3")}`;
  /** @param {number[]} key */
  const at = ([right, up], r = radius) => [x + r * right, y - r * up];
  return { circle, at };
};

// The plane of values up to `range`, where a value is, and what is where.
export const values = ({ x, y, size }, range) => {
  const middle = [x + size / 2, y + size / 2];
  const scale = size / 2 / range;
  /** @param {number[]} value */
  const at = ([right, up]) => [middle[0] + scale * right, middle[1] - scale * up];
  const step = range > 3 ? 2 : 1;
  const ticks = [];
  for (let n = step; n < range; n += step)
    for (const value of [-n, n]) {
      const [[across], [, down]] = [at([value, 0]), at([0, value])];
      ticks.push(svg`${line(`M${round(across)} ${y + size}v-5M${x} ${round(down)}h5`)}
        ${note(round(across), y + size - 13, number(value, 0), "middle")}${note(x + 8, round(down), number(value, 0))}`);
    }
  const drawn = svg`<rect x=${x} y=${y} width=${size} height=${size} class="fw-cell" />
    ${line(`M${x} ${middle[1]}h${size}M${middle[0]} ${y}v${size}`, "stroke-opacity: 0.3")}${ticks}`;
  return { at, drawn, valueAt: (px, py) => [(px - middle[0]) / scale, (middle[1] - py) / scale] };
};

// Pair j: its value; what is read, and what was read before the last write, if they
// are there; the lines between them; and a letter on the right, unless one of `others`
// lies there.
/** @param {string} name @param {number} j @param {any} pair */
export const mark = (name, j, { place, read, before, error, trail, old = false, others, label = place }) => {
  const x = label[0];
  const y = label[1] - 8;
  const free = (side) => Math.min(...others.map((p) => distance(p, [x + 17 * side, y])));
  const side = free(1) >= Math.min(16, free(-1)) ? 1 : -1;
  return svg`${shape(j, 10, `stroke-width: 1.5; stroke-dasharray: ${old ? "2 2" : "none"}`, place)}
    ${error ? line(through(place, read), `stroke: ${WRONG}; stroke-width: 2.5`) : nothing}
    ${trail ? line(through(before, read), `stroke: ${FAST}; stroke-dasharray: 1 3`) : nothing}
    ${before ? shape(j, 4, `stroke: ${FAST}`, before) : nothing}
    ${read ? shape(j, 5, `fill: ${FAST}; stroke: ${FAST}`, read) : nothing}
    <g font-weight="600">${note(round(x + 17 * side), round(y), name, "middle")}</g>`;
};
