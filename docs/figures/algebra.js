// @ts-check
// The mathematics that figures share, on plain arrays: vectors, random
// numbers, the features of DPFP and the fast weight rules.

export const dot = (a, b, start = 0) => {
  let sum = 0;
  for (let i = 0; i < b.length; i++) sum += a[start + i] * b[i];
  return sum;
};

// A vector with length 1; an empty one stays empty.
export const unit = (x) => {
  const length = Math.sqrt(dot(x, x));
  return x.map((a) => (length === 0 ? 0 : a / length));
};

// The vector of length 1 that points there.
export const towards = (degrees) => {
  const angle = (degrees * Math.PI) / 180;
  return [Math.cos(angle), Math.sin(angle)];
};

// Random numbers that are the same for the same seed, any text: `normal()`
// returns the next one. The seed is hashed (FNV-1a), the hash is shifted and
// added to itself (Marsaglia's xorshift), and two uniform numbers make a
// normal one (Box and Muller).
export const random = (seed) => {
  let bits = 0x811c9dc5;
  for (const character of seed)
    bits = Math.imul(bits ^ character.codePointAt(0), 0x01000193);
  bits ||= 1;
  const uniform = () => {
    bits ^= bits << 13;
    bits ^= bits >>> 17;
    bits ^= bits << 5;
    return (bits >>> 0) / 2 ** 32; // never 0
  };
  for (let i = 0; i < 16; i++) uniform(); // until similar seeds differ
  return () =>
    Math.sqrt(-2 * Math.log(uniform())) * Math.cos(2 * Math.PI * uniform());
};

// A vector of random direction and length 1.
export const direction = (normal, width) =>
  unit(Array.from({ length: width }, normal));

// DPFP (Eq. 37): all products at distance 1, then all at distance 2, …
export const dpfp = (key, nu = 1) => {
  const r = [...key, ...key.map((x) => -x)].map((x) => (x > 0 ? x : 0));
  return Array.from({ length: nu }, (_, n) =>
    r.map((x, i) => x * r[(i + n + 1) % r.length]),
  ).flat();
};

// What each rule keeps of the memory, how strongly it writes, and whether it
// subtracts what the key already holds.
export const rules = {
  sum: () => ({ keep: 1, strength: 1, corrects: false }), // Eq. 17
  gated: (beta) => ({ keep: 1 - beta, strength: beta, corrects: false }), // Eq. 52
  delta: (beta) => ({ keep: 1, strength: beta, corrects: true }), // Eq. 24
  "gated delta": (beta, decay) => ({ keep: decay, strength: beta, corrects: true }),
};

export const read = (W, key) => W.map((row) => dot(row, key)); // Eq. 25

// Decay first, then look up what the key holds, then write.
export const write = (W, key, value, { keep, strength, corrects }) =>
  W.map((row, i) => {
    const held = corrects ? keep * dot(row, key) : 0;
    const added = strength * (value[i] - held);
    return row.map((w, j) => keep * w + added * key[j]);
  });
