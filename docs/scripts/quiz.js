// Questions of the course: say whether an answer is right, and why a tempting
// one is wrong. The data are those of `predict` in the notebooks. Nothing that
// a reader answers leaves the browser; progress.js unfolds what follows a prediction.
{
  // "76 %" is 76 where the question asks for percent, and 0.76 elsewhere.
  const number = (text, inPercent) => {
    const plain = text.trim().replace(/\s/g, "").replace("−", "-");
    // "0,5" is a half; "1,000" may be a thousand, so it is asked for again.
    if (/^[+-]?\d+,\d{3}$/.test(plain)) return NaN;
    const [above, below] = plain.replace("%", "").replaceAll(",", ".").split("/");
    const value = Number(above || NaN) / (below === undefined ? 1 : Number(below || NaN));
    return plain.endsWith("%") && !inPercent ? value / 100 : value;
  };
  const judge = (question, answer) => {
    const near = (other) =>
      question.choices.length
        ? answer === other
        : Math.abs(answer - other) <= question.tolerance;
    if (near(question.truth)) return [true, `Right: ${question.said}`];
    const why = question.tempting.find(([wrong]) => near(wrong));
    const said = why ? ` ${why[1]}.` : question.choices.length ? "" : ` You are off by ${Number(Math.abs(answer - question.truth).toPrecision(3))}.`;
    const or = question.predicted ? "read on" : "show the answer";
    return [false, `Not yet.${said} Try again, or ${or}.`];
  };
  for (const form of document.querySelectorAll(".fw-quiz")) {
    const question = JSON.parse(form.dataset.question);
    const said = form.querySelector("[role=status]");
    form.querySelector("button").hidden = false;
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      const chosen = form.querySelector("input:checked")?.value;
      const answer = question.choices.length ? chosen : number(form.querySelector("input").value, question.percent);
      const unread = !question.choices.length && Number.isNaN(answer);
      const [right, words] = unread ? [false, "Write a number, such as 0.5."] : judge(question, answer);
      form.dataset.right = unread ? "" : right ? "yes" : "no";
      said.innerHTML = (unread ? "" : right ? "✓ " : "✗ ") + words;
      if (!unread) form.dispatchEvent(new Event("fw-answer", { bubbles: true }));
    });
    form.addEventListener("input", () => {
      form.dataset.right = said.textContent = "";
    });
  }
}
