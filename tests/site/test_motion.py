"""Where a reader asks for less motion, nothing moves by itself."""

#: What runs, or would run when something changes.
MOVES = """() => {
  const moves = document.getAnimations().map((a) => a.animationName ?? a.transitionProperty);
  for (const element of document.querySelectorAll("*"))
    for (const pseudo of [null, "::before", "::after"]) {
      const style = getComputedStyle(element, pseudo);
      if (style.scrollBehavior === "smooth" || style.animationName !== "none"
        || style.transitionDuration.split(", ").some((time) => parseFloat(time) > 0))
        moves.push(`${element.localName}.${element.className}${pseudo ?? ""}`);
    }
  return [...new Set(moves)];
}"""
#: Scrolling that a script asks for.
SMOOTH = """
  globalThis.smooth = [];
  for (const [owner, name] of [
    [window, "scrollTo"], [window, "scroll"], [window, "scrollBy"],
    [Element.prototype, "scrollTo"], [Element.prototype, "scrollBy"],
    [Element.prototype, "scrollIntoView"], [Element.prototype, "animate"],
  ]) {
    const original = owner[name];
    owner[name] = function (...values) {
      const asked = values.some((value) => value?.behavior === "smooth");
      if (asked || name === "animate") smooth.push(name);
      return original.apply(this, values);
    };
  }
"""


def one_of_each_kind(pages) -> list[str]:
    """Every page that is written by hand or has a figure, one of the rest."""
    kinds = ("annotated/source/", "api/", "reproduce/")
    single = {next(p for p in pages if p.startswith(kind)) for kind in kinds}
    return [p for p in pages if p in single or not p.startswith(kinds)]


def test_nothing_moves_by_itself(look, pages):
    """On load, and after every button of a figure is pressed."""
    tab = look("index.html", reduced_motion="reduce")
    tab.add_init_script(SMOOTH)
    base = tab.url.removesuffix("index.html")
    wrong, pressed = {}, 0
    for page in one_of_each_kind(pages):
        tab.goto(base + page, wait_until="load")
        moves = tab.evaluate(MOVES)
        for button in tab.locator("article figure button:visible").all():
            if button.is_visible() and button.is_enabled():
                button.click()
                pressed += 1
                moves += tab.evaluate("document.getAnimations().length") * ["pressed"]
        moves += tab.evaluate("globalThis.smooth")
        if moves:
            wrong[page] = moves
    assert wrong == {}
    assert pressed > 10


def test_motion_is_what_is_left_out(look):
    """Without that wish, the same page has some: else nothing was tested."""
    assert look("index.html").evaluate(MOVES)
