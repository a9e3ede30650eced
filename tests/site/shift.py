"""Measure the cumulative layout shift (CLS) of a page on a phone.

The first screen of the page may move while the page loads over slow 4G.
"""

PHONE = {"viewport": {"width": 390, "height": 844}, "is_mobile": True}
#: Slow 4G: throughputs in bytes per second, latency in milliseconds.
SLOW_4G = {"downloadThroughput": 200_000, "uploadThroughput": 94_000, "latency": 150}
#: JavaScript that adds up all layout shifts since the page began to load.
WATCH = """globalThis.shifted = 0;
new PerformanceObserver((list) => {
  for (const each of list.getEntries())
    if (!each.hadRecentInput) shifted += each.value;
}).observe({ type: "layout-shift", buffered: true });"""


def shift(browser, url: str, html: str = "") -> float:
    """Return the cumulative layout shift of a page, or of `html` served at its URL."""
    context = browser.new_context(**PHONE)
    if html:
        answer = {"body": html, "content_type": "text/html"}
        context.route(url, lambda route: route.fulfill(**answer))
    tab = context.new_page()
    session = context.new_cdp_session(tab)
    session.send("Network.enable")
    session.send("Network.emulateNetworkConditions", SLOW_4G | {"offline": False})
    tab.add_init_script(WATCH)
    assert tab.goto(url, timeout=120_000).ok
    tab.wait_for_function("document.fonts.status === 'loaded'", timeout=120_000)
    tab.wait_for_timeout(2500)
    shifted = tab.evaluate("shifted")
    context.close()
    return shifted
