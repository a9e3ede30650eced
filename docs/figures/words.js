// @ts-check
// Numbers, names and colours as readers want them.

// Two decimals, and a true minus.
export const number = (x, digits = 2) => {
  if (!Number.isFinite(x)) return Number.isNaN(x) ? "NaN" : x < 0 ? "−∞" : "∞";
  const text = x.toFixed(digits);
  return (Number(text) === 0 ? (0).toFixed(digits) : text).replace("-", "−");
};
export const vector = (v, digits) => `(${v.map((x) => number(x, digits)).join(", ")})`;
export const percent = (share) => `${Math.round(100 * share)}\u00a0%`;

// Names as in a sentence: "a, b and c".
export const list = (names) =>
  names.length < 2 ? names.join("") : `${names.slice(0, -1).join(", ")} and ${names.at(-1)}`;

// A place in a drawing, without digits that nobody sees.
export const round = (x) => Math.round(100 * x) / 100;

// A linear scale: d3-scale has this and more, in eleven kilobytes.
/** @param {number[]} from @param {number[]} to */
export const scale = ([a, b], [low, high]) => (x) => low + ((x - a) / (b - a)) * (high - low);

// A colour that letters can be read on.
export const tint = (colour, share = 28) => `color-mix(in srgb, ${colour} ${share}%, transparent)`;

// A signed number from -1 to 1 as a colour: the page shines through at 0.
export const signed = (x) => {
  const share = Math.round(100 * Math.min(Math.abs(x), 1));
  return tint(x < 0 ? "var(--fw-negative)" : "var(--fw-positive)", Number.isNaN(x) ? 0 : share);
};
