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

// The words that a search has found, as whole words: the theme's marks cut them.
document.addEventListener("DOMContentLoaded", () => {
  const said = new URLSearchParams(location.search).get("h") ?? "";
  const found = new Set(said.split(" ").filter(Boolean));
  const article = document.querySelector("article");
  if (!found.size || !article) return;
  const isFound = (part) => found.has(part.toLowerCase());
  const texts = document.createNodeIterator(article, NodeFilter.SHOW_TEXT);
  const nodes = [];
  for (let node; (node = texts.nextNode()); ) nodes.push(node);
  for (const node of nodes) {
    const parts = node.data.split(/(\d+(?:[.,]\d+)+|[\p{L}\p{M}\p{N}_]+)/u);
    if (!parts.some(isFound) || node.parentElement.closest("script, style, svg, .katex, .fw-answer, button, option")) continue;
    const marked = parts.map((part) => {
      if (!isFound(part)) return part;
      return Object.assign(document.createElement("mark"), { textContent: part });
    });
    node.replaceWith(...marked);
  }
});
