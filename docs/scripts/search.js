// The search of the site: finds, ranks, and cuts out what is shown. hooks/search.py
// puts MiniSearch and SECTIONS, the texts of all pages, in front of it. The theme asks
// and draws, and speaks as to its own worker: 0 says that it is there, 1 that the
// search is, 2 is a query, 3 what it found.
{
  // How much sections count that have the same words: the first kind that fits.
  const KINDS = [
    [/^notation\.html#term/, 0.5],
    [/^(notebooks\/|annotated\/equations|index)/, 2],
    [/^(notation|figures\/|course|cheatsheet|memory_essay|rules|run)/, 1.5],
    [/^annotated\/source\//, 0.05],
    [/^api\/exercises/, 0.5],
    [/^(annotated\/|kernels\/(?!index)|contribute|tested|changelog|inside)/, 0.5],
    [/^/, 1],
  ];
  // What readers call something, and what it is called here: both are searched.
  const ALSO = `answer: exercise; attention free transformer: aft; benchmark: speed;
    bibtex: cite; cheatsheet: cheat sheet; chunkwise: chunks; citation: cite; cuda: gpu;
    deltanet: delta rule; dpfp sparsity: dpfp; equation: eq; error: errata; faster: speed;
    gradient checkpointing: memory; hebbian: outer product; hopfield: capacity;
    how fast: speed; hugging face: transformers; huggingface: transformers;
    kda: kimi delta attention; learning rate: write strength;
    linear attention: fast weights; linear attention: sum rule;
    linear transformer: fast weights; mamba: ten rules; memory efficient backward: memory;
    performer: favor; pip: install; quick start: start here; quickstart: start here;
    qwen3 next: published models; setup: install; solution: exercise; ssm: ten rules;
    state space: ten rules; test time training: regression; train text: train models;
    triton: gpu kernels; ttt: regression; tutorial: start here`;
  // Words that are in every text.
  const COMMON = new Set(
    `a an and are as at be by can do does for from i in is it my of on or own should than
     that the this to use vs what when where which why with you`.split(/\s+/),
  );
  const SPELLED = {
    "⊗": "otimes", α: "alpha", β: "beta", γ: "gamma", δ: "delta", ε: "epsilon", ζ: "zeta",
    η: "eta", θ: "theta", κ: "kappa", λ: "lambda", μ: "mu", ν: "nu", ξ: "xi", π: "pi",
    ρ: "rho", σ: "sigma", τ: "tau", φ: "phi", χ: "chi", ψ: "psi", ω: "omega",
  };
  const BOOST = { title: 5, page: 2, text: 1, code: 0.3 };
  // Pages that are shown, sections of each, and characters of a line.
  const [PAGES, PARTS, LONGEST] = [30, 6, 220];

  // The words of a text as the index has them: "β_t" is "beta" and "t".
  const WORD = /\d+(?:[.,]\d+)+|[\p{L}\p{M}\p{N}_]+|⊗/gu;
  const known = new Map();
  const names = (word) => {
    if (!known.has(word)) {
      const letters = word.toLowerCase().normalize("NFKD").replace(/[\p{M},]/gu, "");
      const plain = letters.replace(/^eqs?(?=\d)/, "eq "); // "Eq24"
      const spelled = plain.replace(/[⊗α-ω]/g, (letter) => ` ${SPELLED[letter] ?? letter} `);
      const each = spelled.split(/_* _*|^_+|_+$/);
      known.set(word, each.filter((name) => name && !COMMON.has(name)).map(stem));
    }
    return known.get(word);
  };
  // What "normalise" and "normalizations", "memory" and "memories" have in common.
  const stem = (name) =>
    name.includes("_")
      ? name
      : name
          .replace(/(?<=..)ies$/, "y")
          .replace(/(?<=[sxz]|[cs]h)es$|(?<=..)(?<!s|u|ia)s$/, "")
          .replace(/(?<=i)[sz](?:e[dr]?|ing|ation)$/, "")
          .replace(/(?<=...)([bdgmnprt])\1(?:ing|ed)$/, "$1")
          .replace(/(?<=...)(?:ing|ed|[ey])$/, "");
  const words = (text) => (text.match(WORD) ?? []).flatMap(names);
  // A name of the code is found by its parts, too.
  const parts = (name) => [name, ...(name.includes("_") ? name.split("_").map(stem) : [])];

  const pageOf = (location) => location.split("#")[0];
  const pages = new Map(
    SECTIONS.filter(({ name }) => name).map((page) => [page.location, page]),
  );
  const entries = SECTIONS.map((section, id) => {
    const { location, title, name = "", text, code } = section;
    const page = name ? "" : pages.get(pageOf(location)).title;
    const fields = { title: `${title} ${name}`, page, text, code };
    for (const field in fields) fields[field] = words(fields[field]).join(" ");
    // "Retrieval: does it matter?" is also called "Retrieval".
    const called = [title, title.split(":")[0], name].map((each) => words(each).join(" "));
    const [, weight] = KINDS.find(([kind]) => kind.test(location));
    return { ...fields, id, called, weight, whole: Boolean(name) };
  });
  const index = new MiniSearch({
    fields: Object.keys(BOOST),
    tokenize: (text) => text.split(" "),
    processTerm: parts,
    searchOptions: {
      boost: BOOST,
      boostDocument: (id) => entries[id].weight,
      prefix: (term) => term.length > 1 && !/^\d/.test(term),
      processTerm: (term) => term,
    },
  });
  index.addAll(entries);

  // Words count more where they are together, still more in a title, most in that of
  // a page.
  const together = ({ called, text, whole }, phrase) => {
    const within = (text) => ` ${text} `.includes(` ${phrase} `);
    const named =
      (called.includes(phrase) && 4) ||
      (called.some((name) => name.startsWith(phrase)) && 3) ||
      (called.some(within) && 2) ||
      1;
    const said = phrase.includes(" ") && (named > 1 || within(text)) ? 3 : 1;
    return named * said * (whole && named > 1 ? 2 : 1);
  };
  const also = ALSO.split(";").map((pair) =>
    pair.split(":").map((text) => ` ${words(text).join(" ")} `),
  );
  const ask = (phrases, options) => {
    const hits = new Map();
    for (const phrase of phrases) {
      const queries = phrase.split(" ");
      for (const { id, score, terms } of index.search({ queries, ...options })) {
        const whole = (score / queries.length) * together(entries[id], phrase);
        if (!(hits.get(id)?.score > whole)) hits.set(id, { id, terms, score: whole });
      }
    }
    return [...hits.values()].sort((a, b) => b.score - a.score);
  };
  const found = (phrase) => {
    const others = also.map((pair) => ` ${phrase} `.replace(...pair).trim());
    return ask([...new Set([phrase, ...others])], { combineWith: "AND" });
  };

  // A word that is nowhere, as one with the same letters, or with one or two others:
  // the one that says most.
  const near = (word, fuzzy) => {
    const scores = new Map();
    for (const { terms, score } of index.search({ queries: [word], fuzzy }))
      for (const term of terms) scores.set(term, (scores.get(term) ?? 0) + score);
    return [...scores].sort((a, b) => b[1] - a[1]).map(([term]) => term);
  };
  const letters = (word) => [...word].sort().join("");
  const corrected = (word) => {
    if (word.length < 4 || ask([word]).length) return word;
    const swapped = near(word, 2).find((term) => letters(term) === letters(word));
    return swapped ?? near(word, 1)[0] ?? near(word, 2)[0] ?? word;
  };

  const escaped = (text) =>
    text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
  const marked = (text, isHit) => {
    const said = text.match(WORD) ?? [];
    const marks = said.map((word) => (isHit(word) ? `<mark>${word}</mark>` : word));
    return text.split(WORD).map((gap, i) => escaped(gap) + (marks[i] ?? "")).join("");
  };
  // A line, or the part of it around the first hit: its sentence, if that is near.
  const cut = (line, isHit) => {
    if (line.length <= LONGEST) return line;
    const first = [...line.matchAll(WORD)].find(([word]) => isHit(word))?.index ?? 0;
    const sentence = line.lastIndexOf(". ", first) + 1;
    const near = first - sentence < LONGEST / 2;
    const begin = near ? sentence : line.indexOf(" ", first - LONGEST / 2);
    const rest = line.slice(begin).trim();
    const end = rest.length > LONGEST ? rest.lastIndexOf(" ", LONGEST) : rest.length;
    return `${begin ? "… " : ""}${rest.slice(0, end)}${end < rest.length ? " …" : ""}`;
  };
  // The two lines that say most of what was asked, or what a section begins with: of
  // its code, if neither title nor text has so much of it.
  const excerpt = ({ title, text, code }, isHit) => {
    const count = (line) => new Set((line.match(WORD) ?? []).filter(isHit).flatMap(names)).size;
    const best = (lines) =>
      lines
        .split("\n")
        .map((line) => [line.trim(), count(line)])
        .sort((a, b) => b[1] - a[1])
        .filter(([line, hits], i) => line && i < 2 && (hits || i === 0));
    const [said, done] = [best(text), best(code)];
    const inCode = (done[0]?.[1] ?? 0) > Math.max(said[0]?.[1] ?? 0, count(title));
    return (inCode ? done : said)
      .map(([line]) => marked(cut(line, isHit), isHit))
      .map((line) => (inCode ? `<p><code>${line}</code></p>` : `<p>${line}</p>`))
      .join("");
  };

  const search = (query) => {
    let typed = words(query);
    if (!typed.length) return [];
    // All words; all, if some were misspelled; or some of them.
    let all = found(typed.join(" "));
    if (!all.length) {
      typed = typed.map(corrected);
      all = found(typed.join(" "));
    }
    if (!all.length) all = ask([typed.join(" ")], { combineWith: "OR" });
    const groups = new Map();
    for (const hit of all) {
      const page = pageOf(SECTIONS[hit.id].location);
      groups.set(page, [...(groups.get(page) ?? []), hit]);
    }
    const begins = (name) => typed.some((each) => name.startsWith(each));
    const isHit = (word) => names(word).flatMap(parts).some(begins);
    return [...groups].slice(0, PAGES).map(([page, hits]) => {
      const items = hits.slice(0, PARTS).map(({ id, score }, i) => ({
        location: SECTIONS[id].location,
        title: marked(SECTIONS[id].title, isHit),
        text: excerpt(SECTIONS[id], isHit),
        // The theme unfolds sections that are as good as the first.
        score: i < 2 && score > hits[0].score / 2 ? hits[0].score : score,
        terms: {},
      }));
      if (!items.some(({ location }) => location === page)) {
        const title = escaped(pages.get(page).title);
        items.push({ location: page, title, text: "", score: 0, terms: {} });
      }
      // What the page will mark, and where a press on its title lands: at the section
      // that Enter opens (scripts/iframe-worker.js).
      const [, best] = items[0].location.split("#");
      return items.map((item) => {
        const [, hash] = item.location.split("#");
        const asked = new URLSearchParams({ h: query, ...(!hash && best && { at: best }) });
        return { ...item, location: `${page}?${asked}${hash ? `#${hash}` : ""}` };
      });
    });
  };

  globalThis.answered = ({ type, data }) =>
    type === 0 ? { type: 1 } : { type: 3, data: { items: search(data) } };
  if (globalThis.importScripts)
    addEventListener("message", ({ data }) => postMessage(answered(data)));
}
