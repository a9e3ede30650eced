// A tap on a term of the glossary explains it, the next one follows the link:
// a mouse and the keyboard explain it before they follow.
let explained = null;
document.addEventListener("click", (event) => {
  const term = event.target.closest?.(".fw-term") ?? null;
  // Screen readers, which have read the explanation, press without touching.
  if (term && term !== explained && event.pointerType === "touch") {
    event.preventDefault();
    term.focus();
  }
  explained = term;
});
