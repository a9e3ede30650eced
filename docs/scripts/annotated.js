// Annotated source. The equation or line that the address names, and all lines that
// carry the same number, light up together.
document.addEventListener("DOMContentLoaded", () => {
  const page = document.querySelector(".annotated");
  if (!page) return;

  const numbers = (element) => element.dataset.eq?.split(" ") ?? [];

  // Show what the address names, with its version, and light up what belongs to it.
  const show = () => {
    const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
    const wanted = target ? numbers(target) : [];
    for (const element of page.querySelectorAll("[data-eq], .lit"))
      element.classList.toggle(
        "lit",
        numbers(element).some((number) => wanted.includes(number)),
      );
    if (!page.contains(target)) return;
    target.classList.toggle("lit", target.matches(".line, .equation"));
    target.closest("details")?.setAttribute("open", "");
    const version = target.closest(".column").classList[1];
    const shown = [...page.querySelectorAll(":checked")].map((input) => input.value);
    const side = page.querySelector(".right")?.checkVisibility() ? "right" : "left";
    if (version && (!shown.includes(version) || !target.checkVisibility()))
      page.querySelector(`.${side} [value=${version}]`).checked = true;
    // What is in view stays where it is.
    const { top, bottom } = target.getBoundingClientRect();
    if (top < 90 || bottom > innerHeight) target.scrollIntoView();
    if (!target.hasAttribute("tabindex")) target.tabIndex = -1;
    target.focus({ preventScroll: true });
  };

  document.addEventListener("click", (event) => {
    if (event.ctrlKey || event.metaKey || event.shiftKey) return;
    const link = event.target.closest("a[href^='#']");
    if (!link) return;
    event.preventDefault();
    history.pushState(null, "", link.hash);
    show();
  });
  addEventListener("popstate", show);
  addEventListener("load", show);
});
