// What is too wide scrolls in a box of its own. Such a box can be reached by
// keyboard, as long as there is something to scroll.
{
  const boxes =
    "article :is(.katex-display, .fw-equations .arithmatex, .nb-output, pre, code, .md-typeset__scrollwrap)";
  const mark = () => {
    for (const box of document.querySelectorAll(boxes)) {
      const scrolls = /auto|scroll/.test(getComputedStyle(box).overflowX);
      if (scrolls && box.scrollWidth > box.clientWidth) box.tabIndex = 0;
      else if (box.dataset.scrolls) box.removeAttribute("tabindex");
      box.dataset.scrolls = scrolls && box.tabIndex === 0 ? "yes" : "";
    }
  };
  addEventListener("load", mark);
  addEventListener("resize", mark);
  addEventListener("toggle", mark, true); // what a summary unfolds has no width before
}
