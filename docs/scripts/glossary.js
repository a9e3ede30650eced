// A tap on a term of the glossary explains it, the next one follows the link:
// a mouse and the keyboard explain it before they follow.
let explained = null;
document.addEventListener("click", (event) => {
  const term = event.target.closest?.(".fw-term") ?? null;
  if (term && term !== explained && matchMedia("(hover: none)").matches) {
    event.preventDefault();
    term.focus();
  }
  explained = term;
});
