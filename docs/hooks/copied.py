"""Give each code block an id of its own.

The theme's copy button copies the first element with an id, which it takes from the
nearest id around the code: in a box with two blocks, both buttons would copy the first.
"""

import re
from itertools import count

#: A code block without an id. Blocks with line numbers have other HTML.
CODE = re.compile(r"<pre(?![^>]* id=)(?=[^>]*>(?:<span></span>)?<code)")


def on_post_page(output, page, config):
    number = count(1)
    return CODE.sub(lambda found: f'{found[0]} id="code-{next(number)}"', output)
