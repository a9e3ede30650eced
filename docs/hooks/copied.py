"""Give each piece of code its own id.

The theme's button copies the first element of an id, which is made from the nearest
id around the code: two pieces in one such box, both buttons would copy the first.
"""

import re
from itertools import count

#: A piece of code without an id; code with line numbers has another form.
CODE = re.compile(r"<pre(?![^>]* id=)(?=[^>]*>(?:<span></span>)?<code)")


def on_post_page(output, page, config):
    number = count(1)
    return CODE.sub(lambda found: f'{found[0]} id="code-{next(number)}"', output)
