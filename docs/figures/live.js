// Two language models side by side that differ only in their rule. Both read
// the same facts; then each is asked where everybody is.
{
  const folder = new URL("live/", document.currentScript.src);
  const RULES = { sum: "Sum rule", delta: "Delta rule" };
  const MOST = 24; // sentences, as long as the texts of the training
  const FIRST = [
    ["Ada", "Rome"],
    ["Ben", "Oslo"],
    ["Cleo", "Cairo"],
    ["Dan", "Delhi"],
    ["Eve", "Kyoto"],
    ["Ada", "Lima"],
    ["Ben", "Paris"],
  ];
  // Changes that are one press away. The sum rule keeps guessing the old place
  // after each of the first three; about half of all changes it guesses right.
  const EXAMPLES = [
    ["Eve", "Tunis"],
    ["Cleo", "Zagreb"],
    ["Dan", "Bern"],
    ["Ada", "Quito"],
    ["Ben", "Sofia"],
    ["Eve", "Rome"],
    ["Cleo", "Hanoi"],
    ["Dan", "Accra"],
  ];
  const STATEMENT = /(\p{L}+)\s+is\s+in\s+(\p{L}+)/giu;

  const { list, percent } = fwlab;
  const statement = ([name, place]) => `${name} is in ${place}.`;

  // Where everybody is, and whether they have moved, in the order of telling.
  const people = (facts) => {
    const found = new Map();
    for (const [name, place] of facts) {
      const before = found.get(name);
      const moved = before ? before.moved + (before.place !== place) : 0;
      found.set(name, { name, place, moved });
    }
    return [...found.values()];
  };

  fwlab.figure("live", (figure) => {
    const models = {};
    let facts = [...FIRST];
    const kept = figure.placeholder ?? fwlab.html("div");

    // What each model makes of the facts: for every person, how likely it
    // takes each place to be after "Where is … ?". A question leaves no trace:
    // it is asked of a copy.
    const ask = (model) => {
      const read = (words, state) => {
        let logits;
        for (const word of words)
          logits = model.step(model.words.indexOf(word), state).logits;
        return logits;
      };
      const state = model.start();
      for (const [name, place] of facts) read([name, "is", "in", place, "."], state);
      return people(facts).map(({ name, place, moved }) => {
        const logits = read(["Where", "is", name, "?"], model.copy(state));
        const shares = fwlab.softmax(logits);
        const said = model.words[shares.indexOf(Math.max(...shares))];
        const chance = (word) => shares[model.words.indexOf(word)];
        return {
          name,
          place,
          moved,
          said,
          right: said === place,
          share: chance(said),
          truth: chance(place),
          logits: Array.from(logits),
        };
      });
    };
    const answers = () =>
      models.delta &&
      Object.fromEntries(Object.keys(RULES).map((rule) => [rule, ask(models[rule])]));

    const score = (asked, group) => {
      const of = asked.filter(group ?? (() => true));
      return [of.filter(({ right }) => right).length, of.length];
    };
    const given = ({ moved }) => !moved;
    const changed = ({ moved }) => moved;
    const outOf = ([right, all]) => (all ? `${right} of ${all}` : "–");

    // Drawing

    const cell = ({ said, right, share }) => {
      const mark = fwlab.html(
        "b",
        { role: "img", "aria-label": right ? "correct:" : "wrong:" },
        right ? "✓" : "✗",
      );
      const bar = fwlab.html("i", { style: `--share: ${(100 * share).toFixed(0)}%` });
      return fwlab.html(
        "td",
        { class: right ? "fw-right" : "fw-wrong" },
        mark,
        ` ${said} `,
        fwlab.html("em", {}, percent(share)),
        bar,
      );
    };

    const picture = fwlab.html("div", { class: "fw-picture fw-pair" });
    const draw = () => {
      const all = answers();
      const known = people(facts);
      const latest = new Map(facts.map(([name], i) => [name, i]));
      const story = fwlab.html("p", {});
      facts.forEach((fact, i) => {
        const old = latest.get(fact[0]) !== i;
        const news = known.find(({ name }) => name === fact[0]).moved && !old;
        const tag = old ? "s" : news ? "strong" : "span";
        story.append(fwlab.html(tag, {}, statement(fact)), " ");
      });
      const rules = Object.entries(RULES);
      const row = (head, cells) =>
        fwlab.html("tr", {}, fwlab.html("th", { scope: "row" }, ...head), ...cells);
      const count = (head, group) =>
        row(
          [head],
          rules.map(([rule]) => fwlab.html("td", {}, outOf(score(all[rule], group)))),
        );
      const table = fwlab.html(
        "table",
        { class: "fw-answers" },
        fwlab.html(
          "thead",
          {},
          fwlab.html(
            "tr",
            {},
            fwlab.html("th", { scope: "col" }, "Where is …"),
            ...rules.map(([rule, name]) =>
              fwlab.html(
                "th",
                { scope: "col" },
                `${name} `,
                fwlab.html("strong", {}, outOf(score(all[rule]))),
              ),
            ),
          ),
        ),
        fwlab.html(
          "tbody",
          {},
          ...known.map(({ name, moved }, i) =>
            row(
              [`${name}? `, ...(moved ? [fwlab.html("small", {}, "moved")] : [])],
              rules.map(([rule]) => cell(all[rule][i])),
            ),
          ),
        ),
        fwlab.html(
          "tfoot",
          {},
          count("Given once:", given),
          count("Changed:", changed),
        ),
      );
      picture.replaceChildren(story, table);
      offer();
      figure.say(sentence(all, known));
    };

    const sentence = ({ sum, delta }, known) => {
      if (!known.length) return "Both memories are empty. Tell them where somebody is.";
      const moved = known.filter(changed).map(({ name }) => name);
      const both = (group) => `${outOf(score(sum, group))} and ${outOf(score(delta, group))}`;
      const told = `Given once: ${both(given)} correct.`;
      if (!moved.length)
        return `Nobody has moved yet, and the sum rule remembers as well as the delta rule. ${told}`;
      return (
        `${list(moved)} moved; what is no longer true is crossed out. The sum rule adds the new ` +
        `place to the old one and can only guess between them; the delta rule replaces it. ` +
        `Changed: ${both(changed)} correct. ` +
        (moved.length < known.length ? `${told} ` : "") +
        "The percentages say how sure each model is."
      );
    };

    // Telling

    // Once, also for who presses twice while they come; again after a failure.
    let loading;
    const load = () => {
      loading ??= fetchBoth().catch((error) => {
        loading = undefined;
        throw error;
      });
      return loading;
    };
    const fetchBoth = async () => {
      figure.say("Fetching the weights (43 kB) …");
      const [sum, delta] = await Promise.all(
        Object.keys(RULES).map((rule) =>
          fwlab.loadModel(new URL(`${rule}.safetensors`, folder)),
        ),
      );
      Object.assign(models, { sum, delta });
    };

    // Only who uses the figure fetches the weights; until then the kept
    // picture is shown. Returns whether it worked.
    const change = async (edit) => {
      try {
        await load();
      } catch (error) {
        figure.say(`The weights could not be fetched. ${error.message}`);
        return false;
      }
      if (!picture.isConnected) kept.replaceWith(picture);
      facts = edit(facts);
      draw();
      return true;
    };

    // A change that is one press away.
    const next = () => {
      const told = facts.map(statement);
      const left = EXAMPLES.filter((fact) => !told.includes(statement(fact)));
      return left[0] ?? EXAMPLES[facts.length % EXAMPLES.length];
    };
    const example = fwlab.button("", () =>
      change((facts) => (facts.length < MOST ? [...facts, next()] : facts)),
    );
    example.id = "live-example";
    example.setAttribute("aria-labelledby", "live-tell live-example");
    const offer = () => {
      const full = facts.length >= MOST;
      const left = [example, send].includes(document.activeElement);
      example.textContent = full ? `${MOST} sentences: full` : statement(next());
      example.disabled = send.disabled = full;
      if (full && left) again.focus();
    };

    const again = fwlab.button("Start again", () => change(() => [...FIRST]));
    const empty = fwlab.button("Empty", async () => {
      if (await change(() => [])) input.focus();
    });
    const input = fwlab.html("input", {
      type: "text",
      class: "fw-text",
      placeholder: "Dan is in Rome.",
      autocomplete: "off",
      spellcheck: "false",
    });
    const send = fwlab.html("button", { type: "submit", class: "fw-button" }, "Tell");
    const form = fwlab.html(
      "form",
      { class: "fw-controls" },
      fwlab.html("label", { class: "fw-wide" }, "Or type: ", input),
      send,
      again,
      empty,
    );
    const proper = (word) => word[0].toUpperCase() + word.slice(1).toLowerCase();
    form.addEventListener("submit", async (event) => {
      event.preventDefault();
      const news = [...input.value.matchAll(STATEMENT)].map(([, name, place]) => [
        proper(name),
        proper(place),
      ]);
      if (!(await change((facts) => facts))) return;
      const { names, places } = models.delta;
      const known = news.filter(
        ([name, place]) => names.includes(name) && places.includes(place),
      );
      const room = MOST - facts.length;
      if (known.length > room)
        figure.say(`They read ${MOST} sentences at most: ${room} more, not ${known.length}.`);
      else if (known.length && known.length === news.length) {
        await change((facts) => [...facts, ...known]);
        input.value = "";
      } else
        figure.say(
          "Write “Dan is in Rome.”, with a name and a place that they know. " +
            `Names: ${names.join(", ")}. Places: ${places.join(", ")}.`,
        );
    });

    offer();
    figure.root.append(
      fwlab.controls(fwlab.html("span", { id: "live-tell" }, "Tell both:"), example),
      kept,
      form,
    );

    return {
      // How the figure begins, for readers without scripts.
      still: async () => {
        await change(() => [...FIRST]);
        return picture.outerHTML;
      },
      state: () => ({ facts, answers: answers() ?? null }),
    };
  });
}
