// @ts-check
// A language model of fwlab in plain JavaScript: what models.LanguageModel
// does in `step`, for the delta rule and the sum rule. Its weights come
// from docs/tools/export_web.py or docs/tools/pair.py, as a safetensors file.
import { dot, dpfp, unit } from "./algebra.js";

// The address of this script, to which those of weights are relative.
const here = /** @type {HTMLScriptElement} */ (globalThis.document?.currentScript)?.src;
/** @param {string} name as in docs/figures, without its ending */
export const loadModel = async (name) => {
  const url = new URL(`${name}.safetensors`, here);
  const bytes = await (location.protocol === "file:" ? fromDisk(url) : fromServer(url));
  return new LanguageModel(bytes);
};

const fromServer = async (url) => {
  const answer = await fetch(url);
  if (!answer.ok) throw new Error(`${url}: ${answer.status}`);
  return answer.arrayBuffer();
};

// A page that was opened from disk may not read a file, but run a script: next
// to each file is one that keeps its bytes here, as letters (docs/hooks/figures.py).
globalThis.packed ??= {};
const fromDisk = async (url) => {
  await new Promise((loaded, failed) => {
    const script = Object.assign(document.createElement("script"), { src: `${url}.js` });
    script.onload = loaded;
    script.onerror = () => failed(new Error(`${url}.js is not there.`));
    document.head.append(script);
  });
  const [folder, name] = url.pathname.split("/").slice(-2);
  const letters = atob(globalThis.packed[`${folder}/${name}`]);
  return Uint8Array.from(letters, (letter) => letter.charCodeAt(0)).buffer;
};

// What each rule has in its own paper, unless the file says otherwise.
export const usual = {
  delta: { feature_map: "dpfp", strength: true, normalize: false, conv_size: 0 },
  sum: { feature_map: "elu1", strength: false, normalize: true, conv_size: 0 },
};

export class LanguageModel {
  // What the file says of itself, or is usual.
  layers; heads; d_model; mixer; feature_map; strength; normalize; conv_size;

  constructor(buffer) {
    const length = Number(new DataView(buffer).getBigUint64(0, true));
    const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 8, length)));
    const about = JSON.parse(header.__metadata__.model);
    Object.assign(this, usual[about.mixer], about);
    const weight = (name) => {
      const [start, end] = header[name].data_offsets;
      return float16(new Uint16Array(buffer, 8 + length + start, (end - start) / 2));
    };
    this.embedding = weight("embedding.weight");
    this.norm = weight("norm.weight");
    this.blocks = Array.from({ length: this.layers }, (_, i) => {
      const of = (name) => weight(`blocks.${i}.${name}.weight`);
      return {
        norm_mixer: of("norm_mixer"),
        to_q: of("mixer.to_q"),
        to_k: of("mixer.to_k"),
        to_v: of("mixer.to_v"),
        conv: this.conv_size ? of("mixer.conv") : null,
        to_beta: this.strength ? of("mixer.gates.beta.projection") : null,
        to_out: of("mixer.to_out"),
        norm_mlp: of("norm_mlp"),
        expand: of("expand"),
        contract: of("contract"),
      };
    });
    this.width = this.d_model / this.heads; // of keys and values per head
    this.features = (this.feature_map === "dpfp" ? 2 : 1) * this.width;
  }

  // The memory before any token: per layer and head the fast weights W,
  // `width` rows of `features` numbers, with a normaliser z, and the past
  // inputs of a short convolution.
  start() {
    return this.blocks.map(() =>
      Array.from({ length: this.heads }, () => ({
        W: new Float32Array(this.width * this.features),
        z: this.normalize ? new Float32Array(this.features) : null,
        past: [],
      })),
    );
  }

  copy(state) {
    return state.map((layer) =>
      layer.map(({ W, z, past }) => ({ W: W.slice(), z: z && z.slice(), past })),
    );
  }

  // One token. Changes `state`; returns the logits of the next token, and
  // per layer and head the features of key and query, the value, what was
  // written and how strongly, and what was read.
  step(token, state) {
    const { d_model: d, embedding, width, features } = this;
    const x = embedding.slice(token * d, (token + 1) * d);
    const trace = this.blocks.map((block, layer) => {
      const h = layerNorm(x, block.norm_mixer);
      const [q, k, v] = [block.to_q, block.to_k, block.to_v].map((W) =>
        multiply(W, h),
      );
      const beta = block.to_beta && multiply(block.to_beta, h);
      const y = new Float32Array(d);
      const heads = state[layer].map((memory, head) => {
        let parts = [q, k, v].map((all) =>
          all.subarray(head * width, (head + 1) * width),
        );
        if (block.conv) parts = this.convolve(block.conv, parts, memory, head);
        const [phiQ, phiK] = parts.slice(0, 2).map((a) => this.phi(a));
        const value = parts[2];
        const strength = beta ? 1 / (1 + Math.exp(-beta[head])) : 1;
        const written = value.map((a) => strength * a);
        if (this.mixer === "delta") {
          // Eqs. 20, 24 and 25; the sum rule is Eq. 17.
          const held = multiply(memory.W, phiK);
          for (let i = 0; i < width; i++) written[i] -= strength * held[i];
        }
        if (memory.z) for (let j = 0; j < features; j++) memory.z[j] += phiK[j]; // Eq. 18
        for (let i = 0; i < width; i++)
          for (let j = 0; j < features; j++)
            memory.W[i * features + j] += written[i] * phiK[j];
        const read = this.read(memory, phiQ);
        y.set(read, head * width);
        return { key: phiK, query: phiQ, value: value.slice(), written, strength, read };
      });
      add(x, multiply(block.to_out, y));
      const wide = multiply(block.expand, layerNorm(x, block.norm_mlp));
      add(x, multiply(block.contract, wide.map(gelu)));
      return heads;
    });
    return { logits: multiply(embedding, layerNorm(x, this.norm)), trace };
  }

  // A short convolution: each channel of query, key and value is a weighted
  // sum of its last inputs, then SiLU.
  convolve(weight, parts, memory, head) {
    const { conv_size: size, d_model: d, width } = this;
    memory.past = [...memory.past, parts].slice(-size);
    return parts.map((part, n) =>
      part.map((_, i) => {
        const channel = n * d + head * width + i;
        let sum = 0;
        memory.past.forEach((inputs, j) => {
          const age = memory.past.length - 1 - j;
          sum += weight[(channel + 1) * size - 1 - age] * inputs[n][i];
        });
        return sum / (1 + Math.exp(-sum));
      }),
    );
  }

  // What a memory answers: Eq. 25, with a normaliser Eq. 19.
  read({ W, z }, phi) {
    const y = multiply(W, phi);
    if (!z) return y;
    const total = dot(z, phi);
    return y.map((a) => (total === 0 ? 0 : a / total));
  }

  // Sum-normalised DPFP (Eqs. 37 and 29), ELU + 1 (Eq. 30), or the vector
  // itself with length 1.
  phi(x) {
    if (this.feature_map === "elu1") return x.map((a) => (a > 0 ? a + 1 : Math.exp(a)));
    if (this.feature_map === "unit") return unit(x);
    const phi = Float32Array.from(dpfp(x));
    const total = phi.reduce((sum, a) => sum + a, 0);
    return phi.map((a) => (total === 0 ? 0 : a / total));
  }
}

// A matrix, row after row, times a vector.
const multiply = (W, x) => {
  const y = new Float32Array(W.length / x.length);
  for (let i = 0; i < y.length; i++) y[i] = dot(W, x, i * x.length);
  return y;
};

export const add = (x, y) => {
  for (let i = 0; i < x.length; i++) x[i] += y[i];
};

const layerNorm = (x, weight) => {
  const mean = x.reduce((sum, a) => sum + a, 0) / x.length;
  const variance = x.reduce((sum, a) => sum + (a - mean) ** 2, 0) / x.length;
  return x.map((a, i) => ((a - mean) / Math.sqrt(variance + 1e-5)) * weight[i]);
};

// x times the normal distribution up to x. The error function is that of
// Abramowitz and Stegun, 7.1.26, right to 1.5e-7.
export const gelu = (x) => {
  const a = Math.abs(x) / Math.SQRT2;
  const t = 1 / (1 + 0.3275911 * a);
  const series =
    t *
    (0.254829592 +
      t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))));
  const erf = Math.sign(x) * (1 - series * Math.exp(-a * a));
  return 0.5 * x * (1 + erf);
};

export const softmax = (logits) => {
  const top = Math.max(...logits);
  const weights = Array.from(logits, (a) => Math.exp(a - top));
  const total = weights.reduce((sum, a) => sum + a, 0);
  return weights.map((a) => a / total);
};

// Numbers of 16 bits as numbers of 32.
export const float16 = (bits) =>
  Float32Array.from(bits, (b) => {
    const sign = b & 0x8000 ? -1 : 1;
    const exponent = (b >> 10) & 31;
    const fraction = b & 1023;
    if (exponent === 0) return sign * 2 ** -24 * fraction;
    return sign * 2 ** (exponent - 15) * (1 + fraction / 1024);
  });

// The colours of numbers above and below 0 in a figure, as red, green, blue.
export const ends = (root) => {
  const style = getComputedStyle(root);
  const canvas = Object.assign(document.createElement("canvas"), { width: 1 });
  const context = canvas.getContext("2d", { willReadFrequently: true });
  return ["--fw-positive", "--fw-negative"].map((name) => {
    context.fillStyle = style.getPropertyValue(name);
    context.fillRect(0, 0, 1, 1);
    return [...context.getImageData(0, 0, 1, 1).data.slice(0, 3)];
  });
};

// Numbers as the pixels of a canvas, row after row: 1 and more, -1 and less are
// opaque, 0 is not seen.
/**
 * @param {HTMLCanvasElement} canvas
 * @param {any} numbers
 * @param {number[][]} ends
 */
export const heat = (canvas, numbers, [positive, negative]) => {
  const context = canvas.getContext("2d");
  const image = context.createImageData(canvas.width, canvas.height);
  numbers.forEach((x, i) => {
    const opacity = 255 * Math.min(Math.abs(x), 1);
    image.data.set([...(x < 0 ? negative : positive), opacity], 4 * i);
  });
  context.putImageData(image, 0, 0);
};

// A copy of a picture that needs no script: its canvases are images of seven
// shades, a third of the bytes, its buttons what they say.
export const frozen = (picture, ends) => {
  const twin = picture.cloneNode(true);
  const drawn = picture.querySelectorAll("canvas");
  twin.querySelectorAll("canvas").forEach((canvas, i) => {
    const { width, height } = drawn[i];
    const { data } = drawn[i].getContext("2d").getImageData(0, 0, width, height);
    const shades = Array.from({ length: width * height }, (_, n) => {
      const shade = Math.round(data[4 * n + 3] / 42.5) / 6;
      return Math.abs(data[4 * n] - ends[0][0]) < 40 ? shade : -shade;
    });
    heat(canvas, shades, ends);
    const image = document.createElement("img");
    image.alt = drawn[i].getAttribute("aria-label") ?? "";
    image.src = canvas.toDataURL("image/png");
    canvas.replaceWith(image);
  });
  for (const button of twin.querySelectorAll("button")) {
    const words = document.createElement("div");
    words.append(...button.childNodes);
    button.replaceWith(words);
  }
  return twin.outerHTML;
};
