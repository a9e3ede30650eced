// Formulas: arithmatex marks them on Markdown pages, notebooks keep TeX. They are
// set before the theme looks for what it has to explain on hover and focus.
{
  const marked = [
    { left: "\\(", right: "\\)", display: false },
    { left: "\\[", right: "\\]", display: true },
  ];
  const tex = [
    { left: "$$", right: "$$", display: true },
    { left: "\\begin{align}", right: "\\end{align}", display: true },
    { left: "$", right: "$", display: false },
    ...marked,
  ];
  const render = (selector, delimiters) => {
    if (!globalThis.renderMathInElement) return; // KaTeX has not come
    for (const element of document.querySelectorAll(selector))
      renderMathInElement(element, { delimiters });
  };
  render(".arithmatex", marked);
  render(".nb-text, .nb-latex", tex);

  // The number of an equation says whose it is. It leads to the line that
  // computes the equation, or to the list of equations.
  const about = document.getElementById("fw-numbers");
  const numbers = JSON.parse(about?.textContent ?? "{}");
  for (const tag of document.querySelectorAll(".katex-html > .katex-tag")) {
    const label = tag.textContent.replace(/[\s\u200b]/g, "");
    const [said, href] = numbers[label.slice(1, -1)] ?? [];
    if (!said) continue;
    const line = tag.closest(".equation")?.querySelector(".places a");
    const link = document.createElement("a");
    link.className = "fw-number";
    link.href = line?.getAttribute("href") ?? href;
    link.title = said;
    link.textContent = label;
    // Outside of what is hidden from screen readers.
    tag.parentElement.after(link);
    tag.remove();
  }

  // A line may not begin with the comma that follows a formula.
  for (const formula of document.querySelectorAll("span > .katex")) {
    const whole = formula.closest(".arithmatex") ?? formula.parentElement;
    const text = whole.nextSibling;
    const mark = text?.nodeType === Node.TEXT_NODE && text.data.match(/^[.,;:!?)\]]+/);
    if (!mark || formula.querySelectorAll(".base").length > 1) continue;
    text.splitText(mark[0].length);
    const together = document.createElement("span");
    together.style.whiteSpace = "nowrap";
    whole.replaceWith(together);
    together.append(whole, text);
  }
}
