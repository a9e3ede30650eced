// Annotated source: the equation or line that the address names, and all
// lines that carry the same number, light up together.
document$.subscribe(() => {
  if (!document.querySelector(".annotated")) return;
  const named = () => document.getElementById(location.hash.slice(1));
  const numbers = (element) => element.dataset.eq?.split(" ") ?? [];

  const light = () => {
    const target = named();
    const wanted = target ? numbers(target) : [];
    for (const element of document.querySelectorAll(".line, .equation"))
      element.classList.toggle(
        "lit",
        element === target || numbers(element).some((n) => wanted.includes(n)),
      );
  };

  // The browser's own jump into a column that stays in view would move
  // the other column, too.
  const show = (target) => {
    const column = target.closest(".column");
    const name = column?.className.match(/column-(\w+)/)[1];
    const tab = document.getElementById(`show-${name}`);
    if (tab) tab.checked = true;
    if (column && getComputedStyle(column).position === "sticky") {
      const [box, place] = [column, target].map((e) => e.getBoundingClientRect());
      if (place.top < box.top || place.bottom > box.bottom)
        column.scrollTop += place.top - box.top - box.height / 3;
    } else target.scrollIntoView({ block: "center" });
    target.focus({ preventScroll: true });
  };

  document.querySelector(".annotated").addEventListener("click", (event) => {
    const link = event.target.closest("a[href^='#']");
    if (!link) return;
    event.preventDefault();
    history.pushState(null, "", link.hash);
    light();
    show(named());
  });
  addEventListener("popstate", light);
  addEventListener("load", () => {
    const target = named();
    if (!target?.closest(".column-naive, .three .column")) return;
    document.querySelector(".annotated").scrollIntoView();
    show(target);
  });
  light();
});
