"""What the theme leaves to be mended in the HTML that it makes."""

MEND = {
    # It would ask the host of the repository for stars and forks: the site
    # makes no request to anybody else.
    ' data-md-component="source"': "",
    # A dialog needs a name for who does not see it.
    'data-md-component="search" role="dialog"': 'data-md-component="search" '
    'role="dialog" aria-label="Search"',
}


def on_post_page(output, page, config):
    return _mended(output)


def on_post_template(output, template_name, config):
    return _mended(output)


def _mended(html: str) -> str:
    for wrong, right in MEND.items():
        html = html.replace(wrong, right)
    return html
