// @ts-check
// What a model carries from token to token: the state of its fast weights, which
// stays, and the cache of its attention, which grows.
import * as fwlab from "./fwlab.js";
import { text, small, round, MIDDLE, CENTRED, END, controls } from "./fwlab.js";

fwlab.figure("cache", (figure) => {
  // Sizes from transformers' configurations. `fast` is one layer of fast weights: its
  // heads, the shape of a head's memory, and the inputs its convolution keeps;
  // `cached` is what one attention layer keeps of a token.
  const MODELS = {
    "Qwen3.5 0.8B": {
      layers: 24,
      attention: 6,
      fast: { heads: 16, key: 128, value: 128, inputs: 3 * 3 * 16 * 128 },
      cached: { numbers: 2 * 4 * 256, of: "keys and values, 4 heads of 256" },
    },
    "Olmo Hybrid 7B": {
      layers: 32,
      attention: 8,
      fast: { heads: 30, key: 96, value: 192, inputs: 3 * 30 * (96 + 96 + 192) },
      cached: { numbers: 2 * 30 * 128, of: "keys and values, 30 heads of 128" },
    },
    "Kimi Linear 48B": {
      layers: 27,
      attention: 6,
      fast: { heads: 32, key: 128, value: 128, inputs: 3 * 3 * 32 * 128 },
      cached: { numbers: 512 + 64, of: "one compressed vector of 512 + 64" },
    },
  };
  const MIB = 2 ** 20;
  const [FEWEST, MOST] = [10, 20]; // powers of two, of tokens
  const [STATE, REST] = [4, 2]; // bytes of a number: float32, and bfloat16

  let name = "Qwen3.5 0.8B";
  let attention = MODELS[name].attention; // layers
  let power = 15; // of the context
  let sequences = 0; // a power of two, too

  // --- The sizes, in bytes -----------------------------------------------------
  const ofLayer = ({ heads, key, value, inputs }) => STATE * heads * key * value + REST * inputs;
  const sizes = (tokens) => {
    const { layers, fast, cached } = MODELS[name];
    const each = REST * cached.numbers * tokens;
    const many = 2 ** sequences;
    const state = many * (layers - attention) * ofLayer(fast);
    const cache = many * attention * each;
    return { state, cache, both: state + cache, full: many * layers * each };
  };
  // The tokens whose cache is as large as the state.
  const even = () => {
    const { state, cache } = sizes(1);
    return cache ? state / cache : Infinity;
  };

  const count = (x) => Math.round(x).toLocaleString("en-GB");
  const show = (bytes) => {
    const units = ["MiB", "GiB", "TiB"];
    let size = bytes / MIB;
    let unit = 0;
    while (size >= 1024 && unit < 2) [size, unit] = [size / 1024, unit + 1];
    return `${fwlab.number(size, size < 10 ? 2 : size < 100 ? 1 : 0)}\u00a0${units[unit]}`;
  };

  // --- The picture -------------------------------------------------------------
  const WIDTH = 388;
  const PLOT = { left: 44, right: 380, top: 22, bottom: 240 };
  const [LOW, HIGH] = [-2, 22]; // powers of two, of MiB
  const LEGEND = PLOT.bottom + 46;
  const ROW = 22;
  const picture = figure.picture(
    WIDTH,
    LEGEND + 4 * ROW,
    "State and cache against the number of tokens, both axes logarithmic",
  );
  const across = fwlab.scale([FEWEST, MOST], [PLOT.left, PLOT.right]);
  const powers = fwlab.scale([LOW, HIGH], [PLOT.bottom, PLOT.top]);
  const upwards = (bytes) => powers(Math.max(LOW, Math.min(HIGH, Math.log2(bytes / MIB))));
  const path = (attributes) => fwlab.path({ "stroke-width": 2, ...attributes });
  const LOOKS = {
    full: { stroke: "currentcolor", "stroke-dasharray": "1 4", "stroke-linecap": "round" },
    both: { stroke: "currentcolor", "stroke-width": 3 },
    cache: { stroke: "var(--fw-other)", "stroke-dasharray": "7 3" },
    state: { stroke: "var(--fw-fast)" },
  };
  const TITLES = {
    full: "attention in all layers",
    both: "this model, state and cache",
    cache: "its cache",
    state: "its state",
  };
  picture.append(
    text(0, 12, "Memory for the past", fwlab.BOLD),
    ...[0, 5, 10, 15, 20].flatMap((at) => {
      const y = upwards(MIB * 2 ** at);
      return [
        path({ d: `M${PLOT.left} ${y}H${PLOT.right}`, "stroke-width": 1, "stroke-opacity": 0.2 }),
        small(PLOT.left - 5, y, ["1 MiB", "32", "1 GiB", "32", "1 TiB"][at / 5], {
          ...MIDDLE,
          ...END,
        }),
      ];
    }),
    ...[10, 12, 14, 16, 18, 20].map((at) =>
      small(
        across(at),
        PLOT.bottom + 15,
        at < 20 ? `${2 ** (at - 10)} k` : "1 M",
        at < 20 ? CENTRED : END,
      ),
    ),
    small(PLOT.right, PLOT.bottom + 30, "tokens", END),
    path({
      d: `M${PLOT.left} ${PLOT.bottom}H${PLOT.right}`,
      "stroke-width": 1,
      "stroke-opacity": 0.6,
    }),
  );
  const marker = path({ "stroke-width": 1 });
  picture.append(marker);
  const lines = Object.entries(LOOKS).map(([what, look], n) => {
    const curve = path({ ...look, "data-curve": what });
    const dot = fwlab.circle({ r: 4, fill: look.stroke, stroke: "none", "data-dot": what });
    const y = LEGEND + (n + 0.5) * ROW;
    const size = text(WIDTH - 2, y, "", { ...MIDDLE, ...END, "data-size": what });
    picture.append(
      curve,
      dot,
      path({ ...look, d: `M0 ${y}h30` }),
      small(38, y, TITLES[what], MIDDLE),
      size,
    );
    return { what, curve, dot, size };
  });

  // --- Showing -----------------------------------------------------------------
  const update = () => {
    const tokens = 2 ** power;
    const now = sizes(tokens);
    const powers = Array.from({ length: MOST - FEWEST + 1 }, (_, n) => FEWEST + n);
    for (const { what, curve, dot, size } of lines) {
      const place = (at) => `${round(across(at))} ${round(upwards(sizes(2 ** at)[what]))}`;
      const any = now[what] > 0;
      curve.setAttribute("d", any ? `M${powers.map(place).join("L")}` : "");
      dot.setAttribute("cx", round(across(power)));
      dot.setAttribute("cy", round(upwards(now[what])));
      dot.style.display = any ? "" : "none";
      size.textContent = any ? show(now[what]) : "none";
    }
    marker.setAttribute("d", `M${round(across(power))} ${PLOT.top}V${PLOT.bottom}`);
    const { layers, cached } = MODELS[name];
    const many = 2 ** sequences;
    const long = `${count(tokens)} tokens${many > 1 ? `, ${many} sequences` : ""}`;
    const at = even();
    const crossing = !attention
      ? "Without attention there is no cache."
      : attention === layers
        ? "Without fast weights there is no state."
        : `The cache is as large as the state after ${count(at)} tokens.`;
    const share =
      attention === layers
        ? "as much as"
        : `${fwlab.number((100 * now.both) / now.full, now.both < now.full / 10 ? 1 : 0)}\u00a0% of what`;
    figure.say(
      `${name} with ${attention} of ${layers} layers of attention, ${long}: ` +
        `state ${now.state ? show(now.state) : "none"}, cache ${now.cache ? show(now.cache) : "none"}. ` +
        `That is ${share} attention in all layers keeps, ${show(now.full)}. ${crossing} ` +
        `Of each token, a layer of attention keeps ${cached.of}.`,
    );
  };

  const contexts = fwlab.slider(
    "Context",
    {
      min: FEWEST,
      max: MOST,
      step: 1,
      value: power,
      show: (at) => `${count(2 ** at)} tokens`,
    },
    (at) => {
      power = at;
      update();
    },
  );
  const shares = fwlab.slider(
    "Attention layers",
    { min: 0, max: 32, step: 1, value: attention, show: (n) => `${n} of ${MODELS[name].layers}` },
    (n) => {
      attention = n;
      update();
    },
  );
  const batches = fwlab.slider(
    "Sequences",
    { min: 0, max: 8, step: 1, value: sequences, show: (at) => 2 ** at },
    (at) => {
      sequences = at;
      update();
    },
  );
  const choose = (other) => {
    name = other;
    attention = MODELS[name].attention;
    shares.querySelector("input").max = MODELS[name].layers;
    shares.value = attention;
    update();
  };
  const models = Object.fromEntries(Object.keys(MODELS).map((x) => [x, x]));
  figure.beside(
    controls(fwlab.choice("Model", models, name, choose)),
    controls(contexts),
    controls(shares),
    controls(batches),
  );
  choose(name);

  return {
    state: () => ({
      name,
      models: MODELS,
      attention,
      tokens: 2 ** power,
      sequences: 2 ** sequences,
      sizes: sizes(2 ** power),
      even: even(),
    }),
  };
});
