// Formulas: arithmatex marks them on Markdown pages, notebooks keep TeX.
document.addEventListener("DOMContentLoaded", () => {
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
    for (const element of document.querySelectorAll(selector))
      renderMathInElement(element, { delimiters });
  };
  render(".arithmatex", marked);
  render(".nb-text, .nb-latex", tex);

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
});
