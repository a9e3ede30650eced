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
    # Its links begin at the root of a host, and so fit one address only.
    # Hosts have a page of their own for what is not there.
    return "" if template_name == "404.html" else _mended(output)


def _mended(html: str) -> str:
    for wrong, right in MEND.items():
        html = html.replace(wrong, right)
    return html
