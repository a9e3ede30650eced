"""Test that typical tasks of readers lead to the right page.

No task takes more than three clicks, including groups in the menu.
"""

import re

import pytest
from playwright.sync_api import expect

#: Tasks: a name, the first page, the links to click, the last page, and text on it.
TASKS = """
learn from the beginning; index.html > Start the course > 0. Start here
    => notebooks/00_start_here.html: a memory that is a matrix
load Qwen3-Next; index.html > Code > Published models => published.html: hf.patch()
run a notebook in Colab; index.html > Colab => run.html#colab: Upload notebook
run this one in Colab; notebooks/04_delta_rule.html > Help => run.html: Upload notebook
see how fast it is on a GPU; index.html > Evidence > Speed
    => results/speed.html: On a GPU
the same from the first page; index.html > GPU speed
    => results/speed.html: flash-linear-attention
read the delta rule beside its equations; index.html > Read the code
    => annotated/delta.html: Naive: The delta rule
look up a symbol; annotated/delta.html > Help > Notation and glossary
    => notation.html: Symbol
compare the rules of today; index.html > Learn > One equation, ten rules
    => rules.html: Kimi
see an exercise; course.html > Exercises > delta_step
    => notebooks/04_delta_rule.html#delta_step: Return the memory after one step
play; index.html > Play > Who forgets? => figures/forgets.html: The five memories
find what failed; index.html > Evidence => results.html: What failed
cite it; index.html > BibTeX entry => references.html#cite: @software{fwlab
"""
TASKS = re.findall(r"(?s)^(\w.*?); (.*?)\s+=> (\S+): (.*?)$", TASKS, re.M)


@pytest.mark.parametrize(("way", "goal", "words"), [task[1:] for task in TASKS])
def test_task(look, way, goal, words):
    start, *presses = way.split(" > ")
    tab = look(start)
    for name in presses:
        links = tab.get_by_role("link", name=name).filter(visible=True)
        links.first.click()
        tab.wait_for_load_state()
    assert tab.url.endswith(f"/{goal}")
    expect(tab.locator("article").get_by_text(words).first).to_be_visible()


def test_five_ways_in(look):
    """Every page has five sections in the menu, and a path above its title."""
    for page in ("index.html", "annotated/delta.html", "results/speed.html"):
        tabs = look(page).locator(".md-tabs__link")
        wanted = ["Learn", "Play", "Code", "Evidence", "Help"]
        assert [text.strip() for text in tabs.all_inner_texts()] == wanted
    path = look("kernels/delta.html").locator(".md-path__link")
    assert [text.strip() for text in path.all_inner_texts()] == [
        *("Home", "Code", "GPU kernels")
    ]
