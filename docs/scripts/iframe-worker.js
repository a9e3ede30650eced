// The theme starts its search with every page. In its place stands the site's own
// (scripts/search.js), which is loaded when a reader first enters the field: as a
// worker, or, on a page opened from disk, which may not start one, as a script.
{
  const url = new URL("../assets/search.js", document.currentScript.src);
  const entered = new Promise((done) => {
    document.addEventListener("focusin", ({ target }) => {
      if (target.matches("[data-md-component=search-query]")) done();
    });
  });
  const load = () =>
    new Promise((done) => {
      const script = document.createElement("script");
      script.src = url;
      script.onload = done;
      document.head.append(script);
    });
  const begin = async (say) => {
    await entered;
    if (location.protocol === "file:") {
      await load();
      return (message) => say(globalThis.answered(message));
    }
    const worker = new Worker(url);
    worker.onmessage = ({ data }) => say(data);
    return (message) => worker.postMessage(message);
  };
  const { Worker } = globalThis;
  globalThis.Worker = class extends EventTarget {
    asked = begin((data) => this.dispatchEvent(new MessageEvent("message", { data })));

    async postMessage(message) {
      (await this.asked)(message);
    }
  };
}

// What was searched for, marked in the page as whole words: the theme's marks cut them.
// What follows a prediction is unfolded for it, in the section that was found.
document.addEventListener("DOMContentLoaded", () => {
  const WORD = /(\d+(?:[.,]\d+)+|[\p{L}\p{M}\p{N}_]+)/u;
  const asked = new URLSearchParams(location.search);
  const typed = (asked.get("h") ?? "").toLowerCase().split(WORD).filter((part, i) => i % 2 && part.length > 2);
  const begins = typed.map((word) => word.replace(/(?<=...)(?:ies|es|s|ing|ed|[ey])$/, ""));
  const article = document.querySelector("article");
  const there = asked.get("at") ?? decodeURIComponent(location.hash.slice(1));
  if (begins.length && article) {
    const isFound = (part) => begins.some((begin) => part.toLowerCase().startsWith(begin));
    const texts = document.createNodeIterator(article, NodeFilter.SHOW_TEXT);
    const nodes = [];
    for (let node; (node = texts.nextNode()); ) nodes.push(node);
    for (const node of nodes) {
      const parts = node.data.split(WORD);
      if (!parts.some(isFound) || node.parentElement.closest("script, style, svg, .katex, .fw-answer, button, option")) continue;
      const fold = node.parentElement.closest("fw-fold");
      if (fold && (!there || fold.dataset.section === there)) fold.find();
      const marked = parts.map((part) => {
        if (!isFound(part)) return part;
        return Object.assign(document.createElement("mark"), { textContent: part });
      });
      node.replaceWith(...marked);
    }
  }
  if (asked.has("at")) location.replace(`#${asked.get("at")}`);
});
